"""Estimates of the memory that flags can save on a rank. These flags exist in every trainer; phases add their own.

Savings are a dictionary from text to bytes. The text is a flag, such as "--batch_size=4", or a `make` command that
shards more of the model state. The estimates use the memory that the run had really allocated.
"""

from dataclasses import dataclass

import torch

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig


@dataclass
class Needs:
    """The memory needs of a rank, from which `memory_savings` estimates what can be saved.

    Attributes:
        shape: shape of the model.
        state: bytes of parameters, gradients and optimizer_state on this rank, from the formula.
        activations: bytes of all other memory: what was allocated, and the allocation that failed.
        is_gpu: whether GPU memory has run out, and not CPU memory.
        is_shared: whether all ranks of the node share this memory.
    """

    shape: GPTConfig
    state: dict[str, int]
    activations: float
    is_gpu: bool
    is_shared: bool


def activation_savings(config: TrainConfig, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return the activation memory that the flags of every phase save, in bytes."""
    half_sizes = {
        f"--{name}={value // 2}": needs.activations * (value - value // 2) / value
        for name, value in (("batch_size", config.batch_size), ("block_size", config.block_size))
        if value > 1
    }
    is_fp32_on_gpu = needs.is_gpu and run.dtype == torch.float32
    return half_sizes | ({"--dtype=bfloat16": needs.activations / 2} if is_fp32_on_gpu else {})


def logits_bytes(config: TrainConfig, needs: Needs, run: Runtime) -> float:
    """Return the bytes that the loss kernel saves: logits in the run's dtype, and log-probabilities in fp32."""
    logits = config.batch_size * config.block_size * needs.shape.vocab_size
    return min(logits * (run.dtype.itemsize + 4), needs.activations)


def kernel_savings(config: TrainConfig, kernels: str, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return the bytes that the loss kernel saves on a GPU, if the run does not use it yet.

    Args:
        kernels: the kernels that the run uses, such as "gelu,layernorm", or "none".
    """
    if not needs.is_gpu or "loss" in kernels:
        return {}
    return {f"--kernels={'loss' if kernels == 'none' else kernels + ',loss'}": logits_bytes(config, needs, run)}


def name_ranks(ranks: int, needs: Needs, run: Runtime) -> str:
    """Return a text such as "4 ranks".

    If the ranks of a node share the memory, more ranks on this node save nothing. The text then asks for more nodes.
    """
    return f"{ranks} ranks" + (", on more nodes" if needs.is_shared and ranks > run.world_size else "")
