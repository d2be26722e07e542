"""Train GPT-2, in one process or with DDP over as many ranks as were started: `make baseline GPUS=4`.

    python train.py                                             # one process; a laptop will do
    python train.py config/train_gpt2.py --batch_size=8         # a named configuration, then flags
    torchrun --standalone --nproc_per_node=4 train.py           # 4 ranks: gloo on CPUs, NCCL on GPUs
    torchrun --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 --nproc_per_node=8 train.py    # on each of two nodes

A run has steps 0 to max_iters - 1; `step-N` is saved after N updates. `--help` lists every flag.
"""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.state import about, load_scaler, load_training_state, load_whole, write_ckpt
from nanoGPT.dataset import EVALUATE, TRAIN, TokenData, to_device
from nanoGPT.distributed import runtime
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import check_finite
from nanoGPT.export import starting_point
from nanoGPT.metrics.ledger import Ledger
from nanoGPT.metrics.telemetry import Telemetry
from nanoGPT.model import GPT
from nanoGPT.optim import clip_grads, configure_optimizer, grad_norm, learning_rate, set_learning_rate
from nanoGPT.train_config import TrainConfig

Config = TrainConfig
PHASE = "baseline"


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
        optimizer = configure_optimizer(model, config)
        scaler = torch.amp.GradScaler(run.device.type, enabled=run.dtype == torch.float16)
        step, best_val_loss = 0, float("inf")
        if checkpoint:
            load_training_state(checkpoint.path, model, optimizer)
            load_scaler(scaler, checkpoint)
            step, best_val_loss = checkpoint.step, checkpoint.manifest["best_val_loss"]
            run.say(f"resuming after {step} updates from {checkpoint.path}")
        replica = torch.compile(model) if config.compile else model
        if run.world_size > 1:
            replica = DDP(replica, gradient_as_bucket_view=True)
        params = [p for p in model.parameters() if p.requires_grad]

        def save(step: int) -> None:
            facts = about(config, model_args, data, PHASE, best_val_loss, scaler)
            with telemetry.aside(step, "save"):
                checkpoints.save(step, lambda to: write_ckpt(to, run, model, optimizer, step, facts), facts)

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
                        if isinstance(replica, DDP):
                            replica.require_backward_grad_sync = micro_batch == micro_batches[-1]
                        x, y = to_device(data.batch("train", TRAIN, step, micro_batch), run.device)
                        runtime.reseed(run.device, config.seed, step, micro_batch)
                        with run.autocast():
                            loss = replica(x, y)[1]  # the logits must not live through the next forward
                        loss_sum += loss.detach()
                        scaler.scale(loss / len(micro_batches)).backward()
                    telemetry.at(step, "update")
                    scaler.unscale_(optimizer)
                    grads = [p.grad for p in params if p.grad is not None]
                    norm = grad_norm(grads)
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
