"""The configuration of a run: one dataclass, then a named config file, then --key=value flags.

    python nanoGPT/train.py config/train_gpt2.py --batch_size=8 --compile=True
    python nanoGPT/train.py --help

Later words win. On `--init_from=resume` the configuration that the checkpoint was written with comes first,
so a resumed run needs nothing but its `--out_dir`. A phase adds fields by extending `TrainConfig`.
"""

import dataclasses
import difflib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from nanoGPT.cli.command_line import command_line, joined
from nanoGPT.errors import ConfigError
from nanoGPT.schemas import Malformed, check

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from nanoGPT.distributed.runtime import Runtime
    from nanoGPT.memory.savings import Needs
    from nanoGPT.metrics.ledger import Costs

PACKAGE = Path(__file__).resolve().parent


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

    def costs(self, model: "nn.Module", optimizer: "Optimizer", run: "Runtime") -> "Costs":
        """What a step of this configuration costs a rank by the formula: bytes of state and of traffic."""
        from nanoGPT.metrics.ledger import ddp_costs

        return ddp_costs(model, optimizer, run)

    def share_of_parameters(self, world_size: int, local_world_size: int, on_gpu: bool) -> float:
        """Return which part of all parameters a rank keeps, in its GPU's memory or in the CPU's."""
        return 1.0

    def memory_savings(self, needs: "Needs", run: "Runtime") -> dict[str, float]:
        """Return the bytes that each flag that is not set yet, or another `make` command, frees on this rank."""
        from nanoGPT.memory.savings import baseline_savings

        return baseline_savings(self, needs, run)


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

HANDED_CONFIG = "NANOGPT_CONFIG"  # environment variable: the configuration as JSON
MOST_MINUTES = 60 * 24 * 30  # a month

C = TypeVar("C", bound=TrainConfig)


def parse(config_class: type[C], argv: list[str], trainer: Path, from_files: Mapping[str, object] | None = None) -> C:
    """Build the configuration of a run from config files and flags.

    Args:
        config_class: `TrainConfig` or a phase's extension of it.
        argv: words after the program's name: config files and `--key=value`.
        trainer: the train.py that runs; config files are also looked up beside it.
        from_files: what the config files set, where they have been executed already; None executes them.

    Raises:
        ConfigError: an unknown name, a wrong type, an unknown file. `--help` exits 0.
    """
    flags = [word for word in joined(argv) if not is_config_file(word)]
    check_names(config_class, flags)
    if from_files is None:
        from_files = read_config_files(config_class, argv, trainer)
    config = parse_flags(config_class, {**machine_defaults(flags, from_files), **from_files}, flags)
    if config.init_from == "resume":
        saved = saved_config(config_class, config.out_dir)
        saved.pop("out_dir", None)
        config = parse_flags(config_class, {**saved, **from_files, "init_from": "resume"}, flags)
    return config


def is_config_file(word: str) -> bool:
    return not word.startswith("-") and word.endswith(".py")


def read_config_files(config_class: type, argv: list[str], trainer: Path) -> dict[str, object]:
    """Execute the config files of a command line and return what they set; later files win."""
    values: dict[str, object] = {}
    for name in filter(is_config_file, joined(argv)):
        values |= read_config_file(config_class, find_config_file(name, trainer))
    return values


def handed_config(config_class: type[C]) -> C | None:
    """Return the configuration that `nanoGPT.launch` has put into this rank's environment; None without a launcher."""
    text = os.environ.get(HANDED_CONFIG)
    return config_class(**json.loads(text)) if text else None


def field_names(config_class: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config_class)]


def nearest(name: str, names: list[str]) -> str:
    """A half-sentence that names the closest known name, or nothing; one that begins so, in any case, is closer."""
    begin = [known for known in names if known.lower().startswith(name.lower())]
    close = difflib.get_close_matches(name.lower(), begin, n=1) or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def check_names(config_class: type, flags: list[str]) -> None:
    names = field_names(config_class)
    for flag in flags:
        name = flag.lstrip("-").split("=")[0].replace("-", "_")
        if flag.startswith("--") and name not in [*names, "help"]:
            close = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                f"unknown flag --{name}" + (f"; did you mean --{close[0]}?" if close else "; --help lists all flags")
            )


def find_config_file(name: str, trainer: Path) -> Path:
    """Look up a config file in the current directory, then beside the trainer, then in nanoGPT/."""
    for folder in (Path.cwd(), trainer.parent, PACKAGE):
        if (folder / name).is_file():
            return folder / name
    known = sorted({f"config/{p.name}" for folder in (trainer.parent, PACKAGE) for p in folder.glob("config/*.py")})
    raise ConfigError(f"there is no config file {name}{nearest(name, known)} (known: {', '.join(known)})")


def read_config_file(config_class: type, path: Path) -> dict[str, object]:
    """Run a config file, plain `name = value` lines, and return what it sets.

    A name that is no field is an error, so that a misspelt setting is not silently ignored.
    """
    namespace: dict[str, object] = {}
    try:
        exec(compile(path.read_text(), str(path), "exec"), namespace)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"config file {path} does not run: {type(error).__name__}: {error}") from None
    values = {k: v for k, v in namespace.items() if not k.startswith("_")}
    for name, value in values.items():
        if name not in field_names(config_class):
            raise ConfigError(
                f"config file {path} sets {name}, which is no field{nearest(name, field_names(config_class))}"
            )
        parsed: TrainConfig = parse_flags(config_class, {}, [f"--{name}={value}"], source=f"config file {path}: ")
        values[name] = getattr(parsed, name)  # of the field's type, also where the file has a string
    return values


def machine_defaults(flags: list[str], from_files: Mapping[str, object]) -> dict[str, object]:
    """Defaults for the device of this run: `GPU_DEFAULTS` where it is a GPU."""
    device = str(from_files.get("device", "auto"))
    for flag in flags:
        if flag.startswith("--device="):
            device = flag.split("=", 1)[1]
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return dict(GPU_DEFAULTS) if device.startswith("cuda") else {}


def saved_config(config_class: type[TrainConfig], out_dir: str) -> dict[str, object]:
    """Return the fields of a configuration in the newest manifest of a run, or nothing.

    Raises:
        ConfigError: a field has a value of another type.
    """
    from nanoGPT.checkpoint.manifest import manifests

    for path, manifest in manifests(Path(out_dir)):
        try:
            saved = check(manifest.get("config", {}), dict[str, Any])
            known = {name: value for name, value in saved.items() if name in field_names(config_class)}
            check(known, config_class)
            return known
        except Malformed as error:
            raise ConfigError(f"{path}/manifest.json has no configuration ({error}): give another --out_dir") from None
    return {}


def parse_flags(config_class: type[C], defaults: dict[str, object], flags: list[str], source: str = "") -> C:
    """The configuration from defaults and flags; `source` goes before what is wrong with them."""
    return command_line(config_class, flags, source, default=config_class(**defaults))  # type: ignore[arg-type]


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
