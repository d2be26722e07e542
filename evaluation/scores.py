"""The scores of all problems: fractions of right answers, pass@k and cell accuracy."""

import math
from collections.abc import Sequence
from typing import Any


def list_pass_at(attempts: int) -> list[int]:
    """Return each k of pass@k: the powers of two up to the number of attempts, 10, 100, and this number."""
    known = {2**i for i in range(attempts.bit_length())} | {10, 100, attempts}
    return sorted(k for k in known if k <= attempts)


def estimate_pass_at(attempts: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, the probability that one of k attempts is right (Chen et al. 2021).

    It is the fraction of all choices of k of the `attempts`, of which `right` are right, that contain a right one.
    """
    return 1.0 - math.comb(attempts - right, k) / math.comb(attempts, k)


def summarize(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the scores over the lines of finished problems. Omit a score if no problem has it.

    Returns:
        accuracy: the fraction of problems whose first attempt is right.
        pass_at: for each k of `list_pass_at`, the mean probability that one of k attempts is right.
        cell_accuracy: the mean fraction of equal cells of ARC grids, first attempts.
        cut_off: the number of answers that reached the largest number of tokens (`--tokens`) before they ended.
    """
    scores: dict[str, Any] = {"problems": len(lines)}
    graded = [line for line in lines if "is_right" in line]
    if graded:
        scores["right"] = sum(line["is_right"] for line in graded)
        scores["accuracy"] = scores["right"] / len(graded)
    sampled = [line["attempts"] for line in graded if "attempts" in line]
    if sampled:
        n = min(map(len, sampled))
        right = [sum(attempt["is_right"] for attempt in attempts) for attempts in sampled]
        scores["pass_at"] = {
            str(k): sum(estimate_pass_at(len(a), r, k) for a, r in zip(sampled, right, strict=True)) / len(sampled)
            for k in list_pass_at(n)
        }
    if cells := [line["cell_accuracy"] for line in lines if "cell_accuracy" in line]:
        scores["cell_accuracy"] = sum(cells) / len(cells)
    if cut_off := sum(line.get("cut_off", 0) for line in lines):
        scores["cut_off"] = cut_off
    return scores
