"""Compute the validation loss of a model that is sharded over the ranks.

    torchrun --standalone --nproc_per_node=4 evaluate.py --out_dir=../out/my-run             # its newest checkpoint
    torchrun --standalone --nproc_per_node=8 evaluate.py --init_from=gpt2-xl --dataset=shakespeare --eval_iters=500

The checkpoint can be of any phase, any optimizer and any number of ranks. The program creates no optimizer and loads no
optimizer state: a rank stores 4P/N bytes of weights, and all-gathers units while they compute. It writes no files, so
you can evaluate a run while it is training.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from nanoGPT.checkpoint.manifest import find_checkpoint
from nanoGPT.checkpoint.sources import read_full_state
from nanoGPT.checkpoint.starting_point import read_starting_point
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError
from nanoGPT.job.start import main, start
from phase3_fsdp import fsdp
from phase3_fsdp.fsdp import put_parameters_on_meta
from phase3_fsdp.train import evaluate


@dataclass
class EvaluateConfig(fsdp.FsdpConfig):
    """The weights to evaluate, and how to shard them. The fields are those of training; a checkpoint sets some."""

    trains = False

    init_from: str = "resume"
    """resume: the newest checkpoint of out_dir; or a value as in training"""

    def check(self, world_size: int) -> None:
        super().check(world_size)
        if self.init_from == "scratch":
            raise ConfigError("--init_from=scratch has no trained weights: use resume, gpt2 or a directory")


Config = EvaluateConfig


def evaluate_weights(config: EvaluateConfig) -> float:
    """Return the mean loss over `eval_iters` micro-batches of validation tokens, and print it."""
    with start(config, reads_only=True) as run:
        data = TokenData(config)
        source, checkpoint = config.init_from, None
        if source == "resume":
            checkpoint = find_checkpoint(Path(config.out_dir), run, config.resume_step)
            source = str(checkpoint.path)
        model_args, weights = read_starting_point(config, data, checkpoint, run)
        if checkpoint:
            weights = read_full_state(checkpoint.path).model
        with put_parameters_on_meta():
            model = model_args.create_model()
        model = fsdp.shard_model(model, config, run)
        fsdp.init_shards(model, config, run, weights)
        loss = evaluate(model, data, 0, config, run)
        tokens = config.eval_iters * config.batch_size * config.block_size
        perplexity = torch.tensor(loss, dtype=torch.float64).exp()  # inf for a loss above 709, where math.exp raises
        quality = f"validation loss {loss:.6f}, perplexity {perplexity:.3f}, over {tokens:,} tokens"
        run.print0(f"{source}: {quality}")
        return loss


if __name__ == "__main__":
    main(evaluate_weights, Config, __file__)
