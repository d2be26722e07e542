"""Tables of what only a GPU can show (`python -m bench.gpu`), and of the comparison with nanoGPT."""

import statistics
from collections.abc import Callable

from bench.tables.records import NOT_MEASURED, TRAINERS, format_table, hardware_of, read_results


def gpu_table() -> str:
    """Return one row for each task that ran on a GPU."""
    parts = []
    for result in read_results("gpu"):
        rows = [[row["name"], row["state"], row["summary"]] for row in result["samples"]["rows"]]
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + format_table(["task", "state", "result"], rows))
    return "\n".join(parts) or NOT_MEASURED


def find_fast_step_ms(step_ms: list[float]) -> float:
    """Return the time (ms) of the slowest step in the fastest tenth. Other programs on the machine disturb it least."""
    return sorted(step_ms)[(len(step_ms) - 1) // 10]


def nanogpt_table() -> str:
    """Return the comparison with nanoGPT: one row per round."""
    parts = []
    for result in read_results("nanogpt"):
        samples, rows = result["samples"], []
        pairs = zip(samples["rows"][::2], samples["rows"][1::2], samples["time_ratios"], strict=True)
        for number, (theirs, ours, ratio) in enumerate(pairs, 1):
            fast = find_fast_step_ms(ours["step_ms"]) / find_fast_step_ms(theirs["step_ms"])
            times = [f"{statistics.median(row['step_ms']):.1f}" for row in (theirs, ours)]
            peaks = [f"{row['peak_bytes'] / 2**20:,.0f}" for row in (theirs, ours)]
            losses = [f"{row['last_loss']:.3f}" for row in (theirs, ours)]
            rows.append([str(number), *times, f"{ratio:.2f}", f"{fast:.2f}", *peaks, *losses])
        name = TRAINERS[samples["rows"][1]["trainer"]]
        head = ["round", "nanoGPT (ms per step)", f"{name} (ms per step)", "ratio of times"]
        head += ["ratio of the fastest tenths"]
        head += ["nanoGPT, peak memory (MiB)", f"{name}, peak memory (MiB)", "nanoGPT, last loss", f"{name}, last loss"]
        median = statistics.median(samples["time_ratios"])
        lead = f"Measured on {hardware_of(result)}; the median of the ratios is {median:.2f}:\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts)


GPU_TABLES: dict[str, Callable[[], str]] = {"gpu": gpu_table, "nanogpt": nanogpt_table}
