"""What one training step costs a rank: bytes on the wire, bytes of state, and what its memory holds meanwhile.

Traffic is counted, not estimated: a dispatch mode sees every collective that the step calls, with its tensors. Bytes
are those that a ring sends per rank (Patarasuk & Yuan 2009): 2n(N-1)/N for an all-reduce of n bytes over N ranks,
n(N-1)/N for a reduce, reduce-scatter, all-gather or broadcast whose full tensor has n bytes. NCCL's rings send that;
gloo's algorithms send more, and it copies what it reduces: neither is counted. `nanoGPT/memory/tracker.py` counts the
memory, by category.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.memory.costs import Costs, ring_bytes, storage_bytes
from nanoGPT.memory.tracker import Memory, tensors_in
from nanoGPT.train_config import TrainConfig

StepCosts = Callable[[Any, Any, Any, Runtime], Costs]  # of a model, its optimizer and a configuration

# Operator, and the position of the argument that holds the full tensor.
COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
}


class Traffic(TorchDispatchMode):
    """Records the collectives inside it: kind, ranks, calls, tensor_bytes and ring_bytes, by kind and group size."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.record(func, args)
        return func(*args, **(kwargs or {}))

    def record(self, func: Any, args: Any) -> None:
        """Take note of an operator that is about to run, if it is a collective."""
        if func.namespace == "c10d" and (known := COLLECTIVES.get(func.__name__.split(".")[0])):
            kind, position = known
            group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            ranks = dist.ProcessGroup.unbox(group).size()
            full = sum(t.numel() * t.element_size() for t in tensors_in(args[position]))
            row = self.rows.setdefault(
                (kind, ranks), {"kind": kind, "ranks": ranks, "calls": 0, "tensor_bytes": 0, "ring_bytes": 0.0}
            )
            row["calls"] += 1
            row["tensor_bytes"] += full
            row["ring_bytes"] += ring_bytes(kind, full, ranks)


class Ledger:
    """Watches one step of a trainer; prints what it counted and writes `ledger.json` into out_dir.

    On a GPU the allocator's peak, which the run's telemetry reads too, begins anew before the step and after it: a
    compiled model's step is an eager one here.

    Args:
        config: without its `ledger` nothing is watched, at no cost; `ledger.json` goes into its out_dir.
        run: this rank's Runtime; writing is collective.
        step: the step to watch; the third of a run: the first allocates, and DDP orders its buckets anew in the second.
        model, optimizer: whose bytes are counted, gradients just before the update.
        step_costs: the trainer's formula, which is printed beside what was counted.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Runtime,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        step_costs: StepCosts,
    ) -> None:
        self.config, self.run, self.step, self.model, self.optimizer = config, run, step, model, optimizer
        self.step_costs = step_costs
        self.gradient_bytes = 0

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Count the step inside, if it is the one to watch. Collective on that step."""
        if not self.config.ledger or step != self.step:
            yield
            return
        hook = self.optimizer.register_step_pre_hook(self._count_gradients)
        if self.run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.run.device)
        traffic = Traffic()
        watched = (self.model, self.optimizer, self.run.device)
        with Memory(*watched, also=traffic.record) as memory:
            yield
        hook.remove()
        self._write(Path(self.config.out_dir), traffic, memory)
        if self.run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.run.device)

    def _count_gradients(self, *_: Any) -> None:
        self.gradient_bytes = storage_bytes(p.grad for p in self.model.parameters() if p.grad is not None)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state that this rank holds between steps."""
        state = [t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        return {
            "parameters": storage_bytes(self.model.parameters()),
            "gradients": self.gradient_bytes,
            "optimizer_state": storage_bytes(state),
        }

    def memory_bytes(self, memory: Memory) -> dict[str, Any]:
        """Bytes on the run's device: as the last backward begins, at the peak, after the step; the allocator's peak."""
        on_gpu = self.run.device.type == "cuda"
        return {
            "after_forward": memory.after_forward,
            "peak": memory.peak,
            "after_step": memory.snapshot(),
            "allocator_peak_bytes": torch.cuda.max_memory_allocated(self.run.device) if on_gpu else None,
        }

    def _write(self, out_dir: Path, traffic: Traffic, memory: Memory) -> None:
        formula = self.step_costs(self.model, self.optimizer, self.config, self.run)
        mine = {
            "state_bytes": self.state_bytes(),
            "expected_state_bytes": formula.state,
            "padding": formula.padding,
            "memory": self.memory_bytes(memory),
            "collectives": add_expected_bytes(traffic.rows, formula.traffic),
        }
        ranks = self.run.gather(mine)
        params = sum(p.numel() for p in self.model.parameters())
        report = {"step": self.step, "world_size": self.run.world_size, "parameters": params, "ranks": ranks}
        if self.run.is_main:
            (out_dir / "ledger.json").write_text(json.dumps(report, indent=1) + "\n")
        self.run.print0(describe(report))


def add_expected_bytes(
    counted: dict[tuple[str, int], dict[str, Any]], formula: Counter[tuple[str, int]]
) -> list[dict[str, Any]]:
    """The collectives that were counted, with their `expected_bytes`; also those that the formula alone has."""
    missing = [key for key in formula if key not in counted and key[1] > 1]
    nothing = [{"kind": kind, "ranks": n, "calls": 0, "tensor_bytes": 0, "ring_bytes": 0.0} for kind, n in missing]
    return [{**row, "expected_bytes": formula[row["kind"], row["ranks"]]} for row in [*counted.values(), *nothing]]


def describe(report: dict[str, Any]) -> str:
    """The report as a table: rank 0's traffic, every rank's state and memory, beside the formula's."""
    lines = [f"ledger of step {report['step']}: {report['parameters']:,} parameters, {report['world_size']} rank(s)"]
    for row in report["ranks"][0]["collectives"]:
        matches = compare_with_formula(row["tensor_bytes"], row["expected_bytes"])
        lines.append(
            f"  {row['kind']:<15} {row['calls']:>5} calls over {row['ranks']} ranks  {row['tensor_bytes']:>15,} B full"
            f" {matches:<12} {row['ring_bytes']:>15,.0f} B sent per rank"
        )
    for rank, each in enumerate(report["ranks"]):
        expected = each["expected_state_bytes"]
        state = "  ".join(
            f"{name} {size:,} B {compare_with_formula(size, expected[name])}"
            for name, size in each["state_bytes"].items()
        )
        padding = f"  padding {each['padding']:,} elements" if each["padding"] else ""
        lines.append(f"  rank {rank}: {state}{padding}")
        lines.append(f"  rank {rank}: memory {describe_memory(each['memory'])}")
    return "\n".join(lines)


def compare_with_formula(counted: int, expected: int) -> str:
    return "= formula" if counted == expected else f"(formula {expected:,} B)"


def describe_memory(memory: dict[str, Any]) -> str:
    """All bytes at each moment, and of them those that come and go within a step."""
    parts = []
    for moment in ("after_forward", "peak", "after_step"):
        held = memory[moment] or {}
        passing = ", ".join(f"{name} {held[name]:,}" for name in ("gathered", "activations", "other") if held.get(name))
        parts.append(f"{moment.replace('_', ' ')} {sum(held.values()):,} B" + (f" ({passing})" if passing else ""))
    allocated = memory["allocator_peak_bytes"]
    return "  ".join(parts + ([f"allocator's peak {allocated:,} B"] if allocated is not None else []))
