"""Read and check the TOML file of a suite."""

import itertools
import math
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from bench.suite.metrics import METRICS
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import is_present, read_document
from nanoGPT.schema import Range, SchemaError, check_schema
from workshop.phases import PHASES

SUITES = Path(__file__).resolve().parent / "suites"
RESERVED_FIELDS = {"seed", "out_dir", "init_from", "device"}
MAX_RUNS = 10_000
SCALINGS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True)
class Suite:
    """A suite: one run per combination of phase, rank count, variant and seed.

    Attributes:
        about: description in one sentence.
        metrics: the metrics to compare, of METRICS.
        minutes: time limit of each run.
        config: configuration fields that all runs share; other fields have their defaults.
        variants: configuration fields of each variant, by name. A phase without such a field skips the variant.
        by_ranks: configuration fields, and `minutes`, that replace those above on some number of ranks.
        target_loss: the validation loss of the metrics that end with _to_loss.
        scale_batch: multiply gradient_accumulation_steps by the number of ranks.
        lr_scaling: none, sqrt or linear: how the learning rates scale with sequences per step / `reference_batch`.
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
    by_ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    target_loss: float = 0.0
    scale_batch: bool = False
    lr_scaling: str = "none"
    reference_batch: int = 0


class SuiteFile(TypedDict):
    """Schema of a suite file: the fields of a Suite, without its name."""

    about: str
    phases: list[str]
    ranks: list[Annotated[int, Range(1, 2**20 - 1)]]
    metrics: list[str]
    seeds: NotRequired[list[Annotated[int, Range(0, 2**20 - 1)]]]
    minutes: NotRequired[float]
    config: NotRequired[dict[str, str | int | float | bool]]
    variants: NotRequired[dict[str, dict[str, str | int | float | bool]]]
    by_ranks: NotRequired[dict[str, dict[str, str | int | float | bool]]]
    target_loss: NotRequired[Annotated[float, Range(math.nextafter(0, 1))]]
    scale_batch: NotRequired[bool]
    lr_scaling: NotRequired[str]
    reference_batch: NotRequired[int]


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
        raise ConfigError(
            f"there is no suite {name}{did_you_mean(name, names) or ': use one of ' + ', '.join([*names, 'all'])}"
        )
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
    choices = (
        ("phases", suite.phases, list(PHASES)),
        ("metrics", suite.metrics, list(METRICS)),
        ("lr_scaling", [suite.lr_scaling], list(SCALINGS)),
    )
    for name, values, allowed in choices:
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
    for minutes in (suite.minutes, *(values.get("minutes", 1) for values in suite.by_ranks.values())):
        if isinstance(minutes, bool | str) or not 0 < minutes < 60 * 24 * 365:
            raise ConfigError(f"{path}: minutes = {minutes} is out of range: use more than 0 and less than one year")
    check_by_ranks(suite, path)
    if needs_target := [name for name in suite.metrics if METRICS[name].needs_target]:
        if not suite.target_loss:
            raise ConfigError(f"{path}: metric {needs_target[0]} needs target_loss: a validation loss, such as 2.0")
    elif suite.target_loss:
        raise ConfigError(f"{path}: target_loss is not used: add a metric such as steps_to_loss, or remove it")
    if suite.lr_scaling != "none" and suite.reference_batch < 1:
        raise ConfigError(f"{path}: lr_scaling needs reference_batch: the sequences per step that learning_rate is for")


def list_fields(suite: Suite) -> list[str]:
    """Return the configuration fields that a suite sets in config, variants or by_ranks."""
    by_ranks = [name for name in itertools.chain(*suite.by_ranks.values()) if name != "minutes"]
    return list(dict.fromkeys([*suite.config, *itertools.chain(*suite.variants.values()), *by_ranks]))


def check_by_ranks(suite: Suite, path: Path) -> None:
    """Check that by_ranks names rank counts of the suite, and no field that a variant sets to compare it.

    Raises:
        ConfigError: it does not.
    """
    for ranks, fields_of_ranks in suite.by_ranks.items():
        if ranks not in map(str, suite.ranks):
            raise ConfigError(f"{path}: by_ranks.{ranks} is not in ranks = {suite.ranks}: add it there, or remove it")
        for variant, fields_of_variant in suite.variants.items():
            for name in fields_of_ranks.keys() & fields_of_variant.keys():
                raise ConfigError(f"{path}: {name} is in by_ranks.{ranks} and variants.{variant}: keep only one")
