"""Exercises on data parallelism by hand."""

from workshop.exercises.checks.ddp import check_buffer, check_overlap, compute_mean_gradients
from workshop.exercises.exercise import Exercise, Mistake, plant_mistake

EXERCISES = [
    Exercise(
        name="ddp.1",
        title="Average all gradients in one buffer",
        targets=("workshop.ddp:average_in_buffer",),
        task="""In data parallelism every rank has the gradients of its own micro-batches, and all ranks need their
        mean. One collective per parameter pays the latency many times. Copy all gradients into one flat buffer,
        all-reduce it once, and copy the mean back: copy_back(buffer, grads) copies the parts of the buffer into the
        gradients. A parameter without a gradient is not in the buffer, and stays without one.""",
        minutes=10,
        difficulty="easy",
        ranks=4,
        check=check_buffer,
        prepare=compute_mean_gradients,
        nudge="The gradients have different shapes. What do they have in common?",
        idea="Concatenate the flattened gradients, and divide the buffer again with the function copy_back.",
        line="buffer = torch.cat",
        mistakes=(
            plant_mistake("dist.ReduceOp.AVG", "dist.ReduceOp.SUM", "not the mean"),
            plant_mistake("    copy_back(buffer, grads)\n", "", "copy the averaged values back"),
            plant_mistake(
                "    dist.all_reduce(buffer, dist.ReduceOp.AVG)\n    copy_back(buffer, grads)\n",
                "    for grad in grads:\n        dist.all_reduce(grad, dist.ReduceOp.AVG)\n",
                "pays the latency",
            ),
        ),
    ),
    Exercise(
        name="ddp.2",
        title="Average gradients during the backward pass",
        targets=(
            "workshop.ddp:OverlappedAverage._on_gradient_ready",
            "workshop.ddp:OverlappedAverage._start",
            "workshop.ddp:OverlappedAverage.wait",
        ),
        task="""The gradients of the last layers are ready long before those of the first ones. A hook calls
        _on_gradient_ready when the gradient of a parameter is complete. Start the all-reduce of a bucket there, and
        let `wait` finish all of them. self.buckets has the parameters of each bucket, self.bucket_of[param] is the
        number of a bucket, self.missing counts the gradients of each bucket that are not ready, and self.started
        lists the buckets that have started; self._begin_step() resets the last two. The hook also runs in earlier
        micro-batches, where self.is_last is False. On another rank gradients may arrive in another order, but all
        ranks must start the buckets in one order. A bucket may have no gradients on any rank. Its buffer is then empty.
        self._grads(bucket) returns the gradients of a bucket. `wait` calls self._begin_step() at its end.""",
        minutes=25,
        difficulty="medium",
        ranks=2,
        check=check_overlap,
        prepare=compute_mean_gradients,
        nudge="Bucket 1 is complete, and bucket 0 is not. May this rank start bucket 1?",
        idea="Start the bucket with the number len(self.started), as long as it is complete. So every rank starts "
        "buckets 0, 1, 2 and so on. In `wait`, start those that never became complete.",
        line="while (number :=",
        mistakes=(
            plant_mistake("if self.is_last:", "if True:", "check is_last"),
            plant_mistake("dist.ReduceOp.AVG, async_op=True", "dist.ReduceOp.AVG", "waits in all_reduce"),
            plant_mistake("if self.is_last:", "if False:", "nothing overlaps"),
            plant_mistake("dist.ReduceOp.AVG", "dist.ReduceOp.SUM", "not the mean"),
            plant_mistake("        copy_back(buffer, self._grads(bucket))\n", "", "copy the averaged values back"),
            Mistake(
                (
                    (
                        "while (number := len(self.started)) < len(self.buckets) and self.missing[number] == 0:",
                        "if self.missing[number := self.bucket_of[param]] == 0:",
                    ),
                ),
                "start the buckets in one order",
            ),
        ),
    ),
]
