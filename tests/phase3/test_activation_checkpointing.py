"""Activation checkpointing with DDP and FSDP: the DDP error "marked as ready twice", and ways to avoid it."""

import functools
import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import partitioners
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nanoGPT.model import GPT, GPTConfig
from phase2_triton.apply import apply_kernels
from phase3_fsdp.activation_checkpointing import checkpoint_activations
from workshop.ranks import run_on_ranks


class ModuleWithReusedBlock(nn.Module):
    """A stem, and a block that is used once or twice and recomputed by either form of checkpoint."""

    def __init__(self, uses: int, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.uses, self.reentrant = uses, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.uses):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


def compute_gradients(uses: int, reentrant: bool, how: str) -> tuple[str, list[Tensor]]:
    """Run one backward pass. Return its error message and this rank's averaged gradients.

    Every rank has the same input, so the expected gradients are those of one process.
    """
    module = ModuleWithReusedBlock(uses, reentrant)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(module.block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    options = {how: True} if how in ("static_graph", "find_unused_parameters") else {}
    wrapped = module if how in ("none", "fsdp") else DDP(module, **options)  # type: ignore[arg-type]
    try:
        wrapped(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error), []
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return "", [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


FAILING_CASES = [(True, 2, "plain"), (True, 1, "find_unused_parameters"), (True, 2, "find_unused_parameters")]
SILENT_CASE = (True, 2, "fsdp")  # torch 2.13: no error, but the gradient of one use is lost


HOW = ("plain", "static_graph", "find_unused_parameters", "fsdp")


@functools.cache
def compute_all_gradients() -> dict[tuple[bool, int, str], list[tuple[str, list[Tensor]]]]:
    """Return what `compute_gradients` returns on each of 2 ranks, which start only once, for each case."""
    cases = list(itertools.product((True, False), (1, 2), HOW))

    def run_all_cases() -> list[tuple[str, list[Tensor]]]:
        return [compute_gradients(uses, reentrant, how) for reentrant, uses, how in cases]

    results = run_on_ranks(run_all_cases, 2, show=False)
    return {case: [of_rank[i] for of_rank in results] for i, case in enumerate(cases)}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_ready_twice(reentrant, uses, how):
    """The reentrant form fails on DDP if a block is used twice, unless static_graph is set.

    With find_unused_parameters it fails even if the block is used once. The non-reentrant form is always correct. FSDP
    does not mark parameters as ready, so it never fails. But with the reentrant form and a block used twice, its
    gradients are wrong.
    """
    _, expected = compute_gradients(uses, reentrant, "none")
    for message, gradients in compute_all_gradients()[reentrant, uses, how]:
        if (reentrant, uses, how) in FAILING_CASES:
            assert "marked as ready twice" in message or "mark a variable ready only once" in message.lower(), message
        else:
            assert not message
            if (reentrant, uses, how) != SILENT_CASE:
                torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("mode", ["full", "selective", "every_2"])
def test_checkpointing_gives_bitwise_identical_results(mode):
    """With dropout, the loss and gradients of recomputed blocks are identical to those of blocks without
    checkpointing."""
    shape = GPTConfig(3, 2, 32, 16, True, 80, dropout=0.3)
    results = []
    for recomputation in ("none", mode):
        model = GPT(shape)
        model.init_weights(1)
        checkpoint_activations(model, recomputation)
        torch.manual_seed(2)
        x = torch.randint(80, (2, 16))
        loss = model(x, x)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class AttentionCounter(TorchDispatchMode):
    """Counts the forward passes of attention."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += "attention" in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "kernels", "calls"), [("full", False, 4), ("selective", False, 2), ("selective", True, 2)]
)
def test_selective_does_not_recompute_attention(mode, kernels, calls):
    """Without dropout, `selective` saves the output of attention, torch's or the kernel's; `full` computes it twice."""
    model = GPT(GPTConfig(2, 2, 32, 16, True, 80))
    model.init_weights(1)
    if kernels:
        apply_kernels(model, "attention")
    checkpoint_activations(model, mode)
    x = torch.randint(80, (2, 16))
    loss = model(x, x)
    with AttentionCounter() as backward:
        loss.backward()
    with AttentionCounter() as forward:
        model(x, x)
    assert forward.calls == 2 and forward.calls + backward.calls == calls


def test_compiled_recomputation_draws_from_the_seeded_generator(monkeypatch):
    """A seed determines the loss and the gradients of a compiled model with dropout, whose blocks are recomputed.

    On a GPU, torch.compile would otherwise give the dropout of a recomputed attention a generator of its own.
    """
    monkeypatch.setattr(torch._functorch.config, "graphsafe_rng_functionalization", True)  # the default
    monkeypatch.setattr(partitioners, "supports_graphsafe_rng", lambda device: True)  # as for a GPU
    model = GPT(GPTConfig(1, 2, 16, 8, vocab_size=31, dropout=0.5))
    model.init_weights(0)
    checkpoint_activations(model, "full")
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    x, results = torch.zeros(2, 8, dtype=torch.int64), []
    with mock.patch.object(partitioners, "apply_graphsafe_rng_functionalization") as create_generator:
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            loss = compiled(x, x)
            results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert not create_generator.called
    assert all(map(torch.equal, results[0], results[1])) and not torch.equal(results[0][0], results[2][0])
