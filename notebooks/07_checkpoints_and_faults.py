# %% [markdown]
# # 7. Checkpoints and faults
#
# *45 minutes. Read [notebook 6](06_fsdp.ipynb) first, for sharded parameters.*
#
# A training run that takes weeks is interrupted many times before it finishes. Disks fill up, memory loses a bit, or a
# rank hangs and all other ranks wait for it. We test four claims: **a checkpoint is written atomically; a checkpoint
# that was damaged on the disk is detected and not loaded; any number of ranks can load a checkpoint; a job that hangs
# exits and reports the rank at fault.**
#
# First you read the contents of a sharded checkpoint. Then you break things on purpose, with PyTorch's checkpoint
# writer alone and with the protocol of this repository: a flipped bit, a rank that is killed during a save, a copy that
# is taken too early, and a rank that hangs. Keep `nanoGPT/checkpoint/directory.py`, `nanoGPT/checkpoint/manifest.py`
# and `phase3_fsdp/sharded_checkpoint.py` open next to this notebook. No GPU is needed.

# %%
import dataclasses
import tempfile
from pathlib import Path

import torch

from nanoGPT.checkpoint.manifest import DamagedCheckpoint, read_manifest, serialize_manifest, verify_files
from nanoGPT.observers import add_flags
from phase3_fsdp.fsdp import FsdpConfig
from phase3_fsdp.train import train
from workshop.lessons import checkpoint_pictures
from workshop.lessons.checkpoints import check_index, list_chunks, load_with_dcp, read_index, select_chunks
from workshop.ranks import losses, run_on_ranks

# %% [markdown]
# The runs are small, and save at every evaluation. Tables and pictures come from `workshop/lessons/checkpoints.py` and
# `checkpoint_pictures.py`.

# %%
folder = tempfile.TemporaryDirectory()  # every run of this notebook writes here; removed when the kernel exits

config = add_flags(FsdpConfig, "operate")(  # with the flags of the watchdog
    device="cpu",
    block_size=32,  # T, tokens per sequence
    batch_size=2,  # B, sequences per micro-batch
    gradient_accumulation_steps=8,  # micro-batches per step, summed over all ranks
    n_layer=2, n_head=2, n_embd=64, dropout=0.2,
    max_iters=4, eval_interval=2, eval_iters=2, log_interval=1,
    learning_rate=2e-3, min_lr=2e-4, warmup_iters=2, lr_decay_iters=8,
    always_save_checkpoint=True,  # at every evaluation
)

# %%
def new_directory() -> Path:
    return Path(tempfile.mkdtemp(dir=folder.name))


def train_on(ranks: int, **changes) -> Path:
    """Train on this number of ranks in `out_dir` (default: a new directory), and return the directory of the run."""
    out_dir = changes.pop("out_dir", None) or new_directory()
    run_on_ranks(train, ranks, dataclasses.replace(config, out_dir=str(out_dir), **changes), show=False)
    return Path(out_dir)

# %% [markdown]
# ## a. The contents of a sharded checkpoint
#
# You will find the bytes of a weight in the files of a checkpoint, without PyTorch's reader.
#
# Four ranks train four steps with FSDP and save after the second and the fourth step. Each rank stores a quarter of
# every parameter and of AdamW's two moments. No rank stores a full parameter.
#
# **Predict first:** how many files does a checkpoint contain, and which rank writes which file? The model has P
# parameters: about how many bytes does each rank write?

# %%
run = train_on(4)
saved = run / "checkpoints" / "step-00000004"

P = sum(shape.numel() for key, (shape, _) in read_index(saved).items() if key.startswith("model."))
for path in sorted(run.glob("checkpoints/*")):
    print(path.name)
print(f"\n{saved.name}, with P = {P:,} parameters; 12 P / 4 = {3 * P:,} bytes")
for path in sorted(saved.iterdir()):
    print(f"    {path.name:14} {path.stat().st_size:9,} bytes")

sizes = {path.name: path.stat().st_size for path in saved.glob("*.distcp")}
assert set(sizes) == {f"__{rank}_0.distcp" for rank in range(4)}
assert all(1.2 < size / (3 * P) < 1.26 for size in sizes.values())

# %% [markdown]
# Each rank writes one `.distcp` file with its quarter of 12 bytes per parameter: 4 bytes for the weight, and 8 bytes
# for the two moments. The files are about 24% larger than that, because `torch.save` adds a header to each tensor. In a
# large model this overhead is negligible.
#
# `.metadata` is the *index*. It contains the shape of every tensor. For each saved part of a tensor, it also contains
# the file name and the byte range. PyTorch's distributed checkpoint (DCP) calls such a part a *chunk*.
#
# You can read the index yourself. **Predict first:** the token embedding `wte` has 75 rows. How are they partitioned
# over 4 ranks?

# %% answer="read_chunk"
import io


def read_chunk(checkpoint: Path, chunk: dict) -> torch.Tensor:
    """Read one chunk without DCP: its byte range contains a tensor that was written by torch.save."""
    with open(checkpoint / chunk["file"], "rb") as file:
        file.seek(chunk["begin"])
        return torch.load(io.BytesIO(file.read(chunk["end"] - chunk["begin"])), weights_only=True)


# %%
WTE, C_FC = "model.transformer.wte.weight", "model.transformer.h.0.mlp.c_fc.weight"
chunks, index = list_chunks(saved), read_index(saved)
for key in (WTE, C_FC):
    print(f"{key}, {tuple(index[key][0])}")
    for chunk in select_chunks(chunks, key):
        first, last = chunk["first"][0], chunk["first"][0] + chunk["size"][0] - 1
        print(f"    rows {first:3} to {last:3}: {chunk['file']}, bytes {chunk['begin']:,} to {chunk['end']:,}")
print("total:", len(chunks), "chunks of", len(index), "tensors")
assert [chunk["size"][0] for chunk in select_chunks(chunks, WTE)] == [19, 19, 19, 18]
check_index(saved)  # the chunks of a tensor contain each element once, and no two chunks share a byte

# %% [markdown]
# The ranks store rows 0 to 18, 19 to 37, 38 to 56 and 57 to 74, so the last rank has only 18 rows. AdamW's step counts
# are scalars that every rank stores. Each of them is written only once.
#
# The next figure shows the index. On the left are four tensors, partitioned into the chunks of the ranks. On the right
# are the four files, from the first byte to the last. The chunks of `c_fc` are hatched in both parts.

# %%
names = ("wte", "h.0.attn.c_attn", "h.0.mlp.c_fc", "h.0.mlp.c_proj")
checkpoint_pictures.draw_index(saved, names, hatched="h.0.mlp.c_fc")

# %% [markdown]
# With the index you can read any tensor without PyTorch's reader. Below we assemble `c_fc` from the four files, and
# compare it with the result of `dcp.load`.

# %%
state = load_with_dcp(saved)
assembled = torch.cat([read_chunk(saved, chunk) for chunk in select_chunks(chunks, C_FC)])
print("assembled from the chunks:", tuple(assembled.shape), " equal to dcp.load:", torch.equal(assembled, state[C_FC]))
assert torch.equal(assembled, state[C_FC])

# %% [markdown]
# The last file, `manifest.json`, is not part of DCP: this repository adds it. It describes the checkpoint, and contains
# the size and the SHA-256 of every file. Its last entry is its own SHA-256.
#
# **Predict first:** if you change the step in the manifest from 4 to 5, is the change detected?

# %%
from nanoGPT.files import sha256_of

manifest = read_manifest(saved)
print(f"trainer: {manifest['phase']}")
for name in ("step", "world_size", "versions", "model_args"):
    print(f"{name}: {manifest[name]}")
for file in manifest["files"]:
    print(f"file {file['name']:14} {file['size']:9,} bytes  SHA-256 {file['sha256'][:16]}...")
    assert sha256_of(saved / file["name"]) == file["sha256"]
print(f"SHA-256 of the manifest: {manifest['sha256'][:16]}...")

# %% [markdown]
# Now change the step in a copy:

# %%
import shutil

damaged = new_directory() / "checkpoint"
shutil.copytree(saved, damaged)
(damaged / "manifest.json").write_text(serialize_manifest(manifest).replace('"step": 4', '"step": 5'))
try:
    reason = None
    read_manifest(damaged)
except DamagedCheckpoint as error:
    reason = str(error)
print("with another step:", reason)
assert reason == "its manifest.json is damaged: it was changed after it was written"

# %% [markdown]
# Yes, it is detected: the SHA-256 covers every other entry of the manifest. This protects against accidents. It does
# not protect against an attacker, who can compute a new SHA-256.
#
# ## b. A flipped bit
#
# You will see what one wrong bit does to a model, and how a resume handles a damaged checkpoint.
#
# Memory, disks and cables sometimes change a bit. We flip one bit in the file of rank 1: the highest bit of the
# exponent of one number of `c_fc`.
#
# **Predict first:** does `dcp.load` report an error? And what is the new value of a number near 0.01?

# %% answer="flip_bit"
def flip_bit(checkpoint: Path, key: str) -> int:
    """Flip the highest exponent bit of the first number of rank 1's chunk, and return the position of its byte."""
    chunk = select_chunks(list_chunks(checkpoint), key)[1]
    path, numbers = checkpoint / chunk["file"], read_chunk(checkpoint, chunk).numpy().tobytes()
    content = bytearray(path.read_bytes())
    position = content.find(numbers, chunk["begin"]) + 3  # little endian: the fourth byte has sign and exponent
    content[position] ^= 0b0100_0000
    path.write_bytes(content)
    return position


# %%
from workshop.lessons.checkpoints import find_difference

shutil.copyfile(saved / "manifest.json", damaged / "manifest.json")  # restore the right manifest
position = flip_bit(damaged, C_FC)
damaged_state = load_with_dcp(damaged)
key, row, column = find_difference(state, damaged_state)  # one element of one tensor
print(f"byte {position:,} of __1_0.distcp is changed, and dcp.load reports no error")
print(f"{key}[{row}, {column}] was {state[key][row, column]:.6f} and is now {damaged_state[key][row, column]:.3e}")
assert (row, column) == (64, 0) and damaged_state[key][row, column].abs() > 1e30

# %% [markdown]
# The manifest has the hash of the file as it was written:

# %%
try:
    reason = None
    verify_files(damaged, read_manifest(damaged))
except DamagedCheckpoint as error:
    reason = str(error)
print("verify_files:", reason)
assert reason == "the hash of __1_0.distcp differs from the one in the manifest"

# %% [markdown]
# The file does have a checksum. A `.distcp` file stores each tensor as a record of a zip archive, with a CRC-32, and
# Python's `zipfile` finds the damaged record. But torch is built so that it does not check the CRC-32 when it loads, and
# reports no error.
#
# **Predict first:** what is the loss of the model that was loaded? And what is the loss if we flip one of the 23 bits
# of the number's fraction instead?

# %%
from nanoGPT.dataset import TokenData
from nanoGPT.model import GPT, GPTConfig


def evaluate_loss(state: dict[str, torch.Tensor]) -> float:
    """Return the loss of these weights on one micro-batch of the validation data."""
    model = GPT(GPTConfig.from_dict(manifest["model_args"])).eval()
    weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})
    data = TokenData(config)
    with torch.no_grad():
        return model(*data.batch("val", 0, 0)).item()


# %%
import math

fraction_state = {key: value.clone() for key, value in state.items()}
fraction_state[C_FC].view(torch.int32)[row, column] ^= 1 << 22  # the highest bit of the fraction
number = fraction_state[C_FC][row, column]
print(f"loss of the saved weights:                 {evaluate_loss(state):.6f}")
print(f"loss with the flipped bit of the exponent: {evaluate_loss(damaged_state)}")
print(f"loss with the flipped bit of the fraction: {evaluate_loss(fraction_state):.6f} (the number is {number:.6f})")
assert not math.isfinite(evaluate_loss(damaged_state))
assert 0 < abs(evaluate_loss(fraction_state) - evaluate_loss(state)) < 1e-3

# %% [markdown]
# The exponent bit is detected as soon as training continues, because the trainer stops when the loss is not finite
# (exit code 3). Without a checksum, the fraction bit is never detected.
#
# A resume should also not fail because the newest checkpoint is damaged. Below we flip the exponent bit in the newest
# checkpoint of the run, and resume the run.
#
# **Predict first:** from which step does the run continue? What happens to the damaged directory?

# %%
from workshop.lessons.checkpoints import capture_output

damaged_run = new_directory() / "damaged"
shutil.copytree(run, damaged_run)
flip_bit(damaged_run / "checkpoints" / saved.name, C_FC)
resume_config = dataclasses.replace(config, out_dir=str(damaged_run), init_from="resume")
lines = capture_output(folder.name, train, 4, resume_config)
for line in lines:
    if "skipping" in line or "resuming" in line:
        print(line.replace(damaged_run.parent.name + "/", ""))
print(*sorted(path.name for path in damaged_run.glob("checkpoints/*")))
print("losses identical to those of the first run, in every digit:", losses(damaged_run) == losses(run))
assert any("resuming after 2 updates" in line for line in lines) and losses(damaged_run) == losses(run)

# %% [markdown]
# The trainer prints the name of the damaged checkpoint and the reason, and renames it, so that step 4 can be saved
# again. The resumed run trained two steps again, with the same losses.
#
# ## c. Overwriting in place
#
# You will see why a script must not save into the same directory twice.
#
# `dcp.save` allows this, and overwrites existing files by default. Here two ranks do it. When they save for the first
# time, every number of their model is 1. When they save for the second time, every number is 2, so the value of a
# number shows from which save it comes. During the second save rank 1 is killed (SIGKILL) just before it opens its
# file.
#
# **Predict first:** can the checkpoint still be loaded? Which numbers does it contain?

# %%
import warnings

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bench.checkpoints.fault_points import Saver, kill_before
from phase3_fsdp.sharded_checkpoint import training_state


def overwrite_and_die(out_dir: str) -> None:
    """Save twice into one directory with PyTorch's writer alone; rank 1 is killed in the second save."""
    warnings.simplefilter("ignore")
    saver = Saver(out_dir, is_async=False)  # a small model, sharded on two ranks
    state = training_state(saver.model, saver.optimizer)
    for number in (1, 2):
        for tensor in state.values():
            tensor.fill_(number)
        if number == 2 and dist.get_rank() == 1:
            dcp.FileSystemWriter.write_data = kill_before(dcp.FileSystemWriter.write_data)  # SIGKILL at this call
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(f"{out_dir}/torch"))


# %%
from workshop.lessons.checkpoints import list_distinct_numbers, run_until_killed

overwritten = new_directory() / "torch"
run_until_killed(1, overwrite_and_die, str(overwritten.parent))
mixed_state = load_with_dcp(overwritten)
print("dcp.load succeeds, and the checkpoint contains the numbers", list_distinct_numbers(mixed_state))
print("rows of h.0.mlp.c_fc:", *[f"{int(row.unique())}" for row in mixed_state[C_FC]])
assert list_distinct_numbers(mixed_state) == [1, 2]

title = "Overwritten in place: chunks of the first save (gray) and of the second save (red)"
checkpoint_pictures.draw_saves(overwritten, lambda chunk: int(read_chunk(overwritten, chunk).max()), title, C_FC)

# %% [markdown]
# Half of the weights are from one step and half from another, and no error is reported. The new file of rank 0 has the
# same size and layout as the old file, so the old index still matches it. With real weights you would get a model that
# is slightly worse than before, from a run that seemed to resume without a problem.
#
# Now we kill rank 1 at the same moment, but with the protocol of this repository. A save writes into a new directory
# `.tmp-...`, hashes and flushes the files, writes the manifest last, and then renames the directory. `save_and_die`
# saves steps 1 and 2, and the kill comes in step 3. Every number equals its step.

# %%
from bench.checkpoints.fault_points import save_and_die
from workshop.lessons.checkpoints import print_directory

out_dir = new_directory()
run_until_killed(1, save_and_die, str(out_dir), "before it opens a file", 1, False)
print_directory(out_dir / "checkpoints")
step_2 = out_dir / "checkpoints" / "step-00000002"
verify_files(step_2, read_manifest(step_2))
print("step 2 is complete, and contains the numbers", list_distinct_numbers(load_with_dcp(step_2)))
assert list_distinct_numbers(load_with_dcp(step_2)) == [2]
assert not (out_dir / "checkpoints" / "step-00000003").exists()

# %% [markdown]
# The incomplete checkpoint has another name, and a resume ignores it. The save did not change the old checkpoints.
#
# ## d. A kill at every point of a save
#
# You will kill a save at four different points, and check which step can be loaded afterwards.
#
# The kill *before the file is opened* is only one of many possible moments. `bench/checkpoints/fault_points.py` defines
# ten, and at each of them a rank kills itself while it saves step 3. Here we use four of them. After each kill, two new
# ranks load the newest complete checkpoint. They check that every number in it equals its step, and save once more.
#
# **Predict first:** for each of the four kills, what is in the directory afterwards, and which step is loaded?
#
# 1. rank 1, in the middle of its file;
# 2. rank 0, when all files are written, before it writes the manifest;
# 3. rank 0, when the manifest is written, before the rename;
# 4. rank 0, after the rename, before it replaces `LATEST`.

# %%
from bench.checkpoints.fault_points import load_and_save

KILLS = {  # the rank to kill, by the moment
    "while it writes a file": 1, "before it writes the manifest": 0,
    "before the final rename": 0, "before it replaces LATEST": 0,
}
loaded_steps = {}
for point, victim in KILLS.items():
    out_dir = new_directory()
    run_until_killed(victim, save_and_die, str(out_dir), point, victim, False)
    print(f"rank {victim} killed {point}:")
    print_directory(out_dir / "checkpoints")
    loaded_steps[point] = max(run_on_ranks(load_and_save, 2, str(out_dir), show=False))
    print(f"    -> step {loaded_steps[point]} is loaded")
    assert not list((out_dir / "checkpoints").glob(".tmp-*")), "the next save should remove temporary directories"
assert list(loaded_steps.values()) == [2, 2, 2, 3]

# %% [markdown]
# (The size of a file that was being written depends on how much Python and the operating system had written before the
# kill.)
#
# In the third case step 3 is complete, to the last byte. Only the final rename is missing, so the checkpoint does not
# count. In the fourth case the directory is renamed and the checkpoint counts, although `LATEST` still contains the
# name of step 2. `LATEST` is only for people and scripts. A resume reads the directories and their manifests.
#
# So one operation decides whether a checkpoint counts: the rename, which the file system performs atomically. A killed
# run loses only the steps since its last checkpoint.

# %%
checkpoint_pictures.draw_stages(loaded_steps)

# %% [markdown]
# `make bench NAME=torture` kills a rank at all ten points, in synchronous and in asynchronous saves. It then kills at 500 random
# moments.
#
# ## e. Save on eight ranks, load on two
#
# You will resume a run on a different number of ranks, and see which files each rank reads.
#
# After a failure you may get a different number of GPUs. The index describes tensors and rows, and not ranks, so any
# number of ranks can read a checkpoint.
#
# **Predict first:** with 8 ranks, each rank has 10 of the 75 rows of `wte`, except the last. Which rows does rank 0 of
# 2 need? From how many files must it read them?
#
# Below, 8 ranks train 8 steps and save after steps 4 and 8. We copy the run and remove the newest checkpoint from the
# copy, as if the run had been killed before step 8 was saved. In this copy, 2 ranks resume.

# %%
from workshop.lessons.checkpoints import list_reads


def train_and_list_reads(config: FsdpConfig) -> dict[str, list[str]]:
    """Train, and return for each tensor the files from which the calling rank read chunks."""
    files = list_reads()
    train(config)
    return files


eight_ranks = train_on(8, max_iters=8, eval_interval=4)
two_ranks = new_directory() / "two"
shutil.copytree(eight_ranks, two_ranks)
shutil.rmtree(two_ranks / "checkpoints" / "step-00000008")
resume_config = dataclasses.replace(config, out_dir=str(two_ranks), init_from="resume", max_iters=8, eval_interval=4)
files_read = run_on_ranks(train_and_list_reads, 2, resume_config, show=False)

# %%
by_eight = select_chunks(list_chunks(eight_ranks / "checkpoints" / "step-00000004"), WTE)
by_two = select_chunks(list_chunks(two_ranks / "checkpoints" / "step-00000008"), WTE)
for name, wte_chunks in (("8 ranks", by_eight), ("2 ranks", by_two)):
    print(f"{name}: first rows", [c["first"][0] for c in wte_chunks], "row counts", [c["size"][0] for c in wte_chunks])
for rank in range(2):
    print(f"rank {rank} of 2 read wte from", ", ".join(sorted(files_read[rank][WTE])))
assert sorted(files_read[0][WTE]) == checkpoint_pictures.FILES and len(files_read[1][WTE]) == 5

# %% [markdown]
# Rank 0 reads from four files, and from the fourth file only a part: it needs rows 30 to 37, and rank 1 needs rows 38
# and 39. No rank stores the full tensor at any time.
#
# **Predict first:** what is the max loss difference of the two runs from step 4 on?

# %%
from workshop.lessons.loss_curves import print_two_curves

resumed_curve, uninterrupted_curve = losses(two_ranks), losses(eight_ranks)
difference = print_two_curves(resumed_curve, uninterrupted_curve, resumed_at=4, ranks_before=8, ranks_after=2)
assert difference < 1e-5

# %% [markdown]
# The difference is rounding: 2 ranks compute sums in a different order than 8 ranks.
#
# ## f. Asynchronous saves
#
# You will measure for how long a save stops the training, and see why an asynchronous save must sometimes wait.
#
# During a synchronous save, training stops until the last byte is on the disk. With `--async_save=True`, a rank copies
# its shards to a separate buffer and continues training. A background thread writes the copy. The protocol is the same:
# the directory is renamed when all ranks have written their files.
#
# A real disk writes our small model almost instantly. Here **the disk is slowed down on purpose**, by a pause of 0.06
# seconds at the end of each file. All other times are real. We show rank 0, which writes two files: its shards and the
# index.
#
# **Predict first:** the synchronous save stops the training three times, for at least 0.12 seconds each. For how long
# does the asynchronous save stop it? And what happens if the disk is so slow that a save is still running when the next
# one begins?

# %%
from workshop.lessons.checkpoints import check_saves, count_overlapped_steps, record_saves, select_spans, slow_down_disk


def train_and_record(config: FsdpConfig, seconds: float) -> list[tuple[str, float, float]]:
    """Train with a slow disk, and return (kind, begin, end) of each step, stop for a save, copy and write."""
    events = record_saves()
    slow_down_disk(seconds)
    train(config)
    return events


# %%
SAVE_MODES = {"synchronous": (False, 0.06), "asynchronous": (True, 0.06), "asynchronous, slower disk": (True, 1.0)}
long_run = {"max_iters": 18, "eval_interval": 6, "gradient_accumulation_steps": 2, "warmup_iters": 2}
timelines = {}
for name, (async_save, seconds) in SAVE_MODES.items():
    save_config = dataclasses.replace(config, out_dir=str(new_directory()), async_save=async_save, **long_run)
    events = timelines[name] = run_on_ranks(train_and_record, 2, save_config, seconds, show=False)[0]
    stops = ", ".join(f"{1e3 * (end - begin):.0f}" for begin, end in select_spans(events, "stop"))
    print(f"{name:26} stopped for {stops} ms; {count_overlapped_steps(events)} steps overlapped with writes")
check_saves(timelines)  # also that each copy waits until the save before it is written

# %%
checkpoint_pictures.draw_timelines(timelines)

# %% [markdown]
# An asynchronous save stops the training for the copy. Only one save runs at a time: if a save begins while the one
# before it is still being written, the training also waits for its end. This wait is longest on the slower disk. (The
# gaps without a color are evaluations. At the end of a run, the trainer waits for the last save.)
#
# ### Why the copy must wait
#
# All saves use the same buffer for the copy, because allocating a new one each time is slow, especially pinned memory
# for a GPU. If a rank copied too early, it would overwrite numbers that the background thread is still writing to the
# disk. `AsyncSaver.begin_save` first waits until the previous save is written. `AsyncSaver.copy_to_cpu` does not wait.
# To show the damage, we pause while the files of step 1 are partly written, set all numbers to 2, and call
# `copy_to_cpu`.
#
# **Predict first:** which numbers does `step-00000001` then contain? Does it pass the check against its manifest?

# %%
import threading

from nanoGPT.checkpoint.manifest import HashedFile


def pause_write(partly_written: threading.Event, may_continue: threading.Event) -> None:
    """Let the first write beyond 40,000 bytes of a file wait until `may_continue` is set."""
    write = HashedFile.write

    def write_with_pause(file: HashedFile, data: object) -> int:
        if file.tell() > 40_000 and not partly_written.is_set():
            partly_written.set()
            may_continue.wait()
        return write(file, data)

    HashedFile.write = write_with_pause


# %%
def copy_during_save(out_dir: str, waits: bool) -> None:
    """Save step 1 asynchronously; during its writes set all numbers to 2 and copy them, with or without waiting."""
    saver, partly_written, may_continue = Saver(out_dir, is_async=True), threading.Event(), threading.Event()
    pause_write(partly_written, may_continue)
    saver.save(1)  # returns when the copy is taken
    partly_written.wait()
    if waits:
        threading.Timer(0.2, may_continue.set).start()
        saver.save(2)  # sets all numbers to 2, waits until step 1 is written, then copies
    else:
        for tensor in training_state(saver.model, saver.optimizer).values():
            tensor.detach().fill_(2)
        saver.async_saver.copy_to_cpu()  # the bug: step 1 is still being written
        may_continue.set()
    saver.wait_for_save()


# %%
for waits in (True, False):
    out_dir = new_directory()
    run_on_ranks(copy_during_save, 2, str(out_dir), waits, show=False)
    checkpoint = out_dir / "checkpoints" / "step-00000001"
    verify_files(checkpoint, read_manifest(checkpoint))
    numbers = list_distinct_numbers(load_with_dcp(checkpoint))
    method = "save, which waits" if waits else "copy, too early"
    print(f"{method:17}: step 1 matches its manifest, and contains the numbers", numbers)
    assert numbers == ([1] if waits else [1, 2])

title = "step-00000001 with a copy that is too early: numbers of step 1 (gray) and of step 2 (red)"
checkpoint_pictures.draw_saves(checkpoint, lambda chunk: int(read_chunk(checkpoint, chunk).max()), title, C_FC)

# %% [markdown]
# The damaged checkpoint passes the check! A hash only proves that you read what was written. It cannot detect that the
# wrong data was written. For this reason the tests set every number to its step, and check every number after a load.
#
# ## g. A rank that hangs
#
# You will let one rank hang, and see how the job finds the rank at fault and exits.
#
# The last fault produces no error message. If a rank hangs, for example in a network file system or in a lock, all
# other ranks wait for it in their next collective. The job then occupies its nodes until somebody notices.
#
# Each rank therefore writes its progress to `heartbeat/rank{r}.json` every second, and reads the progress of the other
# ranks. If no rank makes progress for `stall_seconds` (here 4, by default 300), every rank writes its stacks and exits.
# Below, rank 1 hangs in step 2 while it reads a batch.
#
# **Predict first:** neither rank makes progress. How can you tell which rank is at fault? At which line does rank 0
# wait?

# %%
import sys
import time


def train_with_hang(config: FsdpConfig) -> None:
    """Train; rank 1 hangs when it reads a batch of step 2."""
    sys.stderr, read_batch = sys.stdout, TokenData.batch

    def batch(self, split, step, micro_batch):
        if (split, step, dist.get_rank()) == ("train", 2, 1):
            time.sleep(1000)
        return read_batch(self, split, step, micro_batch)

    TokenData.batch = batch
    train(config)


# %%
from nanoGPT.errors import STALLED
from workshop.lessons.checkpoints import run_until_exit, shorten_paths

hung_run = new_directory()
begin = time.monotonic()
exit_codes = run_until_exit(60, train_with_hang, dataclasses.replace(config, out_dir=str(hung_run), stall_seconds=4.0))
print(f"the ranks exited after {time.monotonic() - begin:.0f} s, with exit codes {exit_codes}")
assert exit_codes == [STALLED, STALLED]

# %% [markdown]
# The error message and the last heartbeat of each rank:

# %%
import json

[message] = [path.read_text() for path in hung_run.glob("stacks/stalled-*.txt")]
message = shorten_paths(message, folder.name).replace(hung_run.name + "/", "").strip()
print("error:", message)
for rank in range(2):
    heartbeat = json.loads((hung_run / "heartbeat" / f"rank{rank}.json").read_text())
    print(f"last heartbeat of rank {rank}:", {name: heartbeat[name] for name in ("step", "stage", "stages_entered", "waits")})
assert message.startswith("rank 1 has made no progress for") and "ranks waited for it" in message

# %% [markdown]
# The rank at fault is the rank that has made the least progress. Progress is the `step`, and then `stages_entered`, a
# count of the stages that all ranks enter in the same order. Several ranks can have made the least progress. Then the
# rank at fault is one of them that does not wait for others. Here both ranks have entered the same number of stages.
# Rank 0 waits in a collective, and rank 1 does not.
#
# The stacks show where the bug is.

# %%
from workshop.lessons.checkpoints import read_main_thread

stacks = [read_main_thread(hung_run, rank, folder.name) for rank in range(2)]
for rank, frames in enumerate(stacks):
    last = next(number for number, frame in enumerate(frames) if frame.startswith("phase3_fsdp/train.py"))
    print(f"stacks/rank{rank}.txt:")
    print(*[f"    {frame}" for frame in frames[: last + 1]], sep="\n")

assert stacks[1][0].endswith(", batch")
assert stacks[0][0].startswith("distributed/distributed_c10d.py") and "unshard" in " ".join(stacks[0])

# %% [markdown]
# Rank 1 sleeps in `batch`. Rank 0 calls an all-gather for the parameters of a block, and rank 1 does not take part in
# it.
#
# With `torchrun --max-restarts=3`, or in a queue that restarts the job, training now continues automatically from the
# newest checkpoint. Sections (a) to (e) showed that this is safe.
#
# ## To take home
#
# 1. Each rank writes its shards into a separate file. The index records where each chunk is.
# 2. PyTorch does not check the checksums in its sharded files: a flipped bit loads without an error. The SHA-256 in the
#    manifest detects it.
# 3. Do not overwrite a checkpoint in place. A kill can leave a mix of two steps, which loads without an error.
# 4. Write into a temporary directory, write the manifest last, then rename. The rename decides whether the checkpoint
#    counts.
# 5. A killed run loses only the steps since its last checkpoint.
# 6. Any number of ranks can load a checkpoint, and a rank reads only the rows that it needs.
# 7. An asynchronous save stops the training only for the copy, or until the previous save has ended.
# 8. A hash proves that you read what was written. It does not prove that the right data was written.
# 9. A hang raises no error. The rank at fault has made the least progress, and its stack shows the line.
#
# ## Exercises
#
# `make exercise N=checkpoints.1` and the exercises after it let you write parts of this chapter again: atomic files,
# verification, publication and errors on all ranks. `make check N=checkpoints.1` runs your code on real
# ranks and explains what is wrong. In `make exercise N=capstone` you fix four faults of a trainer, until its loss curve
# is right again. `docs/exercises.md` lists all of them.
#
# **1. Killed in the middle of a file.** In (c) rank 1 was killed before it opened its file. Now kill it in the middle
# of the file, again with PyTorch's writer alone and in the same directory. Predict first: can the checkpoint be loaded
# now? Which of the two kills is worse?
#
# <details><summary>Hint</summary>
#
# PyTorch's writer calls `torch.save` once per tensor, so let rank 1 be killed at call 30 in the second save:
#
# ```python
# import itertools
#
# def die_in_the_file(out_dir):
#     warnings.simplefilter("ignore")
#     saver, calls = Saver(out_dir, is_async=False), itertools.count()
#     for number in (1, 2):
#         state = training_state(saver.model, saver.optimizer)
#         for tensor in state.values():
#             tensor.detach().fill_(number)
#         if number == 2 and dist.get_rank() == 1:
#             torch.save = kill_before(torch.save, lambda *_: next(calls) == 30)
#         dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(f"{out_dir}/torch"))
#
# out_dir = new_directory()
# run_until_killed(1, die_in_the_file, str(out_dir))
# load_with_dcp(out_dir / "torch")
# ```
#
# It cannot be loaded: `load_with_dcp` raises an error, because the index refers to bytes beyond the end of the file.
# Opening the file for the second save truncated it, and the kill came before the file was complete. This fault is
# detected, but it destroyed the only checkpoint, so both saves are lost. The other kill seems harmless at first, but a
# resumed run continues with wrong weights and no error.
#
# </details>
#
# **2. How often to save?** A save stops the training for C seconds, and on average a failure occurs every M seconds.
# Predict first: what fraction of the time is lost if you save every T seconds? Which T is best? How much do you gain
# from an asynchronous save, if its C is 30 times smaller?
#
# <details><summary>Hint</summary>
#
# The stops cost C/T of the time. A failure costs half of an interval on average, T/2 every M seconds. The sum C/T +
# T/2M has its minimum at T = sqrt(2CM) (Young 1974), and the minimum is sqrt(2C/M):
#
# ```python
# M = 12 * 3600
# for C in (60, 2):
#     T = (2 * C * M) ** 0.5
#     print(f"C = {C:2} s: save every {T / 60:.0f} minutes, {C / T + T / (2 * M):.1%} of the time is lost")
# ```
#
# If C is 30 times smaller, the loss is smaller by a factor of sqrt(30) = 5.5, and you save more often by the same
# factor. But T cannot be smaller than the duration of an asynchronous save. With a smaller T the next save waits, as on
# the slower disk in (f).
#
# </details>
#
# **3. A stopped process.** In (g) a thread of rank 1 still wrote heartbeats while its main thread was asleep. Now stop
# the complete process with SIGSTOP. Predict first: how is this detected? What are the exit codes, and is there a file
# with the stacks of rank 1?
#
# <details><summary>Hint</summary>
#
# ```python
# import os
# import signal
#
# def train_stopped(config):
#     sys.stderr, read_batch = sys.stdout, TokenData.batch
#
#     def batch(self, split, purpose, step, micro_batch):
#         if (split, step, dist.get_rank()) == ("train", 2, 1):
#             os.kill(os.getpid(), signal.SIGSTOP)
#         return read_batch(self, split, step, micro_batch)
#
#     TokenData.batch = batch
#     train(config)
#
# hung_run = new_directory()
# stopped = dataclasses.replace(config, out_dir=str(hung_run), stall_seconds=4.0)
# print(run_until_exit(60, train_stopped, stopped))
# print([shorten_paths(path.read_text(), folder.name) for path in hung_run.glob("stacks/stalled-*.txt")])
# print(*read_main_thread(hung_run, 1, folder.name), sep="\n")
# ```
#
# Rank 0 notices that the heartbeats of rank 1 no longer change. It asks the operating system for the state of the
# process, and the message reports "the process is stopped". The step in the message comes from the last heartbeat,
# which can be up to one second old.
#
# Rank 0 then sends SIGQUIT and SIGCONT to rank 1, so that faulthandler writes the stacks even if the Python interpreter
# cannot run. After two seconds it sends SIGKILL. The exit codes are 4 and -9. They are 4 and 4 if rank 1 continues
# after SIGCONT and exits before the SIGKILL.
#
# </details>
