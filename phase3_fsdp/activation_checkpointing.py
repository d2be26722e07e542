"""Activation checkpointing: keep less of the forward, compute it again in the backward (Chen et al. 2016).

A backward pass needs what its forward pass computed. A block keeps 16 tensors of (B, T, C) for it (they are listed in
`activation_bytes.py`); when it is checkpointed, only its input, one. `selective` is between the two: the results of
matrix products, which are expensive to compute, are kept, and all else, which is cheap, is recomputed (Korthikanti et
al. 2022).
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT

MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def checkpointed(mode: str, n_layer: int) -> list[int]:
    """The blocks that are computed again: all of them, every k-th, or none.

    Raises:
        ConfigError: a mode that is none of `none`, `full`, `selective`, `every_2`, `every_3`, ...
    """
    if mode == "none":
        return []
    every = (
        1 if mode in ("full", "selective") else int(found[1]) if (found := re.fullmatch(r"every_(\d+)", mode)) else 0
    )
    if not 1 <= every <= n_layer:
        raise ConfigError(
            f"--fsdp_activation_checkpointing={mode} cannot be: use none, full, selective, or every_2 for every "
            f"second block, up to every_{n_layer}"
        )
    return list(range(0, n_layer, every))


def checkpoint_activations(model: GPT, mode: str) -> None:
    """Make blocks keep their input, or their products, and compute the rest again in the backward.

    Dropout draws the same masks again: torch saves the generator's state with the input. The form is the non-reentrant
    one, which is built on the hooks of saved tensors; the older one runs a second backward inside the backward, and
    DDP then sees a parameter twice (`tests/phase3/test_activation_checkpointing.py`).

    Args:
        model: before it is compiled or sharded.
        mode: as `checkpointed` takes it.
    """
    for i in checkpointed(mode, len(model.blocks)):
        block = model.blocks[i]
        block.forward = recompute_in_backward(block.forward, keep_products if mode == "selective" else None)


def recompute_in_backward(forward: Callable[..., Tensor], policy: Callable[..., Any] | None) -> Callable[..., Tensor]:
    """A forward that keeps its inputs only, and what the policy tells it to."""
    context: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if policy else {}

    def checkpointed_forward(*inputs: Any) -> Tensor:
        return checkpoint(forward, *inputs, use_reentrant=False, **context)

    return checkpointed_forward


def keep_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keep what a product computed. Attention is run again: it draws dropout, and whoever draws after a draw that was
    skipped gets other numbers."""
    return CheckpointPolicy.MUST_SAVE if operator in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE
