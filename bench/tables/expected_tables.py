"""Generate the tables that put an expectation next to what is computed or measured here, and explain the difference.

The table of the units of FSDP belongs to the same section of the notes.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.tables.records import format_table, read_results
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp.costs import pad_rows
from phase3_fsdp.fsdp import FsdpConfig, find_units

GPT2 = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, bias=False, vocab_size=50304)
HEAD = ["what one may expect", "by the formula", "measured here", "the reason for the difference"]
RANKS = 4  # of the listing of FSDP units
PUBLISHED_VOCABULARY = 50257  # rows of GPT-2's token embedding without padding
LARGE = 20_000_000_000  # parameters of the example that does not fit with DDP


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of the first result of a benchmark."""
    rows: list[dict[str, Any]] = read_results(name)[0]["samples"]["rows"]
    return rows


def find_row(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return next(row for row in rows if fields.items() <= row.items())


def expected_zero1_table() -> str:
    """Return expectations about ZeRO-1 next to formulas and measurements."""
    state = read_results("zero1-state")[0]["samples"]
    params, moments = state["parameters"], {row["ranks"]: max(row["moments"]) for row in state["rows"]}
    backends, overhead = read_rows("zero1-backends"), find_row(read_rows("zero1-overhead"), ranks=2)
    flat, naive = (find_row(backends, ranks=4, backend=name) for name in ("flat", "naive"))
    model_state = f"{max(flat['state_bytes']) / flat['parameters']:.2f}P"
    volumes = [f"{row['ring_bytes'] / (4 * row['parameters'] * 3 / 4):.2f}" for row in (flat, naive)]
    times = {name: statistics.median(overhead["samples_ms"][name]) for name in ("ddp", "flat")}
    rows = [
        [
            "AdamW's state of GPT-2 124M takes 2.0 GB",
            f"8P = {8 * params / 1e9:.2f} GB",
            f"{moments[1]:,} bytes on one rank",
            f"16P = {16 * params / 1e9:.2f} GB is the full model state; the moments of AdamW are one half of it",
        ],
        [
            "ZeRO-1 on 4 ranks divides the model state by 4",
            "8P + 8P/4 = 10P",
            f"{model_state} on the default model",
            "every rank still stores all parameters and all gradients, 8P",
        ],
        [
            "on 4 ranks, the optimizer state is a quarter",
            f"8P/4 = {2 * params / 1e6:.1f} MB",
            f"{moments[4] / 1e6:.1f} MB, maximum over all ranks",
            "none: shards contain no padding",
        ],
        [
            "ZeRO-1 sends 1.5 times as much as DDP",
            "2P(N-1)/N elements, as DDP",
            f"{volumes[0]} P(N-1)/N on 4 ranks; naive: {volumes[1]}",
            "only an all-reduce followed by a broadcast sends 3P(N-1)/N",
        ],
        [
            "a step takes as long as with DDP",
            "a reduce-scatter and an all-gather take as long as an all-reduce",
            f"{times['flat']:.0f} ms, DDP {times['ddp']:.0f} ms, on 2 ranks",
            "gloo's reduce-scatter sends as much as an all-reduce; NCCL is not measured yet",
        ],
    ]
    return format_table(HEAD, rows)


def expected_fsdp_table() -> str:
    """Return expectations about FSDP next to formulas and measurements."""
    matrix, saves = read_results("gpt2-matrix")[0], read_results("save-speed")[0]["samples"]
    ddp, fsdp = (find_row(matrix["samples"]["rows"], phase=phase, ranks=8) for phase in ("baseline", "phase3"))
    ledger = find_row(read_rows("fsdp-memory"), ranks=4, options={})["ledger"]
    units = list_units(dataclasses.replace(GPT2, block_size=matrix["settings"]["model"]["block_size"]))
    root, total = (sum(p.numel() for _, p in params) for params in (units["root"], sum(units.values(), [])))
    largest = find_largest()
    pause = statistics.median(saves["stop_s"]) / statistics.median(saves["ours_s"])
    rows = [
        [
            f"{LARGE / 1e9:.0f}B parameters train with DDP on GPUs with 80 GB",
            f"16 x {LARGE / 1e9:.0f}e9 = {16 * LARGE / 1e9:.0f} GB of state on every GPU; FSDP on 8 GPUs: "
            f"{2 * LARGE / 1e9:.0f} GB",
            f"predicted: on 8 x H100 at most {largest['baseline']:.1f}B with DDP, {largest['phase3']:.1f}B with FSDP",
            "with DDP, more GPUs do not help: each of them stores everything",
        ],
        [
            "a rank stores 16P/N bytes of state",
            f"{sum(ledger['expected_state_bytes'].values()) / 1e6:.2f} MB on 4 ranks, default model",
            f"{sum(ledger['state_bytes'].values()) / 1e6:.2f} MB",
            "none; a parameter that must be padded would add some rows",
        ],
        [
            "FSDP sends 1.5 times as much as DDP",
            f"(3P - P_root) / 2P = {(3 * total - root) / (2 * total):.3f} for GPT-2 124M, one micro-batch per rank",
            f"{fsdp['sent_bytes'] / ddp['sent_bytes']:.3f} on 8 ranks",
            "the root unit is all-gathered once and not twice, and it has a third of the parameters",
        ],
        [
            "one block at a time is all-gathered",
            "two flat buffers and one copy of a block, and the root",
            f"{ledger['memory']['peak']['gathered'] / 1e6:.2f} MB at the peak of memory, default model on 4 ranks",
            "prefetching; at the peak of memory, only two blocks and the root are all-gathered",
        ],
        [
            "an asynchronous save does not stop the training",
            "the copy to CPU memory",
            f"{pause:.0%} of the time of a synchronous save",
            "training waits for the copy, and for a save that is still running",
        ],
    ]
    return format_table(HEAD, rows)


def find_largest() -> dict[str, float]:
    """Return the predicted largest models on 8 H100 without options, in billions of parameters, by phase."""
    results = read_results("largest")[0]["samples"]["results"]
    rows = next(each["rows"] for each in results if (each["gpu"], each["gpus"]) == ("h100", 8))
    return {row["phase"]: row["parameters"] / 1e9 for row in rows if not row["options"]}


def list_units(shape: GPTConfig) -> dict[str, list[tuple[str, torch.nn.Parameter]]]:
    """Return the parameters of each FSDP unit with the default options, by the name of the unit."""
    with torch.device("meta"):
        model = GPT(shape)
    names = {module: name for name, module in model.named_modules()}
    units = {
        names[unit]: [(name, p) for name, p in unit.named_parameters()] for unit in find_units(model, FsdpConfig())
    }
    inside = {p for params in units.values() for _, p in params}
    return {**units, "root": [(name, p) for name, p in model.named_parameters() if p not in inside]}


def fsdp_units_table() -> str:
    """Return every parameter of the units of GPT-2 124M, with its rows and its padded size on four ranks."""
    units = list_units(GPT2)
    blocks = [name for name in units if name != "root"]
    published = dataclasses.replace(GPT2, vocab_size=PUBLISHED_VOCABULARY)
    listed = [(f"each of {len(blocks)} blocks", units[blocks[0]]), ("root", units["root"])]
    listed += [(f"root, {PUBLISHED_VOCABULARY} rows", list_units(published)["root"])]
    rows = []
    for unit, params in listed:
        sizes = []
        for name, param in params:
            padded = pad_rows(param, RANKS)
            sizes.append((param.numel(), padded * (param.numel() // len(param))))
            shape = " x ".join(f"{size:,}" for size in param.shape)
            last = len(param) - padded // RANKS * (RANKS - 1)
            rows.append([unit, f"`{name}`", shape, f"{padded // RANKS:,}", f"{last:,}", f"{padded - len(param)}", ""])
        total, padded_total = map(sum, zip(*sizes, strict=True))
        cells = [f"{padded_total - total:,} elements", f"{padded_total:,}"]
        rows.append([unit, f"**{total:,} parameters**", "", "", "", *cells])
    head = ["unit", "parameter", "shape", "rows per rank", "rows of the last rank", "padding (rows)"]
    return format_table([*head, "elements of an all-gather, with padding"], rows)


EXPECTED_TABLES: dict[str, Callable[[], str]] = {
    "expected_zero1": expected_zero1_table,
    "expected_fsdp": expected_fsdp_table,
    "fsdp_units": fsdp_units_table,
}
