# %% [markdown]
# # 12. Measuring: the time and the memory of a step
#
# *40 minutes. Read [notebook 1](01_one_process.ipynb) first. With a GPU you see more, but every cell also runs on a
# CPU.*
#
# "My change makes a step 3% faster." Most such sentences are wrong, because the measurement was. **How do you measure a
# step so that you can trust the number?** You test five claims:
#
# - **The first calls are slow, and must not be part of an average.**
# - **A GPU runs asynchronously: a clock around the call measures the launch, not the work.**
# - **Two versions must alternate. Otherwise you measure what else the machine was doing.**
# - **Allocated memory, reserved memory and peak memory are three different numbers.**
# - **More tokens per second are not more progress, if the batch has grown.**
#
# You need no GPU.

# %%
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from measure.tracker import MemoryTracker
from nanoGPT.model import GPT, GPTConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
shape = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=75)
model = GPT(shape)
model.init_weights(0)
model.to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randint(75, (8, 64), device=DEVICE)


def train_step() -> None:
    model(x, x).backward()
    optimizer.step()
    optimizer.zero_grad()

# %% [markdown]
# ## a. Warm-up
#
# You will time single steps from the first one on.
#
# **Predict first:** how many times as long as the tenth step does the first one take? What does it do that the others
# do not?

# %%
def measure_call(call: Callable[[], None]) -> float:
    """Return the seconds of a call, until its work on the device has ended."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # earlier work must not count
    begin = time.perf_counter()
    call()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


seconds = [measure_call(train_step) for _ in range(12)]
print("milliseconds of each step:", *(f"{1e3 * each:.1f}" for each in seconds))
print(f"the first step took {seconds[0] / statistics.median(seconds[2:]):.1f} times as long as the median of the later ones")

# %% [markdown]
# The first step allocates memory for gradients and moments, and creates the threads of libraries. On a GPU it also
# creates handles and loads kernels, with `torch.compile` it compiles for minutes, and on several ranks it connects
# them. Leave out at least three steps. With `torch.compile` also leave out the first step with every new shape. On a
# CPU, the noise of later steps can hide the first one.
#
# ## b. The clock and the device
#
# You will measure with the wrong clock, and with the right one.
#
# A call of a CUDA operator puts a kernel into a queue (a *stream*) and returns at once. `time.perf_counter()` around it
# measures how long Python needs to fill the queue. There are two right ways:
#
# - **`torch.cuda.synchronize()`** before both readings of the clock, as in `measure_call`. It waits for everything,
#   so it is right for a full step, and wrong inside of one: it would destroy the overlap that you want to measure.
# - **CUDA events.** The device itself notes the time when it reaches them. Nothing waits:
#
# ```python
# begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
# begin.record()
# train_step()
# end.record()
# torch.cuda.synchronize()
# print(begin.elapsed_time(end), "ms")
# ```
#
# For kernels that are shorter than their launch (about 10 microseconds), even events measure Python: the queue is empty
# between two of them. `bench/kernels/kernels.py` therefore first lets the device sleep while Python fills the queue.
#
# **Predict first:** on a GPU, which is larger for one training step: the time without `synchronize`, or with it? On a
# CPU?

# %%
def measure_launch(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin  # wrong on a GPU: its work has only been queued


launch, full = (min(measure(train_step) for _ in range(10)) for measure in (measure_launch, measure_call))
print(f"on {DEVICE.type}: {1e3 * launch:.2f} ms without synchronize, {1e3 * full:.2f} ms with it")

# %% [markdown]
# On a CPU both are the same, because the operators run in the call. On a GPU the first number is too small, often by
# far, and it does not change if you make the kernels faster. `.item()`, `print(tensor)` and `if tensor > 0` also wait
# for the device. One of them in a training step can cost more than an optimization gains, if the CPU then no longer
# runs ahead.
#
# ## c. Noise
#
# You will compare two versions that do the same, and see a difference.
#
# **Predict first:** the two models below are equal. Time twenty forward and backward passes of the first one, and
# then twenty of the second one. How large is the difference of the means? And if the two alternate, and you compare
# the minimum?

# %%
twin = GPT(shape).to(DEVICE)


def run_backward(each: nn.Module) -> None:
    each(x, x).backward()


for _ in range(3):
    run_backward(model), run_backward(twin)
one_after_another = [[measure_call(lambda each=each: run_backward(each)) for _ in range(20)] for each in (model, twin)]
alternating = list(zip(*([measure_call(lambda each=each: run_backward(each)) for each in (model, twin)] for _ in range(20))))
for name, samples in (("one after another", one_after_another), ("alternating", alternating)):
    ratios = [statistic(samples[1]) / statistic(samples[0]) - 1 for statistic in (statistics.mean, statistics.median, min)]
    print(f"{name:18} difference of the mean {ratios[0]:+.1%}, of the median {ratios[1]:+.1%}, of the minimum {ratios[2]:+.1%}")

# %% [markdown]
# The true difference is 0. You see the noise of your measurement. A gain that is smaller than this noise is not a
# result. Other programs, the temperature and the clock of the device change from second to second. If the two
# versions alternate, both run under the same conditions. The minimum is the run that was disturbed least. It is the
# right number for code that always does the same; use the median for training with changing inputs. On several ranks,
# take the slowest rank of each step, since the others wait for it.
#
# `make profile` shows where a step spends its time, and `make gate` compares a phase with the baseline.
#
# ## d. Memory
#
# You will follow the memory of a step.
#
# On a GPU, torch's *caching allocator* keeps memory that tensors have freed, to use it again. So there are three
# numbers:
#
# | number | on a GPU | what it is |
# |---|---|---|
# | allocated | `torch.cuda.memory_allocated()` | the bytes of all tensors that are alive |
# | reserved | `torch.cuda.memory_reserved()` | what the allocator has taken from the device; `nvidia-smi` shows it, plus the CUDA context |
# | peak | `torch.cuda.max_memory_allocated()` | the largest allocated number since `reset_peak_memory_stats()` |
#
# A run fails when *reserved* cannot grow, even if *allocated* is much smaller: the free memory is in pieces
# (*fragmentation*). `PYTORCH_ALLOC_CONF=expandable_segments:True` helps.
#
# **Predict first:** at which moment of a step is the peak: at the end of the forward pass, in the backward pass, or in
# the update? Which category is largest then?

# %%
optimizer.zero_grad()  # section c has left gradients
with MemoryTracker(model, optimizer) as memory:  # counts the tensors of a step by category, also on a CPU
    train_step()
print("at the peak (MB):", {name: round(size / 1e6, 2) for name, size in memory.peak.items()})
print("after the step (MB):", {name: round(size / 1e6, 2) for name, size in memory.snapshot().items()})
assert memory.peak["activations"] == max(memory.peak.values())

# %% [markdown]
# The peak is at the start of the backward pass, when all activations still exist. After the step only parameters and
# moments are left. To see every tensor with the line of code that has created it, record a snapshot on a GPU, and
# open it in [PyTorch's viewer](https://pytorch.org/memory_viz):
#
# ```python
# torch.cuda.memory._record_memory_history()
# train_step()
# torch.cuda.memory._dump_snapshot("snapshot.pickle")
# ```
#
# With `--diagnostics_interval=10`, the trainers of this repository write such a file for every rank.
#
# ## e. More GPUs, a larger batch
#
# You will train on the same number of tokens with batches of two sizes, and compare the losses.
#
# With 8 times the GPUs it is tempting to give each of them the batch that one had. A step then takes about as long, and
# has 8 times the tokens: 8 times the tokens per second. But is it the same training? The next cell reads 123,000 tokens
# in 480 steps of 256 tokens, and in 60 steps of 2,048 tokens. The larger batch is tried with three learning rates: the
# same one, one multiplied by √8, and one multiplied by 8.
#
# **Predict first:** sort the four validation losses.

# %%
import json
import tempfile
from pathlib import Path

from nanoGPT.train import train
from nanoGPT.train_config import TrainConfig
from workshop.ranks import run_on_ranks


def measure_val_loss(micro_batches: int, steps: int, learning_rate: float) -> float:
    """Train on one rank. Return the validation loss at the end."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            device="cpu", n_layer=2, n_head=2, n_embd=64, block_size=32, batch_size=4,
            gradient_accumulation_steps=micro_batches, max_iters=steps, eval_interval=steps, eval_iters=40,
            learning_rate=learning_rate, min_lr=learning_rate / 10, warmup_iters=steps // 10, out_dir=folder,
        )
        run_on_ranks(train, 1, config, show=False)
        return json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]


RATE = 2e-3
runs = {"256 tokens": (2, 480, RATE)}
runs |= {f"2,048 tokens, {name}": (16, 60, RATE * factor) for name, factor in (("same", 1), ("√8", 8**0.5), ("8", 8))}
val_losses = {name: measure_val_loss(*run) for name, run in runs.items()}
for name, val_loss in val_losses.items():
    print(f"{name:22} learning rate {runs[name][2]:.4f}   validation loss {val_loss:.2f}")
assert sorted(val_losses, key=val_losses.get) == [*runs][:1] + [f"2,048 tokens, {name}" for name in ("√8", "same", "8")]

# %% [markdown]
# The larger batch has an eighth of the updates. Each update averages 8 times as many gradients, so it has less noise
# and may be larger. For SGD, the learning rate can grow as much as the batch (Goyal et al. 2017). AdamW divides the
# gradient by its typical size, which with small batches is mostly noise. The noise shrinks by √8, so √8 is the right
# factor (Malladi et al. 2022), and 8 is too much.
#
# Yet even with √8 the loss is higher: this batch is larger than the *critical batch size* (McCandlish et al. 2018),
# beyond which more tokens per step are mostly wasted. It is larger for larger models and lower losses, where you can use
# many GPUs. So compare trainers with the same batch, or compare the time to a loss. The trainers of this repository
# keep the tokens per step on any number of ranks, unless you change them. `make suite SUITE=scaling` measures the speed.
#
# ## To take home
#
# 1. Leave out the first steps, and the first step with each new shape.
# 2. A clock around a CUDA call measures the launch. Synchronize around a full step, or use events.
# 3. Nothing in a training step should wait for the device.
# 4. Let two versions alternate, and compare minimum or median. Measure two equal versions first: that is your noise.
# 5. On several ranks, the slowest rank decides.
# 6. Allocated, reserved and peak memory are different numbers. Reserved memory that is not allocated may be in pieces
#    that are too small to use: that is fragmentation.
# 7. The peak is usually at the start of the backward pass.
# 8. With AdamW, multiply the learning rate by the root of the factor of the batch. Beyond the critical batch size, a
#    larger batch needs more tokens for the same loss.
#
# ## Exercises
#
# **1. Your own change.** Replace `nn.GELU` of the model by `nn.ReLU`. Predict first: by how many percent does a step
# get faster? Is the difference larger than your noise of section (c)?
#
# <details><summary>Hint</summary>
#
# Alternate as in section (c). GELU takes a small part of a step. With a noise of 2% you need many repetitions to see
# 1%.
#
# </details>
