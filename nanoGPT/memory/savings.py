"""What flags free on a rank whose memory is short, as far as every trainer has them; phases add their own.

A saving is a number of bytes under the words that name it: a flag, such as "--batch_size=4", or a `make` command that
shards more. An estimate is made of what the run really held, not of what such a model should hold.
"""

from dataclasses import dataclass

import torch

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig


@dataclass
class Needs:
    """What a rank needs memory for; `memory_savings` says what can be saved of it.

    Attributes:
        shape: of the model.
        state: bytes of parameters, gradients and optimizer_state on this rank, by the formula.
        activations: bytes of all else: what was held, and what was asked for.
        is_gpu: whether it is a GPU's memory that is short.
        is_shared: whether all ranks of the machine take from this memory.
    """

    shape: GPTConfig
    state: dict[str, int]
    activations: float
    is_gpu: bool
    is_shared: bool


def activation_savings(config: TrainConfig, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return what the flags of every phase free of the activations, in bytes."""
    halves = {
        f"--{name}={value // 2}": needs.activations * (value - value // 2) / value
        for name, value in (("batch_size", config.batch_size), ("block_size", config.block_size))
        if value > 1
    }
    in_fp32 = needs.is_gpu and run.dtype == torch.float32
    return halves | ({"--dtype=bfloat16": needs.activations / 2} if in_fp32 else {})


def logits_bytes(config: TrainConfig, needs: Needs, run: Runtime) -> float:
    """Return what the kernel of the loss frees: logits in the run's dtype, and log-probabilities in fp32."""
    logits = config.batch_size * config.block_size * needs.shape.vocab_size
    return min(logits * (run.dtype.itemsize + 4), needs.activations)


def name_ranks(ranks: int, needs: Needs, run: Runtime) -> str:
    """Return "4 ranks"; more than now free nothing on a machine whose ranks share its memory."""
    return f"{ranks} ranks" + (", on more machines" if needs.is_shared and ranks > run.world_size else "")
