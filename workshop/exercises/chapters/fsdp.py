"""Exercises on FSDP: sharded layers by hand, gradient synchronization, and activation checkpointing."""

from workshop.exercises.checks.fsdp import (
    check_gradient_sync,
    check_recompute,
    check_sharded_linear,
    check_unit,
    train_full,
)
from workshop.exercises.exercise import Exercise, Mistake, plant_mistake

EXERCISES = [
    Exercise(
        name="fsdp.1",
        title="Shard a linear layer by hand",
        targets=("notebooks/06_fsdp.py:ShardedLinear",),
        task="""Each rank stores some rows of W and has its own examples. Write the autograd function y = x W^T:
        the forward pass all-gathers W, and the backward pass all-gathers it again and reduce-scatters its
        gradient. Between the two, no rank may keep the full weight. x is (examples, in), and the gradient of the rows
        is the mean over the ranks. This is all that FSDP does for a layer. The code is from notebook 6.""",
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
            Mistake(
                (
                    (
                        "return x @ gather_rows(rows).T",
                        "ctx.weight = gather_rows(rows)\n        return x @ ctx.weight.T",
                    ),
                    ("dy @ gather_rows(rows)", "dy @ ctx.weight"),
                ),
                "still in memory",
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
            plant_mistake("last or config.fsdp_sync_every", "not last or config.fsdp_sync_every", "reduce only after"),
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
    Exercise(
        name="fsdp.4",
        title="All-gather and free the parameters of a unit",
        targets=("phase3_fsdp.by_hand:Unit.wait_for_params", "phase3_fsdp.by_hand:Unit.free"),
        task="""FSDP by hand: a unit has full parameters only while it computes. self.start_all_gather() puts the
        output of an all-gather and its handle into self.pending, unless self.is_full or it has already started. Call
        it, wait, give each parameter its memory back, and copy the rows of all ranks to their places. self.ranks is
        N, and self.sizes are the elements that a rank has sent of each parameter, with padding. Then set self.is_full
        and clear self.pending. `free` releases the memory, and also that of an unused prefetch (wait for it first).
        Autograd has saved these tensors: in the backward pass it must find the same objects, with the same values.""",
        minutes=25,
        difficulty="hard",
        ranks=2,
        check=check_unit,
        prepare=train_full,
        nudge="The output is (ranks, sum of self.sizes). Where in it are the rows of the second parameter?",
        idea="Split the output by columns, flatten the part of a parameter, and drop the padding at its end. "
        "untyped_storage().resize_ changes the memory of a tensor, and _unsafe_preserve_version_counter hides the copy "
        "from autograd.",
        line="columns = received.view",
        mistakes=(
            plant_mistake(
                "with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(param):",
                "with torch.no_grad():",
                "modified by an inplace operation",
            ),
            plant_mistake("        param.untyped_storage().resize_(0)\n", "        pass\n", "still has"),
            plant_mistake("self.is_full, self.pending = True, None", "self.pending = None", "gathers again"),
            plant_mistake("self.is_full, self.pending = True, None", "self.is_full = True", "still holds the buffer"),
            plant_mistake("    self.pending = None\n", "", "the buffer of its prefetch"),
            plant_mistake(
                "received.view(self.ranks, -1).split(self.sizes, dim=1)",
                "[part.view(self.ranks, -1) for part in received.split([self.ranks * size for size in self.sizes])]",
                "The first rows of a parameter come from rank 0",
            ),
        ),
    ),
    Exercise(
        name="fsdp.5",
        title="Reduce the gradients of a unit",
        targets=("phase3_fsdp.by_hand:Unit.reduce_gradients",),
        task="""FSDP by hand: after its last backward pass, a unit has full gradients of this rank's micro-batches.
        Reduce-scatter all of them in one collective, in fp32: each shard gets the mean of its rows. Free the full
        gradients. A parameter without a gradient keeps none, but counts as zeros in the collective. self.shards[i] is
        this rank's part of self.params[i], and pad(tensor, size) adds zeros.""",
        minutes=25,
        difficulty="hard",
        ranks=2,
        check=check_unit,
        prepare=train_full,
        nudge="Rank r gets part r of the input. Which elements of which parameters must be in part r?",
        idea="View each padded gradient as (ranks, elements of a shard), and concatenate the parameters along dim 1.",
        line="sent = torch.cat(parts, dim=1)",
        mistakes=(
            plant_mistake("dist.ReduceOp.AVG", "dist.ReduceOp.SUM", "not the mean"),
            plant_mistake("        param.grad = None\n", "", "still has its full gradient"),
            plant_mistake(
                "    reduce_scatter(received, sent.view(-1), dist.ReduceOp.AVG)\n",
                "    dist.all_reduce(sent, dist.ReduceOp.AVG)\n    received.copy_(sent[dist.get_rank()])\n",
                "reduce each unit in one of them",
            ),
            plant_mistake(
                "torch.cat(parts, dim=1)",
                "torch.cat([part.view(-1) for part in parts]).view(self.ranks, -1)",
                "its own rows",
            ),
            plant_mistake(" if has else None", "", "weight decay changes it"),
            Mistake(
                (
                    (
                        "dtype=torch.float32) if param.grad is None else param.grad.float()",
                        "dtype=self.dtype) if param.grad is None else param.grad",
                    ),
                    ("part[: shard.numel()].view_as(shard)", "part[: shard.numel()].view_as(shard).float()"),
                ),
                "add up gradients in fp32",
            ),
        ),
    ),
]
