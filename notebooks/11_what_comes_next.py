# %% [markdown]
# # 11. What comes next: tensor, pipeline, context and expert parallelism
#
# *60 minutes. Read notebooks [2](02_collectives.ipynb), [6](06_fsdp.ipynb) and [8](08_generating_text.ipynb) first, and
# for section d [notebook 5](05_triton_attention.ipynb).*
#
# DDP, ZeRO and FSDP are all *data parallelism*: each rank computes the full model on its own part of the batch. With
# 1,000 ranks, a step needs at least 1,000 sequences, and with FSDP every rank all-gathers every weight. **What else
# can we divide among ranks?**
#
# There are four answers. A rank can have a part of each layer (tensor parallelism), some of the layers (pipeline
# parallelism), a part of each sequence (context parallelism), or some of the experts (expert parallelism). This
# notebook has one section for each. You write the first one yourself, train this repository's GPT with it, and
# combine it with FSDP. You test four claims:
#
# - **Tensor parallelism needs two autograd functions and no change to the model. Its losses match the
#   baseline's.**
# - **It sends activations instead of weights: 4 L B T C numbers per micro-batch are reduced.**
# - **Tensor parallelism within a node and FSDP between nodes work together, with the same losses.**
# - **In a pipeline of N ranks with M micro-batches, each rank is idle for (N-1)/(M+N-1) of the time.**
#
# Open `nanoGPT/model.py` and `evaluation/tensor_parallel.py` next to this page. You need no GPU.

# %%
import dataclasses
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoGPT.dataset import TokenData
from nanoGPT.costs import ring_bytes, storage_bytes
from measure.ledger import CollectiveCounter
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.train_config import TrainConfig
from workshop import collectives
from workshop.pictures import draw_curves, draw_schedule, draw_who_holds_what
from workshop.ranks import losses, run_on_ranks

# %% [markdown]
# All sections use the small model of the other notebooks, with four heads:

# %%
folder = tempfile.TemporaryDirectory()  # for the runs of this notebook; it is deleted when the kernel stops
config = TrainConfig(
    device="cpu", block_size=32, batch_size=4, gradient_accumulation_steps=4, n_layer=2, n_head=4, n_embd=64,
    max_iters=20, eval_interval=20, eval_iters=4, log_interval=1, learning_rate=2e-3, min_lr=2e-4, warmup_iters=2,
    out_dir=f"{folder.name}/baseline",
)
data = TokenData(config)
shape = GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": data.tokenizer["vocab_size"]})
P, L, C, B, T = shape.count_params(), shape.n_layer, shape.n_embd, config.batch_size, config.block_size

# %% [markdown]
# ## a. Tensor parallelism: a part of each layer
#
# You will divide an MLP by hand, and see why it needs only one collective.
#
# An MLP computes y = W₂ gelu(W₁ x). Rank 0 takes the upper half of the rows of W₁, and the left half of the columns of
# W₂. Rank 1 takes the other halves. The names of the two layers come from the Megatron-LM paper, which writes y = x A
# and divides the columns of A. PyTorch stores the transpose, W = Aᵀ, so these columns are the rows of W:
#
# - **Column parallel** (W₁): rank r computes half of the hidden channels, from the full x. GELU works on each channel
#   separately, so it needs no communication.
# - **Row parallel** (W₂): rank r multiplies its half of the hidden channels, and gets a *partial sum* of the full y. An
#   all-reduce adds the partial sums.
#
# Attention is divided in the same way: a rank has some of the heads, and the output projection is row parallel.

# %%
draw_who_holds_what(
    {
        "x": ["01", "01"], "W₁ (rows)": ["0.", ".1"], "hidden channels": ["0.", ".1"], "W₂ (columns)": ["0.", ".1"],
        "y, after the all-reduce": ["01", "01"],
    },
    "Tensor parallelism on 2 ranks: what each rank stores in an MLP",
)

# %% [markdown]
# **Predict first:** in the forward pass, one all-reduce adds the partial sums of y. In the backward pass, each rank
# gets the full gradient of y. Which gradient is only a partial sum on each rank, and needs an all-reduce?

# %%
class CopyToRanks(torch.autograd.Function):
    """The input of a column-parallel layer: identity in the forward pass, all-reduce in the backward pass (f)."""

    @staticmethod
    def forward(ctx, x: Tensor, group=None) -> Tensor:
        ctx.group = group  # the ranks that share the layer; None: all
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor) -> tuple[Tensor, None]:
        dx = dx.clone()
        dist.all_reduce(dx, group=ctx.group)  # each rank has only the part of dx that came through its own channels
        return dx, None

# %%
class SumOverRanks(torch.autograd.Function):
    """The output of a row-parallel layer: all-reduce in the forward pass, identity in the backward pass (g)."""

    @staticmethod
    def forward(ctx, partial: Tensor, group=None) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None

# %% [markdown]
# The gradient of x is a partial sum: x went into the channels of both ranks, so its gradient has a part from each. The
# Megatron-LM paper calls these two functions f and g. They mirror each other: where one communicates in the forward
# pass, the other communicates in the backward pass.
#
# That is all that the model needs. `take_part` (which notebook 8 uses to generate text) returns a rank's part of each
# weight: whole heads of `c_attn`, rows of `c_fc`, and columns of both `c_proj`. Two kinds of hooks put f before the
# column-parallel layers, and g after the row-parallel layers. The embeddings and LayerNorms stay full on every rank.

# %%
from evaluation.tensor_parallel import COLUMN_PARALLEL, ROW_PARALLEL, take_part


def divide_model(model: GPT, reduces_backward: bool = True, group=None) -> None:
    """Divide the blocks of a GPT among the ranks of a group, in place."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for name, module in model.named_modules():
        if name.endswith(COLUMN_PARALLEL + ROW_PARALLEL):
            part = take_part(module.weight.detach(), f"{name}.weight", rank, ranks)
            module.weight = nn.Parameter(part.clone())
        if name.endswith(COLUMN_PARALLEL) and reduces_backward:
            module.register_forward_pre_hook(lambda module, inputs: CopyToRanks.apply(*inputs, group))
        if name.endswith(ROW_PARALLEL):
            module.register_forward_hook(lambda module, inputs, output: SumOverRanks.apply(output, group))

# %% [markdown]
# The training loop changes in two places. Every rank runs **all** micro-batches, because the ranks share one copy of
# the model. And the global gradient norm counts each parameter once. The all-reduce adds the squared norms of the
# gradients of the divided weights. Each rank then adds the squared norm of the full ones, which is the same on every
# rank.
#
# **Predict first:** does this loop have to average or reduce gradients before the update?

# %%
from nanoGPT.optim import grad_norm


def is_divided(name: str) -> bool:
    """Return whether each rank has only a part of a parameter."""
    return name.removesuffix(".weight").endswith(COLUMN_PARALLEL + ROW_PARALLEL)


def norm_over_ranks(model: GPT) -> Tensor:
    """Return the global norm of gradients of which some are divided among the ranks. Collective."""
    divided = [p.grad for name, p in model.named_parameters() if is_divided(name)]
    full = [p.grad for name, p in model.named_parameters() if not is_divided(name)]
    squares = grad_norm(divided).square()
    dist.all_reduce(squares)
    return (squares + grad_norm(full).square()).sqrt()

# %%
def run_micro_batch(model: GPT, data: TokenData, step: int, micro_batch: int, micro_batches: int) -> float:
    """Add the gradients of a micro-batch to `.grad`, and return its loss."""
    loss = model(*data.batch("train", step, micro_batch))
    (loss / micro_batches).backward()
    return loss.item()

# %%
from nanoGPT.optim import clip_grads, configure_adamw
from nanoGPT.train import learning_rate


def train_tensor_parallel(config: TrainConfig, shape: GPTConfig, reduces_backward: bool = True) -> dict:
    """Train on all ranks as one model. Return the losses, the bytes of weights, and the collectives of a step."""
    data = TokenData(config)
    model, loss_of_step, M = GPT(shape), {}, config.gradient_accumulation_steps
    model.init_weights(config.seed)
    divide_model(model, reduces_backward)
    optimizer = configure_adamw(model, config)
    for step in range(config.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        with CollectiveCounter() as counter:
            loss_of_step[step] = sum(run_micro_batch(model, data, step, m, M) for m in range(M)) / M
        clip_grads([p.grad for p in model.parameters()], norm_over_ranks(model), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": loss_of_step, "weights": storage_bytes(model.parameters()), "traffic": counter.rows}

# %% [markdown]
# It does not. Each rank computes the exact gradient of its own weights. The full weights (embeddings, LayerNorms) get
# the same gradient on every rank, because f has added its parts.
#
# Now compare it with the baseline: the same seed, data, initial weights and learning rates, in one process.
#
# **Predict first:** what is the largest loss difference over 20 steps: 0, 1e-6, 1e-3 or 0.1? How many bytes of weights
# does a rank of 2 store?

# %%
from nanoGPT.train import train

run_on_ranks(train, 1, config, show=False)
baseline = losses(config.out_dir)
results = {ranks: run_on_ranks(train_tensor_parallel, ranks, config, shape) for ranks in (2, 4)}
print(f"baseline: loss {baseline[0]:.6f} to {baseline[19]:.6f}, weights {4 * P:,} B")
for ranks, result in results.items():
    curve = result[0]["losses"]
    difference = max(abs(curve[step] - baseline[step]) for step in baseline)
    print(f"{ranks} ranks:  loss {curve[0]:.6f} to {curve[19]:.6f}, weights {result[0]['weights']:,} B, "
          f"max loss difference {difference:.1e}")
    assert difference < 1e-5 and all(each["losses"] == curve for each in result)
divided = 12 * L * C * C
assert all(result[0]["weights"] == 4 * (divided // ranks + P - divided) for ranks, result in results.items())

# %% [markdown]
# The losses match the baseline's, within the tolerance of 1e-5 that all phases of this repository keep. The difference
# is rounding: partial sums are added in another order. A rank stores 1/N of the block weights, and all of the
# embeddings. (With a large vocabulary these are divided as well: see `VocabParallelEmbedding`.)
#
# Unlike in FSDP, **no rank ever has the full weights of a layer**. So the memory for all-gathered units disappears, and
# so does a part of the activations: the hidden channels of the MLP, and q, k and v.
#
# **Predict first:** how many all-reduces does a micro-batch need, in both passes together? How large is each? With 2
# ranks, B = 4, T = 32 and C = 64, does tensor parallelism send more or less per step than DDP, which reduces P
# gradients?

# %%
M = config.gradient_accumulation_steps
for ranks, result in results.items():
    row = result[0]["traffic"]["all-reduce", ranks]
    expected = 4 * L * M * B * T * C * 4
    print(f"{ranks} ranks: {row['calls'] / M:.0f} all-reduces per micro-batch, {row['tensor_bytes']:,} B per step, "
          f"formula 4 L M B T C x 4 B = {expected:,} B")
    assert row["tensor_bytes"] == expected and row["calls"] == 4 * L * M
tokens = M * B * T
print(f"per step and rank of 2: {ring_bytes('all-reduce', expected, 2):,.0f} B; DDP: {ring_bytes('all-reduce', 4 * P, 2):,.0f} B")
print(f"computed for gpt2-xl with 500,000 tokens per step: {4 * 48 * 5e5 * 1600 * 4 / 1e9:,.0f} GB; DDP: {4 * 1.56:.1f} GB")

# %% [markdown]
# Four all-reduces of B T C numbers per block: two in the forward pass (g), and two in the backward pass (f). This
# volume grows with the number of *tokens*, and not with the number of parameters. For gpt2-xl with 500,000 tokens per
# step it is about 100 times that of DDP. The all-reduces of the forward pass overlap with nothing here, because the
# next layer needs their results. In the backward pass, Megatron-LM hides the all-reduce of f (the gradient of x)
# behind the matrix product for the gradient of the weight. So tensor parallelism is used within a node, where the
# links between GPUs are fast, and FSDP or DDP between the nodes.
#
# ### Something broken on purpose
#
# Leave out f: the backward pass no longer adds the partial gradients of x.
#
# **Predict first:** does it raise an error? Is the first loss right? Does the loss still fall?

# %%
broken = run_on_ranks(train_tensor_parallel, 2, config, shape, False)
print("step   baseline   f left out, rank 0   rank 1")
for step in (0, 1, 2, 5, 19):
    print(f"{step:4} {baseline[step]:10.4f} {broken[0]['losses'][step]:20.4f} {broken[1]['losses'][step]:8.4f}")
assert broken[0]["losses"][0] == results[2][0]["losses"][0] and abs(broken[0]["losses"][19] - baseline[19]) > 1e-3

# %%
losses_by_name = {"one process": baseline, "tensor parallel, 2 ranks": results[2][0]["losses"], "f left out": broken[0]["losses"]}
draw_curves({name: [*losses.values()] for name, losses in losses_by_name.items()}, "The losses of tensor parallelism match the baseline's")

# %% [markdown]
# There is no error, and the forward pass is right, so the first loss is right. The loss even falls: the residual stream
# passes the gradient on unchanged, and only the gradient of the branches is incomplete. But each rank's LayerNorms and
# embeddings get another gradient, so the copies that should be equal drift apart, and the ranks disagree about the
# loss. **A falling loss does not prove that a trainer is right. The same losses as the baseline's are much stronger
# evidence.**
#
# ## b. Two dimensions: FSDP and tensor parallelism
#
# You will train on a 2 x 2 mesh: two nodes with two ranks each, tensor parallelism within a node, and FSDP between the
# nodes.
#
# A *device mesh* arranges the ranks in a grid. Ranks 0 and 1 form one row, and share every layer. Ranks 0 and 2 form a
# column: they have the same part of each layer, train on different micro-batches, and shard this part with FSDP.
#
# ```
#             tp: share a layer
# node 0      rank 0    rank 1       micro-batches 0 and 2
# node 1      rank 2    rank 3       micro-batches 1 and 3
#             fsdp: shard what the two ranks of a column store
# ```
#
# First divide the model among the ranks of a row. Then let FSDP shard these parts over the ranks of a column. FSDP
# knows nothing about the other dimension.
#
# **Predict first:** over which ranks must the squares of the gradients be added for the global norm: those of the
# divided weights, and those of the full ones? How many bytes of weights does a rank store?

# %%
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard


def norm_on_mesh(model: GPT, mesh: DeviceMesh) -> Tensor:
    """Return the global gradient norm. Collective."""
    local = {name: p.grad.to_local() for name, p in model.named_parameters()}
    divided = [grad for name, grad in local.items() if is_divided(name)]
    full = [grad for name, grad in local.items() if not is_divided(name)]
    squares = grad_norm(divided, mesh["fsdp"].get_group()).square()
    dist.all_reduce(squares, group=mesh["tp"].get_group())
    return (squares + grad_norm(full, mesh["fsdp"].get_group()).square()).sqrt()

# %%
def train_on_mesh(config: TrainConfig, shape: GPTConfig) -> dict:
    """Train on a mesh of 2 x 2 ranks. Return the losses, and the bytes of weights of this rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    data = TokenData(config)
    model, loss_of_step, M = GPT(shape), {}, config.gradient_accumulation_steps
    model.init_weights(config.seed)
    divide_model(model, group=mesh["tp"].get_group())
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["fsdp"])
    optimizer = configure_adamw(model, config)
    micro_batches = range(mesh["fsdp"].get_local_rank(), M, 2)  # those of this node
    for step in range(config.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        loss = torch.zeros((), dtype=torch.float64)
        for m in micro_batches:
            model.set_requires_gradient_sync(m == micro_batches[-1])
            loss += run_micro_batch(model, data, step, m, len(micro_batches))
        dist.all_reduce(loss, group=mesh["fsdp"].get_group())
        loss_of_step[step] = loss.item() / M
        clip_grads([p.grad.to_local() for p in model.parameters()], norm_on_mesh(model, mesh), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": loss_of_step, "weights": storage_bytes(model.parameters())}


mesh_result = run_on_ranks(train_on_mesh, 4, config, shape)
difference = max(abs(mesh_result[0]["losses"][step] - baseline[step]) for step in baseline)
print(f"2 x 2 ranks: max loss difference {difference:.1e}, weights {[each['weights'] for each in mesh_result]} B")
assert difference < 1e-5 and all(each["losses"] == mesh_result[0]["losses"] for each in mesh_result)

# %% [markdown]
# The losses are those of one process again. The squares of the divided weights are added over all four ranks, because
# each of them has another part. Those of the full weights (embeddings, LayerNorms) are added only over a column,
# because the two ranks of a row store the same. A rank stores a quarter of the matrices of the blocks, and half of
# the rest.
#
# On GPUs this is the usual layout: the all-reduces of tensor parallelism wait for each other and need the fast links
# within a node, and FSDP hides its all-gathers between the nodes behind the computation. torchtitan builds the same
# mesh with `parallelize_module` and `fully_shard`.
#
# ## c. Pipeline parallelism: some of the layers
#
# You will see when the ranks of a pipeline are idle, and how the order of the passes changes the memory.
#
# With pipeline parallelism rank r has some consecutive blocks. It receives activations (B, T, C) from rank r - 1,
# computes, and sends the result to rank r + 1. In the backward pass, gradients travel back through the ranks. One
# micro-batch would keep only one rank busy at a time. So several micro-batches follow each other.
#
# A schedule is an order of passes for each rank. F2 is the forward pass of micro-batch 2, and B2 its backward pass,
# which takes twice as long. *GPipe* runs all forward passes and then all backward passes. *1F1B* (one forward, one
# backward) starts each backward pass as early as possible: rank r first runs N - r forward passes, and then
# alternates.

# %%
def order_gpipe(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """Return the passes of a rank in their order: all forward passes, then all backward passes."""
    return [f"{kind}{m}" for kind in "FB" for m in range(micro_batches)]


# %% answer="order_1f1b"
def order_1f1b(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """Return the passes of a rank in their order: each backward pass as early as possible."""
    first = min(ranks - rank, micro_batches)  # forward passes before the first gradient arrives
    order = [f"F{m}" for m in range(first)]
    for m in range(micro_batches):
        order.append(f"B{m}")
        if first + m < micro_batches:
            order.append(f"F{first + m}")
    return order

# %% [markdown]
# A pass begins when its rank is free, and the activations or gradients from the neighbor have arrived. `run_pipeline`
# of `workshop/lessons/pipeline.py` returns what each rank does in each time slot.
#
# **Predict first:** 4 ranks and 4 micro-batches. Which of the two schedules ends earlier? How many micro-batches does
# rank 0 store at most, in each of them?

# %%
from workshop.lessons.pipeline import count_stored, run_pipeline

ORDERS = {"GPipe": order_gpipe, "1F1B": order_1f1b}
for name, order in ORDERS.items():
    draw_schedule(run_pipeline(order, 4, 4), f"{name}: 4 ranks, 4 micro-batches", "time slot")

# %%
print("idle time, and the largest number of micro-batches that a rank stores")
for micro_batches in (1, 4, 8, 32):
    formula = 3 / (micro_batches + 3)
    for name, order in ORDERS.items():
        rows = run_pipeline(order, 4, micro_batches)
        idle = sum(row.count("") for row in rows.values()) / sum(map(len, rows.values()))
        stored = [count_stored(row) for row in rows.values()]
        print(f"{micro_batches:3} micro-batches, {name:5}: {idle:.0%} idle, formula {formula:.0%}; stored by rank {stored}")
        assert abs(idle - formula) < 1e-9 and max(stored) == (micro_batches if name == "GPipe" else min(4, micro_batches))

# %% [markdown]
# The empty slots are the *bubble*: (N-1)/(M+N-1) of the time, in both schedules. With many micro-batches it gets
# small. The difference is the memory. In GPipe every rank stores the activations of all M micro-batches. In 1F1B rank
# r stores at most N - r, whatever M is, so M can be large. *Interleaved* schedules give each rank several groups of
# layers, which divides the bubble. *Zero-bubble* schedules divide a backward pass in two: the gradient of the input,
# which the neighbor waits for, and the gradient of the weights, which fills the empty slots.
#
# - **Sends:** B T C numbers per micro-batch and direction between neighbors, point to point. This is the least of all
#   methods, so a pipeline can use slow links between nodes.
# - **Costs:** the bubble, and a batch with many micro-batches. The first and last rank have the embedding and the head,
#   so the work must be balanced by hand.
# - **In PyTorch:** `torch.distributed.pipelining`.
#
# ## d. Context parallelism: a part of each sequence
#
# You will divide one sequence among ranks, and compute attention without any rank seeing all keys.
#
# With sequences of 100,000 tokens, the activations of a single sequence do not fit on a GPU. Every layer except
# attention works on each token separately, so each rank can take T/N tokens. In attention a query needs all keys. In
# *ring attention* keys and values travel around the ring, as in notebook 2. Each rank adds one block of keys at a time,
# with the online softmax of notebook 5: it keeps a running maximum, a running sum, and a running result.

# %%
draw_who_holds_what(
    {
        "queries, in every step": ["0...", ".1..", "..2.", "...3"],
        "keys and values, step 0": ["0...", ".1..", "..2.", "...3"],
        "keys and values, step 1": ["...3", "0...", ".1..", "..2."],
        "keys and values, step 2": ["..2.", "...3", "0...", ".1.."],
        "keys and values, step 3": [".1..", "..2.", "...3", "0..."],
    },
    "Ring attention on 4 ranks: queries stay, keys and values travel",
)

# %%
def attend_in_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of this rank's queries (T/N, hs) to the keys and values of all ranks. Collective."""
    maximum, total = torch.full((len(q), 1), -torch.inf), torch.zeros(len(q), 1)
    result, kv = torch.zeros_like(q), torch.cat([k, v], dim=1)
    for remaining in reversed(range(dist.get_world_size())):
        k, v = kv.chunk(2, dim=1)
        scores = q @ k.T / q.size(1) ** 0.5
        new_maximum = torch.maximum(maximum, scores.amax(1, keepdim=True))
        weights, decay = (scores - new_maximum).exp(), (maximum - new_maximum).exp()
        total, result = decay * total + weights.sum(1, keepdim=True), decay * result + weights @ v
        maximum = new_maximum
        if remaining:
            received = torch.empty_like(kv)
            collectives.exchange(kv, received)  # to the next rank, and from the previous one
            kv = received
    return result / total

# %%
def measure_ring_attention() -> float:
    """Return the largest difference between ring attention and attention over the full sequence."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = torch.randn(3, 256, 32, generator=torch.Generator().manual_seed(0))
    full = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    return (attend_in_ring(*(x.chunk(ranks)[rank] for x in (q, k, v))) - full.chunk(ranks)[rank]).abs().max().item()


difference = max(run_on_ranks(measure_ring_attention, 4))
print(f"max difference from attention in one process, on 4 ranks: {difference:.1e}")
assert difference < 1e-6

# %% [markdown]
# No rank ever had more than two blocks of keys. (This attention is not causal. With a causal mask, rank 0 would have
# little to do and the last rank the most. Real implementations therefore give each rank one early and one late part of
# the sequence.)
#
# - **Sends:** the keys and values of every layer, N - 1 times T/N tokens, while the current block computes.
# - **Costs:** it needs long sequences, so that the computation hides the communication.
# - **In PyTorch:** `torch.distributed.tensor.experimental.context_parallel`.
#
# ## e. Expert parallelism: some of the experts
#
# A *mixture of experts* replaces the MLP of a block by E MLPs, the experts. A small layer, the *router*, selects k of
# them for each token. The compute per token is that of k experts, and the model has the parameters of E. Today's models
# often have 64 to 256 small experts and select 8 of them, with one more expert that all tokens use.
#
# With expert parallelism each rank has E/N experts. A token travels to the rank of its expert, and back: two
# *all-to-alls* per layer in the forward pass, and two in the backward pass.

# %%
draw_who_holds_what(
    {
        "tokens before": ["0000", "1111", "2222", "3333"],
        "tokens at the experts": ["0123", "0123", "0123", "0123"],
        "expert weights": ["0...", ".1..", "..2.", "...3"],
        "tokens after": ["0000", "1111", "2222", "3333"],
    },
    "Expert parallelism on 4 ranks (tokens: the rank that they belong to)",
)

# %% [markdown]
# In an all-to-all, each rank keeps 1/N of its tokens. The ledger counts the bytes that a rank sends:

# %%
def exchange_tokens(C: int) -> float:
    """Send a quarter of this rank's 64 tokens to each rank. Return the bytes that the rank sends."""
    tokens = torch.randn(64, C)
    with CollectiveCounter() as counter:
        dist.all_to_all_single(torch.empty_like(tokens), tokens)
    return sum(row["ring_bytes"] for row in counter.rows.values())


sent = run_on_ranks(exchange_tokens, 4, C)[0]
print(f"one all-to-all of 64 tokens: {sent:,.0f} B per rank; formula n(N-1)/N = {64 * C * 4 * 3 / 4:,.0f} B")
assert sent == 64 * C * 4 * 3 / 4

# %% [markdown]
# - **Sends:** k B T C numbers per all-to-all, if the router selects k experts for each token.
# - **Costs:** the router may send most tokens to one expert. Its rank is then overloaded, and the others wait. Trainers
#   add a loss for balance, or limit the number of tokens of an expert and drop the rest.
#
# ## f. All of them together
#
# Large runs combine the methods, and put each one where its communication is cheap. A *device mesh* has one dimension
# for each:
#
# | method | divides | a rank sends per step (without factors (N-1)/N) | place |
# |---|---|---|---|
# | tensor parallelism | each layer | 8 L M B T C numbers (all-reduces of 4 L M B T C), and waits for them | within a node |
# | context parallelism | each sequence | keys and values of each layer, while it computes | within a node, or between nearby nodes |
# | expert parallelism | experts | four all-to-alls per layer and micro-batch | within a few nodes |
# | FSDP | model state | the weights, 2 M P + P numbers, while it computes | across nodes |
# | pipeline parallelism | layers | B T C numbers per micro-batch to each neighbor: activations forward, gradients back | across nodes |
# | DDP | nothing (the batch) | the gradients, 2P numbers, while it computes | farthest apart |
#
# You do not need all of them. For many models FSDP with activation checkpointing is enough, and it changes no line of
# the model. This is why the trainers of this repository use FSDP, and `make evaluate` also uses tensor parallelism.
#
# ## To take home
#
# 1. Data parallelism divides the batch; the other methods divide layers, depth, sequences and experts.
# 2. Tensor parallelism: column-parallel, then row-parallel, and one all-reduce at the end.
# 3. f is the identity forward and an all-reduce backward, and g is the reverse.
# 4. No rank ever has the full weights of a layer. The gradients of these weights need no reduction before the update.
# 5. Its volume grows with the tokens, and the next layer waits for it: keep it within a node.
# 6. A pipeline sends the least, and each rank is idle for (N-1)/(M+N-1) of the time. 1F1B limits the stored
#    activations.
# 7. Ring attention: queries stay, keys and values travel, and the online softmax adds the blocks.
# 8. Experts: two all-to-alls forward and two backward, and the balance is the problem.
# 9. Methods combine as dimensions of a mesh; the most demanding communication gets the fastest links.
# 10. A wrong backward pass can still lower the loss. Compare the losses with the baseline's.
#
# ## Exercises
#
# A program checks these exercises: `make exercise N=parallel.1` writes the task into `work/`.
#
# | exercise | task |
# |---|---|
# | `parallel.1` | write the two autograd functions of tensor parallelism |
# | `parallel.2` | order the passes of a pipeline, 1F1B |
# | `parallel.3` | write ring attention |
# | `collectives.1` to `collectives.3` | write the collectives of this chapter on send and receive |
# | `triton.2` | add a tile to an online softmax |
#
# **1. Biases.** Predict first: the model above has no biases. With `bias=True`, which part of each bias does a rank
# need in a column-parallel layer, and what goes wrong if every rank adds the full bias of a row-parallel layer?
#
# <details><summary>Hint</summary>
#
# A column-parallel layer needs the entries of its own channels. In a row-parallel layer, the all-reduce would add the
# bias N times. `take_part` gives it to rank 0 only, and zeros to the others. For training, the gradient of those zeros
# must not be applied, or the bias must be added after the all-reduce.
#
# </details>
#
# **2. Sequence parallelism.** Between a row-parallel layer and the next column-parallel layer, all ranks compute the
# same LayerNorm on the same activations. Predict first: an all-reduce is a reduce-scatter followed by an all-gather.
# Where can you put the two, so that each rank normalizes only its part of the tokens? What does it save?
#
# <details><summary>Hint</summary>
#
# Replace g by a reduce-scatter over the tokens, and f by an all-gather. In between, a rank has T/N tokens. The volume
# is the same, and the activations of LayerNorms and dropouts shrink to 1/N. One thing is easy to forget: the gradients
# of the LayerNorms are now sums over T/N tokens, so they need an all-reduce over the group. Without it, the ranks
# update their copies differently, and no error appears.
#
# </details>
