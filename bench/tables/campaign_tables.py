"""Tables of what only a GPU can show (`python -m bench.campaign`), and of the comparison with nanoGPT."""

import statistics
from collections.abc import Callable
from typing import Any

from bench.tables.records import NOT_MEASURED, TRAINERS, format_table, hardware_of, read_results

GIB = 2**30


def campaign_table() -> str:
    """Return one row per check of the campaign, with its result."""
    parts = []
    for result in read_results("campaign"):
        rows = []
        for part in result["samples"]["parts"]:
            describe = DESCRIPTIONS.get(part["stage"])
            if describe is None:
                continue
            if part["state"] != "done":
                rows.append([part["stage"], part["name"], f"{part['state']}: {first_line(part.get('reason', ''))}"])
                continue
            problems = part["result"].get("problems", [])
            answer = describe(part["result"]) + (f"; **problems**: {'; '.join(problems[:3])}" if problems else "")
            rows.append([part["stage"], part["name"], answer])
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + format_table(["stage", "part", "result"], rows))
    return "\n".join(parts) or NOT_MEASURED


def first_line(reason: str) -> str:
    """Return a reason without its traceback."""
    return reason.strip().partition("\n")[0][:120]


def describe_kernel(result: dict[str, Any]) -> str:
    worst = max(row["error"] / row["torch_error"] if row["torch_error"] else 0.0 for row in result["rows"])
    return f"error at most {worst:.2f} times the error of torch"


def describe_tiles(row: dict[str, Any]) -> str:
    """Return a label for a row that was measured with the tile sizes of a campaign; others have committed ones."""
    return ", tuned tile sizes" if row.get("tiles") == "tuned" else ""


def describe_compiled(result: dict[str, Any]) -> str:
    differences, tiles = result["max_loss_difference"], describe_tiles(result["runs"]["compiled"])
    return f"max loss difference: eager {differences['eager']:.1e}, compiled {differences['compiled']:.1e}{tiles}"


def describe_attention(result: dict[str, Any]) -> str:
    times = [f"{row['backend']} {row['ms']:.2f} ms" for row in result["rows"] if "ms" in row]
    return f"forward and backward pass: {', '.join(times)}; auto selects {result.get('auto', 'unknown')}"


def describe_tuning(result: dict[str, Any]) -> str:
    return ", ".join(f"{row['ms_before']:.3f} to {row['ms']:.3f} ms" for row in result["rows"])


def describe_plan(result: dict[str, Any]) -> str:
    predicted, measured = result["predicted_bytes"], result["measured_bytes"]
    if measured is None:
        return f"predicted {predicted / GIB:.2f} GiB{describe_tiles(result)}"
    error = predicted / measured - 1
    sizes = f"predicted {predicted / GIB:.2f} GiB, measured {measured / GIB:.2f} GiB ({error:+.1%})"
    return sizes + describe_tiles(result)


def describe_memory(result: dict[str, Any]) -> str:
    rate = statistics.median(result["tokens_per_second"])
    return f"{rate:,.0f} tokens/s, peak memory {result['peak_bytes'] / GIB:.1f} GiB{describe_tiles(result)}"


def describe_largest(result: dict[str, Any]) -> str:
    outcome = "trains" if result["fits"] else "does not fit"
    return f"{result['parameters'] / 1e9:.2f}B parameters, {outcome}: {describe_plan(result)}"


def describe_nanogpt(result: dict[str, Any]) -> str:
    ratio = statistics.median(result["time_ratios"])
    return f"{ratio:.2f} of nanoGPT's time, {result['memory_ratio']:.2f} of its peak memory"


DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "machine": lambda result: describe_attention(result) if "rows" in result else result["driver"] or "no GPU",
    "kernels": describe_kernel,
    "compiled": describe_compiled,
    "sanitizer": lambda result: result["output"].strip().rpartition("\n")[2],
    "tests": lambda result: result["summary"].strip("= "),
    "tuning": describe_tuning,
    "nanogpt": describe_nanogpt,
    "fsdp": lambda result: f"{result['ratio']:.2f} of the baseline's time",
    "plan": describe_plan,
    "memory": describe_memory,
    "options": describe_memory,
    "evaluation": lambda result: f"{result['tokens_per_second']:,.0f} tokens/s",
    "largest": describe_largest,
}


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


CAMPAIGN_TABLES: dict[str, Callable[[], str]] = {"campaign": campaign_table, "nanogpt": nanogpt_table}
