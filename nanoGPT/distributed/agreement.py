"""Compare, before training, what must be the same on all ranks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


def find_disagreement(described: list[Mapping[str, Any]]) -> str | None:
    """Compare what the ranks are about to run.

    Args:
        described: of each rank, in rank order; or what keeps a rank from running, as `{"refusal": sentence}`.

    Returns:
        A sentence that names what differs and on which ranks; None where all agree.
    """
    for rank, each in enumerate(described):
        if "refusal" in each:
            return f"rank {rank} cannot start: {each['refusal']}"
    names = list(dict.fromkeys(name for each in described for name in each))
    differences = [name for name in names if any(each.get(name) != described[0].get(name) for each in described)]
    if not differences:
        return None
    parts = [f"{name} is {describe_values([each.get(name) for each in described])}" for name in differences[:3]]
    more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
    return f"the ranks do not agree: {'; '.join(parts)}{more}: start every node with the same command, code and data"


def describe_values(values: list[Any]) -> str:
    """Return "1337 on ranks 0, 1 and 7 on ranks 2, 3" for the value of each rank."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(str(value), []).append(rank)
    return " and ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
        + (", ..." if len(ranks) > 8 else "")
        for value, ranks in by_value.items()
    )
