"""The configuration of a run: one dataclass, the defaults of a GPU, and the checks of its values.

A phase adds fields by extending `TrainConfig`. `nanoGPT/job/parse.py` builds one from config files and flags.
"""

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import Literal, TypeVar

from nanoGPT.errors import ConfigError


@dataclass
class TrainConfig:
    """GPT-2 training. Defaults are those of this machine: a small character model on a CPU, 124M on a GPU."""

    # data
    dataset: str = "shakespeare_char"
    """directory under nanoGPT/data that its prepare.py has filled"""
    batch_size: int = 6
    """sequences per micro-batch"""
    block_size: int = 64
    """tokens per sequence"""
    gradient_accumulation_steps: int = 16
    """micro-batches per optimizer step, of all ranks together"""
    # model
    n_layer: int = 4
    """transformer blocks"""
    n_head: int = 4
    """attention heads per block"""
    n_embd: int = 128
    """channels; a multiple of n_head"""
    dropout: float = 0.0
    """probability in [0, 1)"""
    bias: bool = False
    """biases in Linear and LayerNorm, as GPT-2 has them"""
    vocab_size: int | None = None
    """rows of the embedding; None: the tokenizer's, with GPT-2's 50257 padded to 50304"""
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: the blocks' matrices by Muon, the rest by AdamW"""
    learning_rate: float = 2e-3
    """peak learning rate"""
    max_iters: int = 200
    """optimizer steps of the whole run"""
    warmup_iters: int = 20
    """steps of linear warm-up"""
    lr_decay_iters: int | None = None
    """step at which the cosine reaches min_lr; None: max_iters"""
    min_lr: float = 2e-4
    """learning rate at the end of the cosine"""
    weight_decay: float = 0.1
    """AdamW's, on matrices only"""
    beta1: float = 0.9
    """AdamW's first-moment decay"""
    beta2: float = 0.99
    """AdamW's second-moment decay"""
    grad_clip: float = 1.0
    """largest global gradient norm; 0: no clipping"""
    # evaluation and checkpoints
    eval_interval: int = 50
    """steps between evaluations"""
    eval_iters: int = 32
    """micro-batches per evaluation, of all ranks together"""
    log_interval: int = 10
    """steps between logged lines"""
    always_save_checkpoint: bool = False
    """save at every evaluation, not only when the validation loss improved"""
    keep_checkpoints: int = 3
    """newest checkpoints that are kept"""
    init_from: str = "scratch"
    """scratch | resume | gpt2 | gpt2-medium | gpt2-large | gpt2-xl | a directory of a run or a Hugging Face model"""
    out_dir: str = "out"
    """where checkpoints and metrics go"""
    # system
    device: str = "auto"
    """auto | cpu | cuda | mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """of the matrix products; auto: bfloat16 on a GPU that has it, else float16; float32 on a CPU"""
    compile: bool = False
    """torch.compile the model"""
    seed: int = 1337
    """keys initialisation, batches and dropout"""
    # watching
    track: Literal["none", "tensorboard", "wandb"] = "none"
    """also send the metrics there (extra `track`)"""
    stall_seconds: float = 300.0
    """end the job, with the stacks of all ranks, when none of them makes progress for this long, in seconds"""
    timeout_minutes: float = 30.0
    """how long ranks wait for each other, at the start and in every collective, in minutes"""
    ledger: bool = False
    """count one step's collectives and the bytes of state per rank, print them and write ledger.json"""

    def check(self, world_size: int) -> None:
        """Refuse, by a ConfigError, what a phase cannot combine; called before any rank starts."""

    def share_of_parameters(self, world_size: int, local_world_size: int, on_gpu: bool) -> float:
        """Return which part of all parameters a rank keeps, in its GPU's memory or in the CPU's."""
        return 1.0


GPU_DEFAULTS = {
    "dataset": "shakespeare",
    "batch_size": 12,
    "block_size": 1024,
    "gradient_accumulation_steps": 16,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "learning_rate": 6e-4,
    "min_lr": 6e-5,
    "beta2": 0.95,
    "max_iters": 500,
    "warmup_iters": 50,
    "eval_interval": 100,
    "eval_iters": 64,
    "compile": True,
}

MOST_MINUTES = 60 * 24 * 30  # a month

C = TypeVar("C", bound=TrainConfig)


def field_names(config_class: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config_class)]


def is_text(value: str) -> bool:
    """Return whether a string can be written as UTF-8 and passed to the operating system."""
    return "\0" not in value and value == value.encode("utf-8", "ignore").decode()


def validate(config: TrainConfig, world_size: int) -> None:
    """Refuse values that no run can have.

    Args:
        config: the configuration as parsed.
        world_size: number of ranks.

    Raises:
        ConfigError: names the field, its value and what would work.
    """
    at_least = {"batch_size": 1, "block_size": 1, "gradient_accumulation_steps": 1, "n_layer": 1, "n_head": 1}
    at_least |= {"n_embd": 1, "max_iters": 1, "warmup_iters": 0, "eval_interval": 1, "eval_iters": 1}
    at_least |= {"log_interval": 1, "keep_checkpoints": 3, "min_lr": 0, "weight_decay": 0, "grad_clip": 0}
    at_least |= {"seed": 0, "vocab_size": 1, "lr_decay_iters": 1}
    for name, least in at_least.items():
        value = getattr(config, name)
        most = {"seed": 2**63 - 1, "n_layer": 10_000}.get(name, 2**31 - 1)
        if value is not None and not least <= value <= most:
            raise ConfigError(
                f"--{name}={value} cannot be: give {least} or more" + (f", up to {most}" if value > 0 else "")
            )
    for name in ("dropout", "beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"--{name}={getattr(config, name)} cannot be: give a number from 0 up to, not with, 1")
    if not config.out_dir:
        raise ConfigError("--out_dir= names no directory: give one, or leave it out")
    if not config.stall_seconds >= 1:
        raise ConfigError(f"--stall_seconds={config.stall_seconds} cannot be: give 1 or more")
    for name in ("learning_rate", "stall_seconds", "timeout_minutes"):
        if not 0 < getattr(config, name) < float("inf"):
            raise ConfigError(f"--{name}={getattr(config, name)} cannot be: give a number above 0")
    if config.stall_seconds > 60 * config.timeout_minutes:
        raise ConfigError(
            f"--stall_seconds={config.stall_seconds:g} is longer than --timeout_minutes={config.timeout_minutes:g}, "
            "after which collectives fail: lower the first or raise the second"
        )
    if config.timeout_minutes > MOST_MINUTES:
        raise ConfigError(f"--timeout_minutes={config.timeout_minutes:g} is out of range: use {MOST_MINUTES} or less")
    for name, value in vars(config).items():
        if isinstance(value, str) and not is_text(value):
            raise ConfigError(f"--{name}={value!r} is not valid UTF-8 text: use another name")
    package = {"none": "json", "tensorboard": "tensorboard", "wandb": "wandb"}[config.track]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"--track={config.track} needs `.venv/bin/pip install -e '.[track]'`")
    if config.n_embd % config.n_head:
        raise ConfigError(f"--n_embd={config.n_embd} is not divisible by --n_head={config.n_head}: change one of them")
    config.check(world_size)
    if config.gradient_accumulation_steps % world_size:
        steps = config.gradient_accumulation_steps
        ranks = [n for n in range(1, min(steps, 1024) + 1) if steps % n == 0]
        raise ConfigError(
            f"--gradient_accumulation_steps={steps} cannot be shared out among {world_size} ranks: use a multiple of "
            f"{world_size}, such as {-(-steps // world_size) * world_size}, or one of {ranks} ranks"
        )
