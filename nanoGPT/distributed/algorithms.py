"""Choose the implementations that torch uses: the backend of attention, and deterministic algorithms."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

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
CUDNN_DROPOUT = 1 / 16  # some of cuDNN's kernels round the probability to a multiple; torch 2.11 does not check it


@dataclass(frozen=True)
class AttentionChoice:
    """A choice of attention's backend.

    Attributes:
        backends: in the order in which torch tries them; an empty list leaves the choice to torch.
        reason: what was chosen and why, for the output and for env.json.
    """

    backends: list[SDPBackend]
    reason: str


def choose_attention(
    name: str, is_deterministic: bool, device: torch.device, dtype: torch.dtype, dropout: float
) -> AttentionChoice:
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
        return AttentionChoice([BACKENDS[name]], f"{name} (requested)")
    capability = torch.cuda.get_device_capability(device) if is_gpu else (0, 0)
    return choose_fastest_attention(capability, is_deterministic, dtype, dropout)


def choose_fastest_attention(
    capability: tuple[int, int], is_deterministic: bool, dtype: torch.dtype, dropout: float
) -> AttentionChoice:
    """Return the choice of `--attention=auto`.

    On Hopper, cuDNN's attention is the fastest in most published measurements. torch prefers it only with some versions
    of cuDNN. Its backward pass is not deterministic.

    Args:
        capability: the compute capability of the GPU; (0, 0) without a GPU.
        is_deterministic: the value of `--deterministic`.
        dtype: the dtype of matrix products.
        dropout: the value of `--dropout`.
    """
    if capability < HOPPER or is_deterministic or dtype == torch.float32:
        return AttentionChoice([], "torch's choice")
    if dropout % CUDNN_DROPOUT:
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        return AttentionChoice(backends, f"flash (not cudnn: its dropout is a multiple of {CUDNN_DROPOUT})")
    return AttentionChoice(list(BACKENDS.values()), "cudnn (the GPU is a Hopper or newer)")


@contextlib.contextmanager
def use_algorithms(attention: AttentionChoice, is_deterministic: bool) -> Iterator[None]:
    """Use this choice of attention, and deterministic algorithms if requested. Restore the choices at the end.

    Args:
        attention: returned by `choose_attention`.
        is_deterministic: the value of `--deterministic`.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    compiler, tag = torch.compiler.config, torch.compiler.config.cache_key_tag
    backends = sdpa_kernel(attention.backends, set_priority=True) if attention.backends else contextlib.nullcontext()
    with backends:
        if is_deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
            os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")  # their sums do not repeat
            torch.use_deterministic_algorithms(True)
            # Filling new memory would only help to find bugs.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        # torch.compile stores graphs on disk. Their key does not contain the backends that sdpa_kernel has selected.
        compiler.cache_key_tag = f"{tag} {attention.backends}"
        try:
            yield
        finally:
            compiler.cache_key_tag = tag
            torch.use_deterministic_algorithms(was_deterministic)
