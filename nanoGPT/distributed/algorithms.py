"""Choose the implementations that torch uses: the backend of attention, and deterministic algorithms.

FlashAttention 3 (Shah et al. 2024) is written for Hopper. torch has only the code that calls it, for 16-bit types and
without dropout. The kernels are in the package `flash_attn_interface`.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from nanoGPT.errors import ConfigError

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ONLY_ON_GPU = ("cudnn", "efficient")
NEEDS_16_BITS = ("cudnn", "flash")  # on a GPU; PyTorch's flash attention on the CPU also supports float32
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities
FLASH_3_PACKAGE = "flash_attn_interface"
NOT_INSTALLED = f"{FLASH_3_PACKAGE} is not installed"
CUDNN_DROPOUT = 1 / 16  # some of cuDNN's kernels round the probability to a multiple; torch 2.11 does not check it


@dataclass(frozen=True)
class Attention:
    """A choice of attention's backend.

    Attributes:
        backends: in the order in which torch tries them; an empty list leaves the choice to torch.
        reason: what was chosen and why, for the output and for env.json.
        is_flash_3: FlashAttention 3 replaces the kernels of the backend `flash`.
    """

    backends: list[SDPBackend]
    reason: str
    is_flash_3: bool = False


def choose_attention(
    name: str, is_deterministic: bool, device: torch.device, dtype: torch.dtype, dropout: float
) -> Attention:
    """Return the backends of attention, and the reason for the choice.

    Args:
        name: the value of `--attention`.
        is_deterministic: the value of `--deterministic`.
        device: the device of this rank.
        dtype: the dtype of matrix products.
        dropout: the value of `--dropout`.

    Raises:
        ConfigError: the backend needs a GPU, a newer GPU, a 16-bit dtype or another dropout, or is not deterministic.
    """
    is_gpu = device.type == "cuda"
    if name in ONLY_ON_GPU and not is_gpu:
        raise ConfigError(f"--attention={name} needs a GPU: use --attention=auto, flash or math")
    if name == "cudnn" and is_deterministic:
        raise ConfigError("--attention=cudnn is not deterministic: use --attention=auto, or --deterministic=False")
    if name == "cudnn" and dropout % CUDNN_DROPOUT:
        raise ConfigError(
            f"--attention=cudnn rounds --dropout={dropout} to a multiple of {CUDNN_DROPOUT}: use --attention=auto, or "
            f"--dropout={round(dropout / CUDNN_DROPOUT) * CUDNN_DROPOUT}"
        )
    if name in NEEDS_16_BITS and is_gpu:
        if dtype == torch.float32:
            raise ConfigError(f"--attention={name} needs 16 bits on a GPU: use --attention=auto, or --dtype=bfloat16")
        if torch.cuda.get_device_capability(device) < AMPERE:
            raise ConfigError(f"--attention={name} needs an Ampere or newer GPU: use --attention=auto or efficient")
    if name != "auto":
        return Attention([BACKENDS[name]], f"{name} (requested)")
    capability = torch.cuda.get_device_capability(device) if is_gpu else (0, 0)
    problem = find_package_problem() if capability[0] == HOPPER[0] else NOT_INSTALLED
    return choose_fastest_attention(capability, is_deterministic, dtype, dropout, problem)


def choose_fastest_attention(
    capability: tuple[int, int], is_deterministic: bool, dtype: torch.dtype, dropout: float, package_problem: str | None
) -> Attention:
    """Return the choice of `--attention=auto`.

    On Hopper, FlashAttention 3 and cuDNN's attention are the fastest in most published measurements. torch uses the
    first only on request, and prefers the second only with some versions of cuDNN. cuDNN's backward pass is not
    deterministic.

    Args:
        capability: the compute capability of the GPU; (0, 0) without a GPU.
        is_deterministic: the value of `--deterministic`.
        dtype: the dtype of matrix products.
        dropout: the value of `--dropout`.
        package_problem: why the package of FlashAttention 3 cannot be used; None if it can.
    """
    if capability < HOPPER or is_deterministic or dtype == torch.float32:
        return Attention([], "torch's choice")
    flash, others = SDPBackend.FLASH_ATTENTION, [backend for name, backend in BACKENDS.items() if name != "flash"]
    backends, chosen = list(BACKENDS.values()), "cudnn (the GPU is a Hopper or newer"
    if dropout % CUDNN_DROPOUT:
        backends = [flash, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        chosen = f"flash (not cudnn: its dropout is a multiple of {CUDNN_DROPOUT}"
    if package_problem == NOT_INSTALLED or capability[0] != HOPPER[0]:
        return Attention(backends, f"{chosen})")
    problem = package_problem or ("it has no dropout" if dropout else None)
    if problem is not None:
        return Attention(backends, f"{chosen}; not FlashAttention 3: {problem})")
    flash_first = [flash, *others]
    return Attention(flash_first, f"FlashAttention 3 (the GPU is a Hopper, and {FLASH_3_PACKAGE} is installed)", True)


def find_package_problem() -> str | None:
    """Return why the package of FlashAttention 3 cannot be used, or None if it can. This imports the package."""
    if importlib.util.find_spec(FLASH_3_PACKAGE) is None:
        return NOT_INSTALLED
    try:
        importlib.import_module(FLASH_3_PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:  # for example, it was built for another version of torch
        return f"{FLASH_3_PACKAGE} cannot be imported: {next(iter(str(error).splitlines()), type(error).__name__)}"
    missing = [name for name in ("fwd", "bwd") if not hasattr(torch.ops.flash_attn_3, name)]
    return f"{FLASH_3_PACKAGE} has no operator {missing[0]}" if missing else None


@contextlib.contextmanager
def use_algorithms(attention: Attention, is_deterministic: bool) -> Iterator[None]:
    """Use this choice of attention, and deterministic algorithms if requested. Restore the choices at the end.

    Args:
        attention: returned by `choose_attention`.
        is_deterministic: the value of `--deterministic`.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    compiler, tag = torch.compiler.config, torch.compiler.config.cache_key_tag
    backends = sdpa_kernel(attention.backends, set_priority=True) if attention.backends else contextlib.nullcontext()
    with backends, use_flash_3() if attention.is_flash_3 else contextlib.nullcontext():
        if is_deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
            torch.use_deterministic_algorithms(True)
            # Filling new memory would only help to find bugs.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # torch.compile stores graphs on disk. Their key does not contain the backends that sdpa_kernel has selected.
        compiler.cache_key_tag = f"{tag} {attention.backends} {attention.is_flash_3}"
        try:
            yield
        finally:
            compiler.cache_key_tag = tag
            torch.use_deterministic_algorithms(was_deterministic)


@contextlib.contextmanager
def use_flash_3() -> Iterator[None]:
    """Let FlashAttention 3 replace the kernels of the backend `flash`."""
    activate_flash_attention_impl("FA3")
    try:
        yield
    finally:
        restore_flash_attention_impl()
