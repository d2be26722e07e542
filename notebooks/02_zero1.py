# %% [markdown]
# # 2. ZeRO-1: shard the optimizer's state
#
# With data parallelism every rank keeps the same moments to compute the same update. ZeRO-1 lets each rank update one
# slice of the parameters, so that it needs the moments of that slice only. The claims to test: **a rank holds
# 8P + 8P/N bytes instead of 16P, no more is sent than before, and the losses stay what they were.** P is the number of
# parameters, N that of ranks.
#
# First come bytes, then a picture of who holds what, then the optimizer twice: as one would write it first
# (`phase1_zero1/naive.py`), and as the trainer has it (`phase1_zero1/zero1.py`, `phase1_zero1/buckets.py`). At last it
# is broken on purpose, and saved. Have the three files open beside this page. No GPU is needed.

# %%
import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.patches import Rectangle
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.metrics.ledger import Traffic
from nanoGPT.memory.costs import storage_bytes
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import clip_grads, grad_norm, param_groups
from nanoGPT.checkpoint.shards import SafeReader
from phase1_zero1.parallelize import Zero1Config
from phase1_zero1.naive import NaiveZero1Optimizer
from phase1_zero1.train import train
from phase1_zero1.zero1 import Zero1Optimizer
from workshop.ranks import losses, run_on_ranks

folder = tempfile.TemporaryDirectory()  # every run of this notebook writes here; it goes when the kernel ends

config = Zero1Config(
    device="cpu",
    block_size=32,  # T, tokens per sequence
    batch_size=4,  # B, sequences per micro-batch
    gradient_accumulation_steps=4,  # micro-batches per step, of all ranks together
    n_layer=2,
    n_head=2,
    n_embd=64,
    max_iters=12,
    warmup_iters=2,
    eval_interval=12,
    eval_iters=4,
    log_interval=1,
)


def start(config: Zero1Config) -> tuple[GPT, TokenData]:
    """The model with its first weights, which are keyed and so the same on every rank; and the data."""
    data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    model = GPT(GPTConfig.of({**dataclasses.asdict(config), "vocab_size": data.tokenizer["vocab_size"]}))
    model.init_weights(config.seed)
    return model, data


# Three ways to make the optimizer of a model.


def whole(model: GPT) -> torch.optim.Optimizer:
    return AdamW(param_groups(model, weight_decay=0.1), lr=2e-3)


def naive(model: GPT) -> torch.optim.Optimizer:
    return NaiveZero1Optimizer(param_groups(model, weight_decay=0.1), AdamW, lr=2e-3)


def flat(model: GPT, bucket_mb: float = 25.0) -> torch.optim.Optimizer:
    return Zero1Optimizer(param_groups(model, weight_decay=0.1), AdamW, lr=2e-3, bucket_mb=bucket_mb)


model, _ = start(config)
P = sum(p.numel() for p in model.parameters())
print(f"P = {P:,} parameters in {len(list(model.parameters()))} tensors")

# %% [markdown]
# ## a. What a rank holds
#
# Everything is in float32 here, 4 bytes a number, and the optimizer is AdamW, which keeps two moments of each
# parameter.
#
# **Predict first:** how many bytes does each of 4 ranks hold with DDP, in units of P: parameters, gradients, moments?
# Activations do not count.

# %%
def held(config: Zero1Config, sharded: bool) -> dict[str, int]:
    """The bytes that this rank holds after one step."""
    model, data = start(config)
    optimizer = flat(model) if sharded else whole(model)
    replica = model if sharded else DDP(model, gradient_as_bucket_view=True)
    _, loss = replica(*data.batch("train", TRAIN, 0, dist.get_rank()))
    loss.backward()
    gradients = storage_bytes(p.grad for p in model.parameters())
    optimizer.step()
    state = [t for items in optimizer.state.values() for t in items.values()]
    return {"parameters": storage_bytes(model.parameters()), "gradients": gradients, "optimizer": storage_bytes(state)}


for rank, each in enumerate(run_on_ranks(held, 4, config, False)):
    said = "  ".join(f"{name} {count:,} ({count / P:.4f} P)" for name, count in each.items())
    print(f"rank {rank}: {said}  in all {sum(each.values()) / P:.4f} P")

# %% [markdown]
# 4P, 4P and 8P: 16P on every rank. What the optimizer has beyond 8P is its count of steps, 4 bytes for each of the 15
# tensors. `gradient_as_bucket_view=True` lets `.grad` lie in the buckets that DDP sends; without it the gradients are
# held twice.
#
# Half of the 16P are moments, and all ranks keep the same ones. If each of N ranks keeps one N-th of them, a rank holds
# 4P + 4P + 8P/N.
#
# **Predict first:** what is that for N = 4? And what does it tend to when there are very many ranks?

# %%
print("  N   8P + 8P/N   held, largest rank")
for ranks in (1, 2, 4):
    most = max(sum(each.values()) for each in run_on_ranks(held, ranks, config, True))
    print(f"{ranks:3}  {8 + 8 / ranks:8.4f} P  {most / P:18.4f} P")
for ranks in (8, 64, 1024):
    print(f"{ranks:3}  {8 + 8 / ranks:8.4f} P")

# %% [markdown]
# At most half of the bytes can be saved, for parameters and gradients stay whole on every rank. What is measured above
# the formula are again counts of steps, and padding, which we come to.
#
# In a large model the same share is worth more. GPT-2's second largest has 36 blocks of 1,280 channels.

# %%
with torch.device("meta"):  # shapes without memory
    large = GPT(GPTConfig(n_layer=36, n_head=20, n_embd=1280, bias=False))
L = sum(p.numel() for p in large.parameters())
print(f"{L / 1e6:.0f} million parameters; GB per rank:  DDP {16 * L / 1e9:.1f}", end="")
print("".join(f",  ZeRO-1 on {ranks} ranks {(8 + 8 / ranks) * L / 1e9:.1f}" for ranks in (2, 4, 8)))

# %% [markdown]
# ## b. Who holds what
#
# Which N-th does a rank get? One could share out whole parameters, and the naive version does. But a reduce-scatter
# wants N equal slices, and parameters come in all sizes. So the parameters lie end to end in flat *buckets*, and each
# bucket is cut into N equal slices, wherever the cuts fall. What a rank has of one parameter is a *shard*.
#
# With `bucket_mb=0.2` each block of our model fills a bucket. The first one holds the last block, whose gradients
# are ready first: `mlp.c_proj` with 16,384 elements, `mlp.c_fc` with 16,384, `attn.c_proj` with 4,096 and
# `attn.c_attn` with 12,288.
#
# **Predict first:** where do 4 ranks cut this bucket? Which ranks have a shard of `mlp.c_fc`? Which parameter is whole
# on one rank?

# %%
def layout(config: Zero1Config, bucket_mb: float) -> list[dict]:
    """Where things lie on the rank that calls this: of each bucket its parameters, its slice, its shards."""
    model, _ = start(config)
    names = {p: name.removeprefix("transformer.").removesuffix(".weight") for name, p in model.named_parameters()}
    return [
        {
            "length": bucket.flat_params.numel(),
            "params": [(names[p], p.numel()) for p in bucket.params],
            "mine": (bucket.mine.start, bucket.mine.stop),
            "shards": [(names[s.param], s.offset, s.place.start, s.place.stop) for s in bucket.shards],
        }
        for bucket in flat(model, bucket_mb).buckets
    ]


layouts = run_on_ranks(layout, 4, config, 0.2)  # layouts[rank][bucket]

for rank, buckets in enumerate(layouts):
    begin, end = buckets[0]["mine"]
    print(f"rank {rank} has elements {begin:,} to {end:,} of bucket 0:")
    for name, offset, left, right in buckets[0]["shards"]:
        print(f"    {name:16} {right - left:6,} elements, from element {offset:,} of it on")

# %% [markdown]
# Now all four buckets, each on its own scale. The upper strip shows the parameters end to end, the lower one the
# slices: the color is the rank, a box is a shard, hatched is padding. Dotted lines are the cuts.
#
# **Predict first:** `wte` has 4,800 elements, and slices begin at multiples of 32. How long is a slice of its bucket,
# and how much padding is there? Which rank holds less than the others?

# %%
COLORS = ("#8ecae6", "#ffd166", "#f4978e", "#a7c957")


def strip(axes: plt.Axes, y: float, begin: float, end: float, color: str, text: str = "", hatch: str = "") -> None:
    """One box of a strip, and its text above the lines that cross it."""
    axes.add_patch(Rectangle((begin, y), end - begin, 0.8, facecolor=color, edgecolor="black", hatch=hatch, lw=0.8))
    where, behind = ((begin + end) / 2, y + 0.38), {"facecolor": color, "edgecolor": "none", "pad": 0.8}
    axes.text(*where, text, ha="center", va="center", fontsize=7.5, bbox=behind if text else None)


figure, grid = plt.subplots(4, 1, figsize=(11, 6))
for number, axes in enumerate(grid):
    bucket = layouts[0][number]
    length, begin = bucket["length"], 0
    for name, numel in bucket["params"]:
        strip(axes, 1, begin, begin + numel, "#eeeeee", name)
        begin += numel
    for y in (0, 1):
        if begin < length:
            strip(axes, y, begin, length, "white", hatch="//////")
    for rank in range(4):
        for name, offset, left, right in layouts[rank][number]["shards"]:
            strip(axes, 0, left, right, COLORS[rank], f"rank {rank}" if right - left > 0.03 * length else "")
        axes.axvline(layouts[rank][number]["mine"][1], color="black", linestyle=":", linewidth=1.2)
    axes.set(xlim=(0, length), ylim=(-0.1, 1.9), yticks=[])
    axes.set_ylabel(f"bucket {number}", rotation=0, ha="right", va="center")
    axes.set_xticks([layouts[rank][number]["mine"][0] for rank in range(4)] + [length])
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right", "left"]].set_visible(False)
figure.suptitle("Parameters in buckets, buckets in slices, slices in shards (4 ranks)")
figure.tight_layout()
plt.show()

for rank, buckets in enumerate(layouts):
    shards = [shard for bucket in buckets for shard in bucket["shards"]]
    elements = sum(right - left for _, _, left, right in shards)
    slices = sum(bucket["mine"][1] - bucket["mine"][0] for bucket in buckets)
    print(f"rank {rank}: {len(shards):2} shards, {elements:6,} elements, {slices - elements:3} of padding")

# %% [markdown]
# A slice of `wte`'s bucket is 1,216 long, the next multiple of 32 above 1,200. Padding lies at the end, so the last
# rank has it, and it is in no shard: neither AdamW nor the gradient's norm ever sees it.
#
# Bucket 3 holds what has no weight decay, the gains of the LayerNorms: a bucket belongs to one parameter group. And
# AdamW sees the shards, never the bucket: were the bucket its parameter, one without a gradient would be moved all the
# same, by weight decay and by old moments.
#
# ## c. As one would write it first
#
# Read `phase1_zero1/naive.py`, a page. Each parameter has an *owner*. A step all-reduces every gradient, lets AdamW
# update the parameters that this rank owns, and broadcasts each from its owner to the others.
#
# Is it still AdamW? Here both train on the same 4 ranks: `NaiveZero1Optimizer`, and a plain AdamW over all parameters
# whose gradients were all-reduced before.
#
# **Predict first:** how far are their parameters from each other after 8 steps? How far is either from one process
# that runs all four micro-batches itself?

# %%
def by_hand(config: Zero1Config, make, before_step=None, steps: int = 8) -> dict:
    """Train on the ranks that call this; what it gave, and what the last step sent.

    Args:
        make: makes the optimizer of a model.
        before_step: called with model and optimizer when the gradients are there; what it returns is kept.
    """
    model, data = start(config)
    optimizer = make(model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = range(rank, config.gradient_accumulation_steps, world_size)
    curve, kept = [], []
    for step in range(steps):
        loss_sum = torch.zeros((), dtype=torch.float64)
        with Traffic() as traffic:
            for micro_batch in mine:
                optimizer.require_backward_grad_sync = micro_batch == mine[-1]  # for `flat`: now it may send
                _, loss = model(*data.batch("train", TRAIN, step, micro_batch))
                (loss / len(mine)).backward()
                loss_sum += loss.detach()
            if before_step:
                kept.append(before_step(model, optimizer))
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        curve.append(loss_sum.item() / config.gradient_accumulation_steps)
    params = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"curve": curve, "params": params, "kept": kept, "traffic": list(traffic.rows.values())}


def average(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """The mean gradient, on every rank."""
    for p in model.parameters():
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)


def apart(a: dict, b: dict) -> float:
    return (a["params"] - b["params"]).abs().max().item()


[alone] = run_on_ranks(by_hand, 1, config, whole)
reference = run_on_ranks(by_hand, 4, config, whole, average)
first_draft = run_on_ranks(by_hand, 4, config, naive)

gaps = [abs(a - b) for a, b in zip(first_draft[0]["curve"], alone["curve"])]
print("parameters, naive against AdamW on the same 4 ranks:", max(apart(a, b) for a, b in zip(first_draft, reference)))
print(f"parameters, naive against one process:               {apart(first_draft[0], alone):.1e}")
print(f"losses, naive against one process:                   {max(gaps):.1e}")
assert apart(first_draft[0], reference[0]) == 0

# %% [markdown]
# Not at all: AdamW treats every element by itself, so it does not matter who computes it. From one process both differ
# as the baseline's DDP did in notebook 1, by rounding.
#
# Now what it sends. A ring sends 2n(N-1)/N bytes a rank for an all-reduce of n bytes, and n(N-1)/N for a broadcast.
# `nanoGPT.metrics.ledger.Traffic`, which was on in every step above, sees each collective that is called, with its tensors,
# and multiplies their sizes by these.
#
# **Predict first:** how many calls does a step make? How many elements does a rank send, in units of P(N-1)/N? And with
# 4 owners of whole parameters, how even are the shares?

# %%
def show_traffic(rows: list[dict]) -> None:
    for row in rows:
        print(f"{row['kind']:15} {row['calls']:3} calls  {row['ring_bytes'] / 4:9,.0f} elements sent per rank")


def shares(config: Zero1Config) -> int:
    """The elements that this rank owns."""
    optimizer, rank = naive(start(config)[0]), dist.get_rank()
    return sum(p.numel() for p, owner in optimizer.owner.items() if owner == rank)


unit = P * 3 / 4
show_traffic(first_draft[0]["traffic"])
sent = sum(row["ring_bytes"] / 4 for row in first_draft[0]["traffic"])
print(f"in all {sent:,.0f} elements = {sent / unit:.4f} times P(N-1)/N; the formula: 3")
print("elements owned, by rank:", run_on_ranks(shares, 4, config), f"of {P / 4:,.0f} if even")

# %% [markdown]
# The memory is sharded. But there are 30 calls, each waited for; half as much again is sent as DDP's 2; and the largest
# parameters decide who holds how much.
#
# ## d. Flat buckets
#
# An all-reduce *is* two things: a reduce-scatter, after which each rank has one slice of the sum, and an all-gather,
# which brings the slices to everybody. ZeRO-1 needs the first for gradients and the second for parameters. The update
# goes in between:
#
# ```
#                   rank 0       rank 1       rank 2       rank 3
# backward          [g g g g]    [g g g g]    [g g g g]    [g g g g]     each of its own micro-batches
# reduce-scatter    [G . . .]    [. G . .]    [. . G .]    [. . . G]     the mean over the ranks, one slice each
# update            [p . . .]    [. p . .]    [. . p .]    [. . . p]     AdamW, with moments of this slice
# all-gather        [p p p p]    [p p p p]    [p p p p]    [p p p p]     the whole model again
# ```
#
# Each of the two costs n(N-1)/N. That is what `Zero1Optimizer` does.
#
# **Predict first:** fill in this table for N = 4 before you run the trainer with each of its four backends (dropout and
# clipping on, as in notebook 1). `torch` is PyTorch's own `ZeroRedundancyOptimizer` on DDP.
#
# | | bytes per rank, in P | elements sent, in P(N-1)/N | calls per step |
# |---|---|---|---|
# | DDP | ? | ? | ? |
# | torch | ? | ? | ? |
# | naive | ? | ? | 30 |
# | flat | ? | ? | ? |

# %%
BACKENDS = {
    "DDP": {"use_zero1": False},
    "torch": {"zero1_backend": "torch"},
    "naive": {"zero1_backend": "naive"},
    "flat": {"zero1_backend": "flat"},
}


def train_on(ranks: int, **changes) -> Path:
    """Train on so many ranks, in a new directory unless one is given; where the run wrote."""
    out_dir = changes.pop("out_dir", None) or tempfile.mkdtemp(dir=folder.name)
    run_on_ranks(train, ranks, dataclasses.replace(config, dropout=0.2, out_dir=str(out_dir), **changes), show=False)
    return Path(out_dir)


def off(curve: dict[int, float], other: dict[int, float]) -> float:
    return max(abs(curve[step] - other[step]) for step in other)


baseline = losses(train_on(1, use_zero1=False))
runs = {name: train_on(4, ledger=True, **changes) for name, changes in BACKENDS.items()}
ledgers = {name: json.loads((run / "ledger.json").read_text()) for name, run in runs.items()}

FORMULA = {"DDP": (16, 2), "torch": (8 + 8 / 4, 3), "naive": (8 + 8 / 4, 3), "flat": (8 + 8 / 4, 2)}
print("        bytes per rank, in P             elements sent, in P(N-1)/N            losses off")
print("        least    most     formula        measured   formula   calls    one process by")
for name, ledger in ledgers.items():
    rows = ledger["ranks"][0]["collectives"]
    state = [sum(rank["state_bytes"].values()) / P for rank in ledger["ranks"]]
    sent, calls = sum(row["ring_bytes"] / 4 for row in rows) / unit, sum(row["calls"] for row in rows)
    print(
        f"{name:6} {min(state):7.3f} {max(state):7.3f} {FORMULA[name][0]:9.3f}     "
        f"{sent:11.4f} {FORMULA[name][1]:9} {calls:7} {off(losses(runs[name]), baseline):17.1e}"
    )
    assert off(losses(runs[name]), baseline) < 1e-5

# %% [markdown]
# One curve, four ways to it. `flat` sends what DDP sends and holds what ZeRO-1 promises, evenly. Its calls, one by one:

# %%
rows = ledgers["flat"]["ranks"][0]["collectives"]
show_traffic(rows)
padded = max(row["tensor_bytes"] for row in rows) // 4
print(f"{padded:,} elements in the buckets, {padded - P} of them padding")

# %% [markdown]
# There are two buckets now, since one of 25 MB (the default) takes all matrices. The two small all-reduces are one
# byte a tensor, "does any rank have a gradient of it", and the gradient's norm, 8 bytes.
#
# What is counted here, to be plain, are calls and tensor sizes, times the cost of a ring. NCCL's rings send that. gloo,
# on which these ranks run, does not: it carries out a reduce-scatter as a whole all-reduce, so here `flat` puts more on
# the wire than DDP. On CPUs you learn the algorithm; its traffic you get on GPUs.
#
# ## e. When things are sent
#
# A reduce-scatter need not wait for the end of the backward pass: the last block's gradients are there while the first
# block's are still to be computed. So buckets are filled from the last parameter to the first, a hook on each
# parameter tells its bucket that the gradient has come, and a full bucket is sent at once, without waiting for the
# answer.
#
# All ranks must send in the same order, or bucket 1 of one would be added to bucket 2 of another. In the first step
# that order is the buckets' own; then rank 0 tells all ranks in which order its buckets filled.
#
# Below, smaller buckets, each method of each bucket wrapped so that it notes the time, and how many of the 15
# gradients had come by then.
#
# **Predict first:** the LayerNorms are in the last bucket. After which gradient is it sent in step 0, and after which
# in step 1? How many of the 8 buckets are sent before `backward()` returns?

# %%
def timeline(config: Zero1Config, bucket_mb: float, steps: int) -> dict:
    """Steps of this rank; of each what happened when: (what, bucket or None, begin, end, gradients by then)."""
    model, data = start(config)
    names = {p: name.removeprefix("transformer.").removesuffix(".weight") for name, p in model.named_parameters()}
    events, arrived = [], []
    for p in model.parameters():  # before the optimizer's own hooks, so that these are told first
        p.register_post_accumulate_grad_hook(lambda p: arrived.append(time.perf_counter()))
    optimizer = flat(model, bucket_mb)

    def noted(what, number, method):
        def wrapped(*args):
            begin, result = time.perf_counter(), method(*args)
            events.append((what, number, begin, time.perf_counter(), len(arrived)))
            return result

        return wrapped

    for number, bucket in enumerate(optimizer.buckets):
        for what in ("start_reduce", "finish_reduce", "update_shards", "start_gather"):
            setattr(bucket, what, noted(what, number, getattr(bucket, what)))
    seen = []
    for step in range(steps):
        x, y = data.batch("train", TRAIN, step, dist.get_rank())
        events.clear(), arrived.clear()
        dist.barrier()
        _, loss = noted("forward", None, model)(x, y)
        noted("backward", None, loss.backward)()
        noted("step", None, optimizer.step)()
        seen.append({"events": list(events), "arrived": list(arrived)})
    return {"buckets": [[names[p] for p in bucket.params] for bucket in optimizer.buckets], "steps": seen}


def sent_after(step: dict) -> dict[int, int]:
    """For each bucket the number of gradients that had come when it was sent; in the order of sending."""
    return {number: count for what, number, _, _, count in step["events"] if what == "start_reduce"}


watched = run_on_ranks(timeline, 2, dataclasses.replace(config, batch_size=32), 0.07, 6)[0]
first, second = sent_after(watched["steps"][0]), sent_after(watched["steps"][1])
print("bucket                             sent after gradient   in step 0   in step 1")
for number, names in enumerate(watched["buckets"]):
    several = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
    print(f"{number}  {several:53} {first[number]:8} {second[number]:11}")
print("order in step 0:", list(first), " in step 1:", list(second))
for step in watched["steps"]:
    done = next(end for what, _, _, end, _ in step["events"] if what == "backward")
    assert all(begin < done for what, _, begin, _, _ in step["events"] if what == "start_reduce")

# %% [markdown]
# All eight are sent from within the backward pass, and from step 1 on all but one before the last gradient is there.
# Bucket 6 has to be the last, for the token embedding is also the output layer, and its gradient is whole only when the
# backward pass has come to the very first layer. In step 0 the LayerNorms wait behind it, in step 1 they do not.
#
# Below is the quickest of the later steps as rank 0 saw it, in real times of this run. Micro-batches are larger here
# than before, so that there is something to see.
#
# **Predict first:** in which order are parameters updated and gathered, and why in that one?

# %%
def draw_timeline(buckets: list[list[str]], step: dict) -> None:
    """One lane a bucket, one for the passes; times in milliseconds from the beginning of the forward pass."""
    spans = {(what, number): (begin, end) for what, number, begin, end, _ in step["events"]}
    zero = spans["forward", None][0]
    figure, axes = plt.subplots(figsize=(9, 4))

    def bar(lane: int, begin: float, end: float, color: str, height: float = 0.6, **look) -> None:
        width = 1e3 * (end - begin)
        axes.barh(lane, width, left=1e3 * (begin - zero), height=height, color=color, **look)

    for what, color in (("forward", "#cccccc"), ("backward", "#888888"), ("step", "#cccccc")):
        begin, end = spans[what, None]
        bar(-1, begin, end, color)
        axes.text(500 * (begin + end) - 1e3 * zero, -1, what, ha="center", va="center", fontsize=8)
    for number in range(len(buckets)):
        bar(number, spans["start_reduce", number][0], spans["finish_reduce", number][1], "#00798c")
        bar(number, *spans["update_shards", number], "#d1495b")
        bar(number, spans["start_gather", number][0], spans["step", None][1], "#edae49")
    axes.plot([1e3 * (t - zero) for t in step["arrived"]], [-1.45] * len(step["arrived"]), "kv", markersize=4)
    axes.axvline(1e3 * (spans["backward", None][1] - zero), color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(-1, len(buckets)), ["rank 0", *(f"bucket {n}: {p[0]}" for n, p in enumerate(buckets))])
    axes.set(xlabel="milliseconds", ylim=(len(buckets) - 0.5, -1.8))
    kinds = [
        ("#00798c", "reduce-scatter, until it was waited for"),
        ("#d1495b", "update"),
        ("#edae49", "all-gather, until it was waited for"),
    ]
    handles = [Rectangle((0, 0), 1, 1, facecolor=color) for color, _ in kinds]
    arrivals = axes.plot([], [], "kv", markersize=4)
    figure.legend(
        [*arrivals, *handles], ["a gradient is there", *(label for _, label in kinds)],
        loc="upper center", ncols=4, frameon=False, fontsize=8,
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    plt.show()


def duration(step: dict) -> float:
    return step["events"][-1][3] - step["events"][0][2]


draw_timeline(watched["buckets"], min(watched["steps"][1:], key=duration))

# %% [markdown]
# Updates go through the buckets in the reverse of the order in which they were sent, and each bucket's all-gather runs
# while the next bucket is updated. The forward pass needs first what the backward pass had last.
#
# Two cautions. A reduce-scatter's bar ends where the optimizer has waited for it, not where the transfer ended: gloo
# does not tell when that was. And the ranks here share the cores of one machine with gloo's own threads, so that
# sending early gains little; with GPUs and a network, both work at once.
#
# ## f. The norm, done wrong
#
# Clipping scales the gradient down when its norm is above a limit. The norm is that of the *whole* gradient, and now no
# rank has it. Two ways to get it wrong:
#
# - *local*: each rank takes the norm of its own shards, and scales them by it;
# - *torch*: `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`, as in any other trainer, after the reduction.
#
# **Predict first:** is a local norm above or below the right one? What do the other slices of `.grad` hold after a
# reduce-scatter, and does `torch` give the same number on all ranks?

# %%
LIMIT = 1.0


def one_process(model: GPT, optimizer: torch.optim.Optimizer) -> float:
    grads = [p.grad for p in model.parameters()]
    norm = grad_norm(grads)
    clip_grads(grads, norm, LIMIT)
    return norm.item()


def local(model: GPT, optimizer: Zero1Optimizer) -> float:
    grads = optimizer.reduce_gradients()  # of this rank's shards
    norm = grad_norm(grads)  # and nobody else is asked
    clip_grads(grads, norm, LIMIT)
    return norm.item()


def torchs(model: GPT, optimizer: Zero1Optimizer) -> float:
    optimizer.reduce_gradients()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item()


def right(model: GPT, optimizer: Zero1Optimizer) -> float:
    return optimizer.clip_grad_norm_(LIMIT).item()


[exact] = run_on_ranks(by_hand, 1, config, whole, one_process, 12)
clipped = {
    name: run_on_ranks(by_hand, 4, config, flat, clip, 12)
    for name, clip in (("local", local), ("torch", torchs), ("right", right))
}
print(f"the norm in step 0, by one process: {exact['kept'][0]:.6f}; by rank:")
for name, ranks in clipped.items():
    print(f"    {name:6} " + "  ".join(f"{rank['kept'][0]:.6f}" for rank in ranks))
squares = sum(rank["kept"][0] ** 2 for rank in clipped["local"])
print(f"root of the sum of the local norms' squares: {squares**0.5:.6f}")

# %% [markdown]
# Four ranks, four norms, either way. A local norm is too small, so less is clipped than should be, and not the same on
# all slices: the gradient changes its direction. After the reduction a rank's `.grad` is the mean in its own slice
# only; elsewhere lies what this rank sent, or whatever the backend has left there. `torch` adds that up.
#
# The last line says what to do. Squares add up over shards, so it takes one number a rank:
# `optimizer.clip_grad_norm_(max_norm)` sums the squares of its shards in fp64, all-reduces that scalar, and all
# ranks scale by the same factor. (Summed in fp32, the norm would depend on where the cuts are, and so on N.)
#
# What does the mistake do to training? **Predict first:** the ranks train with four factors. Do their models drift
# apart? How far is each loss curve from that of one process, and from which step on?

# %%
for name, ranks in clipped.items():
    alike = all(torch.equal(rank["params"], ranks[0]["params"]) for rank in ranks)
    gaps = [abs(a - b) for a, b in zip(ranks[0]["curve"], exact["curve"])]
    print(f"{name:6} all ranks hold the same model: {alike}; losses off by at most {max(gaps):.1e}")

figure, axes = plt.subplots(figsize=(6, 3.5))
for (name, ranks), color in zip(clipped.items(), ("#d1495b", "#edae49", "#00798c")):
    gaps = [max(abs(a - b), 1e-8) for a, b in zip(ranks[0]["curve"], exact["curve"])]
    axes.semilogy(gaps, marker="o", color=color, label=name)
axes.set(xlabel="step", ylabel="loss, off one process by", title="Clipping by three norms (0 is drawn as 1e-8)")
axes.legend(loc="center right")
figure.tight_layout()
plt.show()
assert max(abs(a - b) for a, b in zip(clipped["right"][0]["curve"], exact["curve"])) < 1e-5

# %% [markdown]
# The models do not drift apart: each slice is updated once, by its owner, and gathered by all. So a check that compares
# ranks with each other finds nothing. The curves look like training, too. In steps 0 and 1 the losses are as good as
# right, for AdamW's first update hardly depends on the gradient's scale. The comparison with one process shows it, and
# it can because the right way agrees to about 1e-7.
#
# ## g. A checkpoint of slices
#
# Each rank holds other moments, so each has to save its own. **Predict first:** why is it a bad idea to save the
# buckets' slices as they are, one file a rank?

# %%
for ranks in (4, 2):
    bucket = run_on_ranks(layout, ranks, config, 25.0)[1][0]
    begin, end = bucket["mine"]
    print(f"rank 1 of {ranks} has elements {begin:,} to {end:,} of {bucket['length']:,} (with padding) in bucket 0")

# %% [markdown]
# The slices, the padding, and with another `bucket_mb` the buckets themselves depend on how the run was started. With
# other ranks nobody could open them. So `sharded_checkpoint.py` saves by parameter: *elements a to b of the flattened
# moment of this parameter*. torch's distributed checkpoint (DCP) writes a file a rank, and an index of which elements
# lie where.
#
# Below, 7 steps of the run of (d) on 4 ranks, saved at their end, then resumed on 2 ranks until step 12, and saved
# again.
#
# **Predict first:** bucket 0 begins with `h.1.mlp.c_proj` and `h.1.mlp.c_fc`, 16,384 elements each. In how many chunks
# is the first moment of `h.1.mlp.c_fc` saved by 4 ranks, and in how many by 2? Cover the last lines: how far are the
# losses after the change from those of (d)?

# %%
def chunks(checkpoint: Path, name: str) -> list[tuple[int, int]]:
    """(first element, elements) of each saved piece of a parameter's first moment."""
    key = f"optimizer.transformer.{name}.weight.exp_avg"
    pieces = SafeReader(checkpoint).read_metadata().state_dict_metadata[key].chunks
    return sorted((piece.offsets[0], piece.sizes[0]) for piece in pieces)


four = train_on(4, max_iters=7, lr_decay_iters=12)
two = Path(tempfile.mkdtemp(dir=folder.name)) / "resumed"
shutil.copytree(four, two)  # so that this cell can run twice
train_on(2, out_dir=two, init_from="resume", lr_decay_iters=12)

for name in ("step-00000007", "step-00000012"):
    checkpoint = two / "checkpoints" / name
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    print(f"{name}, saved by {manifest['world_size']} ranks:", ", ".join(f["name"] for f in manifest["files"]))
    for parameter in ("h.1.mlp.c_proj", "h.1.mlp.c_fc", "h.0.mlp.c_proj"):
        said = ", ".join(f"{begin:,} to {begin + numel:,}" for begin, numel in chunks(checkpoint, parameter))
        print(f"    {parameter:15} first moment in chunks {said}")

# %%
resumed, whole_run = losses(two), losses(runs["flat"])
print("step   4 ranks, then 2     4 ranks")
for step in whole_run:
    note = "  <- 2 ranks from here on" if step == 7 else ""
    print(f"{step:4} {resumed[step]:16.8f} {whole_run[step]:12.8f}{note}")
print("steps 0 to 6 identical to the last digit:", all(resumed[step] == whole_run[step] for step in range(7)))
print(f"largest difference: {off(resumed, whole_run):.1e}")
assert off(resumed, whole_run) < 1e-5

# %% [markdown]
# Up to step 6 both are the same run; after it, 2 ranks add up in another order than 4. No rank ever
# held another's moments: the reader asks the index for the elements that lie in its own shards.
#
# The crash-safe protocol of notebook 1, manifest last and then renamed, is the same. Only what lies in the directory
# has changed.
#
# ## Exercises
#
# **1. ZeRO-2.** After the reduce-scatter a rank needs its own slice of the gradient only. Suppose the rest is freed.
# Predict first: how many bytes does a rank hold at N = 4, and what does it tend to with very many ranks? What is sent
# in a step of M micro-batches a rank, if the whole gradient shall never be held between them?
#
# <details><summary>Hint</summary>
#
# Parameters 4P, gradients 4P/N, moments 8P/N: 4P + 12P/N, which is 7P at N = 4 instead of 10P, and tends to 4P instead
# of 8P. (A bucket that is just being filled or sent is whole, so it comes on top.)
#
# What `Zero1Optimizer` keeps whole is `flat_grads`, and it does so for accumulation: a micro-batch adds to every
# element, and only the last one sends. If no whole gradient is kept, each micro-batch has to be reduce-scattered, and
# each rank adds up its slice: M + 1 times P(N-1)/N elements instead of 2. With M = 1 ZeRO-2 costs nothing more. In
# `buckets.py` it is `flat_grads` that would have to be made when the first gradient of a bucket comes, and freed in
# `finish_reduce` once the slice is copied.
#
# </details>
#
# **2. Who has wte?** Predict first: at N = 4 and with the default `bucket_mb=25`, which ranks' optimizers hold moments
# of the token embedding? And with `bucket_mb=0.2`, as drawn in (b)?
#
# <details><summary>Hint</summary>
#
# The last parameters come first, so `wte`, the model's first, lies at the end of the matrices' bucket:
#
# ```python
# for bucket_mb in (25.0, 0.2):
#     for rank, buckets in enumerate(run_on_ranks(layout, 4, config, bucket_mb)):
#         for number, bucket in enumerate(buckets):
#             for name, offset, begin, end in bucket["shards"]:
#                 if name == "wte":
#                     print(f"{bucket_mb} MB, bucket {number}, rank {rank}: {offset} to {offset + end - begin}")
# ```
#
# With 25 MB it is rank 3 alone, with 0.2 MB all four. Either way they are the output layer's moments as well: it is the
# same parameter, and lies in a bucket once.
#
# </details>
#
# **3. Tiny buckets, huge buckets.** Predict first: how many reduce-scatters does a step make with
# `bucket_mb=0.0001`, and how many with `bucket_mb=1000`? Which sends more elements, and why? What is lost with either?
#
# <details><summary>Hint</summary>
#
# ```python
# for bucket_mb in (0.0001, 0.2, 1000.0):
#     ran = run_on_ranks(by_hand, 4, config, lambda model: flat(model, bucket_mb), None, 2)
#     print(f"{bucket_mb} MB")
#     show_traffic(ran[0]["traffic"])
# ```
#
# A parameter that is larger than `bucket_mb` has a bucket of its own, so tiny buckets make 15, one a tensor. Each is
# padded to slices of a multiple of 32, so they send a little more; above all each call has a cost of its own, which
# adds up. Huge ones make 2, one for each parameter group. Then the matrices can be sent only when the last gradient,
# that of `wte`, is there, and nothing of theirs overlaps with the backward pass. To see it, run `timeline` of (e) with
# `bucket_mb=1000`.
#
# </details>
