"""Write the committed results into the tables of the documents, so that no number there is typed by hand.

    python -m bench.tables            # rewrite the tables
    python -m bench.tables --check    # only report the documents whose tables are stale

In a Markdown file, a table is between `<!-- table:NAME -->` and `<!-- /table -->`, where NAME is a key of TABLES.
"""

import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bench.kernels.kernels import compute_roofline_share
from bench.phases import ROOT
from bench.tables.records import format_table, hardware_of, read_results
from nanoGPT.errors import ConfigError

DOCUMENTS = ["README.md", "docs/results.md"]
BLOCK = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)
NOT_MEASURED = "Not measured on a GPU yet.\n"
MEGABYTES, GIGABYTES = 1e-6, 1e-9
TRAINERS = {
    "baseline": "baseline",
    "phase1": "phase 1 (ZeRO-1)",
    "phase2": "phase 2 (Triton)",
    "phase3": "phase 3 (FSDP)",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: with the unit.
        value: a key of a row of the result, or a function of the row.
        form: format of a number.
        scale: factor of a number.
    """

    header: str
    value: str | Callable[[Row], Any]
    form: str = ",.0f"
    scale: float = 1.0

    def format(self, row: Row) -> str:
        """Return the cell of a row: the median of a list, the sum of a dictionary, and the options of a run."""
        if not isinstance(self.value, str):
            value = self.value(row)
        elif self.value not in row and (row.get("failed") or row.get("error")):
            value = "failed"
        else:
            value = row[self.value]
        if isinstance(value, dict):
            value = sum(value.values())
        elif isinstance(value, list):
            value = statistics.median(value)
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        if isinstance(value, bool):
            return "yes" if value else "NO"
        return format(self.scale * value, self.form)


@dataclass(frozen=True)
class Table:
    """A table of a result on each hardware: bench/results/<name>-<hardware>.json.

    Attributes:
        name: of the result.
        columns: of the table.
        list_rows: returns the rows of a table from the samples of a result.
    """

    name: str
    columns: tuple[Column, ...]
    list_rows: Callable[[dict[str, Any]], Iterable[Row]] = lambda samples: samples["rows"]

    def render(self) -> str:
        """Return a Markdown table for each hardware."""
        parts = []
        for result in read_results(self.name):
            rows = [[column.format(row) for column in self.columns] for row in self.list_rows(result["samples"])]
            table = format_table([column.header for column in self.columns], rows)
            parts.append(f"Measured on {hardware_of(result)}:\n\n{table}")
        return "\n".join(parts)


def format_options(options: Row) -> str:
    return " ".join(f"`{name}={value}`" for name, value in options.items())


def list_done(samples: dict[str, Any], group: str) -> list[Row]:
    """Return the results of a group of tasks of `python -m bench.gpu`, such as throughput."""
    return [row["result"] for row in samples["rows"] if row["name"].startswith(f"{group}.") and row["state"] == "done"]


def list_kernels(samples: dict[str, Any]) -> Iterable[Row]:
    """Yield a row for each pass of each kernel, with the times of the other implementations in `others`.

    Its `share` is the time that the roofline allows, as a fraction of the kernel's time.
    """
    for result in list_done(samples, "times"):
        for kernel in [row for row in result["rows"] if row["contender"] == "ours"]:
            alike = [row for row in result["rows"] if row["shape"] == kernel["shape"] and row is not kernel]
            others = [row for row in alike if row["pass"] in (kernel["pass"], "all")]  # a failed one has no passes
            times = [f"{row['contender']} {KERNEL_TIME.format(row)}" for row in others]
            share = None if "error" in kernel else compute_roofline_share(kernel, result["limits"])
            yield {**kernel, "share": share, "others": ", ".join(times)}


def list_checks(samples: dict[str, Any]) -> list[Row]:
    """Return the tasks that have no table of their own, and those that have failed."""
    tabled = ("times.", "throughput.")
    return [row for row in samples["rows"] if row["state"] != "done" or not row["name"].startswith(tabled)]


KERNEL_TIME = Column("ours (ms)", "samples_ms", ".3f")
TRAINER = Column("trainer", lambda row: TRAINERS[row["phase"]])
RANKS = Column("ranks", "ranks")
OPTIONS = Column("options", lambda row: format_options(row["options"]))
DIFFERENCE = Column("max loss difference", "gap", ".1e")
MEMORY = (
    Column("state per rank (MB)", "state_bytes", ".2f", MEGABYTES),
    Column("communication per rank (MB)", "sent_bytes", ".2f", MEGABYTES),
    Column("peak memory per rank (MB)", "peak", ".2f", MEGABYTES),
    Column("matches the formula", "as_expected"),
)
MATRIX = (TRAINER, RANKS, OPTIONS, DIFFERENCE, *MEMORY, Column("step (ms)", "step_ms", ".0f"))
TOKENS_PER_SECOND = Column("tokens/s", "tokens_per_second")

SPEED = (
    TRAINER,
    Column("kernels", "kernels"),
    TOKENS_PER_SECOND,
    Column("peak memory (GB)", "peak_bytes", ",.1f", GIGABYTES),
    Column("MFU", "mfu", ".1%"),
)

TABLES = {
    "eight_ranks": Table(
        "matrix",
        (TRAINER, DIFFERENCE, *MEMORY),
        lambda samples: [row for row in samples["rows"] if row["ranks"] == 8 and not row["options"]],
    ),
    "matrix": Table("matrix", (*MATRIX, TOKENS_PER_SECOND)),
    "llama_matrix": Table("llama-matrix", (*MATRIX, TOKENS_PER_SECOND)),
    "gpt2_matrix": Table("gpt2-matrix", (*MATRIX, TOKENS_PER_SECOND)),
    "one_gpu": Table(
        "gpu",
        SPEED,
        lambda samples: [
            row
            for row in list_done(samples, "throughput")
            if row["size"] == "gpt2" and row["kernels"] in ("none", "loss")
        ],
    ),
    "throughput": Table("gpu", (Column("model", "size"), *SPEED), lambda samples: list_done(samples, "throughput")),
    "kernels": Table(
        "gpu",
        (
            Column("kernel", "kernel"),
            Column("shape", "shape"),
            Column("pass", "pass"),
            KERNEL_TIME,
            Column("share of the roofline limit", "share", ".0%"),
            Column("others (ms)", "others"),
        ),
        list_kernels,
    ),
    "gpu": Table("gpu", (Column("task", "name"), Column("state", "state"), Column("result", "summary")), list_checks),
}


def render_document(text: str) -> str:
    """Return the text of a document with all its tables generated again.

    Raises:
        KeyError: a table has an unknown name.
        ConfigError: the results of a table are missing or damaged.
    """
    return BLOCK.sub(lambda match: match[1] + render_table(match[2]) + match[3], text)


def render_table(name: str) -> str:
    """Return a table; a sentence if only a GPU can measure it and none has.

    Raises:
        ConfigError: its results are missing or damaged.
    """
    text = TABLES[name].render()
    if not text and TABLES[name].name != "gpu":
        raise ConfigError(f"table {name} has no results in bench/results: measure again, or restore them from git")
    return text or NOT_MEASURED


def main(check: bool = False) -> int:
    """Rewrite the tables of all documents. An error in any table leaves all documents unchanged.

    Args:
        check: write nothing; only report stale documents.

    Returns:
        Exit code: 1 if `check` finds a stale document, else 0.
    """
    texts = {name: (ROOT / name).read_text() for name in DOCUMENTS}
    stale = {name: new for name, text in texts.items() if (new := render_document(text)) != text}
    for name, text in stale.items():
        if not check:
            (ROOT / name).write_text(text)
    if stale:
        print(f"{'stale' if check else 'updated'}: {', '.join(stale)}")
    return 1 if check and stale else 0
