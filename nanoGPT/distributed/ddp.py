"""DDP, and the order in which it adds the gradients of the ranks."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nanoGPT.distributed.runtime import Runtime


def data_parallel(model: nn.Module, config: Any, run: Runtime) -> nn.Module:
    """Return the module to call: the model, compiled if the configuration says so, and in DDP on several ranks.

    Collective: DDP reorders its buckets after a backward pass. That happens here, because a resumed run must round like
    an uninterrupted one.

    Args:
        config: its `compile`, `batch_size` and `block_size` are used.
    """
    parallel_model: nn.Module = torch.compile(model) if config.compile else model  # type: ignore[assignment]
    if run.world_size > 1:
        parallel_model = DDP(parallel_model, gradient_as_bucket_view=True)
        fix_bucket_order(parallel_model, config.batch_size, config.block_size, run)
    return parallel_model


def fix_bucket_order(model: DDP, batch_size: int, block_size: int, run: Runtime) -> None:
    """Let DDP order its buckets before the first step, by one backward pass whose gradients are discarded. Collective.

    DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrive. The place of an
    element in a bucket decides in which order a ring adds the values of the ranks, and so how the sum is rounded.
    Without this call, the first step of a resumed run would round differently than in an uninterrupted run.

    Args:
        model: takes (x, y) and returns the loss; its parameters have no gradients afterwards.
        batch_size, block_size: the shape of a micro-batch, so that a compiled model is not compiled twice.
    """
    tokens = torch.zeros(batch_size, block_size, dtype=torch.int64, device=run.device)
    with run.autocast():
        loss = model(tokens, tokens)
    loss.backward()
    model.zero_grad(set_to_none=True)
