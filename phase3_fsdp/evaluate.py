"""The validation loss of a checkpoint, or of weights from elsewhere, sharded over the ranks.

    torchrun --standalone --nproc_per_node=4 evaluate.py --out_dir=../out/my-run             # its newest checkpoint
    torchrun --standalone --nproc_per_node=8 evaluate.py --init_from=gpt2-xl --dataset=shakespeare --eval_iters=500

A checkpoint of any phase, any optimizer and any number of ranks will do. No optimizer is made and none is read: a rank
holds 4P/N bytes of weights, and while it computes one unit's. Nothing is written, so the run may be training meanwhile.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from nanoGPT.checkpoint.state import read_payload
from nanoGPT.dataset import TokenData
from nanoGPT.distributed import runtime
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.export import newest_on_all, starting_point
from nanoGPT.memory.savings import Needs
from nanoGPT.model import GPT
from phase3_fsdp import fsdp
from phase3_fsdp.train import evaluate

OF_TRAINING = (
    "--fsdp_activation_checkpointing",
    "--fsdp_sync_every_micro_batch",
    "--async_save",
    "`make",
)  # free nothing


@dataclass
class EvaluateConfig(fsdp.FsdpConfig):
    """What to evaluate, and how to shard it: the fields of training, of which a checkpoint brings its own."""

    init_from: str = "resume"
    """resume: the newest checkpoint of out_dir; or as for training"""

    def check(self, world_size: int) -> None:
        # Whichever optimizer trained the checkpoint, none is made here.
        fsdp.FsdpConfig.check(replace(self, optimizer="adamw"), world_size)
        if self.init_from == "scratch":
            raise ConfigError("--init_from=scratch has learned nothing: evaluate resume, gpt2 or a directory")

    def memory_savings(self, needs: Needs, run: Runtime) -> dict[str, float]:
        weights = replace(needs, state={**needs.state, "gradients": 0, "optimizer_state": 0})
        savings = super().memory_savings(weights, run)
        return {words: size for words, size in savings.items() if not words.startswith(OF_TRAINING)}


Config = EvaluateConfig


def evaluate_weights(config: EvaluateConfig) -> float:
    """The mean loss over `eval_iters` micro-batches of the validation tokens; printed too, with its perplexity."""
    with runtime.start(config, reads_only=True) as run:
        data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
        source, checkpoint = config.init_from, None
        if source == "resume":
            checkpoint = newest_on_all(Path(config.out_dir), run)
            source = str(checkpoint.path)
        config, model_args, weights = starting_point(config, data, checkpoint, trains=False)
        if checkpoint:
            weights = read_payload(checkpoint.path).model
        with fsdp.birthplace(config, run):
            model = GPT(model_args)
        model = fsdp.shard_model(model, config, run)
        fsdp.init_shards(model, replace(config, init_from=source), run, weights)
        loss = evaluate(fsdp.data_parallel(model, config, run), data, config, run)
        tokens = config.eval_iters * config.batch_size * config.block_size
        run.say(f"{source}: validation loss {loss:.6f}, perplexity {math.exp(loss):.3f}, over {tokens:,} tokens")
        return loss


if __name__ == "__main__":
    runtime.main(evaluate_weights, Config, __file__)
