# %% [markdown]
# # 4. FSDP: shard everything
#
# ZeRO-1 left parameters and gradients whole on every rank: 8P of its 8P + 8P/N bytes. FSDP shards these, too. Nobody
# can run a layer on a slice of its weights, so a layer's weights are gathered just before it computes, and freed right
# after. The claims to test: **a rank keeps 16P/N bytes between steps, more is sent than before, and the losses stay
# what they were.** P is the number of parameters, N that of ranks.
#
# First comes one layer, by hand. Then the GPT as the trainer shards it: who holds what, how weights come and go in a
# step, what is left of the memory, and what is sent. In between, activations, which no sharding of parameters makes
# fewer. Have `phase3_fsdp/fsdp.py`, `activation_checkpointing.py` and `costs.py` open beside this page. No GPU is
# needed.

# %%
import dataclasses
import tempfile
import time
import warnings

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.metrics.ledger import Traffic
from nanoGPT.memory.costs import ring_bytes
from nanoGPT.memory.tracker import CATEGORIES, STATE, Memory
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer, grad_norm
from nanoGPT.distributed.runtime import Runtime, create_runtime
from phase1_zero1.buckets import all_gather, reduce_scatter  # by the names that this torch has for them
from phase3_fsdp.activation_checkpointing import checkpoint_activations
from phase3_fsdp.activation_bytes import activation_bytes, saved_activations
from phase3_fsdp.costs import describe_sharding, expected_traffic, own_params, padded
from phase3_fsdp.fsdp import (
    FsdpConfig, init_device, data_parallel, init_shards, local_grads, set_gradient_sync, shard_group, shard_model,
)
from phase3_fsdp.train import train
from workshop.ranks import losses, run_on_ranks

folder = tempfile.TemporaryDirectory()  # every run of this notebook writes here; it goes when the kernel ends

config = FsdpConfig(
    device="cpu",
    block_size=32,  # T, tokens per sequence
    batch_size=4,  # B, sequences per micro-batch
    gradient_accumulation_steps=8,  # micro-batches per step, of all ranks together
    n_layer=4,
    n_head=2,
    n_embd=64,
    max_iters=6,
    warmup_iters=2,
    eval_interval=6,
    eval_iters=4,
    log_interval=1,
)


def text(config: FsdpConfig) -> TokenData:
    return TokenData(config.dataset, config.block_size, config.batch_size, config.seed)


shape = GPTConfig.of({**dataclasses.asdict(config), "vocab_size": text(config).tokenizer["vocab_size"]})
P = sum(p.numel() for p in GPT(shape).parameters())
print(f"P = {P:,} parameters in {config.n_layer} blocks, the embeddings and the last LayerNorm")

# %% [markdown]
# ## a. Two layers, by hand
#
# Below are two linear layers with a tanh between them, on 4 ranks. Each rank keeps a quarter of the *rows* of each
# weight, and learns from a quarter of the examples:
#
# ```
#                   rank 0       rank 1       rank 2       rank 3
# between           [w . . .]    [. w . .]    [. . w .]    [. . . w]     a quarter of every weight
# forward           [w w w w]    [w w w w]    [w w w w]    [w w w w]     all-gather layer i, compute, free
# backward          [w w w w]    [w w w w]    [w w w w]    [w w w w]     all-gather layer i, compute
#                   [g . . .]    [. g . .]    [. . g .]    [. . . g]     reduce-scatter its gradient; free
# update            [w . . .]    [. w . .]    [. . w .]    [. . . w]     AdamW on the rows: nothing is sent
# ```
#
# Freeing is the point where it can go wrong. Autograd keeps what a layer's backward needs, and for y = xWᵀ that is x
# (the gradient of W is made of it) and W (the gradient of x is made of it). So a weight that was gathered in front of
# an ordinary layer would stay until the backward. Hence a Function of our own, which keeps its rows instead.
#
# **Predict first:** the weights are 12 × 8 and 4 × 12. What does rank 2 hold of each? How many all-gathers, and how
# many reduce-scatters, does a step make? Is the optimizer told that others exist? And how far are the weights from
# those of one process after 5 steps?

# %%
def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 4, bias=False))


def examples(step: int) -> tuple[Tensor, Tensor]:
    """16 inputs and answers, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)


def gathered(rows: Tensor) -> Tensor:
    """The whole weight, of every rank's rows."""
    whole = rows.new_empty(dist.get_world_size() * len(rows), rows.size(1))
    all_gather(whole, rows)
    return whole


class Sharded(torch.autograd.Function):
    """y = x Wᵀ, where a rank has some rows of W only."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(x, rows)  # not the whole weight
        return x @ gathered(rows).T  # which is freed here

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, rows = ctx.saved_tensors
        dx = dy @ gathered(rows)  # so it is gathered once more
        drows = torch.empty_like(rows)
        reduce_scatter(drows, dy.T @ x, dist.ReduceOp.AVG)  # the mean over the ranks, our rows of it
        return dx, drows


def five_steps(forward, parameters) -> list[dict]:
    """Train on this rank's share of the examples; what the last step sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = AdamW(parameters, lr=1e-2)
    for step in range(5):
        x, y = (tensor.chunk(ranks)[rank] for tensor in examples(step))
        with Traffic() as traffic:
            (forward(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(traffic.rows.values())


def alone() -> list[Tensor]:
    model = two_layers()
    five_steps(model, model.parameters())
    return [p.detach() for p in model.parameters()]


def by_hand() -> dict:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = [nn.Parameter(p.detach().chunk(ranks)[rank].clone()) for p in two_layers().parameters()]

    def forward(x: Tensor) -> Tensor:
        return Sharded.apply(Sharded.apply(x, rows[0]).tanh(), rows[1])

    traffic = five_steps(forward, rows)
    return {"kept": [tuple(p.shape) for p in rows], "weights": [gathered(p.detach()) for p in rows], "traffic": traffic}


def apart(weights: list[Tensor], others: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(weights, others))


[reference] = run_on_ranks(alone, 1)
mine = run_on_ranks(by_hand, 4)
print("kept by rank 2:", mine[2]["kept"])
for row in mine[2]["traffic"]:
    print(f"{row['kind']:15} {row['calls']} calls, {row['tensor_bytes'] // 4} elements in full tensors")
print(f"weights, off one process by {apart(mine[2]['weights'], reference):.1e}")

sizes = [12 * 8, 4 * 12]
calls = {row["kind"]: (row["calls"], row["tensor_bytes"] // 4) for row in mine[2]["traffic"]}
assert mine[2]["kept"] == [(3, 8), (1, 12)]
assert calls == {"all-gather": (4, 2 * sum(sizes)), "reduce-scatter": (2, sum(sizes))}
assert all(apart(rank["weights"], reference) < 1e-6 for rank in mine)

# %% [markdown]
# Each weight is gathered twice a step and its gradient reduced once. AdamW sees 3 × 8 and 1 × 12 numbers and treats
# every one by itself: it keeps moments for those, and needs nothing from anybody.
#
# This is all of FSDP. torch's `fully_shard` does it to a module from outside: hooks before and after its forward and
# its backward gather and free. What is gathered and freed as one is called a *unit*. Here each layer is one, and the
# model around them is told last, so that it knows its units.
#
# **Predict first:** of what type are the parameters afterwards? And the numbers?

# %%
def by_torch() -> dict:
    model = two_layers()
    for module in (model[0], model[2], model):
        fully_shard(module)
    traffic = five_steps(model, model.parameters())
    parameters = list(model.parameters())
    return {
        "kept": [tuple(p.to_local().shape) for p in parameters],
        "types": {f"{type(p).__name__} {p.placements}" for p in parameters},
        "weights": [p.full_tensor().detach() for p in parameters],
        "traffic": traffic,
    }


torchs = run_on_ranks(by_torch, 4)
print("the parameters are", *torchs[2]["types"])
print("kept by rank 2:", torchs[2]["kept"])
print("the same traffic as by hand:", torchs[2]["traffic"] == mine[2]["traffic"])
print("weights, off those by hand by", apart(torchs[2]["weights"], mine[2]["weights"]))
assert torchs[2]["kept"] == mine[2]["kept"] and torchs[2]["traffic"] == mine[2]["traffic"]
assert apart(torchs[2]["weights"], mine[2]["weights"]) < 1e-7

# %% [markdown]
# A `DTensor` is a tensor that knows how it is cut: `Shard(dim=0)`, by rows. The layers are ordinary ones again, and
# autograd does save their whole weights. But the hooks then set the size of those weights' *storage* to 0, and before
# the backward they refill it: autograd holds on to a tensor that is empty meanwhile.
#
# ## b. The GPT, and who holds what
#
# `shard_model` makes every block a unit. The rest is the root's: both embeddings and the last LayerNorm. (The output
# layer is the token embedding under another name. One parameter must be in one unit.)
#
# **Predict first:** `wte` has 75 rows, and 75/4 is no integer. How many rows does each of 4 ranks get? In
# [notebook 2](02_zero1.ipynb) a rank's slice could begin anywhere in a bucket, so that many parameters were whole on
# one rank. Which parameters are whole on one rank here?

# %%
def sharded(config: FsdpConfig) -> tuple[GPT, Runtime]:
    """This rank's share of the model, with its first weights, made as the trainer makes it."""
    run = create_runtime(config.device, config.dtype)
    with init_device(config, run):
        model = GPT(shape)
    model = shard_model(model, config, run)
    init_shards(model, config, run)
    return model, run


def holdings(config: FsdpConfig) -> dict:
    """On a rank: of each unit the parameters, as (name, rows, this rank's rows, elements of a row); and the words."""
    model, run = sharded(config)
    names = {p: name.removeprefix("transformer.").removesuffix(".weight") for name, p in model.named_parameters()}
    units = [
        [(names[p], len(p), len(p.to_local()), p.numel() // len(p)) for p in own_params(module)]
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    return {"units": units, "said": describe_sharding(model, config, run)}


layout = run_on_ranks(holdings, 4, config)  # layout[rank]
for rank, each in enumerate(layout):
    held = sum(mine * width for unit in each["units"] for _, _, mine, width in unit)
    wte = each["units"][0][0]
    print(f"rank {rank}: {held:,} of {P:,} parameters; {wte[2]} of {wte[1]} rows of {wte[0]}")
assert [each["units"][0][0][2] for each in layout] == [19, 19, 19, 18]
assert sum(mine * width for each in layout for unit in each["units"] for _, _, mine, width in unit) == P

# %%
COLORS = ("#8ecae6", "#ffd166", "#f4978e", "#a7c957")
figure, grid = plt.subplots(2, 1, figsize=(11, 3.6))
for axes, number, title in ((grid[0], 0, "root"), (grid[1], 1, "block 0")):
    begin = 0
    for index, (name, rows, _, width) in enumerate(layout[0]["units"][number]):
        axes.add_patch(Rectangle((begin, 1), rows * width, 0.8, facecolor="#eeeeee", edgecolor="black", lw=0.8))
        if rows * width > 1000:
            said = f"{name.removeprefix('h.0.')}\n{rows} × {width}"
            axes.text(begin + rows * width / 2, 1.38, said, ha="center", va="center", fontsize=7.5)
        for rank in range(4):
            elements = layout[rank]["units"][number][index][2] * width
            axes.add_patch(Rectangle((begin, 0), elements, 0.8, facecolor=COLORS[rank], edgecolor="black", lw=0.4))
            if rows * width > 1000:
                axes.text(begin + elements / 2, 0.4, rank, ha="center", va="center", fontsize=8)
            begin += elements
    axes.set(xlim=(0, begin), ylim=(-0.1, 1.9), yticks=[])
    axes.set_ylabel(title, rotation=0, ha="right", va="center")
    axes.set_xticks([0, begin], ["0", f"{begin:,}"])
    axes.spines[["top", "right", "left"]].set_visible(False)
figure.suptitle("Every parameter is cut in rows, and each of 4 ranks has a part of each")
figure.tight_layout()
plt.show()

# %% [markdown]
# None is whole anywhere: every rank has a part of every parameter, of the LayerNorms 16 numbers each, too thin to be
# seen here. All but the last rank get ⌈75/4⌉ = 19 rows of `wte`, and the last one what is left. When it is gathered, a
# row of padding travels along, since a collective wants equal parts.
#
# This is what a run says when it starts. **Predict first:** M = 2 micro-batches a rank, every block gathered in the
# forward and again in the backward, the root once, since its backward comes right after its forward; gradients reduced
# once a step. How many bytes of tensors are all-gathered in a step, and how many reduce-scattered? P is 204,032, of
# which 6,912 are the root's.

# %%
print(layout[0]["said"])

root = sum(rows * width for _, rows, _, width in layout[0]["units"][0])
M = config.gradient_accumulation_steps // 4
many = M * (2 * P - root)
print(f"\nM(2P - P_root) = {many:,} elements, {4 * many / 1e6:.1f} MB;  P is {4 * P / 1e6:.1f} MB")
assert f"units of 4 x {(P - root) // 4:,} parameters, the root's {root:,}" in layout[0]["said"]
assert f"all-gather {4 * many / 1e6:,.1f} MB" in layout[0]["said"]
assert f"reduce-scatter {4 * P / 1e6:,.1f} MB" in layout[0]["said"]

# %% [markdown]
# A rank sends three quarters of both, as rings do it.
#
# **Where the weights come from.** A model that fits on no rank cannot first be made and then be cut. So it is made on
# the *meta device*, where tensors have shapes and no memory; `shard_model` cuts it there; `init_shards` gives each rank
# memory for its rows and fills them. Rows of what? Each parameter is drawn whole, from a generator keyed by (seed, its
# name), and the rows are kept. The tempting way is shorter: `to_empty`, one seed for all ranks, `nn.init.normal_`.
#
# **Predict first:** how do the weights of the first way on 4 ranks differ from those of one process? And with the
# second way, what do rows 0, 19, 38 and 57 of `wte` have in common on 4 ranks?

# %%
def right_way(config: FsdpConfig) -> dict[str, Tensor]:
    model, _ = sharded(config)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def tempting_way(config: FsdpConfig) -> tuple[Tensor, list[str]]:
    """`wte` of all ranks, and what torch says meanwhile."""
    with torch.device("meta"):
        model = GPT(shape)
    model = shard_model(model, config, create_runtime(config.device, config.dtype))
    model.to_empty(device="cpu")
    torch.manual_seed(config.seed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        nn.init.normal_(model.transformer["wte"].weight, std=0.02)
    return model.transformer["wte"].weight.full_tensor().detach(), [str(each.message) for each in said]


whole = GPT(shape)
whole.init_weights(config.seed)
cut = {}
for number in (1, 2, 4):
    cut = run_on_ranks(right_way, number, config)[0]
    same = all(torch.equal(cut[name], p) for name, p in whole.named_parameters())
    print(f"{number} ranks, drawn whole and cut: the same as in one process, to the bit: {same}")
    assert same and len(cut) == len(list(whole.parameters()))

drawn = {number: run_on_ranks(tempting_way, number, config)[0] for number in (1, 2, 4)}
print("\neach rank its own rows; the first number of rows 0, 19, 38 and 57 of wte:")
for number, (wte, _) in drawn.items():
    print(f"{number} ranks: " + "".join(f"{wte[row, 0]:9.5f}" for row in (0, 19, 38, 57)))
print("torch says:", *drawn[4][1])
assert all(torch.equal(drawn[4][0][:18], drawn[4][0][19 * rank :][:18]) for rank in range(4))
assert not torch.equal(drawn[4][0], drawn[1][0]) and not torch.equal(drawn[2][0], drawn[1][0])

# %%
figure, grid = plt.subplots(1, 2, figsize=(8, 4))
pictures = {"each rank its own rows": drawn[4][0], "drawn whole and cut": cut["transformer.wte.weight"]}
for axes, (title, weight) in zip(grid, pictures.items()):
    rows = nn.functional.normalize(weight)
    axes.imshow((rows @ rows.T).abs(), cmap="Blues", vmin=0, vmax=1)
    axes.set(title=title, xticks=[0, 19, 38, 57], yticks=[0, 19, 38, 57])
figure.suptitle("Rows of wte on 4 ranks: which are alike (dark: |cosine| is 1)")
figure.tight_layout()
plt.show()

# %% [markdown]
# On the left most tokens have the embedding of three others. Nothing fails, and at every number of ranks it is another
# model. The check that finds it is the one above: compare with one process.
#
# ## c. Gathered and freed
#
# `nanoGPT.memory.tracker.Memory` sees every tensor that is born, resized or freed, and files its bytes under a category. Here
# are the *gathered* ones through one step of rank 0: whole parameters, and the flat buffers in which they come.
#
# A unit comes in two moves: the all-gather fills a flat buffer, then parameters are copied out of it, for the buffer
# has first all of rank 0, then all of rank 1, and a parameter wants its rows together. So for a while a unit is there
# twice.
#
# Two options. `fsdp_reshard_after_forward=False`: blocks stay gathered from their forward to their backward.
# `fsdp_prefetch=2`: while a block computes, the next two are already being gathered, so that with a network and a GPU
# nobody waits.
#
# **Predict first:** draw the curve of each of the four combinations, with 4 blocks, in units of one block's bytes. How
# high does each get?

# %%
def note_blocks(model: GPT, memory: Memory, marks: list) -> list:
    """Hooks that note when, in events of `memory`, a block's forward begins and ends, and its backward begins."""

    def noting(what: str, block: int):
        return lambda *_: marks.append((what, block, memory.timeline[-1][0]))

    def leave(block: int):
        def left(module: nn.Module, inputs: tuple, output: Tensor) -> None:
            noting("forward ends", block)()
            output.register_hook(noting("backward", block))

        return left

    handles = []
    for number, block in enumerate(model.blocks):
        handles += [block.register_forward_pre_hook(noting("forward", number))]
        handles += [block.register_forward_hook(leave(number), prepend=True)]  # before FSDP's, which frees
    return handles


def watched(config: FsdpConfig, micro_batches: int = 1, steps: int = 2) -> dict:
    """Train so many micro-batches a step on this rank; what each step held and sent, but for a first one.

    Returns:
        `bytes` by unit, the root first, padding included; what the formula says is sent; and for each step when blocks
        ran (`marks`), what was sent, and what was held when (`timeline`), at the `peak`, `after_forward`, and
        `before_update`.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = dataclasses.replace(config, gradient_accumulation_steps=ranks * micro_batches)
    model, run = sharded(config)
    replica = data_parallel(model, config, run)
    optimizer, data = configure_optimizer(model, config), text(config)
    seen = []
    for step in range(1 + steps):
        marks = []
        with Traffic() as traffic, Memory(model, optimizer) as memory:
            handles = note_blocks(model, memory, marks)
            for i in range(micro_batches):
                set_gradient_sync(replica, config, i == micro_batches - 1)
                logits, loss = replica(*data.batch("train", TRAIN, step, i * ranks + rank))
                (loss / micro_batches).backward()
                marks.append(("backward ends", None, memory.timeline[-1][0]))
                del logits, loss
            grad_norm(local_grads(replica), shard_group(replica))
            before_update = memory.snapshot()
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        sent = {key: row["tensor_bytes"] for key, row in traffic.rows.items()}
        held = {"peak": memory.peak, "after_forward": memory.after_forward, "before_update": before_update}
        seen.append({"marks": marks, "sent": sent, "timeline": memory.timeline, **held})
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return {
        "bytes": [4 * padded(unit, ranks) for unit in units],
        "expected": dict(expected_traffic(model, config, run)),
        "steps": seen[1:],
    }


def most_gathered(step: dict) -> int:
    return max(held["gathered"] for _, held in step["timeline"])


FOUR = {
    "default": {},
    "prefetch 2": {"fsdp_prefetch": 2},
    "not freed after forward": {"fsdp_reshard_after_forward": False},
    "not freed after forward, prefetch 2": {"fsdp_reshard_after_forward": False, "fsdp_prefetch": 2},
}


def four_ways(config: FsdpConfig) -> dict[str, dict]:
    return {name: watched(dataclasses.replace(config, **changes)) for name, changes in FOUR.items()}


four = run_on_ranks(four_ways, 4, config)
root_bytes, block_bytes = four[0]["default"]["bytes"][:2]
print(f"a block has {block_bytes:,} bytes, the root {root_bytes:,}, {root_bytes / block_bytes:.2f} of a block\n")
for name, blocks in zip(FOUR, (3, 4, 6, 6)):
    seen = [step for rank in four for step in rank[name]["steps"]]
    high = min(most_gathered(step) for step in seen)  # gloo may let go of a buffer late
    between = min(step["after_forward"]["gathered"] for step in seen)
    print(f"{name:36} at most {high / block_bytes:.2f} blocks, between the passes {between / block_bytes:.2f}")
    assert high == root_bytes + blocks * block_bytes
    assert between == root_bytes + (0 if "not" not in name else 4 * block_bytes)

# %%
SHADES = ("#dbeafe", "#fef3c7", "#fee2e2", "#ecfccb")


def spans(marks: list) -> list[tuple[str, int, int, int]]:
    """(pass, block, first event, last event) of a step's marks."""
    return [
        (what, block, begin, marks[number + 1][2])
        for number, (what, block, begin) in enumerate(marks)
        if what in ("forward", "backward")
    ]


figure, grid = plt.subplots(4, 1, figsize=(11, 10))
for axes, name in zip(grid, FOUR):
    step = min((step for rank in four for step in rank[name]["steps"]), key=lambda step: most_gathered(step))
    events = [event for event, _ in step["timeline"]]
    axes.step(events, [held["gathered"] / block_bytes for _, held in step["timeline"]], where="post", color="#00798c")
    for what, block, begin, end in spans(step["marks"]):
        axes.axvspan(begin, end, color=SHADES[block], lw=0)
        axes.text((begin + end) / 2, 6.45, f"{what}\nblock {block}", ha="center", va="center", fontsize=7)
    axes.axhline(root_bytes / block_bytes, color="black", linestyle=":", linewidth=0.8)
    axes.text(events[-1], root_bytes / block_bytes, " root", fontsize=8, va="center")
    axes.set(xlim=(0, events[-1]), ylim=(0, 7), yticks=range(7), ylabel="blocks", title=name)
    axes.spines[["top", "right"]].set_visible(False)
grid[-1].set_xlabel("operators run, one after another")
figure.suptitle("Gathered bytes on one of 4 ranks through a step, in units of one block")
figure.tight_layout()
plt.show()

# %% [markdown]
# Read the first curve from the left. The root comes and stays. While block 0 computes, it is there, and its buffer: 2.
# Then its parameters go (1), the buffer of block 1 comes (2), its parameters are copied out of it (3), and only now
# the buffer of block 0 goes: torch holds it so long that on a GPU its copying out can go on beside the next all-gather.
# In the backward a buffer goes at once, but that of the block before is gathered ahead: torch prefetches one unit there
# by itself. Block 3 is freed and gathered again at once, which is there to be saved.
#
# Nothing in the first curve depends on how many blocks there are: 3 of them are gathered at most, of 4 as of 100. Not
# freed after the forward, it climbs a step a block: when the backward begins the whole model is there, and needs no
# gathers any more. Prefetching adds the buffers that come ahead: one block more at the highest point, and none where
# everything is there anyway.
#
# ## d. What is left of the memory
#
# Now every category, on 1, 2 and 4 ranks, each with one micro-batch of the same size.
#
# **Predict first:** which categories shrink with the number of ranks, and which do not? What is the peak of a step made
# of, in the limit of very many ranks?

# %%
scaled = {number: run_on_ranks(watched, number, config) for number in (1, 2, 4)}
HEADS = ("parameters", "gradients", "moments", "in all", "16P/N", "gathered", "activations", "other")



def in_all(held: dict) -> int:
    return sum(held[name] for name in STATE)


print(f"{'bytes of state before the update':>58}{'at the peak of a step':>44}")
print("N  " + "".join(f"{head:>12}" for head in HEADS))
moments = {}
for number, ranks in scaled.items():
    steps = [step for rank in ranks for step in rank["steps"]]
    state = max((step["before_update"] for step in steps), key=in_all)  # of the rank that has most
    peak = min((step["peak"] for step in steps), key=lambda held: sum(held.values()))
    moments[number] = state, peak
    numbers = [state[name] for name in STATE] + [in_all(state), 16 * P // number]
    numbers += [peak[name] for name in ("gathered", "activations", "other")]
    print(f"{number}  " + "".join(f"{count:12,}" for count in numbers))
    counts = 4 * len(list(whole.parameters()))  # AdamW's, of steps
    assert 0 <= in_all(state) - counts - 16 * P / number < 16 * 64  # at most a row of wte more than an N-th
assert len({peak["activations"] for _, peak in moments.values()}) == 1
assert all(peak["gradients"] == 0 for _, peak in moments.values())

# %%
PAINT = dict(zip(CATEGORIES, ("#00798c", "#edae49", "#d1495b", "#8ecae6", "#a7c957", "#cccccc")))
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
for axes, index, title in ((left, 0, "state, before the update"), (right, 1, "everything, at the peak of a step")):
    for place, number in enumerate(moments):
        held, base = moments[number][index], 0.0
        for category in STATE if index == 0 else CATEGORIES:
            size = held[category] / 1e6
            axes.bar(place, size, bottom=base, color=PAINT[category], width=0.6)
            base += size
    axes.set_xticks(range(3), [f"{number} rank{'s' * (number > 1)}" for number in moments])
    axes.set(title=title, ylabel="MB per rank")
    axes.spines[["top", "right"]].set_visible(False)
for place, number in enumerate(moments):
    left.hlines(16 * P / number / 1e6, place - 0.4, place + 0.4, color="black", label="" if place else "16P/N")
left.legend(frameon=False)
figure.legend(
    [Rectangle((0, 0), 1, 1, facecolor=PAINT[name]) for name in CATEGORIES],
    [name.replace("_", " ") for name in CATEGORIES],
    loc="lower center", ncols=6, frameon=False, fontsize=8,
)
figure.tight_layout(rect=(0, 0.07, 1, 1))
plt.show()

# %% [markdown]
# The state is 16P/N, plus a count of steps for each parameter, plus a row of `wte` where it does not divide. (The peak
# is at the beginning of the backward, so there are no gradients in it yet.) What is gathered and the activations do not
# shrink: with one rank nothing needs a buffer, but from 2 ranks to 4 there is no difference at all, and so it stays.
# With very many ranks nothing else is left, and the next thing to work on is activations.
#
# ## e. Activations, computed again
#
# A backward needs what its forward computed. `activation_bytes.py` lists every tensor that a block keeps for it, and why:

# %%
B, T, C = 8, 64, 128  # larger than above, so that what is timed is more than Python
larger = GPTConfig(n_layer=4, n_head=2, n_embd=C, block_size=T, bias=False, vocab_size=shape.vocab_size)
unit = 4 * B * T * C
for row in saved_activations(larger, B, T):
    modes = ", ".join(mode for mode in ("selective", "full") if mode in row.modes)
    print(f"{row.bytes / unit:5.2f} BTC  {row.name:28} {row.why:58} {modes}")

# %% [markdown]
# 16 tensors of (B, T, C), and some small change. The last column says what is kept if the block is *checkpointed*:
#
# - `full`: its input only. The backward first runs the block's forward again;
# - `selective`: the results of matrix products. They are dear to compute; what lies between them is computed again;
# - `every_2`: `full` for every second block.
#
# **Predict first:** what is left of 16, for a block with `full` and with `selective`? (The products are `c_attn`,
# `c_fc` and the two `c_proj`. The results of the latter are not in the list above, since nobody needs them later; but
# what is run again does.) A forward costs half of a backward: how much longer does a step take with `full`, at most?

# %%
MODES = ("none", "every_2", "selective", "full")
models = {mode: GPT(larger) for mode in MODES}
for mode, model in models.items():
    model.init_weights(config.seed)
    checkpoint_activations(model, mode)
x = torch.randint(larger.vocab_size, (B, T))


def activations(model: GPT) -> int:
    """Bytes at the end of a forward, beside the tokens themselves."""
    with Memory(model) as memory:
        logits, loss = model(x, x)
        loss.backward()
    return memory.after_forward["activations"] - x.nbytes


def seconds(model: GPT) -> float:
    """Of this process's computing, forward and backward: what other programs do meanwhile does not count."""
    begin = time.process_time()
    model(x, x)[1].backward()
    return time.process_time() - begin


kept = {mode: activations(model) for mode, model in models.items()}
said = {mode: activation_bytes(larger, B, T, mode=mode) for mode in MODES}
rounds = [{mode: seconds(model) for mode, model in models.items()} for _ in range(8)]
slower = {mode: min(each[mode] for each in rounds) / min(each["none"] for each in rounds) for mode in MODES}

a_block = {
    mode: sum(row.bytes for row in saved_activations(larger, B, T, mode=mode)) / unit
    for mode in ("none", "selective", "full")
}
a_block["every_2"] = (a_block["none"] + a_block["full"]) / 2  # on average
print("            after the forward   by the arithmetic   a block keeps   a step's time (measured here)")
for mode in MODES:
    print(f"{mode:10} {kept[mode]:16,} B {said[mode]:17,} B {a_block[mode]:11.2f} BTC", end="")
    print(f"{slower[mode]:12.2f} times that of none")
    assert abs(kept[mode] / said[mode] - 1) < 0.01
assert kept["full"] < kept["selective"] < kept["none"] and kept["full"] < kept["every_2"] < kept["none"]

# %%
gradients = {mode: torch.cat([p.grad.flatten() for p in model.parameters()]) for mode, model in models.items()}
figure, axes = plt.subplots(figsize=(8, 2.4))
for place, mode in enumerate(MODES):
    axes.barh(place, kept[mode] / 1e6, color="#a7c957")
    axes.plot([said[mode] / 1e6] * 2, [place - 0.4, place + 0.4], color="black")
    axes.text(kept[mode] / 1e6, place, f"  time × {slower[mode]:.2f}", va="center", fontsize=8)
axes.set_yticks(range(len(MODES)), MODES)
axes.set(xlabel="MB of activations after the forward; black: by the arithmetic", xlim=(0, 1.15 * kept["none"] / 1e6))
axes.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
plt.show()
print("the same gradients, to the bit:", all(torch.equal(each, gradients["none"]) for each in gradients.values()))
assert all(torch.equal(each, gradients["none"]) for each in gradients.values())

# %% [markdown]
# By the count of operations, `full` runs every block's forward once more, so that a step takes 4/3 of its time at most,
# and `every_2` half of that more. `selective` computes no product again but those inside attention, and should be
# nearly free. But operations are not time: elementwise work and looking at every operator, to keep its result or not,
# take theirs as well, and how much depends on the machine. Measure it on yours.
#
# What remains with `full` is one tensor of (B, T, C) a block, and what the embeddings, the last LayerNorm and the head
# keep in every mode.
#
# ## f. "Marked as ready twice"
#
# torch has two forms of checkpointing. The older one is *reentrant*: it runs a second `backward` inside the
# backward. The other is built on the hooks of saved tensors, and is the one used above. With DDP the older one leads to
# an error that many have met. Below, a block that is used twice, each use checkpointed, as with shared layers.
#
# **Predict first:** DDP counts for each bucket how many of its gradients are ready, by a hook on each parameter. How
# often does the hook of the block's weight fire when a backward runs inside the backward?

# %%
class Twice(nn.Module):
    """A stem, then a block that is used twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.how == "around both":
            return checkpoint(lambda x: self.block(self.block(x)), x, use_reentrant=True)
        for _ in range(2):
            x = self.block(x) if self.how == "not" else checkpoint(self.block, x, use_reentrant=self.how == "reentrant")
        return x


INPUT = torch.linspace(-1, 1, 8).view(2, 4)  # the same on every rank, so that the mean is each one's gradient


def gradient_of(how: str, parallel: str, **options) -> tuple[str, list[Tensor]]:
    """What a backward says; the gradients of the block's weight and bias."""
    module = Twice(how)
    if parallel == "FSDP":
        fully_shard(module.block)
        fully_shard(module)
    replica = DDP(module, **options) if parallel == "DDP" else module
    try:
        replica(INPUT).sum().backward()
    except RuntimeError as error:
        return str(error), []
    grads = [p.grad for p in module.block.parameters()]
    return "", [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def on_two_ranks(how: str, parallel: str, **options) -> tuple[str, list[Tensor]]:
    return run_on_ranks(lambda: gradient_of(how, parallel, **options), 2)[0]


_, expected = gradient_of("not", "alone")
message, _ = on_two_ranks("reentrant", "DDP")
print(message.split(" This error")[0], "[...]")
print(message.splitlines()[-1])
assert "marked as ready twice" in message

# %% [markdown]
# Twice: each inner backward ends in the weight, with its part of the gradient. There are three ways out, and one that
# looks like a fourth.
#
# **Predict first:** FSDP counts no gradients. Does it fail? Is it right?

# %%
WAYS = {
    "the other form": ("non-reentrant", "DDP", {}),
    "static_graph=True": ("reentrant", "DDP", {"static_graph": True}),
    "one checkpoint around both uses": ("around both", "DDP", {}),
    "FSDP, the reentrant form": ("reentrant", "FSDP", {}),
    "FSDP, the other form": ("non-reentrant", "FSDP", {}),
}
print(f"{'in one process, nothing checkpointed':38} norm of the weight's gradient {expected[0].norm():.5f}")
for name, (how, parallel, options) in WAYS.items():
    error, found = on_two_ranks(how, parallel, **options)
    good = not error and all(torch.allclose(a, b) for a, b in zip(found, expected))
    verdict = "right" if good else "WRONG, and no error"
    print(f"{name:38} norm of the weight's gradient {found[0].norm():.5f}   {verdict}")
    if name != "FSDP, the reentrant form":
        assert good
    elif torch.__version__.startswith("2.13"):
        assert not good and not error
        lost = found[0]

# %% [markdown]
# With FSDP nothing fails, and the gradient is wrong. Which one is it? Give each use a block of its own, with the same
# weights:

# %%
module = Twice("not")
first, second = Twice("not").block, Twice("not").block  # the same weights, since the seed is
second(first(module.stem(INPUT))).sum().backward()
for name, block in (("first", first), ("second", second)):
    print(f"the {name} use's part of the gradient has norm {block[0].weight.grad.norm():.5f}")
if torch.__version__.startswith("2.13"):
    print("what FSDP gave is the first use's part alone:", torch.allclose(lost, first[0].weight.grad))
    assert torch.allclose(lost, first[0].weight.grad)

# %% [markdown]
# The second use's part, which the backward comes to first, is lost. Training would go on with it, and its curve would
# look like training. That is one more reason why `checkpoint_activations` takes the other form, and the first way out
# is the one to remember: `use_reentrant=False`. (`static_graph=True` promises DDP that each step is like the first; DDP
# then counts how often each hook fires. And `find_unused_parameters=True` makes the reentrant form fail even where a
# block is used once.)
#
# ## g. What is sent, and what it pays for
#
# Full tensors of one step on 4 ranks, M = 2 micro-batches each, counted and by the formula of `costs.py`. *Hybrid*:
# `fsdp_shard_size=2`, two copies of the model, each shared by two ranks. Ranks 0 and 1 gather from each other, and so
# do 2 and 3; gradients are reduce-scattered in each pair, then rank 0 all-reduces its slice with rank 2, which has the
# same one.
#
# **Predict first:** order DDP and the three by what a rank sends, and by what it holds. Now let each pair be a machine
# with fast links inside: order them by what goes *between* machines.

# %%
OPTIONS = {
    "DDP": {"use_fsdp": False},
    "default": {},
    "not freed": {"fsdp_reshard_after_forward": False},
    "hybrid 2 x 2": {"fsdp_shard_size": "2"},
}


def step_of_each(config: FsdpConfig) -> dict[str, dict]:
    return {name: watched(dataclasses.replace(config, **changes), micro_batches=2) for name, changes in OPTIONS.items()}


costs = run_on_ranks(step_of_each, 4, config)[0]
print("full tensors, in P:")
print(" " * 14 + "all-gather  reduce-scatter  all-reduce    a rank sends  a pair sends out    bytes kept  gathered")
for name, each in costs.items():
    step = each["steps"][-1]
    assert step["sent"] == each["expected"], name  # to the byte
    full = {kind: sum(size for key, size in step["sent"].items() if key[0] == kind) / 4 / P for kind, _ in step["sent"]}
    sent = sum(ring_bytes(kind, size, ranks) for (kind, ranks), size in step["sent"].items()) / 4 / P
    # In a ring of four, one of a pair sends to the other, who sends on to the next pair. Replicas are in other pairs.
    pairs = name == "hybrid 2 x 2"
    out = 2 * ring_bytes("all-reduce", step["sent"]["all-reduce", 2], 2) / 4 / P if pairs else sent
    gather, scatter, reduce = (full.get(kind, 0.0) for kind in ("all-gather", "reduce-scatter", "all-reduce"))
    kept_bytes = (in_all(step["before_update"]) / P, most_gathered(step) / P)
    print(f"{name:14}{gather:10.3f}{scatter:16.3f}{reduce:12.3f}{sent:16.3f}{out:18.3f}", end="")
    print("".join(f"{count:12.2f}" for count in kept_bytes))
    shares = {"DDP": 1, "hybrid 2 x 2": 2}.get(name, 4)
    assert abs(kept_bytes[0] - 16 / shares) < 0.01
once = scaled[4][0]["steps"][-1]["sent"]
sent = sum(ring_bytes(kind, size, ranks) for (kind, ranks), size in once.items()) / 4 / P
print(f"with M = 1, as in (d), a rank sends {sent:.3f} by default")
assert abs(sent / 1.5 - 3 / 2) < 0.02

# %% [markdown]
# DDP sends least and keeps most, and what it sends does not depend on M: it all-reduces once a step. FSDP gathers for
# every micro-batch, so the same step is cheaper in few large micro-batches than in many small ones. With M = 1 it sends
# half as much again as DDP.
#
# - The default sends most and holds least.
# - Not freed after the forward: two fifths less is sent, for all blocks being there at once.
# - Hybrid: a rank keeps twice as much, 16P/2 instead of 16P/4. Its all-gathers stay within a machine, and what leaves
#   it is one all-reduce of a slice: about a quarter of what the default sends out. Where links between machines are
#   slow, that is worth it.
#
# As in notebook 2, what is counted are calls and tensor sizes, times the cost of a ring; gloo sends more.
#
# ## h. One curve
#
# Now the trainer, `phase3_fsdp/train.py`, with dropout: alone and not sharded, which is the baseline; on 1, 2 and 4
# ranks; and on 4 ranks with many options at once.
#
# **Predict first:** how far are the losses from each other, and from which step on?

# %%
ALL_AT_ONCE = {
    "fsdp_shard_size": "2",
    "fsdp_reshard_after_forward": False,
    "fsdp_prefetch": 1,
    "fsdp_activation_checkpointing": "selective",
    "fsdp_sync_every_micro_batch": True,
}


def train_on(ranks: int, **changes) -> dict[int, float]:
    """Train on so many ranks, in a new directory; the losses by step."""
    out_dir = tempfile.mkdtemp(dir=folder.name)
    run_on_ranks(train, ranks, dataclasses.replace(config, dropout=0.2, out_dir=out_dir, **changes), show=False)
    return losses(out_dir)


curves = {
    "one process, not sharded": train_on(1, use_fsdp=False),
    **{f"FSDP, {number} rank{'s' * (number > 1)}": train_on(number) for number in (1, 2, 4)},
    "FSDP, 4 ranks, many options": train_on(4, **ALL_AT_ONCE),
}
baseline = curves["one process, not sharded"]
for name, curve in curves.items():
    gap = max(abs(curve[step] - baseline[step]) for step in baseline)
    print(f"{name:28}" + "".join(f"{curve[step]:11.7f}" for step in (0, 1, 3, 5)) + f"   off by at most {gap:.1e}")
    assert curve.keys() == baseline.keys() and gap < (1e-6 if name != "FSDP, 1 rank" else 1e-12)

figure, axes = plt.subplots(figsize=(6, 3.2))
for number, (name, curve) in enumerate(curves.items()):
    axes.plot(curve.keys(), curve.values(), marker="osD^v"[number], markersize=11 - 2 * number, alpha=0.7, label=name)
axes.set(xlabel="step", ylabel="loss", title="Five curves")
axes.legend(fontsize=8)
figure.tight_layout()
plt.show()

# %% [markdown]
# At most in the last digits that a float32 has: one rank gives the very numbers of the baseline, several add up in
# another order. What FSDP changes is where things lie, and when.
#
# What a run saves is sharded as well, by the protocol of notebooks 1 and 2: `sharded_checkpoint.py`.
#
# ## Exercises
#
# **1. Not freed, by hand.** Change `Sharded` of (a) so that the weight stays gathered from the forward to the backward.
# Predict first: how many all-gathers are left of 4, and are the weights still the same? Then go back to the first
# version, and look for a gather whose result nobody needs.
#
# <details><summary>Hint</summary>
#
# What is saved for the backward is the whole weight:
#
# ```python
# class Kept(torch.autograd.Function):
#     @staticmethod
#     def forward(ctx, x, rows):
#         whole = gathered(rows)
#         ctx.save_for_backward(x, whole)
#         return x @ whole.T
#
#     @staticmethod
#     def backward(ctx, dy):
#         x, whole = ctx.saved_tensors
#         dw = dy.T @ x
#         drows = dw.new_empty(len(dw) // dist.get_world_size(), dw.size(1))
#         reduce_scatter(drows, dw, dist.ReduceOp.AVG)
#         return dy @ whole, drows
#
#
# Sharded = Kept
# mine = run_on_ranks(by_hand, 4)
# print(mine[0]["traffic"], apart(mine[0]["weights"], reference))
# ```
#
# 2 all-gathers, and the same weights. As for the other question, the first layer's backward makes the gradient of the
# examples, which nobody asked for: `dx = dy @ gathered(rows) if ctx.needs_input_grad[0] else None` leaves 3 of 4. It is
# safe, since all ranks decide alike. `fully_shard` gathers a unit before it knows what its backward will need.
#
# </details>
#
# **2. One unit.** With `fsdp_wrap="size"` and `fsdp_min_num_params=10**9` no module is large enough, and the root is
# the only unit. Predict first, for 4 ranks and M = 2: how many bytes are gathered at most, in P? How many elements
# do the all-gathers have? Which option does that remind you of, and what is lost?
#
# <details><summary>Hint</summary>
#
# ```python
# one = dataclasses.replace(config, fsdp_wrap="size", fsdp_min_num_params=10**9)
# step = run_on_ranks(watched, 4, one, 2)[0]["steps"][-1]
# print(most_gathered(step) / P, step["sent"]["all-gather", 4] / 4 / P)
# ```
#
# 8 bytes a parameter: the whole model, and a buffer as large. The all-gathers have MP elements, for the root is not
# freed after its forward: `fsdp_reshard_after_forward=False` sends as much. But there each block's gather can run while
# the block before computes, and only one buffer of a block is needed; with one unit everybody waits until all is there.
#
# </details>
#
# **3. Between micro-batches.** Gradients are reduced once a step, after the last micro-batch. Predict first: what is
# `.grad` until then, and how many bytes is it on each of 4 ranks with M = 2? What does
# `fsdp_sync_every_micro_batch=True` change, and what does it cost?
#
# <details><summary>Hint</summary>
#
# ```python
# for every in (False, True):
#     changed = dataclasses.replace(config, fsdp_sync_every_micro_batch=every)
#     step = run_on_ranks(watched, 4, changed, 2)[0]["steps"][-1]
#     gradients = max(held["gradients"] for _, held in step["timeline"])
#     print(every, gradients / P, step["sent"]["reduce-scatter", 4] / 4 / P)
# ```
#
# Until the last micro-batch each rank adds up whole gradients, 4P bytes, as many as DDP has: with accumulation the
# peak is not 16P/N and a little. With the option a rank adds up its rows only, 4P/N, and each micro-batch is
# reduce-scattered: MP elements instead of P. (It is exercise 1 of notebook 2 again.)
#
# </details>
