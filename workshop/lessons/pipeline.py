"""Helpers of notebook 11: run the schedule of a pipeline, and count the micro-batches that a rank stores."""

from collections.abc import Callable, Sequence

SLOTS = {"F": 1, "B": 2}  # a backward pass takes twice as long as a forward pass


def run_pipeline(
    order: Callable[[int, int, int], Sequence[str]], ranks: int, micro_batches: int
) -> dict[str, list[str]]:
    """Return what each rank does in each time slot, or "" if it is idle.

    F2 on rank r needs F2 of rank r - 1, and B2 needs B2 of rank r + 1. On the last rank, B2 needs its own F2.

    Args:
        order: returns the passes of a rank in their order, from the rank, the number of ranks and of micro-batches.
        ranks, micro_batches: their numbers.

    Raises:
        ValueError: the ranks would wait for each other forever.
    """
    queues = [list(order(rank, ranks, micro_batches)) for rank in range(ranks)]
    rows: list[list[str]] = [[] for _ in queues]
    ends: dict[tuple[int, str], int] = {}  # the first slot after each pass
    while any(queues):
        waiting = sum(map(len, queues))
        for rank, queue in enumerate(queues):
            while queue and (start := find_start(queue[0], rank, ranks, ends)) is not None:
                name, row = queue.pop(0), rows[rank]
                row += [""] * (start - len(row)) + [name] * SLOTS[name[0]]
                ends[rank, name] = len(row)
        if sum(map(len, queues)) == waiting:
            raise ValueError(f"the ranks wait for each other: {[queue[0] for queue in queues if queue]}")
    slots = max(map(len, rows))
    return {f"rank {rank}": row + [""] * (slots - len(row)) for rank, row in enumerate(rows)}


def find_start(name: str, rank: int, ranks: int, ends: dict[tuple[int, str], int]) -> int | None:
    """Return the slot from which on the input of a pass is there; None if it is not known yet."""
    needed = (rank - 1, name) if name[0] == "F" else (rank + 1, name)
    if needed[0] == ranks:
        needed = rank, f"F{name[1:]}"
    return 0 if needed[0] < 0 else ends.get(needed)


def count_stored(row: Sequence[str]) -> int:
    """Return the largest number of micro-batches whose activations a rank stores at one time."""
    stored: set[str] = set()
    most = 0
    for slot, name in enumerate(row):
        if name.startswith("F"):
            stored.add(name[1:])
        most = max(most, len(stored))
        if name.startswith("B") and name not in row[slot + 1 :]:  # the last slot of this pass
            stored.remove(name[1:])
    return most
