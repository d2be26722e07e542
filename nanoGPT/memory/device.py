"""How much GPU or CPU memory a rank may use, and how much it uses.

For a GPU, torch's error message has all numbers. For CPU memory, the smallest of several limits applies: the memory of
the node, the `ulimit` of this process, and the limit that a container or a batch system sets for all processes of the
job.
"""

import contextlib
import dataclasses
import math
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoGPT.errors import ConfigError
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig

SMALLER_MODEL = "use a smaller --n_layer, --n_embd or --vocab_size, or `make phase3` on more "
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass
class DeviceMemory:
    """The memory that has run out.

    Attributes:
        owner: the beginning of a sentence that continues with the total, such as "GPU 1 has".
        total: bytes in total; None if unknown.
        in_use: bytes that this rank has allocated; None if unknown.
        others: bytes of GPU memory that other processes use.
        fragmented: bytes of GPU memory that torch has reserved but cannot use because of fragmentation.
        is_gpu: whether this is GPU memory, and not CPU memory.
        is_shared: whether all ranks of the node share this memory.
    """

    owner: str
    total: int | None
    in_use: int | None
    others: int = 0
    fragmented: int = 0
    is_gpu: bool = False
    is_shared: bool = False


def format_bytes(size: float) -> str:
    """Return a size with three digits and a binary unit, such as "2.1 GiB"."""
    unit = 0
    while size >= 999.5 and unit + 1 < len(UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {UNITS[unit]}"


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a size as torch and numpy print it: "2.10 GiB"."""
    number, unit = text.split()
    return round(float(number) * 1024 ** UNITS.index(unit))


def requested_bytes(message: str) -> int | None:
    """Return the size of the allocation that failed, from the error message; None if the message does not have it."""
    if match := re.search(r"tried to allocate (\d+) bytes", message):  # torch, on a CPU
        return int(match[1])
    if match := re.search(r"(?:Tried|Unable) to allocate ([\d.]+ \w+)", message):  # torch, on a GPU; numpy
        return parse_bytes(match[1])
    return None


def gpu_memory(message: str, device: torch.device | None) -> DeviceMemory:
    """Return the state of a GPU's memory, from torch's error message.

    The errors of cuBLAS, cuDNN and NCCL have no numbers. The numbers then come from torch's allocator.

    Args:
        message: the error message.
        device: this rank's GPU, if it is known.
    """
    size = r"([\d.]+ \w+)"
    if match := re.search(rf"(GPU \d+) has a total capac\w+ of {size} of which", message):
        allocated = re.search(rf"{size} is allocated by PyTorch", message)
        reserved = re.search(rf"{size} is reserved by PyTorch but unallocated", message)
        others = re.findall(rf"Process \d+ has {size} memory in use", message)
        if "this process has" not in message:  # in a container torch cannot identify its own process in the list
            others = []
        return DeviceMemory(
            f"{match[1]} has",
            parse_bytes(match[2]),
            parse_bytes(allocated[1]) if allocated else None,
            sum(map(parse_bytes, others)),
            parse_bytes(reserved[1]) if reserved else 0,
            is_gpu=True,
        )
    total = in_use = None
    with contextlib.suppress(Exception):  # CUDA may be unusable after the error
        total, in_use = torch.cuda.get_device_properties(device).total_memory, torch.cuda.memory_allocated(device)
    return DeviceMemory(f"GPU {device.index or 0} has" if device else "the GPU has", total, in_use, is_gpu=True)


def is_pinned_memory(message: str, device: torch.device | None) -> bool:
    """Return whether the memory that has run out is pinned CPU memory, for which CUDA has the message of a full GPU.

    Only torch's allocator of GPU memory adds sizes to this message, and then the GPU has no gibibyte left.

    Args:
        message: the error message.
        device: this rank's GPU, if it is known.
    """
    if "CUDA error: out of memory" not in message or "Tried to allocate" in message:
        return False
    with contextlib.suppress(Exception):  # CUDA may be unusable after the error
        return bool(torch.cuda.mem_get_info(device)[0] > 1 << 30)
    return False


def host_memory(in_use_at_start: int | None = None) -> DeviceMemory:
    """Return the smallest limit of the CPU memory, and the memory that this process has allocated since its start.

    Args:
        in_use_at_start: the result of `process_bytes` at the start; None if unknown.
    """
    in_use = process_bytes()
    owner, total, is_shared = min(host_limits(), key=lambda limit: limit[1])
    growth = None if in_use is None or in_use_at_start is None else max(0, in_use - in_use_at_start)
    return DeviceMemory(owner, total, growth, is_shared=is_shared)


def host_limits(root: Path = Path("/")) -> Iterator[tuple[str, int, bool]]:
    """Yield every limit of the CPU memory: its owner, its bytes, and whether all ranks of the node share it."""
    yield "this machine has", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), True
    for name, flag in (("RLIMIT_AS", "v"), ("RLIMIT_DATA", "d")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield f"ulimit -{flag} allows this process", soft, False
    for size in control_group_limits(root):
        yield "the control group (of a container or a batch job) allows", size, True


def control_group_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the limits of this process's control groups, version 1 or 2. Only Linux has control groups."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            group = top / path.lstrip("/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # the file has "max" if there is no limit
                    yield int((folder / name).read_text())
                if folder == top:
                    break


def process_bytes() -> int | None:
    """Return the resident bytes of this process without file mappings; None if the system is not Linux."""
    with contextlib.suppress(OSError):
        match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(match[1]) * 1024 if match else None
    return None


def check_parameters_fit(config: TrainConfig, vocab_size: int, world_size: int, local_world_size: int) -> None:
    """Check that the parameters of a model fit into the CPU memory of this node.

    Args:
        config: the configuration.
        vocab_size: minimum number of rows of the embedding, for a configuration without a vocab_size.
        world_size: number of ranks of the job.
        local_world_size: number of ranks on this node.

    Raises:
        ConfigError: the parameters alone need more memory than the node has or a limit allows.
    """
    shape = GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": config.vocab_size or vocab_size})
    weights = 4 * shape.count_params() * config.local_param_fraction(world_size, local_world_size, on_gpu=False)
    for owner, total, is_shared in host_limits():
        needed = weights * (local_world_size if is_shared else 1)
        if needed > total:
            ranks_text = f" on {local_world_size} ranks" if is_shared and local_world_size > 1 else ""
            raise ConfigError(
                f"a model with --n_layer={shape.n_layer} --n_embd={shape.n_embd} and a vocabulary of "
                f"{shape.vocab_size:,} has {shape.count_params():,} parameters, which need {format_bytes(needed)} in "
                f"fp32{ranks_text}, but {owner} {format_bytes(total)}: "
                f"{SMALLER_MODEL}{'nodes' if is_shared else 'ranks'}"
            )


def check_state_fits(
    config: TrainConfig, vocab_size: int, world_size: int, local_world_size: int, gpu_bytes: int
) -> None:
    """Check that the model state of a rank fits into the memory of its GPU. Activations need memory too.

    Args:
        config, vocab_size, world_size, local_world_size: see `check_parameters_fit`.
        gpu_bytes: the memory of a GPU.

    Raises:
        ConfigError: the model state alone needs more memory; the message has the number of GPUs that FSDP needs.
    """
    shape = GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": config.vocab_size or vocab_size})
    params = shape.count_params()
    needed = config.min_gpu_state(world_size, local_world_size) * params
    if needed <= gpu_bytes:
        return
    gpus = math.ceil((8 + config.moment_bytes) * params / gpu_bytes)
    raise ConfigError(
        f"a model with --n_layer={shape.n_layer} --n_embd={shape.n_embd} has {params:,} parameters, and their model "
        f"state needs {format_bytes(needed)} on each of {world_size} rank(s), but a GPU has {format_bytes(gpu_bytes)}: "
        f"use a smaller --n_layer or --n_embd, `make phase3` on at least {gpus:,} GPUs, or `make phase3` with "
        "--fsdp_cpu_offload=True"
    )
