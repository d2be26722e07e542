"""Train GPT-2 with ZeRO-1, the optimizer's state sharded over the ranks: `make phase1 GPUS=4`. [zero1:train]

    python train.py                                             # one process; a laptop will do
    python train.py config/train_gpt2.py --batch_size=8         # a named configuration, then flags
    torchrun --standalone --nproc_per_node=4 train.py           # 4 ranks: gloo on CPUs, NCCL on GPUs
    torchrun --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --nproc_per_node=8 train.py    # on each of two nodes

A run has steps 0 to max_iters - 1; `step-N` is saved after N updates. `--help` lists every flag.
"""

import torch  # [zero1:imports] DistributedDataParallel is in backends.py

from nanoGPT.checkpoint.directory import CheckpointDirectory  # [zero1:imports] Zero1Config replaces TrainConfig
from nanoGPT.checkpoint.state import about, load_scaler, load_whole  # [zero1:imports] shards replace ckpt.pt
from nanoGPT.dataset import EVALUATE, TRAIN, TokenData, to_device
from nanoGPT.distributed import runtime
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import check_finite
from nanoGPT.export import starting_point
from nanoGPT.metrics.ledger import Ledger
from nanoGPT.metrics.telemetry import Telemetry
from nanoGPT.model import GPT
from nanoGPT.optim import clip_grads, grad_norm, learning_rate, set_learning_rate  # [zero1:imports] no optimizer

# [zero1:lesson] what this phase adds: zero1.py, which backends.py chooses and sharded_checkpoint.py saves
from phase1_zero1.parallelize import (
    Zero1Config,
    data_parallel,
    reduced_grads,
    set_gradient_sync,
    shard_group,
    shard_optimizer,
)
from phase1_zero1.sharded_checkpoint import load_shards, save_shards

Config = Zero1Config
PHASE = "zero1"


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: TokenData, config: Config, run: Runtime) -> float:
    """Mean validation loss over the same `eval_iters` micro-batches each time, shared out among the ranks."""
    model.eval()
    total = run.zeros()
    for first in range(0, config.eval_iters, run.world_size):
        index = first + run.rank
        run.at(f"evaluation, micro-batch {index}")
        x, y = to_device(data.batch("val", EVALUATE, 0, index), run.device)
        with run.autocast():
            loss = model(x, y)[1]
        if index < config.eval_iters:  # the last round may have batches for some ranks only; all run the model
            total += loss
    model.train()
    return run.sum(total).item() / config.eval_iters


def train(config: Config) -> None:
    with runtime.start(config) as run:
        data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
        checkpoints = CheckpointDirectory(config.out_dir, run, config.keep_checkpoints)
        checkpoint = checkpoints.newest() if config.init_from == "resume" else None
        config, model_args, weights = starting_point(config, data, checkpoint)

        # The model, its optimizer, and what makes them parallel.
        model = GPT(model_args)
        model.init_weights(config.seed)
        if weights:
            load_whole(model, weights)
        model.to(run.device)
        optimizer = shard_optimizer(model, config, run)  # [zero1:shard] parameters move into its buckets
        scaler = torch.amp.GradScaler(run.device.type, enabled=run.dtype == torch.float16)
        step, best_val_loss = 0, float("inf")
        if checkpoint:
            load_shards(checkpoint.path, model, optimizer)  # [zero1:load] each rank reads its own
            load_scaler(scaler, checkpoint)
            step, best_val_loss = checkpoint.step, checkpoint.manifest["best_val_loss"]
            run.say(f"resuming after {step} updates from {checkpoint.path}")
        replica = data_parallel(model, optimizer, config, run)  # [zero1:replica] without DDP: the optimizer averages
        params = [p for p in model.parameters() if p.requires_grad]

        def save(step: int) -> None:
            facts = about(config, model_args, data, PHASE, best_val_loss, scaler)
            with telemetry.aside(step, "save"):
                checkpoints.save(step, lambda to: save_shards(to, model, optimizer), facts)  # [zero1:save]

        micro_batches = range(run.rank, config.gradient_accumulation_steps, run.world_size)  # this rank's
        ledger = Ledger(config, run, step + 2, model, optimizer)
        with Telemetry(config, run, step, model.flops_per_token()) as telemetry:
            while True:
                val_loss = None
                if step % config.eval_interval == 0 or step == config.max_iters:
                    with telemetry.aside(step, "evaluate"):
                        val_loss = evaluate(model, data, config, run)
                    check_finite(step, val_loss, 0.0, run)
                    improved = val_loss < best_val_loss
                    best_val_loss = min(val_loss, best_val_loss)
                    if step > 0 and (improved or config.always_save_checkpoint or step == config.max_iters):
                        save(step)
                if step == config.max_iters:
                    telemetry.log(step, loss=None, lr=None, grad_norm=None, val_loss=val_loss)
                    break

                # One optimizer step: every micro-batch adds its gradient, the last one averages over the ranks.
                lr = learning_rate(step, config)
                set_learning_rate(optimizer, lr)
                loss_sum = run.zeros()
                with ledger.watch(step):
                    for micro_batch in micro_batches:
                        telemetry.at(step, f"micro-batch {micro_batch}")
                        set_gradient_sync(replica, optimizer, last=micro_batch == micro_batches[-1])  # [zero1:sync]
                        x, y = to_device(data.batch("train", TRAIN, step, micro_batch), run.device)
                        runtime.reseed(run.device, config.seed, step, micro_batch)
                        with run.autocast():
                            loss = replica(x, y)[1]  # the logits must not live through the next forward
                        loss_sum += loss.detach()
                        scaler.scale(loss / len(micro_batches)).backward()
                    telemetry.at(step, "update")
                    scaler.unscale_(optimizer)
                    grads = reduced_grads(optimizer, params)  # [zero1:clip] of this rank's shards
                    norm = grad_norm(grads, shard_group(optimizer))
                    clip_grads(grads, norm, config.grad_clip)
                    del grads  # nor these through the next step
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad(set_to_none=True)

                # Look at the numbers where they are needed: on a GPU, looking waits for it.
                stop = run.should_stop()
                due = (step + 1) % config.eval_interval == 0 or step + 1 == config.max_iters or stop
                if due or step % config.log_interval == 0 or val_loss is not None:
                    mean_loss = run.sum(loss_sum).item() / config.gradient_accumulation_steps
                    check_finite(step, mean_loss, norm.item(), run)
                    telemetry.log(step, loss=mean_loss, lr=lr, grad_norm=norm.item(), val_loss=val_loss)
                step += 1
                if stop:
                    save(step)
                    run.say(f"stopped by a signal; resume with --init_from=resume --out_dir={config.out_dir}")
                    break


if __name__ == "__main__":
    runtime.main(train, Config, __file__)
