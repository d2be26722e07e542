"""The order in which DDP adds the gradients of the ranks."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from nanoGPT.distributed.runtime import Runtime


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
