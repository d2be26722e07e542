"""The validation loss and the token accuracy of a model, computed by all ranks together."""

import torch

from nanoGPT.dataset import EVALUATE, TokenData, to_device
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT
from nanoGPT.train_config import TrainConfig


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: TokenData, config: TrainConfig, run: Runtime) -> tuple[float, float | None]:
    """Return the mean validation loss over `eval_iters` micro-batches, the same ones each time. Collective.

    The micro-batches are divided among the ranks. In the last round some ranks may have none left. They still run the
    model, because a sharded model needs all ranks, but they do not count the loss.

    With `eval_accuracy`, a second forward pass counts the tokens that the model predicts correctly. The first
    one cannot count them, because it does not return the logits of all tokens.

    Args:
        model: takes (x, y) and returns the loss. It is in training mode again on return.
        data: the data; the validation split is used.
        config: only `eval_iters` and `eval_accuracy` are used.
        run: this rank's Runtime.

    Returns:
        The loss, and the fraction of tokens that the model predicts correctly; None without `eval_accuracy`.
    """
    model.eval()
    total, correct = run.new_loss_sum(), run.new_loss_sum()
    for first in range(0, config.eval_iters, run.world_size):
        index = first + run.rank
        run.enter_stage(f"evaluation, micro-batch {index}")
        x, y = to_device(data.batch("val", EVALUATE, 0, index), run.device)
        with run.autocast():
            loss = model(x, y)
            hits = find_gpt(model).count_correct(x, y) if config.eval_accuracy else 0
        if index < config.eval_iters:
            total += loss
            correct += hits / y.numel()
    model.train()
    accuracy = run.sum(correct).item() / config.eval_iters if config.eval_accuracy else None
    return run.sum(total).item() / config.eval_iters, accuracy


def find_gpt(model: torch.nn.Module) -> GPT:
    """Return the GPT inside a model that DDP or torch.compile has wrapped."""
    inner = next((module for module in model.modules() if isinstance(module, GPT)), None)
    assert inner is not None
    return inner
