"""Exercises on mixed precision: loss scaling, and stochastic rounding."""

from workshop.exercises.checks.precision import (
    check_scaling,
    check_skipped_steps,
    check_stochastic_rounding,
)
from workshop.exercises.exercise import Exercise, plant_mistake

EXERCISES = [
    Exercise(
        name="precision.1",
        title="Scale the loss, and unscale the gradients",
        targets=("nanoGPT.optim:LossScaler.scale_loss", "nanoGPT.optim:LossScaler.unscale_grads"),
        task="""In float16, a gradient below 6e-8 becomes zero. Loss scaling multiplies the loss by self.scale, a power
        of two, so the backward pass computes larger gradients. Before clipping and the update, the gradients are
        divided by the scale again. Write both methods. If self.is_enabled is False, they change nothing. The list of
        gradients may be empty.""",
        minutes=5,
        difficulty="easy",
        check=check_scaling,
        nudge="Which object does the optimizer read: the list of gradients, or the tensors in it?",
        idea="Multiply the loss by self.scale, and each gradient by 1 / self.scale, in place.",
        line="torch._foreach_mul_(list(grads)",
        mistakes=(
            plant_mistake("return loss * self.scale if self.is_enabled else loss", "return loss", "round to zero"),
            plant_mistake("torch._foreach_mul_(list", "torch._foreach_mul(list", "in place"),
            plant_mistake("1 / self.scale", "self.scale", "multiplied by the scale a second time"),
            plant_mistake("if self.is_enabled and grads:", "if self.is_enabled:", "a rank without gradients"),
        ),
    ),
    Exercise(
        name="precision.2",
        title="Skip the same steps on all ranks",
        targets=("nanoGPT.optim:LossScaler.step",),
        task="""If the loss scale is too large, a gradient becomes infinite. Then the step must be skipped, and
        self.scale halved. After self.GROWTH_INTERVAL steps without an overflow, self.scale is doubled;
        self.steps_since_change counts them. Each rank may have other gradients: those of its own shards. `norm` is
        the global gradient norm. If the scale falls below self.MIN_SCALE, raise NonFiniteLoss. If self.is_enabled is
        False, only step the optimizer.""",
        minutes=15,
        difficulty="medium",
        ranks=2,
        check=check_skipped_steps,
        nudge="One gradient on one rank is infinite. Which number shows it on every rank?",
        idea="Decide by norm.isfinite(): if it is finite, step and count; else halve the scale and count from 0 again.",
        line="if norm.isfinite()",
        mistakes=(
            plant_mistake(
                "if norm.isfinite():",
                'if all(p.grad.isfinite().all() for p in optimizer.param_groups[0]["params"]):',
                "has updated its shard, and another rank has not",
            ),
            plant_mistake("if norm.isfinite():", "if not norm.isnan():", "must be skipped"),
            plant_mistake("self.scale / 2, 0", "self.scale / 2, self.steps_since_change", "from 0 again"),
            plant_mistake("= self.scale / 2, 0", "= self.scale, 0", "halve it after each overflow"),
            plant_mistake("= 2 * self.scale, 0", "= self.scale, 0", "may grow again"),
        ),
    ),
    Exercise(
        name="precision.3",
        title="Round to bf16 stochastically",
        targets=("notebooks/09_mixed_precision.py:round_stochastically",),
        task="""Some trainers store parameters in bf16 without a master copy. They round an update up or down at
        random, so that the expected value is right. bf16 is fp32 without its lower 16 bits. x.view(torch.int32)
        returns the bits of fp32 numbers. Add a random integer from 0 to 2^16 - 1 to the bits, set the lower 16 bits to
        zero, and convert the result to bf16.""",
        minutes=15,
        difficulty="medium",
        check=check_stochastic_rounding,
        nudge="A number is a quarter of the way from one bf16 number to the next. How often must it be rounded up?",
        idea="A carry out of the lower 16 bits rounds up. Its probability is the lower 16 bits, divided by 2^16.",
        line="bits = ",
        mistakes=(
            plant_mistake(
                "x.view(torch.int32) + torch.randint(0, 2**16, x.shape, dtype=torch.int32)",
                "x.view(torch.int32)",
                "always rounded toward zero",
            ),
            plant_mistake("torch.randint(0, 2**16,", "torch.randint(0, 2**15,", "rounded up too seldom"),
            plant_mistake("(bits & -(2**16))", "bits", "a second time"),
        ),
    ),
]
