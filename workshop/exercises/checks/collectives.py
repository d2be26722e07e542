"""Checks of the exercises on collectives: they count what a rank sends."""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workshop.exercises.exercise import expect
from workshop.exercises.measuring import draw_normal, is_close

REFUSED_CALLS = ["all_reduce", "reduce", "broadcast", "gather", "scatter", "all_to_all", "all_to_all_single"]
REFUSED_CALLS += ["all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"]
REFUSED_CALLS += ["reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "broadcast_object_list"]
REFUSED_CALLS += ["batch_isend_irecv", "P2POp"]


@contextlib.contextmanager
def count_sent_bytes() -> Iterator[list[int]]:
    """Count the bytes of each send of this rank, and refuse torch's own collectives."""
    sent: list[int] = []
    originals = {name: getattr(dist, name) for name in ("send", "isend", *REFUSED_CALLS) if hasattr(dist, name)}

    def count(name: str) -> Any:
        def send(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.numel() * tensor.element_size())
            return originals[name](tensor, *args, **kwargs)

        return send

    def refuse(name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            expect(False, f"Your code calls dist.{name}: use only send, recv, isend and irecv, to see what it does.")

        return call

    for name in originals:
        setattr(dist, name, count(name) if name in ("send", "isend") else refuse(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def draw_all(length: int) -> list[Tensor]:
    """Return the values of every rank."""
    return [draw_normal(length, seed=rank) for rank in range(dist.get_world_size())]


def check_volume(sent: list[int], expected: float, name: str) -> None:
    expect(
        sum(sent) == expected,
        f"A rank sends {sum(sent):,} bytes, but the ring algorithm sends {expected:,.0f}: send exactly one chunk in "
        f"each step. {name}",
    )


def check_reduce_scatter(answer: ModuleType, _: Any) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = draw_all(12)
    mine = values[rank].clone()
    with count_sent_bytes() as sent:
        result = answer.reduce_scatter(mine)
    check_volume(sent, 4 * 12 * (ranks - 1) / ranks, "Each chunk needs N - 1 steps.")
    total = sum(values[1:], values[0])
    expect(
        not is_close(result, values[rank].chunk(ranks)[rank]),
        f"Rank {rank} returns its own values of chunk {rank}, to which nothing was added. In the last step a rank "
        "must receive the chunk that it returns: shift the index by one.",
    )
    expect(
        not any(is_close(result, values[r].chunk(ranks)[i]) for r in range(ranks) for i in range(ranks)),
        "The result is the chunk of a single rank. Add the received chunk to your own before you send it on.",
    )
    found = [i for i in range(ranks) if i != rank and is_close(result, total.chunk(ranks)[i])]
    expect(
        not found,
        f"Rank {rank} returns the sum of chunk {found}, and not of chunk {rank}: the chunk that a rank receives last "
        "must be its own.",
    )
    expect(
        is_close(result, total.chunk(ranks)[rank]),
        f"Rank {rank} does not return the sum of chunk {rank} over all ranks, which is not the mean. After step 0, a "
        "rank must send the chunk to which it has just added values. It must add the received values to the chunk with "
        "the index that the previous rank has sent.",
    )
    check_volume(sent, 4 * 12 * (ranks - 1) / ranks, "Each chunk needs N - 1 steps.")
    expect(torch.equal(mine, values[rank]), "The input has changed: work on a copy.")


def check_all_gather(answer: ModuleType, _: Any) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = draw_all(5)
    with count_sent_bytes() as sent:
        result = answer.all_gather(values[rank])
    check_volume(sent, 4 * 5 * (ranks - 1), "Each rank passes on N - 1 chunks.")
    full = torch.cat(values)
    expect(
        result.shape == full.shape, f"The result has the shape {tuple(result.shape)} instead of {tuple(full.shape)}."
    )
    wrong = [i for i in range(ranks) if not torch.equal(result.chunk(ranks)[i], values[i])]
    expect(
        rank not in wrong,
        f"Chunk {rank} on rank {rank} is not its own: chunk r comes from rank r. Copy the local chunk there first, "
        "and receive nothing into it: in step s, a rank receives chunk r - s - 1.",
    )
    expect(
        not wrong,
        f"Rank {rank} has wrong values in the chunks {wrong}. In step s, a rank passes on the chunk that it received "
        "in step s - 1, and not its own chunk again. It has then received chunk r - s - 1.",
    )
    check_volume(sent, 4 * 5 * (ranks - 1), "Each rank passes on N - 1 chunks.")


def check_all_reduce(answer: ModuleType, _: Any) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for length in (12, 10, 1):
        values = draw_all(length)
        total, mine = sum(values[1:], values[0]), values[rank].clone()
        with count_sent_bytes() as sent:
            answer.all_reduce(mine)
        expect(
            not torch.equal(mine, values[rank]),
            "The values have not changed: the result must be written into the argument, in place.",
        )
        expect(
            not is_close(mine, total / ranks),
            "The result is the mean over the ranks. An all-reduce returns the sum, and the caller divides.",
        )
        expect(
            is_close(mine, total),
            f"The result for {length} elements on {ranks} ranks is wrong. If the length is not a multiple of N, add "
            "zeros for the ring, and remove them at the end.",
        )
        padded = 4 * (length + -length % ranks)
        check_volume(
            sent,
            2 * padded * (ranks - 1) / ranks,
            "An all-reduce is a reduce-scatter and an all-gather, of as few added zeros as possible: none for a "
            "multiple of N.",
        )
    matrix = torch.ones(2, 3)
    answer.all_reduce(matrix)
    expect(bool((matrix == ranks).all()), "A matrix must keep its shape: work on a flat view of it.")


NO_RECEIVER = (
    "Every rank waits until its send has ended, and no rank receives. Start the send, receive, then wait for it."
)
