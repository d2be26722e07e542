"""Checks of the exercises on mixed precision."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanoGPT.errors import NonFiniteLoss
from nanoGPT.optim import LossScaler, grad_norm
from workshop.exercises.exercise import expect

TINY = 2.0**-30  # rounds to zero in float16


def check_scaling(answer: ModuleType, _: Any) -> None:
    scaler, weight = LossScaler(True), torch.ones(4, requires_grad=True)
    loss = (weight.half().float() * TINY).sum()
    scaler.scale_loss(loss).backward()
    assert weight.grad is not None
    scaled = weight.grad.clone()
    expect(
        bool((scaled != 0).all()),
        f"Gradients of {TINY:.0e} round to zero in float16, because the loss is not scaled: return the loss times "
        "self.scale.",
    )
    expect(
        torch.equal(scaled, torch.full((4,), TINY * scaler.scale)),
        f"The scaled gradient is {scaled[0]:.1e} instead of {TINY * scaler.scale:.1e}, the gradient times the scale.",
    )
    scaler.unscale_grads([weight.grad])
    expect(
        not torch.equal(weight.grad, scaled),
        "The gradients are still scaled: the optimizer reads the tensors themselves, so divide them in place.",
    )
    expect(
        not torch.equal(weight.grad, scaled * scaler.scale),
        "The gradients are multiplied by the scale a second time: divide them by the scale.",
    )
    expect(torch.equal(weight.grad, torch.full((4,), TINY)), f"The gradient is {weight.grad[0]:.1e}, not {TINY:.1e}.")
    infinite = torch.tensor([float("inf"), 1.0])
    scaler.unscale_grads([infinite])
    expect(
        bool(infinite[0].isinf()), "An infinite gradient must stay infinite: the global norm must show the overflow."
    )
    try:
        scaler.unscale_grads([])
    except RuntimeError:
        expect(False, "The call fails on a rank without gradients: torch._foreach_mul_ needs at least one tensor.")
    off, gradient = LossScaler(False), torch.ones(2)
    off.unscale_grads([gradient])
    is_same = off.scale_loss(loss) is loss and bool((gradient == 1).all())
    expect(is_same, "With is_enabled=False, the loss and the gradients must not change.")


def check_skipped_steps(answer: ModuleType, _: Any) -> None:
    rank, scaler, param = dist.get_rank(), LossScaler(True), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([param], lr=0.1)

    def step(overflowing_rank: int | None = None) -> list[bool]:
        """Run a step on this rank's shard, and return which ranks have updated theirs."""
        before = param.detach().clone()
        param.grad = torch.full((4,), float("inf") if rank == overflowing_rank else 0.5)
        answer.step(scaler, optimizer, grad_norm([param.grad], dist.group.WORLD))
        updates: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(updates, not torch.equal(param.detach(), before))
        return updates

    scale = scaler.scale
    expect(
        all(step()) and scaler.scale == scale, "A step with finite gradients updates every shard, with the same scale."
    )
    for overflowing_rank in (1, 0):
        updates = step(overflowing_rank)
        story = f"A gradient on rank {overflowing_rank} is infinite."
        expect(
            all(updates) or not any(updates),
            f"{story} Rank {updates.index(True) if True in updates else 0} has updated its shard, and another rank has "
            "not: the model is now a mixture of two steps. Decide by `norm`, which is the same on every rank.",
        )
        expect(not any(updates), f"{story} The step must be skipped: the update would make parameters infinite or NaN.")
        scale /= 2
        expect(
            scaler.scale == scale,
            f"{story} The scale is {scaler.scale:g} instead of {scale:g}: halve it after each overflow.",
        )
    check_growth(scaler, step)
    before = param.detach().clone()
    param.grad = torch.full((4,), float("nan"))
    answer.step(scaler, optimizer, torch.tensor(float("nan")))
    expect(
        torch.equal(param.detach(), before),
        "The norm is NaN, and the optimizer steps: a step with NaN must be skipped too.",
    )
    scaler.scale = scaler.MIN_SCALE
    try:
        step(0)
    except NonFiniteLoss:
        pass
    else:
        expect(False, "Gradients overflow at the smallest scale, and no error appears: raise NonFiniteLoss.")
    off, before = LossScaler(False), param.detach().clone()
    param.grad = torch.full((4,), float("nan"))
    answer.step(off, optimizer, torch.tensor(float("nan")))
    is_same = torch.equal(param.detach(), before) or off.scale != 1
    expect(not is_same, "With is_enabled=False, only step the optimizer: the trainer itself stops at a loss of NaN.")


def check_growth(scaler: LossScaler, step: Any) -> None:
    """Check that the scale is doubled after 3 steps without an overflow."""
    scaler.GROWTH_INTERVAL = 3
    scale = scaler.scale
    for overflowing_rank in (None, None, 1, None, None):
        step(overflowing_rank)
    expect(
        scaler.scale == scale / 2 and scaler.steps_since_change == 2,
        f"After an overflow and 2 more steps, the scale is {scaler.scale:g}, and the count of steps is "
        f"{scaler.steps_since_change}: an overflow means that the steps must be counted from 0 again.",
    )
    for factor in (1, 1, 1, 2):
        step()
        expect(
            scaler.scale == scale * factor,
            f"The scale is {scaler.scale:g} instead of {scale * factor:g}. After GROWTH_INTERVAL steps without an "
            "overflow it may grow again: double it, and count from 0.",
        )


def check_stochastic_rounding(answer: ModuleType, _: Any) -> None:
    torch.manual_seed(0)
    low, step, count = 1.0, 2.0**-7, 20_000  # the next bf16 number after 1 is 1 + 2^-7
    for fraction in (0.75, 0.25):
        x = torch.full((count,), low + fraction * step)
        rounded = answer.round_stochastically(x)
        expect(rounded.dtype == torch.bfloat16, f"The result has the dtype {rounded.dtype} instead of bfloat16.")
        values = sorted(set(rounded.tolist()))
        share = (rounded.float() > low).float().mean().item()
        story = f"A number {fraction} of the way from one bf16 number to the next"
        expect(
            values != [low],
            f"{story} is always rounded toward zero: add random bits before you set the lower 16 bits to zero.",
        )
        expect(
            values == [low, low + step],
            f"{story} becomes {values}: only its two neighbors are right. If the lower 16 bits are not zero, the "
            "conversion to bf16 rounds a second time.",
        )
        expect(
            abs(share - fraction) < 0.02,
            f"{story} is rounded up in {share:.0%} of all cases: it is rounded up too seldom or too often. The random "
            "integers must have all values from 0 to 2^16 - 1.",
        )
    exact = torch.tensor([0.0, 1.0, -3.0, 2.0**-100])
    expect(
        torch.equal(answer.round_stochastically(exact).float(), exact),
        "A number that bf16 can represent must not change.",
    )
    negative = answer.round_stochastically(torch.full((count,), -low - 0.25 * step)).float().mean().item()
    expect(abs(negative + low + 0.25 * step) < 0.02 * step, "The expected value of a negative number is wrong.")
