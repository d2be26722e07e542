# %% [markdown]
# # 3. ZeRO-1: shard the optimizer state
#
# *40 minutes. Read [notebook 1](01_one_process.ipynb) first, for the loss curve and DDP.
# [Notebook 2](02_collectives.ipynb) explains reduce-scatter, all-gather and the ring algorithm, and
# [the glossary](../docs/glossary.md) defines the terms.*
#
# With data parallelism, every rank stores the same optimizer state and computes the same update. With ZeRO-1, each rank
# updates only one slice of the parameters, so it needs the optimizer state of this slice only. We test three claims:
# **the model state per rank is 8P + 8P/N bytes instead of 16P, the communication volume stays the same, and the losses
# stay the same.** P is the number of parameters, and N is the number of ranks.
#
# We first measure bytes, and then draw which rank stores what. Then we study two versions of the optimizer: the
# simplest one (`phase1_zero1/naive.py`), and the one that the trainer uses (`phase1_zero1/zero1.py` and
# `phase1_zero1/buckets.py`). At the end we save a checkpoint. [Notebook 3b](03b_overlap_and_clipping.ipynb) continues
# with the overlap of communication, and with gradient clipping. Keep the three files open next to this notebook. No GPU
# is needed.

# %%
import dataclasses
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from nanoGPT.dataset import TokenData
from nanoGPT.costs import storage_bytes
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.observers import add_flags
from nanoGPT.optim import param_groups
from phase1_zero1.naive import NaiveZero1Optimizer
from phase1_zero1.parallelize import Zero1Config
from phase1_zero1.zero1 import Zero1Optimizer
from workshop.ranks import losses, run_on_ranks

# %% [markdown]
# The configuration is that of notebook 1. Tables and pictures come from
# `workshop/lessons/zero1.py` and `zero1_pictures.py`.

# %%
folder = tempfile.TemporaryDirectory()  # every run of this notebook writes here; removed when the kernel exits

config = add_flags(Zero1Config, "measure")(  # with the flag of the ledger
    device="cpu",
    block_size=32,  # T, tokens per sequence
    batch_size=4,  # B, sequences per micro-batch
    gradient_accumulation_steps=4,  # micro-batches per step, summed over all ranks
    n_layer=2, n_head=2, n_embd=64,
    max_iters=12, eval_interval=12, eval_iters=4, log_interval=1,
    learning_rate=2e-3, min_lr=2e-4, warmup_iters=2,
)

# %% [markdown]
# The model has its initial weights, which are the same on every rank. There are three ways to create its optimizer: no
# sharding, ZeRO-1 in its simplest form, and ZeRO-1 with flat buckets.

# %%
def create_model_and_data(config: Zero1Config) -> tuple[GPT, TokenData]:
    """Return the data, and a model with its initial weights, which are the same on every rank."""
    data = TokenData(config)
    model = GPT(GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": data.tokenizer["vocab_size"]}))
    model.init_weights(config.seed)
    return model, data


def make_adamw(model: GPT) -> torch.optim.Optimizer:
    return AdamW(param_groups(model, weight_decay=0.1), lr=2e-3)


def make_naive_zero1(model: GPT) -> torch.optim.Optimizer:
    return NaiveZero1Optimizer(param_groups(model, weight_decay=0.1), AdamW, lr=2e-3)


def make_flat_zero1(model: GPT, bucket_mb: float = 25.0) -> torch.optim.Optimizer:
    return Zero1Optimizer(param_groups(model, weight_decay=0.1), AdamW, lr=2e-3, bucket_mb=bucket_mb)


# %%
model, _ = create_model_and_data(config)
P = sum(p.numel() for p in model.parameters())
print(f"P = {P:,} parameters in {len(list(model.parameters()))} tensors")

# %% [markdown]
# ## a. Model state per rank
#
# You will measure how many bytes each rank stores with DDP and with ZeRO-1, and compare them with the formula.
#
# All numbers are float32 here, 4 bytes per element. The optimizer is AdamW, which stores two moments for each
# parameter.
#
# **Predict first:** with DDP on 4 ranks, how many bytes does each rank store for parameters, gradients and moments, in
# units of P? Do not count activations.

# %%
def measure_state_bytes(config: Zero1Config, is_sharded: bool) -> dict[str, int]:
    """Run one training step, and return the bytes of model state on the calling rank."""
    model, data = create_model_and_data(config)
    optimizer = make_flat_zero1(model) if is_sharded else make_adamw(model)
    parallel_model = model if is_sharded else DDP(model, gradient_as_bucket_view=True)
    loss = parallel_model(*data.batch("train", 0, dist.get_rank()))
    loss.backward()
    gradients = storage_bytes(p.grad for p in model.parameters())
    optimizer.step()
    state = [t for items in optimizer.state.values() for t in items.values()]
    return {"parameters": storage_bytes(model.parameters()), "gradients": gradients, "optimizer": storage_bytes(state)}


# %%
for rank, state_bytes in enumerate(run_on_ranks(measure_state_bytes, 4, config, False)):
    columns = "  ".join(f"{name} {count:,} ({count / P:.4f} P)" for name, count in state_bytes.items())
    print(f"rank {rank} (bytes): {columns}  total {sum(state_bytes.values()) / P:.4f} P")

# %% [markdown]
# Every rank stores 4P + 4P + 8P = 16P bytes. The optimizer state is slightly larger than 8P because AdamW also stores
# a step count of 4 bytes for each of the 15 tensors. With `gradient_as_bucket_view=True`, each `.grad` shares its
# memory with a bucket, a large tensor that DDP all-reduces. Without it, every gradient is stored twice. (Here each
# rank runs one micro-batch. With several, DDP all-reduces only in the last backward pass. Until then the gradients are
# stored outside of the buckets, so 4P bytes are stored twice.)
#
# Half of the 16P bytes are moments, and they are the same on all ranks. If each of N ranks stores only 1/N of them, the
# model state per rank is 4P + 4P + 8P/N.
#
# **Predict first:** what is the value for N = 4? Which value does it approach for a large number of ranks?

# %%
print("  N   8P + 8P/N (bytes)   measured, max over ranks (bytes)")
for ranks in (1, 2, 4):
    largest = max(sum(state_bytes.values()) for state_bytes in run_on_ranks(measure_state_bytes, ranks, config, True))
    print(f"{ranks:4}  {8 + 8 / ranks:14.4f} P  {largest / P:31.4f} P")
for ranks in (8, 64, 1024):
    print(f"{ranks:4}  {8 + 8 / ranks:14.4f} P")

# %% [markdown]
# ZeRO-1 can save at most half of the model state, because every rank still stores all parameters and gradients. The
# measured values are slightly larger than the formula because of the step counts, and because of padding, which (b)
# explains.
#
# In a large model the same fraction is many gigabytes. The second largest GPT-2 has 36 blocks and 1,280 channels.

# %%
with torch.device("meta"):  # shapes without memory
    large_model = GPT(GPTConfig(n_layer=36, n_head=20, n_embd=1280, bias=False))
large_P = sum(p.numel() for p in large_model.parameters())
print(f"{large_P / 1e6:.0f} million parameters; model state per rank (GB):  DDP {16 * large_P / 1e9:.1f}", end="")
print("".join(f",  ZeRO-1 on {ranks} ranks {(8 + 8 / ranks) * large_P / 1e9:.1f}" for ranks in (2, 4, 8)))

# %% [markdown]
# ## b. Which rank stores what
#
# You will see how parameters are partitioned into buckets, slices and shards.
#
# Which 1/N of the optimizer state does a rank store? One way is to assign full parameters to ranks, and the naive
# version in (c) does this. But a reduce-scatter needs N slices of equal size, and parameters have different sizes.
# `Zero1Optimizer` therefore stores the parameters one after another in flat *buckets*, and partitions each bucket into
# N equal *slices*, one per rank. A slice may begin or end inside a parameter. The part of a parameter that lies in the
# slice of a rank is a *shard*.
#
# With `bucket_mb=0.2`, each of the two blocks gets its own bucket. Bucket 1 also contains `wpe`, the position
# embedding. The token embedding is called `wte`. Bucket 0 contains the last block, because the backward pass computes
# its gradients first: `mlp.c_proj` with 16,384 elements, `mlp.c_fc` with 16,384, `attn.c_proj` with 4,096 and
# `attn.c_attn` with 12,288.
#
# **Predict first:** where are the slice boundaries of this bucket on 4 ranks? Which ranks have a shard of `mlp.c_fc`?
# Which matrices lie completely in the slice of one rank?

# %%
from workshop.lessons.zero1 import describe_buckets, print_padding, print_shards
from workshop.lessons.zero1_pictures import draw_buckets


def list_buckets(config: Zero1Config, bucket_mb: float) -> list[dict]:
    """Return the parameters of each bucket, and the slice and the shards of the calling rank."""
    model, _ = create_model_and_data(config)
    return describe_buckets(model, make_flat_zero1(model, bucket_mb))


layouts = run_on_ranks(list_buckets, 4, config, 0.2)  # layouts[rank][bucket]
print_shards(layouts, number=0)

# %% [markdown]
# The next figure shows all four buckets, each on its own scale. The upper strip of a bucket shows its parameters. The
# lower strip shows its slices: the color is the rank, each box is a shard, and the hatched part is padding. The dotted
# lines are the slice boundaries.
#
# **Predict first:** `wte` has 4,800 elements, and slices begin at multiples of 32. How long is a slice of its bucket,
# and how much padding does the bucket have? Which rank stores fewer elements than the others?

# %%
draw_buckets(layouts)
print_padding(layouts)

# %% [markdown]
# A slice of the bucket of `wte` has 1,216 elements, the next multiple of 32 above 1,200. The padding lies at the end of
# the bucket, in the slice of the last rank. It is in no shard, so neither AdamW nor the gradient norm reads it.
#
# Bucket 3 contains the parameters without weight decay, which are the LayerNorm weights. All parameters of a bucket
# belong to one parameter group.
#
# If a parameter has no gradient in a step, AdamW must not change it. If AdamW got the full bucket as one parameter, it
# would change all its elements, through weight decay and old moments. So AdamW gets one shard for each parameter.
#
# How can a parameter be stored in a bucket, so that the model does not notice? Here is the complete technique with two
# parameters, `a` and `b`:
#
# - `param.data = view` lets a parameter use the memory of the buffer. A *view* is a tensor that shares memory with
#   another tensor.
# - If `.grad` is a view into a second buffer, autograd adds the gradients there, because it adds to an existing `.grad`
#   in place.
# - A *hook* is a function that PyTorch calls at a certain event. It calls a hook that was registered with
#   `register_post_accumulate_grad_hook` when the gradient of the parameter is complete.
# - With `async_op=True`, a collective returns at once with a `work` object, and `work.wait()` waits for its end.
#
# The loss of rank r is (r + 1)(a₁² + a₂² + b).
#
# **Predict first:** what do `a` and `b` contain after one step of SGD with a learning rate of 0.1 on 2 ranks?

# %%
def store_in_buffers(params: list[torch.nn.Parameter], on_gradient_ready) -> tuple[torch.Tensor, torch.Tensor]:
    """Move parameters and their gradients into two flat buffers, and register a hook for each gradient."""
    flat_params, flat_grads = torch.zeros(3), torch.zeros(3)
    for param, elements in zip(params, (slice(0, 2), slice(2, 3))):
        flat_params[elements] = param.detach()
        param.data, param.grad = flat_params[elements], flat_grads[elements]
        param.register_post_accumulate_grad_hook(on_gradient_ready)
    return flat_params, flat_grads


# %% [markdown]
# The hook starts one all-reduce for both gradients, as soon as the second one is ready. The update is one operation on
# the buffer.

# %%
def train_two_parameters() -> tuple[list[str], list[list[float]]]:
    """Train two parameters in one flat buffer for one step. Return the order of the events, and the parameters."""
    def on_gradient_ready(param: torch.Tensor) -> None:
        events.append("a gradient is ready")
        if len(events) == 2:  # both gradients are in the buffer: average them with one collective
            works.append(dist.all_reduce(flat_grads, dist.ReduceOp.SUM, async_op=True))
            events.append("all-reduce started")

    events, works, a, b = [], [], torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.tensor([3.0]))
    flat_params, flat_grads = store_in_buffers([a, b], on_gradient_ready)
    loss = (dist.get_rank() + 1) * (a.square().sum() + b.sum())
    loss.backward()
    events.append("backward() returned")
    works[0].wait()
    flat_params -= 0.1 * flat_grads / dist.get_world_size()  # one operation updates both parameters
    return events, [a.tolist(), b.tolist()]


# %%
for rank, (events, (a, b)) in enumerate(run_on_ranks(train_two_parameters, 2)):
    print(f"rank {rank}: a = {a}, b = {b}; {', '.join(events)}")

# %% [markdown]
# The gradients of rank 0 are (2, 4) and 1, and those of rank 1 are twice as large. Their mean is (3, 6) and 1.5. The
# model still uses `a` and `b`, although only the buffers were communicated and updated. The all-reduce started before
# `backward()` returned. Section (e) uses this to overlap communication and computation.
#
# ## c. The naive version
#
# You will check that ZeRO-1 computes exactly the same update as AdamW, and measure how much the simplest implementation
# communicates.
#
# Read `phase1_zero1/naive.py`, which is short. Each parameter has an *owner*. A step all-reduces every gradient,
# lets AdamW update the parameters that this rank owns, and broadcasts each parameter from its owner to the other ranks.
#
# Is this still AdamW? We train on the same 4 ranks with `NaiveZero1Optimizer`, and with plain AdamW over all parameters
# after an all-reduce of the gradients.
#
# **Predict first:** what is the max difference between the parameters of the two runs after 8 steps? And what is the
# max difference from one process that runs all four micro-batches?

# %%
def compute_gradients(model: GPT, optimizer, data: TokenData, config: Zero1Config, step: int) -> torch.Tensor:
    """Accumulate the gradients of this rank's micro-batches, and return the sum of their losses."""
    loss_sum = torch.zeros((), dtype=torch.float64)
    micro_batches = range(dist.get_rank(), config.gradient_accumulation_steps, dist.get_world_size())
    for micro_batch in micro_batches:
        # Zero1Optimizer reduces gradients in the backward pass of the last micro-batch only, as DDP does.
        optimizer.require_backward_grad_sync = micro_batch == micro_batches[-1]
        loss = model(*data.batch("train", step, micro_batch))
        (loss / len(micro_batches)).backward()
        loss_sum += loss.detach()
    return loss_sum


# %% [markdown]
# A run by hand repeats this step. `CollectiveCounter` records the collectives of the last one. `before_step` may change
# the gradients before the optimizer runs:

# %%
from measure.ledger import CollectiveCounter


def train_by_hand(config: Zero1Config, make_optimizer, before_step=lambda *_: None, steps: int = 8) -> dict:
    """Train on the calling ranks, and return losses, final parameters and the traffic of the last step."""
    model, data = create_model_and_data(config)
    optimizer, curve = make_optimizer(model), []
    for step in range(steps):
        with CollectiveCounter() as traffic:
            loss_sum = compute_gradients(model, optimizer, data, config, step)
            before_step(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        curve.append(loss_sum.item() / config.gradient_accumulation_steps)
    params = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"curve": curve, "params": params, "traffic": list(traffic.rows.values())}


# %% answer="average_gradients"
def average_gradients(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Replace every gradient by its mean over all ranks."""
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)


[one_process] = run_on_ranks(train_by_hand, 1, config, make_adamw)
adamw_results = run_on_ranks(train_by_hand, 4, config, make_adamw, average_gradients)
naive_results = run_on_ranks(train_by_hand, 4, config, make_naive_zero1)

# %%
from workshop.lessons.zero1 import compute_max_param_difference

differences = [compute_max_param_difference(a, b) for a, b in zip(naive_results, adamw_results)]
print("max parameter difference, naive and AdamW on the same 4 ranks:", max(differences))
difference = compute_max_param_difference(naive_results[0], one_process)
print(f"max parameter difference, naive and one process:               {difference:.1e}")
differences = [abs(a - b) for a, b in zip(naive_results[0]["curve"], one_process["curve"])]
print(f"max loss difference, naive and one process:                    {max(differences):.1e}")
assert compute_max_param_difference(naive_results[0], adamw_results[0]) == 0

# %% [markdown]
# The difference is zero. AdamW updates each element independently of all others, so it does not matter which rank
# computes the update. Both runs on 4 ranks differ from one process by rounding, like the baseline in notebook 1. The
# parameters can differ more than the losses, because AdamW amplifies rounding where a gradient is close to zero.
#
# Now we measure the communication. In the ring algorithm of notebook 2, a rank sends 2n(N-1)/N bytes for an all-reduce
# of n bytes, and n(N-1)/N bytes for a broadcast. The runs above used `measure.ledger.CollectiveCounter` in
# every step. It records each collective call with its tensor size, and computes the communication volume with these
# formulas.
#
# **Predict first:** how many calls does one step make? How many elements does a rank send, in units of P(N-1)/N? Each
# of the 4 ranks owns full parameters: how evenly are the elements distributed?

# %% answer="count_owned_elements"
def count_owned_elements(config: Zero1Config) -> int:
    """Return the number of elements that the calling rank owns."""
    optimizer, rank = make_naive_zero1(create_model_and_data(config)[0]), dist.get_rank()
    return sum(p.numel() for p, owner in optimizer.owner.items() if owner == rank)


# %%
from workshop.lessons.zero1 import print_traffic

unit = P * 3 / 4  # P(N-1)/N
print_traffic(naive_results[0]["traffic"])
volume = sum(row["ring_bytes"] / 4 for row in naive_results[0]["traffic"])
print(f"total {volume:,.0f} elements = {volume / unit:.4f} P(N-1)/N; formula: 3 P(N-1)/N")
print("elements owned by each rank:", run_on_ranks(count_owned_elements, 4, config), f"(P/N = {P / 4:,.0f})")

# %% [markdown]
# The optimizer state is sharded. But the naive version has three problems:
#
# - it makes 30 calls per step, and waits for each of them;
# - it sends 3 P(N-1)/N elements, and DDP sends only 2 P(N-1)/N;
# - the elements are not distributed evenly, because full parameters cannot be split.
#
# ## d. Flat buckets
#
# You will see why ZeRO-1 needs no more communication than DDP, and compare four implementations in the real trainer.
#
# An all-reduce *consists of* two collectives. A reduce-scatter leaves one slice of the sum on each rank, and an
# all-gather then copies all slices to every rank. ZeRO-1 uses the reduce-scatter for gradients and the all-gather for
# parameters. The update runs between the two:
#
# ```
#                   rank 0       rank 1       rank 2       rank 3
# backward          [g g g g]    [g g g g]    [g g g g]    [g g g g]     gradients of the rank's own micro-batches
# reduce-scatter    [G . . .]    [. G . .]    [. . G .]    [. . . G]     mean over the ranks, one slice per rank
# update            [p . . .]    [. p . .]    [. . p .]    [. . . p]     AdamW, with the moments of this slice
# all-gather        [p p p p]    [p p p p]    [p p p p]    [p p p p]     the full model on every rank
# ```
#
# For n elements, each of the two collectives sends n(N-1)/N elements per rank. `Zero1Optimizer` implements this scheme.
#
# Next we train with DDP and with each of the three implementations of ZeRO-1, with dropout and gradient clipping.
# `torch` is PyTorch's `ZeroRedundancyOptimizer` on top of DDP.
#
# **Predict first:** complete this table for N = 4.
#
# | | model state per rank (bytes, in P) | communication per rank (elements, in P(N-1)/N) | calls per step |
# |---|---|---|---|
# | DDP | ? | ? | ? |
# | torch | ? | ? | ? |
# | naive | ? | ? | 30 |
# | flat | ? | ? | ? |

# %%
from nanoGPT import train as ddp
from nanoGPT.train_config import TrainConfig, field_names
from phase1_zero1.train import train

BACKENDS = {
    "torch": {"zero1_backend": "torch"},
    "naive": {"zero1_backend": "naive"},
    "flat": {"zero1_backend": "flat"},
}


def train_on(ranks: int, **changes) -> Path:
    """Train on this number of ranks in `out_dir` (default: a new directory), and return the directory of the run."""
    out_dir = changes.pop("out_dir", None) or tempfile.mkdtemp(dir=folder.name)
    run_on_ranks(train, ranks, dataclasses.replace(config, dropout=0.2, out_dir=str(out_dir), **changes), show=False)
    return Path(out_dir)


# %%
def train_ddp(ranks: int, **changes) -> Path:
    """Train the baseline with the same configuration, and return the directory of the run."""
    out_dir = tempfile.mkdtemp(dir=folder.name)
    values = {name: getattr(config, name) for name in field_names(TrainConfig)}
    baseline = add_flags(TrainConfig, "measure")(**{**values, "dropout": 0.2, "out_dir": out_dir, **changes})
    run_on_ranks(ddp.train, ranks, baseline, show=False)
    return Path(out_dir)


# %% [markdown]
# The table compares two numbers with formulas: the model state per rank (bytes, in units of P), and the communication
# per rank (elements, in units of P(N-1)/N):

# %%
from workshop.lessons.zero1 import print_backends

baseline = losses(train_ddp(1))
runs = {"DDP": train_ddp(4, ledger=True)}
runs |= {name: train_on(4, ledger=True, **changes) for name, changes in BACKENDS.items()}
FORMULAS = {"DDP": (16, 2), "torch": (8 + 8 / 4, 3), "naive": (8 + 8 / 4, 3), "flat": (8 + 8 / 4, 2)}
print_backends(runs, FORMULAS, baseline, P)

# %% [markdown]
# All four implementations produce the same loss curve. Except for padding and a few bytes of control data, `flat`
# communicates as much as DDP. Except for padding and step counts, its model state matches the formula on every rank.
# These are its collective calls:

# %%
import json

rows = json.loads((runs["flat"] / "ledger.json").read_text())["ranks"][0]["collectives"]
print_traffic(rows)
padded_elements = max(row["tensor_bytes"] for row in rows) // 4
print(f"{padded_elements:,} elements in the buckets, {padded_elements - P} of them padding")

# %% [markdown]
# There are only two buckets now, because all matrices fit into one bucket of the default size, 25 MiB. The two small
# all-reduces have other purposes. The first one sends one byte per tensor. It tells every rank which tensors have a
# gradient on at least one rank. The other sums the squared norms of all ranks' shards, one scalar of 8 bytes.
#
# Note that `CollectiveCounter` counts calls and tensor sizes, and multiplies them by the cost of the ring algorithm.
# NCCL's rings really send this volume. gloo, which these ranks use, does not: it implements a reduce-scatter as a full
# all-reduce. On CPUs `flat` therefore sends more bytes than DDP. Use CPUs to study the algorithm, and GPUs to measure
# its traffic.
#
# How does the code of `flat` differ from that of `naive`? Both versions contain the same steps, under the same names.
# What the naive version does once per parameter, the real one does once per bucket. The next cell compares three
# steps: `-` is `naive.py`, and `+` is `zero1.py` or `buckets.py`.
# (`make diff FROM=phase1_zero1/naive.py TO=phase1_zero1/zero1.py` prints all of them.)
#
# **Predict first:** which collectives replace the all-reduce and the broadcast? The model has 15 parameter tensors in 2
# buckets: how does the number of calls follow from this, 30 for `naive` and 6 for `flat`?

# %%
from workshop.imports import ROOT
from workshop.steps import compare

steps = compare(ROOT / "phase1_zero1" / "naive.py", ROOT / "phase1_zero1" / "zero1.py")
for name in ("_reduce", "_gather", "step"):
    print(steps[name], end="\n\n")

# %% [markdown]
# The naive version waits for one all-reduce and one broadcast per tensor, 2 x 15 calls. The real one starts one
# reduce-scatter and one all-gather per bucket in the background, 2 x 2 calls, and the two small all-reduces. Each of
# the two collectives sends P(N-1)/N elements. An all-reduce alone sends twice as many, because every rank receives the
# full mean, and then updates only its own part.
#
# In the naive `step`, the three stages follow one another. In the real one, the reduction has started in the backward
# pass, and `start_gather` returns at once, so the all-gather of one bucket runs while the next one is updated.
#
# ## e. A sharded checkpoint
#
# You will save a checkpoint on 4 ranks, and resume from it on 2 ranks.
#
# Each rank stores different moments, so each rank must save its own. The simplest way would be one file per rank with
# the slices of its buckets.
#
# **Predict first:** why is this a bad idea?

# %%
for ranks in (4, 2):
    bucket = run_on_ranks(list_buckets, ranks, config, 25.0)[1][0]
    begin, end = bucket["slice"]
    print(f"rank 1 of {ranks}: elements {begin:,} to {end:,} of {bucket['length']:,} (with padding) in bucket 0")

# %% [markdown]
# The slices and the padding depend on the number of ranks, and the buckets depend on `bucket_mb`. A run with another
# number of ranks could not read such files. `sharded_checkpoint.py` therefore saves by parameter: *elements a to b of
# the flattened moment of this parameter*. It uses PyTorch's distributed checkpoint (DCP), which writes one file per
# rank and an index. The index records which file contains which elements. DCP calls such a saved part a *chunk*.
#
# Below, 4 ranks run 7 steps of the run of (d) and save. Then 2 ranks resume, train until step 12, and save again. We
# set `lr_decay_iters=12`, because otherwise the learning rate of the first run would decay over 7 steps.
#
# **Predict first:** bucket 0 begins with `h.1.mlp.c_proj` and `h.1.mlp.c_fc`, 16,384 elements each. In how many chunks
# do 4 ranks save the first moment of `h.1.mlp.c_fc`, and in how many do 2 ranks? After the change to 2 ranks, what is
# the max loss difference from the run of (d)?

# %%
import shutil

from workshop.lessons.loss_curves import print_two_curves
from workshop.lessons.zero1 import print_chunks

four_ranks = train_on(4, max_iters=7, lr_decay_iters=12)
two_ranks = Path(tempfile.mkdtemp(dir=folder.name)) / "resumed"
shutil.copytree(four_ranks, two_ranks)  # a copy, so that you can run this cell twice
train_on(2, out_dir=two_ranks, init_from="resume", lr_decay_iters=12)

for name in ("step-00000007", "step-00000012"):
    print_chunks(two_ranks / "checkpoints" / name, ("h.1.mlp.c_proj", "h.1.mlp.c_fc", "h.0.mlp.c_proj"))

# %%
resumed_curve, uninterrupted_curve = losses(two_ranks), losses(runs["flat"])
difference = print_two_curves(resumed_curve, uninterrupted_curve, resumed_at=7, ranks_before=4, ranks_after=2)
assert difference < 1e-5

# %% [markdown]
# The two runs are identical up to step 6. After that, 2 ranks compute sums in a different order than 4 ranks. Each of
# the 2 ranks read only the moments of its own shards: the reader uses the index to find them in the 4 files.
#
# The crash-safe protocol is the one of notebook 1: the manifest is written last, and then the directory is renamed.
# Only the files in the directory are different.
#
# ## To take home
#
# 1. DDP stores 16P bytes of model state on every rank, and ZeRO-1 stores 8P + 8P/N. ZeRO-1 saves at most half.
# 2. Parameters are stored one after another in flat buckets. Each bucket has N equal slices, and rank r updates slice
#    r.
# 3. AdamW updates each element independently, so the parameters are the same, whichever rank computes the update.
# 4. An all-reduce is a reduce-scatter and an all-gather. ZeRO-1 runs the update between the two, so it sends no more
#    than DDP.
# 5. The naive version sends 3P(N-1)/N elements, and flat buckets send 2P(N-1)/N.
# 6. A checkpoint stores ranges of parameters. It does not store buckets, so another number of ranks can load it.
#
# ## Exercises
#
# `make exercise N=zero1.1` and the exercises after it let you write parts of this chapter again: buckets, slices,
# shards, the reduce-scatter, and ZeRO-2. `make check N=zero1.1` runs your code on
# real ranks and explains what is wrong. `docs/exercises.md` lists all of them.
#
# **1. ZeRO-2.** After the reduce-scatter, a rank needs only its own slice of the gradient. Suppose that it frees the
# rest. Predict first: how many bytes of model state does a rank store for N = 4? Which value does it approach for a
# large number of ranks? Now suppose that a rank runs M micro-batches per step and must never store the full gradient
# between them. How much does it send per step?
#
# <details><summary>Hint</summary>
#
# Parameters 4P, gradients 4P/N and moments 8P/N are 4P + 12P/N in total. For N = 4 this is 7P instead of 10P, and for
# many ranks it approaches 4P instead of 8P. (A bucket needs its full size while it is being filled or reduced. This
# memory comes on top.)
#
# `Zero1Optimizer` keeps the full gradient in `flat_grads` for gradient accumulation: each micro-batch adds to every
# element, and only the last one starts the reduce-scatter. Without the full gradient, each micro-batch needs a
# reduce-scatter, and each rank accumulates its own slice. This sends (M + 1) P(N-1)/N elements instead of 2 P(N-1)/N,
# so with M = 1 ZeRO-2 has no extra communication. To implement it in `buckets.py`, allocate `flat_grads` and its views
# when the first gradient of a bucket is ready, and free them as soon as the reduce-scatter has ended and the slice is
# copied. (`finish_reduce` runs only after the backward pass, when all buckets are full. Freeing memory there does not
# lower the peak.)
#
# </details>
#
# **2. Where is wte?** Predict first: for N = 4 and the default `bucket_mb=25`, which ranks store moments of the token
# embedding? And with `bucket_mb=0.2`, as in the figure of (b)?
#
# <details><summary>Hint</summary>
#
# The buckets contain the last parameters first. `wte` is the first parameter of the model, so it lies at the end of the
# bucket of the matrices:
#
# ```python
# for bucket_mb in (25.0, 0.2):
#     for rank, buckets in enumerate(run_on_ranks(list_buckets, 4, config, bucket_mb)):
#         for number, bucket in enumerate(buckets):
#             for name, offset, begin, end in bucket["shards"]:
#                 if name == "wte":
#                     print(f"{bucket_mb} MiB, bucket {number}, rank {rank}: {offset} to {offset + end - begin}")
# ```
#
# With 25 MiB only rank 3 stores them. With 0.2 MiB all four ranks store a part. In both cases these are also the
# moments of the output layer, because it is the same parameter and lies in a bucket only once.
#
# </details>
#
# **3. Tiny buckets, huge buckets.** Predict first: how many reduce-scatters does a step make with `bucket_mb=0.0001`,
# and how many with `bucket_mb=1000`? Which setting sends more elements, and why? What is the disadvantage of each?
#
# <details><summary>Hint</summary>
#
# ```python
# for bucket_mb in (0.0001, 0.2, 1000.0):
#     result = run_on_ranks(train_by_hand, 4, config, lambda model: make_flat_zero1(model, bucket_mb), steps=2)[0]
#     print(f"{bucket_mb} MiB")
#     print_traffic(result["traffic"])
# ```
#
# A parameter that is larger than `bucket_mb` gets its own bucket, so tiny buckets make 15 reduce-scatters, one per
# tensor. Each bucket is padded to slices of a multiple of 32 elements, so tiny buckets send slightly more elements.
# More important, each call has a fixed cost, and 15 calls pay it 15 times.
#
# Huge buckets make 2 reduce-scatters, one per parameter group. The bucket of the matrices can start only when the last
# gradient, the one of `wte`, is ready. Its communication then does not overlap with the backward pass.
#
# </details>
