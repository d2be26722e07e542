"""Exercises on FSDP: sharded layers by hand, gradient synchronization, and activation checkpointing."""

from workshop.exercises.checks.fsdp import (
    check_gradient_sync,
    check_recompute,
    check_sharded_linear,
)
from workshop.exercises.exercise import Exercise, Mistake, plant_mistake

EXERCISES = [
    Exercise(
        name="fsdp.1",
        title="Shard a linear layer by hand",
        targets=("notebooks/06_fsdp.py:ShardedLinear",),
        task="""Each rank stores some rows of W and has its own examples. Write the autograd function y = x W^T:
        the forward pass all-gathers W, and the backward pass all-gathers it again and reduce-scatters its
        gradient. Between the two, no rank may keep the full weight. This is all that FSDP does for a layer. The
        code is from notebook 6.""",
        minutes=20,
        difficulty="medium",
        ranks=4,
        check=check_sharded_linear,
        nudge="What does save_for_backward keep alive?",
        idea="Save x and the rows. In the backward pass: dx = dy W and dW = dy^T x; then average dW over the ranks.",
        line="reduce_scatter(drows",
        mistakes=(
            plant_mistake("dist.ReduceOp.AVG", "dist.ReduceOp.SUM", "Data parallelism needs the mean"),
            Mistake(
                (
                    ("ctx.save_for_backward(x, rows)", "ctx.save_for_backward(x, rows, gather_rows(rows))"),
                    ("x, rows = ctx.saved_tensors", "x, rows, full = ctx.saved_tensors"),
                    ("dy @ gather_rows(rows)", "dy @ full"),
                ),
                "If the full weight is saved",
            ),
            plant_mistake(
                "reduce_scatter(drows, dy.T @ x, dist.ReduceOp.AVG)",
                "drows.copy_((dy.T @ x).chunk(dist.get_world_size())[dist.get_rank()])",
                "only this rank's examples",
            ),
        ),
    ),
    Exercise(
        name="fsdp.2",
        title="Reduce gradients only when it is needed",
        targets=("phase3_fsdp.fsdp:set_gradient_sync",),
        task="""A rank runs several micro-batches per step. By default only the last one reduces the gradients, and
        the ones before accumulate full gradients; fsdp_sync_every_micro_batch trades communication for memory. With
        hybrid sharding, the gradients are all-reduced between the replicas once per step in both cases.""",
        minutes=10,
        difficulty="medium",
        ranks=4,
        check=check_gradient_sync,
        nudge="FSDPModule has one method for the reduce-scatter, and one for the all-reduce between replicas.",
        idea="set_requires_gradient_sync, set_requires_all_reduce.",
        line="parallel_model.set_requires_gradient_sync",
        mistakes=(
            plant_mistake(
                "last or config.fsdp_sync_every_micro_batch", "True", "reduce only after the last backward pass"
            ),
            plant_mistake("last or config.fsdp_sync_every_micro_batch", "last", "reduce after every backward pass"),
            plant_mistake(
                "set_requires_all_reduce(last)", "set_requires_all_reduce(True)", "all-reduces between replicas"
            ),
        ),
    ),
    Exercise(
        name="fsdp.3",
        title="Recompute a block in the backward pass",
        targets=("phase3_fsdp.activation_checkpointing:recompute_in_backward",),
        task="""Sharding does not shrink activations. Return a forward that saves only its inputs, and recomputes
        everything else in the backward pass. With a policy, it also saves the outputs that the policy selects. It
        must work in DDP if a block is used twice, and with dropout.""",
        minutes=15,
        difficulty="medium",
        check=check_recompute,
        nudge="torch.utils.checkpoint.checkpoint has two forms. Which one runs no backward pass inside the backward "
        "pass?",
        idea="checkpoint(forward, *inputs, use_reentrant=False), and context_fn for a policy.",
        line="return checkpoint(",
        mistakes=(
            plant_mistake("use_reentrant=False", "use_reentrant=True", "marked as ready twice"),
            plant_mistake(
                "return checkpoint(forward, *inputs, use_reentrant=False, **context)",
                "return forward(*inputs)",
                "are still saved",
            ),
            plant_mistake(
                "use_reentrant=False,", "use_reentrant=False, preserve_rng_state=False,", "other dropout masks"
            ),
        ),
    ),
]
