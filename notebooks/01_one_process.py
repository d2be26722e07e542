# %% [markdown]
# # 1. One process, then multiple ranks
#
# *45 minutes. Read [notebook 0](00_start_here.ipynb) first. [The glossary](../docs/glossary.md) defines the terms.*
#
# In this notebook you train a small GPT, first by hand and then with `nanoGPT/train.py`: in one process, on two and
# four ranks, and once with a kill in the middle. We test one claim: **the loss curve depends neither on the number of
# processes nor on whether the run was killed and resumed.** The later notebooks build on it. They shard the training
# state, and they can only detect an error if a correct run always produces the same curve.
#
# As in notebook 0, write down your prediction at each *Predict first*, before you look at the output. No GPU is needed.

# %%
import dataclasses
import math
import tempfile
from pathlib import Path

import torch

from nanoGPT.distributed.runtime import reseed
from nanoGPT.train_config import TrainConfig
from nanoGPT.dataset import TokenData
from nanoGPT.prepare.tokenizer import load_tokenizer
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_adamw, grad_norm
from nanoGPT.train import train
from workshop.lessons.one_process import compare_with_one_rank, pop_gradient, print_curves
from workshop.pictures import draw_curves
from workshop.ranks import losses, run_on_ranks

# %% [markdown]
# All runs of this notebook use one small configuration. Tables and pictures come from `workshop/`, so that the
# cells show only the code that the lesson is about.

# %%
folder = tempfile.TemporaryDirectory()  # every run of this notebook writes here; removed when the kernel exits

config = TrainConfig(
    device="cpu",
    block_size=32,  # T, tokens per sequence
    batch_size=4,  # B, sequences per micro-batch
    gradient_accumulation_steps=4,  # micro-batches per step, summed over all ranks
    n_layer=2, n_head=2, n_embd=64,
    max_iters=12, eval_interval=12, eval_iters=4, log_interval=1,
    learning_rate=2e-3, min_lr=2e-4, warmup_iters=2,
)

# %% [markdown]
# ## a. A batch
#
# You will see what the model trains on, and why every process can compute any batch without a data loader.
#
# The dataset is the text of Shakespeare's plays as one long sequence of token ids, here one id per character. A
# training example is a window of this sequence. `x` contains T tokens, and `y` contains the same window shifted by one
# token. Position i of `y` is therefore the target for position i of `x`, and one window gives T predictions to learn
# from.
#
# **Predict first:** what are the shapes of `x` and `y`? If you knew only the line `x:` of the output, which character
# of the line `y:` could you not write down?

# %%
data = TokenData(config)
tokenizer = load_tokenizer(data.tokenizer)


def to_text(ids: torch.Tensor) -> str:
    return tokenizer.decode(ids.tolist()).replace("\n", "⏎")


x, y = data.batch("train", step=0, micro_batch=0)
print("x", tuple(x.shape), "y", tuple(y.shape), x.dtype)
for row in range(2):
    print()
    print("x:", to_text(x[row]))
    print("y:", to_text(y[row]))

# %%
for position in range(5):
    context, target = x[0, : position + 1], y[0, position : position + 1]
    print(f"given {to_text(context)!r:8} the model should predict {to_text(target)!r}")

# %% [markdown]
# Most trainers read batches from a data loader that has a position in a file and a random generator with a state. Such
# a state must be saved with each checkpoint, and on multiple ranks every rank has a different one.
#
# Here a batch is a **pure function of (seed, step, micro-batch)**. These numbers are the key of a *counter-based random
# generator*: a generator without hidden state, which computes its numbers from the key only. It returns the first
# position of each window. No state is kept between two calls.
#
# In `data.batch("train", 0, 0)`, `"train"` is the split, the part of the text that is read: `"train"` or
# `"val"`, for validation. The split also belongs to the key.
#
# **Predict first:** which of these four lines print `True`?

# %%
def batches_are_equal(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


for step in range(100):
    data.batch("train", step, 3)  # these calls would move the position of a data loader with a state
new_data = TokenData(config)

print("same key, read again:          ", batches_are_equal((x, y), data.batch("train", 0, 0)))
print("same key, new TokenData object:", batches_are_equal((x, y), new_data.batch("train", 0, 0)))
print("other micro-batch:             ", batches_are_equal((x, y), data.batch("train", 0, 1)))
print("other step:                    ", batches_are_equal((x, y), data.batch("train", 1, 0)))

# %% [markdown]
# Every process that requests micro-batch 3 of step 7 gets the same tokens, now or after a crash.
#
# ## b. The model before training
#
# You will count the parameters of a GPT, and predict its loss before the first training step.
#
# A block has four weight matrices. With C channels (`n_embd`) they have 3C² elements (queries, keys and values), C²
# (the output projection of attention), 4C² and 4C² (the two layers of the MLP). That is 12C² in total.
#
# **Predict first:** how many parameters does a model have with 2 blocks, C = 64, V = 75 characters and T = 32
# positions? The output layer shares its matrix with the token embedding (weight tying), so count this matrix once.

# %%
vocab_size = data.tokenizer["vocab_size"]
model_config = GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": vocab_size})
model = GPT(model_config)
model.init_weights(config.seed)

for name, parameter in model.named_parameters():
    if "h.1." not in name:  # the second block has the same shapes as the first
        print(f"{name:36} {str(tuple(parameter.shape)):10} {parameter.numel():7,}")
C, V, T = config.n_embd, vocab_size, config.block_size
print(f"{'total, with the second block':47} {sum(p.numel() for p in model.parameters()):7,}")
print(f"{'2 blocks x 12C² + VC + TC':47} {2 * 12 * C * C + V * C + T * C:7,}")

# %% [markdown]
# The last line does not count the weights of the five LayerNorms, 64 elements each.
#
# The initial weights are small, so all logits are close to zero. The model therefore assigns about the same probability
# to each of the 75 characters.
#
# **Predict first:** the loss is the mean of -ln(probability of the target). What is its value before training?

# %%
with torch.no_grad():
    logits, loss = model(x), model(x, y)
print(f"logits of the last token {tuple(logits.shape)}, loss {loss.item():.3f}, ln({vocab_size}) = {math.log(vocab_size):.3f}")

# %% [markdown]
# If the first loss of a run from scratch is well above ln(V), the trainer has a bug, often in the initialization. This
# is the cheapest test of a trainer: check the first logged loss of every run.
#
# The initial weights have a key, too. Each parameter is drawn from its own generator, whose key is (seed, name of the
# parameter). A rank that stores only some of the parameters can draw just these, and it gets the same values.
#
# ## c. A training step by hand
#
# You will accumulate a gradient over micro-batches, and check that it equals the gradient of one large batch.
#
# One step should learn from 4 micro-batches of 4 sequences. All 16 sequences at once may not fit into the memory of a
# GPU. The trainer therefore runs the micro-batches one after another, and each `backward()` *adds* its gradient to
# `.grad`. The loss of a batch is a mean, so each loss is divided by the number of micro-batches.
#
# **Predict first:** how large is the difference between the accumulated gradient and the gradient of all 16 sequences
# in one batch? What is the norm of the gradient if you forget to divide?

# %%
micro_batches = [data.batch("train", 0, i) for i in range(4)]

for xs, ys in micro_batches:
    loss = model(xs, ys)
    (loss / 4).backward()
accumulated_gradient = pop_gradient(model)  # all gradients as one vector; it also resets them

for xs, ys in micro_batches:
    loss = model(xs, ys)
    loss.backward()
undivided_gradient = pop_gradient(model)

loss = model(torch.cat([xs for xs, _ in micro_batches]), torch.cat([ys for _, ys in micro_batches]))
loss.backward()
large_batch_gradient = pop_gradient(model)

# %% [markdown]
# Compare the three gradients:

# %%
print(f"gradient norm, one batch of 16 sequences              {large_batch_gradient.norm():.6f}")
print(f"gradient norm, 4 micro-batches, each loss divided     {accumulated_gradient.norm():.6f}")
print(f"gradient norm, 4 micro-batches, not divided           {undivided_gradient.norm():.6f}")
max_difference = (large_batch_gradient - accumulated_gradient).abs().max()
print(f"max difference of the first two gradients             {max_difference:.1e}")

# %% [markdown]
# The difference is rounding. A float32 number has about 7 decimal digits, and the two gradients were summed in a
# different order.
#
# With the gradient in `.grad`, the optimizer step is one call. **Predict first:** does the loss on these 16 sequences
# fall with each step? Is this loss a good measure of training?

# %%
optimizer = configure_adamw(model, config)
for step in range(5):
    mean_loss = 0.0
    for xs, ys in micro_batches:
        loss = model(xs, ys)
        (loss / 4).backward()
        mean_loss += loss.item() / 4
    norm = grad_norm([p.grad for p in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {mean_loss:.3f}  gradient norm {norm:.3f}")

# %% [markdown]
# The loss falls, but each step uses the same 16 sequences, so the model only memorizes them. The trainer reads new
# micro-batches in each step. Every `eval_interval` steps it also measures the loss on text that it never trains on.
#
# Now open `nanoGPT/train.py`. It has fewer than 200 lines, but the idea of training is in about 20 of them:
#
# | where | what it does | read it |
# |---|---|---|
# | `train_step`, the loop over `micro_batches` | forward and backward pass of each micro-batch, as in this section | now |
# | `train_step`, below the loop | clips the gradient, and updates the parameters | now |
# | `train`, from `model = GPT(...)` to `configure_optimizer` | creates the model and the optimizer | now |
# | `train`, the line with `data_parallel(...)` | averages the gradients over the ranks | after section (d) |
# | `train`, `checkpoints`, `checkpoint` and `save` | finds, loads and saves checkpoints | after section (f) |
# | `evaluate`, `learning_rate` | the loss on other text; warm-up and cosine decay | after section (f) |
# | `train`, the loop `for step in ...` | evaluates, sets the learning rate, calls `train_step`, logs | after section (f) |
# | `start`, `scaler`, `run.observers` | starts ranks, mixed precision, monitoring | skip it at first |
#
# ## d. The same training on multiple ranks
#
# You will train on 1, 2 and 4 ranks, and compare the loss curves.
#
# A **rank** is one of the processes that train a model together. With *data parallelism* every rank has the full model,
# and the micro-batches of each step are distributed over the ranks. Before the optimizer step, the gradients are
# averaged over the ranks. PyTorch's `DistributedDataParallel` (DDP) does the averaging.
#
# How does a process know which rank it is? A launcher such as `torchrun` starts the processes, and sets environment
# variables for each of them:
#
# - `WORLD_SIZE` is the number of ranks N, and `RANK` is the number of this rank, from 0 to N - 1.
# - `LOCAL_RANK` is the number of the rank on its machine. It selects the GPU of the rank.
# - `MASTER_ADDR` and `MASTER_PORT` are the address and the port through which the ranks find each other.
#
# `dist.init_process_group` reads these variables and connects the ranks to a *process group*. The backend, `gloo` for
# CPUs or `nccl` for GPUs, sends the data. From then on, the ranks can call *collectives*, which all ranks of the group
# must call. `dist.all_reduce(t)` replaces the tensor `t` of every rank by the sum over all ranks.
#
# The next cell writes a complete program, and starts it with torchrun on two ranks. The flag `--standalone` means that
# there is only one machine, and `--nproc_per_node=2` that it runs two ranks.
#
# **Predict first:** what do the two ranks print?

# %%
HELLO = '''
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()  # the same number as os.environ["RANK"]
t = torch.tensor([rank + 1.0])
dist.all_reduce(t)
variables = ", ".join(f"{name}={os.environ[name]}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
print(f"hello from rank {rank}: {variables}, sum over the ranks {t.item()}")
dist.destroy_process_group()
'''

# %%
import os
import subprocess
import sys

hello = Path(folder.name) / "hello.py"
hello.write_text(HELLO)
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(hello)]
environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # one thread per rank
completed = subprocess.run(torchrun, capture_output=True, text=True, check=True, env=environment)
print("\n".join(sorted(completed.stdout.splitlines())))  # sorted, because any rank may print first

# %% [markdown]
# Rank 0 has contributed 1 and rank 1 has contributed 2, so both have the sum 3. DDP calls an all-reduce for gradients.
#
# In the notebooks, `run_on_ranks(f, n, ...)` does the work of `torchrun`: it starts n real processes, sets the same
# variables, calls `init_process_group` and then `f(...)` in each, and returns the list of their results.
#
# **Predict first:** rank r of N runs the micro-batches r, r + N, r + 2N, ... Which ones does rank 1 of 2 run?

# %% answer="local_micro_batches"
def local_micro_batches(micro_batches: int) -> list[int]:
    """Return the numbers of the micro-batches that the calling rank runs."""
    import torch.distributed as dist  # imported here, because only the processes of the ranks use it

    return list(range(dist.get_rank(), micro_batches, dist.get_world_size()))


for ranks in (1, 2, 4):
    print(f"{ranks} rank(s):", run_on_ranks(local_micro_batches, ranks, config.gradient_accumulation_steps))

# %% [markdown]
# `gradient_accumulation_steps` is the total number of micro-batches on all ranks. With more ranks, each rank runs fewer
# micro-batches, and the step as a whole stays the same.
#
# Next we run the real trainer, `nanoGPT.train.train(config)`, on 1, 2 and 4 ranks, with dropout.
#
# **Predict first:** what is the largest difference between the three loss curves over 12 steps: 0, 1e-7, 1e-3 or 0.1?

# %%
def train_on(ranks: int, function=train, name: str = "keyed", **changes) -> dict[int, float]:
    """Train on this number of ranks, and return the loss of each step."""
    out_dir = Path(folder.name) / f"{name}-{ranks}"
    changed_config = dataclasses.replace(config, dropout=0.2, out_dir=str(out_dir), **changes)
    run_on_ranks(function, ranks, changed_config, show=False)
    return losses(out_dir)


curves = {ranks: train_on(ranks) for ranks in (1, 2, 4)}
print_curves(curves)
assert compare_with_one_rank(curves) < 1e-5

# %%
draw_curves({f"{ranks} rank(s)": [*curve.values()] for ranks, curve in curves.items()}, "The same loss curve on 1, 2 and 4 ranks")

# %% [markdown]
# The three curves coincide, so the lower picture shows their differences. In `nanoGPT/train.py`, now read the line with
# `data_parallel(...)`.
#
# The remaining difference is rounding again: the four gradients are summed in a different order. Section (a) showed why
# the batches agree. But dropout sets some activations to zero *at random*. How can four processes drop the same ones?
#
# ## e. Dropout with naive seeding
#
# You will see why the usual way to seed ranks changes the loss curve, and how much.
#
# Most trainers call `torch.manual_seed(seed + rank)` once, at the start. From then on, each rank draws from one random
# stream, one micro-batch after another. Below are the first twelve elements of a dropout mask for each micro-batch of a
# step (`#` is kept, `.` is dropped). The first table uses naive seeding. The second table uses the call in the
# trainer's loop: `reseed(device, seed, step, micro_batch)`.
#
# **Predict first:** with one seed per rank, which micro-batches keep their mask when you go from 1 rank to 2? And from
# 2 ranks to 4?

# %% answer="draw_masks"
def draw_masks(ranks: int, reseeds: bool) -> list[str]:
    """Return the dropout masks of micro-batches 0 to 3 when this number of ranks runs them."""
    masks = [""] * 4
    for rank in range(ranks):
        torch.manual_seed(config.seed + rank)
        for micro_batch in range(rank, 4, ranks):
            if reseeds:
                reseed(torch.device("cpu"), config.seed, 0, micro_batch)
            mask = torch.nn.functional.dropout(torch.ones(12), p=0.5)
            masks[micro_batch] = "".join("#" if element else "." for element in mask)
    return masks


for title, reseeds in (("one seed per rank", False), ("one key per micro-batch", True)):
    print(f"{title}\n    micro-batch    1 rank         2 ranks        4 ranks")
    for micro_batch, row in enumerate(zip(*(draw_masks(ranks, reseeds) for ranks in (1, 2, 4)))):
        print(f"    {micro_batch:^11}    " + "   ".join(row))

# %% [markdown]
# With one seed per rank, a mask depends on the rank and on how many numbers this rank has drawn before. With one key
# per micro-batch, a mask depends only on the micro-batch, so every rank that runs this micro-batch draws the same mask.
#
# Does this matter? Next we replace the trainer's `reseed` with naive seeding.
#
# **Predict first:** what is the max loss difference now?

# %%
def train_with_naive_seeding(config: TrainConfig) -> None:
    import torch
    import torch.distributed as dist

    from nanoGPT import train

    train.reseed = lambda *key: None
    torch.manual_seed(config.seed + dist.get_rank())
    train.train(config)


naive_curves = {ranks: train_on(ranks, train_with_naive_seeding, "naive") for ranks in (1, 2, 4)}
print(f"max loss difference, one seed per rank:        {compare_with_one_rank(naive_curves):.1e}")
print(f"max loss difference, one key per micro-batch:  {compare_with_one_rank(curves):.1e}")

# %% [markdown]
# The naive curves are not *wrong*: these runs train models that are just as good. But a difference of this size hides
# real bugs, such as a gradient that is averaged twice in one layer, or a shard that is loaded into the wrong place. If
# correct curves agree to 1e-7, you notice such a bug immediately. With naive seeding it looks like noise.
#
# ## f. Kill the run and resume it
#
# You will kill a training run, see what its checkpoint contains, and resume it without a change in the losses.
#
# Long runs are interrupted: a node fails, or the time limit of a queue is reached. Below, the trainer runs as a
# separate program, as you would start it from a shell, and saves a checkpoint every 4 steps. After it has logged step
# 9, we send SIGKILL, which no process can catch or delay.

# %%
import json
import time

from nanoGPT.files import sha256_of
from workshop.lessons.one_process import count_logged_lines, make_train_command, print_resumed_curve

FLAGS = """--device=cpu --block_size=32 --n_layer=2 --n_head=2 --n_embd=64 --dropout=0.2 --max_iters=16
    --warmup_iters=2 --gradient_accumulation_steps=16 --log_interval=1 --eval_interval=4 --eval_iters=4
    --always_save_checkpoint=True""".split()
command = make_train_command(sys.executable, "killed", *FLAGS)  # python nanoGPT/train.py --out_dir=killed ...
process = subprocess.Popen(command, cwd=folder.name, stdout=subprocess.DEVNULL)
while count_logged_lines(Path(folder.name) / "killed") < 10 and process.poll() is None:
    time.sleep(0.005)
process.kill()  # SIGKILL
print("exit code of the process:", process.wait())

# %% [markdown]
# **Predict first:** which checkpoints exist? The name `step-N` means that the checkpoint was saved after N updates.
# Step 9 is the tenth update.

# %%
checkpoints = Path(folder.name) / "killed" / "checkpoints"
for path in sorted(checkpoints.rglob("*")):
    print(path.relative_to(checkpoints.parent))
print("LATEST contains", (checkpoints / "LATEST").read_text().strip())

# %% [markdown]
# If the kill had come during a save, there would also be a directory `.tmp-step-...`. It would do no harm. A save
# writes into this directory, flushes the files to the disk, writes `manifest.json` last, and only then renames the
# directory. A checkpoint is therefore written atomically: it is either complete or absent.
#
# The manifest records the size and the SHA-256 of every file.
#
# **Predict first:** which state must a checkpoint contain, so that the losses continue without a change? Which state
# can it leave out, because sections (a) and (e) compute that state from a key?

# %%
newest = checkpoints / (checkpoints / "LATEST").read_text().strip()
manifest = json.loads((newest / "manifest.json").read_text())
print(f"trainer: {manifest['phase']}")
for name in ("step", "world_size", "model_args"):
    print(f"{name}: {manifest[name]}")
for file in manifest["files"]:
    print(f"file {file['name']}, {file['size']:,} bytes, SHA-256 {file['sha256'][:16]}...")
print("SHA-256 of the file on the disk:  ", sha256_of(newest / "ckpt.pt")[:16] + "...")

ckpt = torch.load(newest / "ckpt.pt", weights_only=True)
print("ckpt.pt contains", ", ".join(ckpt))
print("AdamW state of the first parameter:", ", ".join(ckpt["optimizer"]["state"][0]))

# %% [markdown]
# The checkpoint contains the weights, AdamW's two moments and its step count, and the number of updates. It contains no
# state of a data loader or of a random generator, because batches and masks follow from (seed, step, micro-batch).
#
# To resume, you only pass the directory. The manifest contains all other settings.
#
# **Predict first:** steps 8 and 9 had been trained and logged before the kill. What happens to their lines in
# `metrics.jsonl`?

# %%
command = make_train_command(sys.executable, "killed", "--init_from=resume")
completed = subprocess.run(command, cwd=folder.name, stdout=subprocess.PIPE, text=True, check=True)
print(next(line for line in completed.stdout.splitlines() if line.startswith("resuming")))
steps = [json.loads(line)["step"] for line in (checkpoints.parent / "metrics.jsonl").read_text().splitlines()]
print("steps in metrics.jsonl:", steps)

# %% [markdown]
# The resumed run trained both steps again from the checkpoint, and replaced their lines. (The line of step 16 has no
# training loss: it is the last evaluation.)
#
# Finally, we run the same training without a kill.
#
# **Predict first:** in how many decimal digits do the losses of the two runs agree?

# %%
command = make_train_command(sys.executable, "uninterrupted", *FLAGS)
subprocess.run(command, cwd=folder.name, stdout=subprocess.DEVNULL, check=True)
resumed_curve, uninterrupted_curve = losses(Path(folder.name) / "killed"), losses(Path(folder.name) / "uninterrupted")
print_resumed_curve(resumed_curve, uninterrupted_curve, resumed_at=manifest["step"])
assert resumed_curve == uninterrupted_curve

# %% [markdown]
# Every digit agrees. A different number of ranks changes the order of the sums, and with it the last digit. Here
# every sum is computed in the same order as before. Now read the rest of `nanoGPT/train.py`, with the table of
# section (c).
#
# You have now seen the two tests that every trainer in this repository must pass: *the same loss curve on any number of
# ranks*, and *the same loss curve after a kill and a resume*. In this notebook every rank stores the full training
# state. The next notebooks shard it.
#
# ## To take home
#
# 1. A batch is a pure function of (seed, step, micro-batch), so every process can compute any batch without a saved
#    state.
# 2. The first loss of a new model is close to ln(V). A clearly higher one is a bug.
# 3. `backward()` adds to `.grad`. Divide each loss by the number of micro-batches, and the accumulated gradient equals
#    that of one large batch up to rounding.
# 4. A rank is a process. With data parallelism, the ranks share the micro-batches of a step, and average their
#    gradients.
# 5. On 1, 2 and 4 ranks, the losses differ only by rounding: about 2e-7.
# 6. With one seed per rank, dropout masks depend on the number of ranks. The losses then differ by almost 0.01, and
#    this hides bugs.
# 7. With one key per micro-batch, the masks are the same on any number of ranks.
# 8. A checkpoint needs the weights, the optimizer state and the number of updates, but no state of a data loader or a
#    random generator.
# 9. A run that was killed and resumed on the same number of ranks prints the same losses in every digit.
#
# ## Exercises
#
# `make exercise N=baseline.1` and the exercises after it let you write parts of this chapter again: the schedule, the
# global norm, the seed of dropout and the training step. `make check N=baseline.1` runs your code on real ranks and
# explains what is wrong. `docs/exercises.md` lists all of them.
#
# **1. Three ranks.** Call `train_on(3)`. Predict first: what happens, and when? How would you change the configuration
# so that three ranks can train? Is the curve then still the curve of (d)?
#
# <details><summary>Hint</summary>
#
# Four micro-batches cannot be distributed evenly over three ranks. The trainer stops with an error before it creates
# the model, and the message suggests values that work. Try `train_on(3, name="six", gradient_accumulation_steps=6)`,
# and the same call with 1 rank. These two curves agree with each other, but not with (d), because each step now learns
# from six micro-batches.
#
# </details>
#
# **2. DDP by hand.** On two ranks, let each rank compute the gradient of its two micro-batches of (c). Average the
# gradients yourself with `dist.all_reduce`. Predict first: by which number must you divide? Compare the result with
# `large_batch_gradient` of (c).
#
# <details><summary>Hint</summary>
#
# Each rank computes the mean over its two micro-batches, so divide the sum over the ranks by the number of ranks:
#
# ```python
# def average_gradient(model_config, config):
#     import torch
#     import torch.distributed as dist
#     from nanoGPT.dataset import TokenData
#     from nanoGPT.model import GPT
#
#     data = TokenData(config)
#     model = GPT(model_config)
#     model.init_weights(config.seed)
#     for i in range(dist.get_rank(), 4, dist.get_world_size()):
#         loss = model(*data.batch("train", 0, i))
#         (loss / 2).backward()
#     flat_gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
#     dist.all_reduce(flat_gradient)
#     return flat_gradient / dist.get_world_size()
#
# gradients = run_on_ranks(average_gradient, 2, model_config, config)
# print([(gradient - large_batch_gradient).abs().max().item() for gradient in gradients])
# ```
#
# Both ranks return the same gradient, and its max difference from `large_batch_gradient` is about 3e-8. DDP does this
# during the backward pass, one bucket of parameters at a time. The network then transfers the gradients of the last
# layers while the gradients of the first layers are still being computed.
#
# </details>
#
# **3. One wrong byte.** Change one byte in the middle of the newest `ckpt.pt` of the run `killed`, and resume the run
# once more. Predict first: does the trainer fail, does it continue with damaged weights, or does it do something else?
#
# <details><summary>Hint</summary>
#
# ```python
# damaged_file = checkpoints / (checkpoints / "LATEST").read_text().strip() / "ckpt.pt"
# content = bytearray(damaged_file.read_bytes())
# content[len(content) // 2] ^= 1
# damaged_file.write_bytes(content)
# command = make_train_command(sys.executable, "killed", "--init_from=resume")
# completed = subprocess.run(command, cwd=folder.name, capture_output=True, text=True)
# print(completed.stdout)
# ```
#
# The SHA-256 no longer matches the manifest. The trainer therefore renames the damaged checkpoint, prints the reason,
# and resumes from the checkpoint before it. `losses(...)` still equals `uninterrupted_curve`.
#
# </details>
