"""What a suite's file says, and what none can say."""

import itertools
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.cells import PHASES
from bench.suite_report import METRICS
from nanoGPT.config import nearest
from nanoGPT.exits import ConfigError

SUITES = Path(__file__).resolve().parent / "suites"
RESERVED = {"seed", "out_dir", "init_from", "device"}
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


def load(name: str) -> Suite:
    """Read a suite's file.

    Raises:
        ConfigError: no such suite, or a file that says what cannot be.
    """
    path = Path(name) if name.endswith(".toml") else SUITES / f"{name}.toml"
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: give a suite's file")
    if not path.is_file():
        names = sorted(path.stem for path in SUITES.glob("*.toml"))
        raise ConfigError(f"there is no suite {name}{nearest(name, names) or ': give ' + ', '.join([*names, 'all'])}")
    if not re.fullmatch(r"\w[\w.+=-]*", path.stem):  # of its directory and of its jobs
        raise ConfigError(f"{path}: name it in letters, digits and .+=_-, a letter or a digit first")
    if path.resolve().parent != SUITES and (SUITES / path.name).exists():
        raise ConfigError(f"{path}: this repository has a suite {path.stem}, and its runs are there: rename the file")
    try:
        said = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    allowed = {each.name: each for each in fields(Suite) if each.name != "name"}
    for key in said:
        if key not in allowed:
            raise ConfigError(f"{path}: {key} is no field of a suite{nearest(key, list(allowed))}")
    missing = [key for key in ("about", "phases", "ranks", "metric") if key not in said]
    if missing:
        raise ConfigError(f"{path}: {missing[0]} is missing; bench/suites/scaling.toml shows the form")
    suite = Suite(path.stem, **said)
    check(suite, path)
    return suite


def check(suite: Suite, path: Path) -> None:
    """Refuse values that no suite can have."""
    shapes: dict[str, tuple[Any, str]] = {
        "about": (str, "a sentence"), "phases": (list, "a list"), "ranks": (list, "a list"), "seeds": (list, "a list"),
        "metric": (str, "a word"), "minutes": ((int, float), "a number"), "config": (dict, "a table"),
        "variants": (dict, "tables"), "scale_batch": (bool, "true or false"), "lr_scaling": (str, "a word"),
        "reference_batch": (int, "a number"),
    }  # fmt: skip
    for name, (kind, said) in shapes.items():
        value = getattr(suite, name)
        if not isinstance(value, kind) or (type(value) is bool and kind is not bool):
            raise ConfigError(f"{path}: {name} must be {said}")
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
    for name in ("ranks", "seeds"):
        if not all(type(value) is int and (name == "ranks") <= value < 2**20 for value in getattr(suite, name)):
            raise ConfigError(f"{path}: {name} must be whole numbers")
    for name in ("phases", "ranks", "seeds"):
        for value, times in Counter(getattr(suite, name)).items():
            if times > 1:
                raise ConfigError(f"{path}: {name} has {value} twice: give each once")
    for name, words in suite.variants.items():
        if not isinstance(words, dict) or not re.fullmatch(r"[\w.+=-]+", name):
            raise ConfigError(f"{path}: variants.{name} must be a table, named in letters, digits and .+=_-")
    for name in RESERVED & {*suite.config, *itertools.chain(*suite.variants.values())}:
        raise ConfigError(f"{path}: {name} is set by the suite; take it out of config and variants")
    if not 0 < suite.minutes < 60 * 24 * 365:
        raise ConfigError(f"{path}: minutes must be more than 0, and less than a year's")
    if suite.lr_scaling != "none" and suite.reference_batch < 1:
        raise ConfigError(f"{path}: lr_scaling needs reference_batch, the sequences a step for which the rate is meant")
