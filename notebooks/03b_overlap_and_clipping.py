# %% [markdown]
# # 3b. ZeRO-1: overlap, and the norm of a sharded gradient
#
# *25 minutes. Read [notebook 3](03_zero1.ipynb) first, for buckets, slices and shards.*
#
# `Zero1Optimizer` reduces a bucket while the backward pass still computes the next one. You record when this happens.
# Then you clip sharded gradients by a wrong norm, in two ways, and average them by a wrong factor. Nothing raises an
# error, and most of the loss curves look normal.
#
# Open `phase1_zero1/zero1.py` and `phase1_zero1/buckets.py` next to this page. You need no GPU.

# %%
import dataclasses

import torch
import torch.distributed as dist
from torch.optim import AdamW

from nanoGPT.dataset import TokenData
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import clip_grads, grad_norm, param_groups
from phase1_zero1.parallelize import Zero1Config
from phase1_zero1.zero1 import Zero1Optimizer
from workshop.ranks import run_on_ranks

config = Zero1Config(  # that of notebook 3
    device="cpu", block_size=32, batch_size=4, gradient_accumulation_steps=4, n_layer=2, n_head=2, n_embd=64
)


def create_model_and_data(config: Zero1Config) -> tuple[GPT, TokenData]:
    """Return the data, and a model with its initial weights, which are the same on every rank."""
    data = TokenData(config)
    model = GPT(GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": data.tokenizer["vocab_size"]}))
    model.init_weights(config.seed)
    return model, data


def make_adamw(model: GPT) -> torch.optim.Optimizer:
    return AdamW(param_groups(model, weight_decay=0.1), lr=2e-3)


def make_flat_zero1(model: GPT, bucket_mb: float = 25.0) -> torch.optim.Optimizer:
    return Zero1Optimizer(param_groups(model, weight_decay=0.1), AdamW, lr=2e-3, bucket_mb=bucket_mb)

# %% [markdown]
# ## a. Overlap communication with the backward pass
#
# You will record when each bucket is reduced and all-gathered in a real step.
#
# A reduce-scatter does not have to wait for the end of the backward pass. The gradients of the last block are ready
# while the gradients of the first block are still to be computed. `Zero1Optimizer` uses this in three ways:
#
# - it fills the buckets from the last parameter to the first;
# - a hook on each parameter, as in section (b) of notebook 3, marks the gradient as ready in its bucket;
# - a bucket whose gradients are all ready starts its reduce-scatter asynchronously.
#
# All ranks must start their buckets in the same order. Otherwise bucket 1 of one rank would be added to bucket 2 of
# another rank. In the first step this order is the order of the bucket numbers. Rank 0 then broadcasts the order in
# which its buckets became ready, and all ranks use this order from the second step on.
#
# Below, buckets of at most 0.07 MiB give 8 buckets, numbered 0 to 7. The last one contains the LayerNorm weights.
# `record_timeline` wraps the methods of each bucket. It records the time of each call, and how many of the 15 gradients
# were ready.
#
# **Predict first:** how many gradients are ready when the reduce-scatter of bucket 7 starts in step 0, and how many in
# step 1? How many of the 8 buckets start their reduce-scatter before `backward()` returns?

# %%
from workshop.lessons.zero1 import count_early_reduces, print_ready_gradients, record_timeline
from workshop.lessons.zero1_pictures import draw_timeline


def record_steps(config: Zero1Config, bucket_mb: float, steps: int) -> dict:
    """Run steps, and return the parameters of each bucket and the recorded events of each step on this rank."""
    model, data = create_model_and_data(config)
    return record_timeline(model, lambda: make_flat_zero1(model, bucket_mb), data, steps)


timeline = run_on_ranks(record_steps, 2, dataclasses.replace(config, batch_size=32), 0.07, 6)[0]
print_ready_gradients(timeline)
assert all(count_early_reduces(step) == 8 for step in timeline["steps"])

# %% [markdown]
# All eight buckets start before `backward()` returns. From step 1 on, seven of them start before the last gradient is
# ready. Bucket 6 must be the last. The token embedding is also the output layer, so its gradient is complete only when
# the backward pass reaches the embedding at the start of the model. In step 0 the LayerNorm bucket waits for bucket 6,
# and in step 1 it does not.
#
# The next figure shows the fastest of the later steps on rank 0, with the real times of this run. The micro-batches are
# larger here than before, so that the passes take long enough to be visible.
#
# **Predict first:** in which order are the buckets updated and all-gathered, and why in this order?

# %%
draw_timeline(timeline)

# %% [markdown]
# The optimizer updates the buckets in the reverse order of their reduce-scatters. The all-gather of one bucket runs
# while the next bucket is updated. The backward pass reaches the first layers last, and the next forward pass needs
# them first. So the last reduced bucket is updated and all-gathered first.
#
# Read this figure with two cautions:
#
# - The bar of a reduce-scatter ends when the optimizer has finished waiting for it. The transfer itself may have ended
#   earlier, but gloo does not report this time.
# - The ranks share the CPU cores with gloo's threads, so an early start saves little time here. With GPUs and a
#   network, computation and communication run at the same time.
#
# ## b. Gradient clipping by a wrong norm
#
# You will make two common mistakes, and see why they are hard to notice.
#
# Clipping scales the gradient down when its norm is above a limit. The norm is the norm of the *full* gradient, but
# after the reduce-scatter no rank has the full gradient. We try two wrong versions:
#
# - *local*: each rank computes the norm of its own shards, and scales them by this norm;
# - *torch*: each rank calls `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` after the reduce-scatter. This is
#   the usual function for clipping, and has nothing to do with the implementation `torch` of notebook 3.
#
# **Predict first:** is a local norm smaller or larger than the right norm? What do the other slices of `.grad` contain
# after a reduce-scatter? Does `torch` return the same number on all ranks?

# %%
MAX_NORM = 1.0


def clip_by_local_norm(model: GPT, optimizer: Zero1Optimizer) -> float:
    grads = optimizer.reduce_gradients()  # the gradients of this rank's shards
    norm = grad_norm(grads)  # the bug: there is no sum over the ranks
    clip_grads(grads, norm, MAX_NORM)
    return norm.item()


def clip_with_torch(model: GPT, optimizer: Zero1Optimizer) -> float:
    optimizer.reduce_gradients()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()


def clip_by_global_norm(model: GPT, optimizer: Zero1Optimizer) -> float:
    return optimizer.clip_grad_norm_(MAX_NORM).item()


# %% [markdown]
# `clip_by_global_norm` is the right version. The reference clips in one process, which has the full gradient. This is
# the training loop of notebook 3, with a function that changes the gradients before the update:

# %%
from workshop.lessons.zero1 import print_norms


def train_by_hand(config: Zero1Config, make_optimizer, before_step, steps: int) -> dict:
    """Train on the calling ranks, and return the losses, the final parameters and the norms."""
    model, data = create_model_and_data(config)
    optimizer, curve, norms = make_optimizer(model), [], []
    micro_batches = range(dist.get_rank(), config.gradient_accumulation_steps, dist.get_world_size())
    for step in range(steps):
        loss_sum = torch.zeros((), dtype=torch.float64)
        for micro_batch in micro_batches:
            optimizer.require_backward_grad_sync = micro_batch == micro_batches[-1]
            loss = model(*data.batch("train", step, micro_batch))
            (loss / len(micro_batches)).backward()
            loss_sum += loss.detach()
        norms.append(before_step(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        curve.append(loss_sum.item() / config.gradient_accumulation_steps)
    params = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"curve": curve, "params": params, "norms": norms}


def clip_in_one_process(model: GPT, optimizer: torch.optim.Optimizer) -> float:
    grads = [p.grad for p in model.parameters()]
    norm = grad_norm(grads)
    clip_grads(grads, norm, MAX_NORM)
    return norm.item()


CLIPPING = {"local": clip_by_local_norm, "torch": clip_with_torch, "right": clip_by_global_norm}
[reference] = run_on_ranks(train_by_hand, 1, config, make_adamw, clip_in_one_process, 12)
results = {name: run_on_ranks(train_by_hand, 4, config, make_flat_zero1, clip, 12) for name, clip in CLIPPING.items()}
print_norms(results, reference)

# %% [markdown]
# Both mistakes produce four different norms on the four ranks. A local norm is too small, so *local* clips too little:
# a rank whose own norm is below the limit does not clip at all. As soon as one rank scales its slice and another does
# not, the direction of the gradient changes. After the reduce-scatter,
# the `.grad` of a rank contains the mean in its own slice only. The other slices contain the rank's own gradient, or
# whatever gloo or NCCL left there. *torch* adds these values to the norm.
#
# The last line shows the solution. The squares of the shards add up, so each rank only has to communicate one number.
# `optimizer.clip_grad_norm_(max_norm)` sums the squares of its shards in fp64 and all-reduces this scalar. All ranks
# then scale by the same factor. (In fp32 the norm would depend on the slice boundaries, and therefore on N.)
#
# What effect do these mistakes have on training?
#
# **Predict first:** the ranks scale by different factors. Do the models on the four ranks become different? What
# is the max loss difference from one process, and in which step do the curves separate?

# %%
for name, ranks in results.items():
    is_equal = all(torch.equal(rank["params"], ranks[0]["params"]) for rank in ranks)
    differences = [abs(a - b) for a, b in zip(ranks[0]["curve"], reference["curve"])]
    print(f"{name:6} same model on all ranks: {is_equal}   loss differences:", *(f"{each:.0e}" for each in differences))
assert max(abs(a - b) for a, b in zip(results["right"][0]["curve"], reference["curve"])) < 1e-5

# %% [markdown]
# The models on the four ranks stay equal. Each slice is updated once, by its owner, and then all-gathered by all ranks.
# A check that compares the ranks with each other therefore finds no error. The loss curves look normal, too. In steps 0
# and 1 even the losses are almost right, because AdamW's first update hardly depends on the scale of the gradient.
#
# Only the comparison with one process shows the mistake. This comparison is sensitive, because the right version agrees
# with one process to about 1e-7.
#
# ## c. AdamW hides a wrong scale
#
# You will train with gradients that are too large, with two optimizers.
#
# The most common mistake is a sum over the ranks instead of a mean: on 4 ranks all gradients are 4 times too large.
#
# **Predict first:** by how much do the losses change with AdamW, and by how much with SGD?

# %%
def multiply_by_4(model: GPT, optimizer: torch.optim.Optimizer) -> float:
    for p in model.parameters():
        p.grad *= 4
    return grad_norm([p.grad for p in model.parameters()]).item()


def keep(model: GPT, optimizer: torch.optim.Optimizer) -> float:
    return grad_norm([p.grad for p in model.parameters()]).item()


def make_sgd(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


print("loss of each step, and the gradient norm of the first one")
for name, make_optimizer in (("AdamW", make_adamw), ("SGD", make_sgd)):
    for scale, before_step in (("mean", keep), ("sum", multiply_by_4)):
        [result] = run_on_ranks(train_by_hand, 1, config, make_optimizer, before_step, 8)
        print(f"{name:6} {scale:5}", *(f"{loss:.4f}" for loss in result["curve"]), f"  norm {result['norms'][0]:.2f}")

# %% [markdown]
# With AdamW the two curves agree to four digits. Its update is the mean of the gradient, divided by the root of the
# mean of its square: a constant factor cancels. With SGD the factor multiplies the learning rate, so the curve is
# different. So a run with AdamW that sums instead of averaging looks right. A comparison of gradient norms shows the
# factor, and so does a resume on another number of ranks, because the factor then changes. Clipping hides it if the
# right norm is above the limit in every step, and shows it otherwise. This is why every run logs the gradient norm,
# and why the tests of this repository compare it with one process.
#
# ## To take home
#
# 1. A bucket is reduced as soon as it is full, during the backward pass. All ranks must reduce their buckets in the
#    same order.
# 2. Clip by the global norm: the square root of the sum of the squares of all shards.
# 3. A local norm raises no error, and the models of all ranks stay equal. Only the comparison with one process shows
#    the mistake.
# 4. AdamW hides a constant factor of the gradient. The gradient norm shows it.
#
# ## Exercises
#
# `make exercise N=zero1.5` is about clipping, and `make exercise N=zero1.6` about the order of collectives.
# `docs/exercises.md` lists all exercises.
#
# **1. Huge buckets.** Call `record_steps` with `bucket_mb=1000`. Predict first: how many reduce-scatters start before
# the last gradient is ready?
#
# <details><summary>Hint</summary>
#
# There are two buckets, one per parameter group. The bucket of the matrices can start only when the last gradient, the
# one of `wte`, is ready. So its communication does not overlap with the backward pass.
#
# </details>
