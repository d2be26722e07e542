"""Checks of the exercises on data parallelism by hand: the mean of the gradients, and when it is computed."""

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from measure.ledger import CollectiveCounter
from workshop.ddp import OverlappedAverage
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import collect_traffic, draw_normal, is_close

BUCKET_BYTES = 470.0  # each head fits into a bucket, with 468 bytes


class TwoHeads(nn.Module):
    """A layer and two equal heads, which compute in another order on every second rank. One bias is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.left, self.right = nn.Linear(10, 12), nn.Linear(12, 9), nn.Linear(12, 9)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, micro_batch: int) -> Tensor:
        x = self.stem(draw_normal(5, 10, seed=micro_batch)).tanh()
        heads = [self.left, self.right] if dist.get_rank() % 2 else [self.right, self.left]
        outputs = {head: head(x) for head in heads}
        return outputs[self.left].square().mean() + outputs[self.right].exp().mean()


def compute_mean_gradients() -> list[Tensor | None]:
    """Return the mean gradients over two micro-batches per rank, computed in this process."""
    model, count = TwoHeads(), 2 * dist.get_world_size()
    for micro_batch in range(count):
        (model(micro_batch) / count).backward()
    return [param.grad for param in model.parameters()]


def accumulate(model: nn.Module, index: int) -> None:
    """Run the backward pass of this rank's micro-batch `index`, 0 or 1."""
    (model(2 * dist.get_rank() + index) / 2).backward()


def check_gradients(model: nn.Module, expected: list[Tensor | None], own: list[Tensor | None], advice: str) -> None:
    for (name, param), mean, local in zip(model.named_parameters(), expected, own, strict=True):
        if mean is None:
            expect(param.grad is None, f"{name} has no gradient on any rank, but it has one now: leave it None.")
            continue
        expect(param.grad is not None, f"{name} has lost its gradient.")
        ranks = dist.get_world_size()
        expect(
            not is_close(param.grad, local),
            f"{name} still has this rank's own gradient: when the all-reduce has ended, copy the averaged values back.",
        )
        expect(
            not is_close(param.grad, mean * ranks),
            f"The gradient of {name} is {ranks} times too large: it is the sum over the ranks, not the mean.",
        )
        expect(
            is_close(param.grad, mean),
            f"The gradient of {name} is not the mean over the ranks. {advice}",
        )


def compute_own_gradients() -> list[Tensor | None]:
    model = TwoHeads()
    for index in range(2):
        accumulate(model, index)
    return [param.grad for param in model.parameters()]


def count_calls(traffic: CollectiveCounter) -> tuple[int, int]:
    """Return the calls and the bytes of all collectives."""
    rows = collect_traffic(traffic.rows).values()
    return sum(calls for calls, _ in rows), sum(size for _, size in rows)


def check_buffer(answer: ModuleType, expected: list[Tensor | None]) -> None:
    model = TwoHeads()
    for index in range(2):
        accumulate(model, index)
    with CollectiveCounter() as traffic:
        answer.average_in_buffer(model.parameters())
    calls, size = count_calls(traffic)
    expect(
        calls == 1,
        f"The ledger counts {calls} collectives. Each of them pays the latency: put all gradients into one flat "
        "buffer, and all-reduce it once.",
    )
    gradient_bytes = sum(grad.nbytes for grad in expected if grad is not None)
    expect(
        size == gradient_bytes,
        f"The collective has {size:,} bytes, but the gradients have {gradient_bytes:,}: a parameter without a gradient "
        "has no place in the buffer.",
    )
    advice = "All ranks need the sum, divided once by N, and each gradient its own part of the buffer."
    check_gradients(model, expected, compute_own_gradients(), advice)


BY_BUCKETS = (
    "Ranks match collectives by the order of their calls, so all ranks must start the buckets in one order. `wait` "
    "must wait for each handle, and copy each buffer back into the parameters that it came from. Divide once by N."
)


def check_overlap(answer: ModuleType, expected: list[Tensor | None]) -> None:
    model = TwoHeads()
    average = OverlappedAverage(model.parameters(), BUCKET_BYTES)
    for step in range(2):  # the second step shows whether the first one left everything ready
        model.zero_grad()
        average.is_last = False
        with CollectiveCounter() as traffic:
            accumulate(model, 0)
        calls, _ = count_calls(traffic)
        expect(
            calls == 0,
            f"The backward pass of the first of two micro-batches starts {calls} collectives. Gradients accumulate "
            "locally until the last micro-batch: check is_last.",
        )
        average.is_last = True
        with CollectiveCounter() as traffic:
            missing = record_missing(model, lambda: accumulate(model, 1))
            average.wait()
        expect(
            step == 0 or bool(missing) and missing[0] > 0,
            "In the second step, no bucket starts before the end: `wait` must call _begin_step for the next step.",
        )
        expect(
            bool(missing) and missing[0] > 0,
            "No collective starts before the backward pass has computed its last gradient, so nothing overlaps. "
            "Start the all-reduce of a bucket in the hook of its last gradient, and count only the gradients of the "
            "last micro-batch.",
        )
        complete = sum(all(p.grad is not None for p in bucket) for bucket in average.buckets)
        expect(
            len(missing) >= complete,
            f"The backward pass completes {complete} buckets, and starts only {len(missing)} of them: one gradient "
            "can make several buckets the next ones, so start all that are complete.",
        )
        check_gradients(model, expected, compute_own_gradients(), BY_BUCKETS)
        calls, size = count_calls(traffic)
        count = len(average.buckets)  # one of them is empty, and needs no collective
        expect(count - 1 <= calls <= count, f"{calls} collectives for {count} buckets: one for each with gradients.")
        gradient_bytes = sum(grad.nbytes for grad in expected if grad is not None)
        expect(size == gradient_bytes, f"The buckets have {size:,} bytes, but the gradients have {gradient_bytes:,}.")


def record_missing(model: nn.Module, run_backward: Callable[[], None]) -> list[int]:
    """Run a backward pass, and return for each all-reduce how many gradients were not ready when it started."""
    ready, missing, original = [0], [], dist.all_reduce
    used = [param for name, param in model.named_parameters() if name != "unused"]
    handles = [param.register_post_accumulate_grad_hook(lambda _: ready.__setitem__(0, ready[0] + 1)) for param in used]

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        expect(
            kwargs.get("async_op") or len(args) > 3 and args[3],
            "The backward pass waits in all_reduce, so nothing overlaps: start it with async_op=True.",
        )
        missing.append(len(used) - ready[0])
        return original(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        run_backward()
    for handle in handles:
        handle.remove()
    return missing
