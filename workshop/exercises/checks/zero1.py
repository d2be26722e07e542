"""Checks of the exercises on ZeRO-1 and ZeRO-2, on a small model whose parameters have odd sizes."""

import time
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from measure.ledger import CollectiveCounter
from nanoGPT.optim import grad_norm
from phase1_zero1.buckets import ALIGN, Bucket
from phase1_zero1.zero1 import Zero1Optimizer
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import collect_traffic, draw_normal, is_close, shared_folder

BUCKET_MB = 1e-3  # about 1 KB: several small buckets, and shards that begin inside a parameter
SMALL_LR, LARGE_LR = 1e-3, 1e-2


def build_model() -> nn.Module:
    """Return a small model whose parameters have sizes that 4 does not divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 13), nn.Tanh(), nn.Linear(13, 3))


def compute_loss(model: nn.Module, step: int, micro_batch: int) -> Tensor:
    x = draw_normal(5, 7, seed=100 * step + micro_batch)
    return model(x).square().mean() * (3 + micro_batch)


def train_unsharded(max_norm: float = 0.5) -> dict[str, Any]:
    """Train in this process on the micro-batches of all ranks, 2 per rank. Return the weights and the norms."""
    model, norms = build_model(), []
    optimizer = AdamW(model.parameters(), lr=SMALL_LR)
    count = 2 * dist.get_world_size()
    for step in range(3):
        optimizer.param_groups[0]["lr"] = LARGE_LR if step else SMALL_LR
        for micro_batch in range(count):
            (compute_loss(model, step, micro_batch) / count).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": flatten(model), "norms": norms}


def train_sharded(make_optimizer: Any, sync_all: bool = False) -> dict[str, Any]:
    """Train on all ranks with a sharded optimizer. Return weights, norms, gradient bytes and the traffic of a step."""
    model, norms = build_model(), []
    optimizer = make_optimizer(model.parameters(), AdamW, lr=SMALL_LR)
    gradient_bytes = 0
    for step in range(3):
        optimizer.param_groups[0]["lr"] = LARGE_LR if step else SMALL_LR
        with CollectiveCounter() as traffic:
            for i in range(2):
                optimizer.require_backward_grad_sync = sync_all or i == 1
                loss = compute_loss(model, step, dist.get_rank() + i * dist.get_world_size())
                (loss / 2).backward()
                gradient_bytes = max(gradient_bytes, count_gradient_bytes(optimizer))
            if hasattr(optimizer, "clip_grad_norm_"):
                norms.append(optimizer.clip_grad_norm_(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    optimizer.wait_for_params()
    traffic_by_kind = collect_traffic(traffic.rows)
    return {"weights": flatten(model), "norms": norms, "traffic": traffic_by_kind, "gradient_bytes": gradient_bytes}


def count_gradient_bytes(optimizer: Any) -> int:
    """Return the bytes of full gradients that a ZeRO optimizer stores between two backward passes."""
    return sum(bucket.flat_grads.nbytes for bucket in getattr(optimizer, "buckets", []))


def flatten(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make_flat(params: Any, optimizer_class: type[AdamW], lr: float) -> Zero1Optimizer:
    return Zero1Optimizer(params, optimizer_class, bucket_mb=BUCKET_MB, lr=lr)


def check_same_on_all_ranks(weights: Tensor, explanation: str) -> None:
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    expect(all(torch.equal(other, others[0]) for other in others), explanation)


def check_buckets(answer: ModuleType, _: Any) -> None:
    sizes = (100, 50, 60, 300, 10)
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    names = {id(p): i for i, p in enumerate(params)}

    def split(params: Any, limit: float) -> list[list[int]]:
        return [[names[id(p)] for p in bucket] for bucket in answer.split_into_buckets(params, limit)]

    buckets = split(params, 440.0)
    order = [i for bucket in buckets for i in bucket]
    expect(
        sorted(order) == list(range(5)), f"The buckets contain the parameters {order}; each one must be in one bucket."
    )
    expect(
        order != sorted(order),
        "The buckets follow the order of the model. The backward pass computes the gradients of the last parameters "
        "first, so their bucket would fill last, and no communication would overlap with the backward pass. Begin "
        "at the end.",
    )
    for bucket in buckets:
        size = sum(4 * sizes[i] for i in bucket)
        expect(
            size <= 440 or len(bucket) == 1,
            f"A bucket has {size} bytes, above the limit of 440: open a new bucket before a parameter that does not "
            "fit. The limit is in bytes, not in elements.",
        )
    expect([3] in buckets, "A parameter that is larger than the limit gets its own bucket.")
    expect(
        buckets == [[4], [3], [2, 1], [0]],
        f"The buckets are {buckets} instead of [[4], [3], [2, 1], [0]]. The bucket that fills first comes first, and a "
        "bucket is closed only if the next parameter does not fit: many small buckets need many collectives.",
    )
    mixed = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4).bfloat16()), nn.Parameter(torch.zeros(4))]
    dtypes = [{p.dtype for p in bucket} for bucket in answer.split_into_buckets(mixed, 440.0)]
    expect(
        all(len(each) == 1 for each in dtypes), "A bucket is one flat buffer, so its parameters must have one dtype."
    )
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    expect(answer.split_into_buckets([frozen], 440.0) == [], "A frozen parameter has no gradient and needs no bucket.")


def check_partition(answer: ModuleType, _: Any) -> None:
    class FakeBucket:
        pass

    for ranks in (4, 3, 1):
        for numel in (1000, ALIGN * ranks, ALIGN * ranks + 1, 1):
            slices = []
            for rank in range(ranks):
                bucket: Any = FakeBucket()
                bucket.rank, bucket.world_size = rank, ranks
                length, local = answer._partition(bucket, numel)
                slices.append((local.start, local.stop))
            text = f"For {numel} elements on {ranks} rank(s), the slices are {slices} of {length} elements in total."
            expect(length >= numel, f"{text} The last elements belong to no rank, and are never updated. Round up.")
            expect(
                len({stop - start for start, stop in slices}) == 1,
                f"{text} A reduce-scatter needs slices of equal length: pad the bucket.",
            )
            expect(
                [start for start, _ in slices] == [i * (length // ranks) for i in range(ranks)],
                f"{text} The slices must follow each other in rank order.",
            )
            expect(
                all(start % ALIGN == 0 for start, _ in slices),
                f"{text} Each slice must begin at a multiple of ALIGN = {ALIGN} elements, for vectorized kernels.",
            )
            expect(length - numel < ALIGN * ranks, f"{text} Pad as little as possible: less than one ALIGN per rank.")


def check_shards(answer: ModuleType, _: Any) -> None:
    model = build_model()
    params = list(model.parameters())
    bucket = Bucket(params, {"lr": 1e-3, "params": params}, AdamW, None)
    numel = sum(p.numel() for p in params)
    for shard in bucket.shards:
        expect(shard.tensor.numel() > 0, "A shard is empty: a parameter outside of this rank's slice has no shard.")
        expect(
            params[shard.param_index] is shard.param,
            f"The shard with param_index {shard.param_index} has another parameter: the index counts self.params.",
        )
        expect(
            shard.bucket_slice.stop <= numel,
            "A shard contains padding, which would count in the moments and in the gradient norm.",
        )
        name = f"A shard of parameter {shard.param_index}"
        part = shard.param.detach().flatten()[shard.offset : shard.offset + shard.tensor.numel()]
        expect(
            shard.tensor.shape == part.shape and torch.equal(shard.tensor, part),
            f"{name} does not contain the elements of its parameter from offset {shard.offset} on. The offset counts "
            "from the beginning of the parameter, not of the bucket or of the slice.",
        )
        expect(
            shard.tensor.data_ptr() == bucket.flat_params[shard.bucket_slice].data_ptr(),
            f"{name} is a copy. The optimizer must update the flat buffer itself, so take a view.",
        )
        offset = shard.grad.data_ptr() - bucket.local_grads.data_ptr()
        expect(
            offset == 4 * (shard.bucket_slice.start - bucket.local_slice.start),
            f"{name} has the gradient of other elements: local_grads begins where this rank's slice begins.",
        )
        expect(
            shard.grad.shape == shard.tensor.shape,
            f"{name} has {shard.tensor.numel()} elements, but its gradient has {shard.grad.numel()}: use one shape.",
        )
    covered = torch.tensor(sum(shard.tensor.numel() for shard in bucket.shards))
    dist.all_reduce(covered)
    expect(
        int(covered) == numel,
        f"The shards of all ranks have {int(covered)} elements together, but the parameters have {numel}: each "
        "element belongs to exactly one rank.",
    )
    equal = [nn.Parameter(torch.zeros(2 * ALIGN)) for _ in range(dist.get_world_size())]
    bucket = Bucket(equal, {"lr": 1e-3, "params": equal}, AdamW, None)
    expect(
        len(bucket.shards) == 1,
        f"This rank has {len(bucket.shards)} shards instead of 1: a parameter that ends where the slice begins has no "
        "shard.",
    )
    for dtype in (torch.bfloat16, torch.float16):
        halves = [nn.Parameter(p.detach().to(dtype)) for p in params]
        low = Bucket(halves, {"lr": 1e-3, "params": halves}, AdamW, None)
        expect(
            all(shard.tensor.dtype == torch.float32 for shard in low.shards),
            f"The shard of a parameter in {dtype} must be a copy in fp32, or small updates are rounded away.",
        )
        expect(
            all(torch.equal(shard.tensor, low.flat_params[shard.bucket_slice].float()) for shard in low.shards),
            f"The fp32 copy of a shard in {dtype} has other values than the shard: convert it with .float().",
        )


def check_reduce(answer: ModuleType, expected: dict[str, Any]) -> None:
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    params = [nn.Parameter(torch.zeros(64))]
    bucket = Bucket(params, {"lr": 1e-3, "params": params}, AdamW, pairs[dist.get_rank() // 2])
    bucket.flat_grads.fill_(10.0 ** dist.get_rank())
    with shared_folder() as folder:
        deadline = time.monotonic() + 5
        while dist.get_rank() and not (folder / "returned").exists():
            expect(
                time.monotonic() < deadline,
                "On rank 0, _reduce waits for the other ranks: with async_op=True, the collective starts and does not "
                "wait.",
            )
            time.sleep(0.01)
        handle = bucket._reduce()
        (folder / "returned").touch()
    expect(handle is not None, "The collective has returned no handle: return it, so that the caller can wait.")
    handle.wait()  # type: ignore[union-attr]
    own, mean = bucket.flat_grads[bucket.local_slice][0].item(), 5.5 * 100 ** (dist.get_rank() // 2)
    expect(own != 2 * mean, "In a group of two ranks, the result is the sum and not the mean.")
    expect(own == mean, f"This rank's slice of flat_grads contains {own}, but the mean over the group is {mean}.")
    result = train_sharded(make_flat)
    ratio = result["norms"][0] / expected["norms"][0]
    ranks = dist.get_world_size()
    expect(
        not is_close(ratio, ranks, 1e-3),
        f"The gradient is {ranks} times too large: you compute the sum over the ranks, not the mean.",
    )
    reduced, gathered = (result["traffic"].get(kind, (0, 0)) for kind in ("reduce-scatter", "all-gather"))
    expect(
        reduced == gathered,
        f"The ledger counts reduce-scatters of {reduced[1]:,} bytes in {reduced[0]} calls, and all-gathers of "
        f"{gathered[1]:,} in {gathered[0]}: each bucket needs one of each, with the same bytes. An all-reduce gives "
        "every rank the full mean, and sends twice the bytes of a reduce-scatter. A rank needs only its own slice.",
    )
    expect(
        is_close(ratio, 1.0, 1e-4),
        f"The gradient norm is {ratio:.3f} times that of one process: the reduce-scatter must write the mean over "
        "the ranks into this rank's slice of flat_grads.",
    )
    expect(
        is_close(result["weights"], expected["weights"]), "The norm is right, but the weights differ from one process."
    )


def check_clipping(answer: ModuleType, expected: dict[str, Any]) -> None:
    result = train_sharded(make_flat)
    norms = torch.tensor(result["norms"], dtype=torch.float64)
    check_same_on_all_ranks(
        norms,
        "The norm differs between ranks: each rank clips by its own norm, so each slice is scaled by another "
        "factor. Sum the squares over all ranks before the square root: give grad_norm the group self.shard_group.",
    )
    expect(
        is_close(norms[:1], expected["norms"][:1], 1e-5),
        f"The norm is {norms[0]:.6f}, but one process has {expected['norms'][0]:.6f}. Add the squares over "
        "the ranks, and return the norm before clipping.",
    )
    expect(
        is_close(norms, expected["norms"], 1e-5) and is_close(result["weights"], expected["weights"], 1e-5),
        "The norm of step 0 is right, but the updated weights differ from one process: scale this rank's shards of "
        "the gradient by max_norm / norm before the update.",
    )
    model = build_model()
    optimizer = make_flat(model.parameters(), AdamW, SMALL_LR)
    compute_loss(model, 0, dist.get_rank()).backward()
    grads = optimizer.reduce_gradients()
    before, exact = [grad.clone() for grad in grads], grad_norm(grads, optimizer.shard_group)
    for max_norm in (0.0, 1e9):
        expect(
            is_close(optimizer.clip_grad_norm_(max_norm), exact, 1e-12),
            "The norm has rounding errors of fp32, which depend on how the gradients are sharded. Compute it in fp64.",
        )
        expect(
            all(map(torch.equal, grads, before)),
            f"With max_norm={max_norm:g} the gradients have changed. 0 turns clipping off, and a gradient whose norm "
            "is at most max_norm stays as it is.",
        )


class Branches(nn.Module):
    """Five layers whose gradients arrive in another order on odd ranks, which also do not use the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(9, 9, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i in range(5) if dist.get_rank() % 2 == 0 else reversed(range(4)):
            h = h + self.layers[i](x * (i + 1)).tanh()
        return h


ONE_ORDER = (
    "Stop at the first bucket of the common order that is not full, count the started buckets in _num_started, and "
    "with include_partial also start those that are not full."
)


def check_order(answer: ModuleType, expected: dict[str, Any]) -> None:
    model = Branches()
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, bucket_mb=1e-4, lr=1.0)
    optimizer._bucket_order = [1, 0, 2, 3, 4]
    started, incomplete = list[int](), list[bool]()

    def record(bucket: Bucket) -> None:  # only record the order: reduce-scatters that do not match would not return
        started.append(optimizer.buckets.index(bucket))
        incomplete.append(not all(each.is_ready for each in optimizer.buckets))

    optimizer._start_reduce = record  # type: ignore[method-assign]
    try:
        model(torch.ones(2, 9)).sum().backward()
    except RuntimeError as error:
        expect(
            "a second backward() ran" not in str(error), f"Rank {dist.get_rank()} starts a bucket twice. {ONE_ORDER}"
        )
        raise
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, started)
    for rank, order in enumerate(orders):
        expect(
            sorted(order) == list(range(5)),
            f"Rank {rank} reduces the buckets {order}, but a step must reduce each of the 5 buckets once. {ONE_ORDER}",
        )
    expect(
        dist.get_rank() % 2 == 1 or incomplete[0],
        "The first bucket is reduced only when all gradients have arrived, so no communication overlaps with the "
        "backward pass: start each bucket as soon as it and those before it are full.",
    )
    expect(
        all(order == orders[0] for order in orders),
        f"The ranks reduce their buckets in different orders: {orders}. Collectives match by the order of their "
        "calls, so gradients of different parameters are added. Use the order of _bucket_order.",
    )
    result = train_sharded(make_flat)
    expect(is_close(result["weights"], expected["weights"]), "The weights after 3 steps differ from one process.")
