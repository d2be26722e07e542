"""Generate the tables of the planner and of scaling. `bench.tables.tables` writes them into the documents."""

from collections.abc import Callable

from bench.plan.inference import predict_inference
from bench.plan.plan import PlanConfig, resolve_gpu, resolve_shape
from bench.plan.report import format_name
from bench.tables.records import format_table, read_results


def sizes_table() -> str:
    """Return the named configurations with their predicted memory per rank, for three modes of checkpointing."""
    rows = []
    for result in read_results("sizes"):
        for row in result["samples"]["rows"]:
            peaks = {mode: sum(each["bytes"].values()) / 1e9 for mode, each in row["modes"].items()}
            marked = {mode: f"**{peak:.1f}**" if mode == row["mode"] else f"{peak:.1f}" for mode, peak in peaks.items()}
            tokens = row["batch_size"] * row["block_size"] * row["micro_batches"] * row["gpus"]
            selected = row["modes"][row["mode"]]
            rows.append(
                [
                    f"`make {row['phase']} GPUS={row['gpus']} CONFIG=config/{row['name']}.py`",
                    f"{row['parameters'] / 1e6:,.0f}M, {row['n_layer']} x {row['n_embd']:,}",
                    f"{row['gpus']} x {row['gpu']}",
                    f"{row['batch_size']} x {row['block_size']:,}",
                    f"{tokens:,}",
                    f"{sum(row['state_bytes'].values()) / 1e9:.1f}",
                    *(marked.get(mode, "-") for mode in ("none", "selective", "full")),
                    str(selected["largest_batch_size"]),
                ]
            )
    head = [
        "command",
        "parameters, blocks x channels",
        "GPUs",
        "micro-batch (sequences x tokens)",
        "tokens per step",
        "model state (GB)",
    ]
    head += ["peak without checkpointing (GB)", "peak with selective checkpointing (GB)"]
    head += ["peak with full checkpointing (GB)", "largest micro-batch (sequences)"]
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
        head = ["parameters (billions)", *(f"{each['gpus']} x {each['gpu']}" for each in found)]
        parts.append(format_table(head, [[name, *cells] for name, cells in sizes.items()]))
    return "\n".join(parts)


def inference_table() -> str:
    """Return the planner's prediction for 20 billion parameters on two GPUs of 40 GB. It is computed, not measured."""
    rows = []
    for batch_size in (1, 8):
        config = PlanConfig(model="20b", gpus=2, gpu="a100-40", batch_size=batch_size, block_size=2048)
        shape, gpu = resolve_shape(config), resolve_gpu(config)
        found = predict_inference(shape, gpu, config.gpus, batch_size, config.dtype)
        for name, way in found["ways"].items():
            memory = (way["weights_bytes"] + way["all_gathered_bytes"] + way["cache_bytes"]) / 1e9
            rows.append(
                [
                    f"`{name}`",
                    str(batch_size),
                    f"{memory:.1f}",
                    "yes" if way["fits"] else "no",
                    f"{way['host_bytes'] / 1e9:.1f}",
                    f"{way['network_bytes_per_round'] / 1e9:.4f}",
                    f"{way['tokens_per_second']:,.0f}",
                ]
            )
    head = ["way", "`--batch_size`", "memory per rank (GB)", "fits", "CPU memory per rank (GB)"]
    return format_table([*head, "communication per round and rank (GB)", "tokens per second"], rows)


PLAN_TABLES: dict[str, Callable[[], str]] = {
    "sizes": sizes_table,
    "largest": largest_table,
    "inference": inference_table,
}
