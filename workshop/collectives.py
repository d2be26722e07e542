"""Collectives written with send and receive: broadcast, reduce-scatter, all-gather and all-reduce on a ring.

    rank 0  ->  rank 1  ->  rank 2  ->  rank 3  ->  rank 0

Each rank sends only to the next rank and receives only from the previous one. A tensor of n bytes is divided into N
equal chunks. In each of the N - 1 steps of a reduce-scatter, every rank sends one chunk and adds the chunk that it
receives to its own. No rank is a bottleneck, and all links are busy in every step (Patarasuk & Yuan 2009):

                      steps        volume per rank (bytes)
    reduce-scatter    N - 1        n (N-1)/N
    all-gather        N - 1        n (N-1)/N
    all-reduce        2 (N-1)      2n (N-1)/N        a reduce-scatter, then an all-gather
    broadcast         N - 1        n                 from rank to rank; the last rank sends nothing

NCCL implements the same algorithms on GPUs. These functions are for study: they work on any backend of
`torch.distributed`, and `workshop/exercises` and notebook 2 use them.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(outgoing: Tensor, incoming: Tensor) -> None:
    """Send a tensor to the next rank of the ring, and receive one from the previous rank, at the same time.

    If every rank first waited until its send had ended, no rank would receive, and all would wait forever.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(outgoing, (rank + 1) % ranks)
    dist.recv(incoming, (rank - 1) % ranks)
    sending.wait()  # type: ignore[union-attr]


def reduce_scatter(full: Tensor) -> Tensor:
    """Return chunk `rank` of the sum over all ranks. Collective.

    Args:
        full: this rank's values, 1-D; its length is a multiple of the number of ranks. It does not change.

    Returns:
        The chunk, of 1/N of the length.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = list(full.clone().chunk(ranks))
    received = torch.empty_like(chunks[0])
    for step in range(ranks - 1):
        outgoing, incoming = (rank - step - 1) % ranks, (rank - step - 2) % ranks
        exchange(chunks[outgoing], received)
        chunks[incoming] += received
    return chunks[rank]


def all_gather(local: Tensor) -> Tensor:
    """Return the chunks of all ranks in rank order. Collective.

    Args:
        local: this rank's chunk, 1-D, of the same length on every rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    full = torch.empty(ranks * len(local), dtype=local.dtype, device=local.device)
    chunks = full.chunk(ranks)
    chunks[rank].copy_(local)
    for step in range(ranks - 1):
        outgoing, incoming = (rank - step) % ranks, (rank - step - 1) % ranks
        exchange(chunks[outgoing], chunks[incoming])
    return full


def all_reduce(values: Tensor) -> None:
    """Replace values by their sum over all ranks, in place. Collective.

    Args:
        values: a contiguous tensor of any shape. If its length is not a multiple of N, zeros are added for the ring.
    """
    ranks, flat = dist.get_world_size(), values.view(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % ranks))
    flat.copy_(all_gather(reduce_scatter(padded))[: len(flat)])


def broadcast(values: Tensor, source: int) -> None:
    """Replace values by those of rank `source`, in place. Each rank passes them on to the next one. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    position = (rank - source) % ranks  # on the way from the source
    if position > 0:
        dist.recv(values, (rank - 1) % ranks)
    if position < ranks - 1:
        dist.send(values, (rank + 1) % ranks)


def predict_costs(collective: str, tensor_bytes: int, ranks: int) -> tuple[int, float]:
    """Return the number of steps, and the largest number of bytes that a rank sends.

    Args:
        collective: reduce-scatter, all-gather, all-reduce or broadcast.
        tensor_bytes: of the full tensor.
        ranks: number of ranks, N.
    """
    steps = ranks - 1
    if collective == "broadcast":
        return steps, float(tensor_bytes if ranks > 1 else 0)
    if collective == "all-reduce":
        steps = 2 * steps
    return steps, steps * tensor_bytes / ranks
