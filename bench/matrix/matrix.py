"""The matrix: every phase on 1, 2, 4 and 8 ranks and every option on 2 or 4, beside the baseline on one.

    make matrix                          # about two minutes on 2 cores; on a GPU machine, as many ranks as GPUs
    make matrix ARGS="--steps=50"        # longer runs
    make matrix ARGS="--model=gpt2 --steps=4"    # GPT-2 124M in every phase, without options

Each cell trains the same small model: how far its losses are from the baseline's, the bytes that a rank keeps and
sends beside the formula's, memory at its peak, and time. The table is printed as it grows; at the end it is in
bench/results/matrix-<hardware>.json, with a .png beside it, and in the README. Where ranks share cores, times say what
a phase adds to a step, not what it saves. GPT-2 124M gets few tokens, and goes into gpt2-matrix-<hardware>.json; ranks
that together need more than this machine's memory, by the planner, are left out.
"""

import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from bench.matrix.cells import Found, as_expected, config_of, run_cell
from bench.matrix.plot import draw
from bench.plan.trace import trace
from bench.tables.records import RESULTS, write_result
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPTConfig
from workshop.ranks import RankFailed

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
PROCESS_BYTES = 400e6  # of a rank beside its tensors
LIMIT = {"float32": 1e-5, "bfloat16": 1e-2}
RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Cell:
    """A phase on some ranks, with options that are not its defaults."""

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
    Cell("phase3", 2, {"fsdp_reshard_after_forward": False}),
    Cell("phase3", 4, {"fsdp_shard_size": "2"}),
    Cell("phase3", 2, {"fsdp_cpu_offload": True}),
    Cell("phase3", 2, {"fsdp_sync_every_micro_batch": True}),
    Cell("phase3", 2, {"fsdp_activation_checkpointing": "selective"}),
    Cell("phase3", 2, {"fsdp_activation_checkpointing": "full"}),
    Cell("phase3", 2, {"kernels": "triton"}),
    Cell("phase3", 2, {"dtype": "bfloat16"}),
]


def cells(most_ranks: int, model: str = "small", interpreted: bool = False) -> list[Cell]:
    """All that so many ranks can run, the baseline on one first. Interpreted, AdamW's kernel alone takes a minute for
    GPT-2's parameters: there phase 2 has one kernel."""
    one = {"phase2": {"kernels": "gelu"}} if model == "gpt2" and interpreted else {}
    plain = [Cell(phase, n, one.get(phase, {})) for phase in ("baseline", "phase1", "phase2", "phase3") for n in RANKS]
    options = OPTIONS if model == "small" else []
    return [cell for cell in [*plain, *options] if cell.ranks <= most_ranks]


def fits(cell: Cell, words: dict[str, Any]) -> bool:
    """Whether this machine's memory holds all ranks of a cell."""
    phase = "baseline" if cell.phase == "phase2" else cell.phase  # whose workspaces are small
    peak = trace(config_of(phase, Path(), **words), GPTConfig.of(words), cell.ranks).memory.peak
    needed = cell.ranks * (sum(peak.values()) + PROCESS_BYTES)
    return needed < 0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def row_of(cell: Cell, found: Found, reference: Found) -> dict[str, Any]:
    """What the table, the picture and the result say of a cell; bytes are those of rank 0."""
    first, sent = found.rank_0, found.rank_0["collectives"]
    return {
        **asdict(cell),
        "gap": found.gap(reference),
        "losses": list(found.curve.values()),
        "state_bytes": first["state_bytes"],
        "expected_state_bytes": first["expected_state_bytes"],
        "padding": first["padding"],
        "sent_bytes": sum(row["ring_bytes"] for row in sent),
        "collectives": sent,
        "as_expected": as_expected(found.ledger),
        "peak": first["memory"]["peak"],
        "allocator_peak_bytes": first["memory"]["allocator_peak_bytes"],
        "step_ms": found.step_ms,
        "tokens_per_second": found.tokens_per_second,
    }


HEAD = f"{'':<44} ranks  loss off by   state kB     sent kB  formula   peak kB    step  tokens/s"


def line_of(cell: Cell, row: dict[str, Any]) -> str:
    state, peak = sum(row["state_bytes"].values()), sum(row["peak"].values())
    exact = "equal" if row["as_expected"] else "OFF"
    return (
        f"{cell.name:<44} {cell.ranks:>5}  {row['gap']:>11.1e} {state / 1e3:>10,.1f} {row['sent_bytes'] / 1e3:>11,.1f}"
        f"  {exact:<7} {peak / 1e3:>9,.1f} {row['step_ms']:>4,.0f} ms {row['tokens_per_second']:>9,.0f}"
    )


def faults(cell: Cell, row: dict[str, Any]) -> list[str]:
    """In what a cell is not what this project promises."""
    limit = LIMIT[cell.options.get("dtype", "float32")]
    told = [f"its losses are off by {row['gap']:.1e}, allowed are {limit:.0e}"] if not row["gap"] <= limit else []
    return told + ([] if row["as_expected"] else ["its state or traffic is not the formula's"])


def main(steps: int = 10, model: Literal["small", "gpt2"] = "small") -> list[str]:
    """Run every cell.

    Args:
        steps: of each run.
        model: small: in every phase and with every option; gpt2: 124M, in every phase.

    Returns:
        What is not as it should be.
    """
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    if steps < 4:
        raise ConfigError(f"--steps={steps} leaves none to time: give 4 or more")
    rows, wrong, reference = [], [], None
    shared = {**MODELS[model], "device": device.type, "max_iters": steps}
    print(HEAD)
    for cell in cells(gpus or max(RANKS), model, interpreted=not gpus):
        start = f"{cell.name:<44} {cell.ranks:>5}"
        words = {**shared, **cell.options}
        if model == "gpt2" and not gpus and not fits(cell, shared):
            print(f"{start}  left out: so many ranks need more memory than this machine has", flush=True)
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = run_cell(cell.phase, cell.ranks, config_of(cell.phase, Path(folder) / "run", **words))
        except RankFailed as failure:
            if reference is None:
                raise  # with nothing to compare with, nothing is worth measuring
            print(f"{start}  failed: {str(failure).strip().splitlines()[-1]}", flush=True)
            wrong.append(f"{cell.name} on {cell.ranks} rank(s) failed:\n{failure}")
            continue
        reference = reference or found
        rows.append(row_of(cell, found, reference))
        wrong += [f"{cell.name} on {cell.ranks} rank(s): {fault}" for fault in faults(cell, rows[-1])]
        print(line_of(cell, rows[-1]), flush=True)
    report(device, model, steps, rows)
    return wrong


def report(device: torch.device, model: str, steps: int, rows: list[dict[str, Any]]) -> None:
    """Write the result; a picture too of the small model's, which has the options."""
    command = "make matrix" if model == "small" else f'make matrix ARGS="--model={model} --steps={steps}"'
    settings = {"command": command, "steps": steps, "model": MODELS[model]}
    path = write_result("matrix" if model == "small" else f"{model}-matrix", device, settings, {"rows": rows})
    print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
    if model == "small":
        draw(path)
        print(f"wrote {path.relative_to(RESULTS.parent.parent).with_suffix('.png')}")
