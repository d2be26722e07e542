"""Estimate the time of a training step on a GPU that you do not have, with a roofline model of every traced operator.

    with Roofline() as roofline:                  # real or fake tensors
        loss = model(x, y)
        loss.backward()
    estimate_gpu_seconds(roofline.compiled, GPUS["h100"])  # {"forward": ..., "backward": ..., "update": ...}

The time of an operator is the larger of its compute time and its memory time (Williams et al. 2009). A compiled step
is assumed to fuse all operators between two matrix products into one pass. The pass reads each input once, and writes
once each tensor that is still needed afterwards. An eager step also waits for Python if its kernels are short. A
collective takes one latency per hop of a ring, plus its bytes divided by the bandwidth of the link.

An *amount* is a complex number of bytes or FLOPs in a micro-batch: its real part counts once, and its imaginary part
once per sequence.

Peak rates come from the vendors' data sheets. All other assumptions are the constants in this file.
docs/results.md compares the resulting estimates with published runs.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from measure.mfu import PEAK_FLOPS
from measure.tracker import tensors_in
from nanoGPT.costs import ring_bytes
from phase2_triton.kernels import attention, linear_cross_entropy
from phase3_fsdp import muon

GIB = 2**30
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """A GPU and its interconnect.

    Attributes:
        gib: memory in GiB, as the driver reports it.
        peak: peak FLOP/s for dense bfloat16 (T4: float16).
        fp32: peak FLOP/s for float32 without tensor cores.
        bandwidth: memory bandwidth in bytes/s.
        link: bandwidth to the other GPUs of the node in bytes/s, one direction: NVLink, or PCIe without NVLink.
        network: bandwidth from the node to other nodes in bytes/s: eight adapters of 400 Gbit/s (H100, H200, B200) or
            200 Gbit/s (A100), or two adapters of 100 Gbit/s (all others; T4: 50 Gbit/s).
    """

    gib: float
    peak: float
    bandwidth: float
    link: float
    network: float
    fp32: float

    def with_dtype(self, dtype: str) -> "Gpu":
        """Return this GPU with the peak of a dtype: bfloat16, float16 or float32."""
        return replace(self, peak=self.fp32) if dtype == "float32" else self


GPUS = {
    "a100-40": Gpu(39.4, PEAK_FLOPS["A100"], 1.555e12, 300e9, 200e9, 19.5e12),
    "a100-80": Gpu(79.2, PEAK_FLOPS["A100"], 2.039e12, 300e9, 200e9, 19.5e12),
    "h100": Gpu(79.2, PEAK_FLOPS["H100"], 3.35e12, 450e9, 400e9, 67e12),
    "h200": Gpu(139.8, PEAK_FLOPS["H200"], 4.8e12, 450e9, 400e9, 67e12),
    "b200": Gpu(178.4, PEAK_FLOPS["B200"], 8.0e12, 900e9, 400e9, 75e12),
    "l40s": Gpu(44.5, PEAK_FLOPS["L40S"], 0.864e12, 32e9, 25e9, 91.6e12),
    "rtx4090": Gpu(23.5, PEAK_FLOPS["RTX 4090"], 1.008e12, 32e9, 25e9, 82.6e12),
    "rtx6000ada": Gpu(47.4, PEAK_FLOPS["RTX 6000 Ada"], 0.96e12, 32e9, 25e9, 91.1e12),
    "t4": Gpu(14.6, PEAK_FLOPS["T4"], 0.32e12, 16e9, 12.5e9, 8.1e12),
}

# Fractions of the peak rates that real runs reach, chosen so that estimates of published runs have an error below 20
# percent.
MATMUL_EFFICIENCY, ATTENTION_EFFICIENCY, MEMORY_EFFICIENCY, LINK_EFFICIENCY = 0.55, 0.4, 0.7, 0.75
LAUNCH_SECONDS = 7e-6  # Python time per kernel of an eager step
HOP_SECONDS, NODE_HOP_SECONDS = 3e-6, 12e-6  # latency of a message to the next GPU of the node, and to the next node
STAGES = ("forward", "backward", "update")
BUCKET_BYTES = 25e6  # bucket size of DDP and phase 1
SCALAR_BYTES = 2**16  # a smaller collective carries a norm, or one byte per parameter tensor, and is a single call
PCIE_BANDWIDTH = 25e9  # bytes/s from the host to a GPU, for CPU offload

# Prefixes of operators that launch no kernel.
NO_KERNEL = (
    "prim::",
    "profiler::",
    "c10d::",
    "aten::empty",
    "aten::new_empty",
    "aten::_unsafe_view",
    "aten::lift_fresh",
)
# Prefixes of operators that a compiler does not fuse with their neighbors.
UNFUSED = ("fsdp::", "phase2_triton::", "aten::embedding", "aten::_fused_adamw")


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, float]:
    """Return an operator's FLOPs, and the fraction of the peak at which they run. Elementwise operators count as 0."""
    name = func._schema.name
    if "attention" in name:
        backward = "backward" in name
        B, heads, T, channels = args[backward].shape  # the backward's first argument is the output gradient
        return attention.cost(B, heads, T, channels, 2)[backward].flops, ATTENTION_EFFICIENCY
    if name == "phase2_triton::linear_cross_entropy":
        (M, K), V = args[0].shape, args[1].shape[0]
        return linear_cross_entropy.cost(M, K, V, 2).flops, MATMUL_EFFICIENCY
    if formula := flop_registry.get(func.overloadpacket):
        return formula(*args, **(kwargs or {}), out_val=out), MATMUL_EFFICIENCY
    return 0, 1.0


def count_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory. Elements that `expand` repeats count once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


class Work(NamedTuple):
    """The work of an operator, or of several that a compiler fuses.

    Attributes:
        stage: forward, backward (recomputation included) or update.
        traffic: the amount of bytes that it reads and writes.
        flops: the amount of its FLOPs; 0 for elementwise operators.
        efficiency: the fraction of the peak at which they run.
    """

    stage: str
    traffic: complex
    flops: complex = 0
    efficiency: float = 1.0


def evaluate_amount(amount: complex, batch_size: int) -> float:
    """Return the bytes or FLOPs of an amount with this batch size."""
    return amount.real + amount.imag * batch_size


def estimate_gpu_seconds(works: Iterable[Work], gpu: Gpu, batch_size: int = 1) -> dict[str, float]:
    """Return the seconds of each of STAGES on a GPU, without the time of Python and of communication."""
    seconds = dict.fromkeys(STAGES, 0.0)
    for stage, traffic, flops, efficiency in works:
        memory_seconds = evaluate_amount(traffic, batch_size) / (MEMORY_EFFICIENCY * gpu.bandwidth)
        seconds[stage] += max(memory_seconds, evaluate_amount(flops, batch_size) / (efficiency * gpu.peak))
    return seconds


class Roofline(TorchDispatchMode):
    """A dispatch mode that records the work of the operators inside it.

    Args:
        to_amount: converts the bytes of a tensor, and the FLOPs of an operator, to an amount.

    Attributes:
        eager: the work of each kernel that the eager model launches.
        compiled: the work of each kernel of the compiled model.
        stage: set it to "update" when the backward pass is done. The mode detects the other two stages itself.
    """

    def __init__(self, to_amount: Callable[[int], complex] = int) -> None:
        super().__init__()
        self.to_amount, self.stage, self._last_stage = to_amount, "forward", "forward"
        self.eager: list[Work] = []
        self.compiled: list[Work] = []
        self._read: dict[int, Any] = {}  # weak references to the storages that the current fused pass has read
        self._written: dict[int, tuple[Any, complex]] = {}  # and to those that it has written, with their bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # Autograd asks for the device of a fake tensor three times per operator. The other modes need not see it.
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not func.is_view and not name.startswith(NO_KERNEL):
            self._add_operator(func, name, args, kwargs, out)
        return out

    def _add_operator(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        stage = self.stage if self.stage == "update" or torch._C._current_graph_task_id() == -1 else "backward"
        if stage != self._last_stage:  # the compiler makes separate graphs of forward and backward
            self.compiled.append(Work(stage, self._finish_pass()))
            self._last_stage = stage
        values = list(zip(func._schema.arguments, args, strict=False))
        values += [(each, kwargs[each.name]) for each in func._schema.arguments if kwargs and each.name in kwargs]
        changed = [t for each, value in values if each.is_write for t in tensors_in(value)]
        read = [t for each, value in values if not each.is_out for t in tensors_in(value)]
        changed_storages = {t.untyped_storage()._cdata for t in changed}
        written = changed + [t for t in tensors_in(out) if t.untyped_storage()._cdata not in changed_storages]
        if name == "aten::embedding":
            read = written  # it reads only the selected rows of its table
        flops, efficiency = count_flops(func, args, kwargs, out)
        traffic = sum(map(self._count_bytes, [*read, *written]))
        work = Work(stage, traffic, self.to_amount(flops), efficiency)
        self.eager.append(work)
        if flops or name.startswith(UNFUSED):
            self.compiled += [work, Work(stage, self._finish_pass())]
        else:
            self.compiled.append(Work(stage, self._add_to_pass(read, written)))

    def _count_bytes(self, tensor: Tensor) -> complex:
        return self.to_amount(count_bytes(tensor))

    def _add_to_pass(self, read: list[Tensor], written: list[Tensor]) -> complex:
        """Fuse an operator into the current pass. Return the bytes that the pass reads in addition."""
        total: complex = 0
        for tensor in read:
            storage = tensor.untyped_storage()
            recorded = [self._read.get(storage._cdata), self._written.get(storage._cdata, (None, 0))[0]]
            if not any(ref and ref() is not None for ref in recorded):  # a new storage may reuse a freed one's address
                self._read[storage._cdata] = weakref.ref(storage)
                total += self._count_bytes(tensor)
        for tensor in written:
            storage = tensor.untyped_storage()
            self._written[storage._cdata] = (weakref.ref(storage), self._count_bytes(tensor))
        return total

    def _finish_pass(self) -> complex:
        """Finish the current fused pass. Return the bytes to write: those of its results that are still in use."""
        total = sum(amount for ref, amount in self._written.values() if ref() is not None)
        self._read.clear()
        self._written.clear()
        return total

    def __exit__(self, *error: Any) -> None:
        self.compiled.append(Work(self.stage, self._finish_pass()))
        super().__exit__(*error)


def apply_launch_bound(seconds: Mapping[str, float], kernels: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds per stage of an eager step: the larger of its GPU time and its kernel launch time."""
    return {stage: max(seconds[stage], LAUNCH_SECONDS * kernels[stage]) for stage in STAGES}


def estimate_collective_seconds(
    gpu: Gpu, kind: str, tensor_bytes: float, ranks: int, calls: float = 1, one_per_node: bool = False
) -> float:
    """Return the seconds of `calls` ring collectives.

    Args:
        kind: a kind of `measure.ledger.COLLECTIVES`.
        tensor_bytes: bytes of the full tensors, of all calls together.
        ranks: number of ranks in the group; they fill one node after another.
        one_per_node: each rank is on a separate node instead. The other GPUs of its node communicate as much at the
            same time, in other groups.
    """
    nodes = ranks if one_per_node else -(-ranks // GPUS_PER_NODE)
    rate = gpu.link if nodes == 1 else min(gpu.link, gpu.network / (GPUS_PER_NODE if one_per_node else 1))
    hops = (ranks - nodes) * HOP_SECONDS + (nodes if nodes > 1 else 0) * NODE_HOP_SECONDS
    latency = (2 if kind == "all-reduce" else 1) * hops
    if kind == "all-to-all" and nodes > 1:  # unlike a ring, every GPU sends most of its bytes to other nodes
        rate = min(gpu.link, gpu.network / GPUS_PER_NODE)
    return calls * latency + ring_bytes(kind, tensor_bytes, ranks) / (LINK_EFFICIENCY * rate)


@dataclass(frozen=True)
class Communication:
    """Communication that can overlap with one stage of the step.

    Attributes:
        seconds: of all its collectives.
        min_exposed: seconds of the one collective that never overlaps: that of the last bucket, or of the first unit.
    """

    seconds: float = 0.0
    min_exposed: float = 0.0

    def __add__(self, other: "Communication") -> "Communication":
        return Communication(self.seconds + other.seconds, max(self.min_exposed, other.min_exposed))

    def exposed_seconds(self, compute_seconds: float) -> float:
        """Return the seconds for which the GPU waits, if it computes for `compute_seconds` at the same time."""
        return max(self.seconds - compute_seconds, min(self.min_exposed, self.seconds))


CommunicationByStage = Mapping[str, Communication]  # the key is the stage that overlaps with it: forward or backward


def step_seconds(
    stages: Mapping[str, float], every: CommunicationByStage, once: CommunicationByStage, micro_batches: int = 1
) -> float:
    """Return the seconds of a full step: its compute time and its exposed communication.

    Args:
        stages: compute seconds of each of STAGES; forward and backward of one micro-batch.
        every: communication of each micro-batch.
        once: additional communication in the first forward and in the last backward pass of the step.
        micro_batches: per rank.
    """
    total = stages["update"]
    for stage in ("forward", "backward"):
        compute, communication = stages[stage], every.get(stage, Communication())
        total += (micro_batches - 1) * (compute + communication.exposed_seconds(compute))
        total += compute + (communication + once.get(stage, Communication())).exposed_seconds(compute)
    return total


def estimate_communication(
    row: tuple[str, dict[str, Any]],
    traffic: Mapping[Any, float],
    params: int,
    units: int,
    micro_batches: int,
    gpu: Gpu,
    compiled: bool,
    bytes_per_param: int = 2,
) -> tuple[CommunicationByStage, CommunicationByStage]:
    """Return the communication of each micro-batch, and the communication that happens once per step.

    Phase 3 all-gathers parameters in every forward and every backward pass, or once per step if the forward pass does
    not free them. It reduces gradients in the last backward pass. Phase 1 all-gathers the updated parameters during
    the first forward pass of the next step, or before it if the model is compiled. With ZeRO-2, phase 1 reduces
    gradients in every backward pass, and so does phase 3 with fsdp_sync_every_micro_batch.

    Args:
        row: a phase and its options.
        traffic: bytes of the full tensors by kind of collective and number of ranks.
        units: FSDP units of the model; each is one all-gather.
        bytes_per_param: in the dtype of the all-gathers.
    """
    phase, options = row
    every, once = ({"forward": Communication(), "backward": Communication()} for _ in range(2))
    for (kind, ranks), size in traffic.items():
        calls = 1 if size < SCALAR_BYTES else units if phase == "phase3" else math.ceil(size / BUCKET_BYTES)
        if kind == "all-gather" and phase == "phase3" and options.get("fsdp_reshard_after_forward", True):
            forward = min(bytes_per_param * params, size / micro_batches)
            for stage, amount in (("forward", forward), ("backward", size / micro_batches - forward)):
                seconds = estimate_collective_seconds(gpu, kind, amount, ranks, calls) if amount else 0.0
                every[stage] += Communication(seconds, seconds / calls)
        elif kind == "all-to-all":  # Muon's; assume that none overlaps with computation
            seconds = estimate_collective_seconds(gpu, kind, size, ranks, 1 + math.ceil(size / muon.ROUND_BYTES))
            once["backward"] += Communication(seconds, seconds)
        elif options.get("fsdp_sync_every_micro_batch") and kind == "reduce-scatter":
            seconds = estimate_collective_seconds(gpu, kind, size / micro_batches, ranks, calls)
            every["backward"] += Communication(seconds, seconds / calls)
        elif options.get("zero_stage") == 2 and kind in ("reduce-scatter", "reduce"):
            seconds = estimate_collective_seconds(gpu, kind, size / micro_batches, ranks, calls / micro_batches)
            every["backward"] += Communication(seconds, seconds / calls * micro_batches)
        else:
            is_across_replicas = kind == "all-reduce" and "fsdp_shard_size" in options and size >= SCALAR_BYTES
            seconds = estimate_collective_seconds(gpu, kind, size, ranks, calls, one_per_node=is_across_replicas)
            stage = "forward" if kind in ("all-gather", "broadcast") else "backward"
            is_overlapped = phase != "phase1" or stage == "backward" or not compiled
            once[stage] += Communication(seconds, seconds / calls if is_overlapped else seconds)
    if options.get("fsdp_cpu_offload"):  # copy shards to the GPU before each all-gather, and gradient shards back
        shards = next((ranks for kind, ranks in traffic if kind == "reduce-scatter"), 1)
        copy_seconds = 4 * params / shards / PCIE_BANDWIDTH
        for stages, stage in ((every, "forward"), (every, "backward"), (once, "backward")):
            stages[stage] += Communication(copy_seconds, copy_seconds / units)
    return every, once
