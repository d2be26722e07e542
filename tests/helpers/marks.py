"""Which tests start processes: found by what their code, and that of their fixtures and helpers, calls."""

import inspect
import subprocess
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.helpers.programs import Program
from workshop import ranks

STARTERS: list[Any] = [Program, ranks.start_ranks, subprocess]  # each test that can reach one of them starts processes
OURS = ("tests.", "workshop.", "bench.")


def names_in(code: CodeType) -> set[str]:
    """The names that a function uses, and those of functions that are defined in it."""
    return set(code.co_names).union(*(names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def called(function: FunctionType) -> Iterator[Any]:
    """What a function may call: globals that it names, and attributes of modules that it names."""
    names = names_in(function.__code__)
    for name in names & function.__globals__.keys():
        found = function.__globals__[name]
        yield found
        if isinstance(found, ModuleType) and found.__name__.startswith(OURS):
            yield from (getattr(found, each) for each in names if hasattr(found, each))


def starts_processes(function: Callable[..., Any], seen: set[Any]) -> bool:
    """Whether a function can reach one of STARTERS."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    return any(
        each in STARTERS or (getattr(each, "__module__", None) or "").startswith(OURS) and starts_processes(each, seen)
        for each in called(function)
        if each is None or callable(each) or isinstance(each, ModuleType)
    )


def functions_of(item: pytest.Function) -> Iterator[Callable[..., Any]]:
    """A test's own function, and those of the fixtures that it needs."""
    yield item.function
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        yield from (each.func for each in definitions)
