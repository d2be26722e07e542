"""Compare every phase on 1, 2, 4 and 8 ranks, and the main options on 2 or 4 ranks, with the baseline on one rank.

    make matrix                          # about five minutes on 2 cores; on a GPU machine, as many ranks as GPUs
    make matrix ARGS="--steps=50"        # longer runs
    make matrix ARGS="--model=llama"     # another model

Each cell of the matrix trains the same small model. It measures the max loss difference from the baseline, the model
state and the communication volume per rank (compared with the formula), peak memory and time. The command prints one
line after each cell. At the end it writes bench/results/matrix-<hardware>.json, or llama-matrix-<hardware>.json, and
`make matrix` updates the tables of the documents. When ranks share cores, the times show only what a phase adds to a
step, not what it saves.
"""

import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.matrix.cells import RunResult, make_config, matches_formula, run_cell
from bench.phases import PHASES
from bench.tables.records import write_result
from nanoGPT.errors import ConfigError
from operate.ranks import RankFailed

MODEL: dict[str, Any] = {
    "dataset": "shakespeare_char",
    "n_layer": 8,  # a peak of FSDP contains up to three blocks, which must be a small part of the model
    "n_head": 2,
    "n_embd": 64,
    "block_size": 32,
    "batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 2e-3,
    "min_lr": 2e-4,
    "warmup_iters": 5,
    "eval_iters": 1,
    "dtype": "float32",
    "compile": False,
}
MAX_LOSS_DIFFERENCE = {"float32": 1e-5, "bfloat16": 3e-2}  # of the losses of the baseline in float32
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


def list_cells(max_ranks: int) -> list[Cell]:
    """Return all cells with at most `max_ranks` ranks. The first one is the baseline on one rank."""
    plain = [Cell(phase, n) for phase in PHASES for n in RANKS]
    return [cell for cell in [*plain, *OPTIONS] if cell.ranks <= max_ranks]


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


def find_faults(cell: Cell, row: dict[str, Any]) -> list[str]:
    """Return one sentence for each property of a cell that breaks a promise of this project."""
    limit = MAX_LOSS_DIFFERENCE[cell.options.get("dtype", "float32")]
    faults = [f"max loss difference {row['gap']:.1e} is above the limit {limit:.0e}"] if not row["gap"] <= limit else []
    return faults + ([] if row["as_expected"] else ["model state or communication volume does not match the formula"])


def main(steps: int = 10, model: str = "gpt2") -> list[str]:
    """Run every cell.

    Args:
        steps: training steps of each run.
        model: gpt2, llama, or a module that defines a model.

    Returns:
        One sentence for each fault.
    """
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    if steps < 4:
        raise ConfigError(f"--steps={steps} leaves no step to measure: use 4 or more")
    rows, faults, reference = [], [], None
    shared = {**MODEL, "model": model, "device": device.type, "max_iters": steps}
    for cell in list_cells(gpus or max(RANKS)):
        start = f"{cell.name} on {cell.ranks} rank(s)"
        fields = {**shared, **cell.options}
        try:
            with tempfile.TemporaryDirectory() as folder:
                result = run_cell(cell.phase, cell.ranks, make_config(cell.phase, Path(folder) / "run", **fields))
        except RankFailed as failure:
            if reference is None:
                raise  # without a reference, no other cell can be compared
            print(f"{start} failed: {str(failure).strip().splitlines()[-1]}", flush=True)
            faults.append(f"{start} failed:\n{failure}")
            continue
        reference = reference or result
        rows.append(row := make_row(cell, result, reference))
        faults += [f"{start}: {fault}" for fault in find_faults(cell, row)]
        print(f"{start}: max loss difference {row['gap']:.1e}, {row['step_ms']:.0f} ms per step", flush=True)
    settings = {"command": "make matrix", "steps": steps, "model": {**MODEL, "model": model}}
    name = "matrix" if model == "gpt2" else f"{model}-matrix"
    print(f"wrote {write_result(name, device, settings, {'rows': rows})}")
    return faults
