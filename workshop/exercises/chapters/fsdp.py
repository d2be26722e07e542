"""Exercises on FSDP: sharded layers by hand, units, gradient synchronization, and activation checkpointing."""

from workshop.exercises.checks.fsdp import (
    check_copy_rows,
    check_gradient_sync,
    check_recompute,
    check_row_range,
    check_shard_group,
    check_sharded_linear,
    check_units,
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
        title="Compute which rows a rank stores",
        targets=("nanoGPT.distributed.sharding:row_range",),
        task="""FSDP shards each parameter by rows. A checkpoint and the initial values need to know which rows a
        rank has, also if the number of ranks does not divide the number of rows. Return the range of shard
        `index`.""",
        minutes=5,
        difficulty="easy",
        ranks=4,
        check=check_row_range,
        nudge="How are 5 rows distributed over 4 ranks, if all shards except the last ones must have the same size?",
        idea="Each shard has ceil(rows / num_shards) rows. Both ends are at most `rows`.",
        line="return min",
        mistakes=(
            plant_mistake("-(-rows // num_shards)", "rows // num_shards", "do not cover each row once"),
            plant_mistake("min((index + 1) * size, rows)", "(index + 1) * size", "Limit both ends"),
            plant_mistake(
                "return min(index * size, rows), min((index + 1) * size, rows)",
                "return rows * index // num_shards, rows * (index + 1) // num_shards",
                "ceil(rows / ranks)",
            ),
        ),
    ),
    Exercise(
        name="fsdp.3",
        title="Reduce gradients only when it is needed",
        targets=("phase3_fsdp.fsdp:set_gradient_sync",),
        task="""A rank runs several micro-batches per step. By default only the last one reduces the gradients, and
        the ones before accumulate full gradients; fsdp_sync_every_micro_batch trades communication for memory. Set
        this for a model in FSDP and for one in DDP. With hybrid sharding, the gradients are
        all-reduced between the replicas once per step in both cases.""",
        minutes=10,
        difficulty="medium",
        ranks=4,
        check=check_gradient_sync,
        nudge="FSDPModule has one method for the reduce-scatter, and one for the all-reduce between replicas.",
        idea="set_requires_gradient_sync, set_requires_all_reduce; DDP has the attribute require_backward_grad_sync.",
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
        name="fsdp.4",
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
    Exercise(
        name="fsdp.5",
        title="Copy this rank's rows of a full tensor",
        targets=("phase3_fsdp.fsdp:copy_own_rows",),
        task="""A checkpoint of the baseline contains full tensors. To resume it with FSDP on any number of ranks,
        each rank copies its own rows into its shard. The target may be a DTensor, a plain tensor, or a scalar.""",
        minutes=10,
        difficulty="easy",
        ranks=2,
        check=check_copy_rows,
        nudge="own_rows and local_shard describe the two sides of the copy.",
        idea="Select full[begin:end] if the target has rows, and copy into local_shard(target).",
        line="full = full[",
        mistakes=(
            plant_mistake("full[begin:end]", "full[: end - begin]", "does not have its rows"),
            plant_mistake(
                "    if target.dim():\n        begin, end = own_rows(target)\n        full = full[begin:end]\n",
                "    begin, end = own_rows(target)\n    full = full[begin:end]\n",
                "a scalar without rows",
            ),
        ),
    ),
    Exercise(
        name="fsdp.6",
        title="Apply fully_shard in the right order",
        targets=("phase3_fsdp.fsdp:shard_model",),
        task="""`units` are the blocks of the model, and `shard_options` the arguments that all units share. Shard
        the blocks and the model, so that each block is all-gathered shortly before it runs, and freed afterwards
        if config.fsdp_reshard_after_forward is set. Write the lines where the stub raises NotImplementedError.""",
        minutes=10,
        difficulty="medium",
        ranks=2,
        check=check_units,
        nudge="Which parameters does fully_shard(model) take?",
        idea="Units first, from the inside to the outside; the root last.",
        line="fully_shard(unit",
        mistakes=(
            plant_mistake(
                """    for unit in reversed(units):  # inner units first
        fully_shard(unit, reshard_after_forward=config.fsdp_reshard_after_forward, **shard_options)
    fully_shard(model, **shard_options)""",
                "    fully_shard(model, **shard_options)",
                "Shard the units before the root",
            ),
            plant_mistake(
                "reshard_after_forward=config.fsdp_reshard_after_forward",
                "reshard_after_forward=False",
                "a unit is freed after",
            ),
            plant_mistake("    fully_shard(model, **shard_options)  #", "    #", "The root is not sharded"),
            plant_mistake(
                "    for unit in reversed(units):",
                "    fully_shard(model, **shard_options)\n    for unit in reversed(units):",
                "shard the units first",
            ),
        ),
    ),
    Exercise(
        name="fsdp.7",
        title="Find the ranks that share one copy of the model",
        targets=("phase3_fsdp.fsdp:shard_group",),
        task="""With fsdp_shard_size=2 on 4 ranks, there are two replicas of the model, each sharded over 2 ranks.
        The norm of the gradient is a sum over the shards of one replica. Return the process group of this rank's
        replica.""",
        minutes=10,
        difficulty="medium",
        ranks=4,
        check=check_shard_group,
        nudge="A DTensor knows its device mesh. Which dimension of the mesh is the one of the shards?",
        idea="param.device_mesh.get_group(-1) for any parameter; None if it is not a DTensor.",
        line="return param.device_mesh",
        mistakes=(
            plant_mistake(
                "param.device_mesh.get_group(-1) if isinstance(param, DTensor) else None",
                "dist.group.WORLD",
                "every shard counts twice",
            ),
            plant_mistake(
                "param.device_mesh.get_group(-1) if isinstance(param, DTensor) else None",
                "None",
                "of this rank's shards",
            ),
            plant_mistake("get_group(-1)", "get_group(0)", "times the norm of the full gradient"),
        ),
    ),
]
