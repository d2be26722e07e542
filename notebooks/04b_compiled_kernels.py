# %% [markdown]
# # 4b. Compiled kernels and the roofline
#
# *35 minutes. Read [notebook 4](04_triton.ipynb) first, for kernels and their masks. You need Linux, but no GPU.*
#
# Notebook 4 wrote a LayerNorm kernel. In this notebook you compile it and others for a GPU that you do not have, and
# read the result. You compute the highest speed that each kernel of phase 2 can reach. At the end you train a model
# with the kernels.

# %%
import dataclasses
import math
import os
import re
import tempfile
from collections import Counter

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported, so set it first, also on a GPU machine

import triton
import triton.language as tl

from measure.mfu import PEAK_FLOPS
from phase2_triton.kernels import attention, cross_entropy, layernorm

folder = tempfile.TemporaryDirectory()  # for compiled kernels; it is deleted when the Jupyter kernel stops
BANDWIDTH = 3.35e12  # bytes per second of an H100 SXM, from its data sheet
SCALAR_FLOPS = 67e12  # FLOPs per second in fp32, outside the tensor cores
MATRIX_FLOPS = PEAK_FLOPS["H100"]  # FLOPs per second of the tensor cores, bfloat16, dense

# %% [markdown]
# ## a. Read the compiled code
#
# In this section you compile kernels for an H100 without owning one. You learn to count load instructions, to recognize
# register spills, and to check that a kernel uses tensor cores.
#
# This is the kernel of notebook 4:

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
# This notebook imported Triton with the interpreter switched on, so this process cannot compile. Another process can,
# and it needs no GPU either, because the target architecture is an argument of the compiler.
#
# `call_in_compiling_process` of `bench/kernels/inspection.py` writes functions and kernels of this page into a file and
# runs it with `TRITON_INTERPRET=0`. `inspect_launch` then compiles a launch and reads the machine code. The kernel
# arguments are *meta* tensors, which have a shape but no memory.

# %%
from bench.kernels.inspection import call_in_compiling_process, inspect_launch


def compile_norm_kernels() -> list:
    """Compile `norm_kernel` for an H100 (sm_90); return (N, BLOCK, warps, facts) for each variant."""
    import torch

    variants = []
    widths = ((768, 1024, 4), (769, 1024, 4), (16384, 16384, 4), (32768, 32768, 4), (32768, 32768, 8))
    for N, BLOCK, warps in widths:
        x, weight = torch.empty(64, N, device="meta"), torch.empty(N, device="meta")
        options = {"BLOCK": BLOCK, "num_warps": warps}
        variants.append((N, BLOCK, warps, inspect_launch(norm_kernel, (x, weight, x, N, 1e-5), options)))
    return variants


# %%
norm_variants = call_in_compiling_process(folder.name, compile_norm_kernels, norm_kernel)
norm_facts = {(N, warps): (BLOCK, facts) for N, BLOCK, warps, facts in norm_variants}
_, facts_768 = norm_facts[768, 4]
print("compiler stages of norm_kernel, N = 768:")
for name, text in facts_768["texts"].items():
    print(f"{name:7} {len(text.partition('.section')[0].splitlines()):4} lines")  # without the debug sections
print({name: facts_768[name] for name in ("registers", "shared_bytes", "spill_instructions", "instructions")})

# %% [markdown]
# Triton lowers the Python function in stages:
#
# - `source`: the kernel as Triton first reads it;
# - `ttir`: Triton's intermediate representation;
# - `ttgir`: the same, with a layout that assigns the elements of each tile to threads;
# - `llir`: LLVM's intermediate representation;
# - `ptx`: NVIDIA's virtual assembly. The last stage, not printed here, is machine code.
#
# Each program runs on 4 *warps* of 32 threads. The next cell counts the PTX instructions that move data: loads and
# stores in device memory (`ld.global`, `st.global`), exchanges between the threads of a warp (`shfl`) and between warps
# (`ld.shared`, `st.shared`), and barriers that wait for all warps (`bar.sync`).
#
# **Predict first:** a tile of 1,024 elements over 128 threads gives 8 elements per thread. How many load instructions
# does a thread need for x and weight? How many does it need if a row has 769 elements instead of 768?

# %%
def count_data_movements(facts: dict) -> Counter:
    return Counter(re.findall(r"\b(?:ld|st)\.(?:global|shared)\S*|\bshfl\.\S+|\bbar\.sync", facts["texts"]["ptx"]))


counts_768, counts_769 = (count_data_movements(norm_facts[N, 4][1]) for N in (768, 769))
print("N = 768:", ", ".join(f"{count} x {name}" for name, count in sorted(counts_768.items())))
print("N = 769:", ", ".join(f"{count} x {name}" for name, count in sorted(counts_769.items())))
ptx_lines = facts_768["texts"]["ptx"].splitlines()
print("one vector load:", next(line.strip() for line in ptx_lines if "ld.global.v4" in line))
loads, stores = (128 * 16 * counts_768[f"{instruction}.global.v4.b32"] // 4 for instruction in ("ld", "st"))
print(f"N = 768: the 128 threads load {loads:,} elements and store {stores:,}")
assert (counts_768["ld.global.v4.b32"], counts_768["ld.global.b32"]) == (4, 0) and loads == 2 * 1024 and stores == 1024
assert (counts_769["ld.global.v4.b32"], counts_769["ld.global.b32"]) == (0, 16)
assert counts_768["shfl.sync.bfly.b32"] == 2 * (math.log2(32) + math.log2(4))

# %% [markdown]
# For N = 768 a thread needs four loads of 16 bytes, for N = 769 sixteen loads of 4 bytes.
#
# Triton compiles a special version for integer arguments that are multiples of 16. It then knows that each row starts
# at a multiple of 16 bytes, and that the edge of the row never splits a group of four elements. With one more element
# both guarantees are lost. This is one reason to pad GPT-2's vocabulary from 50,257 to 50,304.
#
# The code also confirms the claim of notebook 4. The threads load 2,048 elements, one tile of x and one tile of
# weight, and they store one tile of y. (All programs load the same weight, so most of these loads hit the cache.) The
# kernel computes two sums. Each exchange halves the number of partial sums, so a sum needs 7 exchanges: 5 for the 32
# threads of a warp, and 2 for the 4 warps.
#
# **Predict first:** a thread has at most 255 registers. This kernel keeps a row in registers. How wide can the row be
# with 4 warps? What happens to a row that is twice as wide?

# %%
from workshop.lessons.kernels import print_spills

print_spills(norm_facts)

# %% [markdown]
# 256 elements do not fit into 255 registers, so they *spill*: the compiler stores them on a stack in memory and reloads
# them with thousands of instructions. The result stays correct, but the kernel gets slow. With twice as many warps the
# same row is spread over twice as many threads, and it fits.
#
# Check the spill instructions and not the registers. A kernel that keeps most values on the stack may use few
# registers.
#
# The tests compile every kernel of phase 2 for three architectures and fail if one of them spills. The tile sizes and
# warps in `configs.json` were chosen under this condition.
#
# The last topic of this section is matrix products. `tl.dot` should run on the *tensor cores*. Each GPU generation has
# its own instructions for them: `mma.sync` on an A100 (sm_80), `wgmma` on an H100 (sm_90), and `tcgen05` on a B200
# (sm_100).
#
# **Predict first:** compile attention in bfloat16 and in fp32. Which of them uses tensor cores? Phase 2 computes the
# gradients of keys and values, dk and dv, in tiles of 128 keys by 64 queries with 8 warps. What happens with 4 warps?

# %%
def compile_attention_kernels() -> list:
    """Compile causal attention of GPT-2 124M; return (name, architecture, facts) for each variant."""
    import torch
    from bench.kernels.resources import meta_leaf, record_call, run_backward
    from phase2_triton.kernels.attention import causal_attention

    def list_launches(dtype: torch.dtype, architecture: str) -> list:
        qkv = meta_leaf(8, 1024, 3, 12, 64, dtype=dtype).permute(2, 0, 3, 1, 4)
        return record_call(architecture, lambda: run_backward(causal_attention(*qkv.unbind())))

    jobs = [("forward, bfloat16", arch, list_launches(torch.bfloat16, arch)[0]) for arch in ("sm_80", "sm_90")]
    jobs.append(("forward, fp32", "sm_90", list_launches(torch.float32, "sm_90")[0]))
    kernel, args, options = list_launches(torch.bfloat16, "sm_90")[2]
    jobs.append(("dk and dv", "sm_90", (kernel, args, options)))
    jobs.append(("dk and dv, half the warps", "sm_90", (kernel, args, options | {"num_warps": 4})))
    return [(name, architecture, inspect_launch(*launch, architecture)) for name, architecture, launch in jobs]


# %%
from workshop.lessons.kernels import print_attention_kernels

TENSOR_CORE = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*")
attention_variants = call_in_compiling_process(folder.name, compile_attention_kernels)
attention_facts = {(name, architecture): facts for name, architecture, facts in attention_variants}
print_attention_kernels(attention_facts, TENSOR_CORE.findall)
for architecture, instruction in {"sm_80": "mma.sync", "sm_90": "wgmma"}.items():
    ptx = attention_facts["forward, bfloat16", architecture]["texts"]["ptx"]
    assert TENSOR_CORE.search(ptx)[0].startswith(instruction)
assert not TENSOR_CORE.search(attention_facts["forward, fp32", "sm_90"]["texts"]["ptx"])

# %% [markdown]
# How many values does a thread keep in the last two variants?

# %%
for name in ("dk and dv", "dk and dv, half the warps"):  # sums (BLOCK, 64) for dk and dv; products (BLOCK, STEP)
    facts = attention_facts[name, "sm_90"]
    BLOCK, STEP = facts["constants"]["BLOCK"], facts["constants"]["STEP"]
    elements = 2 * BLOCK * (64 + STEP) // (32 * facts["num_warps"])
    print(f"{name}: two sums and two products have {elements} elements per thread")
    assert (elements > 255) == ("half" in name)

# %% [markdown]
# In bfloat16 attention uses tensor cores, in fp32 it does not. For fp32 the kernel requests `ieee` precision, because
# tensor cores would round the factors to TF32. You can allow TF32 with
# `torch.set_float32_matmul_precision("high")`, as for torch's own matrix products.
#
# The backward kernel for dk and dv keeps two sums, and at any time two products of queries and keys. With half the
# warps these values alone exceed the 255 registers of a thread, so the kernel spills. On a GPU you would only notice
# that it is slow. Here you see the reason.
#
# ## b. The roofline model
#
# In this section you compute the highest speed that each kernel can reach on an H100, and you learn which kernels are
# worth writing.
#
# A kernel has to move its bytes and to compute its FLOPs. A GPU does both at the same time, so the slower of the two
# sets the limit. Which one it is depends on the *arithmetic intensity*, the FLOPs per byte. A GPU has a matching
# number, its peak FLOPs per second divided by its bandwidth. In a roofline plot this is the *ridge point*. Below the
# ridge point a kernel is memory-bound, above it the kernel is compute-bound.
#
# **Predict first:** what is the ridge point of an H100 for matrix products? On which side are LayerNorm, AdamW,
# attention (1,024 tokens, heads of 64 channels), and the loss head?

# %%
from phase2_triton.kernels import adamw, embedding, gelu, linear_cross_entropy
from phase2_triton.kernels.core import record_launches

M, C, T, bfloat16_bytes = 16384, 768, 1024, 2  # tokens, channels, tokens per sequence, bytes per element
with record_launches("sm_90"):  # use the tile sizes, and therefore the workspaces, of an H100
    COSTS = {
        "LayerNorm": layernorm.cost(M, C, bfloat16_bytes, bias=False),
        "residual add + LayerNorm": layernorm.cost(M, C, bfloat16_bytes, branch=True, bias=False),
        "cross-entropy": cross_entropy.cost(M, 50304, bfloat16_bytes),
        "bias + GELU": gelu.cost(M, 4 * C, bfloat16_bytes),
        "embedding": embedding.cost(M // T, T, 50304, C, 4),
        "AdamW": (adamw.cost(124_373_760, 4, 75),),
        "attention": attention.cost(M // T, 12, T, 64, bfloat16_bytes),
        "linear + cross-entropy": (linear_cross_entropy.cost(M, C, 50304, bfloat16_bytes),),
    }

# %% [markdown]
# The tensor cores do nearly all FLOPs of two of them. Compute the shortest possible time of each pass:

# %%
from workshop.lessons.roofline import PeakRates, compute_points, draw_roofline, print_points

MATMULS = ("attention", "linear + cross-entropy")
h100 = PeakRates(BANDWIDTH, MATRIX_FLOPS, SCALAR_FLOPS)
points = compute_points(COSTS, MATMULS, h100)
print_points(points, h100)
for name, pass_name in (("attention", "backward"), ("linear + cross-entropy", "all")):
    point = next(point for point in points if (point.name, point.pass_name) == (name, pass_name))
    assert point.intensity > MATRIX_FLOPS / BANDWIDTH

# %%
scores_bytes = M // T * 12 * T * T * bfloat16_bytes  # of all heads in one block
norm_bytes, attention_bytes = (COSTS[name][0].read + COSTS[name][0].written for name in ("LayerNorm", "attention"))
ALTERNATIVES = {  # the same FLOPs with more bytes; notebook 4 counts 10 and 2 sizes of x
    "LayerNorm": ("LayerNorm as\nseparate operations", norm_bytes * 10 / 2),
    "attention": ("attention with scores\nin memory", attention_bytes + 2 * scores_bytes),
}
draw_roofline(points, h100, ALTERNATIVES)

# %% [markdown]
# **These limits are computed from a data sheet.** No kernel ran on an H100 for this figure, and no real kernel reaches
# the peak of a data sheet. On a GPU, `make bench NAME=kernels` first measures the memory bandwidth and the matrix rate of
# that GPU. Then it measures each kernel and torch's version of it ([results of an H200](../docs/results.md#kernels)).
#
# Upward triangles are forward passes, and downward triangles are backward passes. Circles are both passes together, or
# one optimizer step. White triangles are the same FLOPs with more bytes: LayerNorm as the separate operations of
# notebook 4, and attention if it wrote its T x T scores to memory and read them back once.
#
# The plot helps you to decide which kernels to write. On the sloped part only bytes matter, so fuse operations and keep
# intermediate values in registers, as in notebook 4. But `torch.compile` already fuses neighboring operations, so a
# custom kernel gains little over a compiled model there. On the flat part the tensor cores limit a matrix product.
#
# Attention has a third limit that the plot does not show: its exponentials. An H100 computes about 250 times fewer of
# them per second than FLOPs in its tensor cores. With heads of 64 channels they take about as long as the products
# (FlashAttention-3), so attention is slower than its point in the plot, and not limited by memory.
#
# The large gains come from *other algorithms*: attention that never stores its scores, and a loss head that never stores
# all its logits.
#
# **Predict first:** in bfloat16, how many bytes do all scores of one block need? How many do all logits need?

# %%
logits_bytes = M * 50304 * bfloat16_bytes
head_workspace, attention_workspace = COSTS["linear + cross-entropy"][0].workspace, COSTS["attention"][1].workspace
print(f"scores of one block:              {scores_bytes / 1e6:7,.1f} MB")
print(f"workspace of attention:           {attention_workspace / 1e6:7,.1f} MB")
print(f"logits, and again their gradient: {logits_bytes / 1e6:7,.1f} MB each")
print(f"workspace of the loss head:       {head_workspace / 1e6:7,.1f} MB")
print(f"writing and reading the scores once would move {2 * scores_bytes / attention_bytes:.0f} times attention's bytes")
assert round(2 * scores_bytes / attention_bytes) == 8 and 2 * logits_bytes > 6 * head_workspace

# %% [markdown]
# ## c. Train a model with the kernels
#
# In this section you check the kernels where it matters: in training.
#
# `apply_kernels(model)` replaces operations of an unmodified GPT from outside. Parameter names stay the same, so a
# checkpoint works with and without kernels.
#
# **Predict first:** train one model with kernels and one without, in fp32. How large is the loss difference over 6
# steps?

# %%
from nanoGPT.dataset import TokenData
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_adamw
from phase2_triton.apply import TritonConfig, apply_kernels, kernel_optimizer

config = TritonConfig(device="cpu", batch_size=4, n_embd=32)
data = TokenData(config)
shape = GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": data.tokenizer["vocab_size"]})

# %%
def train_6_steps(use_kernels: bool) -> tuple[list[float], list[str]]:
    """Return the losses of 6 steps, and the names of the parameters."""
    model = GPT(shape)
    model.init_weights(config.seed)
    if use_kernels:
        print(*apply_kernels(model, config.kernels), sep="\n")
    optimizer = kernel_optimizer(model, config) if use_kernels else configure_adamw(model, config)
    losses = []
    for step in range(6):
        loss = model(*data.batch("train", step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(model.state_dict())


# %%
(kernel_losses, kernel_names), (torch_losses, torch_names) = train_6_steps(True), train_6_steps(False)
print("step  loss (torch)  loss (kernels)")
for step, (torch_loss, kernel_loss) in enumerate(zip(torch_losses, kernel_losses)):
    print(f"{step:4} {torch_loss:13.6f} {kernel_loss:15.6f}")
max_difference = max(abs(a - b) for a, b in zip(kernel_losses, torch_losses))
print(f"max loss difference: {max_difference:.1e}; same parameter names: {kernel_names == torch_names}")
assert max_difference < 1e-4 and kernel_names == torch_names and torch_losses[-1] < torch_losses[0] - 0.1

# %% [markdown]
# The losses differ only by rounding. `make phase2` trains the same way with the full trainer, and
# `tests/phase2/test_training.py` compares 100 steps.
#
# ## To take home
#
# 1. Registers, spills, load instructions and tensor-core instructions can be checked without a GPU. Speed cannot.
# 2. A row whose length is a multiple of 16 is loaded with 16-byte instructions, and another row element by element.
# 3. A kernel that needs more registers than a thread has spills. It stays correct, and gets slow.
# 4. A kernel cannot be faster than its bytes over the bandwidth, and its FLOPs over the peak rate.
# 5. Below the ridge point, move fewer bytes. The large gains come from other algorithms, and not from fusion, which
#    `torch.compile` does as well.
#
# ## Exercise
#
# **1. Even wider rows.** In the table of section (a), 128 elements per thread fit into the registers. Predict first:
# how many warps does a row of 65,536 elements need for that? Write a function like `compile_norm_kernels` that compiles
# `norm_kernel` for this row, with 16 and with 32 warps. (32 warps is the maximum for one program.) What do you find,
# and why?
#
# <details><summary>Hint</summary>
#
# ```python
# def compile_wider_rows() -> list:
#     import torch
#
#     variants = []
#     for N, warps in ((32768, 16), (65536, 16), (65536, 32)):
#         x, weight = torch.empty(64, N, device="meta"), torch.empty(N, device="meta")
#         facts = inspect_launch(norm_kernel, (x, weight, x, N, 1e-5), {"BLOCK": N, "num_warps": warps})
#         variants.append((N, warps, facts["registers"], facts["spill_instructions"]))
#     return variants
#
# print(call_in_compiling_process(folder.name, compile_wider_rows, norm_kernel))
# ```
#
# By that count 16 warps should suffice, but the row of 65,536 spills with 16 and with 32 warps. A thread can have at
# most 255 registers, and all threads of a program share the 65,536 registers of one SM of an H100. So 512 threads have
# at most 128 registers each, and 1,024 threads have 64. A row of 65,536 elements fills all of them and leaves none for
# the computation.
#
# A LayerNorm for any width would read the row in pieces, as the cross-entropy of phase 2 does. It would read x twice
# and need few registers. (The LayerNorm of phase 2 accepts rows up to 16,384.)
#
# </details>
