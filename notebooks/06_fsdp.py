# %% [markdown]
# # 6. FSDP: shard parameters, gradients and optimizer state
#
# *45 minutes. Read [notebook 3](03_zero1.ipynb) first, for model state, communication volume and sharding.*
#
# Let P be the number of parameters and N the number of ranks. With ZeRO-1 each rank stores 8P + 8P/N bytes. The 8P
# bytes are the full parameters and the full gradients. FSDP shards these as well.
#
# A layer needs its full weights. FSDP therefore all-gathers the weights of a layer shortly before the layer runs and
# frees them afterwards. The notebook tests three claims:
#
# - **Just before the update, the model state takes 16P/N bytes per rank.**
# - **The communication volume is larger than with DDP or ZeRO-1.**
# - **The losses stay the same.**
#
# You first shard two layers by hand. Then you shard the GPT as the trainer does, and you measure which rank stores
# what, when weights are all-gathered and freed, how much memory remains, and how much is communicated. Sharding does not
# shrink activations: [notebook 6b](06b_activation_checkpointing.ipynb) does.
#
# Open `phase3_fsdp/fsdp.py` and `costs.py` next to this page. You need no GPU.

# %%
import dataclasses
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.optim import AdamW

from nanoGPT.dataset import TokenData
from measure.ledger import CollectiveCounter
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.distributed.sharding import all_gather, reduce_scatter  # these work with old and new names in torch
from phase3_fsdp.fsdp import FsdpConfig
from phase3_fsdp.fsdp import put_parameters_on_meta
from workshop.lessons.fsdp import compute_max_difference
from workshop.ranks import losses, run_on_ranks

# %% [markdown]
# The configuration is that of notebooks 1 and 3, with more blocks. Tables and pictures come from
# `workshop/lessons/fsdp.py` and `fsdp_pictures.py`.

# %%
folder = tempfile.TemporaryDirectory()  # for the runs of this notebook; it is deleted when the Jupyter kernel stops

config = FsdpConfig(
    device="cpu",
    block_size=32,  # T, tokens per sequence
    batch_size=4,  # B, sequences per micro-batch
    gradient_accumulation_steps=8,  # micro-batches per step, over all ranks
    n_layer=4, n_head=2, n_embd=64,
    max_iters=6, eval_interval=6, eval_iters=4, log_interval=1,
    learning_rate=2e-3, min_lr=2e-4, warmup_iters=2,
)
data = TokenData(config)
shape = GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": data.tokenizer["vocab_size"]})
P = sum(p.numel() for p in GPT(shape).parameters())
print(f"P = {P:,} parameters in {config.n_layer} blocks, the embeddings and the last LayerNorm")

# %% [markdown]
# ## a. Two layers, by hand
#
# In this section you implement FSDP for two layers, and then you let `fully_shard` do the same.
#
# The model is two linear layers with a tanh between them, on 4 ranks. Each rank stores a quarter of the *rows* of each
# weight, and trains on a quarter of the examples:
#
# ```
#                   rank 0       rank 1       rank 2       rank 3
# between steps     [w . . .]    [. w . .]    [. . w .]    [. . . w]     each rank stores a quarter of every weight
# forward           [w w w w]    [w w w w]    [w w w w]    [w w w w]     all-gather layer i, compute, free
# backward          [w w w w]    [w w w w]    [w w w w]    [w w w w]     all-gather layer i, compute
#                   [g . . .]    [. g . .]    [. . g .]    [. . . g]     reduce-scatter its gradient, free
# update            [w . . .]    [. w . .]    [. . w .]    [. . . w]     AdamW on the local rows: no communication
# ```
#
# Freeing a weight is the difficult part. Autograd saves the tensors that a backward pass needs. For y = xWᵀ these are x
# (for the gradient of W) and W (for the gradient of x). If you all-gather W and call an ordinary layer, autograd keeps
# the full W until the backward pass. A custom autograd Function solves this: it saves only the local rows.
#
# **Predict first:** the weights have the shapes 12 × 8 and 4 × 12. What does rank 2 store of each? How many all-gathers
# and how many reduce-scatters does one step need? Does the optimizer have to know about other ranks? After 5 steps, how
# far are the weights from those of a single process?

# %% answer="gather_rows"
def gather_rows(rows: Tensor) -> Tensor:
    """Return the full weight, all-gathered from the rows of every rank."""
    full = rows.new_empty(dist.get_world_size() * len(rows), rows.size(1))
    all_gather(full, rows)
    return full


# %% answer="ShardedLinear"
class ShardedLinear(torch.autograd.Function):
    """y = x Wᵀ, where each rank stores only some rows of W."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(x, rows)  # not the full weight
        return x @ gather_rows(rows).T  # Python frees the full weight after this line

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, rows = ctx.saved_tensors
        dx = dy @ gather_rows(rows)  # the backward pass needs the full weight again
        drows = torch.empty_like(rows)
        reduce_scatter(drows, dy.T @ x, dist.ReduceOp.AVG)  # the local rows of the mean over ranks
        return dx, drows


# %% [markdown]
# The model, its examples, and a loop that works for every way of sharding:

# %%
def build_two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 4, bias=False))


def make_examples(step: int) -> tuple[Tensor, Tensor]:
    """Return the 16 inputs and targets of a step; they are the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)


# %%
def train_five_steps(forward, parameters) -> list[dict]:
    """Train on this rank's part of the examples; return the collectives of the last step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = AdamW(parameters, lr=1e-2)
    for step in range(5):
        x, y = (tensor.chunk(ranks)[rank] for tensor in make_examples(step))
        with CollectiveCounter() as traffic:
            (forward(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(traffic.rows.values())


# %% [markdown]
# First train in one process, then on 4 ranks, where each rank stores only its rows:

# %%
def train_unsharded() -> list[Tensor]:
    model = build_two_layers()
    train_five_steps(model, model.parameters())
    return [p.detach() for p in model.parameters()]


def train_by_hand() -> dict:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = [nn.Parameter(p.detach().chunk(ranks)[rank].clone()) for p in build_two_layers().parameters()]

    def forward(x: Tensor) -> Tensor:
        return ShardedLinear.apply(ShardedLinear.apply(x, rows[0]).tanh(), rows[1])

    traffic = train_five_steps(forward, rows)
    weights = [gather_rows(p.detach()) for p in rows]
    return {"local_shapes": [tuple(p.shape) for p in rows], "weights": weights, "traffic": traffic}


[reference] = run_on_ranks(train_unsharded, 1)
by_hand = run_on_ranks(train_by_hand, 4)

# %%
print("shapes on rank 2:", by_hand[2]["local_shapes"])
for row in by_hand[2]["traffic"]:
    print(f"{row['kind']:15} {row['calls']} calls, {row['tensor_bytes'] // 4} elements in full tensors")
print(f"max weight difference from one process: {compute_max_difference(by_hand[2]['weights'], reference):.1e}")

sizes = [12 * 8, 4 * 12]
calls = {row["kind"]: (row["calls"], row["tensor_bytes"] // 4) for row in by_hand[2]["traffic"]}
assert by_hand[2]["local_shapes"] == [(3, 8), (1, 12)]
assert calls == {"all-gather": (4, 2 * sum(sizes)), "reduce-scatter": (2, sum(sizes))}
assert all(compute_max_difference(rank["weights"], reference) < 1e-6 for rank in by_hand)

# %% [markdown]
# Each step all-gathers every weight twice and reduces its gradient once. AdamW updates each element independently. It
# receives 3 × 8 and 1 × 12 elements, stores moments for these, and needs no communication.
#
# This is the complete idea of FSDP. `phase3_fsdp/by_hand.py` does it for any module, in about 130 lines of code: hooks
# before and after forward and backward all-gather and free the weights. The parameters that are all-gathered and freed
# together form a *unit*. [The note of phase 3](../phase3_fsdp/IMPLEMENTATION.md) builds it step by step.
#
# PyTorch's own version is `fully_shard`, also called FSDP2. (FSDP1 is the older class `FullyShardedDataParallel`, which
# many web pages describe. It has other options.) In the next cell each linear layer is a unit. Call `fully_shard` on
# the outer model last, so that it finds the units inside.
#
# **Predict first:** which type do the parameters have afterwards? Do the numbers change?

# %%
def train_with_fully_shard() -> dict:
    model = build_two_layers()
    mesh = init_device_mesh("cpu", (4,))  # by default, `fully_shard` uses GPUs where there are any
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    traffic = train_five_steps(model, model.parameters())
    parameters = list(model.parameters())
    return {
        "local_shapes": [tuple(p.to_local().shape) for p in parameters],
        "types": {f"{type(p).__name__} {p.placements}" for p in parameters},
        "weights": [p.full_tensor().detach() for p in parameters],
        "traffic": traffic,
    }


# %%
by_torch = run_on_ranks(train_with_fully_shard, 4)
print("type of the parameters:", *by_torch[2]["types"])
print("shapes on rank 2:", by_torch[2]["local_shapes"])
print("same collectives as by hand:", by_torch[2]["traffic"] == by_hand[2]["traffic"])
difference = compute_max_difference(by_torch[2]["weights"], by_hand[2]["weights"])
print("max weight difference from the version by hand:", difference)
assert by_torch[2]["local_shapes"] == by_hand[2]["local_shapes"] and by_torch[2]["traffic"] == by_hand[2]["traffic"]
assert difference < 1e-7

# %% [markdown]
# A `DTensor` is a tensor that knows how it is sharded: here `Shard(dim=0)`, by rows. The layers are ordinary layers
# again, so autograd does save their full weights. But after the forward pass a hook of FSDP sets the size of their
# *storage*, the memory of a tensor, to 0, and before the backward pass another hook refills it. In between, autograd
# holds a tensor without memory.
#
# ## b. Shard the GPT
#
# In this section you learn which rank stores which rows, how much communication to expect, and how to initialize a
# model that fits on no single rank.
#
# `shard_model` turns every block into a unit. The remaining parameters belong to the root unit: both embeddings and the
# last LayerNorm. (The output layer shares its weight with the token embedding. A parameter must belong to exactly one
# unit.)
#
# **Predict first:** `wte` has 75 rows, and 75 is not divisible by 4. How many rows does each of 4 ranks store? In
# [notebook 3](03_zero1.ipynb) a shard could begin anywhere in a bucket, so many parameters had their optimizer state on
# a single rank. Which parameters does FSDP store completely on one rank?

# %%
from nanoGPT.distributed.runtime import Runtime, create_runtime
from phase3_fsdp.fsdp import init_shards, shard_model
from workshop.lessons import fsdp_pictures
from workshop.lessons.fsdp import count_local_elements, describe_layout
from workshop.pictures import draw_memory_bars


def build_sharded_model(config: FsdpConfig) -> tuple[GPT, Runtime]:
    """Return this rank's shards of the model with its initial weights, as the trainer builds it."""
    run = create_runtime(config.device, config.dtype)
    with put_parameters_on_meta():
        model = GPT(shape)
    model = shard_model(model, config, run)
    init_shards(model, config, run)
    return model, run


# %% [markdown]
# Ask each rank for its rows:

# %%
def list_local_rows(config: FsdpConfig) -> dict:
    """Return each unit's parameters as (name, rows, local rows, elements per row), and the trainer's message."""
    model, run = build_sharded_model(config)
    return describe_layout(model, config, run)


layout = run_on_ranks(list_local_rows, 4, config)  # layout[rank]
for rank, each in enumerate(layout):
    wte = each["units"][0][0]
    print(f"rank {rank}: {count_local_elements(each):,} of {P:,} parameters; {wte[2]} of {wte[1]} rows of {wte[0]}")
assert [each["units"][0][0][2] for each in layout] == [19, 19, 19, 18]
assert sum(map(count_local_elements, layout)) == P

# %%
fsdp_pictures.draw_layout(layout)

# %% [markdown]
# No parameter is stored completely on one rank. Every rank stores a part of every parameter. (The part of a LayerNorm
# is 16 elements per rank, too few to be visible here.) All ranks but the last store ⌈75/4⌉ = 19 rows of `wte`. The last
# rank stores the remaining 18 rows and one row of padding, because the collectives need shards of equal size.
#
# When a run starts, it prints the communication volume of one step. You can predict it from these facts:
#
# - Each rank computes M = 2 micro-batches per step.
# - Each block is all-gathered in the forward pass and again in the backward pass.
# - The root is all-gathered once per micro-batch. Its forward pass begins first and its backward pass ends last, so it
#   stays all-gathered from the start of the forward pass to the end of the backward pass.
# - Gradients are reduced once per step.
# - P is 204,032, and 6,912 of these parameters belong to the root.
#
# **Predict first:** how many bytes of full tensors does a step all-gather? How many does it reduce-scatter?

# %%
print(layout[0]["message"])

root = sum(rows * width for _, rows, _, width in layout[0]["units"][0])
M = config.gradient_accumulation_steps // 4
elements = M * (2 * P - root)
print(f"\nall-gather:     M(2P - P_root) = {elements:,} elements, {4 * elements / 1e6:.1f} MB")
print(f"reduce-scatter: P = {P:,} elements, {4 * P / 1e6:.1f} MB")
assert f"4 units of {(P - root) // 4:,} parameters, a root unit of {root:,}" in layout[0]["message"]
assert f"all-gather {4 * elements / 1e6:,.1f} MB" in layout[0]["message"]
assert f"reduce-scatter {4 * P / 1e6:,.1f} MB" in layout[0]["message"]

# %% [markdown]
# With the ring algorithm each of 4 ranks sends three quarters of these bytes.
#
# **How to initialize the weights.** A model that fits on no single rank cannot be created first and sharded later. The
# trainer therefore works in three steps:
#
# 1. It creates the model on the *meta device*, where tensors have shapes but no memory.
# 2. `shard_model` shards it there.
# 3. `init_shards` allocates memory for the local rows and fills them. It draws only the groups of rows that contain
#    its shard. Each group has its own random generator, whose seed depends on (seed, name of the parameter, number of
#    the group).
#
# A shortcut looks tempting: allocate memory with `to_empty`, set the same seed on all ranks, and call
# `nn.init.normal_`.
#
# **Predict first:** with the three steps above, how do the weights on 4 ranks differ from those of one process? With
# the shortcut, what do rows 0, 19, 38 and 57 of `wte` have in common on 4 ranks?

# %%
def init_as_trainer(config: FsdpConfig) -> dict[str, Tensor]:
    model, _ = build_sharded_model(config)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


unsharded = GPT(shape)
unsharded.init_weights(config.seed)
print("draw the chunks that contain the local rows:")
for number in (1, 2, 4):
    trainer_weights = run_on_ranks(init_as_trainer, number, config)[0]
    is_same = all(torch.equal(trainer_weights[name], p) for name, p in unsharded.named_parameters())
    print(f"{number} rank(s): bitwise identical to one process: {is_same}")
    assert is_same and len(trainer_weights) == len(list(unsharded.parameters()))

# %% [markdown]
# And the shortcut:

# %%
import warnings


def init_with_one_seed(config: FsdpConfig) -> tuple[Tensor, list[str]]:
    """Initialize the local rows with the same seed on every rank; return the full `wte`, and torch's warnings."""
    with torch.device("meta"):
        model = GPT(shape)
    model = shard_model(model, config, create_runtime(config.device, config.dtype))
    model.to_empty(device="cpu")
    torch.manual_seed(config.seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nn.init.normal_(model.transformer["wte"].weight, std=0.02)
    return model.transformer["wte"].weight.full_tensor().detach(), [str(warning.message) for warning in caught]


# %%
one_seed = {number: run_on_ranks(init_with_one_seed, number, config)[0] for number in (1, 2, 4)}
print("draw only local rows, with one seed: first element of rows 0, 19, 38 and 57 of wte:")
for number, (wte, _) in one_seed.items():
    print(f"{number} rank(s): " + "".join(f"{wte[row, 0]:9.5f}" for row in (0, 19, 38, 57)))
print("warning of torch:", *one_seed[4][1])
assert all(torch.equal(one_seed[4][0][:18], one_seed[4][0][19 * rank :][:18]) for rank in range(4))
assert not torch.equal(one_seed[4][0], one_seed[1][0]) and not torch.equal(one_seed[2][0], one_seed[1][0])

# %%
fsdp_pictures.draw_similarity_of_rows({
    "draw only local rows, one seed": one_seed[4][0],
    "draw the chunks that contain the local rows": trainer_weights["transformer.wte.weight"],
})

# %% [markdown]
# With one seed for all ranks, most tokens share their embedding with three other tokens. There is no error, and every
# number of ranks gets a different model. A comparison with one process, as above, finds this bug.
#
# ## c. When weights are all-gathered and freed
#
# In this section you follow the memory for full weights through one step. You learn what two options change: to
# *reshard* (free the full parameters of a unit after its forward pass) and to *prefetch* (start the all-gather of a
# unit before it is needed).
#
# `measure.tracker.MemoryTracker` records every tensor that is created, resized or freed, and assigns its bytes
# to a category. This section shows the category *gathered* on one rank. It contains the full parameters, and the flat
# buffers in which they arrive.
#
# A unit is unsharded in two steps. First the all-gather fills a flat buffer with the data of rank 0, then rank 1, and
# so on. Then the *copy-out* copies each parameter out of the buffer, because the rows of a parameter must be
# contiguous. For a short time a unit therefore takes twice its size.
#
# To *reshard* a unit means to free its full parameters and to keep only this rank's shard. With
# `fsdp_reshard_after_forward=False`, the blocks stay unsharded from their first forward to their last backward pass in
# a step.
#
# **Predict first:** sketch the gathered bytes during a step of a model with 4 blocks, with and without resharding. How
# high is each maximum, in blocks?

# %%
from workshop.lessons.fsdp import measure_fsdp_steps, print_gathered_blocks

VARIANTS = {
    "default": {},
    "no reshard": {"fsdp_reshard_after_forward": False},
}


def measure_variants(config: FsdpConfig) -> dict[str, dict]:
    configs = {name: dataclasses.replace(config, **changes) for name, changes in VARIANTS.items()}
    return {name: measure_fsdp_steps(build_sharded_model, configs[name]) for name in VARIANTS}


variants = run_on_ranks(measure_variants, 4, config)
print_gathered_blocks(variants, expected_blocks=dict(zip(VARIANTS, (3, 6))))

# %%
fsdp_pictures.draw_gathered_bytes(variants)

# %% [markdown]
# Read the first curve from left to right:
#
# 1. The root is all-gathered and stays.
# 2. While block 0 computes, its parameters and its flat buffer both exist: 2 blocks.
# 3. Block 0 frees its parameters (1 block), the buffer of block 1 arrives (2), and the copy-out adds the parameters
#    of block 1 (3). Torch frees the buffer of block 0 only after this. On a GPU this lets the copy-out of one block
#    overlap with the all-gather of the next block.
# 4. In the backward pass torch frees a buffer right after its copy-out. It also prefetches the block that comes next.
#    While a block computes, its parameters and the buffer of the next block both exist: 2 blocks.
#
# On a GPU the forward pass overlaps too, without any option. The CPU starts the all-gather of the next block while
# the GPU still computes the current one, on another *stream* (a queue of the GPU; two queues run at the same time).
#
# Block 3 is freed after its forward pass and all-gathered again directly afterwards. This all-gather could be avoided.
#
# Several units are therefore in memory at the same time, as full parameters or as flat buffers. By default they take at
# most the bytes of 3 blocks and the root, whether the model has 4 blocks or 100.
#
# Without resharding after the forward pass, each block adds one block to the curve. When the backward pass starts, the
# full model is there, and no block is all-gathered again. The maximum is 6 blocks: 4 unsharded blocks and 2 flat
# buffers.
#
# ## d. Memory per rank
#
# In this section you learn which memory shrinks with the number of ranks, and what remains.
#
# The next cell measures all categories on 1, 2 and 4 ranks. Each rank computes one micro-batch of the same size.
#
# **Predict first:** which categories shrink with the number of ranks, and which do not? With a very large number of
# ranks, what does the peak memory of a step consist of?

# %%
from workshop.lessons.fsdp import print_memory, select_usages

by_ranks = {number: run_on_ranks(measure_fsdp_steps, number, build_sharded_model, config) for number in (1, 2, 4)}
usages = {number: select_usages(ranks) for number, ranks in by_ranks.items()}  # model state, and memory at the peak
print_memory(usages, P, tensors=len(list(unsharded.parameters())))

# %%
bars = {f"{number} rank(s)": {name: size / 1e6 for name, size in peak.items()} for number, (_, peak) in usages.items()}
draw_memory_bars(bars, "Peak memory of a step", "MB per rank")

# %% [markdown]
# The model state takes 16P/N bytes. Two small terms come on top: a step count for each parameter tensor, and one row of
# `wte` on the ranks that store one more row. (The peak is at the start of the backward pass, so it contains no
# gradients yet.)
#
# Gathered weights and activations do not shrink when you add ranks. (A single rank needs no buffers, so its value is
# lower.) With very many ranks, almost only these two and *other* remain. Notebook 6b reduces the activations.
#
# ## e. Communication volume and memory
#
# In this section you compare DDP with three configurations of FSDP: how much they communicate, and how much memory they
# save.
#
# The next cell measures one step on 4 ranks with M = 2 micro-batches per rank, and compares it with the formulas in
# `costs.py`. *Hybrid* sets `fsdp_shard_size=2`: there are two replicas of the model, and two ranks shard each replica.
# Ranks 0 and 1 all-gather from each other, and so do ranks 2 and 3. Gradients are reduce-scattered within each pair.
# Then rank 0 all-reduces its shard with rank 2, which stores the same shard, and rank 1 does so with rank 3.
#
# **Predict first:** sort the three configurations, and DDP, by communication volume per rank, and by memory per rank.
# Then assume that each pair is one node with fast links inside. Sort them by the volume *between* the nodes.

# %%
from workshop.lessons.fsdp import print_costs, sum_sent_bytes

OPTIONS = {
    "default": {},
    "no reshard": {"fsdp_reshard_after_forward": False},
    "hybrid 2 x 2": {"fsdp_shard_size": "2"},
}


def measure_option(name: str) -> dict:
    return measure_fsdp_steps(build_sharded_model, dataclasses.replace(config, **OPTIONS[name]), micro_batches=2)


costs = run_on_ranks(lambda: {name: measure_option(name) for name in OPTIONS}, 4)[0]

# %%
print_costs(costs, P)
per_rank = sum_sent_bytes(by_ranks[4][0]["steps"][-1]["communicated"]) / 4 / P
print(f"default with M = 1, as in section (d): a rank sends {per_rank:.3f} P")
assert abs(per_rank / 1.5 - 3 / 2) < 0.02

# %% [markdown]
# DDP communicates 2P(N-1)/N elements per rank and stores 16P bytes, as notebook 3 measured. Its volume does not depend
# on M, because it all-reduces once per step. FSDP all-gathers for every micro-batch, so a few large micro-batches cost
# less communication than many small ones. With M = 1 FSDP sends at most 1.5 times as much as DDP.
#
# - The default sends most and stores least.
# - Without resharding after the forward pass, a rank sends 60% less, as much as with DDP: it all-gathers each block
#   once per step, for any M. In return all blocks are unsharded at once.
# - Hybrid needs twice the model state, 16P/2 instead of 16P/4. Its all-gathers stay within a node. Only the all-reduce
#   of the shards crosses nodes, about a quarter of the volume of the default. This pays off if the links between nodes
#   are slow.
#
# As in notebook 3, the cell counts calls and tensor sizes, and computes the volume with the formula of the ring
# algorithm. gloo sends more.
#
# **And the version by hand?** `by_hand.py` has about 130 lines of code. **Predict first:** which of its numbers are
# equal to those of `fully_shard`, and which differ: the bytes that it all-gathers and reduce-scatters, its peak
# memory, the time of a step, the losses?

# %%
from workshop.lessons.by_hand import compare_with_fully_shard, print_versions

larger_shape = GPTConfig(n_layer=4, n_head=2, n_embd=256, block_size=64, bias=False, vocab_size=shape.vocab_size)
print_versions(run_on_ranks(compare_with_fully_shard, 2, larger_shape)[0])

# %% [markdown]
# Both send the same bytes and compute the same loss. Their peaks differ by a few percent, and on CPUs a step takes
# about as long. On a GPU, the version by hand waits for each reduce-scatter. `fully_shard` runs it on a stream of its
# own, and the backward pass continues.
#
# ## f. The same loss curve
#
# In this section you verify that sharding does not change the training.
#
# The next cell runs the trainer, `phase3_fsdp/train.py`, with dropout: in one process without sharding, which equals
# the baseline, then with FSDP on 1 and on 4 ranks, and on 4 ranks with many options combined.
#
# **Predict first:** how large are the loss differences, and at which step do they start?

# %%
from nanoGPT import train as baseline
from nanoGPT.train_config import TrainConfig, field_names
from phase3_fsdp.train import train

MANY_OPTIONS = {
    "fsdp_shard_size": "2",
    "fsdp_reshard_after_forward": False,
    "fsdp_activation_checkpointing": "selective",
    "fsdp_sync_every_micro_batch": True,
}


def train_on_ranks(ranks: int, **changes) -> dict[int, float]:
    """Train in a new directory; return the loss of each step."""
    out_dir = tempfile.mkdtemp(dir=folder.name)
    run_on_ranks(train, ranks, dataclasses.replace(config, dropout=0.2, out_dir=out_dir, **changes), show=False)
    return losses(out_dir)


# %%
def train_baseline() -> dict[int, float]:
    """Train the baseline with the same configuration in one process; return the loss of each step."""
    out_dir = tempfile.mkdtemp(dir=folder.name)
    values = {name: getattr(config, name) for name in field_names(TrainConfig)}
    run_on_ranks(baseline.train, 1, TrainConfig(**{**values, "dropout": 0.2, "out_dir": out_dir}), show=False)
    return losses(out_dir)


# %%
from workshop.lessons.fsdp import print_loss_curves

curves = {
    "one process, not sharded": train_baseline(),
    **{f"FSDP, {number} rank{'s' * (number > 1)}": train_on_ranks(number) for number in (1, 4)},
    "FSDP, 4 ranks, many options": train_on_ranks(4, **MANY_OPTIONS),
}
print_loss_curves(curves, baseline=curves["one process, not sharded"])

# %% [markdown]
# The losses differ at most in the last digits of fp32. With one rank they are identical to the baseline. Several ranks
# add up numbers in another order. FSDP only changes where tensors are stored, and when.
#
# The checkpoints of such a run are sharded as well. `sharded_checkpoint.py` writes them with the protocol of notebooks
# 1 and 3, and notebook 7 explains them.
#
# ## To take home
#
# 1. FSDP all-gathers the weights of a unit, computes, frees them, and reduce-scatters the gradients.
# 2. Each rank stores 16P/N bytes of model state, and AdamW updates the local rows without communication.
# 3. With M micro-batches per rank, a rank all-gathers M(2P - P_root) elements, times (N-1)/N. It reduce-scatters P
#    elements and accumulates full gradients, 4P bytes. Or it reduces after each micro-batch: MP elements, and no full
#    gradients. DDP sends 2P(N-1)/N elements.
# 4. By default, the full parameters and flat buffers need at most 3 blocks and the root, for any number of blocks.
# 5. Without resharding, a rank sends less, but all blocks are unsharded at once.
# 6. Activations do not shrink with more ranks.
# 7. Draw initial weights by parameter and chunk. With one seed for all ranks, the shards of different ranks are equal.
# 8. The losses match those of one process up to rounding, with any of these options.
#
# ## Exercises
#
# `make exercise N=fsdp.1` and the exercises after it let you write parts of this chapter again: a sharded layer by
# hand, and gradient synchronization. `make check N=fsdp.1` runs your code on real ranks and
# explains what is wrong. `docs/exercises.md` lists all of them.
#
# **1. No resharding, by hand.** Change `ShardedLinear` of section (a) so that the full weight stays from the forward to
# the backward pass. Predict first: how many of the 4 all-gathers remain, and are the weights still the same? Then go
# back to the first version: one of its all-gathers is unnecessary. Which one?
#
# <details><summary>Hint</summary>
#
# Save the full weight for the backward pass:
#
# ```python
# class UnreshardedLinear(torch.autograd.Function):
#     @staticmethod
#     def forward(ctx, x, rows):
#         full = gather_rows(rows)
#         ctx.save_for_backward(x, full)
#         return x @ full.T
#
#     @staticmethod
#     def backward(ctx, dy):
#         x, full = ctx.saved_tensors
#         dw = dy.T @ x
#         drows = dw.new_empty(len(dw) // dist.get_world_size(), dw.size(1))
#         reduce_scatter(drows, dw, dist.ReduceOp.AVG)
#         return dy @ full, drows
#
#
# ShardedLinear = UnreshardedLinear
# by_hand = run_on_ranks(train_by_hand, 4)
# print(by_hand[0]["traffic"], compute_max_difference(by_hand[0]["weights"], reference))
# ```
#
# 2 all-gathers remain, and the weights are the same.
#
# The unused result is in the backward pass of the first layer: it computes the gradient of the examples, which nothing
# needs. `dx = dy @ gather_rows(rows) if ctx.needs_input_grad[0] else None` leaves 3 of the 4 all-gathers. It is safe,
# because all ranks make the same decision. `fully_shard` all-gathers a unit before it knows what the backward pass of
# the unit needs.
#
# </details>
#
# **2. One unit.** With `fsdp_wrap="1e9"` no module is large enough to be a unit, so
# the root is the only unit. Predict first, for 4 ranks and M = 2: what is the maximum of the gathered bytes, in units
# of P? How many elements do the all-gathers have? Which option does this resemble, and what is the disadvantage?
#
# <details><summary>Hint</summary>
#
# ```python
# from workshop.lessons.fsdp import find_max_gathered_bytes
#
# one_unit = dataclasses.replace(config, fsdp_wrap="1e9")
# step = run_on_ranks(measure_fsdp_steps, 4, build_sharded_model, one_unit, 2)[0]["steps"][-1]
# print(find_max_gathered_bytes(step) / P, step["communicated"]["all-gather", 4] / 4 / P)
# ```
#
# The maximum is 8 bytes per parameter: the full model, and a buffer of the same size. The all-gathers have MP elements,
# because the root is not freed after its forward pass. `fsdp_reshard_after_forward=False` stores the full model too.
# But with that option the all-gathers have only P elements, that of a block can overlap with the computation of the
# block before, and the buffers are only as large as a block. With one unit every rank waits until all parameters have
# arrived.
#
# </details>
#
# **3. Gradient accumulation.** Gradients are reduced once per step, after the last micro-batch. Predict first: what
# does `.grad` contain until then, and how many bytes is it on each of 4 ranks with M = 2? What does
# `fsdp_sync_every_micro_batch=True` change, and what does it cost?
#
# <details><summary>Hint</summary>
#
# ```python
# for sync_every_micro_batch in (False, True):
#     changed = dataclasses.replace(config, fsdp_sync_every_micro_batch=sync_every_micro_batch)
#     step = run_on_ranks(measure_fsdp_steps, 4, build_sharded_model, changed, 2)[0]["steps"][-1]
#     gradients = max(usage["gradients"] for _, usage in step["timeline"])
#     print(sync_every_micro_batch, gradients / P, step["communicated"]["reduce-scatter", 4] / 4 / P)
# ```
#
# Until the last micro-batch each rank accumulates full gradients, 4P bytes, as many as DDP. With gradient accumulation
# the peak memory is therefore well above 16P/N. With the option a rank accumulates only its rows, 4P/N bytes, but
# it reduce-scatters after each micro-batch: MP elements instead of P. (Exercise 1 of notebook 3 has the same
# trade-off.)
#
# </details>
