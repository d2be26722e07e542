# %% [markdown]
# # 2. Collectives: what the ranks send
#
# *50 minutes. Read [notebook 1](01_one_process.ipynb) first, for ranks. Read this one before notebook 3, or skip it
# if you have only half a day.*
#
# Every technique of this repository uses the same few collectives. DDP all-reduces gradients. ZeRO-1 reduce-scatters
# them and all-gathers parameters. FSDP all-gathers parameters twice. In this notebook you look inside: you run the
# collectives with send and receive only, and count every byte.
#
# We test six claims:
#
# - **In a ring, a rank sends 2n(N-1)/N bytes for an all-reduce of n bytes. This is less than 2n for any number of
#   ranks N.**
# - **An all-reduce is a reduce-scatter followed by an all-gather.**
# - **All ranks get exactly the same sum. Its last digits can differ from the sum that a single process computes.**
# - **Collectives match by the order of their calls. A wrong order gives a hang, or wrong numbers without an error.**
# - **Two numbers, a latency per step and a bandwidth, predict roughly how long a collective takes.**
# - **Data parallelism averages gradients. How long the ranks wait depends on when they start to average.**
#
# Open `workshop/collectives.py` next to this page. It implements the collectives in five short functions. You need no
# GPU.

# %%
import time

import torch
import torch.distributed as dist

from nanoGPT.model import GPT, GPTConfig
from workshop import collectives
from workshop.collective_times import fit_latency_and_bandwidth, measure_all_reduces, predict_seconds
from workshop.lessons.collective_pictures import draw_fits, draw_traces
from workshop.lessons.collectives import count_bytes_of_sends, print_fits, print_sent_bytes, trace_reduce_scatter
from workshop.lessons.ddp import measure_versions, print_versions
from workshop.ranks import RankFailed, run_on_ranks

RANKS = 4

# %% [markdown]
# ## a. Four collectives
#
# You will see what each collective does to small tensors on 4 ranks. N is the number of ranks, and r is the number of
# a rank.
#
# | collective | each rank starts with | each rank ends with |
# |---|---|---|
# | broadcast | rank 0: a tensor | the tensor of rank 0 |
# | all-reduce | a tensor | the sum of all tensors |
# | reduce-scatter | a tensor, divided into N chunks | rank r: chunk r of the sum |
# | all-gather | a chunk | the chunks of all ranks, in the order of the ranks |
#
# Rank r starts with the values r, r + 10, r + 20 and r + 30.
#
# **Predict first:** what does rank 1 have after a broadcast from rank 0, after an all-reduce, after a reduce-scatter,
# and after an all-gather of its first value?

# %%
def show_collectives() -> dict[str, list[float]]:
    """Return the result of each collective on the calling rank."""
    values = torch.arange(0.0, 40.0, 10.0) + dist.get_rank()
    broadcast, all_reduce = values.clone(), values.clone()
    collectives.broadcast(broadcast, source=0)
    collectives.all_reduce(all_reduce)
    return {
        "before": values.tolist(),
        "broadcast": broadcast.tolist(),
        "all-reduce": all_reduce.tolist(),
        "reduce-scatter": collectives.reduce_scatter(values).tolist(),
        "all-gather": collectives.all_gather(values[:1]).tolist(),
    }


results = run_on_ranks(show_collectives, RANKS)
for name in results[0]:
    print(f"{name:15}" + "   ".join(f"rank {rank}: {result[name]}" for rank, result in enumerate(results)))

# %% [markdown]
# After the all-reduce every rank has all four sums. After the reduce-scatter rank r has only sum r. This is all that
# ZeRO-1 needs, because rank r updates only its slice.
#
# ## b. A reduce-scatter, step by step
#
# You will draw how the sums grow on their way around the ring.
#
# ```
# rank 0  ->  rank 1  ->  rank 2  ->  rank 3  ->  rank 0
# ```
#
# A rank sends only to the next rank, and receives only from the previous one. The tensor is divided into N chunks. In
# each step every rank sends one chunk, and adds the chunk that it receives to its own.
#
# **Predict first:** how many steps does it take until each rank has one complete chunk? On which rank must chunk 0
# start, so that it ends on rank 0?
#
# To see the contributions, `trace_reduce_scatter` fills the tensor of rank r with 2**r. The bits of a sum then show
# which ranks have contributed to it. The last bit is rank 0: 0110 means ranks 1 and 2. In the figure, each row is a
# rank and each column a chunk. A box is the chunk that the rank sends in this step, and the numbers in it are the
# ranks that have contributed.

# %%
traces = run_on_ranks(trace_reduce_scatter, RANKS)  # traces[rank][step]: the chunk, and the ranks in it as bits
print("rank 1 sends", [f"chunk {chunk} with the bits {bits:04b}" for chunk, bits in traces[1]])
draw_traces(traces)

# %% [markdown]
# There are N - 1 = 3 steps. Chunk 0 starts on rank 1, and each rank on its way adds its own values. After the last step
# it arrives at rank 0, which adds the last contribution. All links are busy in every step, and no rank has more work
# than another one.
#
# An all-gather goes around the ring in the same way, but the ranks copy the chunks instead of adding them.
#
# ## c. Count the bytes
#
# You will measure how much a rank sends, and compare it with the formula.
#
# The simplest all-reduce has no ring: all ranks send their tensor to rank 0, which adds them and sends the sum to each
# rank.
#
# **Predict first:** for a tensor of n bytes on N ranks, how many bytes does rank 0 send with the simple version? And
# how many does each rank send in the ring? What happens for a large N?

# %% answer="all_reduce_on_rank_0"
def all_reduce_on_rank_0(values: torch.Tensor) -> None:
    """Add the values of all ranks on rank 0, which sends the sum to each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        received = torch.empty_like(values)
        for other in range(1, ranks):
            dist.recv(received, other)
            values += received
        for other in range(1, ranks):
            dist.send(values, other)
    else:
        dist.send(values, 0)
        dist.recv(values, 0)

# %% [markdown]
# `count_bytes_of_sends` runs a function, and returns the bytes that this function sends with `dist.send` and
# `dist.isend`. Count the simple version and all four collectives:

# %%
LENGTH = 840  # elements; 2, 3, 4, 5, 6, 7 and 8 divide it


def measure_all(length: int) -> dict[str, int]:
    values, ranks = torch.ones(length), dist.get_world_size()
    return {
        "on rank 0": count_bytes_of_sends(lambda: all_reduce_on_rank_0(values)),
        "all-reduce": count_bytes_of_sends(lambda: collectives.all_reduce(values)),
        "reduce-scatter": count_bytes_of_sends(lambda: collectives.reduce_scatter(values)),
        "all-gather": count_bytes_of_sends(lambda: collectives.all_gather(values[: length // ranks])),
        "broadcast": count_bytes_of_sends(lambda: collectives.broadcast(values, 0)),
    }


measured = {ranks: run_on_ranks(measure_all, ranks, LENGTH) for ranks in (2, 4, 8)}
print_sent_bytes(measured, n=4 * LENGTH)

# %% [markdown]
# The measured bytes match the formulas exactly. With the simple version, rank 0 sends (N-1) n bytes, and it also
# receives as much, so it gets slower with each rank. In the ring, a rank never sends more than 2n.
#
# An all-reduce sends exactly as much as a reduce-scatter and an all-gather together, because it consists of the two.
# This is why ZeRO-1 costs no additional communication: it puts the update of the shards between the two.
#
# **Predict first:** from which N on does the simple version send more than the ring?

# %%
for N in (2, 3, 4, 16):
    print(f"{N:2} ranks: on rank 0 {N - 1:2} n bytes, ring {2 * (N - 1) / N:.2f} n bytes")

# %% [markdown]
# With two ranks both versions send n bytes. From three ranks on, the ring sends less.
#
# The ring also has a cost: an all-reduce takes 2(N-1) steps, one after another, and each step has a *latency*: a time
# that even an empty message needs. For small tensors on many ranks, it is most of the time. There are three remedies.
# NCCL uses trees, which need fewer steps, for all-reduces. Trainers use *buckets*: one large tensor contains many
# gradients, so they pay the latency once, and not once per parameter. And a smaller group of ranks has fewer steps
# (hybrid sharding, notebook 6).
#
# ## d. The same sum on all ranks
#
# You will check whether the ranks get the same sum, and whether it is the sum of a single process.
#
# **Predict first:** floating-point addition rounds, so the order matters. In which order are the values of chunk 0
# added, and in which order those of chunk 1? Can two ranks get different sums?

# %% answer="sum_random_values"
def sum_random_values(length: int) -> dict:
    """Return the all-reduced values, and the sum that one process computes in rank order."""
    values = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    result = values[dist.get_rank()].clone()
    collectives.all_reduce(result)
    return {"ring": result, "single": values[0] + values[1] + values[2] + values[3]}


results = run_on_ranks(sum_random_values, RANKS, 4000)
print("same bits on all ranks:", all(torch.equal(result["ring"], results[0]["ring"]) for result in results))
for chunk, (ring, single) in enumerate(zip(results[0]["ring"].chunk(RANKS), results[0]["single"].chunk(RANKS))):
    difference = (ring - single).abs().max().item()
    print(f"chunk {chunk}: {(ring != single).float().mean():4.0%} of the elements differ from one process, by {difference:.1e}")
assert all(torch.equal(result["ring"], results[0]["ring"]) for result in results)

# %% [markdown]
# Each chunk is completed on one rank and then copied, so all ranks have the same bits. This matters: if the parameters
# of two ranks differed in the last digit, the difference would grow in every step.
#
# But each chunk starts on a different rank, so the order of its additions differs from that in one process. (Chunk 3
# begins at rank 0, so its order is the same.) With another number of ranks, the last digits differ again. The loss
# curves of this repository agree to 1e-6 between different numbers of ranks, and exactly only on the same number of
# ranks.
#
# ## e. Broken on purpose: all ranks send first
#
# `exchange` in `workshop/collectives.py` sends a tensor to the next rank and receives one from the previous rank, at
# the same time. You will replace it by a version that first sends and then receives.
#
# **Predict first:** each rank waits until its send has ended. When does the first send end?

# %%
def reduce_scatter_with_blocking_send() -> None:
    def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        dist.send(outgoing, (rank + 1) % ranks)  # the bug: no rank receives yet
        dist.recv(incoming, (rank - 1) % ranks)

    collectives.exchange = exchange
    collectives.reduce_scatter(torch.ones(4 * RANKS))


begin = time.monotonic()
try:
    run_on_ranks(reduce_scatter_with_blocking_send, RANKS, timeout=3)
    raise AssertionError("the ranks must wait for each other")
except RankFailed as failure:
    print(failure)
assert time.monotonic() - begin < 60

# %% [markdown]
# No send ever ends. A send waits for the receiver, each receiver is itself in a send, and the ring of waiting ranks is
# closed. There is no error message: only a time limit ends the run. The trainers of this repository have a watchdog for
# this reason (notebook 7).
#
# ## f. Broken on purpose: two orders
#
# You will call two all-reduces in different orders on different ranks.
#
# Rank 0 first reduces a tensor of ones and then a tensor of tens. The other ranks do the opposite. This happens in real
# code if each rank reduces a bucket as soon as it is full, and the buckets fill in different orders.
#
# **Predict first:** does this hang? If not, what are the sums?

# %%
def reduce_in_two_orders() -> tuple[float, float]:
    ones, tens = torch.ones(4), torch.full((4,), 10.0)
    order = [ones, tens] if dist.get_rank() == 0 else [tens, ones]
    for values in order:
        dist.all_reduce(values)  # torch's own
    return ones[0].item(), tens[0].item()


for rank, (ones, tens) in enumerate(run_on_ranks(reduce_in_two_orders, RANKS)):
    print(f"rank {rank}: the sum of the ones is {ones:g} (should be {RANKS}), of the tens {tens:g} (should be {10 * RANKS})")

# %% [markdown]
# It does not hang, and there is no error. A collective has no name: the first call on a rank matches the first call
# on the other ranks. Tensors of the same size are added, whatever they mean. (Tensors of different sizes can hang or
# fail.) `Zero1Optimizer` (notebook 3) therefore reduces its buckets in one order that all ranks share, and waits if a
# bucket fills too early.
#
# ## g. How long does it take?
#
# You will measure the time of an all-reduce for eight sizes, and see how well two numbers predict all of them.
#
# A step of the ring needs a fixed time, even for an empty tensor: the *latency*, alpha. Each byte needs further time,
# which is one over the *bandwidth*. With the steps and the volume of section (c):
#
# ```
# time = alpha * steps + volume / bandwidth          steps = 2(N-1), volume = 2n(N-1)/N
# ```
#
# `measure_all_reduces` in `workshop/collective_times.py` measures the ring that is written by hand, and torch's own
# all-reduce, which gloo carries out. It keeps the shortest of 15 times.
#
# **Predict first:** 4 MB is 16,384 times as much as 256 bytes. How many times as long does its all-reduce take? Is
# gloo's own all-reduce faster than the one in Python for small tensors, for large ones, or for both?

# %%
SIZES = [4**k for k in range(4, 12)]  # 256 bytes to 4 MB
seconds = {}
for ranks in (2, 4):
    samples = run_on_ranks(measure_all_reduces, ranks, SIZES)
    for name in samples[0]:
        slowest_rank = zip(*(result[name] for result in samples))
        seconds[ranks, name] = [max(times) for times in slowest_rank]

fits = {(ranks, name): fit_latency_and_bandwidth(SIZES, times, ranks) for (ranks, name), times in seconds.items()}
print_fits(SIZES, seconds, fits)

# %%
draw_fits(SIZES, seconds, fits)

# %% [markdown]
# The curve is flat on the left: for small tensors only the latency counts, and 256 bytes take about as long as 16 KB.
# On the right it becomes a straight line: only the bandwidth counts. The last column of the table says how far the
# model is wrong: the largest ratio between a measured and a predicted time. The largest tensor has 16,384 times as many
# bytes as the smallest, so two numbers explain most of it, but not all. Large tensors do not fit into the caches of the
# processor, and with more ranks than cores the ranks wait for each other's turn.
#
# gloo's own all-reduce sends as many bytes, and it is faster for small and for large tensors: it is written in C++, and
# our ring starts every step from Python.
#
# If there are more ranks than cores, a rank often waits for a core and not for the network. This is why the latency
# of 4 ranks on 2 cores is so large. NCCL between GPUs has a much smaller latency and a much larger bandwidth. The
# model of its rings is the same.
#
# **Predict first:** a model has 148 tensors of 16 KB. Is it better to all-reduce each of them, or one bucket with all
# of them? By how much?

# %%
for (ranks, name), fit in fits.items():
    one_by_one, bucket = 148 * predict_seconds(16384, ranks, *fit), predict_seconds(148 * 16384, ranks, *fit)
    print(f"{ranks} ranks, {name:8}: 148 all-reduces {1e3 * one_by_one:6.1f} ms, one bucket {1e3 * bucket:5.1f} ms")

# %% [markdown]
# The fit predicts these times. Both ways send the same bytes, but a bucket pays the latency once. This is why DDP and
# `Zero1Optimizer` use buckets, and why FSDP all-gathers a block and not a layer at a time.
#
# ## h. Data parallelism by hand, three times
#
# You will build data parallelism from an all-reduce, and see why torch's DDP is written as it is.
#
# Every rank computes the gradients of its own micro-batch. All ranks then need the mean of these gradients, so that all
# of them make the same update. `workshop/ddp.py` has three versions. Open it:
#
# 1. `average_each` all-reduces one gradient after another, when the backward pass has ended.
# 2. `average_in_buffer` copies all gradients into one flat buffer, and all-reduces it once.
# 3. `OverlappedAverage` has several buckets. A hook starts the all-reduce of a bucket when its last gradient is
#    complete. The backward pass continues with earlier layers, and `wait` waits for what is left.
#
# **Predict first:** the model has 100 parameter tensors and 6.4 MB of gradients per rank. How many bytes does each
# version send? Which one waits longest after the backward pass, and which one almost not at all?

# %%
SHAPE = GPTConfig(n_layer=8, n_head=4, n_embd=128, block_size=64, vocab_size=75)


def make_model() -> GPT:
    model = GPT(SHAPE)
    model.init_weights(0)
    return model


generator = torch.Generator().manual_seed(0)
tokens = torch.randint(SHAPE.vocab_size, (RANKS, 2, 2, 64), generator=generator)  # for each rank: x and y, each (2, 64)
for ranks in (2, 4):
    print(f"{ranks} ranks")
    versions = run_on_ranks(measure_versions, ranks, make_model, [(x, y) for x, y in tokens])
    print_versions(versions, gradient_bytes=4 * SHAPE.count_params())

# %% [markdown]
# All versions send the same bytes and give the same gradients. The first one pays the latency of a hundred
# collectives and is slowest by far. The buffer pays it once, but all ranks wait for it after the backward pass. With
# several buckets, communication starts during the backward pass. (DDP waits inside of its backward pass, so its
# column shows 0.)
#
# On two ranks the wait after the backward pass then almost disappears. On four ranks with two cores it may be as long
# as with one buffer, because gloo needs the same cores as the backward pass. On a GPU, NCCL uses only a few of the
# GPU's many streaming multiprocessors (SMs), so most of the communication is hidden as long as it takes less time
# than the backward pass.
#
# ## To take home
#
# 1. A collective is a pattern of sends and receives in which all ranks take part.
# 2. In a ring, each rank sends to the next rank only, and all links are always busy.
# 3. A reduce-scatter gives rank r the sum of chunk r, and an all-gather copies the chunks of all ranks to all ranks.
# 4. Both have N - 1 steps, and a rank sends n(N-1)/N bytes.
# 5. An all-reduce is one after the other: 2(N-1) steps and 2n(N-1)/N bytes.
# 6. ZeRO-1 updates the parameters between the two, so it sends as much as plain data parallelism.
# 7. time = alpha * steps + volume / bandwidth. The volume is almost independent of N, but the number of steps grows
#    with N, so small tensors go into buckets.
# 8. All ranks get the same bits, because each chunk is completed on one rank.
# 9. The order of additions depends on N, so the last digits do as well.
# 10. Collectives match by the order of their calls. With a wrong order, the run hangs, or the numbers are silently
#     wrong.
# 11. DDP all-reduces buckets of gradients during the backward pass, in one order on all ranks.
#
# ## Exercises
#
# A program checks these exercises on real ranks and explains what is wrong. `make exercise N=collectives.1` writes the
# task into `work/`:
#
# | exercise | task |
# |---|---|
# | `collectives.1` | write the reduce-scatter |
# | `collectives.2` | write the all-gather |
# | `collectives.3` | compose the all-reduce, for any length |
# | `ddp.1` | average all gradients in one buffer |
# | `ddp.2` | average them during the backward pass |
# | `memory.3` | predict the volume |
#
# **1. A broadcast in chunks.** The broadcast of (c) sends n bytes from rank to rank, and the last rank waits for N - 1
# transfers of the full tensor. Predict first: the source divides the tensor into C chunks, and each rank passes on a
# chunk as soon as it has it. How many steps does it take, and how large is each? What does it approach for many chunks?
#
# <details><summary>Hint</summary>
#
# The last rank receives its first chunk after N - 1 steps, and then one chunk per step: N - 1 + C - 1 steps with n/C
# bytes each. For many chunks the total approaches the time for n bytes, for any N. NCCL's broadcast works like this.
# The volume per rank stays n.
#
# </details>
#
# **2. The best order?** Predict first: the ring sends from rank r to rank r + 1. Two nodes have 4 ranks each, and the
# connection between the nodes is 10 times slower than within a node. All ranks of a node share
# this connection. How many chunks cross it in each step if the ranks are numbered node by node, and how many if they
# alternate between the nodes?
#
# <details><summary>Hint</summary>
#
# Node by node, only the links 3 -> 4 and 7 -> 0 are slow. In each step one chunk crosses in each direction. If the
# ranks alternate, all 8 links are slow, and 4 chunks at a time must cross in each direction. The shared connection
# decides the time of a step, so the first numbering is 4 times faster. NCCL finds the nodes itself, and orders its
# rings node by node. Groups of consecutive ranks still matter: tensor parallelism and the shard groups of hybrid FSDP
# should lie within one node.
#
# </details>
