"""Predict memory and time of one phase: trace models with a few blocks and extrapolate to the full model."""

import multiprocessing
import os
import signal
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from bench.matrix.cells import make_config
from bench.plan.cache import read_trace, trace_path, write_trace
from bench.plan.speed import (
    GIB,
    GPUS_PER_NODE,
    STAGES,
    Gpu,
    Work,
    apply_launch_bound,
    estimate_communication,
    estimate_gpu_seconds,
    evaluate_amount,
    step_seconds,
)
from bench.plan.trace import MEMORY_STAGES, SEQUENCES, Amounts, trace
from measure.tracker import CATEGORIES
from nanoGPT.costs import ring_bytes
from nanoGPT.distributed.runtime import DTYPES
from nanoGPT.model import ModelConfig
from nanoGPT.train_config import TrainConfig
from phase2_triton.apply import choose_kernels
from phase2_triton.changes import find_change
from phase2_triton.kernels import linear_cross_entropy
from phase2_triton.kernels.core import KernelError

Row = tuple[str, dict[str, Any]]  # a phase, and its options that differ from the defaults
Numbers = Mapping[Any, float]
TRACED_LAYERS = (3, 4)  # number of blocks in the two traced models
OPTIONS_OF_UPDATE = ("zero_stage", "fsdp_shard_size", "fsdp_cpu_offload")  # the options that change an update
MAX_BATCH_SIZE = 128  # the planner tries no larger micro-batch
# CPU offload: bytes/s of the host memory that all GPUs of a node share, and bytes per parameter that AdamW reads and
# writes in host memory.
HOST_BANDWIDTH, ADAMW_BYTES = 200e9, 28
HOST_GIB = 2048  # host memory for 8 GPUs, as in a DGX H100


def select_auto_kernels(row: Row, shape: ModelConfig, device_type: str = "cuda", is_compiled: bool = False) -> Row:
    """Return the row with the kernels that `--kernels=auto` selects; a trace runs on fake devices, and needs a list.

    The list is without adamw, which changes neither memory nor communication.

    Args:
        row: a phase and its options.
        shape: of the model.
        device_type: the device that the plan is for.
        is_compiled: whether torch.compile compiles the model.
    """
    phase, options = row
    if options.get("kernels", "none").lower() != "auto":
        return row
    names = choose_kernels("auto", device_type, is_compiled, shape.n_embd // shape.n_head)
    model = replace(shape, n_layer=1).create_on_meta()
    kernels = ",".join(sorted(name for name in names if not find_change(model, name))) or "none"
    return phase, {**options, "kernels": kernels}


def estimate_usable_bytes(gpu: Gpu) -> float:
    """Return the bytes of a GPU's memory that tensors can use, without CUDA, NCCL and fragmentation."""
    return (0.92 * gpu.gib - 1) * GIB


@dataclass
class TraceSummary:
    """Results of one trace. Every number, except those of Muon's update, is linear in the number of blocks.

    Attributes:
        moments: for each of MEMORY_STAGES, the amounts by category at every moment that can be its peak with some batch
            size.
        state: bytes of model state by the formula.
        traffic: bytes of the full tensors by kind of collective and number of ranks.
        eager, compiled: the work of the kernels of an eager and of a compiled model.
        micro_batches: number of micro-batches that the trace ran.
    """

    moments: dict[str, list[Amounts]]
    state: Numbers
    traffic: Numbers
    eager: list[Work]
    compiled: list[Work]
    micro_batches: int

    def peaks(self, batch_size: int) -> dict[str, dict[str, float]]:
        """Return the bytes by category at the memory peak of each of MEMORY_STAGES."""
        peaks = {}
        for stage, moments in self.moments.items():
            candidates = [{name: evaluate_amount(n, batch_size) for name, n in totals.items()} for totals in moments]
            peaks[stage] = max(candidates, key=lambda each: sum(each.values()))
        return peaks

    def seconds(self, works: list[Work], gpu: Gpu, batch_size: int) -> dict[str, float]:
        """Return the seconds on the GPU per stage, per micro-batch; for the update, per step."""
        return self._per_micro_batch(estimate_gpu_seconds(works, gpu, batch_size))

    def kernels(self) -> dict[str, float]:
        """Return the kernels that the eager model launches per stage, per micro-batch; for the update, per step."""
        return self._per_micro_batch(Counter(work.stage for work in self.eager))

    def _per_micro_batch(self, totals: Mapping[str, float]) -> dict[str, float]:
        return {stage: totals[stage] / (1 if stage == "update" else self.micro_batches) for stage in STAGES}


def exit_with_parent() -> None:
    """Set up a worker process: ignore Ctrl-C, which the parent handles, and exit when the parent exits or is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class Job:
    """What all rows of a plan have in common.

    Attributes:
        shape: of the full model.
        gpu: the GPUs and their links.
        gpus: number of ranks.
        micro_batches: per rank and step.
        optimizer: adamw or muon.
        dtype: of matrix products and all-gathers.
    """

    shape: ModelConfig
    gpu: Gpu
    gpus: int
    micro_batches: int = 1
    optimizer: str = "adamw"
    dtype: str = "bfloat16"

    @cached_property
    def params(self) -> int:
        """Number of parameters of the model."""
        return self.shape.count_params()

    @cached_property
    def flops_per_token(self) -> int:
        """FLOPs of forward and backward per token."""
        return self.shape.flops_per_token()


def trace_row(row: Row, job: Job, batch_size: int = SEQUENCES, only_update: bool = False) -> TraceSummary:
    """Trace a training step of a row, or only its update. Run it in a separate process (see `summarize_trace`).

    By default, the results are for every batch size.

    The traced model is eager, so `kernels=auto` selects the kernels of an eager model. Both times of a plan use them.
    """
    phase, options = select_auto_kernels(row, job.shape)
    fields = {"batch_size": batch_size, "block_size": job.shape.block_size, "dtype": job.dtype, "device": "cpu"}
    fields |= {"gradient_accumulation_steps": job.micro_batches * job.gpus, "optimizer": job.optimizer}
    return summarize_trace(make_config(phase, Path("out"), **fields, **options), job, only_update)


def submit_trace(
    pool: Executor, row: Row, job: Job, batch_size: int = SEQUENCES, only_update: bool = False
) -> Future[TraceSummary]:
    """Return a future of the result of `trace_row`, which runs in a worker process if no earlier plan has saved it.

    A trace does not depend on the type of GPU.
    """
    arguments = (row, job.shape, job.gpus, job.micro_batches, job.optimizer, job.dtype, batch_size, only_update)
    file = trace_path(arguments)
    future: Future[TraceSummary] = Future()
    if result := read_trace(file):
        future.set_result(result)
    else:
        future = pool.submit(trace_row, row, job, batch_size, only_update)
        future.add_done_callback(lambda done: write_trace(file, done.result))
    return future


def summarize_trace(config: TrainConfig, job: Job, only_update: bool = False) -> TraceSummary:
    """Trace a training step of a configuration, or only its update. This initializes a process group for a moment."""
    traced = trace(config, job.shape, job.gpus, only_update)
    works = traced.roofline.eager, traced.roofline.compiled
    return TraceSummary(traced.moments(), traced.costs.state, traced.costs.traffic, *works, traced.micro_batches)


# At its peak an eager model has the logits in fp32, their gradient, and a result of the loss: 12 bytes per logit. A
# compiled one without the loss kernel has only the gradient, in 16 bits.
SAVED_PER_LOGIT = 10


def estimate_loss_workspace(row: Row, job: Job, batch_size: int) -> int:
    """Return the bytes that the fused loss allocates inside its kernel, which a trace cannot see; 0 without it."""
    kernels = select_auto_kernels(row, job.shape)[1].get("kernels", "all" if row[0] == "phase2" else "none")
    if "loss" not in choose_kernels(kernels, "cuda", False, 1):
        return 0
    tokens, itemsize = batch_size * job.shape.block_size, DTYPES[job.dtype].itemsize
    return linear_cross_entropy.cost(tokens, job.shape.n_embd, job.shape.vocab_size, itemsize).workspace


def extrapolate(values: Sequence[Numbers], n_layer: int) -> dict[Any, float]:
    """Return the numbers of a model with `n_layer` blocks, from those of the models with TRACED_LAYERS blocks."""
    few, more = values
    step = (n_layer - TRACED_LAYERS[0]) / (TRACED_LAYERS[1] - TRACED_LAYERS[0])
    return {name: few.get(name, 0) + step * (more.get(name, 0) - few.get(name, 0)) for name in {**few, **more}}


def extrapolate_peak(
    peaks: Sequence[Mapping[str, Numbers]],
    n_layer: int,
    update: TraceSummary | None,
    shards_gradients: bool,
) -> dict[str, dict[str, float]]:
    """Return the bytes by category at the memory peak of each of MEMORY_STAGES of the full model.

    Args:
        peaks: of each memory stage, in the models with TRACED_LAYERS blocks.
        update: trace of the full model's update, if the update is not linear in the number of blocks.
        shards_gradients: with ZeRO-2, gradients belong to owners like the optimizer state.
    """
    stages = {stage: extrapolate([peak[stage] for peak in peaks], n_layer) for stage in MEMORY_STAGES}
    if update:
        stages["update"]["other"] = update.peaks(1)["update"]["other"]
        owned = ("optimizer_state", "gradients") if shards_gradients else ("optimizer_state",)
        for totals in stages.values():
            totals.update({name: update.state[name] for name in owned})
    return stages


def find_peak(stages: Mapping[str, Numbers], workspace: int, row: Row, micro_batches: int) -> Numbers:
    """Return the bytes by category at the memory peak of a step.

    With CPU offload the model state is in host memory, so it does not count. Only full gradients that accumulate over
    several micro-batches stay on the GPU until they are reduced.

    Args:
        stages: bytes by category at the memory peak of each stage, from a trace.
        workspace: bytes from `estimate_loss_workspace`.
        micro_batches: per rank and step.
    """
    totals = {stage: dict(peak) for stage, peak in stages.items()}
    totals["workspace"] = {**totals["head"], "other": totals["head"]["other"] + workspace}
    if row[1].get("fsdp_cpu_offload"):
        accumulates = micro_batches > 1 and not row[1].get("fsdp_sync_every_micro_batch")
        for stage, peak in totals.items():
            has_full_gradients = accumulates and stage != "update"
            peak |= {"parameters": 0, "optimizer_state": 0, "gradients": peak["gradients"] if has_full_gradients else 0}
    return max(totals.values(), key=lambda each: sum(each.values()))


def estimate_step(
    row: Row, job: Job, seconds: Numbers, kernels: Numbers | None, traffic: Numbers
) -> tuple[dict[str, float], float]:
    """Return the compute seconds per stage, and the seconds of a full step.

    Args:
        seconds: per stage, from the roofline model of the eager or of the compiled model.
        kernels: number of kernels that an eager model launches, per stage; None for a compiled model.
        traffic: bytes of the full tensors by kind of collective and number of ranks.
    """
    stages = dict(seconds) if kernels is None else apply_launch_bound(seconds, kernels)
    if row[1].get("fsdp_cpu_offload"):
        stages["update"] = ADAMW_BYTES * job.params / job.gpus * min(job.gpus, GPUS_PER_NODE) / HOST_BANDWIDTH
    units, itemsize = job.shape.n_layer + 1, DTYPES[job.dtype].itemsize
    communication = estimate_communication(
        row, traffic, job.params, units, job.micro_batches, job.gpu, kernels is None, itemsize
    )
    return stages, step_seconds(stages, *communication, job.micro_batches)


class Planner:
    """Predicts the rows of a plan. Each row is traced once, for all batch sizes.

    Args:
        job: what all rows have in common.
        pool: worker processes that run the traces.
    """

    def __init__(self, job: Job, pool: Executor) -> None:
        self.job, self.shape, self.pool = job, job.shape, pool
        self.traces: dict[str, list[Future[TraceSummary]]] = {}
        self.updates: dict[str, Future[TraceSummary]] = {}

    def get_traces(self, row: Row) -> list[TraceSummary]:
        """Return the traces of a row, one for each of TRACED_LAYERS. The first call starts them and waits for them."""
        if str(row) not in self.traces:
            jobs = [replace(self.job, shape=replace(self.shape, n_layer=layers)) for layers in TRACED_LAYERS]
            self.traces[str(row)] = [submit_trace(self.pool, row, job) for job in jobs]
        return [future.result() for future in self.traces[str(row)]]

    def trace_update(self, row: Row) -> TraceSummary | None:
        """Return the trace of the full model's update with Muon, else None.

        This update is not linear in the number of blocks, because one rank owns each matrix.
        """
        if self.job.optimizer != "muon":
            return None
        row = row[0], {name: value for name, value in row[1].items() if name in OPTIONS_OF_UPDATE}
        if str(row) not in self.updates:
            self.updates[str(row)] = submit_trace(self.pool, row, self.job, 1, only_update=True)
        return self.updates[str(row)].result()

    def extrapolate(self, read: Callable[[TraceSummary], Numbers], row: Row) -> dict[Any, float]:
        """Return what `read` returns for a trace, for the full model."""
        numbers = extrapolate([read(each) for each in self.get_traces(row)], self.shape.n_layer)
        if update := self.trace_update(row):
            in_full = ("optimizer_state", "gradients", "update")  # these, and Muon's all-to-all, are traced in full
            numbers |= {key: n for key, n in read(update).items() if key in in_full or key[0] == "all-to-all"}
        return numbers

    def peak_memory(self, row: Row, batch_size: int) -> Numbers:
        """Return the bytes by category at the memory peak of a step of the full model."""
        peaks = [summary.peaks(batch_size) for summary in self.get_traces(row)]
        shards_gradients = row[1].get("zero_stage") == 2
        stages = extrapolate_peak(peaks, self.shape.n_layer, self.trace_update(row), shards_gradients)
        return find_peak(stages, estimate_loss_workspace(row, self.job, batch_size), row, self.job.micro_batches)

    def peak_bytes(self, row: Row, batch_size: int) -> float:
        """Return the total bytes at the memory peak of a step."""
        return sum(self.peak_memory(row, batch_size).values())

    def fits(self, row: Row, batch_size: int) -> bool:
        """Return whether a step fits in the memory of the GPUs, and offloaded model state in host memory."""
        host_bytes_per_gpu = HOST_GIB * GIB / GPUS_PER_NODE
        if "fsdp_cpu_offload" in row[1] and 16 * self.job.params / self.job.gpus > host_bytes_per_gpu:
            return False
        try:
            return self.peak_bytes(row, batch_size) <= estimate_usable_bytes(self.job.gpu)
        except KernelError:  # the model is too wide for a kernel
            return False

    def largest_batch_size(self, row: Row) -> int:
        """Return the largest batch size per micro-batch that fits, up to MAX_BATCH_SIZE; 0 if even 1 does not fit."""
        sizes = range(1, MAX_BATCH_SIZE + 1)
        return bisect_right(sizes, estimate_usable_bytes(self.job.gpu), key=lambda size: self.peak_bytes(row, size))

    def estimate_speed(self, row: Row, batch_size: int, compiled: bool) -> dict[str, float]:
        """Return seconds per step, the part of them in which the GPU waits, tokens/s of all GPUs, and MFU."""
        gpu, gpus, micro_batches = self.job.gpu, self.job.gpus, self.job.micro_batches
        rates = gpu.with_dtype(self.job.dtype)

        def read_seconds(traced: TraceSummary) -> dict[str, float]:
            return traced.seconds(traced.compiled if compiled else traced.eager, rates, batch_size)

        kernels = None if compiled else self.extrapolate(TraceSummary.kernels, row)
        traffic = self.extrapolate(attrgetter("traffic"), row)
        stages, seconds = estimate_step(row, self.job, self.extrapolate(read_seconds, row), kernels, traffic)
        compute_seconds = step_seconds(stages, {}, {}, micro_batches)
        tokens = batch_size * self.shape.block_size * micro_batches * gpus
        rate = tokens / seconds
        mfu = rate * self.job.flops_per_token / gpus / rates.peak
        waiting = seconds - compute_seconds
        return {"step_seconds": seconds, "waiting_seconds": waiting, "tokens_per_second": rate, "mfu": mfu}

    def plan_row(self, row: Row, batch_size: int) -> dict[str, Any]:
        """Return a row of the plan: memory with the given batch size, and speed with the largest one that fits.

        Triton kernels accept rows and heads up to some width. If the model is wider, the row has the reason and no
        numbers.
        """
        try:
            memory, largest = self.peak_memory(row, batch_size), self.largest_batch_size(row)
        except KernelError as error:
            reason = str(error).rpartition(": ")[0]  # drop the advice: it is for a caller of the kernel
            return {"phase": row[0], "options": row[1], "cannot": reason, "fits": False, "speed": None}
        traffic = self.extrapolate(attrgetter("traffic"), row)
        sent = sum(ring_bytes(kind, size, n) for (kind, n), size in traffic.items())
        modes = {"eager": False, "compiled": True}
        state = self.extrapolate(attrgetter("state"), row)
        host = sum(state.values()) * min(self.job.gpus, GPUS_PER_NODE) if "fsdp_cpu_offload" in row[1] else 0
        speed = (
            {name: self.estimate_speed(row, largest, compiled) for name, compiled in modes.items()} if largest else None
        )
        return {
            "phase": row[0],
            "options": row[1],
            "state_bytes": {name: round(n) for name, n in state.items()},
            "bytes": {name: round(memory[name]) for name in CATEGORIES},
            "host_bytes": round(host),
            "total_bytes": round(sum(memory.values())),
            "fits": sum(memory.values()) <= estimate_usable_bytes(self.job.gpu),
            "sent_bytes_per_step": round(sent),
            "largest_batch_size": largest,
            "speed": speed,
        }
