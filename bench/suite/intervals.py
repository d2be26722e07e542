"""Confidence intervals over seeds: of a mean, and of the mean difference of pairs."""

import math
import statistics
from collections.abc import Mapping

# 97.5% quantiles of Student's t distribution for 1, 2, 3, ... degrees of freedom: a suite has at most 10 seeds.
T_QUANTILES = [12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622]


def half_width(values: list[float]) -> float | None:
    """Return half the width of the 95% confidence interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return T_QUANTILES[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def paired_differences(values: Mapping[int, float | None], reference: Mapping[int, float | None]) -> list[float]:
    """Return the differences from a reference for each seed that both have.

    Runs with the same seed train on the same batches, so their differences vary less than their values.
    """
    pairs = [(value, reference.get(seed)) for seed, value in values.items()]
    return [a - b for a, b in pairs if a is not None and b is not None]
