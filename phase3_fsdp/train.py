"""Train GPT-2 with FSDP, which shards parameters, gradients and optimizer state: `make phase3 GPUS=4`.

    python train.py                                             # one process, for example on a laptop
    python train.py config/train_gpt2.py --batch_size=8         # a config file, then flags
    torchrun --standalone --nproc_per_node=4 train.py           # 4 ranks: gloo on CPUs, NCCL on GPUs
    torchrun --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --nproc_per_node=8 train.py    # node 0 of 2

A run has max_iters updates, in steps 0 to max_iters - 1. It ends with an evaluation and a checkpoint. The checkpoint
`step-N` is saved after N updates. `--help` lists all flags.
"""

import math

import torch

from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.starting_point import find_best, manifest_fields, read_starting_point
from nanoGPT.dataset import TokenData, to_device
from nanoGPT.distributed.runtime import Runtime, reseed
from nanoGPT.errors import check_finite
from nanoGPT.job.log import Log
from nanoGPT.job.start import main, start
from nanoGPT.optim import LossScaler, clip_grads, grad_norm
from phase3_fsdp import fsdp
from phase3_fsdp.fsdp import FsdpConfig as Config
from phase3_fsdp.fsdp import put_parameters_on_meta
from phase3_fsdp.sharded_checkpoint import load_shards, make_saver

PHASE = "fsdp"  # [fsdp:phase] recorded in every checkpoint


def train_step(
    parallel_model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    data: TokenData,
    step: int,
    config: Config,
    run: Runtime,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the parameters once. Return the sum of this rank's losses and the global gradient norm."""
    parallel_model.train()  # after an evaluation, of the trainer or of an observer
    loss_sum = run.new_loss_sum()
    micro_batches = range(run.rank, config.gradient_accumulation_steps, run.world_size)  # of this rank
    for micro_batch in micro_batches:
        run.enter_stage(f"micro-batch {micro_batch}", step)
        fsdp.set_gradient_sync(parallel_model, config, last=micro_batch == micro_batches[-1])  # [fsdp:sync]
        x, y = to_device(data.batch("train", step, micro_batch), run.device)
        reseed(run.device, config.seed, step, micro_batch)
        with run.autocast():
            loss = parallel_model(x, y)
        loss_sum += loss.detach()
        scaler.scale_loss(loss / len(micro_batches)).backward()
    run.enter_stage("update", step)
    grads = fsdp.local_grads(parallel_model)  # [fsdp:clip] gradients of this rank's shards
    norm = grad_norm(grads, fsdp.shard_group(parallel_model)) / scaler.scale  # [fsdp:clip] norm of the full gradient
    scaler.unscale_grads(grads)
    clip_grads(grads, norm, config.grad_clip)
    scaler.step(optimizer, norm)
    optimizer.zero_grad(set_to_none=True)
    return loss_sum, norm


def learning_rate(step: int, config: Config) -> float:
    """Return the learning rate of a step: linear warm-up, then cosine decay to min_lr; constant without decay_lr."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    decay_steps = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    if step >= decay_steps:
        return config.min_lr
    progress = (step - config.warmup_iters) / (decay_steps - config.warmup_iters)  # of the decay, from 0 to 1
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - config.min_lr)


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: TokenData, step: int, config: Config, run: Runtime) -> float:
    """Return the mean validation loss over `eval_iters` micro-batches, the same ones each time. Collective.

    The micro-batches are divided among the ranks. In the last round some ranks may have none left. They still run the
    model, because a sharded model needs all ranks, but they do not count the loss.

    Args:
        model: takes (x, y) and returns the loss. It is in evaluation mode on return.
        data: the data; the validation split is used.
        step: number of completed updates.
        config: only `eval_iters` is used.
        run: this rank's Runtime.
    """
    model.eval()
    total = run.new_loss_sum()
    for first in range(0, config.eval_iters, run.world_size):
        index = first + run.rank
        run.enter_stage(f"evaluation, micro-batch {index}", step)
        x, y = to_device(data.batch("val", 0, index), run.device)
        with run.autocast():
            loss = model(x, y)
        if index < config.eval_iters:
            total += loss
    return run.sum(total).item() / config.eval_iters


def train(config: Config) -> None:
    """Start as `init_from` says, train until step `max_iters`, evaluate, log and save. Collective."""
    with start(config) as run:
        data = TokenData(config)
        checkpoints = CheckpointDirectory(config.out_dir, run, config.keep_checkpoints, reads_only=config.eval_only)
        checkpoint = checkpoints.find(config.resume_step) if config.init_from == "resume" else None
        model_args, weights = read_starting_point(config, data, checkpoint, run)
        first_step = checkpoint.step if checkpoint else 0
        log = Log(config, run, first_step, model_args)
        run.observers.members.append(log)

        # Create the model and the optimizer, load a checkpoint, and make the training data-parallel.
        run.enter_stage("build", first_step)
        with put_parameters_on_meta():  # [fsdp:shard] names and shapes only, no memory yet
            model = model_args.create_model()
        model = fsdp.shard_model(model, config, run)
        fsdp.init_shards(model, config, run, weights)  # each rank fills its shards, one parameter at a time
        optimizer = fsdp.configure_optimizer(model, config)  # over the shards, so its state is sharded too
        scaler = LossScaler(run.dtype == torch.float16)
        best = (float("inf"), 0)  # the lowest validation loss, and its step
        if checkpoint:
            load_shards(checkpoint, model, optimizer)  # [fsdp:load] each rank reads its shards
            scaler.load_state_dict(checkpoint.manifest["grad_scaler"])
            best = find_best(config, checkpoint, run)
            run.print0(f"resuming after {first_step} updates from {checkpoint.path}")
        parallel_model = model  # [fsdp:parallel] without DDP: FSDP averages the gradients
        save_state = make_saver(checkpoints, model, optimizer, run, config.async_save)

        def save(step: int) -> None:
            fields = manifest_fields(config, model_args, data, PHASE, best, scaler)
            run.enter_stage("save", step)
            path = save_state(step, fields)  # [fsdp:save] each rank writes its shards
            run.observers.save(step, path)

        run.observers.build(model, optimizer, first_step)
        for step in range(first_step, config.max_iters + 1):
            val_loss = None
            is_last = step == config.max_iters or config.eval_only
            if step % config.eval_interval == 0 or is_last:
                val_loss = evaluate(parallel_model, data, step, config, run)
                check_finite(step, val_loss)
                if step > 0 and not config.eval_only:
                    has_improved = val_loss < best[0]
                    best = min(best, (val_loss, step))
                    if has_improved or config.always_save_checkpoint or is_last:
                        save(step)
            if is_last:
                log.write(step, loss=None, lr=None, grad_norm=None, val_loss=val_loss)
                break

            lr = learning_rate(step, config)
            for group in optimizer.param_groups:
                group["lr"] = lr
            run.observers.begin_step(step)
            loss_sum, norm = train_step(parallel_model, optimizer, scaler, data, step, config, run)
            run.observers.end_step(step, loss_sum, norm)

            # After a signal to one rank, or if a save is due, all ranks stop or save after the same step.
            should_stop, should_save = run.exchange_requests(checkpoints.is_save_due(config.save_every_minutes))
            # Reading the loss waits for the GPU, so read it only before a possible save and for a logged line.
            saves_next = (step + 1) % config.eval_interval == 0 or step + 1 == config.max_iters or should_save
            if saves_next or step % config.log_interval == 0 or val_loss is not None:
                mean_loss = run.sum(loss_sum).item() / config.gradient_accumulation_steps
                check_finite(step, mean_loss, None if scaler.is_enabled else norm.item())
                log.write(step, loss=mean_loss, lr=lr, grad_norm=norm.item(), val_loss=val_loss)
            if should_save:
                save(step + 1)
            if should_stop:
                break


if __name__ == "__main__":
    main(train, Config, __file__)
