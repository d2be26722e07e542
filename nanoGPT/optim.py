"""AdamW and its parameter groups, the global gradient norm, and loss scaling."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoGPT.errors import NonFiniteLoss, import_optional
from nanoGPT.train_config import TrainConfig


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return nanoGPT's two parameter groups: matrices and embeddings with weight decay, the others without."""
    params = [p for _, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def configure_adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return torch's fused AdamW (Loshchilov & Hutter 2019) over `param_groups`."""
    groups = param_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def configure_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `config.optimizer` names."""
    if config.optimizer == "muon":
        return import_optional("nanoGPT.options.muon", "--optimizer=muon").configure_muon(model, config)
    return configure_adamw(model, config)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state of an optimizer, by a step with zero gradients and learning rate zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def grad_norm(grads: Sequence[Tensor], sharded_over: dist.ProcessGroup | None = None) -> Tensor:
    """Return the global 2-norm of the gradients.

    Args:
        grads: the gradients of this rank, full or sharded.
        sharded_over: the process group over which the gradients are sharded; the call is then collective over this
            group. None if every rank has the full gradients.

    Returns:
        A scalar on the device of the gradients, the same on every rank.
    """
    # In fp32 the result would depend on how the gradients are sharded. MPS has no fp64.
    dtype = torch.float32 if grads and grads[0].device.type == "mps" else torch.float64
    norms = torch._foreach_norm(list(grads), 2, dtype) if grads else [torch.zeros((), dtype=dtype)]
    squares = torch.stack(norms).square().sum()
    if sharded_over is not None:
        dist.all_reduce(squares, group=sharded_over)
    return squares.sqrt()


def clip_grads(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients in place so that their global norm is at most `max_norm`. 0 disables clipping."""
    if max_norm > 0 and grads:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(grads), scale.to(grads[0].dtype))


class LossScaler:
    """Loss scaling for float16 (Micikevicius et al. 2018). It prevents small gradients from rounding to zero.

    If the global gradient norm is not finite, the step is skipped, as in Megatron-LM. Every rank has the same norm,
    even if gradients are sharded, so all ranks skip the same steps. The scale is a power of two, so scaling adds no
    rounding error. It is halved when a gradient overflows, and doubled after 2,000 steps without an overflow.

    Args:
        is_enabled: True for float16. For other dtypes nothing is scaled and no step is skipped.
    """

    GROWTH_INTERVAL = 2_000  # steps
    MIN_SCALE = 2.0**-14

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.scale = 2.0**16 if is_enabled else 1.0
        self.steps_since_change = 0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, whose backward pass computes scaled gradients."""
        return loss * self.scale if self.is_enabled else loss

    def unscale_grads(self, grads: Sequence[Tensor]) -> None:
        """Divide the gradients by the scale, in place. A gradient that has overflowed stays infinite or NaN."""
        if self.is_enabled and grads:
            torch._foreach_mul_(list(grads), 1 / self.scale)

    def step(self, optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
        """Step the optimizer, unless a gradient has overflowed, and adapt the scale.

        This waits for the GPU only in float16.

        Args:
            optimizer: the optimizer; its gradients are already unscaled.
            norm: the global gradient norm, the same on every rank.

        Raises:
            NonFiniteLoss: the gradients overflow even at the smallest scale.
        """
        if not self.is_enabled:
            optimizer.step()
            return
        if norm.isfinite():
            optimizer.step()
            self.steps_since_change += 1
            if self.steps_since_change == self.GROWTH_INTERVAL:
                self.scale, self.steps_since_change = 2 * self.scale, 0
            return
        self.scale, self.steps_since_change = self.scale / 2, 0
        if self.scale < self.MIN_SCALE:
            raise NonFiniteLoss(
                f"float16 gradients overflow even with a loss scale of {self.scale:g}: use --dtype=bfloat16 or "
                "float32, or resume from the last checkpoint with a lower --learning_rate"
            )

    def state_dict(self) -> dict[str, float]:
        """Return the state that a resumed run needs; an empty dict if scaling is off."""
        if not self.is_enabled:
            return {}
        return {"scale": self.scale, "_growth_tracker": self.steps_since_change}  # torch.amp.GradScaler's names

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the scale of a float16 run, also one that torch.amp.GradScaler saved. Other runs have no state."""
        if self.is_enabled and state:
            self.scale, self.steps_since_change = float(state["scale"]), int(state["_growth_tracker"])
