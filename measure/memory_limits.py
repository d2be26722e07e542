"""Read the memory limits and the memory of a rank, and check whether a model can fit.

For CPU memory, the smallest of several limits applies: the memory of the node, the `ulimit` of this process, and the
limit that a container or a batch system sets for all processes of the job.
"""

import contextlib
import dataclasses
import math
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from measure.formulas import find_cost_function
from nanoGPT.costs import moment_bytes
from nanoGPT.dataset import read_identity
from nanoGPT.distributed.runtime import pick_device
from nanoGPT.errors import ConfigError
from nanoGPT.model import make_shape
from nanoGPT.train_config import TrainConfig

SMALLER_MODEL = "use a smaller --n_layer, --n_embd or --vocab_size, or `make phase3` on more "
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def format_bytes(size: float) -> str:
    """Return a size with three digits and a binary unit, such as "2.1 GiB"."""
    unit = 0
    while size >= 999.5 and unit + 1 < len(UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {UNITS[unit]}"


def host_limits() -> Iterator[tuple[str, int, bool]]:
    """Yield every limit of the CPU memory: its owner, its bytes, and whether all ranks of the node share it."""
    yield "this machine has", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), True
    for name, flag in (("RLIMIT_AS", "v"), ("RLIMIT_DATA", "d")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield f"ulimit -{flag} allows this process", soft, False
    for size in control_group_limits():
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


def check_memory(config: TrainConfig, world_size: int, local_world_size: int) -> None:
    """Check that the model state of a new or resumed run fits into the memory of this node and of its GPUs.

    Raises:
        ConfigError: it cannot fit.
    """
    if config.init_from not in ("scratch", "resume"):
        return
    device, _ = pick_device(config.device, 0, local_world_size, world_size, config.supports_mps)
    rows = read_identity(config.dataset)["tokenizer"]["vocab_size"]
    needs_gpu_memory = find_cost_function(config, "min_gpu_state")(config, world_size, local_world_size) > 0
    if device.type == "cpu" or not needs_gpu_memory:  # with CPU offload, a GPU stores no model state
        check_parameters_fit(config, rows, world_size, local_world_size)
    if device.type == "cuda":
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
        check_state_fits(config, rows, world_size, local_world_size, gpu_bytes)


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
    shape = make_shape({**dataclasses.asdict(config), "vocab_size": config.vocab_size or vocab_size})
    fraction = find_cost_function(config, "local_param_fraction")(config, world_size, local_world_size, on_gpu=False)
    params = shape.count_params()
    weights = 4 * params * fraction
    for owner, total, is_shared in host_limits():
        needed = weights * (local_world_size if is_shared else 1)
        if needed > total:
            ranks_text = f" on {local_world_size} ranks" if is_shared and local_world_size > 1 else ""
            raise ConfigError(
                f"a model with --n_layer={shape.n_layer} --n_embd={shape.n_embd} and a vocabulary of "
                f"{shape.vocab_size:,} has {params:,} parameters, which need {format_bytes(needed)} in "
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
    shape = make_shape({**dataclasses.asdict(config), "vocab_size": config.vocab_size or vocab_size})
    params = shape.count_params()
    needed = find_cost_function(config, "min_gpu_state")(config, world_size, local_world_size) * params
    if needed <= gpu_bytes:
        return
    gpus = math.ceil((8 + moment_bytes(config)) * params / gpu_bytes)
    raise ConfigError(
        f"a model with --n_layer={shape.n_layer} --n_embd={shape.n_embd} has {params:,} parameters, and their model "
        f"state needs {format_bytes(needed)} on each of {world_size} rank(s), but a GPU has {format_bytes(gpu_bytes)}: "
        f"use a smaller --n_layer or --n_embd, `make phase3` on at least {gpus:,} GPUs, or `make phase3` with "
        "--fsdp_cpu_offload=True"
    )
