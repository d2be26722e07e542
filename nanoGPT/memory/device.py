"""How much memory a rank may use, and how much of it is in use: on a GPU, and in the CPU's memory.

On a GPU torch's own error has every number. In the CPU's memory the smallest of several limits counts: what the machine
has, what `ulimit` allows this process, and what a container or a batch system allows all processes of the job.
"""

import contextlib
import dataclasses
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
    """The memory that was not enough.

    Attributes:
        owner: the beginning of a sentence that ends with the total: "GPU 1 has".
        total: bytes; None where nobody tells.
        in_use: bytes that this rank has allocated; None where nobody tells.
        others: bytes of a GPU that other processes use.
        fragmented: bytes of a GPU that torch has reserved and cannot use, because they lie in pieces.
        is_gpu: False for the CPU's memory.
        is_shared: whether all ranks of the machine take from it together.
    """

    owner: str
    total: int | None
    in_use: int | None
    others: int = 0
    fragmented: int = 0
    is_gpu: bool = False
    is_shared: bool = False


def format_bytes(size: float) -> str:
    """Return a size with three digits and a binary unit: 2.1 GiB."""
    unit = 0
    while size >= 999.5 and unit + 1 < len(UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {UNITS[unit]}"


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a size as torch and numpy print it: "2.10 GiB"."""
    number, unit = text.split()
    return round(float(number) * 1024 ** UNITS.index(unit))


def requested_bytes(message: str) -> int | None:
    """Return how much an allocation asked for, from the message of the error; None where it does not say."""
    if found := re.search(r"tried to allocate (\d+) bytes", message):  # torch, on a CPU
        return int(found[1])
    if found := re.search(r"(?:Tried|Unable) to allocate ([\d.]+ \w+)", message):  # torch, on a GPU; numpy
        return parse_bytes(found[1])
    return None


def gpu_memory(message: str, device: torch.device | None) -> DeviceMemory:
    """Return what torch's error says of a GPU; after an error of cuBLAS, cuDNN or NCCL, what torch's allocator knows.

    Args:
        device: this rank's GPU, if it is known.
    """
    size = r"([\d.]+ \w+)"
    if head := re.search(rf"(GPU \d+) has a total capac\w+ of {size} of which", message):
        allocated = re.search(rf"{size} is allocated by PyTorch", message)
        reserved = re.search(rf"{size} is reserved by PyTorch but unallocated", message)
        others = re.findall(rf"Process \d+ has {size} memory in use", message)
        if "this process has" not in message:  # in a container torch does not know which process it is itself
            others = []
        return DeviceMemory(
            f"{head[1]} has",
            parse_bytes(head[2]),
            parse_bytes(allocated[1]) if allocated else None,
            sum(map(parse_bytes, others)),
            parse_bytes(reserved[1]) if reserved else 0,
            is_gpu=True,
        )
    total = in_use = None
    with contextlib.suppress(Exception):  # the error may have left CUDA unusable
        total, in_use = torch.cuda.get_device_properties(device).total_memory, torch.cuda.memory_allocated(device)
    return DeviceMemory(f"GPU {device.index or 0} has" if device else "the GPU has", total, in_use, is_gpu=True)


def host_memory(in_use_at_start: int | None = None) -> DeviceMemory:
    """Return the smallest limit of the CPU's memory, and what this process has allocated since its start.

    Args:
        in_use_at_start: what `process_bytes` returned then; None: nothing is known of it.
    """
    in_use = process_bytes()
    owner, total, is_shared = min(host_limits(), key=lambda limit: limit[1])
    since = None if in_use is None or in_use_at_start is None else max(0, in_use - in_use_at_start)
    return DeviceMemory(owner, total, since, is_shared=is_shared)


def host_limits(root: Path = Path("/")) -> Iterator[tuple[str, int, bool]]:
    """Yield every limit: whose it is, bytes, and whether all ranks of the machine share it."""
    yield "this machine has", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), True
    for name, flag in (("RLIMIT_AS", "v"), ("RLIMIT_DATA", "d")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield f"ulimit -{flag} allows this process", soft, False
    for size in control_group_limits(root):
        yield "the control group (of a container or a batch job) allows", size, True


def control_group_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yield the limits of the control groups that this process is in, of either version; outside Linux none."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            below = top / path.lstrip("/")
            for folder in (below, *below.parents):
                with contextlib.suppress(OSError, ValueError):  # "max" is no number
                    yield int((folder / name).read_text())
                if folder == top:
                    break


def process_bytes() -> int | None:
    """Return the bytes of memory that this process has filled, without files that it maps; outside Linux None."""
    with contextlib.suppress(OSError):
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else None
    return None


def check_parameters_fit(config: TrainConfig, vocab_size: int, world_size: int, local_world_size: int) -> None:
    """Refuse a model whose parameters alone need more memory than the ranks of this machine, on its CPU, can ever have.

    Args:
        vocab_size: at least so many rows does the embedding have.

    Raises:
        ConfigError: says what they take, and what there is.
    """
    shape = GPTConfig.of({**dataclasses.asdict(config), "vocab_size": config.vocab_size or vocab_size})
    weights = 4 * shape.count_params() * config.share_of_parameters(world_size, local_world_size, on_gpu=False)
    for owner, total, is_shared in host_limits():
        needed = weights * (local_world_size if is_shared else 1)
        if needed > total:
            on = f" on {local_world_size} ranks" if is_shared and local_world_size > 1 else ""
            raise ConfigError(
                f"--n_layer={shape.n_layer} --n_embd={shape.n_embd} and a vocabulary of {shape.vocab_size:,} make "
                f"{shape.count_params():,} parameters, which alone take {format_bytes(needed)} in fp32{on}, and "
                f"{owner} {format_bytes(total)}: {SMALLER_MODEL}{'machines' if is_shared else 'ranks'}"
            )
