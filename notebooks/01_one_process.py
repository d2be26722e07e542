# %% [markdown]
# # 1. One process, then several
#
# A GPT is trained here first by hand, then by `nanoGPT/train.py` in one process, then on two and four, and at last it
# is killed in the middle and resumed. The claim to test: **the loss curve depends neither on how many processes
# there are nor on whether one of them died.** Everything that the later notebooks shard rests on it, for only then
# does a curve that differs mean that something is wrong.
#
# Before each result stands *Predict first*. Say a number, or draw the table, before you look at the output below it:
# what you remember is where you were wrong. No GPU is needed.

# %%
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from nanoGPT.distributed.runtime import reseed
from nanoGPT.files import sha256_of
from nanoGPT.files import PACKAGE
from nanoGPT.train_config import TrainConfig
from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.tokenizer import load_tokenizer
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_adamw, grad_norm
from nanoGPT.train import train
from workshop.ranks import losses, run_on_ranks

folder = tempfile.TemporaryDirectory()  # every run of this notebook writes here; it goes when the kernel ends

config = TrainConfig(
    device="cpu",
    block_size=32,  # T, tokens per sequence
    batch_size=4,  # B, sequences per micro-batch
    gradient_accumulation_steps=4,  # micro-batches per step, of all processes together
    n_layer=2,
    n_head=2,
    n_embd=64,
    max_iters=12,
    warmup_iters=2,
    eval_interval=12,
    eval_iters=4,
    log_interval=1,
)

# %% [markdown]
# ## a. A batch
#
# The data is the text of Shakespeare's plays as one long row of token ids, here one id a character. A training example
# is a window of it: `x` holds T tokens, `y` the same window one token later. So each position of `x` has its answer
# in `y`, and one window of T tokens gives T predictions to learn from.
#
# **Predict first:** what shapes do `x` and `y` have? Cover the second line below: given the first, which of its
# characters can you not know?

# %%
data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
tokenizer = load_tokenizer(data.tokenizer)


def visible(ids: torch.Tensor) -> str:
    return tokenizer.decode(ids.tolist()).replace("\n", "⏎")


x, y = data.batch("train", TRAIN, step=0, micro_batch=0)
print("x", tuple(x.shape), "y", tuple(y.shape), x.dtype)
for row in range(2):
    print()
    print("x:", visible(x[row]))
    print("y:", visible(y[row]))

# %%
for position in range(5):
    seen, next_one = x[0, : position + 1], y[0, position : position + 1]
    print(f"from {visible(seen)!r:8} the model shall predict {visible(next_one)!r}")

# %% [markdown]
# Most trainers draw batches from a loader that is somewhere in its file and has a random generator in some state. Such
# a loader has to be saved with each checkpoint, and on several processes each needs one of its own.
#
# Here a batch is a **pure function of (seed, step, micro-batch)**: these numbers key a counter-based generator, and
# it says where the windows start. Nothing is remembered between two calls.
#
# **Predict first:** which of these four lines print `True`?

# %%
def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


for step in range(100):
    data.batch("train", TRAIN, step, 3)  # a loader with a state would be elsewhere now
another = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)

print("the same key, read again:      ", same((x, y), data.batch("train", TRAIN, 0, 0)))
print("the same key, another object:  ", same((x, y), another.batch("train", TRAIN, 0, 0)))
print("another micro-batch:           ", same((x, y), data.batch("train", TRAIN, 0, 1)))
print("another step:                  ", same((x, y), data.batch("train", TRAIN, 1, 0)))

# %% [markdown]
# So whichever process asks for micro-batch 3 of step 7, today or after a crash, gets the same tokens.
#
# ## b. The model before it has learned anything
#
# A block has four matrices. With C channels they hold 3C² (queries, keys, values), C² (their way out), 4C² and 4C²
# (the MLP): 12C² together.
#
# **Predict first:** how many parameters has a model of 2 blocks with C = 64, V = 75 characters and T = 32 positions?
# The output layer shares its matrix with the embedding, so count that one once.

# %%
rows = data.tokenizer["vocab_size"]
shape = GPTConfig.of({**dataclasses.asdict(config), "vocab_size": rows})
model = GPT(shape)
model.init_weights(config.seed)

for name, parameter in model.named_parameters():
    if "h.1." not in name:  # the second block is like the first
        print(f"{name:36} {str(tuple(parameter.shape)):10} {parameter.numel():7,}")
C, V, T = config.n_embd, rows, config.block_size
print(f"{'in all':47} {sum(p.numel() for p in model.parameters()):7,}")
print(f"2 blocks of 12C², VC characters, TC positions:  {2 * 12 * C * C + V * C + T * C:7,}")

# %% [markdown]
# What is missing in the last line are the gains of the five LayerNorms, 64 numbers each.
#
# The weights start small, so the logits are near zero and the model gives each of the 75 characters about the same
# probability.
#
# **Predict first:** the loss is the mean of -ln(probability of the right character). What is it now?

# %%
with torch.no_grad():
    logits, loss = model(x, y)
print(f"logits {tuple(logits.shape)}, loss {loss.item():.3f}, ln({rows}) = {math.log(rows):.3f}")

# %% [markdown]
# A run from scratch whose first loss is well above ln(V) has a bug, often in the initialisation. No test of a trainer
# is cheaper: look at the first line of every run.
#
# The weights, too, are keyed: each parameter is drawn from a generator that belongs to (seed, its name). A process
# that holds only some of the parameters can draw those, and they are the same.
#
# ## c. A training step by hand
#
# A step shall learn from 4 micro-batches of 4 sequences. All 16 at once may not fit into the memory of a GPU, so the
# trainer runs them one after another; each `backward()` *adds* its gradient to what is in `.grad`. The loss of a batch
# is a mean, hence each loss is divided by the number of micro-batches.
#
# **Predict first:** how far is the accumulated gradient from that of the 16 sequences in one batch? And what is its
# norm if somebody forgets to divide?

# %%
micro_batches = [data.batch("train", TRAIN, 0, i) for i in range(4)]


def gradient() -> torch.Tensor:
    """Every parameter's gradient, in one row; and a clean slate for the next."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


for xs, ys in micro_batches:
    _, loss = model(xs, ys)
    (loss / 4).backward()
accumulated = gradient()

for xs, ys in micro_batches:
    _, loss = model(xs, ys)
    loss.backward()
not_divided = gradient()

_, loss = model(torch.cat([xs for xs, _ in micro_batches]), torch.cat([ys for _, ys in micro_batches]))
loss.backward()
large = gradient()

print(f"norm of the gradient of 16 sequences    {large.norm():.6f}")
print(f"norm of 4 accumulated, each over 4      {accumulated.norm():.6f}")
print(f"norm of 4 accumulated, not divided      {not_divided.norm():.6f}")
print(f"largest difference of the first two     {(large - accumulated).abs().max():.1e}")

# %% [markdown]
# The difference is that of rounding: a float32 keeps about 7 digits, and the sums were made in another order.
#
# Where the gradient is, an optimizer's step is one call. **Predict first:** does the loss on these 16 sequences fall
# with each step? And is that what training should be judged by?

# %%
optimizer = configure_adamw(model, config)
for step in range(5):
    total = 0.0
    for xs, ys in micro_batches:
        _, loss = model(xs, ys)
        (loss / 4).backward()
        total += loss.item() / 4
    norm = grad_norm([p.grad for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {total:.3f}  gradient norm {norm:.3f}")

# %% [markdown]
# It falls, but on the same 16 sequences again and again, which is only learning them by heart. The trainer takes new
# micro-batches in each step, and every `eval_interval` steps it measures the loss on text that it never trains on.
#
# Now open `nanoGPT/train.py` and find the lines of this section in its loop. What stands there besides is the learning
# rate's schedule, clipping, mixed precision, the watching, and the few lines for several processes.
#
# ## d. The same on several ranks
#
# A **rank** is one process of several that train one model. Each has the whole model; each step's micro-batches are
# shared out; the gradients are averaged over the ranks before the optimizer's step. That is *data parallelism*, and
# PyTorch's `DistributedDataParallel` (DDP) does the averaging.
#
# `run_on_ranks(f, n, ...)` starts n real processes, calls `f(...)` on each and returns what each returned.
#
# **Predict first:** rank r of N takes micro-batches r, r + N, r + 2N, ... Which does rank 1 of 2 take?

# %%
def mine(micro_batches: int) -> list[int]:
    """The micro-batches of the rank that calls this."""
    import torch.distributed as dist  # a function travels to the ranks alone: it imports what it uses

    return list(range(dist.get_rank(), micro_batches, dist.get_world_size()))


for ranks in (1, 2, 4):
    print(f"{ranks} rank(s):", run_on_ranks(mine, ranks, config.gradient_accumulation_steps))

# %% [markdown]
# So `gradient_accumulation_steps` counts the micro-batches of all ranks together. With more ranks each does less, and
# the step stays the same step.
#
# Now the real trainer: `nanoGPT.train.train(config)`, on 1, 2 and 4 ranks, with dropout.
#
# **Predict first:** how far are the three loss curves from each other after 12 steps: 0, 1e-7, 1e-3 or 0.1?

# %%
def train_on(ranks: int, function=train, name: str = "keyed", **changes) -> dict[int, float]:
    """Train on so many ranks; the loss of each step."""
    out_dir = Path(folder.name) / f"{name}-{ranks}"
    mine = dataclasses.replace(config, dropout=0.2, out_dir=str(out_dir), **changes)
    run_on_ranks(function, ranks, mine, show=False)
    return losses(out_dir)


def largest_difference(curves: dict[int, dict[int, float]]) -> float:
    return max(abs(curve[step] - curves[1][step]) for curve in curves.values() for step in curves[1])


curves = {ranks: train_on(ranks) for ranks in (1, 2, 4)}

print("step      1 rank     2 ranks     4 ranks")
for step in curves[1]:
    print(f"{step:4}" + "".join(f"{curves[ranks][step]:12.8f}" for ranks in curves))
print(f"largest difference: {largest_difference(curves):.1e}")
assert largest_difference(curves) < 1e-5

# %%
figure, axes = plt.subplots(figsize=(6, 3.5))
for (ranks, curve), width, color in zip(curves.items(), (9, 5, 1.5), ("#c6dbef", "#6baed6", "#08306b")):
    axes.plot(list(curve), list(curve.values()), linewidth=width, color=color, label=f"{ranks} rank(s)")
axes.set(xlabel="step", ylabel="training loss", title="One curve, on any number of ranks")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# The three lines are drawn with three widths, or only one could be seen.
#
# What is left is rounding again: the sum of four gradients in another order. That the batches agree we saw in (a).
# But dropout throws a part of the activations away *at random*. How can four processes throw the same ones?
#
# ## e. What naive randomness does
#
# The usual line is `torch.manual_seed(seed + rank)`, once, at the start. From then on each rank draws from its own
# stream, one micro-batch after another. Below are the first twelve decisions of dropout (`#` kept, `.` thrown away) in
# each micro-batch of a step, first with that line, then with the one that the trainer has in its loop:
# `reseed(device, seed, step, micro_batch)`.
#
# **Predict first:** with one seed a rank, which micro-batches keep their mask when 1 rank becomes 2? When 2 become 4?

# %%
def masks(ranks: int, keyed: bool) -> list[str]:
    """The masks of micro-batches 0 to 3, when so many ranks share them out."""
    drawn = [""] * 4
    for rank in range(ranks):
        torch.manual_seed(config.seed + rank)
        for micro_batch in range(rank, 4, ranks):
            if keyed:
                reseed(torch.device("cpu"), config.seed, 0, micro_batch)
            kept = torch.nn.functional.dropout(torch.ones(12), p=0.5)
            drawn[micro_batch] = "".join("#" if k else "." for k in kept)
    return drawn


for title, keyed in (("one seed a rank", False), ("one key a micro-batch", True)):
    print(f"{title}\n    micro-batch    1 rank         2 ranks        4 ranks")
    for micro_batch, row in enumerate(zip(*(masks(ranks, keyed) for ranks in (1, 2, 4)))):
        print(f"    {micro_batch:^11}    " + "   ".join(row))

# %% [markdown]
# With one seed a rank a mask belongs to a rank and to how much that rank has drawn before. With one key a micro-batch
# it belongs to the micro-batch, and goes with it to whichever rank runs it.
#
# Does it matter? Below is the trainer with the naive line in place of its own.
#
# **Predict first:** the largest difference of the curves is now about ...?

# %%
def train_naively(config: TrainConfig) -> None:
    import torch
    import torch.distributed as dist

    from nanoGPT import train
    
    train.reseed = lambda *key: None
    torch.manual_seed(config.seed + dist.get_rank())
    train.train(config)


naive = {ranks: train_on(ranks, train_naively, "naive") for ranks in (1, 2, 4)}
print(f"largest difference, one seed a rank:        {largest_difference(naive):.1e}")
print(f"largest difference, one key a micro-batch:  {largest_difference(curves):.1e}")

# %% [markdown]
# Neither curve is *wrong*: the naive ones train a model that is just as good. But a difference of this size hides
# others. A gradient that was averaged twice in one layer, a shard that was loaded in the wrong place: with 1e-7 they
# are seen at once, and without they look like noise.
#
# ## f. Kill it, and resume
#
# Long runs die: a machine fails, or a queue's time is over. Below the trainer runs as a program of its own, the way
# you would start it, and saves a checkpoint every 4 steps. Once it has logged step 9 it gets SIGKILL, which no
# process can catch or delay.

# %%
def command(out_dir: str, *flags: str) -> list[str]:
    """The words of `python nanoGPT/train.py --out_dir=...`."""
    return [sys.executable, str(PACKAGE / "train.py"), f"--out_dir={out_dir}", *flags]


RECIPE = """--device=cpu --block_size=32 --n_layer=2 --n_head=2 --n_embd=64 --dropout=0.2 --max_iters=20
    --warmup_iters=2 --gradient_accumulation_steps=16 --log_interval=1 --eval_interval=4 --eval_iters=4
    --always_save_checkpoint=True""".split()


def logged(out_dir: str) -> int:
    """How many lines of metrics a run has written."""
    metrics = Path(folder.name) / out_dir / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


process = subprocess.Popen(command("killed", *RECIPE), cwd=folder.name, stdout=subprocess.DEVNULL)
while logged("killed") < 10 and process.poll() is None:
    time.sleep(0.005)
process.kill()  # SIGKILL
print("the process ended with", process.wait())

# %% [markdown]
# **Predict first:** which checkpoints are there? `step-N` is saved after N updates; step 9 is the tenth.

# %%
checkpoints = Path(folder.name) / "killed" / "checkpoints"
for path in sorted(checkpoints.rglob("*")):
    print(path.relative_to(checkpoints.parent))
print("LATEST says", (checkpoints / "LATEST").read_text().strip())

# %% [markdown]
# Had the kill come during a save, there would also be a directory `.tmp-step-...`, and no harm done: a save writes
# there, forces the files to the disk, writes `manifest.json` last and only then renames the directory. A checkpoint
# is there whole, or not at all.
#
# The manifest says what was written, to the byte. **Predict first:** what has to be in a checkpoint, so that the losses
# go on as if nothing had happened? And what can be left out, because in (a) and (e) it became a pure function?

# %%
newest = checkpoints / (checkpoints / "LATEST").read_text().strip()
manifest = json.loads((newest / "manifest.json").read_text())
for name in ("phase", "step", "world_size", "model_args"):
    print(f"{name}: {manifest[name]}")
for file in manifest["files"]:
    print(f"file {file['name']}, {file['size']:,} bytes, sha256 {file['sha256'][:16]}...")
print("its sha256 now is", sha256_of(newest / "ckpt.pt")[:16] + "...")

ckpt = torch.load(newest / "ckpt.pt", weights_only=True)
print("ckpt.pt holds", ", ".join(ckpt))
print("AdamW's state of the first parameter:", ", ".join(ckpt["optimizer"]["state"][0]))

# %% [markdown]
# Weights, AdamW's two moments and its count of steps, the number of updates. There is no state of a loader and none of
# a random generator: batches and masks follow from (seed, step, micro-batch).
#
# Resuming takes no flags but the directory; the rest stands in the manifest.
#
# **Predict first:** step 8 and step 9 had been trained and logged before the kill. What becomes of them?

# %%
done = subprocess.run(
    command("killed", "--init_from=resume"), cwd=folder.name, stdout=subprocess.PIPE, text=True, check=True
)
print(next(line for line in done.stdout.splitlines() if line.startswith("resuming")))
steps = [json.loads(line)["step"] for line in (checkpoints.parent / "metrics.jsonl").read_text().splitlines()]
print("steps in metrics.jsonl:", steps)

# %% [markdown]
# They were trained once more, from the checkpoint, and their lines were replaced. (Line 20 has no training loss: it is
# the last evaluation.)
#
# Now the same run without the kill. **Predict first:** from which digit on do the losses differ?

# %%
subprocess.run(command("whole", *RECIPE), cwd=folder.name, stdout=subprocess.DEVNULL, check=True)
killed, whole = losses(Path(folder.name) / "killed"), losses(Path(folder.name) / "whole")

print("step  killed and resumed   uninterrupted")
for step in whole:
    note = "  <- resumed here" if step == manifest["step"] else ""
    print(f"{step:4}  {killed[step]!r:<20} {whole[step]!r:<18}{note}".rstrip())
print("identical to the last digit:", killed == whole)
assert killed == whole

# %% [markdown]
# From none. With another number of ranks the order of the sums changed, and so did the last digit; here each sum is
# made in the same order again.
#
# You have seen the two tests that every phase of this workshop has to pass: *one curve on any number of ranks*, and
# *a kill that leaves no trace*. What comes next shards what each rank here still holds whole.
#
# ## Exercises
#
# **1. Three ranks.** Call `train_on(3)`. Predict first: what happens, and when? How would you change the
# configuration so that three ranks can train, and is the curve then still that of (d)?
#
# <details><summary>Hint</summary>
#
# Four micro-batches cannot be shared out evenly among three ranks. The trainer refuses before it has formed any model,
# and says what would do. Try `train_on(3, name="six", gradient_accumulation_steps=6)` and the same with 1 rank: these
# two agree with each other, but not with (d), since a step now learns from six micro-batches.
#
# </details>
#
# **2. DDP by hand.** On two ranks, let each compute the gradient of its two micro-batches of (c), and average the
# gradients yourself with `dist.all_reduce`. Predict first: by what must you divide? Compare with `large` of (c).
#
# <details><summary>Hint</summary>
#
# Each rank takes the mean over its own two, so the sum over the ranks is divided by the number of ranks:
#
# ```python
# def averaged(shape, config):
#     import torch
#     import torch.distributed as dist
#     from nanoGPT.dataset import TRAIN, TokenData
#     from nanoGPT.model import GPT
#
#     data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
#     model = GPT(shape)
#     model.init_weights(config.seed)
#     for i in range(dist.get_rank(), 4, dist.get_world_size()):
#         _, loss = model(*data.batch("train", TRAIN, 0, i))
#         (loss / 2).backward()
#     flat = torch.cat([p.grad.flatten() for p in model.parameters()])
#     dist.all_reduce(flat)
#     return flat / dist.get_world_size()
#
# print([(g - large).abs().max().item() for g in run_on_ranks(averaged, 2, shape, config)])
# ```
#
# Both ranks return the same, about 1e-8 from `large`. DDP does this during the backward pass, a bucket of parameters
# at a time, so that the network works while the gradients of earlier layers are still being computed.
#
# </details>
#
# **3. One wrong byte.** Change one byte in the middle of the newest `ckpt.pt` of the run `killed`, and resume it once
# more. Predict first: does it fail, does it train on from broken weights, or something else?
#
# <details><summary>Hint</summary>
#
# ```python
# broken = checkpoints / (checkpoints / "LATEST").read_text().strip() / "ckpt.pt"
# content = bytearray(broken.read_bytes())
# content[len(content) // 2] ^= 1
# broken.write_bytes(content)
# done = subprocess.run(command("killed", "--init_from=resume"), cwd=folder.name, capture_output=True, text=True)
# print(done.stdout)
# ```
#
# The sha256 no longer fits the manifest, so the checkpoint is set aside with the reason, and the run resumes from the
# one before it. `losses(...)` still equals `whole`.
#
# </details>
