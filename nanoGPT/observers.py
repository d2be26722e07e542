"""Call user-defined observers during a run, without a change to train.py: `--observers=operate,my_company.metrics`.

An observer is a module with a class `Observer`, which extends the one of this file. The class may also be in the
submodule `observer` of a package: `operate` names `operate/observer.py`. If the module has a dataclass `Flags`, its
fields become flags of the trainer. Without `--observers`, the DEFAULT_OBSERVERS that are installed observe the run.

All ranks call the methods at the same moments and in the same order, so a method may use collectives. There are three
exceptions: `prepare` runs before the process group exists, and after an error, `explain` and `end` may run on one
rank only. An error in a method ends the run.
"""

import dataclasses
import datetime
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from nanoGPT.errors import ConfigError
from nanoGPT.model import check_buffers, find_architecture

DEFAULT_OBSERVERS = ("operate", "measure")

F = TypeVar("F", bound="Flags")


@dataclass
class Flags:
    """Flags of a trainer. The configuration of a trainer and the flags of a model or an observer extend this class."""

    @property
    def timeout(self) -> datetime.timedelta:
        """Return how long ranks wait for each other, at the start and in every collective."""
        return datetime.timedelta(minutes=30)

    def check(self, world_size: int) -> None:
        """Check the values of the flags, before the ranks meet. Their types are already checked.

        Raises:
            ConfigError: a combination is not supported.
        """


class Observer:
    """Base class of observers. A run calls these methods; by default, they do nothing.

    Args:
        config: the configuration of the run. It has the flags of all observers.

    Attributes:
        run: this rank's Runtime; None before `start`. `run.request_stop(reason)` and `run.request_save()` ask for a
            stop and for a save. One rank is enough: about a second later, all ranks follow after the same step.
    """

    run: Any = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def prepare(self) -> None:
        """Handle the start of this process, before the ranks meet."""

    def configure(self, run: Any) -> None:
        """Change `config` in place, before anything is read. The ranks have met; all must make the same changes."""

    def start(self, run: Any) -> None:
        """Handle the start of the run: the ranks have met, and no other run uses the output directory."""
        self.run = run

    def build(self, model: nn.Module, optimizer: Optimizer, first_step: int) -> None:
        """Handle the model and the optimizer, which have the state from which training starts or resumes."""

    def enter_stage(self, stage: str, step: int) -> None:
        """Handle the start of a stage: build, evaluation, micro-batch, update or save."""

    def begin_step(self, step: int) -> None:
        """Handle the start of a training step."""

    def end_step(self, step: int, loss_sum: Tensor, grad_norm: Tensor) -> None:
        """Handle the end of a training step: the sum of this rank's losses, and the global gradient norm."""

    def log(self, line: dict[str, Any]) -> None:
        """Handle a line of metrics. Rank 0 may add fields to it, which are then written to metrics.jsonl too.

        The loss is the mean over all ranks.
        """

    def save(self, step: int, path: Path) -> None:
        """Handle a save after `step` updates. An asynchronous save has only begun, and `path` does not exist yet."""

    def explain(self, error: BaseException) -> str | None:
        """Return one sentence for the user that explains an error; None if this observer cannot explain it.

        It is not called for errors whose message is already complete, such as ConfigError.
        """

    def end(self, error: BaseException | None) -> None:
        """Handle the end of the run, and the error that ended it, or that an observer has raised at the end.

        `run` is None if it has not started.
        """


def call_all(name: str) -> Any:
    """Return a method that calls the method `name` of every member, in their order."""

    def call(self: "Observers", *args: Any) -> None:
        for each in self.members:
            getattr(each, name)(*args)

    return call


class Observers(Observer):
    """Calls each method on every observer of a run.

    Args:
        config: the configuration; `config.observers` has the names of their modules. None: no observers yet.
    """

    prepare = call_all("prepare")
    configure = call_all("configure")
    start = call_all("start")
    enter_stage = call_all("enter_stage")
    begin_step = call_all("begin_step")
    log = call_all("log")
    save = call_all("save")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        modules = find_modules(config.observers) if config else []
        self.members: list[Observer] = [module.Observer(config) for module in modules]

    def build(self, model: nn.Module, optimizer: Optimizer, first_step: int) -> None:
        """Call `build` on all observers, if checkpoints can store the model.

        Raises:
            ConfigError: the model has a buffer that they would not have.
        """
        check_buffers(model)
        for each in self.members:
            each.build(model, optimizer, first_step)

    def end_step(self, step: int, loss_sum: Tensor, grad_norm: Tensor) -> None:
        """Call `end_step` on all observers in reverse order, so that a measurement contains only what is inside it."""
        for each in reversed(self.members):
            each.end_step(step, loss_sum, grad_norm)

    def explain(self, error: BaseException) -> str | None:
        """Return the first explanation. An observer that fails here does not replace the error."""
        for each in self.members:
            try:
                if sentence := each.explain(error):
                    return sentence
            except Exception as failure:
                print_failure(failure)
        return None

    def end(self, error: BaseException | None) -> None:
        """Call `end` on all observers in reverse order. If one fails, the next ones see its error, and it is raised.

        An earlier error is not replaced.
        """
        failure: BaseException | None = None
        for each in reversed(self.members):
            try:
                each.end(error or failure)
            except BaseException as raised:
                if error or failure:
                    print_failure(raised)
                failure = failure or raised
        if failure and not error:
            raise failure


def print_failure(failure: BaseException) -> None:
    print(f"an observer failed at the end of the run: {type(failure).__name__}: {failure}", file=sys.stderr)


def find_default_observers() -> str:
    """Return those of DEFAULT_OBSERVERS that are installed, as a value of `--observers`."""
    find = importlib.util.find_spec
    return ",".join(name for name in DEFAULT_OBSERVERS if find(name) and find(f"{name}.observer"))


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
            is_observer, reason = issubclass(getattr(module, "Observer", object), Observer), "it has none"
        except ImportError as error:
            is_observer, reason = False, str(error)
        if not is_observer:
            raise ConfigError(
                f"--observers={names}: {name} is not a module with a class Observer(observers.Observer) ({reason}): "
                "correct the name or the class, or add its directory to PYTHONPATH"
            )
        if module in modules:
            raise ConfigError(f"--observers={names} names {module.__name__} twice: remove one of them")
        modules.append(module)
    return modules


def read_flags(config: Any, flags_class: type[F]) -> F:
    """Return the flags of an observer; their defaults if the configuration was created without them."""
    names = [field.name for field in dataclasses.fields(flags_class) if hasattr(config, field.name)]
    return flags_class(**{name: getattr(config, name) for name in names})


def add_flags(config_class: type[F], names: str, model: str = "gpt2") -> type[F]:
    """Return the configuration class of a trainer with the flags of its observers and of its model.

    Args:
        config_class: of the trainer. If it has the flags of other observers and of another model, these are replaced.
        names: a value of `--observers`.
        model: a value of `--model`.

    Raises:
        ConfigError: two of them have a flag of the same name.
    """
    trainer_class: Any = getattr(config_class, "trainer_class", config_class)
    modules = [find_architecture(model), *find_modules(names)]
    parts = (*(module.Flags for module in modules if hasattr(module, "Flags")), trainer_class)
    owners: dict[str, type] = {}
    for part in (trainer_class, *parts):  # a conflict is reported for the later one
        if not issubclass(part, Flags):
            raise ConfigError(f"{part.__module__}.Flags does not extend Flags: write `class Flags(observers.Flags)`")
        for field in dataclasses.fields(part):
            if owners.setdefault(field.name, part) is not part:
                raise ConfigError(f"{part.__module__} has a flag --{field.name}, which exists already: rename it there")

    def check(config: Any, world_size: int) -> None:
        for part in parts:
            part.check(config, world_size)

    namespace = {
        "check": check,
        "trainer_class": trainer_class,
        "__reduce__": lambda config: (create_config, (trainer_class, names, model, vars(config))),
        "__module__": trainer_class.__module__,  # from Python 3.12 on, dataclasses.make_dataclass would replace it
    }
    return dataclasses.dataclass(type(trainer_class.__name__, parts, namespace))


def create_config(config_class: type[F], names: str, model: str, values: dict[str, Any]) -> F:
    """Return a configuration with the flags of these observers and of this model, to unpickle it."""
    return add_flags(config_class, names, model)(**values)
