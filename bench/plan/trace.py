"""Trace a training step of any phase on any number of ranks, without a GPU and without allocating the tensors.

    config = make_config("phase3", Path("out"), batch_size=4)
    traced = trace(config, GPTConfig(12, 12, 768, 1024, False, 50304), ranks=1024)
    sum(traced.memory.peak.values())        # peak memory of rank 0 in bytes

With `batch_size=SEQUENCES`, one trace gives the memory and the work for every batch size (`BatchMemoryTracker`).

The phase's own code runs one step on fake tensors, which have shapes and no data. The process group uses torch's "fake"
backend, which communicates nothing. `measure/tracker.py` counts the fake tensors like real ones, and `speed.py`
estimates the time of their operators.

Two things differ from a real run. DDP does not accept fake tensors, so the plain model replaces it, with a buffer for
DDP's buckets. And ranks receive no data from each other, so the trace skips the checks in which ZeRO-1's ranks compare
their parameters, and it assumes that every parameter has a gradient.
"""

import contextlib
import inspect
import io
import itertools
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from bench.plan.speed import Roofline
from measure.formulas import find_cost_function
from measure.tracker import MemoryTracker
from nanoGPT.costs import Costs
from nanoGPT.distributed.runtime import DTYPES, Runtime
from nanoGPT.model import ModelConfig
from nanoGPT.optim import allocate_state, clip_grads, configure_optimizer, grad_norm
from nanoGPT.train_config import TrainConfig
from phase1_zero1 import parallelize as zero1
from phase1_zero1 import zero1 as zero1_optimizer
from phase1_zero1.zero1 import Zero1Optimizer
from phase2_triton import apply as triton
from phase2_triton.kernels import checks, linear_cross_entropy
from phase2_triton.kernels.core import record_launches
from phase3_fsdp import fsdp
from phase3_fsdp.fsdp import put_parameters_on_meta

Amounts = dict[str, complex]  # by category

CPU = torch.device("cpu")
SEQUENCES = 1_000_003  # a batch size that stands for all others: a prime that divides no size of a model


def split_amount(amount: int) -> complex:
    """Return bytes or FLOPs in a micro-batch of SEQUENCES as an amount (`bench/plan/speed.py`).

    Every tensor whose size depends on the batch size has a multiple of SEQUENCES bytes.
    """
    return complex(amount) if amount % SEQUENCES else complex(0, amount // SEQUENCES)


@dataclass
class Moment:
    """The memory at one moment of a step.

    Attributes:
        event: the number of the moment, as in `MemoryTracker.timeline`.
        totals: the amount of bytes of each category.
        total: their sum.
    """

    event: int
    totals: Amounts
    total: complex


class BatchMemoryTracker(MemoryTracker):
    """Tracks the memory of a micro-batch of SEQUENCES as amounts, which give the memory for every batch size.

    Attributes:
        moments: for each part of the step, every moment that can be its peak with some batch size.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.moments: dict[str, list[Moment]] = defaultdict(list)
        super().__init__(*args, **kwargs)

    def _size_of(self, storage: torch.UntypedStorage) -> Any:
        return split_amount(super()._size_of(storage))

    def _record(self) -> None:
        """Add this moment, unless an earlier moment of the part has as many bytes or more with every batch size."""
        total = sum(map(complex, self._now.values()))
        moments = self.moments[self.part]
        if not any(m.total.real >= total.real and m.total.imag >= total.imag for m in reversed(moments)):
            moments.append(Moment(self._event, {**self._now}, total))

    def _add_to_earlier(self, size: int, category: str) -> None:
        super()._add_to_earlier(size, category)
        for moment in itertools.chain(*self.moments.values()):
            moment.total += size

    def _recorded_totals(self, first_event: int) -> Iterator[Any]:
        yield from super()._recorded_totals(first_event)
        yield from (m.totals for m in itertools.chain(*self.moments.values()) if m.event >= first_event)


@dataclass
class TrainingSetup:
    """A model and an optimizer as a phase sets them up, and how to handle their gradients.

    Attributes:
        set_sync: takes a bool before each backward pass: whether it is the last micro-batch of the step.
        get_grads: returns the gradients to clip.
        shard_group: process group that shards the gradients; None if every rank has full gradients.
    """

    model: nn.Module
    optimizer: Optimizer
    set_sync: Callable[[bool], None]
    get_grads: Callable[[], list[Tensor]]
    shard_group: dist.ProcessGroup | None


@contextlib.contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Initialize rank 0 of a fake process group. Its collectives return at once and communicate nothing."""

    def init_real_mesh(*args: Any, **kwargs: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return init_device_mesh(*args, **kwargs)

    def repeat_first_chunk(tensor: Tensor, chunks: int, dim: int) -> list[Tensor]:
        return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // chunks))] * chunks

    def propagate_uncounted(propagator: ShardingPropagator, operator: Any) -> Any:
        with _disable_current_modes():  # DTensor makes full tensors here, only to compute the shapes of an operator
            return tensor_meta(propagator, operator)

    tensor_meta = ShardingPropagator._propagate_tensor_meta_non_cached
    # Torch wraps the handler of each mode to turn torch.compile off for every operator. A trace compiles nothing.
    modes = (FakeTensorMode, MemoryTracker, Roofline)
    handlers = [(mode, inspect.unwrap(vars(mode)["__torch_dispatch__"])) for mode in modes]
    patches: list[Any] = [
        *(mock.patch.object(mode, "__torch_dispatch__", handler) for mode, handler in handlers),
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_uncounted),
        mock.patch.object(fsdp, "init_device_mesh", init_real_mesh),
        mock.patch.object(_fsdp_param, "_chunk_with_empty", repeat_first_chunk),  # 1,000 fake tensors take seconds
        mock.patch.object(zero1_optimizer, "check_params", lambda *_: None),
        mock.patch.object(Zero1Optimizer, "_sync_grad_flags", lambda _: None),
        mock.patch.object(checks, "is_interpreted", lambda: False),  # the interpreter would read the targets
        mock.patch.object(linear_cross_entropy, "chunk_rows", lambda M, *_: M),  # 1,000 chunks take seconds
    ]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def skip_launches() -> Iterator[None]:
    """Let Triton kernels apply to fake tensors on every machine, also without Triton, and launch none of them."""
    with record_launches("cuda") as recorder:
        recorder.launches = deque(maxlen=0)  # type: ignore[assignment]  # a recorded launch keeps its tensors alive
        yield


def set_up_replicated(config: TrainConfig, shape: ModelConfig, run: Runtime) -> TrainingSetup:
    """Set up the baseline or phase 2, with `emulate_ddp` in place of DDP."""
    model = shape.create_model()
    if isinstance(config, triton.TritonConfig):
        triton.apply_kernels(model, config.kernels)
    optimizer = configure_optimizer(model, config)  # the kernel of AdamW needs real tensors; its state is the same
    params = list(model.parameters())
    set_sync = emulate_ddp(params) if run.world_size > 1 else lambda is_last: None
    return TrainingSetup(model, optimizer, set_sync, lambda: [p.grad for p in params if p.grad is not None], None)


def emulate_ddp(params: list[nn.Parameter]) -> Callable[[bool], None]:
    """Emulate DDP's memory: allocate its buckets, and move the gradients of the last micro-batch into them.

    Returns:
        A function to call before each backward pass, with whether it is the last micro-batch.
    """
    buckets = torch.zeros(sum(p.numel() for p in params)).split([p.numel() for p in params])
    is_last = [False]

    def move_to_bucket(param: Tensor, bucket: Tensor) -> None:
        if is_last[0]:
            assert param.grad is not None
            param.grad = bucket.view_as(param).copy_(param.grad)

    for param, bucket in zip(params, buckets, strict=True):
        param.register_post_accumulate_grad_hook(lambda param, bucket=bucket: move_to_bucket(param, bucket))
    return lambda value: is_last.__setitem__(0, value)


def set_up_zero1(config: zero1.Zero1Config, shape: ModelConfig, run: Runtime) -> TrainingSetup:
    """Set up phase 1."""
    model = shape.create_model()
    optimizer = zero1.shard_optimizer(model, config)
    parallel_model = zero1.parallelize(model, optimizer, config, run) if config.zero1_backend != "torch" else model
    return TrainingSetup(
        parallel_model,
        optimizer,
        lambda is_last: zero1.set_gradient_sync(parallel_model, optimizer, is_last),
        optimizer.reduce_gradients,
        optimizer.shard_group,
    )


def set_up_fsdp(config: fsdp.FsdpConfig, shape: ModelConfig, run: Runtime) -> TrainingSetup:
    """Set up phase 3."""
    with put_parameters_on_meta():
        model = shape.create_model()
    model = fsdp.shard_model(model, config, run)
    model.to_empty(device="cpu")
    optimizer = fsdp.configure_optimizer(model, config)
    return TrainingSetup(
        model,
        optimizer,
        lambda is_last: fsdp.set_gradient_sync(model, config, is_last),
        lambda: fsdp.local_grads(model),
        fsdp.shard_group(model),
    )


def set_up_training(config: TrainConfig, shape: ModelConfig, run: Runtime) -> TrainingSetup:
    """Set up the phase that the configuration belongs to."""
    if isinstance(config, zero1.Zero1Config):
        return set_up_zero1(config, shape, run)
    if isinstance(config, fsdp.FsdpConfig):
        return set_up_fsdp(config, shape, run)
    return set_up_replicated(config, shape, run)


def run_step(
    setup: TrainingSetup, config: TrainConfig, run: Runtime, micro_batches: int, begin_update: Callable[[], None]
) -> None:
    """Run the step of train.py without reading a value: fake tensors have none.

    Args:
        begin_update: called when the update starts.
    """
    for i in range(micro_batches):
        setup.set_sync(i == micro_batches - 1)
        x = torch.zeros(config.batch_size, config.block_size, dtype=torch.int64)
        with run.autocast():
            loss = setup.model(x, torch.zeros_like(x))
        (loss / micro_batches).backward()
        del loss
    begin_update()
    run_update(setup, config)


def run_update(setup: TrainingSetup, config: TrainConfig) -> None:
    """Clip the gradients and step the optimizer."""
    grads = setup.get_grads()
    clip_grads(grads, grad_norm(grads, setup.shard_group), config.grad_clip)
    del grads
    setup.optimizer.step()


@contextlib.contextmanager
def track_stages(model: nn.Module, memory: MemoryTracker) -> Iterator[None]:
    """Set the current stage of the step on a MemoryTracker, with boundaries that do not depend on the number of blocks.

    From three blocks on, the peak of each of MEMORY_STAGES is linear in the number of blocks, because every block
    between the first and the last adds the same bytes.
    """
    blocks = list(model.blocks)  # type: ignore[arg-type]

    def enter(stage: str) -> Callable[..., None]:
        return lambda *_: setattr(memory, "part", stage)

    def enter_in_backward(stage: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _inputs, output: output.register_hook(enter(stage)) and None

    hooks = [
        blocks[0].register_forward_pre_hook(enter("before")),
        blocks[-1].register_forward_pre_hook(enter("last forward")),
        blocks[-1].register_forward_hook(enter("head")),
        blocks[-1].register_forward_hook(enter_in_backward("last backward")),
        *(block.register_forward_hook(enter_in_backward("middle")) for block in blocks[1:-1]),
        blocks[0].register_forward_hook(enter_in_backward("first backward")),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# The stages are named after the blocks; "head" lies between the forward and the backward pass of the last block.
MEMORY_STAGES = ("last forward", "head", "last backward", "middle", "first backward", "update")


def allocate_optimizer_state(optimizer: Optimizer) -> None:
    """Allocate the state of an optimizer, as its first step does."""
    for inner in getattr(optimizer, "inner_optimizers", None) or [optimizer]:
        allocate_state(inner)


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Hide what the phases print, and torch's warnings about fake tensors."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@dataclass
class TracedStep:
    """Results of a trace: memory and work of rank 0 in `micro_batches` micro-batches, and the cost formula."""

    memory: MemoryTracker
    costs: Costs
    roofline: Roofline
    micro_batches: int

    def moments(self) -> dict[str, list[Amounts]]:
        """Return the amounts by category at every moment of a part that can be its peak with some batch size."""
        if isinstance(self.memory, BatchMemoryTracker):
            return {part: [m.totals for m in moments] for part, moments in self.memory.moments.items()}
        return {part: [{**totals}] for part, totals in self.memory.peak_of_part().items()}


def trace(config: TrainConfig, shape: ModelConfig, ranks: int, only_update: bool = False) -> TracedStep:
    """Trace a training step on rank 0.

    Args:
        config: of a phase. The trace uses its batch_size, block_size, gradient_accumulation_steps, dtype and options.
            With a batch_size of SEQUENCES, the memory tracker is a BatchMemoryTracker.
        shape: of the model.
        ranks: world size.
        only_update: trace only the update, with gradients of zeros.
    """
    dtype = DTYPES.get(config.dtype, torch.float32)
    run = Runtime(0, 0, ranks, ranks, CPU, dtype, uses_autocast=config.uses_autocast)
    micro_batches = min(2, config.gradient_accumulation_steps // ranks)  # every later micro-batch equals the second
    covers_all_sizes = config.batch_size == SEQUENCES
    tracker = BatchMemoryTracker if covers_all_sizes else MemoryTracker
    with (
        suppress_output(),
        fake_process_group(ranks),
        skip_launches(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        setup = set_up_training(config, shape, run)
        allocate_optimizer_state(setup.optimizer)
        if only_update:
            for param in setup.model.parameters():
                param.grad = torch.zeros_like(param)
            setup.get_grads()  # in phase 1 this reduces them
        buffers = find_cost_function(config, "gradient_buffers")(setup.optimizer)
        memory = tracker(setup.model, setup.optimizer, None, buffers, keeps_timeline=False)
        to_amount: Callable[[int], complex] = split_amount if covers_all_sizes else int
        with memory, track_stages(setup.model, memory), Roofline(to_amount) as roofline:

            def begin_update() -> None:
                memory.part = roofline.stage = "update"

            if only_update:
                begin_update()
                run_update(setup, config)
            else:
                run_step(setup, config, run, micro_batches, begin_update)
            setup.optimizer.zero_grad()
        costs = find_cost_function(config, "step_costs")(setup.model, setup.optimizer, config, run)
        return TracedStep(memory, costs, roofline, micro_batches)
