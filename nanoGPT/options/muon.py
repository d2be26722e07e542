"""Muon for the matrices of the blocks, and AdamW for all other parameters: `--optimizer=muon` loads this module.

Phases 1 and 3 assign each matrix to one rank, because Muon's update needs the full matrix.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nanoGPT.optim import param_groups
from nanoGPT.shared_optimizer import SharedOptimizer, run_closure
from nanoGPT.train_config import TrainConfig

Param = TypeVar("Param", bound=Tensor)


def configure_muon(
    model: nn.Module,
    config: TrainConfig,
    muon: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = torch.optim.Muon,
) -> "MuonWithAdamW":
    """Return Muon (Jordan et al. 2024) for the matrices of the blocks, and AdamW for all other parameters.

    Both use the same learning rate.

    Args:
        model: on its device.
        config: provides the learning rate, the weight decay and AdamW's betas.
        muon: creates Muon from its parameter groups.
    """
    matrices, others = muon_groups(model, config)
    return MuonWithAdamW(
        muon([matrices]),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True),
    )


def muon_groups(model: nn.Module, config: TrainConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the parameter group of Muon, and the parameter groups of AdamW.

    Muon orthogonalizes the update of a full matrix. It is not used for embeddings, whose rows are looked up one by one.
    Its update is scaled to the size of AdamW's update (Liu et al. 2025), so both use the same learning rate and weight
    decay.

    Raises:
        ValueError: no block of the model has a matrix to train.
    """
    blocks: Any = getattr(model, "blocks", [])
    hidden = {id(p) for block in blocks for p in block.parameters() if p.dim() == 2}
    matrices = {
        "params": [p for p in model.parameters() if p.requires_grad and id(p) in hidden],
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }
    if not matrices["params"]:
        raise ValueError("Muon has no matrix to train: it takes those of the modules in the model's `blocks`")
    others = [
        {**group, "params": [p for p in group["params"] if id(p) not in hidden]}
        for group in param_groups(model, config.weight_decay)
    ]
    return matrices, others


def assign_owners(params: Sequence[Param], world_size: int, cost: Callable[[Tensor], int]) -> dict[Param, int]:
    """Return one owner rank per parameter. The largest costs go first, each to the least loaded rank (Graham 1969)."""
    load = [0] * world_size
    owner = {}
    for param in sorted(params, key=cost, reverse=True):
        owner[param] = load.index(min(load))
        load[owner[param]] += cost(param)
    return owner


def count_multiplications(matrix: Tensor) -> int:
    """Return the multiplications in one Newton-Schulz iteration of Muon on an (m, n) matrix X with m <= n.

    The iteration computes A = X X', the square of A, and B X.
    """
    m, n = sorted(matrix.shape)
    return 2 * m * m * n + m * m * m


class MuonWithAdamW(SharedOptimizer):
    """Muon and AdamW as one optimizer, with the parameter groups and the state of both."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        for optimizer in optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both optimizers. `closure`, if given, computes the loss first."""
        loss = run_closure(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss
