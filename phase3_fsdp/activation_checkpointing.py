"""Save fewer activations in the forward pass, and recompute the others in the backward pass (Chen et al. 2016).

The backward pass needs activations of the forward pass. A block saves 16 tensors of (B, T, C) for it, which are listed
in `activation_bytes.py`. A checkpointed block saves only its input, one such tensor. `selective` is between the two: it
saves what is expensive to compute, the outputs of matrix products and of attention, and recomputes normalization and
GELU. It is not the selective recomputation of Korthikanti et al. (2022), which recomputes only the core of attention.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT

MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def select_checkpointed_blocks(mode: str, n_layer: int) -> list[int]:
    """Return the indices of the blocks to recompute in the backward pass: all of them, every k-th, or none.

    Raises:
        ConfigError: the mode is not `none`, `full`, `selective`, `every_2`, `every_3`, ...
    """
    if mode == "none":
        return []
    match = re.fullmatch(r"every_(\d+)", mode)
    every = 1 if mode in ("full", "selective") else int(match[1]) if match else 0
    if not 1 <= every <= n_layer:
        raise ConfigError(
            f"--fsdp_activation_checkpointing={mode} is not a mode: use none, full, selective, or every_2 for every "
            f"second block, up to every_{n_layer}"
        )
    return list(range(0, n_layer, every))


def checkpoint_activations(model: GPT, mode: str) -> None:
    """Wrap the forward pass of the selected blocks: save less, and recompute the rest in the backward pass.

    Dropout draws the same masks in the recomputation, because torch saves the generator's state with the input. The
    wrapper uses non-reentrant checkpointing, which is based on saved-tensor hooks. The older, reentrant form runs a
    second backward pass inside the first, and DDP then receives a parameter's gradient twice
    (`tests/phase3/test_activation_checkpointing.py`).

    Args:
        model: not compiled and not sharded yet.
        mode: a mode of `select_checkpointed_blocks`.
    """
    blocks = select_checkpointed_blocks(mode, len(model.blocks))
    if blocks:
        # By default, recomputed attention that is compiled for a GPU draws its masks from an unseeded generator.
        torch._functorch.config.graphsafe_rng_functionalization = False
    for i in blocks:
        block = model.blocks[i]
        policy = partial(save_products, saves_attention=not model.config.dropout) if mode == "selective" else None
        block.forward = recompute_in_backward(block.forward, policy)


def recompute_in_backward(forward: Callable[..., Tensor], policy: Callable[..., Any] | None) -> Callable[..., Tensor]:
    """Return a forward that saves only its inputs, and the outputs that the policy selects."""
    context: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if policy else {}

    def checkpointed_forward(*inputs: Any) -> Tensor:
        return checkpoint(forward, *inputs, use_reentrant=False, **context)

    return checkpointed_forward


def save_products(_context: Any, operator: Any, *_args: Any, saves_attention: bool, **_kwargs: Any) -> CheckpointPolicy:
    """Return the policy of `selective`: save the outputs of matrix products and of attention, recompute all others.

    With dropout, attention is recomputed too, because it draws masks. If the recomputation skipped these draws, the
    dropout layers after it would draw other masks than in the forward pass.
    """
    is_attention = "attention" in operator.name()  # one of torch's operators, or the kernel of phase 2
    saves = operator in MATMULS or (is_attention and saves_attention)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE
