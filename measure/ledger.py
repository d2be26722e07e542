"""Measure the costs of one training step per rank: communication volume, model state, and memory by category.

The communication volume is counted, not estimated: a dispatch mode intercepts every collective of the step, with its
tensors. The bytes per rank are those of the ring algorithm (Patarasuk & Yuan 2009): 2n(N-1)/N for an all-reduce of n
bytes over N ranks, and n(N-1)/N for a reduce, reduce-scatter, all-gather or broadcast with a full tensor of n bytes. In
an all-to-all, n is the bytes that this rank has for all ranks together, and the result is an average over the ranks.
NCCL's rings send exactly these bytes. gloo's reduce-scatter sends as much as an all-reduce, and gloo copies the tensors
that it reduces; the ledger counts neither.
`measure/tracker.py` measures the memory.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from measure.formulas import find_cost_function
from measure.tracker import MemoryTracker, tensors_in
from nanoGPT.costs import ring_bytes, storage_bytes
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.train_config import TrainConfig

# For each operator of torch.distributed: the collective, and the index of the argument with the full tensor.
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
    "alltoall_base_": ("all-to-all", 1),
}


class CollectiveCounter(TorchDispatchMode):
    """A dispatch mode that counts the collectives called in it, by kind and group size.

    Attributes:
        rows: for each kind and group size: kind, ranks, calls, tensor_bytes (full tensors), and ring_bytes (per rank).
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.record(func, args)
        return func(*args, **(kwargs or {}))

    def record(self, func: Any, args: Any) -> None:
        """Count an operator that is about to run, if it is a collective over more than one rank."""
        if func.namespace == "c10d" and (collective := COLLECTIVES.get(func.__name__.split(".")[0])):
            kind, position = collective
            group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            ranks = dist.ProcessGroup.unbox(group).size()
            if ranks == 1:
                return  # nothing is communicated
            tensor_bytes = sum(t.numel() * t.element_size() for t in tensors_in(args[position]))
            row = self.rows.setdefault(
                (kind, ranks), {"kind": kind, "ranks": ranks, "calls": 0, "tensor_bytes": 0, "ring_bytes": 0.0}
            )
            row["calls"] += 1
            row["tensor_bytes"] += tensor_bytes
            row["ring_bytes"] += ring_bytes(kind, tensor_bytes, ranks)


class Ledger:
    """The measured costs of one training step, compared with the formula. It prints them and writes `ledger.json`.

    On a GPU, the allocator's peak is reset before and after the step; the log reads the same peak. The measured step
    of a compiled model runs in eager mode.

    Args:
        config: of the run. `ledger.json` is written into its out_dir.
        run: this rank's Runtime.
        step: the step to measure. It is the third step of a run, because the first steps also allocate memory.
        model, optimizer: their bytes are counted; gradients are counted just before the update.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Runtime,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.config, self.run, self.step, self.model, self.optimizer = config, run, step, model, optimizer
        self.gradient_bytes: int | None = None
        if step >= config.max_iters:
            run.print0(f"--ledger measures step {step}, and this run ends before it: use a larger --max_iters")

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Measure the step that runs in the context, if it is the step to measure. Collective on that step."""
        if step != self.step:
            yield
            return
        self.gradient_bytes = None
        hook = self.optimizer.register_step_pre_hook(self._count_gradients)
        if self.run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.run.device)
        traffic = CollectiveCounter()
        # Otherwise, torch would also run all later steps of a compiled model in eager mode.
        eager = torch.compiler.set_stance("force_eager") if self.config.compile else contextlib.nullcontext()
        buffers = find_cost_function(self.config, "gradient_buffers")(self.optimizer)
        with eager, MemoryTracker(self.model, self.optimizer, self.run.device, buffers, traffic.record) as memory:
            yield
        hook.remove()
        if self.gradient_bytes is None:  # a float16 step that was skipped: measure the next one
            self.step += 1
        else:
            self._write(Path(self.config.out_dir), traffic, memory)
        if self.run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.run.device)

    def _count_gradients(self, *_: Any) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        local_grads = [grad for _, grad in find_cost_function(self.config, "local_gradients")(self.optimizer)]
        self.gradient_bytes = storage_bytes(grads + local_grads)

    def state_bytes(self) -> dict[str, int | None]:
        """Return the bytes of parameters, gradients and optimizer state on this rank, just before the update."""
        state = [t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
        return {
            "parameters": storage_bytes(self.model.parameters()),
            "gradients": self.gradient_bytes,
            "optimizer_state": storage_bytes(state),
        }

    def memory_bytes(self, memory: MemoryTracker) -> dict[str, Any]:
        """Return the bytes on the run's device before the last backward pass, at the peak, and after the step.

        On a GPU, the peak of torch's allocator is included.
        """
        on_gpu = self.run.device.type == "cuda"
        return {
            "after_forward": memory.after_forward,
            "peak": memory.peak,
            "after_step": memory.snapshot(),
            "allocator_peak_bytes": torch.cuda.max_memory_allocated(self.run.device) if on_gpu else None,
        }

    def _write(self, out_dir: Path, traffic: CollectiveCounter, memory: MemoryTracker) -> None:
        formula = find_cost_function(self.config, "step_costs")(self.model, self.optimizer, self.config, self.run)
        costs = {
            "state_bytes": self.state_bytes(),
            "expected_state_bytes": formula.state,
            "padding": formula.padding,
            "memory": self.memory_bytes(memory),
            "collectives": add_expected_bytes(traffic.rows, formula.traffic),
        }
        ranks = self.run.gather(costs)
        params = sum(p.numel() for p in self.model.parameters())
        report = {"step": self.step, "world_size": self.run.world_size, "parameters": params, "ranks": ranks}
        if self.run.is_main:
            (out_dir / "ledger.json").write_text(json.dumps(report, indent=1) + "\n")
        self.run.print0(format_report(report))


def add_expected_bytes(
    rows: dict[tuple[str, int], dict[str, Any]], formula: Counter[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Return the rows of the counted collectives, with the `expected_bytes` of the formula.

    A collective that only the formula has gets a row with zero calls.
    """
    missing = [key for key in formula if key not in rows and key[1] > 1]
    zero_rows = [{"kind": kind, "ranks": n, "calls": 0, "tensor_bytes": 0, "ring_bytes": 0.0} for kind, n in missing]
    return [{**row, "expected_bytes": formula[row["kind"], row["ranks"]]} for row in [*rows.values(), *zero_rows]]


def format_report(report: dict[str, Any]) -> str:
    """Return a table of rank 0's communication and of every rank's state and memory, compared with the formula."""
    lines = [f"ledger of step {report['step']}: {report['parameters']:,} parameters, {report['world_size']} rank(s)"]
    for row in report["ranks"][0]["collectives"]:
        comparison = compare_with_formula(row["tensor_bytes"], row["expected_bytes"])
        lines.append(
            f"  {row['kind']:<15} {row['calls']:>5} calls over {row['ranks']} ranks  {row['tensor_bytes']:>15,} B"
            f" in full tensors {comparison:<12} {row['ring_bytes']:>15,.0f} B communicated per rank"
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


def compare_with_formula(measured: int, expected: int) -> str:
    """Return "= formula" if both are equal, else the bytes that the formula expects."""
    return "= formula" if measured == expected else f"(formula {expected:,} B)"


def describe_memory(memory: dict[str, Any]) -> str:
    """Return the total bytes at each moment, and in parentheses the bytes that are freed within a step, by category."""
    parts = []
    for moment in ("after_forward", "peak", "after_step"):
        sizes = memory[moment] or {}
        names = [name for name in ("gathered", "activations", "other") if sizes.get(name)]
        temporary = ", ".join(f"{name} {sizes[name]:,}" for name in names)
        parts.append(f"{moment.replace('_', ' ')} {sum(sizes.values()):,} B" + (f" ({temporary})" if temporary else ""))
    allocator_peak = memory["allocator_peak_bytes"]
    return "  ".join(parts + ([f"allocator peak {allocator_peak:,} B"] if allocator_peak is not None else []))
