# %% [markdown]
# # 10. Will it fit?
#
# *45 minutes. Read notebooks [6](06_fsdp.ipynb) and [6b](06b_activation_checkpointing.ipynb) first, for FSDP units and
# activation checkpointing.*
#
# A job on 64 GPUs waits for a day in the queue, starts, and runs out of memory in its third step. You could have known
# it before. **How much memory does a training step need on each rank, and what do you change first if it is too much?**
#
# You test five claims:
#
# - **Formulas that you can compute by hand predict the memory of a rank within about 10%, or 20% with activation
#   checkpointing.**
# - **A trace on fake tensors predicts this memory on a laptop, for any number of GPUs. For ZeRO-1 and FSDP on CPU
#   ranks it is within 1% of what our counter measures.**
# - **The best way to save memory depends on what fills it: model state or activations.**
# - **A micro-batch with enough tokens hides FSDP's communication. The number does not depend on the model.**
# - **Generating text needs other formulas: weights and the key-value cache.**
#
# Open `phase3_fsdp/activation_bytes.py` and `bench/plan/trace.py` next to this page. `make plan` computes all of this
# for you. After this notebook you can check its numbers by hand. You need no GPU.

# %%
import tempfile
from pathlib import Path

import torch

from bench.plan.plan import MODELS
from nanoGPT.dataset import TokenData
from measure.tracker import MemoryTracker
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_adamw
from phase3_fsdp.activation_bytes import activation_bytes, saved_activations
from workshop.pictures import draw_memory_bars
from workshop.ranks import run_on_ranks

# %%
folder = tempfile.TemporaryDirectory()  # for the runs of this notebook; it is deleted when the kernel stops
GB = 1e9


def make_shape(name: str, block_size: int = 1024) -> GPTConfig:
    """Return the shape of a model that `make plan MODEL=name` knows."""
    n_layer, n_head, n_embd = MODELS[name]
    return GPTConfig(n_layer, n_head, n_embd, block_size, False, 50304)

# %% [markdown]
# ## a. Model state: 16 bytes per parameter
#
# You will compute the memory that a model needs before it sees any data.
#
# A block has 12 C² parameters, so a model has P = 12 L C² + (V + T) C, for L blocks, C channels, V vocabulary entries
# and T positions. With AdamW in fp32 each parameter needs 16 bytes: 4 for its value, 4 for its gradient and 8 for the
# moments. On N ranks, a rank stores 16P with DDP, 8P + 8P/N with ZeRO-1, 4P + 12P/N with ZeRO-2, and 16P/N with FSDP.
#
# **Predict first:** a model has 20 billion parameters. How many GB does a rank store with DDP? A GPU has 80 GB. How
# many GPUs does the job need with DDP, with ZeRO-1, and with FSDP?

# %%
STATE_BYTES = {
    "DDP": lambda P, N: 16 * P,
    "ZeRO-1": lambda P, N: 8 * P + 8 * P / N,
    "ZeRO-2": lambda P, N: 4 * P + 12 * P / N,
    "FSDP": lambda P, N: 16 * P / N,
}
print("model state per rank (GB)   parameters" + "".join(f"{name + ', 8 ranks':>18}" for name in STATE_BYTES))
for name in ("gpt2", "gpt2-xl", "6.7b", "20b", "70b"):
    P = make_shape(name).count_params()
    print(f"{name:26} {P / 1e9:11.2f}B" + "".join(f"{f(P, 8) / GB:18.1f}" for f in STATE_BYTES.values()))
print("\n20 billion parameters by DDP:", STATE_BYTES["DDP"](20e9, 8) / GB, "GB on every rank")

# %%
P = 20e9
draw_memory_bars(
    {f"{name}, 8 ranks": {"model state": f(P, 8) / GB} for name, f in STATE_BYTES.items()},
    "Model state of 20 billion parameters", "GB per rank", limit=("80 GB of a GPU", 80),
)

# %% [markdown]
# **20 billion parameters need 320 GB with DDP, on every rank.** More ranks do not help: each one stores all 320 GB.
# In this layout ZeRO-1 approaches 160 GB with many ranks, and ZeRO-2 approaches 80 GB, so neither fits on any number of
# these GPUs. Only FSDP has no lower limit.
#
# This is a property of parameters and gradients in fp32, as in this repository. The ZeRO paper stores both in 16
# bits, and a master copy with the moments in fp32 (notebook 9). In that layout ZeRO-2 needs 2P + 14P/N bytes: 75 GB
# on 8 ranks and 57.5 GB on 16. It fits.
#
# The job needs at least 5 ranks with FSDP: 64 GB of model state on each, and 16 GB for everything else. (On 4 ranks,
# the model state alone would fill the 80 GB.) On 8 ranks it is 40 GB, and on 16 ranks 20 GB.
#
# ## b. Activations
#
# You will compute the memory that depends on the batch, and not on the number of ranks.
#
# The forward pass saves tensors for the backward pass. For B sequences of T tokens, a block saves 16 tensors of
# (B, T, C) without dropout, and five small statistics. The head saves the log-probabilities, (B T, V) in fp32.
#
# **Predict first:** GPT-2 124M, 8 sequences of 1,024 tokens in bf16. What takes more memory: the 12 blocks together, or
# the log-probabilities? (Each has its factor: 16 x 12 x 768 x 2 bytes, or 50,304 x 4 bytes, per token.)

# %%
gpt2, B, T = make_shape("gpt2"), 8, 1024
for row in saved_activations(gpt2, B, T, torch.bfloat16):
    print(f"{row.bytes / 1e6:8.1f} MB   {row.shape:18} {row.name}")
block_bytes = sum(row.bytes for row in saved_activations(gpt2, B, T, torch.bfloat16))
print(f"{block_bytes / 1e6:8.1f} MB   one block; 16 B T C tensors: {16 * B * T * gpt2.n_embd * 2 / 1e6:.1f} MB")
print(f"{12 * block_bytes / 1e6:8.1f} MB   twelve blocks")
print(f"{4 * B * T * gpt2.vocab_size / 1e6:8.1f} MB   log-probabilities of the head")
assert abs(block_bytes / (16 * B * T * gpt2.n_embd * 2) - 1) < 0.01

# %% [markdown]
# The log-probabilities take 1.6 GB, two thirds of what the twelve blocks take. The backward pass of the loss then
# creates two more tensors of this size: the gradients of the log-probabilities and of the logits. In a model with few
# channels and a large vocabulary, the head decides whether a batch fits.
#
# Activation checkpointing saves only a part and recomputes the rest:

# %%
print("activations of GPT-2 124M, 8 x 1,024 tokens, bf16")
for mode in ("none", "selective", "every_2", "full"):
    print(f"{mode:10} {activation_bytes(gpt2, B, T, torch.bfloat16, mode) / GB:6.2f} GB")

# %% [markdown]
# ## c. Everything together, by hand
#
# You will add up the terms of a formula, and compare the sum with a real run.
#
# Two terms are new. With FSDP, a layer needs its full weights, so some units are always all-gathered. When the total
# memory is at its peak, early in the backward pass, these are the root and at most two blocks: one that computes, and
# the flat buffer of the next one. (In the forward pass, up to three blocks are all-gathered, but fewer activations
# exist.) With DDP and ZeRO-1 in bf16, autocast rounds each fp32 weight to bf16 for the product, and the backward pass
# needs this copy again.
#
# ```
# memory of a rank  =  model state            16P, 8P + 8P/N, or 16P/N bytes
#                   +  all-gathered units     FSDP: root + 2 blocks, in the dtype of the computation
#                   +  copies of the weights  DDP and ZeRO-1 with autocast: 2P
#                   +  activations            16 L B T C numbers, and B T V x 4 bytes of the head
#                                             with full checkpointing: L B T C numbers instead of 16 L B T C
#                                             DDP and ZeRO-1 with autocast: 2 L B T C of these numbers are in fp32
#                                             (with full checkpointing, L B T C)
#                   +  backward pass          the head: 2 B T V x 4 bytes
#                                             with full checkpointing: this, or one recomputed block of 16 B T C numbers
#                                             if that is larger
#                   +  full gradients         FSDP with several micro-batches per rank: 4P, from the second one on
#                   -  missing gradients      FSDP: 4P/N
# ```
#
# The last line is for FSDP only. At the peak, which is early in the backward pass, the shards of the gradients do not
# exist yet. With a single micro-batch, no gradients exist at all. DDP and ZeRO-1 allocate buckets for all gradients
# when they start, so their 4P always count.
#
# **Predict first:** for a small model (0.8 million parameters, 2 ranks, 4 sequences of 64 tokens, fp32), add up the
# terms for DDP, ZeRO-1 and FSDP. Which of the three needs the least, and how far will your sums be off?

# %%
def estimate_activations(shape: GPTConfig, B: int, sharding: str, mode: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the bytes of activations, and of the copies that autocast makes of weights, for one micro-batch."""
    P, L, C, T = shape.count_params(), shape.n_layer, shape.n_embd, shape.block_size
    is_full, copies, fp32_activations = mode == "full", 0, 0
    if dtype == torch.bfloat16 and sharding != "FSDP":  # autocast; it drops the copies of checkpointed blocks
        copies = 2 * ((shape.vocab_size + T) * C + 12 * C * C if is_full else P)
        fp32_activations = 2 * (1 if is_full else 2) * L * B * T * C
    activations = activation_bytes(shape, B, T, dtype, mode) + fp32_activations
    return {"copies of the weights": copies, "activations": activations}


# %% [markdown]
# The complete formula adds the model state, what FSDP all-gathers, and what the start of the backward pass needs: two
# copies of the logits in fp32, or the recomputed tensors of a block.

# %%
def estimate(
    shape: GPTConfig, ranks: int, B: int, sharding: str, mode: str = "none", dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Return the terms of the formula in bytes, for one micro-batch per rank."""
    P, C, T, is_fsdp = shape.count_params(), shape.n_embd, shape.block_size, sharding == "FSDP"
    recomputed = sum(row.bytes for row in saved_activations(shape, B, T, dtype)) if mode == "full" else 0
    return {
        "model state": 12 * P / ranks if is_fsdp else STATE_BYTES[sharding](P, ranks),
        "gathered": dtype.itemsize * ((shape.vocab_size + T) * C + 2 * 12 * C * C) if is_fsdp else 0,
        **estimate_activations(shape, B, sharding, mode, dtype),
        "backward pass": max(2 * B * T * shape.vocab_size * 4, recomputed),
    }


# %% [markdown]
# Four runs of a small model will check it:

# %%
small, RANKS, SMALL_B, SMALL_T = GPTConfig(4, 4, 128, 64, False, 75), 2, 4, 64
FIELDS = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": SMALL_T, "batch_size": SMALL_B, "device": "cpu"}
FIELDS |= {"dtype": "float32", "max_iters": 3, "eval_interval": 3, "eval_iters": 2, "gradient_accumulation_steps": RANKS}
ROWS = {
    "DDP": ("baseline", {}),
    "ZeRO-1": ("phase1", {}),
    "FSDP": ("phase3", {}),
    "FSDP, full checkpointing": ("phase3", {"fsdp_activation_checkpointing": "full"}),
}


def estimate_by_hand(name: str) -> dict[str, float]:
    """Return the terms of the formula in bytes, for a row of ROWS."""
    sharding, _, checkpointing = name.partition(", ")
    return estimate(small, RANKS, SMALL_B, sharding, "full" if checkpointing else "none", torch.float32)

# %% [markdown]
# Two programs check your sums. `trace` runs the phase's own code for one step on *fake tensors*: tensors with a shape
# and without memory, so a laptop can trace a model for 1,024 GPUs. Then the ledger measures a real run on two ranks.

# %%
import importlib
import json

from bench.matrix.cells import make_config
from bench.plan.trace import trace
from bench.phases import PHASES


def trace_memory(phase: str, options: dict) -> dict[str, int]:
    """Return the peak memory of rank 0 by category, from a trace on fake tensors."""
    config = make_config(phase, Path(folder.name) / "trace", **FIELDS, **options)
    return trace(config, small, RANKS).memory.peak


def measure_memory(name: str) -> dict[str, int]:
    """Train three steps on real ranks, and return the peak memory of rank 0 by category."""
    phase, options = ROWS[name]
    config = make_config(phase, Path(folder.name) / name, **FIELDS, **options)
    run_on_ranks(importlib.import_module(f"{PHASES[phase]}.train").train, RANKS, config, show=False)
    return json.loads((Path(config.out_dir) / "ledger.json").read_text())["ranks"][0]["memory"]["peak"]

# %%
measured = {name: measure_memory(name) for name in ROWS}
print("peak memory (MB)            by hand    traced   measured   by hand/measured   traced/measured")
for name, (phase, options) in ROWS.items():
    hand, traced = (sum(each.values()) / 1e6 for each in (estimate_by_hand(name), trace_memory(phase, options)))
    real = sum(measured[name].values()) / 1e6
    print(f"{name:25} {hand:9.2f} {traced:9.2f} {real:10.2f} {hand / real:18.1%} {traced / real:17.1%}")
    assert abs(traced / real - 1) < 0.02 and 0.8 < hand / real < 1.1

# %%
draw_memory_bars(
    {name: {part: size / 1e6 for part, size in parts.items() if size} for name, parts in measured.items()},
    "Measured peak memory of rank 0, by category", "MB",
)

# %% [markdown]
# By hand you get within 10% of the first three, and within 20% with full checkpointing. The category *other* contains
# the temporary tensors of the backward pass. With this small vocabulary they are a few times (B, T, 4C), and the
# formula omits them.
#
# The trace is within 1%, because it runs the real code.
#
# All three numbers count only tensors. A GPU needs more: the CUDA context, buffers of NCCL and cuBLAS, and memory
# that the allocator cannot use because it is fragmented, together often 1 to 4 GB. On an H200, compiled models needed 4
# and 6% more than `make plan` predicted, so leave about 10% of the memory free.
#
# Does the formula also hold for a large vocabulary, in bf16? A laptop cannot run such a model on 8 ranks, but it can
# trace it:

# %%
def trace_gpt2(sharding: str, mode: str, batch_size: int) -> int:
    """Return the peak memory of a rank of 8 in bytes, from a trace of GPT-2 124M with one micro-batch per rank."""
    fields = {**FIELDS, "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": batch_size}
    options = {"fsdp_activation_checkpointing": mode} if mode != "none" else {}
    fields |= {"dtype": "bfloat16", "gradient_accumulation_steps": 8, **options}
    config = make_config(ROWS[sharding][0], Path(folder.name) / "trace", **fields)
    return sum(trace(config, gpt2, 8).memory.peak.values())


print("GPT-2 124M, 8 ranks, 8 sequences, bf16 (GB)   by hand   traced   by hand/traced")
for sharding, mode in (("ZeRO-1", "none"), ("FSDP", "none"), ("FSDP", "full")):
    hand, traced = sum(estimate(gpt2, 8, B, sharding, mode).values()), trace_gpt2(sharding, mode, B)
    print(f"{sharding + ', checkpointing: ' + mode:45} {hand / GB:7.2f} {traced / GB:8.2f} {hand / traced:16.1%}")
    assert abs(hand / traced - 1) < 0.02

# %% [markdown]
# Here the formula is within 2%, because the head is much larger than the temporary tensors that it omits. So **estimate
# by hand to see whether a job can fit at all, then trace.** `make plan MODEL=20b GPUS=16 GPU=h100` traces every phase.
#
# ## d. What do you change first?
#
# You will compare three ways to save memory for two models. The best order differs between the models.
#
# **Predict first:** two jobs on 8 GPUs, in bf16: (1) GPT-2 124M with 32 sequences per micro-batch, and (2) 6.7 billion
# parameters with 1 sequence. For each, what frees the most memory: sharding everything with FSDP, full checkpointing,
# or half of the batch?

# %%
def estimate_in_gb(shape: GPTConfig, batch_size: int, sharding: str = "DDP", mode: str = "none") -> dict[str, float]:
    """Return the terms for a rank of 8 in GB. The computation is in bf16."""
    return {name: size / GB for name, size in estimate(shape, 8, batch_size, sharding, mode).items() if size}


def estimate_choices(shape: GPTConfig, batch_size: int) -> dict[str, dict[str, float]]:
    """Return the terms in GB for DDP, and for each way to need less memory."""
    choices = {"DDP": (), "FSDP": ("FSDP",), "DDP, full checkpointing": ("DDP", "full")}
    choices["FSDP, full checkpointing"] = ("FSDP", "full")
    bars = {name: estimate_in_gb(shape, batch_size, *choice) for name, choice in choices.items()}
    if batch_size > 1:
        bars["DDP, half of the batch"] = estimate_in_gb(shape, batch_size // 2)
    return bars


# %%
JOBS = {"124M, 32 sequences": (make_shape("gpt2"), 32), "6.7B, 1 sequence": (make_shape("6.7b"), 1)}
for job, (shape, batch_size) in JOBS.items():
    bars = estimate_choices(shape, batch_size)
    freed = {name: sum(bars["DDP"].values()) - sum(terms.values()) for name, terms in bars.items() if name != "DDP"}
    print(f"{job}: {sum(bars['DDP'].values()):.0f} GB with DDP")
    for name, gigabytes in freed.items():
        print(f"  {name:25} frees {gigabytes:5.1f} GB")
    assert max(freed, key=freed.get).startswith("DDP, half" if batch_size > 1 else "FSDP")
    draw_memory_bars(bars, f"{job} per micro-batch, 8 ranks", "GB per rank", limit=("40 GB of a GPU", 40))

# %% [markdown]
# For 124M parameters, sharding frees only 3 GB, because the model state is small. Halving the batch frees 15 GB and
# costs almost nothing: the step has twice as many micro-batches. Full checkpointing frees 10 GB and costs time. For
# 6.7 billion parameters the model state is most of the memory, so sharding frees most: 109 GB. Look at the largest
# term first:
#
# 1. **Activations, or the tensors of the head, are largest?** First use a smaller micro-batch with more accumulation.
#    The losses are then similar, but not equal, because another micro-batch size draws other sequences. With FSDP also
#    set `--fsdp_sync_every_micro_batch=True`: otherwise the second micro-batch of a rank costs 4 bytes per parameter,
#    for full gradients, and the change can need more memory than before. Then use
#    `--kernels=loss` (it never stores all logits), then activation checkpointing, which costs about a third more
#    compute.
# 2. **Model state is largest?** First use ZeRO-1, which communicates no more than DDP. Then FSDP, then more GPUs.
# 3. **Both are too large?** Use FSDP with full checkpointing, and if that is not enough, CPU offload.
#
# If a run does run out of memory, the trainers print this list for your run, with the bytes that each flag would free.
#
# ## e. Is the communication hidden?
#
# You will compute how large a micro-batch must be, so that FSDP does not wait for the network.
#
# While a block computes, FSDP all-gathers the next one. On the link, each parameter needs 2 bytes in bf16, for any
# batch size. In the forward pass, each parameter needs 2 FLOPs for *every token*. So the computation grows with the
# tokens of a rank, and the communication does not:
#
# ```
# time on the link      =  2 bytes / bandwidth                 per parameter
# time of computation   =  2 FLOPs x tokens / (FLOP/s)         per parameter
# both are equal for       tokens = (FLOP/s) / bandwidth
# ```
#
# The backward pass needs 4 FLOPs per parameter and token. It moves 2 bytes for the all-gather, and 4 bytes for the
# reduce-scatter in fp32.
#
# **Predict first:** an H100 reaches about 400 TFLOP/s in matrix products. NVLink moves about 400 GB/s. Between nodes,
# the network adapters of a node count together, because NCCL sends a part of the data over each of them: one adapter
# of 400 Gbit/s moves 50 GB/s, and eight move as much as NVLink. How many tokens per micro-batch hide the all-gather
# over NVLink, and between nodes with one adapter each? Does the size of the model matter?

# %%
from nanoGPT.costs import tokens_to_hide

print("tokens per rank and micro-batch   forward   backward with reduction")
for name, bandwidth in (("NVLink, 400 GB/s", 400e9), ("one adapter, 50 GB/s", 50e9)):
    forward, backward = tokens_to_hide(400e12, bandwidth, 2, 2), tokens_to_hide(400e12, bandwidth, 6, 4)
    print(f"{name:31} {forward:9,.0f} {backward:25,.0f}")
assert round(tokens_to_hide(400e12, 50e9, 2, 2)) == 8000

# %% [markdown]
# Over NVLink, and between nodes with eight adapters, one sequence of 1,024 tokens is enough for the forward pass.
# With one adapter per node it takes 8 sequences, and 12 for the backward pass. With fewer tokens the GPU waits for
# part of each all-gather. The model's size does not matter, because both times are proportional to the number of
# parameters. (Scores of attention and elementwise operations lengthen the computation, and with small units the
# latency counts.)
#
# This is why FSDP needs large micro-batches, and why `--fsdp_shard_size=node` helps if the links between nodes are
# slow: its all-gathers stay within a node. `make plan` prints both numbers for your GPUs. Activation checkpointing
# makes room for more tokens, and its recomputation hides more communication.
#
# ## f. Generating text: weights and the key-value cache
#
# You will see why generating text needs much less memory than training.
#
# Generating needs no gradients, no optimizer state and no saved activations. A rank stores the weights in bf16, 2P
# bytes, and the keys and values of all earlier tokens: 2 L T C numbers per sequence.
#
# **Predict first:** for 20 billion parameters, how many sequences of 2,048 tokens have a cache as large as the weights?

# %%
from evaluation.costs import cache_bytes, measure_gpt

size = measure_gpt(make_shape("20b"))
weights, cache = 2 * size.params, cache_bytes(size, 2048, itemsize=2)
print(f"weights {weights / GB:.1f} GB; cache of one sequence of 2,048 tokens {cache / GB:.2f} GB")
print(f"the caches of {weights / cache:.0f} sequences are as large as the weights")
assert cache == 2 * 44 * 2048 * 6144 * 2

# %% [markdown]
# With many users, the cache therefore needs more memory than the weights. (Newer models share keys and
# values between heads, which makes the cache several times smaller.)
#
# ## g. Something broken on purpose
#
# You will leave out one line, and see the effect in the memory tracker.
#
# An evaluation computes losses and needs no gradients, so it runs under `torch.no_grad()`. Without it, each loss keeps
# its graph, and the graph keeps all activations of its forward pass.
#
# **Predict first:** an evaluation sums the losses of 4 micro-batches and forgets `no_grad`. How many bytes of
# activations are alive at its end, in units of the activations of one forward pass? Does the trainer report an error?

# %%
def measure_evaluation(has_no_grad: bool) -> float:
    """Return the bytes of activations that are alive after 4 micro-batches of an evaluation."""
    config = make_config("baseline", Path(folder.name), **FIELDS)
    data, model = TokenData(config), GPT(small)
    model.init_weights(config.seed)
    with MemoryTracker(model, configure_adamw(model, config)) as memory:
        total = torch.zeros(())
        with torch.set_grad_enabled(not has_no_grad):
            for micro_batch in range(4):
                total = total + model(*data.batch("val", 0, micro_batch))
        return memory.snapshot()["activations"]


one = activation_bytes(small, SMALL_B, SMALL_T)
for has_no_grad in (True, False):
    alive = measure_evaluation(has_no_grad)
    print(f"{'with' if has_no_grad else 'without'} no_grad: {alive / 1e6:6.2f} MB alive, {alive / one:.2f} forward passes")
assert measure_evaluation(False) > 3.9 * one

# %% [markdown]
# Without `no_grad`, the activations of all four micro-batches stay alive. No error appears, until an evaluation with
# more micro-batches runs out of memory. In a training step the same sum would be harmless after `backward()`, which
# frees the graph. Still, the trainers sum `loss.detach()`.
#
# ## To take home
#
# 1. Model state with AdamW in fp32 is 16 bytes per parameter: 20 billion parameters need 320 GB with DDP, on every
#    rank.
# 2. In fp32: DDP 16P, ZeRO-1 8P + 8P/N, ZeRO-2 4P + 12P/N, FSDP 16P/N.
# 3. A block saves 16 B T C numbers for its backward pass. The head needs 3 B T V fp32 numbers at the peak.
# 4. Activations do not depend on the number of ranks. Only a smaller micro-batch or checkpointing shrinks them.
# 5. FSDP also needs some units in full: the root and two blocks. Autocast stores copies of the weights, 2P bytes.
# 6. With several micro-batches, FSDP accumulates full gradients, 4P bytes, unless it reduces after each one.
# 7. Estimate by hand first; then trace with `make plan`; then measure with `--ledger=True`.
# 8. Reduce the largest term: activations by a smaller batch or checkpointing, model state by sharding.
# 9. FSDP hides its all-gathers if a micro-batch has more tokens than FLOP/s divided by bytes/s of the link.
# 10. Generating text needs 2P bytes in bf16, and 2 L T C numbers per sequence for the cache.
# 11. A tensor lives as long as something refers to it: a loss with its graph keeps all activations.
#
# ## Exercises
#
# A program checks these exercises: `make exercise N=memory.1` writes the task into `work/`.
#
# | exercise | task |
# |---|---|
# | `memory.1` | count the parameters of GPT-2 |
# | `memory.2` | count the FLOPs per token |
# | `memory.3` | predict the volume of a collective |
# | `memory.4` | predict when communication is hidden |
#
# **1. Your own job.** Choose a model of `make plan` and the GPUs that you have. Estimate by hand the largest
# micro-batch that fits, with each sharding. Then run `make plan` and compare. Which term did you forget?
#
# **2. Long sequences.** Predict first: T grows from 1,024 to 8,192, and B shrinks from 8 to 1, so B T is the same.
# Which terms of section (b) change? What would change if attention stored its scores?
#
# <details><summary>Hint</summary>
#
# All terms depend on the product B T, so nothing changes. Scores would have B nh T² elements: 8 times as many for the
# same B T. This is why fused attention, which does not store them, made long sequences possible.
#
# </details>
