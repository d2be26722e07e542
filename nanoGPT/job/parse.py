"""Build a configuration: the machine's defaults, then a named config file, then --key=value flags.

    python nanoGPT/train.py config/train_gpt2.py --batch_size=8 --compile=True
    python nanoGPT/train.py --help

Later words win. On `--init_from=resume` the configuration that the checkpoint was written with comes first, so a
resumed run needs nothing but its `--out_dir`.
"""

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoGPT.checkpoint.manifest import manifests
from nanoGPT.cli.command_line import command_line, join_flag_values
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import PACKAGE
from nanoGPT.schema import Malformed, check_schema
from nanoGPT.train_config import GPU_DEFAULTS, C, TrainConfig, field_names

CONFIG_VARIABLE = "NANOGPT_CONFIG"  # environment variable: the configuration as JSON


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
    flags = [word for word in join_flag_values(argv) if not is_config_file(word)]
    check_names(config_class, flags)
    if from_files is None:
        from_files = read_config_files(config_class, argv, trainer)
    config = parse_flags(config_class, {**machine_defaults(flags, from_files), **from_files}, flags)
    if config.init_from == "resume":
        saved = saved_config(config_class, config.out_dir)
        saved.pop("out_dir", None)
        config = parse_flags(config_class, {**saved, **from_files, "init_from": "resume"}, flags)
    return config


def check_names(config_class: type, flags: list[str]) -> None:
    names = field_names(config_class)
    for flag in flags:
        name = flag.lstrip("-").split("=")[0].replace("-", "_")
        if flag.startswith("--") and name not in [*names, "help"]:
            close = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                f"unknown flag --{name}" + (f"; did you mean --{close[0]}?" if close else "; --help lists all flags")
            )


def is_config_file(word: str) -> bool:
    return not word.startswith("-") and word.endswith(".py")


def read_config_files(config_class: type, argv: list[str], trainer: Path) -> dict[str, object]:
    """Execute the config files of a command line and return what they set; later files win."""
    values: dict[str, object] = {}
    for name in filter(is_config_file, join_flag_values(argv)):
        values |= read_config_file(config_class, find_config_file(name, trainer))
    return values


def config_from_launcher(config_class: type[C]) -> C | None:
    """Return the configuration that `nanoGPT.launch` has put into this rank's environment; None without a launcher."""
    text = os.environ.get(CONFIG_VARIABLE)
    return config_class(**json.loads(text)) if text else None


def find_config_file(name: str, trainer: Path) -> Path:
    """Look up a config file in the current directory, then beside the trainer, then in nanoGPT/."""
    for folder in (Path.cwd(), trainer.parent, PACKAGE):
        if (folder / name).is_file():
            return folder / name
    known = sorted({f"config/{p.name}" for folder in (trainer.parent, PACKAGE) for p in folder.glob("config/*.py")})
    raise ConfigError(f"there is no config file {name}{did_you_mean(name, known)} (known: {', '.join(known)})")


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
                f"config file {path} sets {name}, which is no field{did_you_mean(name, field_names(config_class))}"
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
    for path, manifest in manifests(Path(out_dir)):
        try:
            saved = check_schema(manifest.get("config", {}), dict[str, Any])
            known = {name: value for name, value in saved.items() if name in field_names(config_class)}
            check_schema(known, config_class)
            return known
        except Malformed as error:
            raise ConfigError(f"{path}/manifest.json has no configuration ({error}): give another --out_dir") from None
    return {}


def parse_flags(config_class: type[C], defaults: dict[str, object], flags: list[str], source: str = "") -> C:
    """The configuration from defaults and flags; `source` goes before what is wrong with them."""
    return command_line(config_class, flags, source, default=config_class(**defaults))  # type: ignore[arg-type]
