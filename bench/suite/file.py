"""Read and check the TOML file of a suite."""

import itertools
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from bench.phases import PHASES
from bench.suite.metrics import METRICS
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import is_present, read_document
from nanoGPT.schema import Meta, SchemaError, check_schema

SUITES = Path(__file__).resolve().parent / "suites"
RESERVED_FIELDS = {"seed", "out_dir", "init_from", "device"}
MAX_RUNS = 10_000


@dataclass(frozen=True)
class Suite:
    """A suite: one run per combination of phase, rank count, variant and seed.

    Attributes:
        about: description in one sentence.
        metrics: the metrics to compare, of METRICS.
        minutes: time limit of each run.
        config: configuration fields that all runs share; other fields have their defaults.
        variants: configuration fields of each variant, by name. A phase without such a field skips the variant.
        target_loss: the validation loss of the metrics that end with _to_loss.
        scale_batch: multiply gradient_accumulation_steps by the number of ranks.
    """

    name: str
    about: str
    phases: list[str]
    ranks: list[int]
    metrics: list[str]
    seeds: list[int] = field(default_factory=lambda: [1337])
    minutes: float = 60
    config: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"plain": {}})
    target_loss: float = 0.0
    scale_batch: bool = False


class SuiteFile(TypedDict):
    """Schema of a suite file: the fields of a Suite, without its name."""

    about: str
    phases: list[str]
    ranks: list[Annotated[int, Meta(ge=1, lt=2**20)]]
    metrics: list[str]
    seeds: NotRequired[list[Annotated[int, Meta(ge=0, lt=2**20)]]]
    minutes: NotRequired[Annotated[float, Meta(gt=0, le=60 * 24 * 365)]]
    config: NotRequired[dict[str, str | int | float | bool]]
    variants: NotRequired[dict[str, dict[str, str | int | float | bool]]]
    target_loss: NotRequired[Annotated[float, Meta(gt=0)]]
    scale_batch: NotRequired[bool]


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
    if not re.fullmatch(r"\w[\w.+=-]*", path.stem):  # directories and Slurm jobs have this name
        raise ConfigError(
            f"{path} has an invalid name: use letters, digits and .+=_-, and begin with a letter or digit"
        )
    if path.resolve().parent != SUITES and (SUITES / path.name).exists():
        raise ConfigError(f"{path} has the name of a built-in suite, which uses the same directory: rename the file")
    try:
        values = tomllib.loads(read_document(path))
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, not a regular file, or nested too deeply
        raise ConfigError(f"{path} is not a valid TOML file: {error}") from None
    allowed = {each.name: each for each in fields(Suite) if each.name != "name"}
    for key in values:
        if key not in allowed:
            raise ConfigError(f"{path}: {key} is not a field of a suite{did_you_mean(key, list(allowed))}")
    missing = [key for key in ("about", "phases", "ranks", "metrics") if key not in values]
    if missing:
        raise ConfigError(f"{path}: {missing[0]} is missing: add it, as in bench/suite/suites/scaling.toml")
    try:
        check_schema(values, SuiteFile)
    except SchemaError as error:
        raise ConfigError(f"{path}: {error}; bench/suite/suites/scaling.toml is a valid example") from None
    suite = Suite(path.stem, **values)
    check_values(suite, path)
    return suite


def check_values(suite: Suite, path: Path) -> None:
    """Check the values of a suite whose types are correct.

    Raises:
        ConfigError: a value is invalid; the message names the field and what it must be.
    """
    for name, values, allowed in (("phases", suite.phases, PHASES), ("metrics", suite.metrics, METRICS)):
        for value in values:
            if value not in allowed:
                raise ConfigError(f"{path}: {name} = {value!r} is unknown: use {', '.join(allowed)}")
    for name in ("phases", "ranks", "metrics", "seeds", "variants"):
        if not getattr(suite, name):
            raise ConfigError(f"{path}: {name} is empty: add at least one value")
    runs = len(suite.phases) * len(suite.ranks) * len(suite.seeds) * len(suite.variants)
    if runs > MAX_RUNS:
        raise ConfigError(f"{path} has {runs:,} runs, more than {MAX_RUNS:,}: split it into multiple suites")
    for name in ("phases", "ranks", "metrics", "seeds"):
        for value, count in Counter(getattr(suite, name)).items():
            if count > 1:
                raise ConfigError(f"{path}: {name} has {value} more than once: remove the duplicate")
    for name in suite.variants:
        if not re.fullmatch(r"[\w.+=-]+", name):
            raise ConfigError(f"{path}: variants.{name} is not a valid name: use letters, digits and .+=_-")
    for name in RESERVED_FIELDS & set(list_fields(suite)):
        raise ConfigError(f"{path}: {name} is set by the suite itself: remove it")
    if needs_target := [name for name in suite.metrics if METRICS[name].needs_target]:
        if not suite.target_loss:
            raise ConfigError(f"{path}: metric {needs_target[0]} needs target_loss: a validation loss, such as 2.0")
    elif suite.target_loss:
        raise ConfigError(f"{path}: target_loss is not used: add a metric such as steps_to_loss, or remove it")


def list_fields(suite: Suite) -> list[str]:
    """Return the configuration fields that a suite sets in config or variants."""
    return list(dict.fromkeys([*suite.config, *itertools.chain(*suite.variants.values())]))
