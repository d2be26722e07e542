"""Check before training that all ranks have the same configuration, code and data."""

from collections.abc import Mapping
from typing import Any

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError


def check_agreement(run: Runtime, description: Mapping[str, Any]) -> None:
    """Check that all ranks are about to run the same. Collective.

    Args:
        run: this rank's Runtime.
        description: what this rank is about to run, from `describe_run`.

    Raises:
        ConfigError: the ranks do not agree. Every rank raises it.
    """
    if disagreement := find_disagreement(run.gather(description)):
        raise ConfigError(disagreement)


def find_disagreement(descriptions: list[Mapping[str, Any]]) -> str | None:
    """Compare the descriptions of all ranks.

    Args:
        descriptions: of each rank, in rank order, from `describe_run`.

    Returns:
        A sentence that names the differences and the ranks; None if all ranks agree.
    """
    names = list(dict.fromkeys(name for each in descriptions for name in each))
    differences = [name for name in names if any(each.get(name) != descriptions[0].get(name) for each in descriptions)]
    if not differences:
        return None
    parts = [f"{name} is {describe_values([each.get(name) for each in descriptions])}" for name in differences[:3]]
    more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
    return f"the ranks do not agree: {'; '.join(parts)}{more}: start every node with the same command, code and data"


def describe_values(values: list[Any]) -> str:
    """Return which ranks have which value, such as "1337 on ranks 0, 1 and 7 on ranks 2, 3".

    Args:
        values: of each rank, in rank order.
    """
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_by_value.setdefault(str(value), []).append(rank)
    return " and ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
        + (", ..." if len(ranks) > 8 else "")
        for value, ranks in ranks_by_value.items()
    )
