"""Read and check the TOML file of a suite."""

import itertools
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from bench.suite.metrics import METRICS
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import is_present, read_document

SUITES = Path(__file__).resolve().parent / "suites"
RESERVED_FIELDS = {"seed", "out_dir", "init_from", "device"}
NAME = r"^\w[\w.+=-]*$"  # directories and Slurm jobs have such names

Phase = Literal["baseline", "phase1", "phase2", "phase3"]
Value = str | int | float | bool
NotEmpty = Meta(min_length=1)
Seed = Annotated[int, Meta(ge=0, lt=2**20)]


class Suite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A suite: one run per combination of phase, rank count, variant and seed.

    Attributes:
        about: description in one sentence.
        metrics: the metrics to compare, of METRICS.
        minutes: time limit of each run.
        config: configuration fields that all runs share; other fields have their defaults.
        variants: configuration fields of each variant, by name. A phase without such a field skips the variant.
    """

    name: Annotated[str, Meta(pattern=NAME)]
    about: str
    phases: Annotated[list[Phase], NotEmpty]
    ranks: Annotated[list[Annotated[int, Meta(ge=1, lt=2**20)]], NotEmpty]
    metrics: Annotated[list[str], NotEmpty]
    seeds: Annotated[list[Seed], Meta(min_length=1, max_length=10)] = msgspec.field(default_factory=lambda: [1337])
    minutes: Annotated[float, Meta(gt=0, le=60 * 24 * 365)] = 60
    config: dict[str, Value] = {}
    variants: Annotated[dict[Annotated[str, Meta(pattern=NAME)], dict[str, Value]], NotEmpty] = msgspec.field(
        default_factory=lambda: {"plain": {}}
    )


def load_suite(name: str) -> Suite:
    """Read a suite by its name, or from the path of a .toml file.

    Raises:
        ConfigError: the suite does not exist, or its file is invalid.
    """
    path = Path(name) if name.endswith(".toml") else SUITES / f"{name}.toml"
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: use the path of a suite file")
    if not is_present(path):
        names = sorted(path.stem for path in SUITES.glob("*.toml"))
        raise ConfigError(f"there is no suite {name}{did_you_mean(name, names) or ': use one of ' + ', '.join(names)}")
    try:
        values: dict[str, Any] = tomllib.loads(read_document(path))
        suite = msgspec.convert({**values, "name": path.stem}, Suite)
    except (ValueError, RecursionError) as error:  # of the file, of its syntax, or of a field: a ValidationError
        raise ConfigError(f"{path}: {error}; bench/suite/suites/scaling.toml is a valid example") from None
    for key, choices in (("phases", suite.phases), ("ranks", suite.ranks), ("seeds", suite.seeds)):
        if len({*choices}) < len(choices):
            raise ConfigError(f"{path}: {key} has a value more than once: remove the duplicate")
    if unknown := [metric for metric in suite.metrics if metric not in METRICS]:
        raise ConfigError(f"{path}: metrics = {unknown[0]!r} is unknown: use {', '.join(METRICS)}")
    for field in RESERVED_FIELDS & set(list_fields(suite)):
        raise ConfigError(f"{path}: {field} is set by the suite itself: remove it")
    return suite


def list_fields(suite: Suite) -> list[str]:
    """Return the configuration fields that a suite sets in config or variants."""
    return list(dict.fromkeys([*suite.config, *itertools.chain(*suite.variants.values())]))
