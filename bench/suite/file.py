"""What a suite's file says, and what none can say."""

import itertools
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from bench.matrix.cells import PHASES
from bench.suite.report import METRICS
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import is_present, read_document
from nanoGPT.schema import Malformed, Within, check_schema

SUITES = Path(__file__).resolve().parent / "suites"
RESERVED = {"seed", "out_dir", "init_from", "device"}
MOST_RUNS = 10_000
SCALINGS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True)
class Suite:
    """What a suite's file says.

    Attributes:
        about: one sentence.
        phases, ranks, seeds: of each run one.
        metric: what is compared: one of METRICS.
        minutes: after which a run is ended.
        config: fields of the configuration that all runs share; what is not named is the machine's default.
        variants: by name, fields that differ; a phase that has no such field leaves the variant out.
        scale_batch: multiply the micro-batches of a step by the ranks.
        lr_scaling: of the learning rate with the sequences of a step over `reference_batch`: none, sqrt or linear.
    """

    name: str
    about: str
    phases: list[str]
    ranks: list[int]
    metric: str
    seeds: list[int] = field(default_factory=lambda: [1337])
    minutes: float = 60
    config: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"plain": {}})
    scale_batch: bool = False
    lr_scaling: str = "none"
    reference_batch: int = 0


class SuiteFile(TypedDict):
    """What a suite's file says: the fields of a Suite, without its name."""

    about: str
    phases: list[str]
    ranks: list[Annotated[int, Within(1, 2**20 - 1)]]
    metric: str
    seeds: NotRequired[list[Annotated[int, Within(0, 2**20 - 1)]]]
    minutes: NotRequired[float]
    config: NotRequired[dict[str, str | int | float | bool]]
    variants: NotRequired[dict[str, dict[str, str | int | float | bool]]]
    scale_batch: NotRequired[bool]
    lr_scaling: NotRequired[str]
    reference_batch: NotRequired[int]


def load(name: str) -> Suite:
    """Read a suite's file.

    Raises:
        ConfigError: no such suite, or a file that says what cannot be.
    """
    path = Path(name) if name.endswith(".toml") else SUITES / f"{name}.toml"
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: give a suite's file")
    if not is_present(path):
        names = sorted(path.stem for path in SUITES.glob("*.toml"))
        raise ConfigError(
            f"there is no suite {name}{did_you_mean(name, names) or ': give ' + ', '.join([*names, 'all'])}"
        )
    if not re.fullmatch(r"\w[\w.+=-]*", path.stem):  # of its directory and of its jobs
        raise ConfigError(f"{path}: name it in letters, digits and .+=_-, a letter or a digit first")
    if path.resolve().parent != SUITES and (SUITES / path.name).exists():
        raise ConfigError(f"{path}: this repository has a suite {path.stem}, and its runs are there: rename the file")
    try:
        said = tomllib.loads(read_document(path))
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, no regular file, or nested too deeply
        raise ConfigError(f"{path} is no TOML: {error}") from None
    allowed = {each.name: each for each in fields(Suite) if each.name != "name"}
    for key in said:
        if key not in allowed:
            raise ConfigError(f"{path}: {key} is no field of a suite{did_you_mean(key, list(allowed))}")
    missing = [key for key in ("about", "phases", "ranks", "metric") if key not in said]
    if missing:
        raise ConfigError(f"{path}: {missing[0]} is missing; bench/suite/suites/scaling.toml shows the form")
    try:
        check_schema(said, SuiteFile)
    except Malformed as error:
        raise ConfigError(f"{path}: {error}; bench/suite/suites/scaling.toml shows the form") from None
    suite = Suite(path.stem, **said)
    check_values(suite, path)
    return suite


def check_values(suite: Suite, path: Path) -> None:
    """Refuse values of the right type that no suite can have.

    Raises:
        ConfigError: names the field, and what it must be.
    """
    choices = (
        ("phases", suite.phases, list(PHASES)),
        ("metric", [suite.metric], list(METRICS)),
        ("lr_scaling", [suite.lr_scaling], list(SCALINGS)),
    )
    for name, values, known in choices:
        for value in values:
            if value not in known:
                raise ConfigError(f"{path}: {name} = {value!r} cannot be: give {', '.join(known)}")
    for name in ("phases", "ranks", "seeds", "variants"):
        if not getattr(suite, name):
            raise ConfigError(f"{path}: {name} is empty")
    runs = len(suite.phases) * len(suite.ranks) * len(suite.seeds) * len(suite.variants)
    if runs > MOST_RUNS:
        raise ConfigError(f"{path} asks for {runs:,} runs: give at most {MOST_RUNS:,}, in several suites if need be")
    for name in ("phases", "ranks", "seeds"):
        for value, times in Counter(getattr(suite, name)).items():
            if times > 1:
                raise ConfigError(f"{path}: {name} has {value} twice: give each once")
    for name in suite.variants:
        if not re.fullmatch(r"[\w.+=-]+", name):
            raise ConfigError(f"{path}: variants.{name} must be a table, named in letters, digits and .+=_-")
    for name in RESERVED & {*suite.config, *itertools.chain(*suite.variants.values())}:
        raise ConfigError(f"{path}: {name} is set by the suite; take it out of config and variants")
    if not 0 < suite.minutes < 60 * 24 * 365:
        raise ConfigError(f"{path}: minutes must be more than 0, and less than a year's")
    if suite.lr_scaling != "none" and suite.reference_batch < 1:
        raise ConfigError(f"{path}: lr_scaling needs reference_batch, the sequences a step for which the rate is meant")
