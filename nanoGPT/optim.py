"""The optimizer, its parameter groups, the learning rate, the global gradient norm, and loss scaling."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoGPT.errors import NonFiniteLoss
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


@runtime_checkable
class HasStateBytes(Protocol):
    """An optimizer that can say how large its state on this rank becomes."""

    def expected_state_bytes(self) -> int:
        """Return the bytes of state after a step."""
        ...


def adamw_bytes(params: Iterable[Tensor]) -> int:
    """Return the bytes of AdamW's state: two moments in fp32, and one count of steps for each tensor."""
    return sum(8 * p.numel() + 4 for p in params)


def muon_bytes(params: Iterable[Tensor]) -> int:
    """Return the bytes of Muon's state: one momentum in fp32."""
    return sum(4 * p.numel() for p in params)


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers behind the face of one: their groups in a row, their state in one mapping."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def expected_state_bytes(self) -> int:
        """Return the bytes of state after a step: one momentum for each matrix, AdamW's state for the rest."""
        muon, adamw = self.parts
        matrices = [p for group in muon.param_groups for p in group["params"]]
        return muon_bytes(matrices) + adamw_bytes(p for group in adamw.param_groups for p in group["params"])

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


class LossScaler:
    """Loss scaling for float16 (Micikevicius et al. 2018): a scaled loss keeps small gradients above zero.

    The global gradient norm decides whether a step is taken, as in Megatron-LM: every rank has the same norm, also
    where gradients are sharded, so all ranks skip the same steps. The scale is a power of two, so that scaling rounds
    nothing. It is halved when a gradient overflows, and doubled after 2,000 steps without an overflow.

    Args:
        is_enabled: False for every other dtype: losses and gradients stay as they are, and every step is taken.
    """

    GROWTH_INTERVAL = 2_000  # steps
    SMALLEST = 2.0**-14

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.scale = 2.0**16 if is_enabled else 1.0
        self.steps_since_change = 0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss whose backward pass computes scaled gradients."""
        return loss * self.scale if self.is_enabled else loss

    def unscale_grads(self, grads: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, in place. One that has overflowed stays infinite or NaN."""
        if self.is_enabled and grads:
            torch._foreach_mul_(list(grads), 1 / self.scale)

    def step(self, optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
        """Step the optimizer, unless a gradient has overflowed, and adapt the scale. Waits for the GPU in float16 only.

        Args:
            optimizer: with unscaled gradients.
            norm: their global norm, the same on every rank.

        Raises:
            NonFiniteLoss: gradients overflow at any scale, so that no step would ever be taken again.
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
        if self.scale < self.SMALLEST:
            raise NonFiniteLoss(
                f"float16 gradients overflow even when the loss is scaled by {self.scale:g}: use --dtype=bfloat16 or "
                "float32, or resume from the last checkpoint with a lower --learning_rate"
            )

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs; nothing where scaling is off."""
        if not self.is_enabled:
            return {}
        return {"scale": self.scale, "_growth_tracker": self.steps_since_change}  # torch.amp.GradScaler's names

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with the scale of a float16 run, which torch.amp.GradScaler may have saved; other runs have none."""
        if self.is_enabled and state:
            self.scale, self.steps_since_change = float(state["scale"]), int(state["_growth_tracker"])
