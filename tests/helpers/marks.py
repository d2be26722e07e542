"""Marks of tests: slow cases, and the tests that start processes.

The latter are found from the functions that a test, its fixtures and its helpers call.
"""

import functools
import inspect
import subprocess
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from operate import ranks
from tests.helpers.programs import Program

PROCESS_STARTERS: list[Any] = [Program, ranks.start_ranks, subprocess]
SEARCHED_PACKAGES = ("tests.", "workshop.", "bench.", "operate.", "measure.", "evaluation.")


def mark_slow(*cases: Any) -> list[Any]:
    """Return cases of a parametrized test that run only with the slow tests. A tuple has a case's arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def find_names(code: CodeType) -> set[str]:
    """Return the names that a function and its inner functions use."""
    return set(code.co_names).union(*(find_names(const) for const in code.co_consts if isinstance(const, CodeType)))


def find_references(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that a function may call: its globals, and the attributes of our modules that it names."""
    names = find_names(function.__code__)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        if isinstance(value, ModuleType) and value.__name__.startswith(SEARCHED_PACKAGES):
            yield from (getattr(value, attribute) for attribute in names if hasattr(value, attribute))


@functools.cache
def starts_processes(function: Callable[..., Any]) -> bool:
    """Return whether a function can call one of PROCESS_STARTERS, directly or through other functions."""
    return reaches_starter(function, set())


def reaches_starter(function: Callable[..., Any], visited: set[Any]) -> bool:
    """Search a function for `starts_processes`.

    Args:
        visited: functions that were already searched; grows.
    """
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function in visited:
        return False
    visited.add(function)
    return any(
        reference in PROCESS_STARTERS or is_searched(reference) and reaches_starter(reference, visited)
        for reference in find_references(function)
        if reference is None or callable(reference) or isinstance(reference, ModuleType)
    )


def is_searched(reference: Any) -> bool:
    """Return whether an object is defined in one of SEARCHED_PACKAGES."""
    return (getattr(reference, "__module__", None) or "").startswith(SEARCHED_PACKAGES)


def list_functions(item: pytest.Function) -> Iterator[Callable[..., Any]]:
    """Yield the function of a test, and the functions of its fixtures."""
    yield item.function
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        yield from (definition.func for definition in definitions)
