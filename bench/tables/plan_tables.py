"""Generate the tables of the planner and of scaling. `bench.tables.tables` writes them into the documents."""

from collections.abc import Callable

from bench.plan.inference import predict_inference
from bench.plan.plan import PlanConfig, resolve_gpu, resolve_shape
from bench.plan.report import format_name
from bench.tables.records import format_table, hardware_of, read_results


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


def startup_table() -> str:
    """Return the peak memory in which the ranks initialized their shards, next to the shard and one block of rows."""
    parts = []
    for result in read_results("startup"):
        rows = []
        for row in result["samples"]["rows"]:
            shard, peak = (max(rank[key] for rank in row["ranks"]) / 1e6 for key in ("shard_bytes", "peak_bytes"))
            block = row["chunk_bytes"] / 1e6
            rows.append(
                [
                    f"`{row['name']}`",
                    "in turn" if row["takes_turns"] else "at the same time",
                    f"{4 * row['parameters'] / 1e6:,.1f}",
                    f"{shard:,.1f}",
                    f"{block:.1f}",
                    f"{peak:,.1f}",
                    f"{peak - shard - block:.1f}",
                    f"{max(rank['seconds'] for rank in row['ranks']):.0f}",
                ]
            )
        head = ["configuration", "the ranks start", "full model (MB)", "shard (MB)", "one block of rows (MB)"]
        head += ["peak memory (MB)", "peak - shard - block (MB)", "time (s)"]
        ranks = result["settings"]["ranks"]
        lead = f"Measured on {hardware_of(result)}: the maximum over {ranks} ranks, parameters in fp32:\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts)


def twins_table() -> str:
    """Return the losses of the scaled-down twins, and their memory next to the formula and the planner."""
    parts = []
    for result in read_results("twins"):
        steps = result["settings"]["steps"]
        shown = [*range(0, steps, 50), steps - 1]
        rows = []
        for row in result["samples"]["rows"]:
            state, expected, peak = (
                sum(row[key].values()) for key in ("state_bytes", "expected_state_bytes", "peak_bytes")
            )
            planned = row["predicted_peak_bytes"]
            rows.append(
                [
                    f"`{row['name']}`",
                    f"{row['parameters'] / 1e6:.2f}M, {row['n_layer']} x {row['n_embd']}",
                    *(f"{row['losses'][step]:.3f}" for step in shown),
                    f"{state / 1e6:.3f}",
                    "yes" if state == expected else "NO",
                    f"{peak / 1e6:.3f}",
                    f"{planned / 1e6:.3f} ({planned / peak - 1:+.2%})",
                ]
            )
        head = ["twin of", "parameters, blocks x channels", *(f"loss, step {step}" for step in shown)]
        head += ["model state (MB)", "matches the formula", "peak memory (MB)", "peak predicted by the planner (MB)"]
        lead = f"Measured on {hardware_of(result)}, {result['settings']['ranks']} ranks, memory of rank 0:\n\n"
        parts.append(lead + format_table(head, rows))
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
    "startup": startup_table,
    "twins": twins_table,
    "inference": inference_table,
}
