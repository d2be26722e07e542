"""Exercises on ZeRO-1 and ZeRO-2: buckets, slices, shards, the order of collectives, clipping, and sharded gradients."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from nanoGPT.metrics.ledger import CollectiveCounter
from phase1_zero1.buckets import ALIGN, Bucket
from phase1_zero1.naive import NaiveZero1Optimizer
from phase1_zero1.zero1 import Zero1Optimizer
from phase1_zero1.zero2 import Zero2Optimizer
from workshop.exercises.checking import collect_traffic
from workshop.exercises.exercise import Exercise, Mistake, draw, expect, is_close, mistake

BUCKET_MB = 1e-3  # about 1 KB: several small buckets, and shards that begin inside a parameter
SMALL_LR, LARGE_LR = 1e-3, 1e-2


def build_model() -> nn.Module:
    """Return a small model whose parameters have sizes that 4 does not divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 13), nn.Tanh(), nn.Linear(13, 3))


def compute_loss(model: nn.Module, step: int, micro_batch: int) -> Tensor:
    x = draw(5, 7, seed=100 * step + micro_batch)
    return model(x).square().mean() * (3 + micro_batch)


def train_unsharded(steps: int = 3, max_norm: float = 0.5) -> dict[str, Any]:
    """Train in this process on the micro-batches of all ranks, 2 per rank. Return the weights and the norms."""
    model, norms = build_model(), []
    optimizer = AdamW(model.parameters(), lr=SMALL_LR)
    count = 2 * dist.get_world_size()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LARGE_LR if step else SMALL_LR
        for micro_batch in range(count):
            (compute_loss(model, step, micro_batch) / count).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": flatten(model), "norms": norms}


def train_sharded(make_optimizer: Any, steps: int = 3, max_norm: float = 0.5, sync_all: bool = False) -> dict[str, Any]:
    """Train on all ranks with a sharded optimizer. Return weights, norms, gradient bytes and the last step's traffic."""
    model, norms = build_model(), []
    optimizer = make_optimizer(model.parameters(), AdamW, lr=SMALL_LR)
    gradient_bytes = 0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LARGE_LR if step else SMALL_LR
        with CollectiveCounter() as traffic:
            for i in range(2):
                optimizer.require_backward_grad_sync = sync_all or i == 1
                loss = compute_loss(model, step, dist.get_rank() + i * dist.get_world_size())
                (loss / 2).backward()
                gradient_bytes = max(gradient_bytes, count_gradient_bytes(optimizer))
            if hasattr(optimizer, "clip_grad_norm_"):
                norms.append(optimizer.clip_grad_norm_(max_norm).item())
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


def make_flat(*args: Any, **options: Any) -> Zero1Optimizer:
    return Zero1Optimizer(*args, bucket_mb=BUCKET_MB, **options)


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

    buckets = split(params, 480.0)
    order = [i for bucket in buckets for i in bucket]
    expect(sorted(order) == list(range(5)), f"The buckets contain the parameters {order}; each one must be in one bucket.")
    expect(
        order != sorted(order),
        "The buckets follow the order of the model. The backward pass computes the gradients of the last parameters first, "
        "so their bucket would fill last, and no communication would overlap with the backward pass. Begin at the end.",
    )
    for bucket in buckets:
        size = sum(4 * sizes[i] for i in bucket)
        expect(
            size <= 480 or len(bucket) == 1,
            f"A bucket has {size} bytes, above the limit of 480: open a new bucket before a parameter that does not fit. The "
            "limit is in bytes, not in elements.",
        )
    expect([3] in buckets, "A parameter that is larger than the limit gets its own bucket.")
    expect(
        buckets == [[4], [3], [2, 1], [0]],
        f"The buckets are {buckets} instead of [[4], [3], [2, 1], [0]]. Close a bucket only if the next parameter does not "
        "fit: many small buckets need many collectives.",
    )
    mixed = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4).bfloat16()), nn.Parameter(torch.zeros(4))]
    dtypes = [{p.dtype for p in bucket} for bucket in answer.split_into_buckets(mixed, 480.0)]
    expect(all(len(each) == 1 for each in dtypes), "A bucket is one flat buffer, so its parameters must have one dtype.")
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    expect(answer.split_into_buckets([frozen], 480.0) == [], "A frozen parameter has no gradient and needs no bucket.")


def check_partition(answer: ModuleType, _: Any) -> None:
    class FakeBucket:
        pass

    for ranks in (1, 3, 4):
        for numel in (1, ALIGN * ranks, ALIGN * ranks + 1, 1000):
            slices = []
            for rank in range(ranks):
                bucket: Any = FakeBucket()
                bucket.rank, bucket.world_size = rank, ranks
                length, local = answer._partition(bucket, numel)
                slices.append((local.start, local.stop))
            text = f"For {numel} elements on {ranks} ranks, the slices are {slices} of {length} elements."
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
            expect(length - numel < ALIGN * ranks, f"{text} This is more padding than one ALIGN per rank.")


def check_shards(answer: ModuleType, _: Any) -> None:
    model = build_model()
    params = list(model.parameters())
    bucket = Bucket(params, {"lr": 1e-3, "params": params}, lambda shards, group: AdamW(shards), None)
    numel = sum(p.numel() for p in params)
    for shard in bucket.shards:
        expect(
            shard.bucket_slice.stop <= numel,
            "A shard contains padding, which would count in the moments and in the gradient norm.",
        )
        name = f"A shard of parameter {shard.param_index}"
        part = shard.param.detach().flatten()[shard.offset : shard.offset + shard.tensor.numel()]
        expect(
            shard.tensor.shape == part.shape and torch.equal(shard.tensor, part),
            f"{name} does not contain the elements of its parameter from offset {shard.offset} on. The offset counts from "
            "the begin of the parameter, not of the bucket or of the slice.",
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
    covered = torch.tensor(sum(shard.tensor.numel() for shard in bucket.shards))
    dist.all_reduce(covered)
    expect(
        covered == numel,
        f"The shards of all ranks have {int(covered)} elements together, but the parameters have {numel}: each element "
        "belongs to exactly one rank.",
    )


def check_reduce(answer: ModuleType, expected: dict[str, Any]) -> None:
    result = train_sharded(make_flat)
    ratio = result["norms"][0] / expected["norms"][0]
    ranks = dist.get_world_size()
    expect(
        not is_close(ratio, ranks, 1e-3),
        f"The gradient is {ranks} times too large: you compute the sum over the ranks, not the mean.",
    )
    kinds = {kind: calls for kind, (calls, _) in result["traffic"].items() if kind not in ("all-gather", "broadcast")}
    flags_and_norm = 2
    expect(
        kinds.get("all-reduce", 0) <= flags_and_norm,
        f"The ledger counts {kinds}: an all-reduce gives every rank the full mean, and sends twice the bytes of a "
        "reduce-scatter. A rank needs only its own slice.",
    )
    expect(
        is_close(ratio, 1.0, 1e-4),
        f"The gradient norm is {ratio:.3f} times that of one process: the reduce-scatter must write the mean over the ranks "
        "into this rank's slice of flat_grads.",
    )
    expect(is_close(result["weights"], expected["weights"]), "The norm is right, but the weights differ from one process.")


def check_clipping(answer: ModuleType, expected: dict[str, Any]) -> None:
    result = train_sharded(make_flat)
    norms = torch.tensor(result["norms"], dtype=torch.float64)
    check_same_on_all_ranks(
        norms,
        "The norm differs between ranks: each rank clips by its own norm, so each slice is scaled by another factor. Sum the "
        "squares over all ranks before the square root.",
    )
    expect(
        is_close(norms[:1], expected["norms"][:1], 1e-5),
        f"The norm is {norms[0]:.6f}, but one process has {expected['norms'][0]:.6f}.",
    )
    expect(
        is_close(norms, expected["norms"], 1e-5) and is_close(result["weights"], expected["weights"], 1e-5),
        "The norm of step 0 is right, but the updated weights differ from one process: scale this rank's shards of the "
        "gradient by max_norm / norm before the update.",
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
    "Stop at the first bucket of the common order that is not full, count the started buckets in _num_started, and with "
    "include_partial also start those that are not full."
)


def check_order(answer: ModuleType, expected: dict[str, Any]) -> None:
    model = Branches()
    optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, bucket_mb=1e-4, lr=1.0)
    started = list[int]()
    # Only record the order: reduce-scatters that do not match would not return.
    optimizer._start_reduce = lambda bucket: started.append(optimizer.buckets.index(bucket))  # type: ignore[assignment]
    try:
        model(torch.ones(2, 9)).sum().backward()
    except RuntimeError as error:
        expect("a second backward() ran" not in str(error), f"Rank {dist.get_rank()} starts a bucket twice. {ONE_ORDER}")
        raise
    orders: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(orders, started)
    for rank, order in enumerate(orders):
        expect(
            sorted(order) == list(range(5)),
            f"Rank {rank} reduces the buckets {order}, but a step must reduce each of the 5 buckets once. {ONE_ORDER}",
        )
    expect(
        all(order == orders[0] for order in orders),
        f"The ranks reduce their buckets in different orders: {orders}. Collectives match by the order of their calls, so "
        "gradients of different parameters are added. Use the order of _bucket_order.",
    )
    result = train_sharded(make_flat)
    expect(is_close(result["weights"], expected["weights"]), "The weights after 3 steps differ from one process.")


def split_weights(weights: Tensor) -> list[Tensor]:
    return list(weights.split([p.numel() for p in build_model().parameters()]))


def check_naive(answer: ModuleType, expected: dict[str, Any]) -> None:
    result = train_sharded(NaiveZero1Optimizer)
    weights, traffic = result["weights"], result["traffic"]
    check_same_on_all_ranks(
        weights,
        "The ranks have different parameters after the step: a rank updates only the parameters that it owns. Broadcast each "
        "parameter from its owner.",
    )
    initial = flatten(build_model())
    expect(not torch.equal(weights, initial), "The parameters have not changed: step the local optimizer.")
    unchanged = [torch.equal(a, b) for a, b in zip(*(split_weights(w) for w in (weights, initial)), strict=True)]
    expect(
        not any(unchanged),
        f"{sum(unchanged)} of the parameters have not changed. Only its owner has the new values of a parameter, so broadcast "
        "each parameter from its owner.",
    )
    calls, size = traffic.get("broadcast", (0, 0))
    expect(
        size == initial.nbytes,
        f"The ledger counts broadcasts of {size:,} bytes, but the parameters have {initial.nbytes:,}: each parameter is "
        "broadcast once, from its owner.",
    )
    expect(
        traffic["all-reduce"][1] == initial.nbytes,
        "The gradients must be averaged once per step: call reduce_gradients, which remembers that it has run.",
    )
    expect(
        is_close(weights, expected["weights"]),
        "The parameters are equal on all ranks, but differ from one process. The learning rate changes in every step: copy "
        "the options of self.param_groups to the groups of the local optimizer before its step.",
    )


def check_owners(answer: ModuleType, _: Any) -> None:
    def get_loads(sizes: tuple[int, ...], ranks: int) -> list[int]:
        params = [torch.empty(size) for size in sizes]
        owner = answer.assign_owners(params, ranks, Tensor.numel)
        expect(len(owner) == len(params), "Each parameter must have exactly one owner.")
        return [sum(p.numel() for p, r in owner.items() if r == rank) for rank in range(ranks)]

    expect(sorted(get_loads((8, 7, 1, 1, 1), 2)) == [8, 10] or sorted(get_loads((8, 7, 1, 1, 1), 2)) == [9, 9],
           "One rank gets nearly all parameters: give each parameter to the rank that has the least so far.")  # fmt: skip
    loads = get_loads((2, 2, 2, 6), 2)
    expect(
        loads == [6, 6],
        f"The ranks store {loads} elements instead of 6 each. Assign the largest parameters first, and then each one to the "
        "rank whose parameters have the smallest total cost so far. A large parameter at the end cannot be balanced.",
    )
    squares = answer.assign_owners([torch.empty(n) for n in (4, 3, 3, 2)], 2, lambda p: p.numel() ** 2)
    loads = [sum(p.numel() ** 2 for p, r in squares.items() if r == rank) for rank in range(2)]
    expect(sorted(loads) == [18, 20] or sorted(loads) == [16, 22], f"The costs {loads} ignore the argument `cost`.")


def check_zero2(answer: ModuleType, expected: dict[str, Any]) -> None:
    def make(*args: Any, **options: Any) -> Zero2Optimizer:
        optimizer = Zero2Optimizer.__new__(Zero2Optimizer)
        optimizer.bucket_class = answer.Zero2Bucket
        optimizer.__init__(*args, bucket_mb=BUCKET_MB, **options)  # type: ignore[misc]
        return optimizer

    result = train_sharded(make, sync_all=True)
    expect(
        result["gradient_bytes"] == 0,
        f"Between two backward passes a rank stores {result['gradient_bytes']:,} bytes of full gradients: ZeRO-2 frees the "
        "buffer of a bucket as soon as its reduce-scatter has ended and this rank's slice is added to local_grads.",
    )
    ratio = result["norms"][0] / expected["norms"][0]
    expect(
        is_close(ratio, 1.0, 1e-4),
        f"The gradient norm of step 0 is {ratio:.3f} times that of one process. Each micro-batch reduces its own gradient: "
        "add this rank's slice of every average to local_grads.",
    )
    ratio = result["norms"][1] / expected["norms"][1]
    expect(
        is_close(ratio, 1.0, 1e-4),
        f"The gradient norm of step 1 is {ratio:.3f} times that of one process, and step 0 was right: the gradients of step "
        "0 are still in local_grads. Set them to zero in clear_gradients.",
    )
    calls, size = result["traffic"]["reduce-scatter"]
    expect(size > 0 and is_close(result["weights"], expected["weights"]), "The weights differ from one process.")


EXERCISES = [
    Exercise(
        name="zero1.1",
        title="Split the parameters into buckets",
        targets=("phase1_zero1.buckets:split_into_buckets",),
        task="""One collective over 25 MB is faster than hundreds over single parameters. Split the parameters that need a
        gradient into buckets of at most `limit` bytes and one dtype. The bucket that fills first must come first.""",
        minutes=10,
        difficulty="easy",
        check=check_buckets,
        nudge="In which order does the backward pass compute the gradients?",
        idea="Go through the parameters from the last to the first, and keep one open bucket per dtype.",
        line="if not bucket or",
        mistakes=(
            mistake("reversed([p for p in params if p.requires_grad and p.numel()])", "[p for p in params if p.requires_grad]", "Begin at the end"),
            mistake("size + param.nbytes > limit", "size > limit", "above the limit"),
            mistake("open_buckets.get(param.dtype, ([], 0))", "open_buckets.get(torch.float32, ([], 0))", "must have one dtype"),
        ),
    ),
    Exercise(
        name="zero1.2",
        title="Partition a bucket into equal slices",
        targets=("phase1_zero1.buckets:Bucket._partition",),
        task="""A reduce-scatter needs N slices of equal length. Return the padded length of a bucket with `numel` elements,
        and the slice of rank self.rank of self.world_size. Each slice begins at a multiple of ALIGN elements.""",
        minutes=5,
        difficulty="easy",
        check=check_partition,
        nudge="How long must a slice be at least, and to which number do you round it?",
        idea="Round numel / world_size up to a multiple of ALIGN.",
        line="slice_length =",
        mistakes=(
            mistake("math.ceil(numel / (ALIGN * self.world_size))", "(numel // (ALIGN * self.world_size))", "Round up"),
            mistake("ALIGN * math.ceil(numel / (ALIGN * self.world_size))", "math.ceil(numel / self.world_size)", "multiple of ALIGN"),
            mistake("return slice_length * self.world_size,", "return numel,", "must follow each other"),
        ),
    ),
    Exercise(
        name="zero1.3",
        title="Find the shards in a slice",
        targets=("phase1_zero1.buckets:Bucket._create_shards",),
        task="""This rank's slice of a bucket may begin and end inside a parameter. Return a Shard for each parameter that
        overlaps with self.local_slice. A shard is a view into self.flat_params, without padding. For a parameter in
        bfloat16 or float16, the tensor of the shard is a copy in fp32, the master.""",
        minutes=25,
        difficulty="hard",
        ranks=4,
        check=check_shards,
        nudge="Keep the position at which the current parameter begins in the bucket.",
        idea="The overlap is from max(begin of the parameter, begin of the slice) to min(end of both). It may be empty.",
        line="elements = slice",
        mistakes=(
            mistake("Shard(param, index, elements.start - begin,", "Shard(param, index, elements.start,", "The offset counts from the begin of the parameter"),
            mistake("tensor = part.float() if is_low_precision else part", "tensor = part.clone()", "take a view"),
            mistake("first = elements.start - self.local_slice.start", "first = 0", "the gradient of other elements"),
        ),
    ),
    Exercise(
        name="zero1.4",
        title="Average the gradients of a bucket",
        targets=("phase1_zero1.buckets:Bucket._reduce",),
        task="""Plain data parallelism all-reduces gradients: every rank gets the full mean. In ZeRO-1 a rank updates only its
        slice. Start the collective that averages self.flat_grads and writes this rank's slice in place, asynchronously,
        and return its handle.""",
        minutes=10,
        difficulty="easy",
        ranks=2,
        check=check_reduce,
        prepare=train_unsharded,
        nudge="Which collective gives each rank only its slice of the result?",
        idea="reduce_scatter(output, input, op, group, async_op=True); the output may be a slice of the input.",
        line="return reduce_scatter",
        mistakes=(
            mistake("dist.ReduceOp.AVG", "dist.ReduceOp.SUM", "not the mean"),
            mistake(
                "return reduce_scatter(local_grads, self.flat_grads, dist.ReduceOp.AVG, self.group, async_op=True)",
                "return dist.all_reduce(self.flat_grads, dist.ReduceOp.AVG, self.group, async_op=True)",
                "sends twice the bytes of a reduce-scatter",
            ),
            mistake("reduce_scatter(local_grads,", "reduce_scatter(local_grads.clone(),", "into this rank's slice"),
        ),
    ),
    Exercise(
        name="zero1.5",
        title="Clip by the global norm of sharded gradients",
        targets=("phase1_zero1.zero1:Zero1Optimizer.clip_grad_norm_",),
        task="""After the reduce-scatter, a rank has the mean gradient of its own slice only. Clip by the norm of the full
        gradient, and return that norm. self.reduce_gradients() returns this rank's shards; grad_norm and clip_grads are
        the functions of the baseline.""",
        minutes=10,
        difficulty="easy",
        ranks=4,
        check=check_clipping,
        prepare=train_unsharded,
        nudge="Would all ranks compute the same factor?",
        idea="grad_norm takes the process group over which the gradients are sharded, and sums the squares over it.",
        line="norm = grad_norm",
        mistakes=(
            mistake("grad_norm(grads, self.shard_group)", "grad_norm(grads)", "each rank clips by its own norm"),
            mistake("    clip_grads(grads, norm, max_norm)\n", "", "scale this rank's shards"),
            Mistake(
                (
                    (
                        "norm = grad_norm(grads, self.shard_group)",
                        "norm = torch.nn.utils.clip_grad_norm_([p for b in self.buckets for p in b.params], max_norm)",
                    ),
                    ("    clip_grads(grads, norm, max_norm)\n", ""),
                    ("from torch import Tensor\n", "import torch\nfrom torch import Tensor\n"),
                ),
                "each rank clips by its own norm",
            ),
        ),
    ),
    Exercise(
        name="zero1.6",
        title="Reduce the buckets of all ranks in one order",
        targets=("phase1_zero1.zero1:Zero1Optimizer._reduce_full_buckets",),
        task="""A bucket can be reduced as soon as all of its gradients are ready. But the buckets may fill in another order on
        another rank, and collectives match by the order of their calls. self._bucket_order is an order that all ranks
        share, and self._num_started counts the buckets of this step that were started. Start the next ones with
        self._start_reduce, as many as possible. With include_partial, do not wait for full buckets.""",
        minutes=15,
        difficulty="medium",
        ranks=2,
        check=check_order,
        prepare=train_unsharded,
        nudge="Bucket 2 is full, and bucket 1 comes before it in the common order. May you start bucket 2?",
        idea="Walk through _bucket_order from _num_started on, and stop at the first bucket that is not full.",
        line="if not (include_partial",
        mistakes=(
            mistake("            break", "            continue", "Stop at the first bucket of the common order"),
            Mistake(
                (
                    (
                        "for bucket_index in self._bucket_order[self._num_started :]:",
                        "for bucket_index in [i for i in self._bucket_order if i not in self.__dict__.setdefault('done', [])]:",
                    ),
                    ("            break", "            continue"),
                    ("        self._num_started += 1", "        self._num_started += 1\n        self.done.append(bucket_index)"),
                ),
                "in different orders",
            ),
            mistake("if not (include_partial or self.buckets", "if not (self.buckets", "with include_partial"),
        ),
    ),
    Exercise(
        name="zero1.7",
        title="Write the step of naive ZeRO-1",
        targets=("phase1_zero1.naive:NaiveZero1Optimizer.step",),
        task="""In the simplest form of ZeRO-1, a rank has optimizer state only for the parameters that it owns:
        self.local_optimizer updates these. Average the gradients with self.reduce_gradients(), give the local optimizer
        the current options of self.param_groups, step it, and broadcast every parameter of self.trainable_params from its
        owner, self.owner[param]. At the end, set self.is_reduced to False.""",
        minutes=15,
        difficulty="medium",
        ranks=2,
        check=check_naive,
        prepare=lambda: train_unsharded(max_norm=1e9),
        nudge="After the local update, which ranks have the new values of a parameter?",
        idea="dist.broadcast(param, src=owner) for each parameter, in the same order on all ranks.",
        line="dist.broadcast",
        mistakes=(
            mistake("        dist.broadcast(param, src=self.owner[param])", "        pass", "Broadcast each"),
            mistake("src=self.owner[param]", "src=0", "Only its owner has the new values"),
            mistake(
                "local_group.update({name: value for name, value in group.items() if name != \"params\"})",
                "pass",
                "The learning rate changes in every step",
            ),
        ),
    ),
    Exercise(
        name="zero1.8",
        title="Assign parameters to ranks evenly",
        targets=("nanoGPT.distributed.sharding:assign_owners",),
        task="""If each rank owns full parameters, the slowest rank decides how long a step takes. Return one owner per
        parameter, so that the largest total cost of a rank is small.""",
        minutes=10,
        difficulty="easy",
        check=check_owners,
        nudge="What happens to the balance if the largest parameter is assigned last?",
        idea="Sort by cost, largest first, and give each parameter to the rank with the smallest load so far.",
        line="for param in sorted",
        mistakes=(
            mistake("sorted(params, key=cost, reverse=True)", "params", "Assign the largest parameters first"),
            mistake("load.index(min(load))", "0", "One rank gets nearly all parameters"),
            mistake("load[owner[param]] += cost(param)", "load[owner[param]] += 1", "smallest total cost"),
        ),
    ),
    Exercise(
        name="zero1.9",
        title="Write ZeRO-2: store only this rank's slice of the gradients",
        targets=("phase1_zero1.zero2:Zero2Bucket",),
        task="""In ZeRO-1 a rank keeps the full gradients, 4P bytes, and uses 1/N of them. Write the bucket of ZeRO-2. It
        allocates flat_grads when the first gradient arrives (Bucket._allocate_gradients does it), reduce-scatters it in
        every micro-batch, adds this rank's slice of the average to local_grads, and frees flat_grads.
        _free_full_gradients sets flat_grads to an empty tensor and grad_views to an empty list.

        The check counts the bytes of full gradients between the backward passes, and compares norms and weights with one
        process.""",
        minutes=40,
        difficulty="advanced",
        ranks=2,
        check=check_zero2,
        prepare=train_unsharded,
        nudge="Write down, for each method of Bucket, whether flat_grads exists before and after it.",
        idea="add_average waits, adds flat_grads[self.local_slice] to local_grads, frees flat_grads, and clears ready_params.",
        line="self.local_grads += ",
        mistakes=(
            Mistake(
                (
                    (
                        "        self.local_grads += self.flat_grads[self.local_slice]\n        self._free_full_gradients()\n",
                        "        self.local_grads += self.flat_grads[self.local_slice]\n",
                    ),
                ),
                "ZeRO-2 frees the buffer",
            ),
            mistake("self.local_grads += self.flat_grads", "self.local_grads[:] = self.flat_grads", "add this rank's slice of every average"),
            mistake("        self._free_full_gradients()\n        self.local_grads.zero_()\n", "        self._free_full_gradients()\n", "Set them to zero"),
        ),
    ),
]
