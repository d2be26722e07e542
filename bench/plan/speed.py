"""How long would a step take on a GPU that is not there? Every operator of a traced step against a roofline.

    with Roofline(GPUS["h100"]) as roofline:      # on real tensors or fake ones
        loss = model(x, y)[1]
        loss.backward()
    roofline.compiled["forward"], roofline.compiled["backward"]   # seconds

An operator takes as long as the slower of its arithmetic and its traffic with the GPU's memory (Williams et al. 2009).
A compiled step differs in what it reads and writes: what lies between two matrix products is one pass, in which each
tensor that is still needed afterwards is written once and each from before is read once. An eager step also waits for
Python where its kernels are short. A collective takes a latency for each hop of a ring, and sends its bytes at the
link's rate.

What is assumed beyond the makers' data sheets is in the constants here; `python -m bench.plan.published` compares what
follows from them with runs that others have published.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nanoGPT.memory.costs import ring_bytes
from nanoGPT.memory.tracker import tensors_in
from nanoGPT.metrics.hardware import PEAK_FLOPS
from phase2_triton.kernels import attention, linear_cross_entropy

GIB = 2**30
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Gpu:
    """A GPU and what connects it to others.

    Attributes:
        gib: of memory, as the driver reports them.
        peak: FLOP/s of dense bfloat16 (T4: float16).
        bandwidth: of its memory, bytes/s.
        link: bytes/s that it sends to others in its node (NVLink, or PCIe where it has none).
        network: bytes/s that its node sends to others: by eight adapters of 400 Gbit/s (H and B) or 200 (A), or two of
            100, T4: 50.
    """

    gib: float
    peak: float
    bandwidth: float
    link: float
    network: float


GPUS = {
    "a100-40": Gpu(39.4, PEAK_FLOPS["A100"], 1.555e12, 300e9, 200e9),
    "a100-80": Gpu(79.2, PEAK_FLOPS["A100"], 2.039e12, 300e9, 200e9),
    "h100": Gpu(79.2, PEAK_FLOPS["H100"], 3.35e12, 450e9, 400e9),
    "h200": Gpu(139.8, PEAK_FLOPS["H200"], 4.8e12, 450e9, 400e9),
    "b200": Gpu(178.4, PEAK_FLOPS["B200"], 8.0e12, 900e9, 400e9),
    "l40s": Gpu(44.5, PEAK_FLOPS["L40S"], 0.864e12, 32e9, 25e9),
    "rtx4090": Gpu(23.5, PEAK_FLOPS["RTX 4090"], 1.008e12, 32e9, 25e9),
    "rtx6000ada": Gpu(47.4, PEAK_FLOPS["RTX 6000 Ada"], 0.96e12, 32e9, 25e9),
    "t4": Gpu(14.6, PEAK_FLOPS["T4"], 0.32e12, 16e9, 12.5e9),
}

# Shares of those peaks that are reached: such that published runs are met within 20 percent.
MATMUL, ATTENTION, MEMORY, LINK = 0.55, 0.4, 0.7, 0.75
LAUNCH = 7e-6  # for Python to come to the next kernel of an eager step
HOP, NODE_HOP = 3e-6, 12e-6  # for a message to reach the next GPU, and the next node
PARTS = ("forward", "backward", "update")

# Operators that start no kernel.
FREE = ("prim::", "profiler::", "c10d::", "aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::lift_fresh")
# Operators that no compiler fuses with their neighbours; of a gathered row, only the row is read.
APART = ("fsdp::", "phase2_triton::", "aten::embedding", "aten::_fused_adamw")


def flops(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    """An operator's FLOPs, and the share of a GPU's peak at which they run; those of elementwise ones count as none."""
    name = func._schema.name
    if "attention" in name:
        backward = "backward" in name
        B, heads, T, channels = args[backward].shape  # the backward's first is the output's gradient
        return attention.cost(B, heads, T, channels, 2)[backward].flops, ATTENTION
    if name == "phase2_triton::linear_cross_entropy":
        (M, K), V = args[0].shape, args[1].shape[0]
        return linear_cross_entropy.cost(M, K, V, 2).flops, MATMUL
    if known := flop_registry.get(func.overloadpacket):
        return known(*args, **(kwargs or {}), out_val=out), MATMUL
    return 0.0, 1.0


def touched(tensor: Tensor) -> int:
    """Bytes of a tensor, those that an expanded one repeats counted once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


class Roofline(TorchDispatchMode):
    """Adds up how long the operators inside it would take on a GPU.

    Attributes:
        eager, compiled: seconds of the GPU by part of the step: forward, backward (also what that computes again),
            update.
        kernels: how many an eager step starts, by part.
        part: "update" is to be set when the backward has ended; the others are told apart here.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu, self.part, self._last_part = gpu, "forward", "forward"
        self.eager, self.compiled, self.kernels = (dict.fromkeys(PARTS, 0.0) for _ in range(3))
        self._read: dict[int, Any] = {}  # storages that the pass between two products has read already
        self._made: dict[int, tuple[Any, int]] = {}  # and those that it has made, with their bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not func.is_view and not name.startswith(FREE):
            self._charge(func, name, args, kwargs, out)
        return out

    def _charge(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        part = self.part if self.part == "update" or torch._C._current_graph_task_id() == -1 else "backward"
        if part != self._last_part:  # forward and backward are compiled each by itself
            self.compiled[part] += self._end_of_pass()
            self._last_part = part
        given = list(zip(func._schema.arguments, args, strict=False))
        given += [(each, kwargs[each.name]) for each in func._schema.arguments if kwargs and each.name in kwargs]
        changed = [t for each, value in given if each.is_write for t in tensors_in(value)]
        read = [t for each, value in given if not each.is_out for t in tensors_in(value)]
        known = {t.untyped_storage()._cdata for t in changed}
        written = changed + [t for t in tensors_in(out) if t.untyped_storage()._cdata not in known]
        if name == "aten::embedding":
            read = written
        work, share = flops(func, args, kwargs, out)
        traffic = sum(map(touched, read)) + sum(map(touched, written))
        seconds = max(work / (share * self.gpu.peak), traffic / (MEMORY * self.gpu.bandwidth))
        self.kernels[part] += 1
        self.eager[part] += seconds
        if work or name.startswith(APART):
            self.compiled[part] += seconds + self._end_of_pass()
        else:
            self.compiled[part] += self._fused(read, written) / (MEMORY * self.gpu.bandwidth)

    def _fused(self, read: list[Tensor], written: list[Tensor]) -> int:
        """Bytes that an elementwise operator or a reduction reads from before its pass."""
        total = 0
        for tensor in read:
            storage = tensor.untyped_storage()
            known = [self._read.get(storage._cdata), self._made.get(storage._cdata, (None, 0))[0]]
            if not any(ref and ref() is not None for ref in known):  # a dead one's address may be taken again
                self._read[storage._cdata] = weakref.ref(storage)
                total += touched(tensor)
        for tensor in written:
            storage = tensor.untyped_storage()
            self._made[storage._cdata] = (weakref.ref(storage), touched(tensor))
        return total

    def _end_of_pass(self) -> float:
        """Seconds to write what a pass has made and somebody still holds."""
        total = sum(size for ref, size in self._made.values() if ref() is not None)
        self._read.clear()
        self._made.clear()
        return total / (MEMORY * self.gpu.bandwidth)

    def __exit__(self, *error: Any) -> None:
        self.compiled[self.part] += self._end_of_pass()
        super().__exit__(*error)


def waiting(seconds: Mapping[str, float], kernels: Mapping[str, float]) -> dict[str, float]:
    """An eager step's seconds by part: the slower of the GPU and of Python that feeds it."""
    return {part: max(seconds[part], LAUNCH * kernels[part]) for part in PARTS}


def collective_seconds(
    gpu: Gpu, kind: str, tensor_bytes: float, ranks: int, calls: float = 1, apart: bool = False
) -> float:
    """Of `calls` collectives of so many bytes together, in rings.

    Args:
        kind: as in `nanoGPT.metrics.ledger.COLLECTIVES`.
        tensor_bytes: of the full tensors.
        ranks: that fill node after node; or, if they are `apart`, each is in a node of its own, whose other GPUs send
            as much at the same time.
    """
    nodes = ranks if apart else -(-ranks // GPUS_PER_NODE)
    rate = gpu.link if nodes == 1 else min(gpu.link, gpu.network / (GPUS_PER_NODE if apart else 1))
    hops = (2 if kind == "all-reduce" else 1) * ((ranks - nodes) * HOP + (nodes if nodes > 1 else 0) * NODE_HOP)
    return calls * hops + ring_bytes(kind, tensor_bytes, ranks) / (LINK * rate)


@dataclass(frozen=True)
class Exchange:
    """What is sent while a part of the step computes.

    Attributes:
        seconds: of all its collectives.
        last: seconds of the one that nothing is left to hide: the last bucket's, or the first unit's.
    """

    seconds: float = 0.0
    last: float = 0.0

    def __add__(self, other: "Exchange") -> "Exchange":
        return Exchange(self.seconds + other.seconds, max(self.last, other.last))

    def exposed(self, computing: float) -> float:
        """Seconds for which the GPU waits, where `computing` seconds go on meanwhile."""
        return max(self.seconds - computing, min(self.last, self.seconds))


Sent = Mapping[str, Exchange]  # by the part that hides it: forward or backward


def step_seconds(parts: Mapping[str, float], every: Sent, once: Sent, micro_batches: int = 1) -> float:
    """A whole step: what it computes, and what it waits for.

    Args:
        parts: seconds that each of PARTS computes; forward and backward of one micro-batch.
        every: what each micro-batch sends.
        once: what is sent in addition during a step's first forward and last backward.
        micro_batches: of a rank.
    """
    total = parts["update"]
    for part in ("forward", "backward"):
        computing, often = parts[part], every.get(part, Exchange())
        total += (micro_batches - 1) * (computing + often.exposed(computing))
        total += computing + (often + once.get(part, Exchange())).exposed(computing)
    return total
