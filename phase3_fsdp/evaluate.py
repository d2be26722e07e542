"""The validation loss of a checkpoint, or of weights from elsewhere, sharded over the ranks.

    torchrun --standalone --nproc_per_node=4 evaluate.py --out_dir=../out/my-run             # its newest checkpoint
    torchrun --standalone --nproc_per_node=8 evaluate.py --init_from=gpt2-xl --dataset=shakespeare --eval_iters=500

A checkpoint of any phase, any optimizer and any number of ranks will do. No optimizer is made and none is read: a rank
holds 4P/N bytes of weights, and while it computes one unit's. Nothing is written, so the run may be training meanwhile.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from nanoGPT.checkpoint.state import read_full_state
from nanoGPT.checkpoint.weights import find_newest_on_all, read_starting_point
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.evaluate import evaluate
from nanoGPT.job.start import main, start
from nanoGPT.memory.savings import Needs
from nanoGPT.model import GPT
from phase3_fsdp import costs, fsdp

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


Config = EvaluateConfig


class EvaluationCosts:
    """`phase3_fsdp.costs` for weights alone: no gradients, no optimizer state, and no options of training."""

    step_costs = staticmethod(costs.step_costs)

    def memory_savings(self, config: EvaluateConfig, needs: Needs, run: Runtime) -> dict[str, float]:
        """Return the bytes that flags free on this rank."""
        weights = replace(needs, state={**needs.state, "gradients": 0, "optimizer_state": 0})
        savings = costs.memory_savings(config, weights, run)
        return {words: size for words, size in savings.items() if not words.startswith(OF_TRAINING)}


def evaluate_weights(config: EvaluateConfig) -> float:
    """The mean loss over `eval_iters` micro-batches of the validation tokens; printed too, with its perplexity."""
    with start(config, reads_only=True) as (run, config):
        data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
        source, checkpoint = config.init_from, None
        if source == "resume":
            checkpoint = find_newest_on_all(Path(config.out_dir), run)
            source = str(checkpoint.path)
        config, model_args, weights = read_starting_point(config, data, checkpoint, run, trains=False)
        if checkpoint:
            weights = read_full_state(checkpoint.path).model
        with fsdp.init_device(config, run):
            model = GPT(model_args)
        model = fsdp.shard_model(model, config, run)
        fsdp.init_shards(model, replace(config, init_from=source), run, weights)
        loss = evaluate(fsdp.data_parallel(model, config, run), data, config, run)
        tokens = config.eval_iters * config.batch_size * config.block_size
        run.print0(f"{source}: validation loss {loss:.6f}, perplexity {math.exp(loss):.3f}, over {tokens:,} tokens")
        return loss


if __name__ == "__main__":
    main(evaluate_weights, Config, __file__, EvaluationCosts())
