"""The configuration of a run: the dataclass `TrainConfig`, its defaults on a GPU, and the checks of its values.

Each phase extends `TrainConfig` with its own fields. `nanoGPT/job/parse.py` creates it from config files and flags.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from nanoGPT.errors import ConfigError
from nanoGPT.observers import Flags, find_default_observers

PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # OpenAI's models, by size
StepChoice = int | Literal["best"] | None  # a checkpoint of a run; None: the newest


@dataclass
class TrainConfig(Flags):
    """GPT-2 training. The defaults depend on the device: a small character model on a CPU, GPT-2 124M on a GPU.

    Attributes:
        GPU_DEFAULTS: the defaults on a GPU that differ.
        FOREIGN_FLAGS: flags of other trainers that people type, and what to use instead. A key has one or more names.
    """

    trains = True  # False in a program that only evaluates: a rank stores parameters only, and accumulates nothing

    GPU_DEFAULTS = {
        "dataset": "shakespeare",
        "batch_size": 24,
        "block_size": 1024,
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "learning_rate": 6e-4,
        "min_lr": 6e-5,
        "beta2": 0.95,
        "max_iters": 500,
        "warmup_iters": 50,
        "eval_interval": 100,
        "eval_iters": 32,
        "compile": True,
    }
    # data
    dataset: str = "shakespeare_char"
    """name of a dataset under nanoGPT/data, path of a prepared dataset, or names with weights: a:3,b:1"""
    sampling: Literal["random", "epoch"] = "random"
    """random: sequences start at random tokens; epoch: read each sequence of block_size tokens once, in random order"""
    batch_size: int = 4
    """sequences per micro-batch"""
    block_size: int = 64
    """tokens per sequence"""
    gradient_accumulation_steps: int = 8
    """micro-batches per optimizer step, in total over all ranks"""
    # model
    model: str = "gpt2"
    """gpt2 | llama | a module that defines a model; a model may add flags"""
    n_layer: int = 4
    """number of transformer blocks"""
    n_head: int = 4
    """attention heads per block"""
    n_embd: int = 128
    """embedding dimension (channels); a multiple of n_head"""
    dropout: float = 0.0
    """dropout probability, in [0, 1)"""
    bias: bool = False
    """use biases in Linear and LayerNorm, as in GPT-2"""
    vocab_size: int | None = None
    """rows of the token embedding; None: the vocabulary size of the tokenizer, with GPT-2's 50257 padded to 50304"""
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks, AdamW for all other parameters"""
    learning_rate: float = 4e-3
    """peak learning rate"""
    max_iters: int = 520
    """total number of optimizer steps"""
    warmup_iters: int = 60
    """steps of linear learning rate warm-up"""
    lr_decay_iters: int | None = None
    """step at which the cosine decay reaches min_lr; None: max_iters"""
    decay_lr: bool = True
    """False: a constant learning rate, without warm-up"""
    min_lr: float = 2e-4
    """learning rate after the cosine decay; if only learning_rate is given, min_lr changes in proportion"""
    weight_decay: float = 0.1
    """weight decay; applied to matrices and embeddings only"""
    beta1: float = 0.9
    """decay rate of AdamW's first moment, in [0, 1)"""
    beta2: float = 0.99
    """decay rate of AdamW's second moment, in [0, 1)"""
    grad_clip: float = 1.0
    """maximum global gradient norm; 0: no clipping"""
    # evaluation and checkpoints
    eval_interval: int = 65
    """steps between evaluations"""
    eval_iters: int = 32
    """micro-batches per evaluation, in total over all ranks"""
    log_interval: int = 10
    """steps between logged lines"""
    always_save_checkpoint: bool = False
    """save at every evaluation, not only when the validation loss has improved"""
    save_every_minutes: float = 0.0
    """also save if the last save was this many minutes ago; 0: save only at evaluations and at the end"""
    keep_checkpoints: int = 3
    """number of newest checkpoints to keep, at least 3; the one with the best validation loss is kept too"""
    resume_step: StepChoice = None
    """the checkpoint of the run that init_from names: its number of updates, or best (lowest validation loss); None:
    the newest"""
    eval_only: bool = False
    """evaluate the model once and stop, without training or saving"""
    init_from: str = "scratch"
    """scratch | resume | gpt2 | gpt2-medium | gpt2-large | gpt2-xl | directory of a run or of a Hugging Face model"""
    out_dir: str = "out"
    """output directory for checkpoints and metrics"""
    # system
    device: str = "auto"
    """auto | cpu | cuda | mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of matrix products; auto: bfloat16 on a GPU that supports it, float16 on other GPUs, float32 elsewhere"""
    compile: bool = False
    """compile the model with torch.compile"""
    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """backend of torch's attention; auto: cuDNN on Hopper and newer GPUs, if dropout is a multiple of 1/16; else flash
    there, and torch's choice on other devices"""
    deterministic: bool = False
    """use only deterministic algorithms, so that a run on the same GPUs repeats to the last digit; slower"""
    seed: int = 1337
    """random seed of initialization, batches and dropout"""
    observers: str = field(default_factory=find_default_observers)
    """modules that observe the run, such as operate,measure,my_metrics; they may add flags; empty: none"""

    FOREIGN_FLAGS = {
        "backend": "leave it out: the backend follows the device, which --device selects",
        "use_fsdp": "leave it out: make phase3 always shards the model, and make baseline uses DDP",
        "use_zero1": "leave it out: make phase1 always shards the optimizer, and make baseline uses DDP",
        "lr": "use --learning_rate instead",
        "wd": "use --weight_decay instead",
        "steps max_steps epochs num_epochs": "use --max_iters, the number of updates, instead",
        "max_grad_norm clip_grad": "use --grad_clip instead",
        "seq_len seq_length": "use --block_size instead",
        "hidden_size d_model": "use --n_embd instead",
        "bf16 amp precision": "use --dtype=bfloat16 instead",
        "fp16": "use --dtype=float16 instead",
        "resume": "use --init_from=resume instead",
        "gradient_checkpointing": "use --fsdp_activation_checkpointing=full of phase 3 instead",
        "gpus nproc world_size": "leave it out: the launcher sets the number of ranks, as in `make phase3 GPUS=4`",
        "n_kv_head intermediate_size rope_theta norm_eps tie_embeddings": "add --model=llama, whose flag it is",
        "wandb_log": "use --track=wandb of the observer operate instead; in a config file, set wandb_log = False",
        "wandb_project": "set the environment variable WANDB_PROJECT instead",
        "wandb_run_name": "set the environment variable WANDB_NAME instead",
    }

    @property
    def uses_autocast(self) -> bool:
        """Whether matrix products run under autocast. FSDP casts the parameters instead."""
        return True

    @property
    def supports_mps(self) -> bool:
        """Whether the trainer can run on an Apple GPU, with one process."""
        return True


def find_device_defaults(config_class: type[TrainConfig], world_size: int, on_gpu: bool) -> dict[str, Any]:
    """Return the defaults on a device that differ from those of the class.

    With more ranks than micro-batches, a step has twice as many micro-batches of half as many sequences.
    """
    defaults: dict[str, Any] = {**config_class.GPU_DEFAULTS} if on_gpu else {}
    micro_batches = config_class.gradient_accumulation_steps
    if world_size > micro_batches:
        batch_size = defaults.get("batch_size", config_class.batch_size)
        defaults |= {"batch_size": batch_size // 2, "gradient_accumulation_steps": 2 * micro_batches}
    return defaults


RANGES: list[tuple[int, float, list[str]]] = [  # a minimum, an exclusive maximum, and the fields with this range
    (0, 1, ["dropout", "beta1", "beta2"]),
    (0, math.inf, ["warmup_iters", "min_lr", "weight_decay", "grad_clip", "save_every_minutes"]),
    (0, 2**63, ["seed"]),
    (1, 10_001, ["n_layer"]),
    (1, 2**31, ["batch_size", "block_size", "gradient_accumulation_steps", "n_head", "n_embd", "vocab_size"]),
    (1, 2**31, ["max_iters", "lr_decay_iters", "eval_interval", "eval_iters", "log_interval", "resume_step"]),
    (3, 2**31, ["keep_checkpoints"]),
]

C = TypeVar("C", bound=TrainConfig)


def field_names(config_class: type) -> list[str]:
    """Return the names of the fields of a dataclass."""
    return [field.name for field in dataclasses.fields(config_class)]


def validate(config: TrainConfig, world_size: int) -> None:
    """Check a configuration: each value, and their combinations.

    Args:
        config: the parsed configuration.
        world_size: number of ranks.

    Raises:
        ConfigError: a value cannot be used. The message has the field, its value and what to use instead.
    """
    check_ranges(config)
    if config.decay_lr and not config.min_lr <= config.learning_rate:
        raise ConfigError(
            f"--min_lr={config.min_lr:g} is above --learning_rate={config.learning_rate:g}, so the learning rate would "
            "rise: use a smaller --min_lr, or --decay_lr=False for a constant learning rate"
        )
    if config.n_embd % config.n_head:
        raise ConfigError(f"--n_embd={config.n_embd} is not divisible by --n_head={config.n_head}: change one of them")
    if config.resume_step is not None and config.init_from == "scratch":
        raise ConfigError(f"--resume_step={config.resume_step} needs --init_from=resume, or the directory of a run")
    config.check(world_size)
    if config.trains and config.gradient_accumulation_steps % world_size:
        steps = config.gradient_accumulation_steps
        ranks = [n for n in range(1, min(steps, 1024) + 1) if steps % n == 0]
        raise ConfigError(
            f"--gradient_accumulation_steps={steps} is not divisible by the {world_size} ranks: use a multiple of "
            f"{world_size}, such as {-(-steps // world_size) * world_size}, or one of {ranks} ranks"
        )


def check_ranges(config: TrainConfig) -> None:
    """Check each value of a configuration on its own.

    Raises:
        ConfigError: a value is out of range.
    """
    if not 0 < config.learning_rate < math.inf:
        raise ConfigError(f"--learning_rate={config.learning_rate} is out of range: use a finite value above 0")
    for minimum, limit, names in RANGES:
        for name in names:
            value = getattr(config, name)
            if isinstance(value, int | float) and not minimum <= value < limit:
                valid = f"a value in [{minimum}, {limit})" if limit < math.inf else f"a finite value, {minimum} or more"
                raise ConfigError(f"--{name}={value} is out of range: use {valid}")
    if not config.out_dir:
        raise ConfigError("--out_dir= is empty: give a directory, or leave out the flag")
    for name, value in vars(config).items():
        if isinstance(value, str) and ("\0" in value or value != value.encode("utf-8", "ignore").decode()):
            raise ConfigError(f"--{name}={value!r} is not valid UTF-8 text: use another value")
