"""Generate the tables about elastic jobs: nodes that were killed, and nodes that were cut off the network."""

import statistics
from collections.abc import Callable

from bench.tables.records import format_table, hardware_of, read_results

WAYS = {"drop": "dropped packets", "down": "interface down"}  # to cut a node off the network, by their names in results


def node_kills_table() -> str:
    """Return how an elastic job continued after the loss of a node, by how the node was lost."""
    kinds = {
        "node": "SIGKILL of a launcher and all its ranks",
        "rank": "SIGKILL of one rank",
        "SIGTERM": "SIGTERM to a launcher",
    }
    parts = []
    for result in read_results("node-kills"):
        samples, rows = result["samples"], []
        interrupted = [row for row in samples["rows"] if row.get("interrupted", True)]  # older results lack the key
        for kind, text in kinds.items():
            lost = [row for row in interrupted if row["kind"] == kind]
            if not lost:
                continue
            steps = [row["steps_lost"] for row in lost]
            seconds = statistics.median(row["seconds"] for row in lost)
            rows.append([text, str(len(lost)), f"{statistics.fmean(steps):.1f}", str(max(steps)), f"{seconds:.1f}"])
        head = ["how the node was lost", "times", "steps lost (mean)", "steps lost (maximum)"]
        table = format_table([*head, "median time until it trains again (s)"], rows)
        text = (
            f"\nThe job continued {len(interrupted)} times and trained {samples['steps']:,} steps. The max loss "
            f"difference to an uninterrupted run is {samples['max_loss_difference']:.1e}.\n"
        )
        if others := len(samples["rows"]) - len(interrupted):
            text += f"Not counted: {others} loss{'es' * (others > 1)} of a node that had not joined the job yet.\n"
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + table + text)
    return "\n".join(parts)


def partitions_table() -> str:
    """Return what happened in an elastic job when a node was cut off the network, and when it came back."""
    head = ["the cut", "node", "exit code", "its ranks ended after (s)", "the others started after (s)"]
    head += ["steps lost", "its ranks that still ran then", "joined again after (s)"]
    parts = []
    for result in read_results("partitions"):
        samples, rows = result["samples"], []
        for row in samples["rows"]:
            seconds = {name: f"{value:.1f}" for name, value in row["seconds"].items()}
            cells = [WAYS[row["way"]], str(row["node"]), str(row["exit_code"]), seconds["ranks_ended"]]
            cells += [seconds["others_started"], str(row["steps_lost"]), str(row["ranks_in_both"]), seconds["joined"]]
            rows.append(cells)
        text = (
            f"\nThe job trained {samples['steps']:,} steps. The max loss difference to an uninterrupted run is "
            f"{samples['max_loss_difference']:.1e}; {len(samples['missing_steps'])} steps are missing in its metrics, "
            f"and {samples['gaps']} lines are out of order.\n"
        )
        for row in samples["brief"]:
            text += f"After a cut of {row['cut_seconds']:g} s, the ranks were started again {row['starts']} times.\n"
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + format_table(head, rows) + text)
    return "\n".join(parts)


ELASTIC_TABLES: dict[str, Callable[[], str]] = {"node_kills": node_kills_table, "partitions": partitions_table}
