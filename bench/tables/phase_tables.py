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
    "phase2": "speed, and large vocabularies; learning Triton",
    "phase3": "models that do not fit",
}

DECISION_TREE = """
Which phase? Stop at the first answer that fits (`make plan` computes all of it):

```
Does the full model state, 16 bytes per parameter, fit next to the activations?
  yes: baseline.  Does a profile show much time in LayerNorm, GELU or the loss? Then phase 2.
  no:  Do 8P + 8P/N bytes fit?
         yes: phase 1.  It sends no more than DDP.
         no:  Do 4P + 12P/N bytes fit, and does a rank run only one micro-batch per step?
                yes: phase 1 with --zero_stage=2.
                no:  phase 3.  Are the activations still too large?
                       --kernels=loss, then --fsdp_activation_checkpointing=selective, then full.
                       Still too large: --fsdp_cpu_offload=True, or more GPUs.
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
    head += ["hunks and added lines in train.py", "best for"]
    tokens = memory["settings"]["model"]["block_size"]
    lead = (
        f"GPT-2 124M in fp32 on {RANKS} ranks, rank 0, one step with sequences of {tokens} tokens; the speed is that "
        f"of {SPEED_RANKS} ranks. Measured on {hardware_of(memory)}, where phase 2 ran only its GELU kernel, in "
        "Triton's interpreter: the speeds say nothing about a GPU. The planner predicts the largest model, for "
        f"{RANKS} x {LARGEST_GPU}:\n\n"
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
    size = f"{len(hunks)}, {sum(len(hunk.added) for hunk in hunks)}" if hunks else "-"
    cells = [f"{row['state_bytes'][category] / 1e6:.0f}" for category in STATE] + [f"{row['sent_bytes'] / 1e6:.0f}"]
    cells += [f"{speed:.2f}", f"{params / 1e9:.1f}", COMPILED[phase], size, BEST_FOR[phase]]
    return [TRAINERS[phase], *cells]


PHASE_TABLES: dict[str, Callable[[], str]] = {"phases": phases_table}
