"""Exercises on collectives: the ring algorithms, with send and receive."""

from workshop.exercises.checks.collectives import (
    NO_RECEIVER,
    check_all_gather,
    check_all_reduce,
    check_reduce_scatter,
)
from workshop.exercises.exercise import Exercise, Mistake, plant_mistake

EXERCISES = [
    Exercise(
        name="collectives.1",
        title="Write a reduce-scatter on a ring",
        targets=("workshop.collectives:reduce_scatter",),
        task="""ZeRO and FSDP reduce gradients with a reduce-scatter: rank r gets chunk r of the sum over all
        ranks (for a mean, the sum is divided by N). Write it with `exchange(outgoing, incoming)`, which sends a chunk
        to the next rank and receives one from the previous rank into `incoming`. In each of the N - 1 steps a rank
        sends one chunk, so it sends (N-1)/N of the tensor.""",
        minutes=20,
        difficulty="medium",
        ranks=4,
        check=check_reduce_scatter,
        nudge="Follow chunk 0 on its way around the ring: on which rank must it start, so that it ends on rank 0?",
        idea="In step s, rank r sends chunk r - s - 1 and adds what it receives to chunk r - s - 2 (modulo N).",
        line="outgoing, incoming",
        mistakes=(
            plant_mistake(
                "(rank - step - 1) % ranks, (rank - step - 2)",
                "(rank - step) % ranks, (rank - step - 1)",
                "shift the index",
            ),
            plant_mistake(
                "chunks[incoming] += received", "chunks[incoming].copy_(received)", "the chunk of a single rank"
            ),
            plant_mistake("full.clone().chunk", "full.chunk", "The input has changed"),
            Mistake(
                (
                    (
                        "exchange(chunks[outgoing], received)",
                        "dist.send(chunks[outgoing], (rank + 1) % ranks)\n        dist.recv(received, (rank - 1) % "
                        "ranks)",
                    ),
                ),
                "no rank receives",
                hangs=True,
            ),  # fmt: skip
        ),
        on_hang=NO_RECEIVER,
    ),
    Exercise(
        name="collectives.2",
        title="Write an all-gather on a ring",
        targets=("workshop.collectives:all_gather",),
        task="""After the update of a shard, an all-gather gives every rank the chunks of all ranks. Write it with
        `exchange(outgoing, incoming)`. A rank passes on what it has received, so that each chunk visits all ranks in
        N - 1 steps. `exchange` fills `incoming` in place, and returns nothing.""",
        minutes=15,
        difficulty="medium",
        ranks=4,
        check=check_all_gather,
        nudge="Which chunk does a rank have in step s that the next rank does not have yet?",
        idea="In step s, rank r sends chunk r - s and receives chunk r - s - 1 (modulo N) directly into its place.",
        line="outgoing, incoming",
        mistakes=(
            plant_mistake("(rank - step) % ranks, (rank", "rank, (rank", "passes on the chunk that it received"),
            plant_mistake("    chunks[rank].copy_(local)\n", "", "Copy the local chunk there first"),
            plant_mistake("(rank - step - 1) % ranks", "(rank + step + 1) % ranks", "wrong values in the chunks"),
        ),
        on_hang=NO_RECEIVER,
    ),
    Exercise(
        name="collectives.3",
        title="Compose an all-reduce",
        targets=("workshop.collectives:all_reduce",),
        task="""DDP averages gradients with an all-reduce. It is a reduce-scatter followed by an all-gather, and
        ZeRO-1 puts the optimizer's update between the two. Use both functions. The length is not always
        a multiple of N.""",
        minutes=10,
        difficulty="easy",
        ranks=4,
        check=check_all_reduce,
        nudge="Each rank needs a chunk of the same length, also for 10 elements on 4 ranks.",
        idea="Add zeros up to a multiple of N, reduce-scatter, all-gather, and copy the first elements back into "
        "`flat`.",
        line="flat.copy_",
        mistakes=(
            plant_mistake("flat.copy_(", "flat = (", "The values have not changed"),
            plant_mistake("[: len(flat)])", "[: len(flat)] / ranks)", "The result is the mean"),
            plant_mistake(
                "flat.copy_(all_gather(reduce_scatter(padded))[: len(flat)])",
                "flat.copy_(all_gather(flat.clone()).view(ranks, -1).sum(0))",
                "send exactly one chunk in each step",
            ),
        ),
        on_hang=NO_RECEIVER,
    ),
]
