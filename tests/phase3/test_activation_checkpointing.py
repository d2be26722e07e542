"""DDP and activation checkpointing: "marked as ready twice", reproduced, with the ways out of it."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp.activation_checkpointing import checkpoint_activations
from workshop.ranks import run_on_ranks


class Twice(nn.Module):
    """A stem, and a block that is used once or twice, computed again in the backward by either form of checkpoint."""

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


def gradients(uses: int, reentrant: bool, how: str) -> tuple[str, list[Tensor]]:
    """What one backward says, and this rank's averaged gradients; every rank has the same input."""
    module = Twice(uses, reentrant)
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


FAILS = [(True, 2, "plain"), (True, 1, "find_unused_parameters"), (True, 2, "find_unused_parameters")]
SILENT = (True, 2, "fsdp")  # torch 2.13: no error, and the gradient of one of the two uses is lost


@pytest.mark.parametrize("how", ["plain", "static_graph", "find_unused_parameters", "fsdp"])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_ready_twice(reentrant, uses, how):
    """The reentrant form fails on DDP where a block is used twice, unless the graph is said to be static, and wherever
    unused parameters are looked for; the other form is right everywhere. FSDP marks no parameter ready, so it does not
    fail; but with the reentrant form and a block used twice it is no longer right either."""
    _, expected = gradients(uses, reentrant, "none")
    for said, found in run_on_ranks(gradients, 2, uses, reentrant, how, show=False):
        if (reentrant, uses, how) in FAILS:
            assert "marked as ready twice" in said or "mark a variable ready only once" in said.lower(), said
        else:
            assert not said
            if (reentrant, uses, how) != SILENT:
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", ["full", "selective", "every_2"])
def test_checkpointing_changes_no_number(mode):
    """With dropout, the loss and gradients of blocks that are computed again are those of others, to the bit."""
    shape = GPTConfig(3, 2, 32, 16, True, 80, dropout=0.3)
    results = []
    for again in ("none", mode):
        model = GPT(shape)
        model.init_weights(1)
        checkpoint_activations(model, again)
        torch.manual_seed(2)
        x = torch.randint(80, (2, 16))
        loss = model(x, x)[1]
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
