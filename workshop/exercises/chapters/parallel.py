"""Exercises on the methods beyond data parallelism: tensor, pipeline and context parallelism, on real ranks."""

from workshop.exercises.checks.parallel import (
    check_pipeline,
    check_ring_attention,
    check_tensor_parallel,
)
from workshop.exercises.exercise import Exercise, plant_mistake

NOTEBOOK = "notebooks/11_what_comes_next.py"

EXERCISES = [
    Exercise(
        name="parallel.1",
        title="Write the two autograd functions of tensor parallelism",
        targets=(f"{NOTEBOOK}:CopyToRanks", f"{NOTEBOOK}:SumOverRanks"),
        task="""Attention and the MLP of a block have a column-parallel layer, and after it a row-parallel layer.
        CopyToRanks stands before the column-parallel layer, whose input every rank has in full. SumOverRanks stands
        after the row-parallel layer, whose output is a partial sum on each rank. Write the forward and
        backward pass of both. Exactly one pass of each function communicates, over the ranks of `group`. Do not change
        a tensor that you were given. A backward pass returns None for `group`.""",
        minutes=10,
        difficulty="easy",
        ranks=2,
        check=check_tensor_parallel,
        nudge="The full input went into the channels of every rank. What does each rank know of its gradient?",
        idea="The gradient of the input is a partial sum, so the backward pass of CopyToRanks adds it over the ranks. "
        "SumOverRanks is the mirror image.",
        line="dist.all_reduce(dx",
        mistakes=(
            plant_mistake(
                "        dist.all_reduce(dx, group=ctx.group)  # each rank has only the part of dx that came through "
                "its own channels\n",
                "",
                "only the part of dx",
            ),
            plant_mistake(
                "        return dy, None",
                "        dy = dy.clone()\n        dist.all_reduce(dy)\n        return dy, None",
                "N times",
            ),
            plant_mistake("        dist.all_reduce(total, group=group)\n", "", "only a partial sum"),
            plant_mistake("total = partial.clone()", "total = partial", "The input has changed"),
            plant_mistake("dist.all_reduce(dx, group=ctx.group)", "dist.all_reduce(dx)", "the ranks of `group`"),
        ),
    ),
    Exercise(
        name="parallel.2",
        title="Order the passes of a pipeline, 1F1B",
        targets=(f"{NOTEBOOK}:order_1f1b",),
        task="""Rank r of a pipeline has the r-th part of the layers. "F2" is the forward pass of micro-batch 2 on this
        rank, and "B2" its backward pass, which takes twice as long. GPipe runs all forward passes first, so a rank
        stores the activations of all micro-batches. Return the order in which a rank runs its passes so that it stores
        as few micro-batches as possible, and the pipeline takes no longer than with GPipe.""",
        minutes=15,
        difficulty="medium",
        check=check_pipeline,
        nudge="How many forward passes can rank 0 run before the first gradient comes back? How many the last rank?",
        idea="Rank r begins with N - r forward passes, or with all of them if there are fewer. Then it alternates: one "
        "backward pass, one forward pass, until no forward pass is left.",
        line="first = min",
        mistakes=(
            plant_mistake("first = min(ranks - rank, micro_batches)", "first = micro_batches", "stores"),
            plant_mistake("first = min(ranks - rank, micro_batches)", "first = min(1, micro_batches)", "takes"),
            plant_mistake(
                """        order.append(f"B{m}")
        if first + m < micro_batches:
            order.append(f"F{first + m}")
""",
                """        if first + m < micro_batches:
            order.append(f"F{first + m}")
        order.append(f"B{m}")
""",
                "stores",
            ),
            plant_mistake("first + m < micro_batches", "first + m < micro_batches - 1", "exactly once"),
        ),
    ),
    Exercise(
        name="parallel.3",
        title="Write ring attention",
        targets=(f"{NOTEBOOK}:attend_in_ring",),
        task="""With context parallelism, a rank has T/N tokens of a sequence. Its queries need the keys and values of
        all ranks. Let them travel around the ring: collectives.exchange(outgoing, incoming) sends to the next rank and
        receives from the previous one. No rank may have more than two blocks of keys and values. Add one block at a
        time with the online softmax: keep the largest score, the sum of the exponentials, and the weighted sum of the
        values of each query. There is no causal mask. The scores are q k^T / sqrt(channels).""",
        minutes=30,
        difficulty="hard",
        ranks=4,
        check=check_ring_attention,
        nudge="After a block with a larger score, which of the numbers that you keep are relative to the old one?",
        idea="Multiply the sum and the result by exp(old maximum - new maximum), then add the block. Send N - 1 times.",
        line="weights, decay",
        mistakes=(
            plant_mistake("decay * result + weights @ v", "result + weights @ v", "relative to the old maximum"),
            plant_mistake("            kv = received\n", "", "its own keys"),
            plant_mistake("        if remaining:\n", "        if True:\n", "N - 1 exchanges"),
            plant_mistake(
                "torch.maximum(maximum, scores.amax(1, keepdim=True))", "torch.zeros_like(maximum)", "exp overflows"
            ),
        ),
    ),
]
