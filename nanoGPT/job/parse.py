"""Build a configuration from the defaults of the device, config files, and --key=value flags.

    python train.py config/train_gpt2.py --batch_size=8 --compile=True
    python train.py --help

Later values override earlier ones. With `--init_from=resume`, the configuration in the checkpoint comes first, so a
resumed run needs only its `--out_dir`.
"""

import json
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nanoGPT.checkpoint.manifest import choose_step, find_newest_run, read_manifests
from nanoGPT.checkpoint.starting_point import load_sources
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import PACKAGE
from nanoGPT.job.program import HELP, Texts, collect_flags, convert_texts, expand_home, join_flag_values, print_help
from nanoGPT.observers import add_flags, find_default_observers
from nanoGPT.train_config import C, StepChoice, TrainConfig, field_names, find_device_defaults

RUN_FIELDS = {"out_dir", "resume_step", "eval_only", "observers"}  # apply to one start of a run, and are not resumed
CONFIG_VARIABLE = "NANOGPT_CONFIG"  # environment variable with the configuration as JSON


def parse(
    config_class: type[C],
    argv: list[str],
    trainer: Path,
    world_size: int = 1,
    from_files: Mapping[str, Texts] | None = None,
) -> C:
    """Build the configuration of a run from config files and flags.

    Args:
        config_class: `TrainConfig` or a phase's extension of it. The model and the observers add their flags.
        argv: the command-line arguments: config files and `--key=value` flags.
        trainer: the train.py that runs; config files are also looked up in its directory.
        world_size: number of ranks. The defaults are the same on 1, 2, 4 and 8 ranks.
        from_files: the values of the config files, if they have been executed already; None: execute them.

    Raises:
        ConfigError: an unknown name, a wrong type, or an unknown file.
        SystemExit: with code 0, after `--help`.
    """
    if from_files is None:
        from_files = read_config_files(argv, trainer)
    flags = collect_flags([word for word in join_flag_values(argv) if not (word in HELP or is_config_file(word))])
    sources: list[tuple[str, Texts]] = [*from_files.items(), ("", flags)]  # the name of the flags is ""
    texts = {name: expand_home(name, values[-1] or "") for _, each in sources for name, values in each.items()}

    # A model and observers add flags, so they are known before any other flag is read.
    init_from, out_dir = texts.get("init_from", config_class.init_from), texts.get("out_dir", TrainConfig.out_dir)
    saved_model = "gpt2"
    if init_from == "resume":
        out_dir = find_run_to_resume(config_class, out_dir)
        saved_model = str(load_saved_config(config_class, out_dir).get("model", saved_model))
    elif init_from != "scratch":
        saved_model = load_sources(f"--init_from={init_from}").find_model_name(init_from)
    model = texts.get("model") or saved_model
    config_class = add_flags(config_class, texts.get("observers", find_default_observers()), model)
    device = texts.get("device", "auto")
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    defaults = find_device_defaults(config_class, world_size, on_gpu) | {"model": model}

    values = dict[str, Any]()
    for file, file_texts in sources:
        if not file and HELP & {*argv}:
            print_help(config_class, config_class(**defaults | values))
        values |= read_values(config_class, file_texts, file)

    if init_from == "resume":
        defaults |= load_saved_config(config_class, out_dir, values.get("resume_step")) | {"init_from": "resume"}
        values["out_dir"] = out_dir
    if "learning_rate" in values and "min_lr" not in values:
        before = config_class(**defaults)
        defaults["min_lr"] = values["learning_rate"] * (before.min_lr / before.learning_rate)
    config = config_class(**defaults | values)
    if init_from not in ("resume", "scratch"):
        load_sources(f"--init_from={init_from}").check_given_shape(config, {*values})
    return config


def package_of(config_class: type[TrainConfig]) -> str:
    """Return the package of a trainer, such as phase3_fsdp, from the class of its configuration.

    The directory of the trainer can have any name in a copy of a phase.
    """
    modules = [each.__module__ for each in config_class.__mro__ if issubclass(each, TrainConfig)]
    return next(module.split(".")[0] for module in modules if module != "__main__")


def find_run_to_resume(config_class: type[TrainConfig], out_dir: str) -> str:
    """Return the directory to resume from: out_dir; if that is the default, the trainer's newest run.

    The directories of runs without an out_dir are named `out/<package>-<suffix>` (`choose_out_dir`).
    """
    if out_dir != TrainConfig.out_dir:
        return out_dir
    return str(find_newest_run(Path(out_dir).glob(f"{package_of(config_class)}-*")) or out_dir)


def read_values(config_class: type[TrainConfig], texts: Texts, file: str) -> dict[str, Any]:
    """Return the values of flags, or of the settings of a config file, in their types.

    Args:
        config_class: with the flags of the run.
        texts: the values as text.
        file: the path of the config file; "" for flags.

    Raises:
        ConfigError: a name is unknown, or a value has the wrong type. For a flag of another trainer, the message says
            what to use instead.
    """
    known = field_names(config_class)
    advice = {name: text for names, text in config_class.FOREIGN_FLAGS.items() for name in names.split()}
    try:
        for name in texts.keys() & advice.keys() - {*known}:
            raise ConfigError(f"--{name} is not a flag of this trainer: {advice[name]}")
        return convert_texts(config_class, texts)
    except ConfigError as error:
        helpers = "; names of helpers begin with _" if texts.keys() - {*known} else ""
        raise ConfigError(f"config file {file}: {error}{helpers}" if file else str(error)) from None


def is_config_file(word: str) -> bool:
    return not word.startswith("-") and word.endswith(".py")


def read_config_files(argv: list[str], trainer: Path) -> dict[str, Texts]:
    """Execute the config files of a command line, and return the values that each file sets, as text."""
    paths = [find_config_file(word, trainer) for word in join_flag_values(argv) if is_config_file(word)]
    return {str(path): execute(path) for path in paths}


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


def execute(path: Path) -> Texts:
    """Execute a config file, which consists of `name = value` lines, and return the values that it sets, as text.

    Modules, functions and classes are no settings. Names that begin with an underscore are left to the file.

    Raises:
        ConfigError: the file fails.
    """
    namespace: dict[str, object] = {"__file__": str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), namespace)  # bytes: Python finds the encoding
    except (Exception, SystemExit) as error:
        raise ConfigError(f"config file {path} does not run: {type(error).__name__}: {error}") from None
    ignored = {name for name, value in namespace.items() if isinstance(value, types.ModuleType) or callable(value)}
    if not namespace.get("wandb_log", True):
        ignored |= {"wandb_log", "wandb_project", "wandb_run_name"}  # the names of a run without a log have no effect
    settings = {k: v for k, v in namespace.items() if not (k.startswith("_") or k in ignored)}
    return {k: [f"{int(v) if isinstance(v, float) and v.is_integer() else v}"] for k, v in settings.items()}


def load_saved_config(config_class: type[TrainConfig], out_dir: str, step: StepChoice = None) -> dict[str, object]:
    """Return the configuration in the newest manifest of a run, or in that of one step, as a dictionary.

    The fields of RUN_FIELDS are left out. The dictionary is empty if the run has no manifest.

    Raises:
        ConfigError: there is no checkpoint of this step.
    """
    folder = Path(out_dir) if step is None else choose_step(Path(out_dir), step)
    manifest = next((manifest for _, manifest in read_manifests(folder)), {})
    names = {*field_names(config_class)} - RUN_FIELDS
    return {name: value for name, value in manifest.get("config", {}).items() if name in names}
