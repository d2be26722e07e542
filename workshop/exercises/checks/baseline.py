"""Checks of the exercises on the baseline."""

import builtins
import itertools
import math
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from measure.ledger import CollectiveCounter
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import LossScaler, configure_optimizer
from nanoGPT.train_config import TrainConfig
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import collect_traffic, draw_normal, is_close

CPU = torch.device("cpu")


def check_schedule(answer: ModuleType, _: Any) -> None:
    config = TrainConfig(learning_rate=1e-2, min_lr=1e-3, warmup_iters=10, max_iters=200, lr_decay_iters=110)
    rates = [answer.learning_rate(step, config) for step in range(200)]
    expect(
        rates[0] > 0,
        "Step 0 has a learning rate of 0, so the first update changes nothing. In the warm-up, the rate is "
        "learning_rate * (step + 1) / (warmup_iters + 1).",
    )
    expect(
        is_close(rates[9], 1e-2 * 10 / 11, 1e-9),
        "The last of 10 warm-up steps must have 10/11 of the peak learning rate.",
    )
    expect(
        is_close(rates[60], 5.5e-3, 1e-9),
        f"In the middle of the decay the learning rate is {rates[60]:g} instead of the mean of learning_rate and "
        "min_lr, 5.5e-3. The progress runs from 0 after the warm-up to 1 at the end of the decay, and the cosine "
        "decays to min_lr.",
    )
    expect(
        is_close(rates[35], 1e-3 + 9e-3 * (1 + math.cos(math.pi / 4)) / 2, 1e-9),
        f"After a quarter of the decay the learning rate is {rates[35]:g}, which is not that of a cosine.",
    )
    expect(is_close(rates[10], 1e-2, 1e-9), "The first step after the warm-up must have the peak learning rate.")
    expect(rates[110:] == [1e-3] * 90, "After lr_decay_iters the learning rate must stay at min_lr.")
    constant = TrainConfig(learning_rate=1e-2, decay_lr=False, warmup_iters=10)
    expect(answer.learning_rate(0, constant) == 1e-2, "With decay_lr=False the learning rate must be constant.")
    whole_run = TrainConfig(learning_rate=1e-2, min_lr=0.0, warmup_iters=0, max_iters=100, lr_decay_iters=None)
    expect(is_close(answer.learning_rate(50, whole_run), 5e-3, 1e-9), "Without lr_decay_iters, decay over max_iters.")


def check_grad_norm(answer: ModuleType, _: Any) -> None:
    rank, full = dist.get_rank(), draw_normal(1000) * 3
    shard = full.chunk(dist.get_world_size())[rank]
    exact = full.double().norm().item()
    norm = answer.grad_norm([shard[:100], shard[100:]], dist.group.WORLD)
    sum_of_norms = sum(part.double().norm().item() for part in full.chunk(dist.get_world_size()))
    expect(
        not is_close(norm, shard.double().norm(), 1e-9),
        "The norm differs between ranks: each rank returns the norm of its own shards. Sum the squares over all "
        "ranks before the square root.",
    )
    expect(
        not is_close(norm, sum_of_norms, 1e-6),
        "The result is the sum of the local norms. Norms do not add up, but their squares do: all-reduce the "
        "squares, and take the square root at the end.",
    )
    expect(is_close(norm, exact, 1e-6), f"The norm is {float(norm):.6f}, but the norm of all shards is {exact:.6f}.")
    expect(
        norm.dtype == torch.float64,
        f"The norm has the type {norm.dtype}. In fp32 the rounding depends on how the gradients are sharded, and the "
        "loss curve depends on the number of ranks. Accumulate in fp64.",
    )
    expect(
        is_close(norm, exact, 1e-12),
        f"The norm has an error of {abs(norm.item() - exact):.1e}, so squares or sums were computed in fp32. Convert "
        "each gradient to fp64 before you square it.",
    )
    local = answer.grad_norm([full])
    expect(
        is_close(local, exact, 1e-6),
        "Without a process group every rank has the full gradients: do not sum over the ranks.",
    )
    expect(float(answer.grad_norm([])) == 0, "The norm of an empty list of gradients must be 0.")


def check_reseed(answer: ModuleType, _: Any) -> None:
    def draw_mask(seed: int, step: int, micro_batch: int) -> Any:
        answer.reseed(CPU, seed, step, micro_batch)
        return tuple(torch.rand(8).tolist())

    masks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(masks, draw_mask(1, 2, 3))
    expect(
        all(mask == masks[0] for mask in masks),
        "The ranks draw different masks for the same micro-batch: the key depends on the rank. The loss curve then "
        "depends on the number of ranks.",
    )
    expect(draw_mask(1, 2, 3) == draw_mask(1, 2, 3), "The same micro-batch gets another mask when it is recomputed.")
    numbers = itertools.count()
    with mock.patch.object(builtins, "hash", lambda _: next(numbers)):  # as in two processes
        is_equal = draw_mask(1, 2, 3) == draw_mask(1, 2, 3)
    expect(
        is_equal,
        "hash() of a string differs between two processes, so a resumed run would draw other masks: use hashlib.",
    )
    for other, name in (((9, 2, 3), "seed"), ((1, 9, 3), "step"), ((1, 2, 9), "micro-batch")):
        expect(
            draw_mask(*other) != draw_mask(1, 2, 3),
            f"Two keys with a different {name} give the same mask: the {name} must be part of the key.",
        )
    keys = [(seed, step, micro) for seed, step, micro in itertools.product((1, 2, 12), (1, 2, 11), (1, 2, 3, 12))]
    expect(
        len({draw_mask(*key) for key in keys}) == len(keys),
        "Two different keys give the same mask, for example because their numbers have the same sum or the "
        "same concatenated digits. Separate the numbers, and hash them.",
    )


class RandomBatches:
    """Random micro-batches with the interface of TokenData."""

    def batch(self, _split: str, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + micro_batch)
        tokens = torch.randint(0, 31, (2, 9), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


STEP_CONFIG = TrainConfig(
    n_layer=1,
    n_head=1,
    n_embd=16,
    block_size=8,
    batch_size=2,
    gradient_accumulation_steps=4,
    grad_clip=0.1,
    dropout=0.2,
)


def build_model() -> GPT:
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, vocab_size=31, dropout=0.2))
    model.init_weights(0)
    return model


def sum_squares(model: GPT) -> float:
    return sum(p.detach().double().square().sum().item() for p in model.parameters())


def run_reference_steps() -> list[dict[str, float]]:
    """Return the loss, the norm and a weight after each of 2 steps, computed by one process in plain torch."""
    from nanoGPT.distributed.runtime import reseed

    model, results = build_model(), []
    optimizer = configure_optimizer(model, STEP_CONFIG)
    for step in range(2):
        losses = []
        for micro_batch in range(4):
            reseed(CPU, STEP_CONFIG.seed, step, micro_batch)
            losses.append(model(*RandomBatches().batch("train", step, micro_batch)))
        (sum(losses) / 4).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        weight = sum_squares(model)
        results.append({"loss": sum(loss.item() for loss in losses) / 4, "norm": norm.item(), "weight": weight})
    return results


def check_train_step(answer: ModuleType, expected: list[dict[str, float]]) -> None:
    run = Runtime(dist.get_rank(), dist.get_rank(), 2, 2, CPU, torch.float32, {})
    model = build_model()
    optimizer, parallel = configure_optimizer(model, STEP_CONFIG), DDP(model)
    for step in range(2):
        with CollectiveCounter() as traffic:
            loss_sum, norm = answer.train_step(
                parallel, optimizer, LossScaler(False), RandomBatches(), step, STEP_CONFIG, run
            )
        expect(
            not loss_sum.requires_grad,
            "The sum of the losses keeps the graphs of all micro-batches in memory: add loss.detach().",
        )
        dist.all_reduce(loss_sum)
        reference, loss = expected[step], loss_sum.item() / 4
        has_grads = any(p.grad is not None and p.grad.any() for p in model.parameters())
        expect(
            not has_grads,
            "The gradients are still there after the update, so the next step adds its gradients to them. Set them "
            "to None after the update.",
        )
        calls, size = collect_traffic(traffic.rows).get("all-reduce", (0, 0))
        gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
        expect(
            size <= gradient_bytes,
            f"The ledger counts {size:,} bytes of all-reduces in {calls} calls, but the gradients have "
            f"{gradient_bytes:,}: DDP averages after every micro-batch. Set require_backward_grad_sync to True only "
            "for the last one.",
        )
        expect(size == gradient_bytes, "DDP averages no gradients: the last micro-batch of a step must synchronize.")
        expect(
            is_close(loss, reference["loss"], 1e-6),
            f"The mean loss of step {step} is {loss:.6f}, but one process has {reference['loss']:.6f}. Return the "
            "sum of the losses of this rank's micro-batches, rank, rank + N, ..., and reseed before each forward "
            "pass.",
        )
        ratio = float(norm) / reference["norm"]
        expect(
            is_close(ratio, 1.0, 1e-4),
            f"The gradient norm is {ratio:.3g} times that of one process. DDP takes the mean over the ranks; each "
            "rank must contribute the mean over its own micro-batches, so divide each loss by their number.",
        )
        weight = sum_squares(model)
        expect(
            is_close(weight, reference["weight"], 1e-6),
            "Loss and norm are right, but the updated weights differ from one process: clip the gradients by the "
            "global norm before the optimizer's step.",
        )
    check_scaled_step(answer, expected[0], run)


def check_scaled_step(answer: ModuleType, expected: dict[str, float], run: Runtime) -> None:
    """Check a step in which the loss is scaled, as with float16."""
    model, scaler = build_model(), LossScaler(True)
    optimizer, parallel = configure_optimizer(model, STEP_CONFIG), DDP(model)
    with (
        mock.patch.object(scaler, "scale_loss", wraps=scaler.scale_loss) as scale_loss,
        mock.patch.object(scaler, "step", wraps=scaler.step) as scaler_step,
    ):
        _, norm = answer.train_step(parallel, optimizer, scaler, RandomBatches(), 0, STEP_CONFIG, run)
    expect(scale_loss.called, "float16 needs a scaled loss: call scaler.scale_loss before the backward pass.")
    expect(scaler_step.called, "After an overflow, float16 must skip the step: call scaler.step(optimizer, norm).")
    expect(
        is_close(float(norm) / expected["norm"], 1.0, 1e-4) and is_close(sum_squares(model), expected["weight"], 1e-6),
        "With a scaled loss, the norm or the updated weights are wrong: divide the norm by scaler.scale, and call "
        "scaler.unscale_grads before you clip.",
    )
