# %% [markdown]
# # 5. Checkpoints and faults
#
# A run that takes weeks is killed many times before it ends. Disks fill up, memory loses a bit, a rank hangs and all
# others wait for it. The claims to test: **a checkpoint is there whole or not at all, one that was damaged is refused,
# any number of ranks opens it, and a job that hangs ends and says who is at fault.**
#
# First we take a sharded checkpoint apart. Then we break things on purpose, with torch's writer alone and with the
# protocol of this repository around it: a flipped bit, ranks that die in the middle of a save, a save that races with
# the training beside it, a rank that falls asleep. Have `nanoGPT/checkpoint/directory.py`, `nanoGPT/checkpoint/manifest.py` and
# `phase3_fsdp/sharded_checkpoint.py` open beside this page. No GPU is needed.

# %%
import contextlib
import dataclasses
import io
import json
import math
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from bench.checkpoints.fault_points import Saver, before, end, open_and_save, save_and_die
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.dataset import EVALUATE, TokenData
from nanoGPT.files import sha256_of
from nanoGPT.errors import STALLED
from nanoGPT.metrics.ledger import Ledger
from nanoGPT.checkpoint.manifest import Damaged, read_manifest, seal, verify_files
from nanoGPT.checkpoint.writer import HashedFile
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.checkpoint.shards import SafeReader, read_index
from phase3_fsdp.fsdp import FsdpConfig
from phase3_fsdp.sharded_checkpoint import ShardWriter, training_state
from phase3_fsdp.train import train
from workshop.ranks import losses, run_on_ranks, start_ranks

folder = tempfile.TemporaryDirectory()  # every run of this notebook writes here; it goes when the kernel ends

config = FsdpConfig(
    device="cpu",
    block_size=32,  # T, tokens per sequence
    batch_size=2,  # B, sequences per micro-batch
    gradient_accumulation_steps=8,  # micro-batches per step, of all ranks together
    n_layer=2,
    n_head=2,
    n_embd=64,
    dropout=0.2,
    max_iters=4,
    warmup_iters=2,
    lr_decay_iters=8,
    eval_interval=2,
    eval_iters=2,
    log_interval=1,
    always_save_checkpoint=True,  # at every evaluation
)


def new_directory() -> Path:
    return Path(tempfile.mkdtemp(dir=folder.name))


def train_on(ranks: int, **changes) -> Path:
    """Train on so many ranks, in a new directory unless one is given; where the run wrote."""
    out_dir = changes.pop("out_dir", None) or new_directory()
    run_on_ranks(train, ranks, dataclasses.replace(config, out_dir=str(out_dir), **changes), show=False)
    return Path(out_dir)


# %% [markdown]
# ## a. What is in a sharded checkpoint
#
# Four ranks train four steps with FSDP and save after the second and the fourth. Each rank holds a quarter of every
# parameter and of AdamW's two moments, and nobody ever holds the whole.
#
# **Predict first:** how many files are there, and who writes which? The model has P parameters; about how many bytes
# does each rank write?

# %%
four = train_on(4)
saved = four / "checkpoints" / "step-00000004"

P = sum(shape.numel() for key, (shape, _) in read_index(saved).items() if key.startswith("model."))
for path in sorted(four.glob("checkpoints/*")):
    print(path.name)
print(f"\n{saved.name}, of P = {P:,} parameters; 12 P / 4 = {3 * P:,} bytes")
for path in sorted(saved.iterdir()):
    print(f"    {path.name:14} {path.stat().st_size:9,} bytes")

sizes = {path.name: path.stat().st_size for path in saved.glob("*.distcp")}
assert set(sizes) == {f"__{rank}_0.distcp" for rank in range(4)}
assert all(1.2 < size / (3 * P) < 1.26 for size in sizes.values())

# %% [markdown]
# One `.distcp` a rank, which holds its quarter of 12 bytes a parameter: 4 of the weight, 8 of the moments. (The rest is
# what torch writes around each tensor, and in a model of this size that is much.) `.metadata` is the *index*: for every
# tensor its shape, and for every slice of it the file and the bytes where it lies.
#
# The index can be read by hand. **Predict first:** `wte`, the token embedding, has 75 rows. How are they cut among 4
# ranks?

# %%
def pieces(checkpoint: Path) -> list[dict]:
    """Every slice of every tensor: its place in the tensor, and its place on the disk."""
    index = SafeReader(checkpoint).read_metadata()
    sizes = {(key, c.offsets): c.sizes for key, t in index.state_dict_metadata.items() for c in t.chunks}
    return [
        {
            "key": entry.fqn, "first": tuple(entry.offset), "size": tuple(sizes[entry.fqn, entry.offset]),
            "file": place.relative_path, "begin": place.offset, "end": place.offset + place.length,
        }
        for entry, place in index.storage_data.items()
    ]  # fmt: skip


def read_piece(checkpoint: Path, piece: dict) -> torch.Tensor:
    """One slice, without DCP: the bytes that the index names are what torch.save wrote."""
    with open(checkpoint / piece["file"], "rb") as file:
        file.seek(piece["begin"])
        return torch.load(io.BytesIO(file.read(piece["end"] - piece["begin"])), weights_only=True)


def of(checkpoint: Path, key: str) -> list[dict]:
    return sorted((p for p in pieces(checkpoint) if p["key"] == key), key=lambda p: p["first"])


WTE, C_FC = "model.transformer.wte.weight", "model.transformer.h.0.mlp.c_fc.weight"
for key in (WTE, C_FC):
    print(f"{key}, {tuple(read_index(saved)[key][0])}")
    for piece in of(saved, key):
        first, last = piece["first"][0], piece["first"][0] + piece["size"][0] - 1
        print(f"    rows {first:3} to {last:3}: {piece['file']}, bytes {piece['begin']:,} to {piece['end']:,}")
print("in all", len(pieces(saved)), "slices of", len(read_index(saved)), "tensors")

assert [piece["size"][0] for piece in of(saved, WTE)] == [19, 19, 19, 18]
for key, (shape, _) in read_index(saved).items():  # each element lies in one place, and no two slices share a byte
    assert sum(torch.Size(piece["size"]).numel() for piece in of(saved, key)) == shape.numel()
for file in {piece["file"] for piece in pieces(saved)}:
    spans = sorted((piece["begin"], piece["end"]) for piece in pieces(saved) if piece["file"] == file)
    assert all(left[1] <= right[0] for left, right in zip(spans, spans[1:]))

# %% [markdown]
# Rows 0 to 18, 19 to 37, 38 to 56 and 57 to 74: the last rank has 18. AdamW's counts of steps are single numbers, which
# all ranks hold; each is written once.
#
# The picture shows the index: on the left four tensors, cut into the slices of the ranks; on the right the four files
# from their first byte to their last. The slices of `c_fc` are hatched in both.

# %%
COLORS = ("#8ecae6", "#ffd166", "#f4978e", "#a7c957")
FILES = [f"__{rank}_0.distcp" for rank in range(4)]


def draw_tensor(axes: plt.Axes, checkpoint: Path, key: str) -> None:
    """A tensor's rows from top to bottom, in the color of the rank that wrote them."""
    (rows, columns), slices = read_index(checkpoint)[key][0], of(checkpoint, key)
    for piece in slices:
        place = ((0, piece["first"][0]), columns, piece["size"][0])
        color, hatch = COLORS[FILES.index(piece["file"])], "////" if key == C_FC else ""
        axes.add_patch(Rectangle(*place, facecolor=color, edgecolor="black", linewidth=0.8, hatch=hatch))
    axes.set(xlim=(0, columns), ylim=(rows, 0), xticks=[0, columns], yticks=[p["first"][0] for p in slices])
    axes.set_title(key.removeprefix("model.transformer.").removesuffix(".weight"), fontsize=8)
    axes.tick_params(labelsize=7, length=2)


def draw_files(axes: plt.Axes, checkpoint: Path, color) -> None:
    """The files of all ranks, every slice where it lies, in the color that `color(piece)` gives."""
    names = sorted({piece["file"] for piece in pieces(checkpoint)})
    for piece in pieces(checkpoint):
        place = ((piece["begin"], names.index(piece["file"])), piece["end"] - piece["begin"], 0.8)
        hatch = "////" if piece["key"] == C_FC else ""
        axes.add_patch(Rectangle(*place, facecolor=color(piece), edgecolor="black", linewidth=0.3, hatch=hatch))
    axes.set(xlim=(0, max(p["end"] for p in pieces(checkpoint))), ylim=(len(names), -0.2), xlabel="byte")
    axes.set_yticks([row + 0.4 for row in range(len(names))], names)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right", "left"]].set_visible(False)


figure, grid = plt.subplots(1, 5, figsize=(11, 3.4), width_ratios=(1, 1, 1, 1, 6))
names = ("wte", "h.0.attn.c_attn", "h.0.mlp.c_fc", "h.0.mlp.c_proj")
for axes, name in zip(grid, names):
    draw_tensor(axes, saved, f"model.transformer.{name}.weight")
draw_files(grid[4], saved, lambda piece: COLORS[FILES.index(piece["file"])])
grid[4].set_title("weights first, then moments, then counts of steps", fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# So nobody needs torch's reader to find a tensor. Here `c_fc` is put together from four files by hand, and compared
# with what `dcp.load` gives.

# %%
def open_by_torch(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor whole, read by one process with torch's own reader, which knows nothing of manifests."""
    state = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in read_index(checkpoint).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return state


opened = open_by_torch(saved)
by_hand = torch.cat([read_piece(saved, piece) for piece in of(saved, C_FC)])
print("by hand:", tuple(by_hand.shape), " the same as by torch:", torch.equal(by_hand, opened[C_FC]))
assert torch.equal(by_hand, opened[C_FC])

# %% [markdown]
# The last file, `manifest.json`, is ours. It says what the checkpoint is of, and proves that it holds: the size and
# sha256 of every file, and at last its own sha256.
#
# **Predict first:** can you change the step in the manifest from 4 to 5, and nobody notices?

# %%
manifest = read_manifest(saved)
for name in ("phase", "step", "world_size", "versions", "model_args"):
    print(f"{name}: {manifest[name]}")
for file in manifest["files"]:
    print(f"file {file['name']:14} {file['size']:9,} bytes  sha256 {file['sha256'][:16]}...")
    assert sha256_of(saved / file["name"]) == file["sha256"]
print(f"its own sha256 {manifest['sha256'][:16]}...")

damaged = new_directory() / "checkpoint"
shutil.copytree(saved, damaged)
(damaged / "manifest.json").write_text(seal(manifest).replace('"step": 4', '"step": 5'))
try:
    refused = None
    read_manifest(damaged)
except Damaged as reason:
    refused = str(reason)
print("with another step:", refused)
assert refused == "its manifest.json was changed after it was written"

# %% [markdown]
# No: what is hashed is all of the manifest but the hash. This guards against accidents, not against somebody who wants
# to deceive you, and who would seal it anew.
#
# ## b. A flipped bit
#
# Memory loses bits now and then, and so do disks and cables. We flip one bit in the file of rank 1: the highest of the
# exponent of one number of `c_fc`.
#
# **Predict first:** what does `dcp.load` say? And what becomes of a number near 0.01?

# %%
def flip_a_bit(checkpoint: Path, key: str) -> int:
    """Flip the highest exponent bit of the first number of rank 1's slice; where in the file that is."""
    piece = of(checkpoint, key)[1]
    path, numbers = checkpoint / piece["file"], read_piece(checkpoint, piece).numpy().tobytes()
    content = bytearray(path.read_bytes())
    position = content.find(numbers, piece["begin"]) + 3  # little endian: sign and exponent are in the fourth byte
    content[position] ^= 0b0100_0000
    path.write_bytes(content)
    return position


shutil.copyfile(saved / "manifest.json", damaged / "manifest.json")  # the right one again
position = flip_a_bit(damaged, C_FC)
wrong = open_by_torch(damaged)
differ = {key: (wrong[key] != opened[key]).nonzero() for key in opened if not torch.equal(wrong[key], opened[key])}
[(key, [place])] = differ.items()  # one number of one tensor
row, column = place.tolist()
print(f"byte {position:,} of __1_0.distcp was changed, and torch loads it without a word:")
print(f"{key}[{row}, {column}] was {opened[key][row, column]:.6f} and is {wrong[key][row, column]:.3e}")
assert (row, column) == (64, 0) and wrong[key][row, column].abs() > 1e30

try:
    refused = None
    verify_files(damaged, read_manifest(damaged))
except Damaged as reason:
    refused = str(reason)
print("verify_files:", refused)
assert refused == "the sha256 of __1_0.distcp differs from the manifest's"

# %% [markdown]
# Nothing is said: torch opens its sharded files without a checksum. **Predict first:** what is the loss of the model
# that was loaded? And what would it be had one of the 23 bits of the number's fraction flipped?

# %%
def loss_of(state: dict[str, torch.Tensor]) -> float:
    """The loss of these weights on one micro-batch of the validation data."""
    model = GPT(GPTConfig.of(manifest["model_args"])).eval()
    weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})
    data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    with torch.no_grad():
        return model(*data.batch("val", EVALUATE, 0, 0))[1].item()


slightly = {key: value.clone() for key, value in opened.items()}
slightly[C_FC].view(torch.int32)[row, column] ^= 1 << 22  # the highest bit of the fraction
print(f"the loss was {loss_of(opened):.6f}; with the bit of the exponent it is {loss_of(wrong)}")
print(f"with the bit of the fraction (now {slightly[C_FC][row, column]:.6f}) it is {loss_of(slightly):.6f}")
assert not math.isfinite(loss_of(wrong))
assert 0 < abs(loss_of(slightly) - loss_of(opened)) < 1e-3

# %% [markdown]
# The first bit is found out at once, since the trainer stops at a loss that is not finite (exit code 3). Of the second
# nobody ever hears.
#
# A resume must not stop at a damaged checkpoint, either. Below, the bit of the newest checkpoint of the run is flipped,
# and the run is resumed.
#
# **Predict first:** at which step does it go on? What becomes of the damaged directory?

# %%
def said_by(function, *args, **kwargs) -> list[str]:
    """The lines that ranks print, without their absolute paths."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_on_ranks(function, *args, **kwargs)
    return said.getvalue().replace(folder.name + "/", "").splitlines()


hurt = new_directory() / "hurt"
shutil.copytree(four, hurt)
flip_a_bit(hurt / "checkpoints" / saved.name, C_FC)
resume = dataclasses.replace(config, out_dir=str(hurt), init_from="resume")
said = said_by(train, 4, resume)
for line in said:
    if "skipping" in line or "resuming" in line:
        print(line.replace(hurt.parent.name + "/", ""))
print(*sorted(path.name for path in hurt.glob("checkpoints/*")))
print("losses the same as before, to the last digit:", losses(hurt) == losses(four))
assert any("resuming after 2 updates" in line for line in said) and losses(hurt) == losses(four)

# %% [markdown]
# It is named, with the reason, and set aside, so that step 4 can be saved again. Two steps were lost and trained once
# more, with the same losses.
#
# ## c. Overwriting in place
#
# A script often saves into one directory, again and again; `dcp.save` allows it and overwrites by default. Two ranks do
# so here. Every number of their model is 1 when they save for the first time, and 2 when they save for the second: a
# number tells of which save it is. In the second save rank 1 dies (SIGKILL) just before it opens its file.
#
# **Predict first:** does the directory still open? What is in it?

# %%
def overwrite_and_die(out_dir: str) -> None:
    """Save twice into one directory with torch's writer alone; rank 1 dies in the second save."""
    warnings.simplefilter("ignore")
    saver = Saver(out_dir, in_background=False)  # a small model, sharded on two ranks
    state = training_state(saver.model, saver.optimizer)
    for number in (1, 2):
        for tensor in state.values():
            tensor.fill_(number)
        if number == 2 and dist.get_rank() == 1:
            dcp.FileSystemWriter.write_data = before(dcp.FileSystemWriter.write_data)  # dies at the call
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(f"{out_dir}/torch"))


def run_to_death(victim: int, function, *args) -> None:
    """Start two ranks and wait until the victim has killed itself; the other then ends, or is ended."""
    with tempfile.TemporaryDirectory() as meeting:
        started = start_ranks(function, 2, *args, folder=meeting)
        for process, _ in started:
            process.join(20)
        code = started[victim][0].exitcode
        end(started)
    assert code == -signal.SIGKILL, code


def numbers_in(tensors: dict[str, torch.Tensor]) -> list[int]:
    return sorted({int(number) for tensor in tensors.values() for number in tensor.unique()})


place = new_directory()
run_to_death(1, overwrite_and_die, str(place))
mixed = open_by_torch(place / "torch")
print("it opens, and holds the numbers", numbers_in(mixed))
print("the rows of h.0.mlp.c_fc:", *[f"{int(row.unique())}" for row in mixed[C_FC]])
assert numbers_in(mixed) == [1, 2]

figure, axes = plt.subplots(figsize=(9, 1.7))
draw_files(axes, place / "torch", lambda p: {1: "#eeeeee", 2: "#d1495b"}[int(read_piece(place / "torch", p).max())])
axes.set_title("Overwritten in place: of which save the slices are (gray: the first, red: the second)", fontsize=9)
figure.tight_layout()
plt.show()

# %% [markdown]
# Half of the weights are of one step and half of the other, and nothing says so: the new file of rank 0 has just the
# size and layout of the old one, so the old index fits it. With real weights you would get a model that is a little
# worse than it was, from a run that "resumed without problems".
#
# Now the same death at the same moment, under the protocol: save into a new directory `.tmp-...`, hash, flush,
# manifest last, rename. `save_and_die` saves steps 1 and 2, and dies in step 3; every number is that of its step.

# %%
def show(root: Path) -> None:
    """What is in a checkpoint directory."""
    for path in sorted(root.iterdir()):
        if path.is_dir():
            files = ", ".join(f"{file.name} {file.stat().st_size:,}" for file in sorted(path.iterdir()))
            print(f"    {path.name + '/':20} {files or '(empty)'}")
        else:
            print(f"    {path.name:20} says {path.read_text().strip()}")


place = new_directory()
run_to_death(1, save_and_die, str(place), "before its files", 1, False)
show(place / "checkpoints")
old = place / "checkpoints" / "step-00000002"
verify_files(old, read_manifest(old))
print("step 2 is whole, and holds the numbers", numbers_in(open_by_torch(old)))
assert numbers_in(open_by_torch(old)) == [2]
assert not (place / "checkpoints" / "step-00000003").exists()

# %% [markdown]
# What is half-written has another name, and no resume looks at it. The old checkpoints were never touched.
#
# ## d. Killed at every point
#
# Dying *before its file* is one moment of many. `bench/checkpoints/fault_points.py` has ten; at each a rank kills itself while it
# saves step 3. Here are four. After each death two new ranks open the newest checkpoint that is whole, check that
# every number in it is of its step, and save once more.
#
# **Predict first:** for each of the four, what is in the directory, and which step opens?
#
# 1. rank 1, in the middle of its file;
# 2. rank 0, all files written, before the manifest;
# 3. rank 0, manifest written, before the rename;
# 4. rank 0, after the rename, before `LATEST` is replaced.

# %%
POINTS = [("in a file", 1), ("before the manifest", 0), ("before the rename", 0), ("before LATEST", 0)]
outcome = {}
for point, victim in POINTS:
    place = new_directory()
    run_to_death(victim, save_and_die, str(place), point, victim, False)
    print(f"rank {victim} killed {point}:")
    show(place / "checkpoints")
    outcome[point] = max(run_on_ranks(open_and_save, 2, str(place), show=False))
    print(f"    -> step {outcome[point]} opens")
    assert not list((place / "checkpoints").glob(".tmp-*")), "the next save has cleaned up"

assert outcome == {"in a file": 2, "before the manifest": 2, "before the rename": 2, "before LATEST": 3}

# %% [markdown]
# (What is in a file depends on what Python and the system had passed on when the process died.)
#
# In the third case all of step 3 is there, to the last byte, and it does not count: a name is what it lacks. In the
# fourth it has one and counts, although `LATEST` still names step 2. `LATEST` is for people; a resume looks at the
# directories and at their manifests.
#
# So there is one instant that decides, the rename, which a file system carries out whole or not at all. All that can be
# lost is what was trained since the last save.

# %%
ACTS = ["make .tmp-", "files, hashed", "flush", "manifest", "flush", "rename", "LATEST", "delete old ones"]
KILLS = {"in a file": 1.5, "before the manifest": 3.0, "before the rename": 5.0, "before LATEST": 6.0}

figure, axes = plt.subplots(figsize=(10, 2.1))
for number, act in enumerate(ACTS):
    axes.add_patch(Rectangle((number, 0), 1, 1, facecolor="#eeeeee" if number < 5 else "#a7c957", edgecolor="black"))
    axes.text(number + 0.5, 0.5, act, ha="center", va="center", fontsize=9)
for point, x in KILLS.items():
    axes.annotate(f"killed\n{point}:\nstep {outcome[point]} opens", (x, 1), (x, 1.6), ha="center", fontsize=8,
                  arrowprops={"arrowstyle": "->", "color": "#d1495b"})  # fmt: skip
axes.set(xlim=(-0.1, len(ACTS) + 0.1), ylim=(-0.1, 2.7))
axes.axis("off")
figure.tight_layout()
plt.show()

# %% [markdown]
# `make torture` does this at all ten points, in the foreground and in the background, then kills at 500 random moments
# and flips 200 bits.
#
# ## e. Eight ranks save, two ranks open
#
# The machine that comes back is not always the one that failed. Since the index speaks of tensors and rows, and not of
# ranks, any number of them can read it.
#
# **Predict first:** of `wte`'s 75 rows each of 8 ranks has 10, but the last. Which rows has rank 0 of 2? Out of how
# many files must it read?
#
# Below, 8 ranks train 8 steps and save after 4 and 8. Of the copy the newest checkpoint is removed, as if they had been
# killed before it; there 2 ranks go on.

# %%
def train_and_note(config: FsdpConfig) -> dict[str, list[str]]:
    """Train; the files out of which this rank read slices of each tensor."""
    read, data = {}, dcp.FileSystemReader.read_data

    def noted(self, plan, planner):
        for item in plan.items:
            read.setdefault(item.dest_index.fqn, []).append(self.storage_data[item.storage_index].relative_path)
        return data(self, plan, planner)

    dcp.FileSystemReader.read_data = noted
    train(config)
    return read


eight = train_on(8, max_iters=8, eval_interval=4)
two = new_directory() / "two"
shutil.copytree(eight, two)
shutil.rmtree(two / "checkpoints" / "step-00000008")
resumed = dataclasses.replace(config, out_dir=str(two), init_from="resume", max_iters=8, eval_interval=4)
read = run_on_ranks(train_and_note, 2, resumed, show=False)

by_eight, by_two = (of(run / "checkpoints" / f"step-0000000{step}", WTE) for run, step in ((eight, 4), (two, 8)))
for name, cut in (("8 ranks", by_eight), ("2 ranks", by_two)):
    print(f"{name}: rows from", [piece["first"][0] for piece in cut], "so many:", [piece["size"][0] for piece in cut])
for rank in range(2):
    print(f"rank {rank} of 2 read wte out of", ", ".join(sorted(read[rank][WTE])))
assert sorted(read[0][WTE]) == FILES and len(read[1][WTE]) == 5

figure, axes = plt.subplots(figsize=(9, 1.6))
for y, cut, colors in ((0, by_eight, ["#eeeeee"] * 8), (1, by_two, COLORS)):
    for rank, piece in enumerate(cut):
        place = (piece["first"][0], y), piece["size"][0], 0.8
        axes.add_patch(Rectangle(*place, facecolor=colors[rank], edgecolor="black"))
        axes.text(place[0][0] + place[1] / 2, y + 0.4, f"rank {rank}", ha="center", va="center", fontsize=8)
axes.axvline(by_two[1]["first"][0], color="black", linestyle=":")
axes.set(xlim=(0, 75), ylim=(1.9, -0.1), xlabel="row of wte")
axes.set_yticks([0.4, 1.4], ["saved by 8", "opened by 2"])
axes.spines[["top", "right", "left"]].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# Out of four files, and of the fourth a part: rows 30 to 37 are rank 0's, rows 38 and 39 are rank 1's. Nobody holds the
# whole tensor in between.
#
# **Predict first:** how far apart are the losses from step 4 on?

# %%
on_two, on_eight = losses(two), losses(eight)
print("step   8 ranks, then 2   8 ranks")
for step in on_eight:
    note = "  <- 2 ranks from here on" if step == 4 else ""
    print(f"{step:4} {on_two[step]:17.8f} {on_eight[step]:11.8f}{note}")
gap = max(abs(on_two[step] - on_eight[step]) for step in on_eight)
print(f"largest difference: {gap:.1e}")
assert all(on_two[step] == on_eight[step] for step in range(4)) and gap < 1e-5 and len(on_eight) == 8

# %% [markdown]
# As always between two and eight ranks: sums are made in another order, and no more.
#
# ## f. Saving in the background
#
# In the foreground training stands still until the last byte is on the disk. With `--async_save=True` a rank copies its
# shards into other memory, goes on training, and a thread writes the copy. The protocol is the same: the rename comes
# when all ranks have written.
#
# This machine's disk has such a small model written at once, so here **the disk is slowed down on purpose**, by a pause
# of 0.06 seconds at the end of each file. Rank 0, which we look at, writes two files, its shards and the index.
# Otherwise times are real.
#
# **Predict first:** in the foreground training is stopped three times, for 0.12 seconds and a little. For how long in
# the background? And what if the disk is so slow that a save has not ended when the next one begins?

# %%
def slow_disk(seconds: float) -> None:
    """Let the flush of each file take so long."""
    close = HashedFile.close

    def slow(file: HashedFile) -> None:
        time.sleep(0 if file.file.closed else seconds)  # torch's writer closes twice
        close(file)

    HashedFile.close = slow


def watched(config: FsdpConfig, seconds: float) -> list[tuple[str, float, float]]:
    """Train with a slow disk; what happened from when to when: steps, stops for a save, copies, writing."""
    events = []

    @contextlib.contextmanager
    def noted(what):
        begin = time.perf_counter()
        yield
        events.append((what, begin, time.perf_counter()))

    def wrap(owner, name: str, what: str) -> None:
        method = getattr(owner, name)

        def wrapped(*args, **kwargs):
            with noted(what):
                return method(*args, **kwargs)

        setattr(owner, name, wrapped)

    wrap(CheckpointDirectory, "save", "stop")
    wrap(ShardWriter, "copy", "copy")
    wrap(ShardWriter, "write", "write")
    Ledger.watch = lambda self, step: noted("step")  # it is around each step; nothing else is to be counted here
    slow_disk(seconds)
    train(config)
    return events


SLOW = {"foreground": (False, 0.06), "background": (True, 0.06), "background, a slower disk": (True, 0.5)}
long = {"max_iters": 30, "eval_interval": 10, "gradient_accumulation_steps": 2, "warmup_iters": 2}
timelines = {}
for name, (in_background, seconds) in SLOW.items():
    changed = dataclasses.replace(config, out_dir=str(new_directory()), async_save=in_background, **long)
    timelines[name] = run_on_ranks(watched, 2, changed, seconds, show=False)[0]


def spans(name: str, what: str) -> list[tuple[float, float]]:
    return [(begin, end) for kind, begin, end in timelines[name] if kind == what]


def overlap(name: str) -> int:
    """The steps during which a file was written."""
    written = spans(name, "write")
    return sum(any(begin < w_end and w_begin < end for w_begin, w_end in written) for begin, end in spans(name, "step"))


for name in SLOW:
    stops = ", ".join(f"{1e3 * (end - begin):.0f}" for begin, end in spans(name, "stop"))
    print(f"{name:26} stopped for {stops} ms; {overlap(name)} steps beside the writing")

assert overlap("foreground") == 0 and all(end - begin >= 0.12 for begin, end in spans("foreground", "stop"))
assert overlap("background") > 0
shortest = {name: min(end - begin for begin, end in spans(name, "stop")) for name in SLOW}
assert shortest["background"] < shortest["foreground"]
for name in ("background", "background, a slower disk"):
    for (_, written), (copied, _) in zip(spans(name, "write"), spans(name, "copy")[1:]):
        assert copied > written  # a copy has waited for the writing of the one before

# %%
def draw_training(axes: plt.Axes, name: str) -> None:
    """Two lanes: what the training does, and what the disk does."""
    zero = spans(name, "step")[0][0]

    def bars(what: str, lane: int, color: str, **look) -> None:
        boxes = [(begin - zero, end - begin) for begin, end in spans(name, what)]
        axes.broken_barh(boxes, (lane, 0.8), facecolor=color, **look)

    bars("step", 0, "#9ad1d4", edgecolor="white", linewidth=0.5)
    bars("stop", 0, "#d1495b")
    bars("copy", 0, "#edae49", edgecolor="#edae49", linewidth=1.5)
    bars("write", 1, "#5b3758")
    axes.set(ylim=(1.9, -0.1), yticks=[0.4, 1.4], yticklabels=["training", "disk"])
    axes.set_title(name, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


figure, grid = plt.subplots(3, 1, figsize=(10, 4.6), sharex=True)
for axes, name in zip(grid, SLOW):
    draw_training(axes, name)
grid[2].set_xlabel("seconds since the first step, rank 0 of 2 (disk slowed down on purpose)")
kinds = {"#9ad1d4": "a step", "#d1495b": "stopped for a save", "#edae49": "copying", "#5b3758": "writing"}
handles = [Rectangle((0, 0), 1, 1, facecolor=color) for color in kinds]
figure.legend(handles, kinds.values(), loc="upper center", ncols=4, frameon=False, fontsize=8)
figure.tight_layout(rect=(0, 0, 1, 0.95))
plt.show()

# %% [markdown]
# In the background what is left of a stop is the copy; the first one also has to get the memory for it. On the slower
# disk the next save comes while the one before is still being written, and the training waits: no more than one save
# is ever under way. (Gaps without a color are evaluations. At the end of a run the last save is waited for.)
#
# ### Why the copy must wait
#
# The copy lies in memory that is kept from save to save: to take new memory each time is slow, above all where it has
# to be pinned for a GPU. So a copy that is taken too early writes over the numbers which the thread is just writing to
# the disk. `CheckpointDirectory.save` waits first. `ShardWriter.copy` by itself does not: we call it when half of each
# file of step 1 is written, and all numbers have become 2.
#
# **Predict first:** which numbers are in `step-00000001`? Does its manifest hold?

# %%
def race(out_dir: str, waits: bool) -> None:
    """Save step 1 in the background; half-way the numbers become 2 and are copied, too early or when it is time."""
    saver = Saver(out_dir, in_background=True)
    half, go_on, write = threading.Event(), threading.Event(), HashedFile.write

    def pausing(file: HashedFile, data: object) -> int:
        if file.tell() > 40_000 and not half.is_set():
            half.set()
            go_on.wait()
        return write(file, data)

    HashedFile.write = pausing
    saver.save(1)  # returns when the copy is taken
    half.wait()
    if waits:
        threading.Timer(0.2, go_on.set).start()
        saver.save(2)  # fills all tensors with 2, waits for step 1, then copies
    else:
        for tensor in training_state(saver.model, saver.optimizer).values():
            tensor.detach().fill_(2)
        saver.shards.copy()  # the bug: step 1 is still being written
        go_on.set()
    saver.box.drain()


raced = {}
for waits in (False, True):
    place = new_directory()
    run_on_ranks(race, 2, str(place), waits, show=False)
    raced[waits] = place / "checkpoints" / "step-00000001"
    verify_files(raced[waits], read_manifest(raced[waits]))
    held = numbers_in(open_by_torch(raced[waits]))
    print(f"{'with save, which waits' if waits else 'with copy, too early':22}: step 1 verifies, and holds", held)
    assert held == ([1] if waits else [1, 2])

figure, axes = plt.subplots(figsize=(9, 1.7))
draw_files(axes, raced[False], lambda p: {1: "#eeeeee", 2: "#d1495b"}[int(read_piece(raced[False], p).max())])
axes.set_title("step-00000001, after a copy too early: gray numbers are of step 1, red ones of step 2", fontsize=9)
figure.tight_layout()
plt.show()

# %% [markdown]
# It verifies! A hash proves that what is read is what was written. It cannot know that something wrong was written.
# This is why the tests fill every tensor with its step and look at every number.
#
# ## g. A rank that hangs
#
# The last fault makes no noise at all. A rank that does not come back, from a network file system or a lock, keeps all
# others waiting in their next collective, and the job holds its machines until somebody looks.
#
# So each rank writes down every second how far it has come (`heartbeat/rank{r}.json`), and reads what the others wrote.
# If nobody comes any further for `stall_seconds` (here 4, by default 300), every rank writes its stacks and ends.
# Below, rank 1 falls asleep in step 2 while it reads a batch.
#
# **Predict first:** both ranks stand still. How can one tell who is at fault? Where does rank 0 stand?

# %%
def train_asleep(config: FsdpConfig) -> None:
    """Train; rank 1 does not come back from reading a batch of step 2."""
    sys.stderr, read = sys.stdout, TokenData.batch

    def batch(self, split, purpose, step, micro_batch):
        if (split, step, dist.get_rank()) == ("train", 2, 1):
            time.sleep(1000)
        return read(self, split, purpose, step, micro_batch)

    TokenData.batch = batch
    train(config)


def shortened(text: str) -> str:
    """Without absolute paths: two parts of a file's name; what is defined on this page is of no file."""
    text = re.sub(r"[^\s\"(]*ipykernel_\d+/\d+\.py", "this notebook", text.replace(folder.name + "/", ""))
    return re.sub(r"/[^\"]*/([^/\"]+/[^/\"]+\.py)", r"\1", text)


def run_until_it_ends(out_dir: Path, function) -> list[int]:
    """Two ranks train with a patience of 4 seconds; their exit codes."""
    patient = dataclasses.replace(config, out_dir=str(out_dir), stall_seconds=4.0)
    with tempfile.TemporaryDirectory() as meeting:
        started = start_ranks(function, 2, patient, folder=meeting)
        for process, _ in started:
            process.join(60)
        codes = [process.exitcode for process, _ in started]
        end(started)
    return codes


hung = new_directory()
begin = time.monotonic()
codes = run_until_it_ends(hung, train_asleep)
print(f"ended after {time.monotonic() - begin:.0f} s, with exit codes {codes}")
[sentence] = [path.read_text() for path in hung.glob("stacks/stalled-*.txt")]
print("error:", shortened(sentence).replace(hung.name + "/", "").strip())
for rank in range(2):
    beat = json.loads((hung / "heartbeat" / f"rank{rank}.json").read_text())
    print(f"rank {rank} last told:", {name: beat[name] for name in ("step", "stage", "places", "waits")})
assert codes == [STALLED, STALLED]
assert re.match(r"rank 1 has been silent for \d+ s in step 2, ", sentence) and "the others waited for it" in sentence

# %% [markdown]
# The rank at fault is the one that has come least far (`step`, then `places`, which counts the places that all ranks
# pass in the same order), and of several such one that does not wait for others. Rank 0 has come to the same place: it
# waits in a collective, and rank 1 does not.
#
# What to mend is in the stacks.

# %%
def main_thread(rank: int) -> list[str]:
    """Where a rank's main thread was, innermost first; without what torch wraps around its functions."""
    text = shortened((hung / "stacks" / f"rank{rank}.txt").read_text())
    thread = next(part for part in text.split("hread 0x") if "phase3_fsdp/train.py" in part)
    frames = re.findall(r'File "(.*)", line (\d+) in (\w+)', thread)
    wrappers = ("wrapper", "decorate_context", "inner", "_fn", "_call_impl", "_wrapped_call_impl", "__call__")
    return [f"{file}:{line}, {name}" for file, line, name in frames if name not in wrappers]


for rank in range(2):
    frames = main_thread(rank)
    last = next(number for number, line in enumerate(frames) if line.startswith("phase3_fsdp/train.py"))
    print(f"stacks/rank{rank}.txt:")
    print(*[f"    {line}" for line in frames[: last + 1]], sep="\n")

assert main_thread(1)[0].endswith(", batch")
assert main_thread(0)[0].startswith("distributed/distributed_c10d.py") and "unshard" in " ".join(main_thread(0))

# %% [markdown]
# Rank 1 sleeps in `batch`; rank 0 wants to gather a block's parameters, for which it needs rank 1. With
# `torchrun --max-restarts=3`, or in a queue that starts the job again, it now goes on from the newest checkpoint by
# itself, which (a) to (e) have made a safe thing to do.
#
# ## Exercises
#
# **1. In the middle of the file.** In (c) rank 1 died before it had opened its file. Let it die in the middle of it,
# still with torch's writer alone, in the same directory. Predict first: does the directory open now? Which of the two
# deaths is worse?
#
# <details><summary>Hint</summary>
#
# torch's writer calls `torch.save` once a tensor, so rank 1 shall die at the 30th call of the second save:
#
# ```python
# import itertools
#
# def die_in_the_file(out_dir):
#     warnings.simplefilter("ignore")
#     saver, calls = Saver(out_dir, in_background=False), itertools.count()
#     for number in (1, 2):
#         state = training_state(saver.model, saver.optimizer)
#         for tensor in state.values():
#             tensor.detach().fill_(number)
#         if number == 2 and dist.get_rank() == 1:
#             torch.save = before(torch.save, lambda *_: next(calls) == 30)
#         dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(f"{out_dir}/torch"))
#
# place = new_directory()
# run_to_death(1, die_in_the_file, str(place))
# open_by_torch(place / "torch")
# ```
#
# It does not open (an `EOFError`, from deep inside): the file was emptied when it was opened for the second save, and
# ends in the middle. This one is noticed, but it was the only checkpoint, and both saves are gone. The other death
# costs nothing at once, and later nobody knows what.
#
# </details>
#
# **2. How often to save?** A save stops the training for C seconds, and every M seconds on average something fails.
# Predict first: which share of the time is lost if you save every T seconds? Which T is best, and what does the
# background gain, if C is then a thirtieth?
#
# <details><summary>Hint</summary>
#
# C/T for the stops; and a failure costs on average half of an interval, T/2 every M seconds. C/T + T/2M is least at
# T = sqrt(2CM) (Young 1974), and is then sqrt(2C/M):
#
# ```python
# M = 12 * 3600
# for C in (60, 2):
#     T = (2 * C * M) ** 0.5
#     print(f"C = {C:2} s: save every {T / 60:.0f} minutes, {C / T + T / (2 * M):.1%} of the time is lost")
# ```
#
# With a thirtieth of C you lose between a fifth and a sixth as much, since 30 has a root of 5.5, and you save more
# often by the same factor. But T cannot be less than what a save in the background takes until it has ended: beyond
# that the next one waits, as on the slower disk in (f).
#
# </details>
#
# **3. Stopped, not asleep.** In (g) a thread of rank 1 could still write its heartbeats while its main thread slept.
# Let the whole process be stopped instead, with SIGSTOP. Predict first: who finds it out? What are the exit codes, and
# are there stacks of rank 1?
#
# <details><summary>Hint</summary>
#
# ```python
# import os
#
# def train_stopped(config):
#     sys.stderr, read = sys.stdout, TokenData.batch
#
#     def batch(self, split, purpose, step, micro_batch):
#         if (split, step, dist.get_rank()) == ("train", 2, 1):
#             os.kill(os.getpid(), signal.SIGSTOP)
#         return read(self, split, purpose, step, micro_batch)
#
#     TokenData.batch = batch
#     train(config)
#
# hung = new_directory()
# print(run_until_it_ends(hung, train_stopped))
# print([shortened(path.read_text()) for path in hung.glob("stacks/stalled-*.txt")])
# print(*main_thread(1), sep="\n")
# ```
#
# Rank 0 sees that the heartbeats of rank 1 no longer change, asks the system, and the sentence says "it is stopped".
# The step in it is that of its last heartbeat, which is up to a second old. Rank 0 then sends it SIGUSR1 and SIGCONT,
# on which faulthandler writes the stacks, even where Python cannot run, and after two seconds SIGKILL. The codes are 4
# and -9, or twice 4 where rank 1, going on, has ended itself before that.
#
# </details>
