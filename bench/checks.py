"""Format the results of checks, with a remedy below each problem."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Result = Literal["pass", "warn", "fail", "skip"]
WIDTH = 120  # of a line of the table


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        subject: what was checked, in a few words.
        result: `warn` does not stop a run, `fail` does, and `skip` means that this machine cannot run the check.
        finding: what was found, with numbers and units.
        remedy: what to do; empty for `pass`.
    """

    subject: str
    result: Result
    finding: str
    remedy: str = ""


def format_check(check: Check, subject_width: int) -> str:
    """Return the lines of one check: the result, the subject, the finding, and below them the remedy."""
    start = f"{check.result:<5} {check.subject:<{subject_width}}  "
    indent = " " * len(start)
    lines = textwrap.wrap(check.finding, WIDTH - len(start)) or [""]
    lines += textwrap.wrap(f"-> {check.remedy}", WIDTH - len(start), subsequent_indent="   ") if check.remedy else []
    return start + f"\n{indent}".join(lines)


def report(checks: Iterable[Check], subject_width: int) -> list[Check]:
    """Print each check as soon as it is known, and return all."""
    known = []
    for check in checks:
        print(format_check(check, subject_width), flush=True)
        known.append(check)
    return known


def summarize(checks: Sequence[Check]) -> str:
    """Return how many checks have each result."""
    counts = {result: sum(check.result == result for check in checks) for result in ("pass", "warn", "fail", "skip")}
    return ", ".join(f"{count} {result}" for result, count in counts.items() if count)


def has_failed(checks: Sequence[Check]) -> bool:
    """Return whether any check failed."""
    return any(check.result == "fail" for check in checks)
