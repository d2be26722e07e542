"""The validation loss of a model, computed by all ranks together."""

import torch

from nanoGPT.dataset import EVALUATE, TokenData, to_device
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.train_config import TrainConfig


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: TokenData, config: TrainConfig, run: Runtime) -> float:
    """Return the mean validation loss over `eval_iters` micro-batches, the same ones each time. Collective.

    The micro-batches are divided among the ranks. In the last round some ranks may have none left. They still run the
    model, because a sharded model needs all ranks, but they do not count the loss.

    Args:
        model: takes (x, y) and returns the loss. It is in training mode again on return.
        data: the data; the validation split is used.
        config: only `eval_iters` is used.
        run: this rank's Runtime.
    """
    model.eval()
    total = run.new_loss_sum()
    for first in range(0, config.eval_iters, run.world_size):
        index = first + run.rank
        run.enter_stage(f"evaluation, micro-batch {index}")
        x, y = to_device(data.batch("val", EVALUATE, 0, index), run.device)
        with run.autocast():
            loss = model(x, y)
        if index < config.eval_iters:
            total += loss
    model.train()
    return run.sum(total).item() / config.eval_iters
