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


def hardware_of(result: dict[str, Any]) -> str:
    return f"{result['hardware']}, torch {result['versions']['torch']}"


TABLES: dict[str, Callable[[], str]] = {"runs": runs_table, "overhead": overhead_table}


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
