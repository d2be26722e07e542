"""Record memory, norms and hashes of the parameters every `--diagnostics_interval` steps, and compare the ranks.

    diagnostics/rank{r}.jsonl     one line per record: memory, norms, the loss of this rank, a hash of the parameters
    diagnostics/rank{r}.json      dtypes and devices of all tensors, modules by class (which show the kernels in use),
                                  the optimizer, and memory at the start
    diagnostics/rank{r}.pickle    on a GPU: the last allocations with their stacks, for https://pytorch.org/memory_viz

Each rank writes its own files, so that a fault of one rank is visible. `make autopsy` reads them. Without the flag,
nothing is measured. A record reads every parameter and waits for the GPU. Its time does not depend on the batch, so it
is a large fraction of a short step. On a GPU, a record also writes the history of the allocator.

A record is also a check. All ranks must have the same gradient norm. Ranks that store the same parameters must have the
same values, and the loss of every rank must be finite. Otherwise the run stops with an error that names the ranks.
"""

import contextlib
import functools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from measure.formulas import find_cost_function
from measure.memory_limits import process_bytes
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.errors import DivergedRanks, NonFiniteLoss
from nanoGPT.train_config import TrainConfig

CHUNK = 1 << 20  # elements of a tensor that a hash or a norm reads at a time
MAX_ALLOCATIONS = 20_000  # events that the allocator's history keeps
NORM_TOLERANCE = 1e-9  # relative; replicas may add the squares in another order
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


@functools.cache
def make_weights(device: torch.device) -> Tensor:
    """Return the weights of the elements of a chunk in a hash: 1, 2, 3, ..."""
    return torch.arange(1, CHUNK + 1, device=device)


def hash_tensor(tensor: Tensor) -> int:
    """Return a number that depends on every bit of a tensor and on the position of every element."""
    total = 0
    flat = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
    for start in range(0, flat.numel(), CHUNK):
        chunk = flat[start : start + CHUNK]
        products = chunk * make_weights(chunk.device)[: len(chunk)]  # int64
        total = (31 * total + int(products.sum())) % 2**61
    return total


def get_replica_key(model: nn.Module) -> tuple[int, ...]:
    """Return a key that is the same on ranks that store the same parts of all parameters."""
    for param in model.parameters():
        if isinstance(param, DTensor):
            coordinate = list(param.device_mesh.get_coordinate() or ())
            pairs = zip(coordinate, param.placements, strict=True)
            return tuple(index for index, placement in pairs if placement.is_shard())
    return ()


def read_memory(device: torch.device) -> dict[str, int | None]:
    """Return the bytes that torch's allocator uses and has reserved; on a CPU, the resident bytes of the process."""
    if device.type != "cuda":
        return {"allocated": process_bytes(), "reserved": None}
    return {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}


def describe_tensors(tensors: Iterator[Tensor]) -> dict[str, int]:
    """Return the number of tensors by dtype, device and kind, such as "float32 on cpu, sharded"."""
    names = (
        f"{str(t.dtype).removeprefix('torch.')} on {t.device.type}" + (", sharded" if isinstance(t, DTensor) else "")
        for t in tensors
    )
    return dict(Counter(names))


def replace_non_finite(value: Any) -> Any:
    """Return a value, or a dictionary of values, with None for each NaN or infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: replace_non_finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compute_norm(tensor: Tensor) -> float:
    """Return the Euclidean norm, accumulated in fp64 where the device has it. Only a chunk is copied at a time."""
    dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
    norms = [torch.linalg.vector_norm(chunk, dtype=dtype) for chunk in tensor.detach().flatten().split(CHUNK)]
    return torch.linalg.vector_norm(torch.stack(norms)).item()


def compute_rms(tensor: Tensor) -> float:
    """Return the root mean square of the elements, in fp32 or wider."""
    return tensor.detach().float().square().mean().sqrt().item() if tensor.numel() else 0.0


class Diagnostics:
    """The diagnostics of one rank.

    Args:
        config, run: of this rank.
        interval: steps between two records.
        model: its parameters are full tensors or DTensors.
        optimizer: its gradients are read just before the update.
    """

    def __init__(
        self, config: TrainConfig, run: Runtime, interval: int, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.config, self.run, self.interval, self.model, self.optimizer = config, run, interval, model, optimizer
        self.folder = Path(config.out_dir) / "diagnostics"
        self.has_written_summary = False
        self.memory_at_start = read_memory(run.device)
        self.names = {param: name for name, param in model.named_parameters()}
        self.gradients: dict[str, float] = {}
        self.activations: dict[str, float] = {}
        self.records_allocations = run.device.type == "cuda"
        if self.records_allocations:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_ALLOCATIONS)

    def is_due(self, step: int) -> bool:
        """Return whether this step is recorded."""
        return step % self.interval == 0

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Read gradients and activations of the step that runs in the context, if it is recorded."""
        if not self.is_due(step):
            yield
            return
        hooks = [self.optimizer.register_step_pre_hook(self._read_gradients)]
        if not self.config.compile:  # a new hook would recompile the model
            blocks = list(self.model.blocks)  # type: ignore[arg-type]
            hooks += [block.register_forward_hook(self._make_hook(f"blocks.{i}")) for i, block in enumerate(blocks)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _make_hook(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self.activations[name] = compute_rms(output)

        return hook

    def _read_gradients(self, *_: Any) -> None:
        """Read the norm of this rank's part of each gradient."""
        pairs = find_cost_function(self.config, "local_gradients")(self.optimizer)
        self.gradients = {self.names[p]: compute_norm(grad) for p, grad in pairs if p in self.names}

    def record(self, step: int, loss_sum: Tensor, norm: Tensor) -> None:
        """Write a record after a step, and compare the ranks. Collective on the steps that are recorded.

        Args:
            step: that has just run.
            loss_sum: sum of the losses of this rank's micro-batches, before it is added to those of other ranks.
            norm: the global gradient norm, as this rank has computed it.

        Raises:
            NonFiniteLoss: the loss of a rank is not finite.
            DivergedRanks: the ranks have different gradient norms, or different values of the same parameters.
        """
        if not self.is_due(step):
            return
        find_cost_function(self.config, "wait_for_params")(self.optimizer)
        loss, grad_norm = loss_sum.item(), norm.item()  # waits for the end of the step
        self.run.enter_stage("diagnostics", step)  # whose time is not that of a step
        values = self._measure(step, loss, grad_norm)
        names = ("local_loss", "grad_norm", "parameters", "replica")
        compare_records(step, self.run.gather({name: values[name] for name in names}))

    def _measure(self, step: int, loss_sum: float, grad_norm: float) -> dict[str, Any]:
        """Write the record of a step, and return the values that are compared between the ranks."""
        micro_batches = self.config.gradient_accumulation_steps // self.run.world_size
        params = {name: local_shard(param) for param, name in self.names.items()}
        values = {
            "step": step,
            "local_loss": loss_sum / micro_batches,
            "grad_norm": grad_norm,
            "parameters": sum(hash_tensor(param) for param in params.values()) % 2**61,
            "replica": get_replica_key(self.model),
            "memory": read_memory(self.run.device),
        }
        weights = {name: compute_norm(param) for name, param in params.items()}
        norms = {"gradient_norms": self.gradients, "weight_norms": weights, "activation_rms": self.activations}
        self._write(values | norms | {"time": time.time(), "run": self.run.token})
        self.gradients, self.activations = {}, {}
        return values

    def _write(self, record: dict[str, Any]) -> None:
        """Append a line to this rank's file, and write the summary with the first one."""
        with contextlib.suppress(OSError):  # a full disk must not stop the run
            self.folder.mkdir(exist_ok=True)
            if not self.has_written_summary:
                (self.folder / f"rank{self.run.rank}.json").write_text(json.dumps(self._describe(), indent=1) + "\n")
                self.has_written_summary = True
            if self.records_allocations:
                torch.cuda.memory._dump_snapshot(str(self.folder / f"rank{self.run.rank}.pickle"))
            with open(self.folder / f"rank{self.run.rank}.jsonl", "a") as file:
                file.write(json.dumps(replace_non_finite(record)) + "\n")

    def _describe(self) -> dict[str, Any]:
        """Return the summary: dtypes and devices of all tensors, modules by class, and the memory at the start."""
        state = (t for values in self.optimizer.state.values() for t in values.values() if isinstance(t, Tensor))
        return {
            "parameters": describe_tensors(self.model.parameters()),
            "buffers": describe_tensors(self.model.buffers()),
            "optimizer_state": describe_tensors(state),
            "modules": dict(Counter(type(module).__name__ for module in self.model.modules())),
            "optimizer": type(self.optimizer).__name__,
            "memory_at_start": self.memory_at_start,
        }


def compare_records(step: int, records: list[dict[str, Any]]) -> None:
    """Compare the records of all ranks. Every rank has the same records, so all raise the same error."""
    bad = [rank for rank, each in enumerate(records) if not math.isfinite(each["local_loss"])]
    if bad:
        place = f"rank(s) {bad}" if len(bad) < len(records) else "every rank"
        raise NonFiniteLoss(
            f"step {step}: the loss of {place} is not finite, and training stopped without saving: look at the "
            "activation and gradient norms in diagnostics/, and resume from the last checkpoint"
        )
    norms = {rank: each["grad_norm"] for rank, each in enumerate(records)}
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    is_same = all(math.isclose(norm, finite[0], rel_tol=NORM_TOLERANCE) for norm in finite)
    if not is_same or 0 < len(finite) < len(norms):
        raise DivergedRanks(
            f"step {step}: the ranks have different gradient norms ({describe_groups(norms)}), so each rank "
            "clips by a different factor: sum the squared norms of all shards over the ranks before you clip"
        )
    for key in {tuple(each["replica"]) for each in records}:
        digests = {r: each["parameters"] for r, each in enumerate(records) if tuple(each["replica"]) == key}
        if len(set(digests.values())) > 1:
            raise DivergedRanks(
                f"step {step}: ranks {describe_groups(digests, show_values=False)} have different values of the "
                "same parameters: check that they start from the same weights, and that every gradient is averaged"
            )


def describe_groups(values: dict[int, Any], show_values: bool = True) -> str:
    """Return the ranks that have the same value, such as "[0, 1]: 2.5, [2]: 3.1" or "[0, 1] and [2]"."""
    groups: dict[Any, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    if show_values:
        return ", ".join(f"{ranks}: {value:.6g}" for value, ranks in groups.items())
    return " and ".join(map(str, groups.values()))
