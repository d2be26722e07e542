"""Checks of the exercises on tensor, pipeline and context parallelism."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from measure.ledger import CollectiveCounter
from workshop.exercises.checks.collectives import count_sent_bytes
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import collect_traffic, draw_normal, is_close
from workshop.lessons.pipeline import count_stored, run_pipeline


def check_tensor_parallel(answer: ModuleType, _: Any) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, second, x, dy = (draw_normal(*size, seed=i) for i, size in enumerate(((12, 8), (8, 12), (5, 8), (5, 8))))
    full = [each.clone().requires_grad_() for each in (first, second, x)]
    exact = F.gelu(full[2] @ full[0].T) @ full[1].T
    exact.backward(dy)
    rows, columns = (w.chunk(ranks, dim)[rank].clone().requires_grad_() for dim, w in enumerate((first, second)))
    leaf, given = x.clone().requires_grad_(), dy.clone()
    with CollectiveCounter() as traffic:
        partial = F.gelu(answer.CopyToRanks.apply(leaf) @ rows.T) @ columns.T
        before = partial.detach().clone()
        y = answer.SumOverRanks.apply(partial)
    count = collect_traffic(traffic.rows).get("all-reduce", (0, 0))[0]
    expect(torch.equal(partial.detach(), before), "The input has changed: add the partial sums up in a copy.")
    expect(
        not is_close(y, before),
        f"The output on rank {rank} is only a partial sum, from its own hidden channels: SumOverRanks must add those "
        "of all ranks.",
    )
    expect(
        is_close(y, exact),
        "The output of the divided MLP is wrong. CopyToRanks returns its input as it is, and SumOverRanks the sum, not "
        "the mean.",
    )
    expect(count == 1, f"The forward pass has {count} all-reduces instead of one: every rank already has x in full.")
    y.backward(given)
    assert leaf.grad is not None and rows.grad is not None and full[0].grad is not None and full[2].grad is not None
    wanted = full[0].grad.chunk(ranks)[rank]
    expect(
        not is_close(rows.grad, ranks * wanted),
        "The gradients of the weights are N times too large. Every rank already has the full gradient of y, and an "
        "all-reduce would add it N times: SumOverRanks returns it as it is.",
    )
    expect(is_close(rows.grad, wanted), "The gradient of the column-parallel weight is wrong.")
    expect(
        not is_close(leaf.grad, full[2].grad / ranks),
        "dx is N times too small: each rank has a part of it, and the backward pass of CopyToRanks adds the parts. "
        "It does not average them.",
    )
    expect(
        is_close(leaf.grad, full[2].grad),
        f"Rank {rank} has only the part of dx that came through its own channels. Nothing reports this, and the losses "
        "leave the one curve: the backward pass of CopyToRanks must add the parts of all ranks.",
    )
    answer.CopyToRanks.apply(x.clone().requires_grad_()).backward(given)
    expect(torch.equal(given, dy), "The gradient that the backward pass was given has changed: work on a copy.")
    own_group = [dist.new_group([each]) for each in range(ranks)][rank]
    alone = x.clone().requires_grad_()
    y = answer.SumOverRanks.apply(answer.CopyToRanks.apply(alone, own_group), own_group)
    y.backward(dy)
    expect(
        torch.equal(y, x) and is_close(alone.grad, dy),
        "In a group of one rank, something is still added: all-reduce over the ranks of `group` in both passes.",
    )


def check_pipeline(answer: ModuleType, _: Any) -> None:
    for ranks, micro_batches in ((1, 3), (2, 1), (4, 4), (3, 5), (4, 2)):
        story = f"With {ranks} ranks and {micro_batches} micro-batches,"
        work = sorted(f"{kind}{m}" for kind in "FB" for m in range(micro_batches))
        for rank in range(ranks):
            order = answer.order_1f1b(rank, ranks, micro_batches)
            expect(sorted(order) == work, f"{story} rank {rank} does not run each pass exactly once: {order}.")
        try:
            rows = run_pipeline(answer.order_1f1b, ranks, micro_batches)
        except ValueError as error:
            advice = (
                "A pass needs the result of its neighbor, and on the last rank a backward pass its own forward pass."
            )
            expect(False, f"{story} {error}. {advice}")
        slots, least = len(rows["rank 0"]), 3 * (micro_batches + ranks - 1)
        expect(
            slots == least,
            f"{story} the pipeline takes {slots} time slots, and GPipe {least}: a rank that waits for a gradient could "
            "run another forward pass.",
        )
        for rank in range(ranks):
            stored, limit = count_stored(rows[f"rank {rank}"]), min(ranks - rank, micro_batches)
            expect(
                stored <= limit,
                f"{story} rank {rank} stores the activations of {stored} micro-batches, and {limit} are enough: run a "
                "backward pass as soon as its gradient can be there.",
            )


def check_ring_attention(answer: ModuleType, _: Any) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v = (draw_normal(16, 8, seed=i) * (1.5 if i < 2 else 1) for i in range(3))
    q[:, 0], k[:, 0] = 30.0, k[:, 0] / 10 + 10  # all scores are above 100, so that exp overflows
    full = F.scaled_dot_product_attention(q[None], k[None], v[None])[0].chunk(ranks)[rank]
    own = [each.chunk(ranks)[rank].clone() for each in (q, k, v)]
    with count_sent_bytes() as sent:
        result = answer.attend_in_ring(*own)
    local = F.scaled_dot_product_attention(own[0][None], own[1][None], own[2][None])[0]
    expect(
        bool(result.isfinite().all()),
        "The result is not finite: exp overflows for large scores. Subtract the largest score so far from all "
        "scores, and multiply the old sums by exp(old - new), not by exp(new - old).",
    )
    wanted = (ranks - 1) * 2 * own[1].nbytes
    expect(
        sum(sent) == wanted,
        f"A rank sends {sum(sent):,} bytes, but {ranks} blocks need N - 1 exchanges of one block of keys and values, "
        f"{wanted:,} bytes: after the last block there is nothing left to send.",
    )
    expect(
        not is_close(result, local, 1e-4),
        f"The queries of rank {rank} attend only to its own keys: compute with the block that you have received.",
    )
    expect(
        is_close(result, full, 1e-4),
        "The result differs from attention over the full sequence. A rank passes on the block of keys and values "
        "that it has received, and not its own again. The scores are q k^T / sqrt(channels), without a causal mask. "
        "When a block raises the maximum, the sum and the result so far are still relative to the old maximum: "
        "multiply both by exp(old - new). At the end, divide the result by the sum.",
    )
