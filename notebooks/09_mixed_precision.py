# %% [markdown]
# # 9. Mixed precision: where are 16 bits enough?
#
# *35 minutes. Read notebooks [3](03_zero1.ipynb) and [3b](03b_overlap_and_clipping.ipynb) first, for the model state
# and the global gradient norm.*
#
# A GPU multiplies matrices of 16-bit numbers many times as fast as matrices of fp32 numbers, and 16-bit numbers need
# half the memory. But training in 16 bits alone does not work. **Which numbers of a training step may have 16 bits,
# and which may not?**
#
# You test five claims:
#
# - **bf16 has the range of fp32, but only 2 to 3 decimal digits. fp16 has one digit more, but a small range.**
# - **With a small learning rate, rounding removes most updates of a bf16 parameter, so the optimizer needs an fp32
#   master copy.**
# - **The ZeRO paper and this repository both store 16 bytes per parameter: 2 + 2 + 12 and 4 + 4 + 8.**
# - **In fp16, small gradients become zero, and training slows down without an error. Loss scaling prevents it.**
# - **Summing gradients over ranks in bf16 adds an error that grows with the number of ranks. The losses hardly show
#   it.**
#
# Open `nanoGPT/optim.py` (the class `LossScaler`) and `Runtime.autocast` in `nanoGPT/distributed/runtime.py` next to
# this page. You need no GPU. On a CPU you measure the rounding, which is the same as on a GPU, but not the speed.

# %%
import dataclasses
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import LossScaler, configure_adamw
from nanoGPT.train import train_step
from nanoGPT.train_config import TrainConfig
from workshop.pictures import COLORS, draw_curves, draw_memory_bars
from workshop.ranks import losses, run_on_ranks

# %% [markdown]
# All runs are small. Runs on one process have two micro-batches per step, and runs on several ranks have four.

# %%
folder = tempfile.TemporaryDirectory()  # for the runs of this notebook; it is deleted when the kernel stops
SMALL = {"device": "cpu", "block_size": 32, "batch_size": 4, "n_layer": 2, "n_head": 2, "n_embd": 64, "min_lr": 1e-4}
SMALL |= {"gradient_accumulation_steps": 4, "max_iters": 8, "eval_interval": 8, "eval_iters": 4, "log_interval": 1}
config = TrainConfig(**{**SMALL, "gradient_accumulation_steps": 2})


def load_data(config: TrainConfig) -> TokenData:
    return TokenData(config)


data = load_data(config)
shape = GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": data.tokenizer["vocab_size"]})
P = shape.count_params()

# %% [markdown]
# ## a. Three formats
#
# You will see what a number can and cannot be in each format.
#
# A floating-point number is sign x 2^exponent x 1.fraction. The exponent bits decide the range, and the fraction bits
# decide the precision:
#
# ```
# fp32   s eeeeeeee fffffffffffffffffffffff     8 exponent bits, 23 fraction bits
# bf16   s eeeeeeee fffffff                     8 exponent bits,  7 fraction bits: fp32, cut off
# fp16   s eeeee    ffffffffff                  5 exponent bits, 10 fraction bits
# ```
#
# **Predict first:** a weight is 0.02, a typical initial value. AdamW adds 0.00002 to it. What is the result in bf16?
# Which of the formats can represent a gradient of 1e-8?

# %%
print("          largest   smallest above 0   next number after 1   0.02 + 0.00002        1e-8")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info, step = torch.finfo(dtype), torch.tensor(2e-5, dtype=dtype)
    smallest = info.smallest_normal * info.eps  # a subnormal number
    total, tiny = torch.tensor(0.02, dtype=dtype) + step, torch.tensor(1e-8, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    print(f"{name:9} {info.max:8.1e} {smallest:14.1e} {1 + info.eps:21.7f} {total.item():19.8f} {tiny.item():14.1e}")

weight, half = torch.tensor(0.02, dtype=torch.bfloat16), torch.tensor(0.02, dtype=torch.float16)
print(f"\nnearest to 0.02: {weight.item():.8f} in bf16, {half.item():.8f} in fp16")
assert weight + 2e-5 == weight and half + 2e-5 > half and torch.tensor(1e-8, dtype=torch.float16) == 0

# %% [markdown]
# Both 16-bit formats show 0.02001953, for different reasons. In bf16 this is the number nearest to 0.02, and the update
# did not change it: the distance to the next bf16 number is 0.00012. In fp16 the nearest number to 0.02 is 0.02000427,
# and the update changed it to 0.02001953, the next fp16 number. (fp32 shows the sum.)
#
# In fp16 the gradient of 1e-8 became zero, because the smallest fp16 number above zero is 6e-8. So each 16-bit format
# has one weakness: bf16 has few digits, and fp16 has a small range.
#
# ## b. Updates that disappear: why there are fp32 master weights
#
# You will measure how many updates of a real run rounding to bf16 would remove, and then train without fp32 weights.
#
# **Predict first:** in step 10 of a run with a learning rate of 1e-3, which share of all parameters would keep exactly
# the same bf16 value?

# %%
def train_in(
    param_dtype: torch.dtype, steps: int, lr: float, compute_dtype: str = "float32"
) -> tuple[GPT, list[float]]:
    """Train with parameters and AdamW's state in one dtype. Return the model and the loss of each step."""
    model = GPT(shape)
    model.init_weights(config.seed)
    model.to(param_dtype)
    optimizer = AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99))
    run, scaler = create_runtime("cpu", compute_dtype), LossScaler(False)
    loss_sums = [train_step(model, optimizer, scaler, data, step, config, run)[0] for step in range(steps)]
    return model, [loss_sum.item() / config.gradient_accumulation_steps for loss_sum in loss_sums]


def train_flat(steps: int) -> Tensor:
    """Return all parameters after some steps in fp32, as one vector."""
    return torch.cat([p.detach().flatten() for p in train_in(torch.float32, steps, 1e-3)[0].parameters()])


# %%
before, after = train_flat(9), train_flat(10)
update = after - before
is_lost = (before.bfloat16() + update.bfloat16() == before.bfloat16()) & (update != 0)
print(f"size of a parameter {before.abs().median():.1e}, of its update {update.abs().median():.1e} (medians)")
print(f"{is_lost.float().mean():.0%} of the parameters would not change in bf16 at a learning rate of 1e-3")
smaller = (before.bfloat16() + (update / 10).bfloat16() == before.bfloat16()) & (update != 0)
print(f"{smaller.float().mean():.0%} at 1e-4")

# %% [markdown]
# At the end of a run the learning rate is usually small, so rounding removes most updates there.
#
# **Predict first:** three runs with a learning rate of 1e-4: everything in fp32; fp32 parameters with matrix products
# in bf16 (this is what `--dtype=bfloat16` does); and everything in bf16. Which of the losses after 60 steps differ by
# more than 0.01?

# %%
STEPS, LR = 60, 1e-4
curves = {
    "all fp32": train_in(torch.float32, STEPS, LR)[1],
    "fp32 master, bf16 products": train_in(torch.float32, STEPS, LR, "bfloat16")[1],
    "all bf16": train_in(torch.bfloat16, STEPS, LR)[1],
}
last = {name: sum(curve[-10:]) / 10 for name, curve in curves.items()}
for name, loss in last.items():
    print(f"{name:28} loss {loss:.4f} (mean of the last 10 steps), {loss - last['all fp32']:+.4f}")
assert abs(last["fp32 master, bf16 products"] - last["all fp32"]) < 0.01 < last["all bf16"] - last["all fp32"]

# %%
draw_curves(curves, f"Training with bf16 parameters is slower (learning rate {LR:g})")

# %% [markdown]
# Matrix products in bf16 cost almost nothing: each product is rounded, but the errors are random and small. Parameters
# in bf16 cost a lot, because the *same* small update is lost again and again. So the rule of mixed precision is:
# **compute in 16 bits, accumulate in 32 bits.** Sums over many steps (parameters, moments) and over many elements (the
# loss, norms, statistics) stay in fp32.
#
# ## c. 16 bytes, counted in two ways
#
# You will measure the model state of both ways to store it, on real ranks.
#
# The ZeRO paper stores parameters and gradients in 16 bits, and an fp32 *master copy* next to the two moments. This
# repository stores parameters and gradients in fp32. The parameters are then their own master copy, and autocast
# rounds them just before each product.

# %%
draw_memory_bars(
    {
        "ZeRO paper": {"parameters": 2, "gradients": 2, "fp32 master copy": 4, "first moment": 4, "second moment": 4},
        "this repository": {"parameters": 4, "gradients": 4, "first moment": 4, "second moment": 4},
    },
    "Model state with AdamW", "bytes per parameter",
)

# %% [markdown]
# Both need 16 bytes. The difference is what ZeRO-1 can shard: the optimizer state is 12 of the 16 bytes in the
# paper, and 8 of them here.
#
# `Zero1Optimizer` supports both: if a parameter is in bf16, a rank stores a master copy of its own shard.
#
# **Predict first:** P is 105,472. How many bytes does a rank of 4 store with the paper's layout, and with ours? Which
# one does ZeRO-1 shrink more?

# %%
from nanoGPT.costs import storage_bytes
from phase1_zero1.zero1 import Zero1Optimizer


def measure_paper_layout(config: TrainConfig) -> dict[str, int]:
    """Return the bytes of model state on this rank, with bf16 parameters under ZeRO-1."""
    model = GPT(shape)
    model.init_weights(config.seed)
    model.bfloat16()
    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=1e-3)
    model(*load_data(config).batch("train", 0, dist.get_rank())).backward()
    gradients = storage_bytes(p.grad for p in model.parameters())
    optimizer.step()
    states = [tensor for _, _, items in optimizer.local_state() for tensor in items.values() if tensor.dim()]
    sizes = {"parameters": storage_bytes(model.parameters()), "gradients": gradients}
    return sizes | {"optimizer_state": storage_bytes(states)}


# %% [markdown]
# And ours, which the ledger of phase 1 measures:

# %%
import json
from pathlib import Path

from nanoGPT.observers import add_flags
from phase1_zero1.parallelize import Zero1Config
from phase1_zero1.train import train as train_with_zero1


def measure_our_layout(ranks: int) -> dict[str, int]:
    """Return what the ledger measures on rank 0 of phase 1, with bf16 products."""
    out_dir = f"{folder.name}/ledger-{ranks}"
    small = {**SMALL, "max_iters": 3, "dtype": "bfloat16", "ledger": True, "out_dir": out_dir}
    run_on_ranks(train_with_zero1, ranks, add_flags(Zero1Config, "measure")(**small), show=False)
    return json.loads((Path(out_dir) / "ledger.json").read_text())["ranks"][0]["state_bytes"]

# %%
print("bytes per parameter          parameters   gradients   optimizer state   total   formula")
for ranks in (1, 4):
    for name, sizes, formula in (
        ("ZeRO paper", run_on_ranks(measure_paper_layout, ranks, config)[0], 4 + 12 / ranks),
        ("this repository", measure_our_layout(ranks), 8 + 8 / ranks),
    ):
        total = sum(sizes.values()) / P
        columns = "".join(f"{sizes[kind] / P:12.2f}" for kind in ("parameters", "gradients", "optimizer_state"))
        print(f"{name:16} {ranks} rank(s) {columns} {total:13.2f} {formula:9.2f}")
        assert abs(total - formula) < 0.02 * formula

# %% [markdown]
# The small excess is padding, and AdamW's step counter of each parameter.
#
# On many ranks the paper's layout approaches 4 bytes per parameter, and ours 8. Ours has one advantage: gradients are
# accumulated and reduced in fp32 (section e). FSDP shards everything, so there both layouts take 16P/N.
#
# ## d. Something broken on purpose: fp16 without loss scaling
#
# You will look at real gradients, and see which of them fp16 rounds to zero.
#
# The first gradient of a backward pass is that of the logits. For a token that is not the target, it is the token's
# probability, divided by the number of tokens in the step: the loss is their mean. GPT-2 has 50,304 logits. At the
# start each has a probability of about 1/50,304, and this step has 768 tokens.
#
# **Predict first:** how large is such a gradient? Is it above 6e-8, the smallest fp16 number? How large is it after a
# multiplication by 65,536?

# %%
gpt2_config = TrainConfig(
    dataset="shakespeare", device="cpu", block_size=32, batch_size=4, gradient_accumulation_steps=6, n_layer=1, n_head=1,
    n_embd=8, learning_rate=1e-2,
)
gpt2_data = load_data(gpt2_config)
gpt2_shape = GPTConfig.from_dict({**dataclasses.asdict(gpt2_config), "vocab_size": 50304})

# %%
def collect_logit_gradients() -> Tensor:
    """Return the absolute gradients of all logits of one micro-batch, in fp32."""
    model, gradients = GPT(gpt2_shape), []
    model.init_weights(config.seed)
    model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: gradients.append(outputs[0].abs()))
    (model(*gpt2_data.batch("train", 0, 0)) / gpt2_config.gradient_accumulation_steps).backward()
    return gradients[0].flatten()


gradients = collect_logit_gradients()
SCALE = LossScaler(True).scale
for scale in (1, SCALE):
    zeros = ((gradients * scale).half() == 0).float().mean()
    print(f"loss scale {scale:8,.0f}: median gradient {gradients.median() * scale:.1e}; {zeros:.2%} are zero in fp16")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(8, 3.3))
for scale, color, label in ((SCALE, COLORS[0], "scaled by 65,536"), (1, COLORS[3], "not scaled")):
    logarithms = (gradients * scale).clamp_(min=1e-30).log2_()  # in place: these are 6 million numbers
    counts = torch.histc(logarithms, bins=88, min=-32, max=12)
    axes.stairs(counts, torch.linspace(-32, 12, 89), fill=True, color=color, label=label)
axes.axvspan(-32, -25, color="#dddddd", zorder=0, label="zero in fp16")
axes.axvline(-14, color="black", linestyle=":", label="below: fp16 loses digits")
axes.set(yscale="log", xlabel="log2 of the gradient's absolute value", ylabel="number of logits", xlim=(-32, 12))
axes.set_title("Gradients of the logits of a real micro-batch")
axes.legend(frameon=False, fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# Without scaling, nearly all of these gradients are zero in fp16. Most of those that are not zero are rounded to about
# 2^-24, the smallest positive number of fp16. The largest ones belong to the 128 targets (the small bar near 2^-10,
# since 1/768 = 2^-9.6). **Loss scaling** multiplies the loss by a power of two. By the chain rule, all gradients are
# then multiplied by it. Before the update they are divided by it, which adds no error.
#
# **Predict first:** train with the real `train_step`, in fp32, in fp16 with a `LossScaler`, and in fp16 without one.
# The large gradients pull up the probability of the targets. The missing ones would push down all other tokens.
# Does the run without scaling crash, stand still, or learn more slowly?

# %%
def train_gpt2_vocabulary(dtype: str, is_scaled: bool) -> list[float]:
    """Return the losses of the first steps with GPT-2's vocabulary."""
    model, run, scaler = GPT(gpt2_shape), create_runtime("cpu", dtype), LossScaler(is_scaled)
    model.init_weights(config.seed)
    optimizer = configure_adamw(model, gpt2_config)
    sums = [train_step(model, optimizer, scaler, gpt2_data, step, gpt2_config, run)[0].item() for step in range(3)]
    return [loss / gpt2_config.gradient_accumulation_steps for loss in sums]


runs = {("float32", False): [], ("float16", True): [], ("float16", False): []}
for (dtype, is_scaled), curve in runs.items():
    curve += train_gpt2_vocabulary(dtype, is_scaled)
    name = dtype + (", loss scaling" if is_scaled else "")
    print(f"{name:22}" + "".join(f"{loss:10.4f}" for loss in curve))
reference = runs["float32", False]
assert abs(runs["float16", True][-1] - reference[-1]) < 0.002
assert runs["float16", False][-1] > reference[-1] + 0.01

# %% [markdown]
# It learns more slowly, and nothing reports it: after two updates the loss has fallen by 0.05, and in fp32 by 0.07.
# This is typical of numerical bugs. You find them only if you compare with a run in fp32.
#
# bf16 needs no scaling, because its range is that of fp32. This is why nearly all training uses it. If a GPU has no
# bf16 (a T4, for example), `--dtype=auto` selects fp16 with loss scaling. Too large a scale makes gradients infinite.
# `LossScaler` then skips the step and halves the scale. The decision comes from the *global* norm, so all ranks skip
# the same steps.
#
# ## e. Sums over ranks: the reduction
#
# You will reduce real gradients in bf16 and in fp32, and compare the errors.
#
# Every rank has the gradient of its own micro-batches. The reduction may happen in another dtype than the computation.
# bf16 sends half of the bytes.
#
# **Predict first:** each rank rounds its gradient to bf16 once, an error of up to 0.4%. In a ring, the sum of a chunk
# is rounded again on each rank that it visits. Does the error grow from 2 to 8 ranks?

# %%
from workshop import collectives

# %%
def measure_reduction_error(config: TrainConfig) -> dict[str, float]:
    """All-reduce the gradients of all ranks in three dtypes. Return the relative errors of the sum."""
    model = GPT(shape)
    model.init_weights(config.seed)
    model(*load_data(config).batch("train", 0, dist.get_rank())).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    sums = {dtype: gradient.to(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    for flat in sums.values():
        collectives.all_reduce(flat)
    exact = sums[torch.float64]
    return {str(d).removeprefix("torch."): ((s.double() - exact).norm() / exact.norm()).item() for d, s in sums.items()}


errors = {ranks: run_on_ranks(measure_reduction_error, ranks, config)[0] for ranks in (2, 4, 8)}
print("ranks   error in fp32   error in bf16   (relative to the sum in fp64)")
for ranks, error in errors.items():
    print(f"{ranks:5} {error['float32']:15.1e} {error['bfloat16']:15.1e}")
assert errors[8]["bfloat16"] > errors[2]["bfloat16"] > 1000 * errors[2]["float32"]

# %% [markdown]
# The error in bf16 is about 70,000 to 90,000 times as large, and it grows with the number of ranks. On thousands of
# ranks, a sum can become so large that the contribution of one rank disappears in it, like the updates in section (b).
#
# FSDP has a setting for each dtype. `param_dtype` is that of the all-gathers and of the computation, and `reduce_dtype`
# that of the reduce-scatters. Phase 3 uses bf16 for the first and fp32 for the second. What would bf16 reductions
# change?
#
# **Predict first:** 4 ranks, 8 steps, and three runs: only the computation in bf16, only the reduction in bf16, and
# both. Sort them by their loss difference from fp32.

# %%
from torch.distributed.fsdp import MixedPrecisionPolicy

from phase3_fsdp import fsdp
from phase3_fsdp.train import train as train_with_fsdp


def train_fsdp(dtype: str, reduce_dtype: torch.dtype) -> dict[int, float]:
    """Train phase 3 on 4 ranks with this dtype of the reduction, and return the losses."""

    def train_on_rank(config: fsdp.FsdpConfig) -> None:
        fsdp.MixedPrecisionPolicy = lambda **options: MixedPrecisionPolicy(**{**options, "reduce_dtype": reduce_dtype})
        train_with_fsdp(config)

    out_dir = f"{folder.name}/{dtype}-{reduce_dtype}"
    run_on_ranks(train_on_rank, 4, fsdp.FsdpConfig(**SMALL, dtype=dtype, out_dir=out_dir), show=False)
    return losses(out_dir)

# %%
reference, differences = train_fsdp("float32", torch.float32), []
print("computation   reduction   max loss difference from fp32")
for dtype, reduce_dtype in (("bfloat16", torch.float32), ("float32", torch.bfloat16), ("bfloat16", torch.bfloat16)):
    curve = train_fsdp(dtype, reduce_dtype)
    differences.append(max(abs(curve[step] - reference[step]) for step in reference))
    print(f"{dtype:13} {str(reduce_dtype).removeprefix('torch.'):11} {differences[-1]:.1e}")
assert differences[1] < 1e-4 < differences[0] < 1e-2

# %% [markdown]
# The bf16 reduction changes the losses about 200 times less than the bf16 computation. The error of an element is up
# to 0.4%, but the errors of many elements are independent, and AdamW's moments average them over many steps.
#
# So why does phase 3 reduce in fp32? A reduction happens once per step, so half of its bytes is a small gain with
# several micro-batches. And this run has 4 ranks and 8 steps: it cannot prove that bf16 is safe on 1,000 ranks. An
# engineer measures the error at the scale that matters, and pays for fp32 where it is cheap.
#
# ## To take home
#
# 1. bf16 has the range of fp32 and 2 to 3 digits. fp16 has 3 to 4 digits, and its smallest number is 6e-8.
# 2. Compute in 16 bits; accumulate in 32 bits.
# 3. With bf16 parameters, rounding removes most small updates. The optimizer needs an fp32 master copy.
# 4. The ZeRO paper counts 2 + 2 + 12 bytes per parameter, and this repository 4 + 4 + 8. Both give 16.
# 5. With 2 + 2 + 12, ZeRO-1 can shard three quarters of the model state; with 4 + 4 + 8, one half.
# 6. In fp16, small gradients become zero. The run learns more slowly, and nothing reports it.
# 7. Loss scaling multiplies the loss by a power of two, and divides the gradients before clipping and the update.
# 8. If the scaled gradients overflow, all ranks skip the step together and halve the scale.
# 9. A reduction in bf16 sends half of the bytes. Its error grows with the number of ranks, and AdamW averages much of
#    it.
# 10. Compare every new precision with a run in fp32: numerical bugs raise no errors.
#
# ## Exercises
#
# A program checks these exercises: `make exercise N=precision.1` writes the task into `work/`.
#
# | exercise | task |
# |---|---|
# | `precision.1` | scale the loss, and unscale the gradients |
# | `precision.2` | skip the same steps on all ranks |
# | `precision.3` | round to bf16 stochastically (exercise 2 below) |
# | `zero1.3` | create the shards of a slice, with fp32 master copies for bf16 parameters |
# | `baseline.4` | write the training step, with the loss scaler in the right places |
# | `bugs.3` | fix a kernel whose gradient loses precision with the number of chunks |
#
# **1. Unscale before you clip.** Predict first: what happens if `train_step` clips the gradients before it divides them
# by the loss scale? Does AdamW notice?
#
# <details><summary>Hint</summary>
#
# The norm is 65,536 times as large, so nearly every step is clipped to a norm of 1, and then divided by 65,536. AdamW
# divides the gradient by its own size, so a constant factor cancels, until the gradients reach its epsilon of 1e-8.
# But the factor is not constant: steps with a large gradient and steps with a small one now count the same.
#
# </details>
#
# **2. Stochastic rounding** (`precision.3`). Some trainers store parameters in bf16 without a master copy. They round an
# update up or down at random, with probabilities such that the expected value is right. Predict first: 1,000 weights of
# 0.02 get 100 updates of 0.00002 each. What is their mean with the usual rounding to the nearest number, and what is it
# with stochastic rounding? How much memory does a parameter then save?
#
# <details><summary>Hint</summary>
#
# bf16 is fp32 without its lower 16 bits. Add uniform noise to these bits before you cut them off. The mean of many updates
# is then right, so the loss follows the fp32 curve, with more noise. A parameter takes 2 bytes instead of 6.
#
# </details>

# %% answer="round_stochastically"
def round_stochastically(x: Tensor) -> Tensor:
    """Round fp32 numbers to bf16, up or down at random, so that the expected value is right."""
    bits = x.view(torch.int32) + torch.randint(0, 2**16, x.shape, dtype=torch.int32)
    return (bits & -(2**16)).view(torch.float32).bfloat16()

# %%
nearest = stochastic = torch.full((1000,), 0.02).bfloat16()
for _ in range(100):
    nearest, stochastic = (nearest.float() + 2e-5).bfloat16(), round_stochastically(stochastic.float() + 2e-5)
print(f"0.02 + 100 x 0.00002, rounded to nearest: {nearest.float().mean():.4f}, stochastically: {stochastic.float().mean():.4f}")
assert (nearest == torch.tensor(0.02).bfloat16()).all() and abs(stochastic.float().mean() - 0.022) < 1e-4
