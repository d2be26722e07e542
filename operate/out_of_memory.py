"""Explain in one sentence that memory ran out: what is allocated, by category, and the flags to try, in their order.

    out of memory (CUDA out of memory. Tried to allocate 2.10 GiB. GPU 1 has a total capacity of 79.15 GiB ...), in
    addition to 5.9 GiB of parameters, 5.9 GiB of gradients, 11.8 GiB of optimizer state and 53 GiB of activations and
    other tensors: use --batch_size=4, --kernels=loss, --fsdp_activation_checkpointing=full, --block_size=512 or FSDP on
    more ranks

`check_parameters_fit` in `measure/memory_limits.py` checks before a run whether the parameters can fit at all.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from measure.formulas import find_cost_function
from measure.memory_limits import format_bytes, host_limits, process_bytes
from measure.tracker import MemoryTracker
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import list_causes, quote_cause
from nanoGPT.train_config import TrainConfig
from operate.known_errors import error_messages

NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "gathered": "all-gathered parameters",  # of FSDP
}
MIN_BYTES = 2**20  # smaller amounts are not mentioned

# Flags that free activations or model state, in the order in which to try them. A flag is named only if the trainer has
# it, with another value.
ACTIVATION_FLAGS = {"fsdp_activation_checkpointing": "full"}
SHARDING_FLAGS = {
    "zero_stage": 2,
    "fsdp_shard_size": "all",
    "fsdp_sync_every_micro_batch": True,
}
GPU_FLAGS = {"fsdp_cpu_offload": True}
MAX_FLAGS = 4
# Out-of-memory messages of errors that are neither torch.OutOfMemoryError nor MemoryError. "Not initialized" is one of
# them: it nearly always means that cuBLAS or cuDNN found no memory for its workspace.
OUT_OF_MEMORY_MESSAGES = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "Cuda failure 2 ",
    "Cuda failure 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "MPS backend out of memory",
    "can't allocate memory: you tried",
    "not enough memory: you tried",
    "unable to mmap memory: you tried",
    "Cannot allocate memory",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, numpy, torch or a CUDA library means that memory ran out."""
    text = error_messages(error)
    has_class = any(isinstance(each, MemoryError | torch.OutOfMemoryError) for each in list_causes(error))
    return has_class or any(message in text for message in OUT_OF_MEMORY_MESSAGES)


class MemoryReport:
    """Explains an out-of-memory error of a run.

    Create it before the model is built, because memory that the process already uses does not belong to the run. Set
    `model` and `optimizer` as soon as they exist.

    Args:
        config: this rank's configuration.
        run: this rank's Runtime.
    """

    def __init__(self, config: TrainConfig, run: Runtime) -> None:
        self.config, self.run = config, run
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.bytes_at_start = process_bytes() or 0

    def explain(self, error: BaseException) -> str | None:
        """Return the sentence for an out-of-memory error; None for any other error."""
        if not is_out_of_memory(error):
            return None
        try:
            state, other = self.measure()
        except Exception:  # for example another MemoryError
            state, other = {}, 0
        parts = [f"{format_bytes(size)} of {NAMES[name]}" for name, size in state.items() if size >= MIN_BYTES]
        parts += [f"{format_bytes(other)} of activations and other tensors"] if other >= MIN_BYTES else []
        usage = f", in addition to {join_words(parts, 'and')}" if parts else ""
        if self.run.device.type == "cpu":
            owner, total, _ = min(host_limits(), key=lambda limit: limit[1])
            usage = f": {owner} {format_bytes(total)}{usage}"
        return describe(error, usage, list_flags(self.config, self.run, frees_state_first=sum(state.values()) > other))

    def measure(self) -> tuple[dict[str, int], int]:
        """Return the bytes of the model state on the run's device by category, and the bytes of everything else."""
        buffers = find_cost_function(self.config, "gradient_buffers")(self.optimizer) if self.optimizer else []
        with MemoryTracker(self.model, self.optimizer, self.run.device, buffers) as tracker:
            pass
        state = {name: tracker.snapshot()[name] for name in NAMES}
        if self.run.device.type == "cuda":
            in_use = torch.cuda.memory_allocated(self.run.device)
        else:
            in_use = (process_bytes() or 0) - self.bytes_at_start
        return state, in_use - sum(state.values())


def describe(error: BaseException, usage: str = "", flags: list[str] | None = None) -> str:
    """Return the full sentence.

    Args:
        error: the error, whose first line is quoted.
        usage: the part of the sentence that lists the memory in use.
        flags: the flags to try.
    """
    quote = f" ({message})" if (message := quote_cause(error)) else ""
    options = flags or ["a smaller --batch_size", "a smaller --block_size"]
    return f"out of memory{quote}{usage}: use {join_words([*options, 'FSDP on more ranks'], 'or')}"


def explain_memory_error(error: BaseException) -> str | None:
    """Return a sentence for an out-of-memory error outside of a training run; None for any other error."""
    return describe(error) if is_out_of_memory(error) else None


def list_flags(config: TrainConfig, run: Runtime, frees_state_first: bool) -> list[str]:
    """Return the flags to try, in their order.

    Args:
        config, run: of this rank.
        frees_state_first: whether the model state is larger than the activations.
    """
    on_gpu = run.device.type == "cuda"
    activations = [f"--batch_size={config.batch_size // 2}"] if config.batch_size > 1 else []
    activations += ["--dtype=bfloat16"] if on_gpu and run.dtype == torch.float32 else []
    kernels = getattr(config, "kernels", "all").lower()
    if on_gpu and not {"all", "triton", "auto", "loss"} & {*kernels.split(",")}:
        activations.append(f"--kernels={'loss' if kernels == 'none' else f'{kernels},loss'}")
    activations += list_other_values(config, ACTIVATION_FLAGS)
    activations += [f"--block_size={config.block_size // 2}"] if config.block_size > 1 else []
    flags = (SHARDING_FLAGS if run.world_size > 1 else {}) | (GPU_FLAGS if on_gpu else {})
    state = list_other_values(config, flags)
    return ([*state, *activations] if frees_state_first else [*activations, *state])[:MAX_FLAGS]


def list_other_values(config: TrainConfig, flags: Mapping[str, object]) -> list[str]:
    """Return the flags that the trainer has, with their values, if the configuration has other values."""
    return [f"--{name}={value}" for name, value in flags.items() if getattr(config, name, value) != value]


def join_words(words: list[str], conjunction: str) -> str:
    """Return a list in words, such as "a, b and c"."""
    return f" {conjunction} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
