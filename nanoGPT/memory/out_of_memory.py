"""What to say when memory runs out: what was held, by category, and the flags that free most of it.

    out of memory: GPU 1 has 79.2 GiB, and this rank tried to allocate 2.1 GiB while it held 5.9 GiB of parameters,
    5.9 GiB of gradients, 11.8 GiB of optimizer state and 53 GiB of activations and other tensors; free most with
    --batch_size=4 (about 26.5 GiB), --fsdp_cpu_offload=True (about 23.6 GiB) or ...

Whether a model can fit at all is checked before a run starts (`check_parameters_fit` in `device.py`). After an error
the trainer's own variables, which the error's traceback still holds, tell the rest; the trainer's `costs` module knows
what its flags free.
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
from nanoGPT.errors import ON_GPU, error_messages, is_out_of_memory
from nanoGPT.memory.costs import Costs
from nanoGPT.memory.device import (
    SMALLER_MODEL,
    DeviceMemory,
    format_bytes,
    gpu_memory,
    host_memory,
    process_bytes,
    requested_bytes,
)
from nanoGPT.memory.savings import Needs
from nanoGPT.memory.tracker import Memory
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.train_config import TrainConfig


class CostsModule(Protocol):
    """A trainer's `costs` module: what a step costs by its formula, and what flags free."""

    def step_costs(self, model: Any, optimizer: Any, config: Any, run: Runtime) -> Costs: ...

    def memory_savings(self, config: Any, needs: Needs, run: Runtime) -> dict[str, float]: ...


NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "gathered": "gathered parameters",  # of FSDP
}
RESERVE = 8 * 2**20  # bytes
SMALLEST = 2**20  # bytes that are worth a word


@dataclass
class Job:
    """What is known of a run that failed; None where it did not come so far."""

    config: TrainConfig | None = None
    run: Runtime | None = None
    model: nn.Module | None = None
    optimizer: Optimizer | None = None

    @classmethod
    def from_traceback(cls, trace: TracebackType | None) -> "Job":
        """Find the variables of the function that `main` called; every trainer gives them these names."""
        trainer = trace.tb_next if trace else None
        variables = trainer.tb_frame.f_locals if trainer else {}
        return cls(*(variables.get(field.name) for field in dataclasses.fields(cls)))


class MemoryReport:
    """Explains an error of memory. Make one before a trainer runs: it notes what the process uses then, and keeps some
    memory with which to write the sentence."""

    def __init__(self, costs: CostsModule) -> None:
        self.costs = costs
        self.in_use_at_start = process_bytes()
        self.reserve = bytearray(RESERVE)

    def explain(self, error: BaseException) -> str | None:
        """Return the sentence for an error that ended a trainer, as its caller caught it; None for other errors."""
        self.reserve = bytearray()
        try:
            if not is_out_of_memory(error):
                return None
            job, text = Job.from_traceback(error.__traceback__), error_messages(error)
            if isinstance(error, torch.OutOfMemoryError) or any(words in text for words in ON_GPU):
                memory = gpu_memory(text, job.run.device if job.run else None)
            else:
                memory = host_memory(self.in_use_at_start)
            return describe(requested_bytes(text), memory, job, self.costs)
        except Exception:  # such as MemoryError once more
            return "out of memory: use a smaller --batch_size, --block_size, --n_layer or --n_embd"


def describe(requested: int | None, memory: DeviceMemory, job: Job, costs_module: CostsModule) -> str:
    """Return the sentence.

    Args:
        requested: bytes of the allocation that failed, if they are known.
        memory: in which it failed.
        job: the run, as far as it had come.
        costs_module: the trainer's.
    """
    if job.config is None or job.run is None:
        return f"out of memory: {total_of(memory)}: use a smaller --batch_size, --block_size, --n_layer or --n_embd"
    shape, total = shape_of(job.config, job.model), total_of(memory)
    share = job.config.share_of_parameters(job.run.world_size, job.run.local_world_size, memory.is_gpu)
    weights = 4 * shape.count_params() * share
    if memory.total is not None and weights > memory.total:
        where = "machines" if memory.is_shared else "ranks"
        alone = f"the parameters alone take {format_bytes(weights)} in fp32"
        return f"out of memory: {alone}, and {total}: {SMALLER_MODEL}{where}"
    held = count_held(job, memory)
    costs = costs_of(job, shape, share, costs_module)
    if costs.has_gradient_buffers and (memory.is_gpu or held["optimizer_state"]):  # a CPU's count once they are written
        free = (memory.in_use or 0) - held["parameters"] - held["optimizer_state"]
        held["gradients"] = max(held["gradients"], min(costs.state["gradients"], free))
    rest = max(0, (memory.in_use or 0) - sum(held.values())) if job.model is not None else 0
    computes_here = job.model is not None and (memory.is_gpu or job.run.device.type == "cpu")
    passing = rest + (requested or 0) if computes_here else 0
    wanted = f", and this rank tried to allocate {format_bytes(requested)}" if requested else ""
    holding = describe_held(held, rest, memory, " while it held " if wanted else ", and this rank held ")
    advice = advise(job, costs_module, Needs(shape, costs.state, passing, memory.is_gpu, memory.is_shared))
    return f"out of memory: {total}{wanted}{holding}{advice}{describe_fragments(memory, requested)}"


def describe_held(held: dict[str, int], rest: int, memory: DeviceMemory, before: str) -> str:
    """Return the half-sentence that lists what was held, with `before` in front; nothing where nothing was."""
    parts = [f"{format_bytes(size)} of {NAMES[name]}" for name, size in held.items() if size >= SMALLEST]
    if rest >= SMALLEST:
        parts.append(f"{format_bytes(rest)} of activations and other {'tensors' if memory.is_gpu else 'memory'}")
    return before + join_words(parts, "and") if parts else ""


def total_of(memory: DeviceMemory) -> str:
    """Return the half-sentence that says how much there is."""
    total = f"{memory.owner} {format_bytes(memory.total)}" if memory.total else f"{memory.owner} too little"
    return total + (f", of which other processes use {format_bytes(memory.others)}" if memory.others else "")


def describe_fragments(memory: DeviceMemory, requested: int | None) -> str:
    """Return the half-sentence that says that enough was free, but in pieces; nothing where that is not so."""
    if not requested or memory.fragmented < requested:
        return ""
    lost = f"{format_bytes(memory.fragmented)} more is reserved by torch in pieces that are too small"
    return f"; {lost}: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def advise(job: Job, costs_module: CostsModule, needs: Needs) -> str:
    """Return the half-sentence that names the three flags that free most; other commands where there are fewer."""
    assert job.config is not None and job.run is not None
    savings = {
        words: size
        for words, size in costs_module.memory_savings(job.config, needs, job.run).items()
        if size >= SMALLEST
    }
    flags = {words: size for words, size in savings.items() if words.startswith("--")}
    chosen = flags if len(flags) >= 3 else savings
    best = sorted(chosen, key=lambda words: -chosen[words])[:3]
    if not best:
        return f"; {SMALLER_MODEL}ranks"
    return "; free most with " + join_words([f"{words} (about {format_bytes(chosen[words])})" for words in best], "or")


def join_words(words: list[str], last: str) -> str:
    """Return "a, b and c"."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def shape_of(config: TrainConfig, model: nn.Module | None) -> GPTConfig:
    """Return the shape of the model; before there is one, that of the configuration."""
    if isinstance(model, GPT):
        return model.config
    return GPTConfig.of({**dataclasses.asdict(config), "vocab_size": config.vocab_size or 1})


def count_held(job: Job, memory: DeviceMemory) -> dict[str, int]:
    """Return the bytes by category that lie in the memory that ran out."""
    assert job.run is not None
    with Memory(job.model, job.optimizer, job.run.device if memory.is_gpu else torch.device("cpu")) as counted:
        pass
    return {name: counted.snapshot()[name] for name in NAMES}


def costs_of(job: Job, shape: GPTConfig, share: float, costs_module: CostsModule) -> Costs:
    """Return what state a rank needs by the formula; before there is an optimizer, what AdamW needs unsharded.

    Args:
        share: of all parameters that the rank keeps.
    """
    assert job.config is not None and job.run is not None
    if job.model is None or job.optimizer is None:
        size = round(4 * shape.count_params() * share)
        return Costs({"parameters": size, "gradients": size, "optimizer_state": 2 * size})
    for module in job.model.modules():
        if isinstance(module, FSDPModule):
            with contextlib.suppress(Exception):  # of a unit whose all-gather failed
                module.reshard()  # the formula reads shards
    return costs_module.step_costs(job.model, job.optimizer, job.config, job.run)
