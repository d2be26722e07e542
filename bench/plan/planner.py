"""What `make plan` knows of a phase: its memory and its time, from traces of a few blocks extended to all of them."""

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.matrix.cells import config_of
from bench.plan.speed import (
    GIB,
    GPUS,
    GPUS_PER_NODE,
    PARTS,
    Exchange,
    Gpu,
    Sent,
    collective_seconds,
    step_seconds,
    waiting,
)
from bench.plan.trace import MOMENTS, trace
from nanoGPT.memory.costs import ring_bytes
from nanoGPT.memory.tracker import CATEGORIES, STATE, Totals
from nanoGPT.model import GPTConfig
from phase2_triton.kernels import linear_cross_entropy
from phase2_triton.kernels.core import KernelError

Row = tuple[str, dict[str, Any]]  # a phase, and options that are not its defaults
Numbers = Mapping[Any, float]
LAYERS = (3, 4)  # are traced
MOST = 128  # sequences that are planned for
BUCKET = 25e6  # bytes that DDP and phase 1 send at once
SCALARS = 2**16  # bytes; what is smaller is a norm's sum, or a byte a parameter
# Of offloaded shards: bytes/s from the host to a GPU, those of the host's memory, which a node's GPUs share, and the
# bytes per element that AdamW reads and writes there.
PCIE, HOST, ADAMW = 25e9, 200e9, 28


def capacity(gpu: str) -> float:
    """Bytes of a GPU's memory that tensors can have: CUDA, NCCL and the allocator's gaps have the rest."""
    return (0.92 * GPUS[gpu].gib - 1) * GIB


@dataclass
class Slice:
    """What the trace of a few blocks says, all of it linear in their number.

    Attributes:
        held: bytes by category at the peak of each of the trace's MOMENTS.
        state: bytes by the formula.
        traffic: bytes of the full tensors by kind of collective and ranks.
        eager, compiled: seconds of a micro-batch by part, as a Roofline has them; the update's are of a step.
        kernels: how many an eager one starts.
    """

    held: dict[str, Totals]
    state: Numbers
    traffic: Numbers
    eager: Numbers
    compiled: Numbers
    kernels: Numbers


def end_with_parent() -> None:
    """A worker leaves Ctrl-C to the program that it works for, and ends with it: also a SIGKILL leaves none behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


def traced(row: Row, shape: GPTConfig, ranks: int, batch_size: int, micro_batches: int, gpu: str = "h100") -> Slice:
    """Trace a step; in a process of its own, for it sets up a process group."""
    phase, options = row
    words = {"batch_size": batch_size, "block_size": shape.block_size, "dtype": "bfloat16", "device": "cpu"}
    accumulation = {"gradient_accumulation_steps": micro_batches * ranks}
    config = config_of(phase, Path("out"), **words, **accumulation, **options)
    found = trace(config, shape, ranks, GPUS[gpu])
    times = (found.roofline.eager, found.roofline.compiled, found.roofline.kernels)
    each = [{part: t[part] / (1 if part == "update" else found.micro_batches) for part in PARTS} for t in times]
    return Slice(found.memory.peak_of_part(), found.costs.state, found.costs.traffic, *each)


def in_blocks(values: Sequence[Numbers], n_layer: int) -> dict[Any, float]:
    """Numbers that are linear in the blocks, from those of models of LAYERS blocks."""
    few, more = values
    step = (n_layer - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
    return {name: few.get(name, 0) + step * (more.get(name, 0) - few.get(name, 0)) for name in {**few, **more}}


def extended(found: Sequence[dict[str, Totals]], n_layer: int, workspace: int = 0, offload: bool = False) -> Numbers:
    """Bytes by category at the peak of a step, from those at the peaks of its parts in models of LAYERS blocks.

    Args:
        workspace: bytes that the loss takes inside, of which no trace learns.
        offload: the state is elsewhere.
    """
    parts = {part: in_blocks([peaks[part] for peaks in found], n_layer) for part in MOMENTS}
    parts["head"]["other"] += workspace
    for held in parts.values():
        held.update(dict.fromkeys(STATE, 0) if offload else {})
    return max(parts.values(), key=lambda held: sum(held.values()))


def exchanges(
    row: Row, traffic: Numbers, params: int, units: int, micro_batches: int, gpu: Gpu, compiled: bool
) -> tuple[Sent, Sent]:
    """What a step sends while it computes: each micro-batch, and once.

    Phase 3 gathers in every forward and, where that has freed it, in every backward; gradients are reduced in the last
    backward. Phase 1 gathers what it has updated in the next step's first forward, or before it where that is compiled.

    Args:
        units: that phase 3 gathers as one.
    """
    phase, options = row
    every, once = {"forward": Exchange(), "backward": Exchange()}, {"forward": Exchange(), "backward": Exchange()}
    for (kind, ranks), size in traffic.items():
        calls = 1 if size < SCALARS else units if phase == "phase3" else math.ceil(size / BUCKET)
        if kind == "all-gather" and phase == "phase3":
            forward = min(2 * params, size / micro_batches)
            for part, amount in (("forward", forward), ("backward", size / micro_batches - forward)):
                seconds = collective_seconds(gpu, kind, amount, ranks, calls) if amount else 0.0
                every[part] += Exchange(seconds, seconds / calls)
        else:
            copies = kind == "all-reduce" and "fsdp_shard_size" in options and size >= SCALARS
            seconds = collective_seconds(gpu, kind, size, ranks, calls, apart=copies)
            part = "forward" if kind == "all-gather" else "backward"
            hidden = phase != "phase1" or part == "backward" or not compiled
            once[part] += Exchange(seconds, seconds / calls if hidden else seconds)
    if options.get("fsdp_cpu_offload"):  # shards to the GPU before each gathering, their gradients back
        shards = next((ranks for kind, ranks in traffic if kind == "reduce-scatter"), 1)
        copy = 4 * params / shards / PCIE
        for sent, part in ((every, "forward"), (every, "backward"), (once, "backward")):
            sent[part] += Exchange(copy, copy / units)
    return every, once


class Planner:
    """Traces what a plan asks for, each thing once.

    Args:
        shape: of the model.
        pool: of processes.
    """

    def __init__(self, shape: GPTConfig, gpu: str, gpus: int, micro_batches: int, pool: Executor) -> None:
        self.shape, self.gpu, self.gpus, self.micro_batches, self.pool = shape, gpu, gpus, micro_batches, pool
        self.params = shape.n_layer * (12 * shape.n_embd**2 + 2 * shape.n_embd)
        self.params += (shape.vocab_size + shape.block_size + 1) * shape.n_embd
        self.traces: dict[Any, list[Future[Slice]]] = {}

    def start(self, row: Row, batch_size: int) -> list[Future[Slice]]:
        """Begin to trace a row with some sequences a micro-batch; the traces of LAYERS blocks."""
        key = (str(row), batch_size)
        if key not in self.traces:
            shapes = [replace(self.shape, n_layer=layers) for layers in LAYERS]
            words = (self.gpus, batch_size, self.micro_batches, self.gpu)
            self.traces[key] = [self.pool.submit(traced, row, shape, *words) for shape in shapes]
        return self.traces[key]

    def slices(self, row: Row, batch_size: int) -> list[Slice]:
        return [each.result() for each in self.start(row, batch_size)]

    def held(self, row: Row, batch_size: int) -> Numbers:
        """Bytes by category at the peak of a step of the whole model."""
        workspace, (phase, options) = 0, row
        if phase == "phase2" or "kernels" in options:
            tokens = batch_size * self.shape.block_size
            workspace = linear_cross_entropy.cost(tokens, self.shape.n_embd, self.shape.vocab_size, 2).workspace
        found = [each.held for each in self.slices(row, batch_size)]
        return extended(found, self.shape.n_layer, workspace, "fsdp_cpu_offload" in options)

    def total(self, row: Row, batch_size: int) -> float:
        return sum(self.held(row, batch_size).values())

    def largest(self, row: Row) -> int:
        """The most sequences a micro-batch that fit, as traced, up to MOST; 0: not even one does.

        What is held is convex in the sequences: the chord from one that fits to one that does not meets the limit where
        it still fits, and the line through two that fit meets it where no more can.
        """
        space, good, bad = capacity(self.gpu), 1, MOST
        if self.total(row, good) > space:
            return 0
        if self.total(row, bad) <= space:
            return bad
        before = good
        while bad - good > 1:
            low, high = self.total(row, good), self.total(row, bad)
            guess = good + math.floor((bad - good) * (space - low) / (high - low))
            if before < good:
                slope = (low - self.total(row, before)) / (good - before)
                limit = good + math.floor((space - low) / slope + 0.01)  # some sizes are rounded up
                if limit <= good:
                    return good
                guess = max(guess, min(limit, bad - 1))
            guess = max(good + 1, guess)
            if self.total(row, guess) <= space:
                before, good = good, guess
            else:
                bad = guess
        return good

    def speed(self, row: Row, batch_size: int, compiled: bool) -> dict[str, float]:
        """Seconds of a step, of them those in which the GPU waits for others, tokens/s of all GPUs, and MFU."""
        n_layer, gpu = self.shape.n_layer, GPUS[self.gpu]
        slices = self.slices(row, batch_size)
        times = in_blocks([each.compiled if compiled else each.eager for each in slices], n_layer)
        parts = times if compiled else waiting(times, in_blocks([each.kernels for each in slices], n_layer))
        if "fsdp_cpu_offload" in row[1]:
            parts["update"] = ADAMW * self.params / self.gpus * min(self.gpus, GPUS_PER_NODE) / HOST
        traffic = in_blocks([each.traffic for each in slices], n_layer)
        sent = exchanges(row, traffic, self.params, n_layer + 1, self.micro_batches, gpu, compiled)
        seconds = step_seconds(parts, *sent, self.micro_batches)
        busy = step_seconds(parts, {}, {}, self.micro_batches)
        tokens = batch_size * self.shape.block_size * self.micro_batches * self.gpus
        flops = 6 * (self.params - self.shape.block_size * self.shape.n_embd)
        flops += 12 * n_layer * self.shape.n_embd * self.shape.block_size
        rate = tokens / seconds
        mfu = rate * flops / self.gpus / gpu.peak
        return {"step_seconds": seconds, "waiting_seconds": seconds - busy, "tokens_per_second": rate, "mfu": mfu}

    def line(self, row: Row, batch_size: int) -> dict[str, Any]:
        """What the plan says of a row: its memory with some sequences a micro-batch, its speed with the most.

        Kernels take rows and heads up to some width; for a wider model their row says so, and has no numbers.
        """
        try:
            memory, most = self.held(row, batch_size), self.largest(row)
        except KernelError as error:
            reason = str(error).rpartition(": ")[0]  # without its advice, which is for who calls the kernel
            return {"phase": row[0], "options": row[1], "cannot": reason, "fits": False, "speed": None}
        slices, n_layer = self.slices(row, batch_size), self.shape.n_layer
        traffic = in_blocks([each.traffic for each in slices], n_layer)
        sent = sum(ring_bytes(kind, size, n) for (kind, n), size in traffic.items())
        modes = {"eager": False, "compiled": True}
        state = in_blocks([s.state for s in slices], n_layer)
        host = sum(state.values()) * min(self.gpus, GPUS_PER_NODE) if "fsdp_cpu_offload" in row[1] else 0
        return {
            "phase": row[0],
            "options": row[1],
            "state_bytes": {name: round(n) for name, n in state.items()},
            "bytes": {name: round(memory[name]) for name in CATEGORIES},
            "host_bytes": round(host),
            "total_bytes": round(sum(memory.values())),
            "fits": sum(memory.values()) <= capacity(self.gpu),
            "sent_bytes_per_step": round(sent),
            "largest_batch_size": most,
            "speed": {name: self.speed(row, most, compiled) for name, compiled in modes.items()} if most else None,
        }
