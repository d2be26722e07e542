"""Generate the tables about many ranks. `bench.tables.tables` writes them into the documents."""

import math
import statistics
from collections.abc import Callable

from bench.tables.records import format_table, hardware_of, read_results

TARGET_RANKS = 1024

# The parts of `bench.sharding.scale`: what they measure, and how they depend on the number of ranks N.
SCALE_PARTS: dict[str, tuple[str, str, Callable[[int], float]]] = {
    "init_before": ("start-up: draw all parameters", "constant", lambda N: 0.0),
    "init_after": ("start-up: draw this rank's rows", "a + b/N", lambda N: 1 / N),
    "save_before": ("a later save on rank 0, without a cached plan", "a + bN", float),
    "save_after": ("a later save on rank 0, with a cached plan", "a + bN", float),
    "save_layout": ("a later save on rank 0, with the layout of the last save", "a + bN", float),
    "other_before": ("a later save on another rank, without a cached plan", "a + bN", float),
    "other_after": ("a later save on another rank, with a cached plan", "a + bN", float),
    "other_layout": ("a later save on another rank, with the layout of the last save", "a + b log N", math.log),
    "index_before": ("resume: every rank reads and checks the index", "a + bN", float),
    "index_after": ("resume: another rank receives the index from rank 0", "a + bN", float),
    "stop": ("agreement on whether to stop, per step", "a + b log N", math.log),  # older results
    "stop_before": ("agreement on whether to stop, after every step", "a + b log N", math.log),
    "stop_after": ("agreement on whether to stop, once a second, per step", "a + b log N", math.log),
}


def extrapolate(ranks: list[int], values: list[float], law: Callable[[int], float], target_ranks: int) -> float:
    """Return a + b law(target_ranks), fitted by least squares; the mean if the law is constant, or b is below 0."""
    xs = [law(n) for n in ranks]
    mean_x, mean = statistics.mean(xs), statistics.mean(values)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (v - mean) for x, v in zip(xs, values, strict=True)) / spread if spread else 0.0
    return mean + max(0.0, slope) * (law(target_ranks) - mean_x)


def scale_table() -> str:
    """Return the CPU time of a rank for what depends on the number of ranks, extrapolated to 1,024 ranks."""
    parts = []
    for result in read_results("scale"):
        measured = result["samples"]["rows"]
        ranks, rows = [row["ranks"] for row in measured], []
        for name, (text, law_text, law) in SCALE_PARTS.items():
            if name not in measured[0]:
                continue
            values = [1000 * row[name] for row in measured]
            at_1024 = extrapolate(ranks, values, law, TARGET_RANKS)
            digits = 3 if name.startswith("stop") else 1
            cells = [f"{value:,.{digits}f}" for value in values]
            rows.append([text, *cells, f"{at_1024:,.{digits}f} ({law_text})"])
        head = ["CPU time of a rank (ms)", *(f"{n} ranks" for n in ranks), "1,024 ranks, extrapolated"]
        params, tensors = result["settings"]["parameters"], result["settings"]["tensors"]
        lead = f"Measured on {hardware_of(result)}: {params / 1e6:,.0f}M parameters, {tensors} tensors in a save"
        if "index_bytes" in measured[0]:
            sizes = [row["index_bytes"] / 1e6 for row in measured]
            listed = ", ".join(f"{size:.1f}" for size in sizes)
            lead += (
                f", an index of {listed} MB ({extrapolate(ranks, sizes, float, TARGET_RANKS):.1f} MB on 1,024 ranks)"
            )
        lead += ":\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts)


# How the operations on the shared file system and the CPU time of `bench.sharding.heartbeats` depend on N ranks.
HEARTBEAT_LAWS: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {
    "one file per rank, write": (float, lambda N: 0.0),
    "one file per node, write": (float, lambda N: 0.0),
    "store, write": (float, float),
    "one file per rank, check": (lambda N: float(N * N), float),
    "one file per node, check": (lambda N: float(N * N), float),
    "store, check": (float, float),
}


def heartbeats_table() -> str:
    """Return the operations on the shared directory and the CPU time of heartbeats, extrapolated to 1,024 ranks."""
    parts = []
    for result in read_results("heartbeats"):
        measured = result["samples"]["rows"]
        ranks, rows = [row["ranks"] for row in measured], []
        for name, laws in HEARTBEAT_LAWS.items():
            cells = []
            for key, factor, digits, law in zip(("operations", "seconds"), (1, 1000), (0, 2), laws, strict=True):
                values = [factor * row["designs"][name][key] for row in measured]
                at_1024 = extrapolate(ranks, values, law, TARGET_RANKS)
                cells += [f"{value:,.{digits}f}" for value in (*values, at_1024)]
            rows.append([name, *cells])
        columns = [*(f"{n}" for n in ranks), f"{TARGET_RANKS:,}, extrapolated"]
        head = ["design", *(f"operations, {n}" for n in columns), *(f"CPU time (ms), {n}" for n in columns)]
        lead = f"Measured on {hardware_of(result)}, {result['settings']['ranks_per_node']} ranks per node:\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts)


SCALE_TABLES: dict[str, Callable[[], str]] = {
    "scale": scale_table,
    "heartbeats": heartbeats_table,
}
