"""Record the loss curves of trainers with a planted fault, next to the curve of the repository's own trainer.

Two processes train a small model with phase 1. A fault is an edit of one line, like those of the capstone exercise
(`workshop/exercises/chapters/capstone.py`), and replaces the code of the trainer on both ranks.
"""

import contextlib
import io
import json
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phase1_zero1 import train as trainer
from phase1_zero1.parallelize import Zero1Config
from workshop.exercises.chapters import capstone
from workshop.exercises.checking import load_answer, replace_target
from workshop.exercises.exercise import Mistake, plant_mistake
from workshop.exercises.measuring import shared_folder
from workshop.exercises.registry import find_exercise
from workshop.exercises.stubs import apply_mistake, render_code
from workshop.ranks import run_on_ranks

RANKS = 2
STEPS = 40
SETTINGS: dict[str, Any] = {
    **capstone.SETTINGS,
    "ledger": False,
    "max_iters": STEPS,
    "lr_decay_iters": STEPS,
    "eval_interval": STEPS // 4,
}


@dataclass(frozen=True)
class Exhibit:
    """A planted fault.

    Attributes:
        fault: what is wrong, as a clause.
        mistake: the edit that plants it.
        symptom: how to recognize it.
    """

    fault: str
    mistake: Mistake
    symptom: str


EXHIBITS = {
    "norm": Exhibit(
        "each rank clips by the gradient norm of its own shards",
        capstone.LOCAL_NORM,
        "Both losses of step 0 are right, because no update has happened yet. The gradient norm of step 0 is about a "
        "third of the right one: a rank sees only its own part of the gradient. So each rank clips too little, and the "
        "ranks clip by different factors.",
    ),
    "mask": Exhibit(
        "the attention has no causal mask",
        capstone.NO_MASK,
        "The validation loss differs already before step 0, when there has been no update: the forward pass is wrong. "
        "Do not wait for a loss that is too low. In these 40 steps the model does not learn to use the tokens that it "
        "should not see.",
    ),
    "same_data": Exhibit(
        "all ranks train on the same micro-batches",
        plant_mistake(
            "micro_batches = range(run.rank, config.gradient_accumulation_steps, run.world_size)",
            "micro_batches = range(0, config.gradient_accumulation_steps, run.world_size)",
            "",
        ),
        "The training loss of step 0 differs, but the validation loss before it does not. The forward pass is right, "
        "so the step has other data or other random numbers. The gradient norm differs much more than with other "
        "dropout masks, so it is the data.",
    ),
    "seeds": Exhibit(
        "the seed of the dropout masks depends on the rank",
        capstone.SEED_OF_RANK,
        "The training loss of step 0 differs a little, but the validation loss before it does not, because an "
        "evaluation has no dropout. The curve looks healthy, but it changes with the number of ranks.",
    ),
    "scale": Exhibit(
        "the loss is not divided by the number of micro-batches",
        plant_mistake(
            "scaler.scale_loss(loss / len(micro_batches)).backward()", "scaler.scale_loss(loss).backward()", ""
        ),
        "The gradient norm of step 0 is exactly twice the right one, and each rank has two micro-batches. Clipping and "
        "AdamW divide by the size of the gradient, so the loss curve hides the fault.",
    ),
}


def train_with_fault(name: str, path: str, steps: int) -> list[dict[str, Any]]:
    """Train on all ranks with a planted fault, and return the metrics of all steps. Collective.

    Args:
        name: of an exhibit; empty: the repository's own trainer.
        path: a Python file with the code of the trainer that contains the fault.
        steps: number of training steps.
    """
    warnings.simplefilter("ignore")
    if name:
        answer = load_answer(Path(path))
        for target in find_exercise("capstone").targets:
            replace_target(target, answer)
    with shared_folder() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train(Zero1Config(**{**SETTINGS, "max_iters": steps, "out_dir": str(folder)}))
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def record_curve(name: str, steps: int = STEPS) -> dict[str, list[Any]]:
    """Train with a fault, and return its curves.

    Returns:
        loss and grad_norm of each step, and val_loss: pairs of a step and the validation loss before it.
    """
    code = render_code(find_exercise("capstone"), is_stub=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trainer.py"
        path.write_text(apply_mistake(code, EXHIBITS[name].mistake) if name else code)
        lines = run_on_ranks(train_with_fault, RANKS, name, str(path), steps, show=False, timeout=600)[0]
    trained = [line for line in lines if line["loss"] is not None]
    return {
        "loss": [line["loss"] for line in trained],
        "grad_norm": [line["grad_norm"] for line in trained],
        "val_loss": [[line["step"], line["val_loss"]] for line in lines if line.get("val_loss") is not None],
    }


def record() -> dict[str, Any]:
    """Return the recording: the curves of the right trainer, and of each exhibit with its fault and its edit."""
    exhibits = []
    for name, exhibit in EXHIBITS.items():
        ((old, new),) = exhibit.mistake.edits
        texts = {"name": name, "fault": exhibit.fault, "symptom": exhibit.symptom, "old": old, "new": new}
        exhibits.append({**texts, **record_curve(name)})
    return {"ranks": RANKS, "steps": STEPS, "right": record_curve(""), "exhibits": exhibits}
