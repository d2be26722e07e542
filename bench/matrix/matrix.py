"""Compare every phase on 1, 2, 4 and 8 ranks, and every option on 2 or 4 ranks, with the baseline on one rank.

    make matrix                          # about two minutes on 2 cores; on a GPU machine, as many ranks as GPUs
    make matrix ARGS="--steps=50"        # longer runs
    make matrix ARGS="--model=gpt2 --steps=4"    # GPT-2 124M in every phase, without options

Each cell of the matrix trains the same small model. It measures the max loss difference from the baseline, the model
state and the communication volume per rank (compared with the formula), peak memory and time. The command prints one
row after each cell. At the end it writes bench/results/matrix-<hardware>.json, and `make matrix` updates the tables
of the documents. When ranks share cores, the times show only what a phase adds to a step, not what it saves.

GPT-2 124M trains on few tokens, and its result is gpt2-matrix-<hardware>.json. Cells are skipped if the planner
predicts that all ranks together need more memory than this machine has.
"""

import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from bench.matrix.cells import RunResult, make_config, matches_formula, run_cell
from bench.plan.trace import trace
from bench.tables.records import RESULTS, write_result
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPTConfig
from operate.ranks import RankFailed

MODEL: dict[str, Any] = {
    "dataset": "shakespeare_char",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "block_size": 32,
    "batch_size": 2,
    "gradient_accumulation_steps": 8,
    "learning_rate": 2e-3,
    "min_lr": 2e-4,
    "warmup_iters": 5,
    "eval_iters": 1,
    "dtype": "float32",
    "compile": False,
}
GPT2 = {"dataset": "shakespeare", "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 16, "batch_size": 1}
MODELS: dict[str, dict[str, Any]] = {
    "small": MODEL,
    "gpt2": {**MODEL, **GPT2, "learning_rate": 6e-4, "min_lr": 6e-5},
}
PROCESS_BYTES = 400e6  # memory of a rank's process without its tensors
MAX_LOSS_DIFFERENCE = {"float32": 1e-5, "bfloat16": 1e-2}
RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Cell:
    """A phase, a number of ranks, and the options that differ from the phase's defaults."""

    phase: str
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        short = [f"{name.removeprefix('fsdp_').removeprefix('zero1_')}={value}" for name, value in self.options.items()]
        return " ".join([self.phase, *short])


OPTIONS = [
    Cell("phase1", 2, {"zero1_backend": "naive"}),
    Cell("phase1", 2, {"zero1_backend": "torch"}),
    Cell("phase1", 2, {"zero_stage": 2}),
    Cell("phase1", 2, {"kernels": "triton"}),
    Cell("phase3", 2, {"fsdp_reshard_after_forward": False}),
    Cell("phase3", 4, {"fsdp_shard_size": "2"}),
    Cell("phase3", 2, {"fsdp_cpu_offload": True}),
    Cell("phase3", 2, {"fsdp_sync_every_micro_batch": True}),
    Cell("phase3", 2, {"fsdp_activation_checkpointing": "selective"}),
    Cell("phase3", 2, {"fsdp_activation_checkpointing": "full"}),
    Cell("phase3", 2, {"kernels": "triton"}),
    Cell("phase3", 2, {"dtype": "bfloat16"}),
]


def list_cells(max_ranks: int, model: str = "small", is_interpreted: bool = False) -> list[Cell]:
    """Return all cells with at most `max_ranks` ranks. The first one is the baseline on one rank.

    If kernels are interpreted, phase 2 trains GPT-2 with the GELU kernel only: the interpreted AdamW kernel alone
    would take a minute for GPT-2's parameters.
    """
    options_of_phase = {"phase2": {"kernels": "gelu"}} if model == "gpt2" and is_interpreted else {}
    phases = ("baseline", "phase1", "phase2", "phase3")
    plain = [Cell(phase, n, options_of_phase.get(phase, {})) for phase in phases for n in RANKS]
    options = OPTIONS if model == "small" else []
    return [cell for cell in [*plain, *options] if cell.ranks <= max_ranks]


def fits_in_memory(cell: Cell, fields: dict[str, Any]) -> bool:
    """Return whether all ranks of a cell together fit in the memory of this machine, as the planner predicts."""
    phase = "baseline" if cell.phase == "phase2" else cell.phase  # phase 2 adds only small workspaces
    peak = trace(make_config(phase, Path(), **fields), GPTConfig.from_dict(fields), cell.ranks).memory.peak
    needed = cell.ranks * (sum(peak.values()) + PROCESS_BYTES)
    return needed < 0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def make_row(cell: Cell, result: RunResult, reference: RunResult) -> dict[str, Any]:
    """Return a cell's row of the result file, which the table also uses. All bytes are those of rank 0.

    Args:
        reference: the run of the baseline on one rank.
    """
    ledger, collectives = result.rank_0, result.rank_0["collectives"]
    return {
        **asdict(cell),
        "gap": result.max_loss_difference(reference),
        "losses": list(result.curve.values()),
        "state_bytes": ledger["state_bytes"],
        "expected_state_bytes": ledger["expected_state_bytes"],
        "padding": ledger["padding"],
        "sent_bytes": sum(row["ring_bytes"] for row in collectives),
        "collectives": collectives,
        "as_expected": matches_formula(result.ledger),
        "peak": ledger["memory"]["peak"],
        "allocator_peak_bytes": ledger["memory"]["allocator_peak_bytes"],
        "step_ms": result.step_ms,
        "tokens_per_second": result.tokens_per_second,
    }


HEADER = (
    f"{'':<44}         max loss  state per  communication  matches the       peak\n"
    f"{'':<44} ranks difference  rank (kB)  per rank (kB)      formula memory (kB)    step  tokens/s"
)


def format_row(cell: Cell, row: dict[str, Any]) -> str:
    """Return a cell's line of the printed table, under HEADER."""
    state, peak = sum(row["state_bytes"].values()), sum(row["peak"].values())
    return (
        f"{cell.name:<44} {cell.ranks:>5} {row['gap']:>10.1e} {state / 1e3:>10,.1f} {row['sent_bytes'] / 1e3:>14,.1f}"
        f" {'yes' if row['as_expected'] else 'NO':>12} {peak / 1e3:>11,.1f}"
        f" {row['step_ms']:>4,.0f} ms {row['tokens_per_second']:>9,.0f}"
    )


def find_faults(cell: Cell, row: dict[str, Any]) -> list[str]:
    """Return one sentence for each property of a cell that breaks a promise of this project."""
    limit = MAX_LOSS_DIFFERENCE[cell.options.get("dtype", "float32")]
    faults = [f"max loss difference {row['gap']:.1e} is above the limit {limit:.0e}"] if not row["gap"] <= limit else []
    return faults + ([] if row["as_expected"] else ["model state or communication volume does not match the formula"])


def main(steps: int = 10, model: Literal["small", "gpt2"] = "small") -> list[str]:
    """Run every cell.

    Args:
        steps: training steps of each run.
        model: small runs every phase and every option; gpt2 (124M) runs every phase without options.

    Returns:
        One sentence for each fault.
    """
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    if steps < 4:
        raise ConfigError(f"--steps={steps} leaves no step to measure: use 4 or more")
    rows, faults, reference = [], [], None
    shared = {**MODELS[model], "device": device.type, "max_iters": steps}
    print(HEADER)
    for cell in list_cells(gpus or max(RANKS), model, is_interpreted=not gpus):
        start = f"{cell.name:<44} {cell.ranks:>5}"
        fields = {**shared, **cell.options}
        if model == "gpt2" and not gpus and not fits_in_memory(cell, shared):
            print(f"{start}  skipped: {cell.ranks} ranks need more memory than this machine has", flush=True)
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                result = run_cell(cell.phase, cell.ranks, make_config(cell.phase, Path(folder) / "run", **fields))
        except RankFailed as failure:
            if reference is None:
                raise  # without a reference, no other cell can be compared
            print(f"{start}  failed: {str(failure).strip().splitlines()[-1]}", flush=True)
            faults.append(f"{cell.name} on {cell.ranks} rank(s) failed:\n{failure}")
            continue
        reference = reference or result
        rows.append(make_row(cell, result, reference))
        faults += [f"{cell.name} on {cell.ranks} rank(s): {fault}" for fault in find_faults(cell, rows[-1])]
        print(format_row(cell, rows[-1]), flush=True)
    write_report(device, model, steps, rows)
    return faults


def write_report(device: torch.device, model: str, steps: int, rows: list[dict[str, Any]]) -> None:
    """Write the result file."""
    command = "make matrix" if model == "small" else f'make matrix ARGS="--model={model} --steps={steps}"'
    settings = {"command": command, "steps": steps, "model": MODELS[model]}
    path = write_result("matrix" if model == "small" else f"{model}-matrix", device, settings, {"rows": rows})
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
