"""Generate the tables about many ranks. `bench.tables.tables` writes them into the documents."""

from collections.abc import Callable

from bench.tables.plan_tables import extrapolate
from bench.tables.records import format_table, hardware_of, read_results

TARGET_RANKS = 1024

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


SCALE_TABLES: dict[str, Callable[[], str]] = {"heartbeats": heartbeats_table}
