"""Build a configuration from the defaults of the device, config files, and --key=value flags.

    python train.py config/train_gpt2.py --batch_size=8 --compile=True
    python train.py --help

Later values override earlier ones. With `--init_from=resume`, the configuration in the checkpoint comes first, so a
resumed run needs only its `--out_dir`.
"""

import dataclasses
import json
import math
import os
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

import msgspec

from nanoGPT.checkpoint.manifest import choose_step, find_newest_run, read_manifests, step_directories
from nanoGPT.checkpoint.starting_point import find_model_name, read_weights, shape_fields
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import PACKAGE
from nanoGPT.job.program import command_line, expand_home, join_flag_values
from nanoGPT.model import MODULES, find_architecture, make_shape
from nanoGPT.observers import add_flags, find_default_observers
from nanoGPT.train_config import PRETRAINED, C, StepChoice, TrainConfig, field_names, find_device_defaults

RUN_FIELDS = {"out_dir", "resume_step", "eval_only", "observers"}  # apply to one start of a run, and are not resumed
CONFIG_VARIABLE = "NANOGPT_CONFIG"  # environment variable with the configuration as JSON


def parse(
    config_class: type[C],
    argv: list[str],
    trainer: Path,
    world_size: int = 1,
    file_values: Mapping[str, object] | None = None,
) -> C:
    """Build the configuration of a run from config files and flags.

    Args:
        config_class: `TrainConfig` or a phase's extension of it. The model and the observers add their flags.
        argv: the command-line arguments: config files and `--key=value` flags.
        trainer: the train.py that runs; config files are also looked up in its directory.
        world_size: number of ranks. The defaults are the same on 1, 2, 4 and 8 ranks.
        file_values: the values that the config files set, if they have been executed already; None executes them.

    Raises:
        ConfigError: an unknown name, a wrong type, or an unknown file.
        SystemExit: with code 0, after `--help`.
    """
    flags = [word for word in join_flag_values(argv) if not is_config_file(word)]
    if file_values is None:
        file_values = read_config_files(config_class, argv, trainer)
    model = find_model(config_class, flags, file_values)
    config_class = add_flags(config_class, find_observers(flags, file_values), model)
    check_names(config_class, flags)
    check_flags_of_models(config_class, [name_of_flag(flag) for flag in flags])
    given = {name_of_flag(flag) for flag in flags} | file_values.keys()
    defaults = find_device_defaults(config_class, world_size, uses_gpu(flags, file_values))
    config = parse_flags(config_class, {**defaults, "model": model, **file_values}, flags)
    if config.init_from == "resume":
        out_dir = find_run_to_resume(config_class, config.out_dir)
        defaults = load_saved_config(config_class, out_dir, config.resume_step)
        values = {**defaults, **file_values, "init_from": "resume"}
        config = dataclasses.replace(parse_flags(config_class, values, flags), out_dir=out_dir)
    else:
        check_given_shape(config, given)
    if "learning_rate" in given and "min_lr" not in given and 0 < config.learning_rate < math.inf:
        before = config_class(**defaults)
        config = dataclasses.replace(config, min_lr=config.learning_rate * (before.min_lr / before.learning_rate))
    return config


def check_given_shape(config: TrainConfig, given: set[str]) -> None:
    """Check that no flag contradicts the shape of the weights that a new run starts from.

    Sequences may be shorter than the context of the model.

    Args:
        config: of the run.
        given: the names of the fields that a flag or a config file sets.

    Raises:
        ConfigError: a flag does; the message names it.
    """
    shape = make_shape({**dataclasses.asdict(config), "vocab_size": 1})
    names = [name for name in shape_fields(shape, config) if name in given and name != "block_size"]
    names = [name for name in names if getattr(config, name) is not None]
    if not names or not (config.init_from in PRETRAINED or Path(config.init_from or "scratch").is_dir()):
        return
    shape = read_weights(config.init_from, step=config.resume_step).shape
    for name in names:
        if (value := getattr(config, name)) != (actual := getattr(shape, name)):
            raise ConfigError(f"--{name}={value}, but {config.init_from} has {name}={actual}: remove this setting")


def package_of(config_class: type[TrainConfig]) -> str:
    """Return the package of a trainer, such as phase3_fsdp, from the class of its configuration.

    The directory of the trainer can have any name in a copy of a phase.
    """
    trainer_class: Any = config_class
    trainer_class = getattr(trainer_class, "trainer_class", trainer_class)  # without the flags of observers
    modules = [each.__module__ for each in trainer_class.__mro__]
    return next(module.split(".")[0] for module in modules if module != "__main__")


def find_run_to_resume(config_class: type[TrainConfig], out_dir: str) -> str:
    """Return the directory to resume from: out_dir; if that is the default, the trainer's newest run.

    The directories of runs without an out_dir are named `out/<package>-<suffix>` (`choose_out_dir`).
    """
    if out_dir != TrainConfig.out_dir:
        return out_dir
    return str(find_newest_run(Path(out_dir).glob(f"{package_of(config_class)}-*")) or out_dir)


def check_names(config_class: type[TrainConfig], flags: list[str]) -> None:
    """Check that no flag is one of another trainer, which this trainer does not have.

    Raises:
        ConfigError: a flag is; the message says what to use instead.
    """
    for name in map(name_of_flag, flags):
        if name not in field_names(config_class) and (advice := config_class.FOREIGN_FLAGS.get(name)):
            raise ConfigError(f"--{name} is not a flag of this trainer: {advice}")


def check_flags_of_models(config_class: type, names: Iterable[str]) -> None:
    """Check that no name is a flag of a model that is not used.

    Raises:
        ConfigError: a name is.
    """
    for name in names:
        for model in MODULES if name not in field_names(config_class) else ():
            if name in field_names(find_architecture(model).Flags):
                raise ConfigError(f"--{name} is a flag of --model={model}: add --model={model}, or remove this setting")


def name_of_flag(flag: str) -> str:
    """Return the name of the field that a flag such as `--batch-size=4` sets."""
    return flag.removeprefix("--").split("=")[0].replace("-", "_")


def is_config_file(word: str) -> bool:
    return not word.startswith("-") and word.endswith(".py")


def read_config_files(config_class: type[TrainConfig], argv: list[str], trainer: Path) -> dict[str, object]:
    """Execute the config files of a command line and return the values that they set. Later files take precedence."""
    words = join_flag_values(argv)
    files = {
        path: execute(path) for path in (find_config_file(word, trainer) for word in filter(is_config_file, words))
    }
    together: dict[str, object] = {name: value for values in files.values() for name, value in values.items()}
    model = find_model(config_class, words, together)
    config_class = add_flags(config_class, find_observers(words, together), model)
    for path, values in files.items():
        together |= check_file_values(config_class, path, values)
    return together


def config_from_launcher(config_class: type[C]) -> C | None:
    """Return the configuration that a launcher passes in the environment; None without such a launcher."""
    if not (text := os.environ.get(CONFIG_VARIABLE)):
        return None
    values = json.loads(text)
    return add_flags(config_class, values["observers"], values["model"])(**values)


def find_config_file(name: str, trainer: Path) -> Path:
    """Return the path of a config file: in the current directory, else in the trainer's directory, else in nanoGPT/.

    Raises:
        ConfigError: none of these directories has the file.
    """
    for folder in (Path.cwd(), trainer.parent, PACKAGE):
        if (folder / name).is_file():
            return folder / name
    known = sorted({f"config/{p.name}" for folder in (trainer.parent, PACKAGE) for p in folder.glob("config/*.py")})
    raise ConfigError(f"there is no config file {name}{did_you_mean(name, known)} (available: {', '.join(known)})")


def execute(path: Path) -> dict[str, object]:
    """Execute a config file, which consists of `name = value` lines, and return the values that it sets.

    Modules, functions and classes are no settings. Names that begin with an underscore are left to the file.

    Raises:
        ConfigError: the file fails.
    """
    namespace: dict[str, object] = {"__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), namespace)  # bytes: Python finds the encoding
    except (Exception, SystemExit) as error:
        raise ConfigError(f"config file {path} does not run: {type(error).__name__}: {error}") from None
    values = {name: value for name, value in namespace.items() if not name.startswith("_")}
    values = {k: v for k, v in values.items() if not (isinstance(v, types.ModuleType) or callable(v))}
    if not values.get("wandb_log", True):  # the names of its run have no effect either
        values = {k: v for k, v in values.items() if k not in ("wandb_log", "wandb_project", "wandb_run_name")}
    return values


def check_file_values(config_class: type[TrainConfig], path: Path, values: dict[str, object]) -> dict[str, object]:
    """Return the values that a config file sets, in the types of their fields.

    Raises:
        ConfigError: a name is not a field, because a misspelled setting must not be ignored, or a value is invalid.
    """
    check_flags_of_models(config_class, values)
    for name in values:
        if name not in field_names(config_class):
            hint = did_you_mean(name, field_names(config_class)) or "; names of helpers begin with _"
            if advice := config_class.FOREIGN_FLAGS.get(name):
                hint = f": {advice}; names of helpers begin with _"
            raise ConfigError(f"config file {path} sets {name}, which is not a flag of this trainer{hint}")
    # The parser converts strings to the types of the fields.
    whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in values.items()}
    flags = [f"--{name}={value}" for name, value in whole.items()]
    parsed: TrainConfig = parse_flags(config_class, {}, flags, source=f"config file {path}: ")
    return {name: getattr(parsed, name) for name in values}


def find_value(name: str, flags: list[str], file_values: Mapping[str, object]) -> object | None:
    """Return the value of a field before the flags are parsed; None if neither a flag nor a config file sets it."""
    values = [expand_home(name, flag.split("=", 1)[1]) for flag in flags if flag.startswith(f"--{name}=")]
    return values[-1] if values else file_values.get(name)


def find_model(config_class: type[TrainConfig], flags: list[str], file_values: Mapping[str, object]) -> str:
    """Return the name of the model, whose flags the parser must know: that of the flags, else of the weights."""
    if name := find_value("model", flags, file_values):
        return str(name)
    source = str(find_value("init_from", flags, file_values) or TrainConfig.init_from)
    if source == "resume":
        source = find_run_to_resume(config_class, str(find_value("out_dir", flags, file_values) or TrainConfig.out_dir))
    return find_model_name(source)


def find_observers(flags: list[str], file_values: Mapping[str, object]) -> str:
    """Return the names of the observers' modules, whose flags the parser must know."""
    names = find_value("observers", flags, file_values)
    return find_default_observers() if names is None else str(names)


def uses_gpu(flags: list[str], file_values: Mapping[str, object]) -> bool:
    """Return whether this run uses a GPU."""
    device = str(find_value("device", flags, file_values) or "auto")
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device.startswith("cuda")


def load_saved_config(config_class: type[TrainConfig], out_dir: str, step: StepChoice = None) -> dict[str, object]:
    """Return the configuration in the newest manifest of a run, or in that of one step, as a dictionary.

    The fields of RUN_FIELDS are left out. The dictionary is empty if the run has no manifest.

    Raises:
        ConfigError: there is no checkpoint of this step, or a field has a value of the wrong type.
    """
    names = {*field_names(config_class)} - RUN_FIELDS
    has_choice = step is not None and step_directories(Path(out_dir))
    chosen = choose_step(Path(out_dir), step) if has_choice else None
    for path, manifest in read_manifests(Path(out_dir)):
        if chosen not in (None, path):
            continue
        try:
            saved = msgspec.convert(manifest.get("config", {}), dict[str, Any])
            known = {name: value for name, value in saved.items() if name in names}
            schema = TypedDict("Saved", get_type_hints(config_class), total=False)  # type: ignore
            return msgspec.convert(known, schema)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{path}/manifest.json has no valid configuration ({error}): use another --out_dir"
            ) from None
    return {}


def parse_flags(config_class: type[C], defaults: dict[str, object], flags: list[str], source: str = "") -> C:
    """Return the configuration from defaults and flags. Error messages begin with `source`."""
    return command_line(config_class, flags, source, default=config_class(**defaults))  # type: ignore[arg-type]
