"""The optimizer, its parameter groups, the learning rate, and the global gradient norm."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoGPT.train_config import TrainConfig


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and embeddings decay; biases and LayerNorm gains do not. The order is nanoGPT's."""
    params = [p for _, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def configure_adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) over `param_groups`, in its fused form."""
    groups = param_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def configure_muon(model: nn.Module, config: TrainConfig) -> "MuonWithAdamW":
    """Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for all else, at one learning rate."""
    matrices, others = muon_groups(model, config)
    return MuonWithAdamW(
        torch.optim.Muon([matrices]),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True),
    )


def muon_groups(model: nn.Module, config: TrainConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Muon's parameter group, and AdamW's.

    Muon orthogonalises a matrix's update as a whole, so embeddings, which are looked up row by row, are not for it.
    Its update is scaled to the size of AdamW's (Liu et al. 2025), so that learning rate and weight decay are the same.
    """
    hidden = {id(p) for name, p in model.named_parameters() if p.dim() == 2 and ".h." in name}
    matrices = {
        "params": [p for p in model.parameters() if p.requires_grad and id(p) in hidden],
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }
    others = [
        {**group, "params": [p for p in group["params"] if id(p) not in hidden]}
        for group in param_groups(model, config.weight_decay)
    ]
    return matrices, others


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers behind the face of one: their groups in a row, their state in one mapping."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both; `closure` computes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
            self.state.update(part.state)
        return loss


def configure_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that the configuration names."""
    return configure_muon(model, config) if config.optimizer == "muon" else configure_adamw(model, config)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then half a cosine down to min_lr, which stays."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    decay_steps = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    if step >= decay_steps:
        return config.min_lr
    done = (step - config.warmup_iters) / (decay_steps - config.warmup_iters)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - config.min_lr)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def grad_norm(grads: Sequence[Tensor], sharded_over: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm of all gradients together, summed in fp64: in fp32 it would depend on how they are cut.

    Args:
        grads: this rank's gradients, or its shards of them.
        sharded_over: the ranks whose shards make up the whole; None where every rank holds all of it. Collective
            over these ranks when given.

    Returns:
        A scalar on the gradients' device, the same on every rank.
    """
    exact = torch.float32 if grads and grads[0].device.type == "mps" else torch.float64
    norms = torch._foreach_norm(list(grads), 2, exact) if grads else [torch.zeros((), dtype=exact)]
    squares = torch.stack(norms).square().sum()
    if sharded_over is not None:
        dist.all_reduce(squares, group=sharded_over)
    return squares.sqrt()


def clip_grads(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that a global norm above `max_norm` becomes it; 0 clips nothing."""
    if max_norm > 0 and grads:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(grads), scale.to(grads[0].dtype))
