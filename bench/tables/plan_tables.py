"""Generate the planner's tables from the committed results. `bench.tables.tables` writes them into the documents."""

from collections.abc import Callable

from bench.plan.report import format_name
from bench.tables.records import format_table, read_results


def sizes_table() -> str:
    """Return the named configurations with their predicted memory per rank, for every mode of checkpointing."""
    rows = []
    for result in read_results("sizes"):
        for row in result["samples"]["rows"]:
            peaks = {mode: sum(each["bytes"].values()) / 1e9 for mode, each in row["modes"].items()}
            marked = {mode: f"**{peak:.1f}**" if mode == row["mode"] else f"{peak:.1f}" for mode, peak in peaks.items()}
            tokens = row["batch_size"] * row["block_size"] * row["micro_batches"] * row["gpus"]
            gathered = row["modes"][row["mode"]]
            rows.append(
                [
                    f"`make {row['phase']} GPUS={row['gpus']} CONFIG=config/{row['name']}.py`",
                    f"{row['parameters'] / 1e6:,.0f}M, {row['n_layer']} x {row['n_embd']:,}",
                    f"{row['gpus']} x {row['gpu']}",
                    f"{row['batch_size']} x {row['block_size']:,}",
                    f"{tokens:,}",
                    f"{sum(row['state_bytes'].values()) / 1e9:.1f}",
                    *(marked.get(mode, "-") for mode in ("none", "selective", "full")),
                    str(gathered["largest_batch_size"]),
                ]
            )
    head = ["command", "parameters, blocks x channels", "GPUs", "micro-batch", "tokens per step", "model state (GB)"]
    head += ["peak without checkpointing (GB)", "selective (GB)", "full (GB)", "largest micro-batch"]
    return format_table(head, rows)


def largest_table() -> str:
    """Return the parameters, in billions, of the largest GPT that each row of a plan can train on each machine."""
    parts = []
    for result in read_results("largest"):
        found = result["samples"]["results"]
        names = [format_name(row) for row in found[0]["rows"]]
        sizes = {name: [f"{row['parameters'] / 1e9:.1f}"] for name, row in zip(names, found[0]["rows"], strict=True)}
        for each in found[1:]:
            for name, row in zip(names, each["rows"], strict=True):
                sizes[name].append(f"{row['parameters'] / 1e9:.1f}")
        head = ["", *(f"{each['gpus']} x {each['gpu']}" for each in found)]
        parts.append(format_table(head, [[name, *cells] for name, cells in sizes.items()]))
    return "\n".join(parts)


PLAN_TABLES: dict[str, Callable[[], str]] = {"sizes": sizes_table, "largest": largest_table}
