"""The error message for memory that runs out: the memory in use by category, and the flags that save most.

    out of memory: GPU 1 has 79.2 GiB, and this rank tried to allocate 2.1 GiB in addition to 5.9 GiB of parameters,
    5.9 GiB of gradients, 11.8 GiB of optimizer state and 53 GiB of activations and other tensors; to save memory, use
    --batch_size=4 (about 26.5 GiB), --fsdp_cpu_offload=True (about 23.6 GiB) or ...

`check_parameters_fit` in `device.py` checks before a run whether the parameters can fit at all. This module explains
an error during a run. It finds the trainer's variables (model, optimizer, configuration) through the traceback of the
error. The trainer's `costs` module estimates what its flags can save.
"""

import contextlib
import dataclasses
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import GPU_OUT_OF_MEMORY_MESSAGES, error_messages, is_out_of_memory
from nanoGPT.memory.costs import Costs
from nanoGPT.memory.device import (
    SMALLER_MODEL,
    DeviceMemory,
    format_bytes,
    gpu_memory,
    host_memory,
    is_pinned_memory,
    process_bytes,
    requested_bytes,
)
from nanoGPT.memory.savings import Needs
from nanoGPT.memory.tracker import MemoryTracker
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.train_config import TrainConfig


class CostsModule(Protocol):
    """The interface of a trainer's `costs` module: the costs of a step, and the memory that flags can save."""

    def step_costs(self, model: Any, optimizer: Any, config: Any, run: Runtime) -> Costs: ...

    def memory_savings(self, config: Any, needs: Needs, run: Runtime) -> dict[str, float]: ...


NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "gathered": "all-gathered parameters",  # of FSDP
}
RESERVED_BYTES = 8 * 2**20
MIN_BYTES = 2**20  # smaller amounts are not mentioned


@dataclass
class FailedRun:
    """The variables of a run that failed. Variables that did not exist yet are None."""

    config: TrainConfig | None = None
    run: Runtime | None = None
    model: nn.Module | None = None
    optimizer: Optimizer | None = None

    @classmethod
    def from_traceback(cls, trace: TracebackType | None) -> "FailedRun":
        """Find the variables of the trainer's `train` function by name. Every trainer uses the same names."""
        trainer = trace.tb_next if trace else None
        variables = trainer.tb_frame.f_locals if trainer else {}
        return cls(*(variables.get(field.name) for field in dataclasses.fields(cls)))


class MemoryReport:
    """Explains out-of-memory errors in one sentence.

    Create it before the trainer runs. It records the memory that the process uses at that time. It also reserves some
    memory, so that enough is left to write the sentence.
    """

    def __init__(self, costs: CostsModule) -> None:
        self.costs = costs
        self.in_use_at_start = process_bytes()
        self.reserve = bytearray(RESERVED_BYTES)

    def explain(self, error: BaseException) -> str | None:
        """Return the sentence for an out-of-memory error of the trainer; None for any other error.

        Args:
            error: the error, caught by the function that called the trainer's `train`.
        """
        self.reserve = bytearray()
        try:
            if not is_out_of_memory(error):
                return None
            failed_run, text = FailedRun.from_traceback(error.__traceback__), error_messages(error)
            device = failed_run.run.device if failed_run.run else None
            has_gpu_message = any(words in text for words in GPU_OUT_OF_MEMORY_MESSAGES)
            if (isinstance(error, torch.OutOfMemoryError) or has_gpu_message) and not is_pinned_memory(text, device):
                memory = gpu_memory(text, device)
            else:
                memory = host_memory(self.in_use_at_start)
            return describe(requested_bytes(text), memory, failed_run, self.costs)
        except Exception:  # for example another MemoryError
            return "out of memory: use a smaller --batch_size, --block_size, --n_layer or --n_embd"


def describe(requested: int | None, memory: DeviceMemory, failed_run: FailedRun, costs_module: CostsModule) -> str:
    """Return the full sentence.

    Args:
        requested: bytes of the allocation that failed; None if unknown.
        memory: the memory that has run out.
        failed_run: the variables of the run.
        costs_module: the `costs` module of the trainer.
    """
    total = describe_total(memory)
    config, run = failed_run.config, failed_run.run
    if config is None or run is None:
        return f"out of memory: {total}: use a smaller --batch_size, --block_size, --n_layer or --n_embd"
    shape = model_shape(config, failed_run.model)
    fraction = config.local_param_fraction(run.world_size, run.local_world_size, memory.is_gpu)
    param_bytes = 4 * shape.count_params() * fraction
    if memory.total is not None and param_bytes > memory.total:
        more = "nodes" if memory.is_shared else "ranks"
        need = f"the parameters alone need {format_bytes(param_bytes)} in fp32"
        return f"out of memory: {need}, but {total}: {SMALLER_MODEL}{more}"
    usage = measure_usage(failed_run, memory)
    costs = predict_costs(failed_run, shape, fraction, costs_module)
    # Gradient buffers are allocated from the start. In CPU memory they count only after they have been written.
    if costs.has_gradient_buffers and (memory.is_gpu or usage["optimizer_state"]):
        remaining = (memory.in_use or 0) - usage["parameters"] - usage["optimizer_state"]
        usage["gradients"] = max(usage["gradients"], min(costs.state["gradients"], remaining))
    other = max(0, (memory.in_use or 0) - sum(usage.values())) if failed_run.model is not None else 0
    has_activations = failed_run.model is not None and (memory.is_gpu or run.device.type == "cpu")
    activations = other + (requested or 0) if has_activations else 0
    request = f", and this rank tried to allocate {format_bytes(requested)}" if requested else ""
    in_use = describe_usage(usage, other, memory, " in addition to " if request else ", and this rank uses ")
    advice = advise(failed_run, costs_module, Needs(shape, costs.state, activations, memory.is_gpu, memory.is_shared))
    return f"out of memory: {total}{request}{in_use}{advice}{describe_fragmentation(memory, requested)}"


def describe_usage(usage: dict[str, int], other: int, memory: DeviceMemory, prefix: str) -> str:
    """Return the part of the sentence that lists the memory in use, after `prefix`; "" if there is nothing to list."""
    parts = [f"{format_bytes(size)} of {NAMES[name]}" for name, size in usage.items() if size >= MIN_BYTES]
    if other >= MIN_BYTES:
        parts.append(f"{format_bytes(other)} of activations and other {'tensors' if memory.is_gpu else 'memory'}")
    return prefix + join_words(parts, "and") if parts else ""


def describe_total(memory: DeviceMemory) -> str:
    """Return the part of the sentence with the size of the memory."""
    total = f"{memory.owner} {format_bytes(memory.total)}" if memory.total else f"{memory.owner} too little"
    return total + (f", of which other processes use {format_bytes(memory.others)}" if memory.others else "")


def describe_fragmentation(memory: DeviceMemory, requested: int | None) -> str:
    """Return the part of the sentence about fragmentation; "" if fragmentation is not the reason for the failure."""
    if not requested or memory.fragmented < requested:
        return ""
    lost = f"{format_bytes(memory.fragmented)} more is reserved by torch in pieces that are too small"
    return f"; {lost}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def advise(failed_run: FailedRun, costs_module: CostsModule, needs: Needs) -> str:
    """Return the part of the sentence with the three largest savings.

    The savings are flags. If there are fewer than three flags, they may also be `make` commands.
    """
    assert failed_run.config is not None and failed_run.run is not None
    savings = {
        name: size
        for name, size in costs_module.memory_savings(failed_run.config, needs, failed_run.run).items()
        if size >= MIN_BYTES
    }
    flags = {name: size for name, size in savings.items() if name.startswith("--")}
    candidates = flags if len(flags) >= 3 else savings
    largest = sorted(candidates, key=lambda name: -candidates[name])[:3]
    if not largest:
        return f"; {SMALLER_MODEL}ranks"
    options = [f"{name} (about {format_bytes(candidates[name])})" for name in largest]
    return "; to save memory, use " + join_words(options, "or")


def join_words(words: list[str], conjunction: str) -> str:
    """Return a list in words, such as "a, b and c"."""
    return f" {conjunction} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def model_shape(config: TrainConfig, model: nn.Module | None) -> GPTConfig:
    """Return the shape of the model; if the model does not exist yet, the shape from the configuration."""
    if isinstance(model, GPT):
        return model.config
    return GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": config.vocab_size or 1})


def measure_usage(failed_run: FailedRun, memory: DeviceMemory) -> dict[str, int]:
    """Return the bytes by category that the run uses in the memory that has run out."""
    assert failed_run.run is not None
    device = failed_run.run.device if memory.is_gpu else torch.device("cpu")
    with MemoryTracker(failed_run.model, failed_run.optimizer, device) as tracker:
        pass
    return {name: tracker.snapshot()[name] for name in NAMES}


def predict_costs(failed_run: FailedRun, shape: GPTConfig, fraction: float, costs_module: CostsModule) -> Costs:
    """Return the costs of a step from the formula. Without an optimizer, return those of AdamW.

    Args:
        failed_run: the variables of the run.
        shape: shape of the model.
        fraction: fraction of all parameters that the rank stores. Without an optimizer, gradients and moments are
            counted as if they were sharded like the parameters.
        costs_module: the `costs` module of the trainer.
    """
    assert failed_run.config is not None and failed_run.run is not None
    if failed_run.model is None or failed_run.optimizer is None:
        size = round(4 * shape.count_params() * fraction)
        return Costs({"parameters": size, "gradients": size, "optimizer_state": 2 * size})
    for module in failed_run.model.modules():
        if isinstance(module, FSDPModule):
            with contextlib.suppress(Exception):  # reshard fails for a unit whose all-gather failed
                module.reshard()  # the formula needs the shards
    return costs_module.step_costs(failed_run.model, failed_run.optimizer, failed_run.config, failed_run.run)
