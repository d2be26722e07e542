"""Tables of the documents, made from the committed results, so that no number there is typed by hand.

    python -m bench.tables            # write them anew between their markers
    python -m bench.tables --check    # or only say which are stale

A table stands between `<!-- table:NAME -->` and `<!-- /table -->` in a Markdown file.
"""

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.results import read_results
from nanoGPT.config import PACKAGE

ROOT = PACKAGE.parent
DOCUMENTS = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("phase*/IMPLEMENTATION.md"))]
BLOCK = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def runs_table() -> str:
    """Commands with their minutes and losses, one table a machine."""
    parts = []
    for result in read_results("runs"):
        rows = [
            [
                f"`make {row['target']} GPUS={row['ranks']}`",
                f"{row['seconds'] / 60:.1f}",
                f"{row['first_step_seconds']:.0f} s",
                f"{row['first_loss']:.2f} to {row['last_loss']:.4f}",
                f"{row['val_loss']:.4f}",
            ]
            for row in result["samples"]["rows"]
        ]
        head = ["command", "minutes", "first step after", "loss", "validation loss"]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + table(head, rows))
    return "\n".join(parts)


def overhead_table() -> str:
    """The trainer's step against the bare loop's."""
    rows = []
    for result in read_results("step-overhead"):
        bare, trainer, data = (
            statistics.median(result["samples"][name]) for name in ("bare_ms", "trainer_ms", "data_ms")
        )
        rows.append(
            [
                hardware_of(result),
                f"{bare:.1f} ms",
                f"{trainer:.1f} ms",
                f"{trainer / bare:.3f}",
                f"{data / trainer:.2%}",
            ]
        )
    return table(["hardware", "bare loop", "trainer", "ratio", "data loading"], rows)


def zero1_state_table() -> str:
    """GPT-2 124M: the bytes of AdamW's moments that the fullest rank holds, beside 8P/N."""
    rows = []
    for result in read_results("zero1-state"):
        params = result["samples"]["parameters"]
        for row in result["samples"]["rows"]:
            share, most = 8 * params / row["ranks"], max(row["moments"])
            rows.append([str(row["ranks"]), f"{share:,.0f}", f"{most:,}", f"{most / share - 1:.3%}"])
    return table(["ranks", "8P/N bytes", "fullest rank holds", "over"], rows)


def zero1_backends_table() -> str:
    """What the backends hold, send, take and reach in the same 50 steps."""
    parts = []
    for result in read_results("zero1-backends"):
        rows = []
        for row in result["samples"]["rows"]:
            params, ranks = row["parameters"], row["ranks"]
            unit = 4 * params * (ranks - 1) / ranks
            rows.append(
                [
                    f"{ranks}",
                    row["backend"],
                    f"{max(row['optimizer_state_bytes']):,}",
                    f"{max(row['state_bytes']) / params:.2f}P",
                    f"{row['ring_bytes'] / unit:.4f}" if unit else "0",
                    str(row["calls"]),
                    f"{row['step_ms']:.0f} ms",
                    f"{row['loss_gap']:.1e}",
                ]
            )
        head = ["ranks", "backend", "optimizer state, fullest rank", "all state", "sent, x P(N-1)/N", "calls", "step"]
        params = result["samples"]["rows"][0]["parameters"]
        parts.append(f"Measured on {hardware_of(result)}, P = {params:,}:\n\n" + table([*head, "loss off by"], rows))
    return "\n".join(parts)


def zero1_overhead_table() -> str:
    """Medians of steps and of bare collectives that ran in turn, in the same ranks."""
    parts = []
    names = ["ddp", "all_reduce", "reduce_scatter", "all_gather", "flat", "flat_forward"]
    for result in read_results("zero1-overhead"):
        rows = []
        for row in result["samples"]["rows"]:
            medians = [statistics.median(row["samples_ms"][name]) for name in names]
            rows.append([str(row["ranks"]), *(f"{m:.0f} ms" for m in medians), f"{row['ratio']:.3f}"])
        head = ["ranks", "DDP step", "all-reduce", "reduce-scatter", "all-gather", "flat step"]
        head += ["flat, gathering in the forward", "flat / (DDP - AR + RS + AG)"]
        params = result["samples"]["parameters"]
        parts.append(f"Measured on {hardware_of(result)}, {params:,} parameters:\n\n" + table(head, rows))
    return "\n".join(parts)


def zero1_step_table() -> str:
    """`step` alone, at one rank."""
    rows = []
    for result in read_results("zero1-step"):
        samples = result["samples"]
        adamw, flat = (statistics.median(samples[name]) for name in ("adamw_ms", "flat_ms"))
        name = f"{samples['parameters']:,}"
        rows.append([hardware_of(result), name, f"{adamw:.2f} ms", f"{flat:.2f} ms", f"{samples['ratio']:.3f}"])
    return table(["hardware", "parameters", "AdamW(fused=True)", "flat", "ratio"], rows)


def hardware_of(result: dict[str, Any]) -> str:
    return f"{result['hardware']}, torch {result['versions']['torch']}"


TABLES: dict[str, Callable[[], str]] = {
    "runs": runs_table,
    "overhead": overhead_table,
    "zero1_state": zero1_state_table,
    "zero1_backends": zero1_backends_table,
    "zero1_overhead": zero1_overhead_table,
    "zero1_step": zero1_step_table,
}


def rendered(text: str) -> str:
    """A document with its tables made anew.

    Raises:
        KeyError: a table of unknown name.
    """
    return BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main(check: bool) -> int:
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        if rendered(text) != text:
            stale.append(name)
            if not check:
                Path(path).write_text(rendered(text))
    if stale:
        print(f"{'stale' if check else 'renewed'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
