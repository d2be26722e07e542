# %% [markdown]
# # 4. Custom kernels in Triton
#
# *55 minutes. Read [notebook 1](01_one_process.ipynb) first, for the model and its training step. You need Linux, but no
# GPU.*
#
# A kernel is a function that runs on a GPU. Triton lets you write kernels in Python. In this notebook you write a
# kernel, break it in seven ways, fix it and derive its backward pass. [Notebook 4b](04b_compiled_kernels.ipynb) reads
# the code that it compiles to.
#
# The notebook tests four claims about the kernels of phase 2:
#
# - **They read each input once and write each output once.**
# - **They are as accurate as torch.**
# - **Their sums are bitwise reproducible, in whatever order the GPU runs the programs.**
# - **All of this can be checked on a laptop.**
#
# Speed cannot be checked on a laptop. Section (a) and notebook 4b therefore compute an upper limit for the speed. On a
# machine with a GPU, `make bench NAME=kernels` measures the speed itself.
#
# Normally Triton compiles kernels for a GPU. With `TRITON_INTERPRET=1` it runs them on the CPU with NumPy instead, and
# you can put `print` into a kernel. Open `phase2_triton/kernels/layernorm.py` and `cross_entropy.py` next to this page.
# You need no GPU, but you need Linux, because Triton is packaged for Linux only.

# %%
import math
import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported, so set it first, also on a GPU machine

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from phase2_triton.kernels import attention, cross_entropy, layernorm
from workshop.lessons.kernels import MemoryTraffic

torch.manual_seed(1337);

# %% [markdown]
# ## a. Start from a reference, and count the bytes
#
# In this section you learn how many bytes LayerNorm has to move, and why that number limits its speed.
#
# Before you write a kernel, write the same computation in a few lines of plain torch. This *reference* is easy to
# trust, and every kernel is compared with it. LayerNorm takes each row of x (M, N), subtracts its mean, divides by its
# standard deviation and multiplies by a learned gain, `weight`:

# %%
def reference_layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    var = centred.square().mean(-1, keepdim=True)
    return centred * torch.rsqrt(var + eps) * weight


x, weight = torch.randn(256, 768), torch.rand(768) + 0.5
difference = (reference_layer_norm(x, weight) - F.layer_norm(x, (768,), weight)).abs().max().item()
print(f"max difference from F.layer_norm: {difference:.1e}")
assert torch.allclose(reference_layer_norm(x, weight), F.layer_norm(x, (768,), weight), atol=1e-5)

# %% [markdown]
# On a GPU, eager torch runs each of these operations as a separate kernel. Kernels pass tensors to each other through
# device memory: one kernel writes its result, and the next kernel reads it. `MemoryTraffic` records the size of
# every tensor that an operation reads or writes.
#
# **Predict first:** how often does `reference_layer_norm` read or write a tensor of the size of x? What is the minimum?

# %%
with MemoryTraffic() as traffic:
    reference_layer_norm(x, weight)
operations_bytes = traffic.print_rows(unit=x.nbytes)
forward_cost, backward_cost = layernorm.cost(256, 768, itemsize=4, bias=False)
kernel_bytes = forward_cost.read + forward_cost.written
print(f"total for separate operations: {operations_bytes / x.nbytes:.3f} sizes of x")
print(f"total for one kernel:          {kernel_bytes / x.nbytes:.3f} sizes of x")
assert round(operations_bytes / x.nbytes) == 10 and round(kernel_bytes / x.nbytes) == 2

# %% [markdown]
# Separate operations move the size of x ten times. One kernel can do it in two: it reads x and writes y.
# `layernorm.cost(...)` returns this count for the LayerNorm kernel of phase 2: bytes and floating-point operations
# (FLOPs) of its forward and backward pass. Every kernel file has such a function.
#
# How much time do these bytes take? This notebook uses NVIDIA's H100 SXM as its example GPU. Its numbers are
# **published, not measured**. Its data sheet lists a memory bandwidth of 3.35 TB/s, and 67 TFLOP/s for arithmetic in
# fp32 outside the tensor cores.
#
# **Predict first:** take 16,384 tokens with 768 channels in bfloat16. How many microseconds does an H100 need to move
# the bytes of one LayerNorm? How many does it need for the FLOPs?

# %%
BANDWIDTH = 3.35e12  # bytes per second
SCALAR_FLOPS = 67e12  # FLOPs per second in fp32, outside the tensor cores

forward_cost, _ = layernorm.cost(16384, 768, itemsize=2, bias=False)
bytes_moved = forward_cost.read + forward_cost.written
print(f"memory:     {bytes_moved / 1e6:6.1f} MB      {bytes_moved / BANDWIDTH * 1e6:5.1f} microseconds")
flops = forward_cost.flops
print(f"arithmetic: {flops / 1e6:6.1f} MFLOPs  {flops / SCALAR_FLOPS * 1e6:5.1f} microseconds")
assert bytes_moved / BANDWIDTH > 5 * flops / SCALAR_FLOPS

# %% [markdown]
# Moving the bytes takes ten times as long as the arithmetic. LayerNorm is *memory-bound*, and so are most operations of
# a GPT that are not matrix products. You can make a memory-bound kernel faster only if it moves fewer bytes.
#
# ## b. A kernel runs as many programs
#
# In this section you write a first kernel and see which part of the data each of its programs loads.
#
# You launch a kernel as a grid of *programs*. All programs run the same function, and each one asks for its number,
# the program id. A program computes with a *tile*, for example one row, as if it were a single value. The compiler
# spreads the elements of the tile over the threads of the GPU. A tensor arrives as a pointer to its first element.
# Adding offsets to the pointer gives the addresses of other elements.
#
# The syntax is short: `@triton.jit` turns a function into a kernel, and `kernel[(3,)](...)` launches 3 programs. An
# argument marked `tl.constexpr` is a constant at compile time. A *lane* is one element of a tile here.
#
# **Predict first:** x has the shape (3, 4). Count its elements from 0. Which elements does each program load, and what
# are the three means?

# %%
@triton.jit
def centre_row_kernel(x, y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    offsets = row * N + lanes
    v = tl.load(x + offsets)
    mean = tl.sum(v, 0) / N
    print(f"program {row}: lanes {lanes} load elements {offsets} with values {v}; the mean is {mean}")
    tl.store(y + offsets, v - mean)


x = torch.arange(12.0).view(3, 4) ** 2
y = torch.full_like(x, math.nan)
centre_row_kernel[(3,)](x, y, 4, BLOCK=4)
print(y)
assert torch.equal(y, x - x.mean(1, keepdim=True))

# %% [markdown]
# The interpreter prints a single number as an array with one element, because it computes with NumPy. The cell fills y
# with NaN before the launch, so that you can see elements that no program writes.
#
# The interpreter runs program 0, then 1, then 2. A GPU runs hundreds of programs at the same time, in no guaranteed
# order. This is the most important difference between the two, and it matters in sections (c) and (g).
#
# ## c. Rows that do not fill a tile need masks
#
# In this section you learn three mask errors, and how *guard bands* and a fair accuracy test find them.
#
# **Predict first:** what does Triton report for a row of 6 elements?

# %%
x = torch.arange(1.0, 19.0).view(3, 6)
try:
    centre_row_kernel[(3,)](x, torch.empty_like(x), 6, BLOCK=6)
except Exception as error:
    message = str(error)
print(message)
assert "power of 2" in message

# %% [markdown]
# The size of a tile must be a power of two. A row of 6 elements therefore needs a tile of 8, and two of its lanes lie
# beyond the row. Without a mask these two lanes load whatever comes next in memory. Beyond the end of x that can be any
# other data, and a test that only compares results may still pass.
#
# The tests of this project therefore place every tensor between two *guard bands*, which are filled with NaN. If a
# kernel reads out of bounds, NaN appears in its result. If it writes out of bounds, NaN disappears from a band.
# `tests/helpers/kernels.py` adds guard bands to every buffer.
#
# The next kernel subtracts the mean of each row. Two switches turn off its masks.
#
# **Predict first:** without any mask, which of the three rows are wrong, and what values do they get?

# %%
@triton.jit
def centre_kernel(
    x, y, N, MASK_LOAD: tl.constexpr, MASK_STORE: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr
):
    """Subtract the mean of each row. With REVERSE, the last program computes the first row."""
    row = tl.program_id(0)
    if REVERSE:
        row = tl.num_programs(0) - 1 - row
    lanes = tl.arange(0, BLOCK)
    load_mask = lanes < (N if MASK_LOAD else BLOCK)  # a lane whose mask is False loads nothing and gets 0
    store_mask = lanes < (N if MASK_STORE else BLOCK)
    v = tl.load(x + row * N + lanes, mask=load_mask, other=0.0)
    centred = v - tl.sum(v, 0) / N
    tl.store(y + row * N + lanes, centred, mask=store_mask)


# %% [markdown]
# Run it between guard bands. (`workshop/lessons/kernels.py` has the two functions for bands.)

# %%
from workshop.lessons.kernels import add_guard_bands, bands_are_intact


def run_centre_kernel(mask_load: bool, mask_store: bool, reverse: bool = False) -> tuple[torch.Tensor, bool]:
    """Return the kernel's result for x, and whether the guard bands around the result are intact."""
    (guarded_x, _), (y, buffer) = add_guard_bands(x), add_guard_bands(torch.full_like(x, math.nan))
    centre_kernel[(3,)](guarded_x, y, 6, MASK_LOAD=mask_load, MASK_STORE=mask_store, REVERSE=reverse, BLOCK=8)
    return y, bands_are_intact(buffer)


correct = x - x.mean(1, keepdim=True)
y, _ = run_centre_kernel(mask_load=False, mask_store=False)
print("correct:\n", correct, "\nwithout masks:\n", y)
assert not torch.isclose(y, correct).any() and y[2].isnan().all()

# %% [markdown]
# All three rows are wrong. The first two rows add two elements of the next row to their sum. The last row adds NaN from
# the guard band. Without the band it would add two arbitrary numbers, and nothing would show it.
#
# **Predict first:** now the loads have their mask, and the stores have none. Which rows are wrong?

# %%
y, is_intact = run_centre_kernel(mask_load=True, mask_store=False)
print("no mask on the stores: correct:", torch.equal(y, correct), " bands intact:", is_intact)
y_reversed, _ = run_centre_kernel(mask_load=True, mask_store=False, reverse=True)
print("no mask on the stores, last row first:\n", y_reversed)
y_masked, masked_is_intact = run_centre_kernel(mask_load=True, mask_store=True)
y_masked_reversed, _ = run_centre_kernel(mask_load=True, mask_store=True, reverse=True)
print("both masks: correct:", torch.equal(y_masked, correct), " bands intact:", masked_is_intact)
assert torch.equal(y, correct) and not is_intact
assert not torch.equal(y_reversed, correct)
assert torch.equal(y_masked, correct) and torch.equal(y_masked_reversed, correct) and masked_is_intact

# %% [markdown]
# No row is wrong, and that makes this bug hard to find. Each program overwrites the first two elements of the next row.
# The next program runs later and writes the correct values again. In another order the wrong values stay.
#
# The interpreter always uses the same order, so it cannot show such *data races*. The guard band does reveal this one,
# because the last program writes into the band.
#
# Next comes the full LayerNorm. All its loads and stores have masks.
#
# **Predict first:** the kernel below is still wrong. The lanes beyond the row hold 0. What do they add to the sum of
# squares? For N = 769 and a mean near 1, is y too large or too small, and by which factor?

# %%
@triton.jit
def wrong_variance_kernel(x, weight, y, N, eps, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    inside = lanes < N
    v = tl.load(x + row * N + lanes, mask=inside, other=0.0)
    centred = v - tl.sum(v, 0) / N
    var = tl.sum(centred * centred, 0) / N
    w = tl.load(weight + lanes, mask=inside, other=0.0)
    tl.store(y + row * N + lanes, centred / tl.sqrt(var + eps) * w, mask=inside)


# %%
x, weight = torch.randn(4, 769) + 1, torch.rand(769) + 0.5
y = torch.empty_like(x)
wrong_variance_kernel[(4,)](x, weight, y, 769, 1e-5, BLOCK=1024)
measured_ratio = (y / reference_layer_norm(x, weight)).median(1).values
variance, extra_variance = x.var(1, correction=0), (1024 - 769) / 769 * x.mean(1).square()
predicted_ratio = (variance / (variance + extra_variance)).sqrt()
print("y / correct y, measured: ", measured_ratio, "\ny / correct y, predicted:", predicted_ratio)
assert torch.allclose(measured_ratio, predicted_ratio, atol=1e-4) and (predicted_ratio < 0.95).all()

# %% [markdown]
# The kernel subtracts the mean from all lanes, so the lanes beyond the row hold minus the mean and no longer 0. Each of
# the 255 extra lanes adds the square of the mean to the sum. The variance gets too large, and y too small. A model with
# this bug would still train, only a little worse, and the cause would be hard to find. The fix is a second mask.
#
# The kernel below is correct. Two more details matter in section (d) and for half precision: the kernel computes row
# offsets with 64 bits, and it converts each loaded value to fp32.
#
# When is a kernel accurate enough? It cannot be bitwise identical to torch, because it adds numbers in another order.
# The tests use this rule: compute an exact result in fp64, and **allow the kernel at most twice torch's error in the
# same type**, plus one rounding error.

# %%
@triton.jit
def norm_kernel(x, weight, y, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < N
    v = tl.load(x + row * N + lanes, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, v - tl.sum(v, 0) / N, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / N + eps)
    w = tl.load(weight + lanes, mask=inside, other=0.0)
    tl.store(y + row * N + lanes, centred * rstd * w, mask=inside)


# %% [markdown]
# The rule, in code. (`max_error(result, exact)` returns the largest absolute error, and NaN counts as infinity.)

# %%
from workshop.lessons.kernels import max_error


def is_accurate(result: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, factor: float = 2.0) -> bool:
    """Return whether the error is at most `factor` times the error of eager torch, plus one rounding error."""
    rounding = exact.abs().max().item() * torch.finfo(result.dtype).eps
    return max_error(result, exact) <= factor * max_error(eager, exact) + rounding


def tile_size(N: int) -> int:
    """Return the smallest power of two that is at least N."""
    return triton.next_power_of_2(N)


# %%
print("   N  type           max error of the kernel   max error of torch")
for dtype in (torch.float32, torch.float16):
    for N in (1, 6, 769, 1023, 1600):
        x, weight = (torch.randn(3, N) + 1).to(dtype), torch.rand(N) + 0.5
        (guarded_x, _), (gain, _) = add_guard_bands(x), add_guard_bands(weight)
        y, buffer = add_guard_bands(torch.full_like(x, math.nan))
        norm_kernel[(3,)](guarded_x, gain, y, N, 1e-5, BLOCK=tile_size(N))
        exact = reference_layer_norm(x.double(), weight.double())
        eager = F.layer_norm(x.float(), (N,), weight).to(dtype)
        print(f"{N:4}  {str(dtype):14} {max_error(y, exact):23.1e} {max_error(eager, exact):20.1e}")
        assert is_accurate(y, eager, exact) and bands_are_intact(buffer)

# %% [markdown]
# In fp16 both errors equal one rounding of the result.
#
# Why fp16, and not bfloat16, which you would use for training? The interpreter of Triton 3.9 computes wrong bfloat16
# results without an error. The operators of phase 2 therefore convert bfloat16 to fp32 when they are interpreted, and
# the tests check half precision with fp16.
#
# ## d. Three bugs of real loss kernels
#
# In this section you learn which value a padded lane needs, when to subtract in fp32, and when offsets overflow.
#
# The loss of one token is `log(sum(exp(z))) - z[target]` over its V logits z. The kernel below computes one row per
# program. It subtracts the largest logit first, so that `exp` does not overflow.
#
# **The first bug.** **Predict first:** GPT-2 has 50,257 tokens, so the tile has 65,536 lanes. Which value of `other`
# do the lanes beyond the row need? A new model has logits near 0. What should its loss be, and what is it if `other` is
# 0, as above?

# %%
@triton.jit
def loss_kernel(logits, targets, losses, V, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    z = tl.load(logits + row * V + lanes, mask=lanes < V, other=OTHER).to(tl.float32)
    peak = tl.max(z, 0)
    lse = peak + tl.log(tl.sum(tl.exp(z - peak), 0))
    tl.store(losses + row, lse - tl.load(logits + row * V + tl.load(targets + row)))


# %%
V = 50257
logits, targets = 0.02 * torch.randn(4, V), torch.tensor([0, 7, 4000, V - 1])
exact = F.cross_entropy(logits.double(), targets, reduction="none")
eager = F.cross_entropy(logits, targets, reduction="none")
kernel_losses = {}
for other in (0.0, -math.inf):
    kernel_losses[other] = torch.empty(4)
    loss_kernel[(4,)](logits, targets, kernel_losses[other], V, OTHER=other, BLOCK=tile_size(V))
    print(f"other = {other:4}: mean loss {kernel_losses[other].mean():.4f}")
print(f"correct mean loss: {exact.mean():.4f}; ln 50257 = {math.log(V):.4f}, ln 65536 = {math.log(65536):.4f}")
assert is_accurate(kernel_losses[-math.inf], eager, exact) and not is_accurate(kernel_losses[0.0], eager, exact)
assert abs(kernel_losses[0.0].mean() - math.log(65536)) < 0.02 and abs(exact.mean() - math.log(V)) < 0.02

# %% [markdown]
# With `other=0` each of the 15,279 extra lanes adds exp(0 - peak). The loss is then the loss of a model with 65,536
# tokens. Choose a fill value that does not change the next operation: 0 for a sum, minus infinity for a maximum and for
# `exp`. The cheapest test of notebook 1 finds this bug too: check the loss of the first step.
#
# **The second bug.** The gradient of the loss with respect to the logits is the vector of probabilities p, minus 1 at
# the target. To save memory, kernels write it over the logits. In half precision the order of operations matters. You
# can subtract 1 from p in fp32, or from p after it has been rounded to the type of the logits.
#
# **Predict first:** bfloat16 has 8 significant binary digits, fp16 has 11. What is 0.999 in each of them? The gradient
# at the target should be -0.001. What does it become?

# %%
@triton.jit
def gradient_kernel(logits, target, V, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient over the logits; with ROUND_FIRST, round p to their type before subtracting 1."""
    lanes = tl.arange(0, BLOCK)
    offsets = tl.program_id(0).to(tl.int64) * V + lanes
    z = tl.load(logits + offsets, mask=lanes < V, other=-float("inf")).to(tl.float32)
    e = tl.exp(z - tl.max(z, 0))
    p = e / tl.sum(e, 0)
    if ROUND_FIRST:
        p = p.to(logits.dtype.element_ty).to(tl.float32)
    tl.store(logits + offsets, p - tl.where(lanes == target, 1.0, 0.0), mask=lanes < V)


# %%
from workshop.lessons.kernels import print_gradients

target_p = torch.tensor([0.9, 0.99, 0.999, 0.9998], dtype=torch.float64)
z = torch.zeros(4, 16)
z[:, 3] = (target_p / ((1 - target_p) / 15)).log()  # one logit above 15 zeros, such that softmax gives target_p
logits, gradients = z.half(), {}
exact = logits.double().softmax(1)[:, 3] - 1
for round_first in (True, False):
    written = logits.clone()
    gradient_kernel[(4,)](written, 3, 16, ROUND_FIRST=round_first, BLOCK=16)
    gradients[round_first] = written[:, 3].double()
in_bfloat16 = (exact + 1).bfloat16().double() - 1
print_gradients(target_p, (exact, in_bfloat16, gradients[True], gradients[False]))
assert in_bfloat16[2] == 0 and gradients[True][3] == 0 and 0.16 < in_bfloat16[1] / exact[1] - 1 < 0.18
assert ((gradients[False] / exact - 1).abs() < 2**-10).all()

# %% [markdown]
# With p rounded to bfloat16, a token with p = 0.999 gets no gradient at all, so training no longer corrects its
# probability. At p = 0.99 the gradient is already wrong by one sixth.
#
# If you subtract in fp32, the result is accurate to the last digit of fp16. A floating-point type has the same relative
# precision for small and for large numbers: it can represent -0.001 well, but it cannot represent 0.999 well enough.
# (Torch rounded the bfloat16 column. The fp16 columns come from the interpreted kernel.)
#
# **The third bug** needs a large batch. A program id is an int32, and so is its product with the length of a row.
#
# **Predict first:** take 65,536 rows of 50,304 bfloat16 logits. From which row on does the offset overflow? Which
# address does the kernel use then?

# %%
print("first row that begins at or beyond element 2^31:", -(-(2**31) // 50304), "of 65,536")


@triton.jit
def read_rows_kernel(x, out, stride, USE_INT64: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows 0, 4, 8, ... of x."""
    row = tl.program_id(0) * 4
    if USE_INT64:
        row = row.to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    offset = row * stride
    print(f"program {tl.program_id(0)}: the offset is {offset}")
    tl.store(out + tl.program_id(0) * BLOCK + lanes, tl.load(x + offset + lanes))


# %%
rows = torch.empty(4 * 2**30 + 8, dtype=torch.float16).as_strided((5, 8), (2**30, 1))
rows.copy_(torch.arange(40).view(5, 8))
for use_int64 in (False, True):
    out = torch.zeros(2, 8, dtype=torch.float16)
    read_rows_kernel[(2,)](rows, out, rows.stride(0), USE_INT64=use_int64, BLOCK=8)
    print(f"with {64 if use_int64 else 32}-bit offsets, row 4 is read as {out[1].tolist()}")
    assert torch.equal(out[1], rows[4 if use_int64 else 0])
del rows

# %% [markdown]
# With 32 bits, 2^32 wraps around to 0. The kernel reads row 0 instead of row 4, and there is no error. (For row 2 the
# offset 2^31 would wrap around to -2^31, an address outside the tensor.)
#
# The tensor spans 8.6 GB of addresses, but the operating system reserves memory only for pages that are written. This
# cell writes five short rows. So you can find a bug of large batches on a laptop.
#
# ## e. The kernels of phase 2
#
# In this section you apply the accuracy rule to the kernels that phase 2 trains with.
#
# `phase2_triton.kernels` contains the kernels above in their final form and several others, all with backward passes.
# They are registered as torch operators, so autograd, `torch.compile`, autocast and meta tensors support them. The cell
# below runs three of them on awkward shapes, between guard bands, under the same rule. It checks results and
# gradients. (The gradients of attention may have three times torch's error.)
#
# **Predict first:** for which cases is the kernel's error larger than torch's? The answer need not be all or none.

# %%
from workshop.lessons.kernels import bind_targets, compare_with_torch, run_torch_attention, run_torch_layer_norm

loss, torch_loss = cross_entropy.cross_entropy, F.cross_entropy
CASES = [
    ("layer_norm", layernorm.layer_norm, run_torch_layer_norm, [(3, 1), (1,)], 2),
    ("layer_norm", layernorm.layer_norm, run_torch_layer_norm, [(5, 769), (769,)], 2),
    ("cross_entropy", bind_targets(loss, 75), bind_targets(torch_loss, 75), [(4, 75)], 2),
    ("cross_entropy", bind_targets(loss, V), bind_targets(torch_loss, V), [(4, V)], 2),
    ("causal_attention", attention.causal_attention, run_torch_attention, [(1, 2, 1, 20)] * 3, 3),
    ("causal_attention", attention.causal_attention, run_torch_attention, [(1, 2, 97, 20)] * 3, 3),
]
print("                                    max error of result  max error of gradients")
print("operator          shape                kernel     torch       kernel     torch")
for case in CASES:
    compare_with_torch(*case)

# %% [markdown]
# Two edge cases of the loss:

# %%
from phase2_triton.kernels.core import KernelError

loss_without_targets = cross_entropy.cross_entropy(torch.randn(3, 9), torch.full((3,), -1))
print("loss of a batch in which every target is ignored:", loss_without_targets.item())
try:
    cross_entropy.cross_entropy(torch.randn(3, 9), torch.tensor([0, 9, 1]))
except KernelError as error:
    message = str(error)
print("error for a target out of range:", message)
assert loss_without_targets == 0 and "9 classes" in message

# %% [markdown]
# In some cases the kernel has the larger error, in other cases torch. Differences this small depend on chance, so the
# rule limits only their size. A batch without any target has loss 0, and not 0/0.
#
# A kernel with one row per program gives a GPU little work where rows are short. The LayerNorm of phase 2 therefore
# loads a tile of several rows, `rows[:, None]` by `lanes[None, :]`, with one mask for rows and lanes out of bounds.
# This is step 2 in `layernorm.py`. The cross-entropy of phase 2 reads a row of 50,257 logits in pieces and keeps a
# running maximum. So does attention, over the keys.
#
# ## f. Derive a backward pass
#
# In this section you derive the backward pass of LayerNorm, check each line of the derivation, and turn it into a
# kernel. You also see why a falling loss does not prove that a gradient is correct.
#
# Autograd cannot differentiate a kernel, so a custom kernel needs a custom backward pass. For one row, let m be the
# mean, v the variance, r = 1 / sqrt(v + eps), and xhat = (x - m) r. Then y = xhat w. Autograd provides dy, the gradient
# with respect to y. We want dx, the gradient with respect to x.
#
# First, how do m, v and r change with one element x_j? Since the sum of (x_i - m) is 0, the second line gets short:
#
#     dm/dx_j = 1/N
#     dv/dx_j = 2/N sum_i (x_i - m) ([i = j] - 1/N) = 2 (x_j - m) / N
#     dr/dx_j = -1/2 (v + eps)^(-3/2) dv/dx_j = -r^3 (x_j - m) / N = -r^2 xhat_j / N
#
# Next, apply the product rule to xhat_i = (x_i - m) r:
#
#     dxhat_i/dx_j = r ([i = j] - 1/N) - (x_i - m) r^2 xhat_j / N
#                  = r ([i = j] - 1/N - xhat_i xhat_j / N)
#
# Finally, let g_i = dy_i w_i be the gradient with respect to xhat_i, and sum over i:
#
#     dx_j = sum_i g_i dxhat_i/dx_j = r (g_j - mean(g) - xhat_j mean(g xhat))
#
# The result needs two sums along the row, and no N x N matrix. Before you write a kernel, you can compare each line
# with autograd in fp64.
#
# **Predict first:** add a constant to all elements of x. How does y change? What follows for the sum of dx along a row?
# Then multiply x by 1.01. How does y change, approximately? What follows for the sum of dx (x - m)?

# %%
N, eps = 12, 1e-5
x, w, dy = (torch.randn(N, dtype=torch.float64) for _ in range(3))


def mean(x):
    return x.mean()


def var(x):
    return (x - x.mean()).square().mean()


def rstd(x):
    return torch.rsqrt(var(x) + eps)


def normalize(x):
    return (x - mean(x)) * rstd(x)


# %% [markdown]
# Each line of the derivation, next to the function that it differentiates:

# %%
r, xhat, identity = rstd(x), normalize(x), torch.eye(N, dtype=torch.float64)
g = dy * w
dx = r * (g - g.mean() - xhat * (g * xhat).mean())
DERIVATIVES = {
    "dm/dx": (mean, torch.full((N,), 1 / N, dtype=torch.float64)),
    "dv/dx": (var, 2 * (x - x.mean()) / N),
    "dr/dx": (rstd, -r.square() * xhat / N),
    "dxhat/dx": (normalize, r * (identity - 1 / N - torch.outer(xhat, xhat) / N)),
    "dx": (lambda x: (dy * w * normalize(x)).sum(), dx),
}
for name, (function, derivative) in DERIVATIVES.items():
    error = (torch.autograd.functional.jacobian(function, x) - derivative).abs().max().item()
    print(f"{name:9} max error {error:.1e}")
    assert error < 1e-12

# %%
shift_sum, scale_sum = dx.sum().item(), (dx * (x - x.mean())).sum().item()
print(f"sum of dx: {shift_sum:.1e}   sum of dx (x - m): {scale_sum:.1e}")
assert abs(shift_sum) < 1e-12 and abs(scale_sum) < 1e-3

# %% [markdown]
# Both sums are 0, because y does not change. Subtracting the mean removes a shift of x, and dividing by the standard
# deviation removes a scale. (The second sum is not exactly 0, because eps does not scale with x.) The two mean terms of
# dx make these sums 0.
#
# Now write the formula as a kernel.
#
# **Predict first:** which of its loads need an `other`? Do padded lanes add anything to a sum?

# %% answer="norm_backward_kernel"
@triton.jit
def norm_backward_kernel(dy, x, weight, dx, N, eps, WITH_MEANS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute dx, one row per program; without WITH_MEANS, omit the two mean terms."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < N
    v = tl.load(x + row * N + lanes, mask=inside, other=0.0)
    centred = tl.where(inside, v - tl.sum(v, 0) / N, 0.0)
    r = 1 / tl.sqrt(tl.sum(centred * centred, 0) / N + eps)
    xhat = centred * r
    g = tl.load(dy + row * N + lanes, mask=inside, other=0.0) * tl.load(weight + lanes, mask=inside, other=0.0)
    out = g
    if WITH_MEANS:
        out = g - tl.sum(g, 0) / N - xhat * (tl.sum(g * xhat, 0) / N)
    tl.store(dx + row * N + lanes, r * out, mask=inside)


# %% [markdown]
# Run it for two gradients dy. The second is nearly parallel to x, as from a loss that penalizes large x:

# %%
def compute_torch_dx(dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    leaf = x.to(dtype).requires_grad_()
    return torch.autograd.grad(run_torch_layer_norm(leaf, weight.to(dtype)), leaf, dy.to(dtype))[0]


def compare_dx(name: str, dy: torch.Tensor, with_means: bool) -> float:
    """Print the error of the kernel's dx, and return its cosine similarity with the correct dx."""
    exact, eager, dx = compute_torch_dx(dy, torch.float64), compute_torch_dx(dy, torch.float32), torch.empty_like(x)
    norm_backward_kernel[(3,)](dy, x, weight, dx, 769, 1e-5, WITH_MEANS=with_means, BLOCK=1024)
    cosine = F.cosine_similarity(dx.double().flatten(), exact.flatten(), 0).item()
    print(f"{name:15} {'included' if with_means else 'omitted':10} {max_error(dx, exact):10.1e} ", end="")
    print(f"{max_error(eager, exact):19.1e} {cosine:22.6f}")
    assert is_accurate(dx, eager, exact) is with_means
    return cosine


# %%
x, weight, random_dy = torch.randn(3, 769), torch.rand(769) + 0.5, torch.randn(3, 769)
parallel_dy = random_dy + 30 * F.normalize(x, dim=1)
print("dy              mean terms  max error  max error of torch  cosine similarity with the correct dx")
for name, dy, lowest, highest in (("random", random_dy, 0.99, 1.0), ("parallel to x", parallel_dy, 0.5, 0.8)):
    compare_dx(name, dy, True)
    assert lowest < compare_dx(name, dy, False) < highest

# %% [markdown]
# All three loads need an `other`. Without it a masked lane may hold any value, and 0 times NaN is NaN. With it, xhat
# and g are 0 beyond the row, so padded lanes add nothing to any sum.
#
# The two mean terms remove 2 directions out of 769. A random dy has almost no component in these directions, so a test
# with a loose tolerance passes without them. A model may even learn with this wrong gradient. A falling loss does not
# prove that a backward pass is correct.
#
# `torch.autograd.gradcheck` is a much stronger test. In fp64 it changes each input slightly up and down, and it
# compares the change of the result with the gradient that the operator returns. It needs only a few elements and no
# second derivation. The next cell applies it to the operators of phase 2:

# %%
from workshop.lessons.kernels import make_fp64_leaf

assert torch.autograd.gradcheck(layernorm.layer_norm, (make_fp64_leaf(3, 5), make_fp64_leaf(5), make_fp64_leaf(5)))
targets = torch.tensor([4, 0, 2])
assert torch.autograd.gradcheck(lambda z: cross_entropy.cross_entropy(z, targets), (make_fp64_leaf(3, 5),))
assert torch.autograd.gradcheck(attention.causal_attention, tuple(make_fp64_leaf(1, 1, 3, 2) for _ in range(3)))
print("layer_norm, cross_entropy and causal_attention pass gradcheck")

# %% [markdown]
# ## g. Sums in a fixed order
#
# In this section you learn why atomic additions make a training run irreproducible, and how to sum without them.
#
# dW, the gradient of the gain, is a sum over all *rows*: `dW_j = sum over rows of dy_j xhat_j`. Every program
# contributes a part of it. In exact arithmetic the order of the additions would not matter.
#
# **Predict first:** add up 128 rows of 64 columns in fp32, in 20 different orders. How many different results do you
# get? Is the result for the original order of the rows more accurate than the others?

# %%
from workshop.lessons.kernels import to_bits

x, dy = torch.randn(128, 64), torch.randn(128, 64)
terms = dy * run_torch_layer_norm(x, torch.ones(64))  # (rows, columns)
exact = terms.double().sum(0)


def sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(64)
    for row in rows:
        total = total + row
    return total


# %%
orders = [torch.arange(128), *(torch.randperm(128) for _ in range(19))]
sums = [sum_in_order(terms[order]) for order in orders]
print(f"{len(set(map(to_bits, sums)))} different results from 20 orders")
print(f"max error in the original order: {max_error(sums[0], exact):.1e}; in the other orders:", end=" ")
print(f"{min(max_error(s, exact) for s in sums[1:]):.1e} to {max(max_error(s, exact) for s in sums[1:]):.1e}")
assert len(set(map(to_bits, sums))) == 20

# %% [markdown]
# Each order has its own result, and no order is special. `(a + b) + c` and `a + (b + c)` round at different places.
#
# Now let programs compute this sum. The simple way is an *atomic* addition: each program adds its part to dW in memory.
# The hardware makes sure that no addition is lost, but it does not fix their order.
#
# `layernorm.py` uses another way. It launches a fixed number of programs. Each program sums a fixed subset of the rows
# and writes the sum into its own row of a small matrix. Then the rows of this matrix are summed in a fixed order.
#
# A GPU may finish programs in a different order each time. The interpreter does not, so the cell below simulates it:
# each launch gets a random permutation, `order`, of its 8 programs.
#
# **Predict first:** launch each version 10 times. How many different dW do you get with atomics, and how many with
# separate rows?

# %%
@triton.jit
def column_sums_kernel(terms, out, order, M, N, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.load(order + tl.program_id(0))
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, M, tl.num_programs(0)):  # always the same rows, always in the same order
        total += tl.load(terms + row * N + lanes, mask=lanes < N, other=0.0)
    if ATOMIC:
        tl.atomic_add(out + lanes, total, mask=lanes < N)
    else:
        tl.store(out + program * N + lanes, total, mask=lanes < N)


# %% [markdown]
# One launch of 8 programs, in a random order:

# %% answer="sum_columns"
def sum_columns(atomic: bool, programs: int = 8) -> torch.Tensor:
    """Return dW from one launch, whose programs run in a random order."""
    out = torch.zeros(64) if atomic else torch.empty(programs, 64)
    column_sums_kernel[(programs,)](terms, out, torch.randperm(programs), 128, 64, ATOMIC=atomic, BLOCK=64)
    return out if atomic else out.sum(0)


atomic_sums, row_sums = ([sum_columns(atomic) for _ in range(10)] for atomic in (True, False))
print("atomics:       different results from 10 launches:", len(set(map(to_bits, atomic_sums))))
print("separate rows: different results from 10 launches:", len(set(map(to_bits, row_sums))))
print("separate rows: 16 programs and 8 programs are bitwise identical:", end=" ")
print(to_bits(sum_columns(False, 16)) == to_bits(row_sums[0]))
assert len(set(map(to_bits, atomic_sums))) > 5 and len(set(map(to_bits, row_sums))) == 1
assert to_bits(sum_columns(False, 16)) != to_bits(row_sums[0])
assert all(is_accurate(dw, sum_in_order(terms), exact) for dw in (*atomic_sums, *row_sums))

# %% [markdown]
# With atomics you cannot repeat a training run exactly. If one step differs in its last bit, all later steps differ
# too. It would then be impossible to test that a resumed run is bitwise identical to an uninterrupted one. Separate
# rows cost one small matrix, and their result is always the same.
#
# The result is the same only for a fixed number of programs. Phase 2 therefore does not derive this number from the GPU
# at hand. The number is a constant in `kernels/configs.json`, one per architecture: the programs whose registers fit on
# one SM (streaming multiprocessor) at the same time, multiplied by the number of SMs. An H100 has 132 SMs. An
# architecture without its own entry uses the entry `cuda`.

# %%
from phase2_triton.kernels.core import load_config_table

for name, rows in load_config_table()["layernorm_backward"].items():
    print(f"{name:11}", rows[0])
gain = torch.ones(64, requires_grad=True)
(dw,) = torch.autograd.grad(layernorm.layer_norm(x, gain), gain, dy)
_, atomic_dw, _ = layernorm.run_atomic_step(dy, x, gain.detach())
print(f"max error of dW: {max_error(dw, exact):.1e} in phase 2, {max_error(atomic_dw, exact):.1e} with atomics")
assert all(is_accurate(result, sum_in_order(terms), exact) for result in (dw, atomic_dw))

# %% [markdown]
# `layernorm.py` keeps the atomic version as step 1, for comparison.
#
# ## To take home
#
# 1. LayerNorm is limited by memory. Written as separate operations it moves the size of x ten times, and as one kernel
#    twice. PyTorch's own `F.layer_norm` is already one kernel.
# 2. A kernel runs as many programs. A GPU runs them in no guaranteed order.
# 3. Rows that do not fill a tile need masks. Guard bands of NaN reveal reads and writes out of bounds.
# 4. A masked lane needs a value that does not change the next operation: 0 for a sum, minus infinity for a maximum.
# 5. Compute in fp32, and round at the end. A probability of 0.999 becomes 1 in bf16, and its gradient becomes 0.
# 6. The product of two int32 numbers overflows without an error. Compute offsets with 64 bits.
# 7. Compare a kernel with an fp64 reference: its error may be at most twice the error of torch in the same dtype.
# 8. A falling loss does not prove that a gradient is correct. `gradcheck` in fp64 finds wrong gradients.
# 9. Atomic additions make a sum irreproducible. Partial sums are bitwise the same in every run, if their number and
#    order are fixed.
#
# ## Exercises
#
# `make exercise N=triton.1` and the exercises after it let you write parts of this chapter again: LayerNorm and its
# backward pass, online softmax and attention. `make check N=triton.1` runs your code on real ranks and explains what is
# wrong. The exercises `bugs.1` to `bugs.4` are a bug hunt in the kernels of phase 2. `docs/exercises.md` lists all of
# them.
#
# Exercises 1 and 2 have a checker. It prints what is wrong with a solution, or nothing if the solution is correct. The
# next cell tries the checkers on torch's own solutions and on two wrong ones.

# %%
from workshop.lessons.kernels import check_rms_backward, check_softmax, rms_norm


def rms_backward_by_autograd(dy, x, weight):
    x, weight = x.requires_grad_(), weight.requires_grad_()
    return torch.autograd.grad(rms_norm(x, weight), (x, weight), dy)


def rms_backward_with_constant_r(dy, x, weight):
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return dy * weight * r, (dy * x * r).sum(0)


wrong = check_softmax(lambda z: z.exp() / z.exp().sum(1, keepdim=True))
print("softmax without subtracting the maximum:", *wrong, sep="\n    ")
wrong_backward = check_rms_backward(rms_backward_with_constant_r)
print("RMSNorm backward that treats r as a constant:", *wrong_backward, sep="\n    ")
assert wrong and check_softmax(lambda z: z.softmax(1)) == []
assert wrong_backward and check_rms_backward(rms_backward_by_autograd) == []

# %% [markdown]
# **1. Softmax.** Write a kernel for the softmax of each row, and a function that launches it, for any N. Predict first:
# which value do the lanes beyond the row need? Does the maximum matter for logits up to 100? Check your solution with
# `check_softmax`.
#
# <details><summary>Hint</summary>
#
# The lanes need minus infinity: it does not change the maximum, and `exp` turns it into 0. The maximum matters: in fp32
# `exp(100)` is infinity, and infinity divided by infinity is NaN.
#
# ```python
# @triton.jit
# def softmax_kernel(z, y, N, BLOCK: tl.constexpr):
#     row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
#     v = tl.load(z + row * N + lanes, mask=lanes < N, other=-float("inf")).to(tl.float32)
#     e = tl.exp(v - tl.max(v, 0))
#     tl.store(y + row * N + lanes, e / tl.sum(e, 0), mask=lanes < N)
#
# def softmax(z):
#     y = torch.empty_like(z)
#     softmax_kernel[(z.size(0),)](z, y, z.size(1), BLOCK=tile_size(z.size(1)))
#     return y
#
# print(check_softmax(softmax))
# ```
#
# </details>
#
# **2. RMSNorm.** Derive the backward pass of `rms_norm` as in section (f), first in torch. Predict first: LayerNorm's
# dx has two mean terms. Which one disappears, and why? Is the sum of dx still 0? Check your solution with
# `check_rms_backward`, then write it as a kernel.
#
# <details><summary>Hint</summary>
#
# RMSNorm does not subtract a mean, so the term `mean(g)` disappears. A shift of x now changes y, so the sum of dx is
# not 0. A scale of x still does not change y, so the other term stays. With xhat = x r its derivation starts with
# dr/dx_j = -r^3 x_j / N = -r^2 xhat_j / N.
#
# ```python
# def rms_backward(dy, x, weight, eps=1e-5):
#     r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
#     xhat, g = x * r, dy * weight
#     return r * (g - xhat * (g * xhat).mean(-1, keepdim=True)), (dy * xhat).sum(0)
#
# print(check_rms_backward(rms_backward))
# ```
#
# </details>
