"""Objects that observe a run, so that nobody has to change train.py: `--observers=operate,my_company.metrics`.

An observer is a module with a class `Observer`, which extends the one of this file. The class may also be in the
submodule `observer` of a package: `operate` names `operate/observer.py`. If the module has a dataclass `Flags`, its
fields become flags of the trainer. Without `--observers`, the packages of SHELL observe the run if they are installed.

All ranks call the methods at the same moments and in the same order, so a method may use collectives. An error in a
method ends the run.
"""

import dataclasses
import datetime
import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from nanoGPT.errors import ConfigError

SHELL = ("operate", "measure")

F = TypeVar("F", bound="Flags")


@dataclass
class Flags:
    """Flags of a trainer. The configuration of a trainer and the flags of an observer extend this class."""

    @property
    def timeout(self) -> datetime.timedelta:
        """How long ranks wait for each other, at the start and in every collective."""
        return datetime.timedelta(minutes=30)

    def check(self, world_size: int) -> None:
        """Check combinations of values that the types of the fields allow. Called before any rank starts.

        Raises:
            ConfigError: a combination is not supported.
        """


class Observer:
    """Observes a run, which calls these methods in this order. By default, they do nothing.

    Args:
        config: the configuration of the run. It has the flags of all observers.

    Attributes:
        run: this rank's Runtime, from `start` on. `run.request_stop(reason)` and `run.request_save()` ask for a stop
            and for a save. One rank is enough: about a second later, all ranks follow at the end of the same step.
    """

    run: Any

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def configure(cls, config: Any) -> Any:
        """Return the configuration to use instead, before the ranks meet. Every rank must return the same."""
        return config

    def start(self, run: Any) -> None:
        """Begin to observe: the ranks have met, and no other run uses the output directory."""
        self.run = run

    def build(self, model: nn.Module, optimizer: Optimizer, first_step: int) -> None:
        """See the model and the optimizer, with the state from which training begins or goes on."""

    def enter_stage(self, stage: str, step: int) -> None:
        """See that this rank begins a stage: build, evaluate, a micro-batch, update or save."""

    def begin_step(self, step: int) -> None:
        """See that a training step begins."""

    def end_step(self, step: int, loss_sum: Tensor, grad_norm: Tensor) -> None:
        """See the results of a training step: the sum of this rank's losses, and the global gradient norm."""

    def log(self, line: dict[str, Any]) -> None:
        """See a line of metrics, to which rank 0 may add fields: metrics.jsonl gets them too.

        The loss is the mean over all ranks.
        """

    def save(self, step: int, path: Path) -> None:
        """See that a checkpoint is saved after `step` updates. An asynchronous save has only begun."""

    def explain(self, error: BaseException) -> str | None:
        """Return one sentence for the user that explains an error that ends the run; None: it needs none."""

    def end(self, error: BaseException | None) -> None:
        """See the end of the run, and the error that ended it."""


class Observers(Observer):
    """The observers of a run, as one.

    Args:
        config: the configuration; `config.observers` has the names of their modules. None: no observers yet.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        modules = find_modules(config.observers) if config else []
        self.members: list[Observer] = [module.Observer(config) for module in modules]

    def start(self, run: Any) -> None:
        for each in self.members:
            each.start(run)

    def build(self, model: nn.Module, optimizer: Optimizer, first_step: int) -> None:
        for each in self.members:
            each.build(model, optimizer, first_step)

    def enter_stage(self, stage: str, step: int) -> None:
        for each in self.members:
            each.enter_stage(stage, step)

    def begin_step(self, step: int) -> None:
        for each in self.members:
            each.begin_step(step)

    def end_step(self, step: int, loss_sum: Tensor, grad_norm: Tensor) -> None:
        for each in self.members:
            each.end_step(step, loss_sum, grad_norm)

    def log(self, line: dict[str, Any]) -> None:
        for each in self.members:
            each.log(line)

    def save(self, step: int, path: Path) -> None:
        for each in self.members:
            each.save(step, path)

    def explain(self, error: BaseException) -> str | None:
        return next(filter(None, (each.explain(error) for each in self.members)), None)

    def end(self, error: BaseException | None) -> None:
        for each in reversed(self.members):
            each.end(error)


def find_shell() -> str:
    """Return the names of the packages of SHELL that are installed, as a value of `--observers`."""
    return ",".join(name for name in SHELL if importlib.util.find_spec(name))


@cache
def find_modules(names: str) -> list[ModuleType]:
    """Return the modules of the observers in a value of `--observers`.

    Raises:
        ConfigError: a module cannot be imported, or has no class `Observer`.
    """
    modules = []
    for name in filter(None, names.split(",")):
        try:
            module = importlib.import_module(name)
            if not hasattr(module, "Observer"):
                module = importlib.import_module(f"{name}.observer")
        except ImportError as error:
            raise ConfigError(
                f"--observers={names}: {name} is no module with a class Observer ({error}): correct the name, or "
                "start the trainer where Python finds the module"
            ) from None
        modules.append(module)
    return modules


def read_flags(config: Any, flags_class: type[F]) -> F:
    """Return the flags of an observer; their defaults if the configuration was created without them."""
    names = [field.name for field in dataclasses.fields(flags_class) if hasattr(config, field.name)]
    return flags_class(**{name: getattr(config, name) for name in names})


def add_flags(config_class: type[F], names: str) -> type[F]:
    """Return the configuration class of a trainer with the flags of its observers.

    Args:
        config_class: of the trainer.
        names: a value of `--observers`.

    Raises:
        ConfigError: two of them have a flag of the same name.
    """
    trainer_class: Any = config_class
    return create_class(getattr(trainer_class, "trainer_class", trainer_class), names)


@cache
def create_class(config_class: Any, names: str) -> Any:
    """Return the class for `add_flags`, the same at every call."""
    parts = [module.Flags for module in find_modules(names) if hasattr(module, "Flags")]
    owners: dict[str, type] = {}
    for part in (config_class, *parts):
        for field in dataclasses.fields(part):
            if owners.setdefault(field.name, part) is not part:
                raise ConfigError(f"--observers={names}: --{field.name} exists already, so rename it in {part}")
    if not parts:
        return config_class

    def check(config: Any, world_size: int) -> None:
        for part in (*parts, config_class):
            part.check(config, world_size)

    namespace = {
        "check": check,
        "trainer_class": config_class,
        "observer_names": names,
        "__reduce__": reduce_config,
        "__module__": config_class.__module__,
    }
    return dataclasses.make_dataclass(config_class.__name__, [], bases=(*parts, config_class), namespace=namespace)


def reduce_config(config: Any) -> tuple[Any, ...]:
    """Return how to pickle a configuration whose class `add_flags` has created."""
    return create_config, (config.trainer_class, config.observer_names, vars(config))


def create_config(config_class: type[F], names: str, values: dict[str, Any]) -> F:
    """Return a configuration with the flags of these observers."""
    return add_flags(config_class, names)(**values)
