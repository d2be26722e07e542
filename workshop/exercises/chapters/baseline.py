"""Exercises on the baseline: the schedule, the global norm, clipping, randomness, initial weights, and the step."""

import itertools
import math
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.metrics.ledger import CollectiveCounter
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import LossScaler, configure_optimizer
from nanoGPT.train_config import TrainConfig
from workshop.exercises.checking import collect_traffic
from workshop.exercises.exercise import Exercise, Mistake, draw, expect, is_close, mistake

CPU = torch.device("cpu")


def check_schedule(answer: ModuleType, _: Any) -> None:
    config = TrainConfig(learning_rate=1e-2, min_lr=1e-3, warmup_iters=10, max_iters=200, lr_decay_iters=110)
    rates = [answer.learning_rate(step, config) for step in range(200)]
    expect(
        rates[0] > 0,
        "Step 0 has a learning rate of 0, so the first update changes nothing. The warm-up divides by "
        "warmup_iters + 1 and begins at step + 1.",
    )
    expect(is_close(rates[9], 1e-2 * 10 / 11, 1e-9), "The last step of the warm-up has not 10/11 of the peak.")
    expect(
        is_close(rates[60], 5.5e-3, 1e-9),
        f"In the middle of the decay the learning rate is {rates[60]:g} instead of the mean of learning_rate and min_lr, "
        "5.5e-3. The progress runs from 0 after the warm-up to 1 at the end of the decay, and the cosine decays to min_lr.",
    )
    expect(is_close(rates[10], 1e-2, 1e-9), "The first step after the warm-up must have the peak learning rate.")
    expect(rates[110:] == [1e-3] * 90, "After lr_decay_iters the learning rate must stay at min_lr.")
    constant = TrainConfig(learning_rate=1e-2, decay_lr=False, warmup_iters=10)
    expect(answer.learning_rate(0, constant) == 1e-2, "With decay_lr=False the learning rate must be constant.")
    whole_run = TrainConfig(learning_rate=1e-2, min_lr=0.0, warmup_iters=0, max_iters=100, lr_decay_iters=None)
    expect(is_close(answer.learning_rate(50, whole_run), 5e-3, 1e-9), "Without lr_decay_iters, decay over max_iters.")


def check_grad_norm(answer: ModuleType, _: Any) -> None:
    rank, full = dist.get_rank(), draw(1000) * 3
    shard = full.chunk(dist.get_world_size())[rank]
    exact = full.double().norm().item()
    norm = answer.grad_norm([shard[:100], shard[100:]], dist.group.WORLD)
    sum_of_norms = sum(part.double().norm().item() for part in full.chunk(dist.get_world_size()))
    expect(
        not is_close(norm, shard.double().norm(), 1e-9),
        "The norm differs between ranks: each rank returns the norm of its own shards. Sum the squares over all ranks "
        "before the square root.",
    )
    expect(
        not is_close(norm, sum_of_norms, 1e-6),
        "The result is the sum of the local norms. Norms do not add up, but their squares do: all-reduce the squares, "
        "and take the square root at the end.",
    )
    expect(is_close(norm, exact, 1e-6), f"The norm is {float(norm):.6f}, but the norm of all shards is {exact:.6f}.")
    expect(
        norm.dtype == torch.float64,
        f"The norm has the type {norm.dtype}. In fp32 the rounding depends on how the gradients are sharded, and the loss "
        "curve depends on the number of ranks. Accumulate in fp64.",
    )
    local = answer.grad_norm([full])
    expect(
        is_close(local, exact, 1e-6), "Without a process group every rank has the full gradients: nothing must be summed."
    )
    expect(float(answer.grad_norm([])) == 0, "The norm of no gradients must be 0.")


def check_clip_grads(answer: ModuleType, _: Any) -> None:
    def clip(norm: float, max_norm: float) -> float:
        grads = [torch.full((4,), 2.0), torch.full((2, 2), 2.0)]
        answer.clip_grads(grads, torch.tensor(norm, dtype=torch.float64), max_norm)
        expect(
            bool(grads[0][0] == grads[1][0, 0]),
            "The tensors are scaled by different factors, which changes the direction of the gradient.",
        )
        return grads[0][0].item()

    small = clip(0.5, 1.0)
    expect(
        small <= 2.0,
        f"A gradient with the norm 0.5 grew by a factor of {small / 2:g}: clipping must never enlarge a gradient. Limit the "
        "factor to 1.",
    )
    expect(is_close(small, 2.0, 1e-6), "A gradient whose norm is below max_norm must not change.")
    expect(
        is_close(clip(8.0, 1.0), 0.25, 1e-5),
        f"With the norm 8 and max_norm 1, a gradient of 2 became {clip(8.0, 1.0):g} instead of 0.25. Multiply all gradients "
        "by max_norm / norm, in place.",
    )
    expect(clip(8.0, 0.0) == 2.0, "max_norm = 0 turns clipping off: the gradients must not change.")
    expect(math.isfinite(clip(0.0, 1.0)), "A norm of 0 divides by 0: add a small number to the norm.")
    answer.clip_grads([], torch.tensor(1.0), 1.0)


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
    expect(
        draw_mask(1, 2, 3) == draw_mask(1, 2, 3), "The same micro-batch gets another mask when it is computed again."
    )
    for other, name in (((9, 2, 3), "seed"), ((1, 9, 3), "step"), ((1, 2, 9), "micro-batch")):
        expect(
            draw_mask(*other) != draw_mask(1, 2, 3),
            f"Two keys with a different {name} give the same mask: the {name} must be part of the key.",
        )
    keys = [(seed, step, micro) for seed, step, micro in itertools.product((1, 2, 12), (1, 2, 11), (1, 2, 3, 12))]
    expect(
        len({draw_mask(*key) for key in keys}) == len(keys),
        "Two different keys give the same mask, for example the sum or the concatenated digits of their numbers are "
        "equal. Separate the numbers, and hash them.",
    )


def check_initial_rows(answer: ModuleType, expected: dict[str, torch.Tensor]) -> None:
    for (name, shape), full in zip(SHAPES.items(), expected.values(), strict=True):
        rows = torch.empty(shape)
        answer.draw_initial_rows(rows, name, torch.Size(shape), 2, 1337)
        if rows.dim() == 1:
            expect(torch.equal(rows, full), f"{name} must contain {full[0]:g}: biases are 0, and gains are 1.")
            continue
        expect(
            is_close(rows.std(), full.std(), 1e-3),
            f"The values of {name} have the standard deviation {rows.std():.4f} instead of {full.std():.4f}.",
        )
        for begin, end in ((0, 400), (100, 101), (700, 1500), (1499, 1500)):
            part = torch.empty(end - begin, *shape[1:])
            answer.draw_initial_rows(part, name, torch.Size(shape), 2, 1337, begin)
            expect(
                torch.equal(part, rows[begin:end]),
                f"Rows {begin} to {end} of {name} are not the rows that one process draws: the values depend on how the "
                "parameter is sharded. Each chunk of rows needs its own generator, keyed by (seed, name, chunk), and a "
                "rank draws every chunk that overlaps with its rows.",
            )
        expect(torch.equal(rows, full), f"The generators of {name} have other keys than those of the trainer.")


SHAPES = {"h.0.attn.c_attn.weight": (1500, 100), "h.0.mlp.c_proj.weight": (1500, 100), "ln_f.weight": (50,)}


def draw_expected_rows() -> dict[str, torch.Tensor]:
    from nanoGPT.model import draw_initial_rows

    expected = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    for name, rows in expected.items():
        draw_initial_rows(rows, name, rows.shape, 2, 1337)
    return expected


class RandomBatches:
    """Random micro-batches with the interface of TokenData."""

    def batch(self, _split: str, _purpose: int, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + micro_batch)
        tokens = torch.randint(0, 31, (2, 9), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


STEP_CONFIG = TrainConfig(
    n_layer=1, n_head=1, n_embd=16, block_size=8, batch_size=2, gradient_accumulation_steps=4, grad_clip=0.1, dropout=0.2
)


def build_model() -> GPT:
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, vocab_size=31, dropout=0.2))
    model.init_weights(0)
    return model


def run_reference_steps() -> list[dict[str, float]]:
    """Return the loss, the norm and a weight after each of 2 steps, computed by one process in plain torch."""
    from nanoGPT.distributed.runtime import reseed

    model, results = build_model(), []
    optimizer = configure_optimizer(model, STEP_CONFIG)
    for step in range(2):
        losses = []
        for micro_batch in range(4):
            reseed(CPU, STEP_CONFIG.seed, step, micro_batch)
            losses.append(model(*RandomBatches().batch("train", 0, step, micro_batch)))
        (sum(losses) / 4).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        weight = model.transformer["wte"].weight.detach().double().square().sum().item()  # type: ignore[union-attr]
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
        dist.all_reduce(loss_sum)
        reference, loss = expected[step], loss_sum.item() / 4
        has_grads = any(p.grad is not None and p.grad.any() for p in model.parameters())
        expect(
            not has_grads,
            "The gradients are still there after the update, so the next step adds its gradients to them. Set them to "
            "None after the update.",
        )
        calls, size = collect_traffic(traffic.rows).get("all-reduce", (0, 0))
        gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
        expect(
            size <= gradient_bytes,
            f"The ledger counts {size:,} bytes of all-reduces in {calls} calls, but the gradients have {gradient_bytes:,}: "
            "DDP averages after every micro-batch. Set require_backward_grad_sync to True only for the last one.",
        )
        expect(size == gradient_bytes, "DDP averages no gradients: the last micro-batch of a step must synchronize.")
        expect(
            is_close(loss, reference["loss"], 1e-6),
            f"The mean loss of step {step} is {loss:.6f}, but one process has {reference['loss']:.6f}. Return the sum of "
            "the losses of this rank's micro-batches, rank, rank + N, ..., and reseed before each forward pass.",
        )
        ratio = float(norm) / reference["norm"]
        expect(
            is_close(ratio, 1.0, 1e-4),
            f"The gradient norm is {ratio:.3g} times that of one process. DDP takes the mean over the ranks; each rank must "
            "contribute the mean over its own micro-batches, so divide each loss by their number.",
        )
        weight = model.transformer["wte"].weight.detach().double().square().sum().item()  # type: ignore[union-attr]
        expect(
            is_close(weight, reference["weight"], 1e-6),
            "Loss and norm are right, but the updated weights differ from one process: clip the gradients by the global "
            "norm before the optimizer's step.",
        )


EXERCISES = [
    Exercise(
        name="baseline.1",
        title="Write the learning rate schedule",
        targets=("nanoGPT.optim:learning_rate",),
        task="""A run needs small steps at first, because AdamW's moments are not reliable yet, and small steps at the end.
        Return the learning rate of a step: linear warm-up over warmup_iters steps, then cosine decay to min_lr at
        lr_decay_iters (max_iters if it is None), then min_lr.""",
        minutes=5,
        difficulty="easy",
        check=check_schedule,
        nudge="Handle the cases in order: no decay, warm-up, after the decay, and the decay itself.",
        idea="The progress of the decay is a number from 0 to 1. (1 + cos(pi * progress)) / 2 falls from 1 to 0.",
        line="progress =",
        mistakes=(
            mistake("(step + 1) / (config.warmup_iters + 1)", "step / config.warmup_iters", "Step 0 has a learning rate of 0"),
            mistake("return config.min_lr + 0.5", "return 0.5", "decays to min_lr"),
            mistake("(step - config.warmup_iters) / (decay_steps - config.warmup_iters)", "step / decay_steps", "progress"),
        ),
    ),
    Exercise(
        name="baseline.2",
        title="Compute the norm of gradients that are sharded over ranks",
        targets=("nanoGPT.optim:grad_norm",),
        task="""Every phase clips by the norm of the full gradient. With sharded gradients, each rank has only a part of it.
        Return the norm of the full gradient on every rank, with one all-reduce of a scalar. The check runs on 2 ranks,
        each with half of the gradient.""",
        minutes=10,
        difficulty="easy",
        ranks=2,
        check=check_grad_norm,
        nudge="Which quantity adds up over the shards: the norms, or something from which you can compute the norm?",
        idea="Sum the squares of the local shards in fp64, all-reduce the sum over the group, and take the square root.",
        line="squares =",
        mistakes=(
            mistake("if sharded_over is not None:", "if False:", "each rank returns the norm of its own shards"),
            Mistake(
                (
                    ("torch.stack(norms).square().sum()", "torch.stack(norms).square().sum().sqrt()"),
                    ("return squares.sqrt()", "return squares"),
                ),
                "Norms do not add up",
            ),
            mistake("else torch.float64", "else torch.float32", "Accumulate in fp64"),
        ),
    ),
    Exercise(
        name="baseline.3",
        title="Clip gradients by their global norm",
        targets=("nanoGPT.optim:clip_grads",),
        task="""A rare batch can have a very large gradient. Clipping limits the length of the gradient and keeps its
        direction: scale all gradients by the same factor, in place, so that the norm is at most max_norm.""",
        minutes=5,
        difficulty="easy",
        check=check_clip_grads,
        nudge="What must happen to a gradient that is shorter than max_norm?",
        idea="The factor is max_norm / norm, but never more than 1. The norm may be 0.",
        line="scale =",
        mistakes=(
            mistake(".clamp(max=1.0)", "", "clipping must never enlarge a gradient"),
            mistake("max_norm > 0 and grads", "grads", "max_norm = 0 turns clipping off"),
            mistake("max_norm / (norm + 1e-6)", "max_norm / (norm * norm + 1e-6)", "by max_norm / norm"),
        ),
    ),
    Exercise(
        name="baseline.4",
        title="Seed dropout by the micro-batch",
        targets=("nanoGPT.distributed.runtime:reseed",),
        task="""Micro-batch 5 of a step runs on rank 5, 1 or 0, depending on the number of ranks, and it must always draw the
        same dropout masks. Seed torch's generator with a key of (seed, step, micro_batch). This makes randomness
        stateless: a resumed run needs no saved generator.""",
        minutes=10,
        difficulty="easy",
        ranks=2,
        check=check_reseed,
        nudge="Which numbers identify a micro-batch on every number of ranks?",
        idea="Write the three numbers into one text with separators, hash it, and use the hash as the seed.",
        line="digest =",
        mistakes=(
            mistake('f"{seed}/{step}/{micro_batch}"', 'f"{seed}/{step}"', "the micro-batch must be part of the key"),
            mistake(
                'f"{seed}/{step}/{micro_batch}"',
                'f"{seed}/{step}/{micro_batch}/{torch.distributed.get_rank()}"',
                "the key depends on the rank",
            ),
            mistake('f"{seed}/{step}/{micro_batch}"', 'f"{seed}{step}{micro_batch}"', "Separate the numbers"),
        ),
    ),
    Exercise(
        name="baseline.5",
        title="Draw the initial values of some rows of a parameter",
        targets=("nanoGPT.model:draw_initial_rows",),
        task="""With FSDP a rank stores some rows of each parameter, and it must initialize them with the values that a single
        process would draw, without drawing all rows. Rows are divided into chunks of at most MAX_CHUNK_ELEMENTS elements
        (at least one row). Each chunk has a CPU generator whose seed is the blake2b hash (8 bytes, big endian) of
        "seed/name" for chunk 0, and of "seed/name/chunk" for the others. The standard deviation is 0.02, divided by
        sqrt(2 n_layer) for names that end in c_proj.weight.""",
        minutes=25,
        difficulty="hard",
        check=check_initial_rows,
        prepare=draw_expected_rows,
        nudge="Rows begin to begin + len(out) may start and end in the middle of a chunk. Which chunks do they touch?",
        idea="Draw a full chunk into a temporary tensor, and copy the rows that overlap with yours.",
        line="part = slice",
        mistakes=(
            Mistake(
                (
                    ('f"{seed}/{name}/{chunk}" if chunk', 'f"{seed}/{name}/{chunk - begin // size}" if chunk > begin // size'),
                ),
                "not the rows that one process draws",
            ),
            mistake("else 0.02", "else 0.2", "standard deviation"),
            mistake('if chunk else f"{seed}/{name}"', 'if chunk > 1 else f"{seed}/{name}"', "other keys"),
        ),
    ),
    Exercise(
        name="baseline.6",
        title="Write a training step with gradient accumulation and DDP",
        targets=("nanoGPT.train:train_step",),
        task="""gradient_accumulation_steps counts the micro-batches of the whole job. Rank r runs micro-batches r, r + N, ...
        of N ranks, and the update must not depend on N. For each micro-batch: read the batch, reseed, run the forward
        pass, add the loss to run.new_loss_sum(), and run the backward pass. Only the last backward pass of a step averages
        the gradients. Then clip by the global norm, step, and clear the gradients. scaler is for float16; you can treat it
        as in the signature's type.""",
        minutes=30,
        difficulty="medium",
        ranks=2,
        check=check_train_step,
        prepare=run_reference_steps,
        nudge="DDP computes the mean over the ranks. Which mean must each rank contribute?",
        idea="Divide each loss by the number of this rank's micro-batches. Set parallel_model.require_backward_grad_sync.",
        line="parallel_model.require_backward_grad_sync",
        mistakes=(
            mistake("loss / len(micro_batches)", "loss", "divide each loss by their number"),
            mistake("micro_batch == micro_batches[-1]", "True", "DDP averages after every micro-batch"),
            mistake("    optimizer.zero_grad(set_to_none=True)\n", "", "The gradients are still there"),
            mistake("    clip_grads(grads, norm, config.grad_clip)\n", "", "clip the gradients by the global norm before"),
            mistake("        reseed(run.device, config.seed, step, micro_batch)\n", "", "reseed before each forward pass"),
        ),
    ),
]
