# %% [markdown]
# # 6b. Activation checkpointing
#
# *25 minutes. Read [notebook 6](06_fsdp.ipynb) first, for the memory of a step with FSDP.*
#
# FSDP shards parameters, gradients and optimizer state. Activations do not shrink when you add ranks. **Activation
# checkpointing** saves fewer of them and computes the rest again in the backward pass. You measure what each mode saves
# and costs. Then you meet a well-known error of DDP, and a wrong gradient of FSDP without any error.
#
# Open `phase3_fsdp/activation_checkpointing.py` and `activation_bytes.py` next to this page. You need no GPU.

# %%
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from nanoGPT.model import GPT, GPTConfig
from workshop.ranks import run_on_ranks

# %% [markdown]
# ## a. What a block saves
#
# In this section you learn which tensors a block saves for its backward pass, and how the modes of activation
# checkpointing trade time for memory.
#
# A backward pass needs tensors that its forward pass computed. `activation_bytes.py` lists every tensor that a block
# saves, and the reason:

# %%
from workshop.lessons.fsdp import print_saved_activations

B, T, C = 8, 64, 256  # so large that the measured time is not only Python overhead
shape = GPTConfig(n_layer=4, n_head=2, n_embd=C, block_size=T, bias=False, vocab_size=75)
print_saved_activations(shape, B, T)

# %% [markdown]
# A block saves 8 large tensors, and a few small ones. Their total size is 16 times that of one (B, T, C) tensor, or
# 16 BTC for short. (B is the number of sequences, T the tokens per sequence, and C the channels per token.) The last
# column shows which of them remain with activation checkpointing (recomputation):
#
# - `full` saves only the input of the block. The backward pass first runs the forward pass of the block again.
# - `selective` saves the input, and what is expensive to compute: the outputs of matrix products and of attention. The
#   backward pass recomputes the rest, normalization and GELU. PyTorch calls this selective activation checkpointing.
#   (With dropout, attention is recomputed too, because it draws dropout masks.)
# - `every_2` applies `full` to every second block.
#
# Do not confuse `selective` with the selective recomputation of Korthikanti et al. (2022). Their method recomputes only
# the attention core (scores, softmax, dropout, and the product with the values) and saves the rest.
#
# **Predict first:** how many of the 16 BTC remain for a block with `full`, and how many with `selective`? (The matrix
# products are `c_attn`, `c_fc` and the two `c_proj`. The outputs of the two `c_proj` are not in the list above, because
# the backward pass does not need them. `selective` saves them too.) A forward pass takes half the FLOPs of a backward
# pass. How much longer does a step take with `full`, at most?

# %%
from phase3_fsdp.activation_bytes import activation_bytes
from phase3_fsdp.activation_checkpointing import checkpoint_activations
from workshop.lessons.fsdp import count_btc_per_block, measure_activation_bytes, measure_relative_time, print_modes

MODES = ("none", "every_2", "selective", "full")
models = {mode: GPT(shape) for mode in MODES}
for mode, model in models.items():
    model.init_weights(1337)
    checkpoint_activations(model, mode)
x = torch.randint(shape.vocab_size, (B, T))

measured_bytes = {mode: measure_activation_bytes(model, x) for mode, model in models.items()}
predicted_bytes = {mode: activation_bytes(shape, B, T, mode=mode) for mode in MODES}
relative_time = measure_relative_time(models, x)
print_modes(measured_bytes, predicted_bytes, count_btc_per_block(shape, B, T), relative_time)

# %%
gradients = {mode: torch.cat([p.grad.flatten() for p in model.parameters()]) for mode, model in models.items()}
is_same = all(torch.equal(each, gradients["none"]) for each in gradients.values())
print("gradients bitwise identical in every mode:", is_same)
assert is_same

# %% [markdown]
# Count FLOPs first. `full` runs the forward pass of every block a second time, so a step takes at most 4/3 of the
# time without checkpointing. `every_2` adds half of that, at most 7/6. `selective` recomputes almost no FLOPs. It has
# two other costs. It recomputes elementwise operations, which are limited by memory bandwidth. And a Python function
# decides for every operator whether to save its output: in a model with few channels this takes longer than what it
# saves.
#
# In this small model, `selective` therefore has no advantage: `every_2` takes about as long, and saves more memory (8.5
# BTC per block on average remain, instead of 11). In a model with many channels, `selective` costs less time. Which one
# is better depends on the model and the hardware, so measure your own model.
#
# With `full` each block saves one tensor of (B, T, C). The embeddings, the last LayerNorm and the head save the same
# tensors in every mode.
#
# ## b. The error "marked as ready twice"
#
# In this section you learn why the older form of checkpointing fails with DDP, and why it is silently wrong with FSDP.
#
# PyTorch has two forms of checkpointing. The older, *reentrant* form runs a second `backward` inside the backward pass.
# The *non-reentrant* form uses hooks for saved tensors, and section (a) uses it. With DDP the reentrant form can
# raise a well-known error. The example below applies one block twice, as models with shared layers do, and checkpoints
# each use.
#
# **Predict first:** DDP registers a hook on each parameter to count the gradients that are ready. If a backward pass
# runs inside the backward pass, how often does the hook of the block's weight run?

# %%
from torch.utils.checkpoint import checkpoint


class SharedBlock(nn.Module):
    """A linear layer, then a block that is applied twice."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.mode == "around both":
            return checkpoint(lambda x: self.block(self.block(x)), x, use_reentrant=True)
        for _ in range(2):
            reentrant = self.mode == "reentrant"
            x = self.block(x) if self.mode == "none" else checkpoint(self.block, x, use_reentrant=reentrant)
        return x


# %% [markdown]
# `compute_block_gradients` runs one backward pass with DDP or FSDP:

# %%
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

INPUT = torch.linspace(-1, 1, 8).view(2, 4)  # the same on every rank, so the mean gradient equals each rank's gradient


def compute_block_gradients(mode: str, parallel: str, **options) -> list[Tensor]:
    """Return the gradients of the block's weight and bias. A RuntimeError can be raised by DDP."""
    module = SharedBlock(mode)
    if parallel == "FSDP":
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(module.block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    parallel_model = DDP(module, **options) if parallel == "DDP" else module
    parallel_model(INPUT).sum().backward()
    grads = [p.grad for p in module.block.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


# %%
from workshop.ranks import RankFailed

expected = compute_block_gradients("none", "one process")
try:
    message = ""
    run_on_ranks(compute_block_gradients, 2, "reentrant", "DDP")
except RankFailed as failure:
    message = str(failure).partition("RuntimeError: ")[2]
print(message.split(" This error")[0], "[...]")
print(message.strip().splitlines()[-1])
assert "marked as ready twice" in message

# %% [markdown]
# The hook runs twice: each use of the block has an inner backward pass, and each of them accumulates into the same
# weight. The next cell shows three solutions, and then FSDP.
#
# **Predict first:** FSDP does not count gradients. Does it raise an error? Is its gradient correct?

# %%
CASES = {
    "DDP, non-reentrant": ("non-reentrant", "DDP", {}),
    "DDP, reentrant, static_graph=True": ("reentrant", "DDP", {"static_graph": True}),
    "DDP, one checkpoint around both uses": ("around both", "DDP", {}),
    "FSDP, reentrant": ("reentrant", "FSDP", {}),
    "FSDP, non-reentrant": ("non-reentrant", "FSDP", {}),
}
print("case                                    norm of the weight gradient   verdict")
print(f"{'one process, no checkpointing':38} {expected[0].norm():28.5f}   reference")
results = {}
for name, (mode, parallel, options) in CASES.items():
    results[name] = run_on_ranks(lambda: compute_block_gradients(mode, parallel, **options), 2)[0]
    is_correct = all(torch.allclose(a, b) for a, b in zip(results[name], expected))
    print(f"{name:38} {results[name][0].norm():28.5f}   {'correct' if is_correct else 'WRONG, without an error'}")
    assert is_correct or name == "FSDP, reentrant"

# %% [markdown]
# With FSDP the reentrant form raises no error, and the gradient is wrong. Which gradient is it? To find out, give each
# use its own block with the same weights:

# %%
module = SharedBlock("none")
first, second = SharedBlock("none").block, SharedBlock("none").block  # the same weights, because the seed is the same
second(first(module.stem(INPUT))).sum().backward()
for name, block in (("first", first), ("second", second)):
    print(f"gradient from the {name} use: norm {block[0].weight.grad.norm():.5f}")
if torch.__version__.startswith("2.13"):
    is_first_part = torch.allclose(results["FSDP, reentrant"][0], first[0].weight.grad)
    print("the wrong gradient equals the gradient from the first use:", is_first_part)
    assert is_first_part

# %% [markdown]
# FSDP keeps only the gradient of the first use. The gradient of the second use, which is computed earlier, is lost.
# Training would continue with the wrong gradient, and its loss curve would look normal. This is one more reason why
# `checkpoint_activations` uses the non-reentrant form. Remember the first solution: `use_reentrant=False`.
#
# Two remarks on DDP. `static_graph=True` promises that every step has the same graph as the first step, and DDP then
# counts how often each hook runs. `find_unused_parameters=True` makes the reentrant form fail even if a block is used
# once.
#
# ## To take home
#
# 1. Activations do not shrink with more ranks. Activation checkpointing reduces them, and costs compute.
# 2. A block saves 16 B T C numbers; with `selective` 11, and with `full` only 1.
# 3. `full` makes a step at most 4/3 as long. The gradients are the same to the last bit in every mode.
# 4. Use `use_reentrant=False`. If a block is used twice, the reentrant form fails with DDP, and gives wrong gradients
#    with FSDP.
#
# ## Exercises
#
# In `make exercise N=fsdp.3` you write activation checkpointing of a block yourself. `docs/exercises.md` lists all
# exercises.
