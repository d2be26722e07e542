"""Exercises on the baseline: the schedule, the global norm, randomness, and the step."""

from workshop.exercises.checks.baseline import (
    check_grad_norm,
    check_reseed,
    check_schedule,
    check_train_step,
    run_reference_steps,
)
from workshop.exercises.exercise import Exercise, Mistake, plant_mistake

EXERCISES = [
    Exercise(
        name="baseline.1",
        title="Write the learning rate schedule",
        targets=("nanoGPT.train:learning_rate",),
        task="""At first a run needs small steps, because AdamW's moments are not reliable yet. At the end it
        needs small steps again. Return the learning rate of a step: linear warm-up over warmup_iters steps, then cosine
        decay to min_lr at lr_decay_iters (max_iters if it is None), then min_lr.""",
        minutes=5,
        difficulty="easy",
        check=check_schedule,
        nudge="Handle the cases in order: no decay, warm-up, after the decay, and the decay itself.",
        idea="The progress of the decay is a number from 0 to 1. (1 + cos(pi * progress)) / 2 falls from 1 to 0.",
        line="progress =",
        mistakes=(
            plant_mistake(
                "(step + 1) / (config.warmup_iters + 1)",
                "step / config.warmup_iters",
                "Step 0 has a learning rate of 0",
            ),
            plant_mistake("return config.min_lr + 0.5", "return 0.5", "decays to min_lr"),
            plant_mistake("0.5 * (1 + math.cos(math.pi * progress))", "(1 - progress)", "not that of a cosine"),
            plant_mistake(
                "(step - config.warmup_iters) / (decay_steps - config.warmup_iters)", "step / decay_steps", "progress"
            ),
        ),
    ),
    Exercise(
        name="baseline.2",
        title="Compute the norm of gradients that are sharded over ranks",
        targets=("nanoGPT.optim:grad_norm",),
        task="""Every phase clips by the norm of the full gradient. With sharded gradients, each rank has only a
        part of it. Return the norm of the full gradient on every rank, with one all-reduce of a scalar. The check
        runs on 2 ranks, each with half of the gradient.""",
        minutes=10,
        difficulty="easy",
        ranks=2,
        check=check_grad_norm,
        nudge="Which quantity adds up over the shards: the norms, or something from which you can compute the norm?",
        idea="Sum the squares of the local shards in fp64, all-reduce the sum over the group, and take the square "
        "root.",
        line="squares =",
        mistakes=(
            plant_mistake("if sharded_over is not None:", "if False:", "each rank returns the norm of its own shards"),
            Mistake(
                (
                    ("torch.stack(norms).square().sum()", "torch.stack(norms).square().sum().sqrt()"),
                    ("return squares.sqrt()", "return squares"),
                ),
                "Norms do not add up",
            ),
            plant_mistake("else torch.float64", "else torch.float32", "Accumulate in fp64"),
            plant_mistake("return squares.sqrt()", "return squares.float().sqrt().double()", "before you square it"),
        ),
    ),
    Exercise(
        name="baseline.3",
        title="Seed dropout by the micro-batch",
        targets=("nanoGPT.distributed.runtime:reseed",),
        task="""Micro-batch 5 of a step runs on rank 5, 1 or 0, depending on the number of ranks, and it must
        always draw the same dropout masks. Seed torch's generator with a key of (seed, step, micro_batch). This
        makes randomness stateless: a resumed run needs no saved generator.""",
        minutes=10,
        difficulty="easy",
        ranks=2,
        check=check_reseed,
        nudge="Which numbers identify a micro-batch on every number of ranks?",
        idea="Write the three numbers into one text with separators, hash it, and use the hash as the seed.",
        line="digest =",
        mistakes=(
            plant_mistake(
                'f"{seed}/{step}/{micro_batch}"', 'f"{seed}/{step}"', "the micro-batch must be part of the key"
            ),
            plant_mistake(
                'f"{seed}/{step}/{micro_batch}"',
                'f"{seed}/{step}/{micro_batch}/{torch.distributed.get_rank()}"',
                "the key depends on the rank",
            ),
            plant_mistake('f"{seed}/{step}/{micro_batch}"', 'f"{seed}{step}{micro_batch}"', "Separate the numbers"),
            plant_mistake('int.from_bytes(digest, "big")', 'hash(f"{seed}/{step}/{micro_batch}")', "use hashlib"),
        ),
    ),
    Exercise(
        name="baseline.4",
        title="Write a training step with gradient accumulation and DDP",
        targets=("nanoGPT.train:train_step",),
        task="""gradient_accumulation_steps counts the micro-batches of the whole job. Rank r runs micro-batches r,
        r + N, ... of N ranks, and the update must not depend on N. For each micro-batch: read the batch, reseed,
        run the forward pass, add the loss to run.new_loss_sum(), and run the backward pass. Only the last backward
        pass of a step averages the gradients. Then clip by the global norm, step, and clear the gradients. scaler
        is for float16: scale each loss with scaler.scale_loss, divide the norm by scaler.scale, call
        scaler.unscale_grads before clipping, and step with scaler.step(optimizer, norm).""",
        minutes=30,
        difficulty="medium",
        ranks=2,
        check=check_train_step,
        prepare=run_reference_steps,
        nudge="DDP computes the mean over the ranks. Which mean must each rank contribute?",
        idea="Divide each loss by the number of this rank's micro-batches. Set "
        "parallel_model.require_backward_grad_sync.",
        line="parallel_model.require_backward_grad_sync",
        mistakes=(
            plant_mistake("loss / len(micro_batches)", "loss", "divide each loss by their number"),
            plant_mistake("scaler.step(optimizer, norm)", "optimizer.step()", "must skip the step"),
            plant_mistake("micro_batch == micro_batches[-1]", "True", "DDP averages after every micro-batch"),
            plant_mistake("    optimizer.zero_grad(set_to_none=True)\n", "", "The gradients are still there"),
            plant_mistake(
                "    clip_grads(grads, norm, config.grad_clip)\n", "", "clip the gradients by the global norm before"
            ),
            plant_mistake("scaler.scale_loss(loss / len(micro_batches))", "(loss / len(micro_batches))", "scaled loss"),
            plant_mistake("    scaler.unscale_grads(grads)\n", "", "before you clip"),
            plant_mistake(
                "        reseed(run.device, config.seed, step, micro_batch)\n", "", "reseed before each forward pass"
            ),
        ),
    ),
]
