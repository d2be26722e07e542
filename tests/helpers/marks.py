"""Marks of tests."""

from typing import Any

import pytest


def mark_slow(*cases: Any) -> list[Any]:
    """Return cases of a parametrized test that run only with the slow tests. A tuple has a case's arguments."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
