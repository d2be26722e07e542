"""Compare the loss curves of two runs: helpers that several notebooks share."""

from collections.abc import Mapping

Curve = Mapping[int, float]  # the loss of each step


def compute_max_loss_difference(curve: Curve, baseline: Curve) -> float:
    """Return the largest difference of a loss curve from a baseline, over the steps of the baseline."""
    return max(abs(curve[step] - baseline[step]) for step in baseline)


def print_two_curves(
    resumed: Curve, uninterrupted: Curve, resumed_at: int, ranks_before: int, ranks_after: int
) -> float:
    """Print the losses of a run that was resumed on another number of ranks, next to an uninterrupted run.

    Args:
        resumed: losses of the run that was resumed.
        uninterrupted: losses of the run that has `ranks_before` ranks in every step.
        resumed_at: first step on `ranks_after` ranks. The curves must be identical before it.
        ranks_before: number of ranks before the checkpoint.
        ranks_after: number of ranks after it.

    Returns:
        The max loss difference.

    Raises:
        AssertionError: the curves differ before `resumed_at`.
    """
    print(f"step   {ranks_before} ranks, then {ranks_after}     {ranks_before} ranks")
    for step in uninterrupted:
        note = f"  <- resumed on {ranks_after} ranks here" if step == resumed_at else ""
        print(f"{step:4} {resumed[step]:17.8f} {uninterrupted[step]:11.8f}{note}")
    is_identical = all(resumed[step] == uninterrupted[step] for step in range(resumed_at))
    print(f"steps 0 to {resumed_at - 1} identical in every digit: {is_identical}")
    assert is_identical
    difference = compute_max_loss_difference(resumed, uninterrupted)
    print(f"max loss difference: {difference:.1e}")
    return difference
