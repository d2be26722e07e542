"""Helpers of notebook 1: gradients as one vector, tables of loss curves, and a run to kill."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nanoGPT.files import PACKAGE
from workshop.lessons.loss_curves import Curve, compute_max_loss_difference


def pop_gradient(model: torch.nn.Module) -> Tensor:
    """Return the gradients of all parameters as one 1-D tensor, and reset them."""
    flat_gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat_gradient


def compare_with_one_rank(curves: Mapping[int, Curve]) -> float:
    """Return the max loss difference of all curves from the curve of 1 rank."""
    return max(compute_max_loss_difference(curve, curves[1]) for curve in curves.values())


def print_curves(curves: Mapping[int, Curve]) -> None:
    """Print the losses of each step on 1, 2 and 4 ranks, one line per step."""
    print("step      1 rank     2 ranks     4 ranks")
    for step in curves[1]:
        print(f"{step:4}" + "".join(f"{curves[ranks][step]:12.8f}" for ranks in curves))
    print(f"max loss difference: {compare_with_one_rank(curves):.1e}")


def make_train_command(python: str, out_dir: str, *flags: str) -> list[str]:
    """Return the command `python nanoGPT/train.py --out_dir=...` as a list of arguments."""
    return [python, str(PACKAGE / "train.py"), f"--out_dir={out_dir}", *flags]


def count_logged_lines(run: Path) -> int:
    """Return the number of lines that a run has written to its metrics.jsonl."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def print_resumed_curve(resumed: Curve, uninterrupted: Curve, resumed_at: int) -> None:
    """Print every digit of the losses of a resumed and an uninterrupted run, one line per step."""
    print("step  killed and resumed   uninterrupted")
    for step in uninterrupted:
        note = "  <- resumed here" if step == resumed_at else ""
        print(f"{step:4}  {resumed[step]!r:<20} {uninterrupted[step]!r:<18}{note}".rstrip())
    print("identical in every digit:", resumed == uninterrupted)
