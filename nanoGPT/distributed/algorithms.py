"""Choose the implementations that torch uses: the backend of attention, and deterministic algorithms.

FlashAttention 3 is not a choice. torch has a prototype of it (`torch.nn.attention.activate_flash_attention_impl("FA3")`
in torch 2.13), which needs the package `flash_attn_interface`. On Hopper, cuDNN's attention needs no other package.
"""

import contextlib
import os
from collections.abc import Iterator

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


def choose_attention(
    name: str, is_deterministic: bool, device: torch.device, dtype: torch.dtype
) -> tuple[list[SDPBackend], str]:
    """Return the backends of attention in the order in which torch tries them, and the reason for the choice.

    On Hopper, cuDNN's attention is the fastest in most published measurements, but torch prefers it only with some
    versions of cuDNN. Its backward pass is not deterministic.

    Args:
        name: the value of `--attention`.
        is_deterministic: the value of `--deterministic`.
        device: the device of this rank.
        dtype: the dtype of matrix products.

    Returns:
        The backends; an empty list leaves the choice to torch.

    Raises:
        ConfigError: the backend needs a GPU, a newer GPU or a 16-bit dtype, or is not deterministic.
    """
    is_gpu = device.type == "cuda"
    if name in ONLY_ON_GPU and not is_gpu:
        raise ConfigError(f"--attention={name} needs a GPU: use --attention=auto, flash or math")
    if name == "cudnn" and is_deterministic:
        raise ConfigError("--attention=cudnn is not deterministic: use --attention=auto, or --deterministic=False")
    if name in NEEDS_16_BITS and is_gpu:
        if dtype == torch.float32:
            raise ConfigError(f"--attention={name} needs 16 bits on a GPU: use --attention=auto, or --dtype=bfloat16")
        if torch.cuda.get_device_capability(device) < AMPERE:
            raise ConfigError(f"--attention={name} needs an Ampere or newer GPU: use --attention=auto or efficient")
    if name != "auto":
        return [BACKENDS[name]], f"{name} (requested)"
    if is_gpu and torch.cuda.get_device_capability(device) >= HOPPER and not is_deterministic:
        return list(BACKENDS.values()), "cudnn (the GPU is a Hopper or newer)"
    return [], "torch's choice"


@contextlib.contextmanager
def use_algorithms(backends: list[SDPBackend], is_deterministic: bool) -> Iterator[None]:
    """Use these backends of attention, and deterministic algorithms if requested. Restore the choices at the end.

    Args:
        backends: returned by `choose_attention`.
        is_deterministic: the value of `--deterministic`.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    with sdpa_kernel(backends, set_priority=True) if backends else contextlib.nullcontext():
        if is_deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
            torch.use_deterministic_algorithms(True)
            # Filling new memory would only help to find bugs.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)
