"""A training step of any phase on any number of ranks, traced with no GPU and in no memory.

    config = config_of("phase3", Path("out"), batch_size=4)
    traced = trace(config, GPTConfig(12, 12, 768, 1024, False, 50304), ranks=1024)
    sum(traced.memory.peak.values())        # bytes on rank 0

The phase's own code runs a step, under a process group that sends nothing (torch's "fake" backend) and on fake
tensors, which have shapes and no bytes; `nanoGPT/memory/tracker.py` counts them as it does real ones, and `speed.py`
how long their operators would take. Two things cannot be run so. DDP refuses fake tensors: in its place is the bare
model, with a buffer for DDP's buckets. And what ranks tell each other cannot be read: ZeRO-1's checks among ranks are
left out, and every parameter has a gradient.
"""

import contextlib
import io
import warnings
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

import nanoGPT.memory.costs
import phase1_zero1.costs
import phase3_fsdp.costs
from bench.plan.speed import GPUS, Gpu, Roofline
from nanoGPT.checkpoint.state import allocate_state
from nanoGPT.distributed.runtime import DTYPES, Runtime
from nanoGPT.memory.costs import Costs
from nanoGPT.memory.tracker import Memory
from nanoGPT.metrics.ledger import StepCosts, Traffic
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import clip_grads, configure_optimizer, grad_norm
from nanoGPT.train_config import TrainConfig
from phase1_zero1 import parallelize as zero1
from phase1_zero1 import zero1 as zero1_optimizer
from phase1_zero1.zero1 import Zero1Optimizer
from phase2_triton import apply as triton
from phase2_triton.kernels import checks, linear_cross_entropy
from phase3_fsdp import fsdp

CPU = torch.device("cpu")


@dataclass
class Job:
    """What a phase makes of a model: what to call, whom to tell of the last micro-batch, whose norm to take."""

    model: nn.Module
    optimizer: Optimizer
    sync: Callable[[bool], None]
    grads: Callable[[], list[Tensor]]
    shard_group: dist.ProcessGroup | None


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """Rank 0 of a process group whose collectives return at once, and give nothing that could be read."""

    def mesh_of_numbers(*words: Any, **options: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return init_device_mesh(*words, **options)

    def first_chunk(tensor: Tensor, chunks: int, dim: int) -> list[Tensor]:
        return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // chunks))] * chunks

    def uncounted(propagator: ShardingPropagator, operator: Any) -> Any:
        with _disable_current_modes():  # whole tensors, which DTensor makes to learn an operator's shapes
            return tensor_meta(propagator, operator)

    tensor_meta = ShardingPropagator._propagate_tensor_meta_non_cached
    left_out: list[Any] = [
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted),
        mock.patch.object(fsdp, "init_device_mesh", mesh_of_numbers),
        mock.patch.object(_fsdp_param, "_chunk_with_empty", first_chunk),  # a thousand fake tensors take seconds
        mock.patch.object(zero1_optimizer, "check_params", lambda *_: None),
        mock.patch.object(Zero1Optimizer, "_agree", lambda _: None),
        mock.patch.object(checks, "interpreting", lambda: False),  # which would look at the targets
        mock.patch.object(linear_cross_entropy, "chunk_rows", lambda M, *_: M),  # a thousand chunks take seconds
    ]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with contextlib.ExitStack() as stack:
            for each in left_out:
                stack.enter_context(each)
            yield
    finally:
        dist.destroy_process_group()


def plain(config: TrainConfig, shape: GPTConfig, run: Runtime) -> Job:
    """The baseline and phase 2: DDP's buckets are one buffer, of which every gradient is a view."""
    model = GPT(shape)
    if isinstance(config, triton.TritonConfig):
        kernels = triton.parse_kernels(config.kernels) - {"adamw"}  # it reads tables, and its state is AdamW's
        triton.apply_kernels(model, ",".join(sorted(kernels)) or "none")
    optimizer = configure_optimizer(model, config)
    params = list(model.parameters())
    sync = as_ddp(params) if run.world_size > 1 else lambda last: None
    return Job(model, optimizer, sync, lambda: [p.grad for p in params if p.grad is not None], None)


def as_ddp(params: list[nn.Parameter]) -> Callable[[bool], None]:
    """Do to gradients what DDP does: those of the last micro-batch move into buckets, which are there all the time.

    Returns:
        What is to be told before each backward, whether it is the last.
    """
    buckets = torch.zeros(sum(p.numel() for p in params)).split([p.numel() for p in params])
    last = [False]

    def move(param: Tensor, bucket: Tensor) -> None:
        if last[0]:
            assert param.grad is not None
            param.grad = bucket.view_as(param).copy_(param.grad)

    for param, bucket in zip(params, buckets, strict=True):
        param.register_post_accumulate_grad_hook(lambda param, bucket=bucket: move(param, bucket))
    return lambda is_last: last.__setitem__(0, is_last)


def sharded_optimizer(config: zero1.Zero1Config, shape: GPTConfig, run: Runtime) -> Job:
    """Phase 1."""
    model = GPT(shape)
    optimizer = zero1.shard_optimizer(model, config, run)
    replica = zero1.data_parallel(model, optimizer, config, run) if optimizer.averages_gradients else model
    return Job(
        replica,
        optimizer,
        lambda last: zero1.set_gradient_sync(replica, optimizer, last),
        optimizer.reduce_gradients,
        optimizer.shard_group,
    )


def sharded_model(config: fsdp.FsdpConfig, shape: GPTConfig, run: Runtime) -> Job:
    """Phase 3."""
    with fsdp.init_device(config, run):
        model = GPT(shape)
    model = fsdp.shard_model(model, config, run)
    model.to_empty(device="cpu")
    optimizer = configure_optimizer(model, config)
    return Job(
        model,
        optimizer,
        lambda last: fsdp.set_gradient_sync(model, config, last),
        lambda: fsdp.local_grads(model),
        fsdp.shard_group(model),
    )


def job_of(config: TrainConfig, shape: GPTConfig, run: Runtime) -> Job:
    if isinstance(config, zero1.Zero1Config) and config.use_zero1:
        return sharded_optimizer(config, shape, run)
    if isinstance(config, fsdp.FsdpConfig) and config.use_fsdp:
        return sharded_model(config, shape, run)
    return plain(config, shape, run)


def step(job: Job, config: TrainConfig, run: Runtime, micro_batches: int, name: Callable[[str], None]) -> None:
    """The step of train.py, without looking at a number.

    Args:
        name: told "update" when that begins.
    """
    for i in range(micro_batches):
        job.sync(i == micro_batches - 1)
        x = torch.zeros(config.batch_size, config.block_size, dtype=torch.int64)
        with run.autocast():
            loss = job.model(x, torch.zeros_like(x))[1]
        (loss / micro_batches).backward()
        del loss
    name("update")
    grads = job.grads()
    clip_grads(grads, grad_norm(grads, job.shard_group), config.grad_clip)
    del grads
    job.optimizer.step()


@contextlib.contextmanager
def parts_named(model: nn.Module, memory: Memory) -> Iterator[None]:
    """Tell a Memory in which part of a step it is, such that a part does the same in a model of any number of blocks.

    From three blocks on, the most that each of MOMENTS holds is then linear in their number: the blocks between the
    first and the last lead from one part to the next in equal steps.
    """
    blocks = list(model.blocks)  # type: ignore[arg-type]

    def begins(part: str) -> Callable[..., None]:
        return lambda *_: setattr(memory, "part", part)

    def backward_begins(part: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _inputs, output: output.register_hook(begins(part)) and None

    hooks = [
        blocks[0].register_forward_pre_hook(begins("before")),
        blocks[-1].register_forward_pre_hook(begins("last forward")),
        blocks[-1].register_forward_hook(begins("head")),
        blocks[-1].register_forward_hook(backward_begins("last backward")),
        *(block.register_forward_hook(backward_begins("middle")) for block in blocks[1:-1]),
        blocks[0].register_forward_hook(backward_begins("first backward")),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


MOMENTS = ("last forward", "head", "last backward", "middle", "first backward", "update")


def make_state(optimizer: Optimizer) -> None:
    """Let an optimizer make its state, as its first step does."""
    for inner in optimizer.inner_optimizers() if hasattr(optimizer, "inner_optimizers") else [optimizer]:
        allocate_state(inner)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Nothing is said of kernels that are chosen, nor of the addresses of fake tensors."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def step_costs_of(config: TrainConfig) -> StepCosts:
    """The formula of the trainer whose configuration this is."""
    if isinstance(config, zero1.Zero1Config):
        return phase1_zero1.costs.step_costs
    return phase3_fsdp.costs.step_costs if isinstance(config, fsdp.FsdpConfig) else nanoGPT.memory.costs.step_costs


@dataclass
class Traced:
    """What a step of rank 0 held and did in its micro-batches, and what it costs by the formula."""

    memory: Memory
    traffic: Traffic
    costs: Costs
    roofline: Roofline
    micro_batches: int


def trace(config: TrainConfig, shape: GPTConfig, ranks: int, gpu: Gpu = GPUS["h100"]) -> Traced:
    """Trace a step.

    Args:
        config: a phase's; its batch_size, block_size, gradient_accumulation_steps, dtype and options.
        shape: of the model.
        ranks: how many share the work.
        gpu: that the roofline is of.
    """
    dtype = DTYPES.get(config.dtype, torch.float32)
    run = Runtime(0, 0, ranks, ranks, CPU, dtype)
    micro_batches = min(2, config.gradient_accumulation_steps // ranks)  # from the second on, each is as the last
    with quietly(), fake_world(ranks), FakeTensorMode(allow_non_fake_inputs=True):
        job = job_of(config, shape, run)
        make_state(job.optimizer)
        traffic = Traffic()
        memory = Memory(job.model, job.optimizer, also=traffic.record)
        with memory, parts_named(job.model, memory), Roofline(gpu) as roofline:

            def name(part: str) -> None:
                memory.part = roofline.part = part

            step(job, config, run, micro_batches, name)
            job.optimizer.zero_grad()
        return Traced(
            memory, traffic, step_costs_of(config)(job.model, job.optimizer, config, run), roofline, micro_batches
        )
