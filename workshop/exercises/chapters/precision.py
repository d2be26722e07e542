"""Exercises on mixed precision: loss scaling, autocast, fp32 master copies, and stochastic rounding."""

from workshop.exercises.checks.precision import (
    check_autocast,
    check_master_copies,
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
        title="Update parameters in bf16 through fp32 master copies",
        targets=("phase1_zero1.buckets:Bucket.update_shards",),
        task="""A parameter in bf16 does not notice small updates. A rank therefore stores an fp32 copy of its shard,
        the master, and the inner optimizer updates only this copy: shard.tensor. Pass the options of the parameter
        group, such as a new learning rate, to self.inner. Step it. Then copy each master into its place in
        self.flat_params, which is self.flat_params[shard.bucket_slice]. For a parameter in fp32 the shard is a view
        into flat_params, and there is nothing to copy. self.inner is None on a rank that has no shard.""",
        minutes=15,
        difficulty="medium",
        ranks=2,
        check=check_master_copies,
        nudge="In which direction are values copied after the update, and which of the two tensors is rounded?",
        idea="flat_params gets the rounded values. The master is never read back from them.",
        line="self.flat_params[shard.bucket_slice].copy_",
        mistakes=(
            plant_mistake(
                "self.flat_params[shard.bucket_slice].copy_(shard.tensor.view(-1))",
                "shard.tensor.copy_(self.flat_params[shard.bucket_slice])",
                "the parameters have not changed",
            ),
            plant_mistake(
                "self.flat_params[shard.bucket_slice].copy_(shard.tensor.view(-1))",
                "self.flat_params[shard.bucket_slice].copy_(shard.tensor)\n"
                "            shard.tensor.copy_(self.flat_params[shard.bucket_slice])",
                "the master copies are rounded",
            ),
            plant_mistake("if name in self.options and", "if name not in self.options and", "learning rate"),
            plant_mistake("    if self.inner:\n", "    if True:\n", "'NoneType' object"),
        ),
    ),
    Exercise(
        name="precision.4",
        title="Choose where autocast is on",
        targets=("nanoGPT.distributed.runtime:Runtime.autocast",),
        task="""The parameters are in fp32, and self.dtype is the dtype of the computation. Return a context for the
        forward pass in which matrix products run in self.dtype on devices of the type self.device.type. In fp32 the
        context must change nothing. self.uses_autocast is False with FSDP, which casts the parameters itself, before
        it all-gathers them.""",
        minutes=5,
        difficulty="easy",
        check=check_autocast,
        nudge="Which two runs need no autocast?",
        idea="contextlib.nullcontext() for fp32 and for FSDP; otherwise torch.autocast with both arguments.",
        line="return torch.autocast",
        mistakes=(
            plant_mistake(" or not self.uses_autocast", "", "FSDP has already cast"),
            plant_mistake(
                "torch.autocast(self.device.type, self.dtype)", "torch.autocast(self.device.type)", "float16"
            ),
            plant_mistake(
                "return torch.autocast(self.device.type, self.dtype)", "return contextlib.nullcontext()", "bfloat16"
            ),
        ),
    ),
    Exercise(
        name="precision.5",
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
