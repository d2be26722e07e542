"""Generate the table that compares the phases, and the decision tree. All three IMPLEMENTATION.md contain it."""

from collections.abc import Callable
from typing import Any

from bench.tables.records import TRAINERS, format_table, hardware_of, read_results
from nanoGPT.memory.tracker import STATE
from workshop.diff import find_hunks
from workshop.phases import PHASES

RANKS = 8  # of the memory and of the largest model
SPEED_RANKS = 2  # as many ranks as the machine of the results has cores
LARGEST_GPU = "h100"
COMPILED = {
    "baseline": "the full model",
    "phase1": "block by block",
    "phase2": "the full model",
    "phase3": "block by block",
}
BEST_FOR = {
    "baseline": "models that fit, and debugging",
    "phase1": "models that almost fit; slow links",
    "phase2": "learning Triton; expected, not measured: less memory for the loss head, and speed on GPUs",
    "phase3": "models that do not fit",
}

DECISION_TREE = """
Which phase? Stop at the first answer that fits (`make plan` computes all of it):

```
Do the activations of one micro-batch alone fit?
  no:  use a smaller --batch_size with more --gradient_accumulation_steps. At --batch_size=1: phase 3, see below.
  yes: Does the full model state, 16P bytes, fit next to the activations?
         yes: baseline.  Does a profile show much time in LayerNorm, GELU or the loss? Then use phase 2.
         no:  Does the model state of ZeRO-1, 8P + 8P/N bytes, fit?
                yes: phase 1.  It sends no more than DDP.
                no:  Does that of ZeRO-2, 4P + 12P/N bytes, fit, with one micro-batch per rank and step?
                       yes: phase 1 with --zero_stage=2.
                       no:  phase 3.  Is the memory still too small?
                              --kernels=loss, then --fsdp_activation_checkpointing=selective, then full.
                              Still too small: --fsdp_cpu_offload=True, or more GPUs.
```
"""


def phases_table() -> str:
    """Return memory by category of GPT-2 124M, relative speed, the largest model and the size of each phase's diff."""
    memory = read_results("gpt2-matrix")[0]
    found = read_results("largest")[0]["samples"]["results"]
    largest = next(each["rows"] for each in found if (each["gpu"], each["gpus"]) == (LARGEST_GPU, RANKS))
    by_phase = {(row["phase"], row["ranks"]): row for row in memory["samples"]["rows"]}
    rows = [format_row(phase, by_phase, largest) for phase in PHASES]
    head = ["trainer", *(f"{category.replace('_', ' ')} (MB)" for category in STATE), "communication per rank (MB)"]
    head += ["speed relative to DDP", "largest model (billions of parameters)", "`--compile=True` compiles"]
    head += ["changes in train.py", "best for"]
    tokens = memory["settings"]["model"]["block_size"]
    lead = (
        f"The model is GPT-2 124M in fp32, with sequences of {tokens} tokens. State and communication are those of "
        f"rank 0 in one step on {RANKS} ranks. The speed is measured on {SPEED_RANKS} ranks, because the machine has "
        f"{SPEED_RANKS} cores: {hardware_of(memory)}. It says nothing about the speed on a GPU: here, phase 2 ran only "
        "its GELU kernel, in Triton's interpreter. The largest model is a prediction of the planner for "
        f"{RANKS} x {LARGEST_GPU}.\n\n"
    )
    return lead + format_table(head, rows) + DECISION_TREE


def format_row(phase: str, by_phase: dict[tuple[str, int], dict[str, Any]], largest: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a phase.

    Args:
        phase: a key of PHASES.
        by_phase: rows of the matrix of GPT-2, by phase and number of ranks.
        largest: rows of the planner's largest models.
    """
    row = by_phase[phase, RANKS]
    speed = by_phase[phase, SPEED_RANKS]["tokens_per_second"] / by_phase["baseline", SPEED_RANKS]["tokens_per_second"]
    params = next(each["parameters"] for each in largest if each["phase"] == phase and not each["options"])
    hunks = find_hunks(PHASES[phase]) if phase != "baseline" else []
    size = f"{len(hunks)} hunks, {sum(len(hunk.added) for hunk in hunks)} added lines" if hunks else "-"
    cells = [f"{row['state_bytes'][category] / 1e6:.0f}" for category in STATE] + [f"{row['sent_bytes'] / 1e6:.0f}"]
    cells += [f"{speed:.2f}", f"{params / 1e9:.1f}", COMPILED[phase], size, BEST_FOR[phase]]
    return [TRAINERS[phase], *cells]


PHASE_TABLES: dict[str, Callable[[], str]] = {"phases": phases_table}
