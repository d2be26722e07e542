"""Generate the tables of phase 3 from the committed results. `bench.tables.tables` writes them into the documents."""

import math
from collections.abc import Callable
from typing import Any

import torch

from bench.tables.records import format_table, hardware_of, read_results
from nanoGPT.memory.costs import ring_bytes
from nanoGPT.model import GPTConfig
from phase3_fsdp.activation_bytes import saved_activations

# Words for what a killed save leaves behind, where the result file has a terse form.
LEFTOVERS = {
    "all but the rename": "all files written but not renamed",
    "nothing: between two saves": "no save in progress",
}


def format_options(row: dict[str, Any]) -> str:
    """Return the options of a row that differ from the defaults."""
    options = row["options"]
    if options.get("use_fsdp") is False:
        return "DDP"
    return ", ".join(f"`{name.removeprefix('fsdp_')}={value}`" for name, value in options.items()) or "FSDP"


def fsdp_memory_table() -> str:
    """Return memory, communication and step time of the default model, next to the formulas."""
    parts = []
    for result in read_results("fsdp-memory"):
        rows = []
        for row in result["samples"]["rows"]:
            ledger, memory = row["ledger"], row["ledger"]["memory"]
            state, expected = (sum(ledger[name].values()) for name in ("state_bytes", "expected_state_bytes"))
            sent = sum(each["ring_bytes"] for each in ledger["collectives"])
            sizes = [state, expected, memory["peak"]["gathered"], memory["after_forward"]["gradients"]]
            sizes += [memory["after_forward"]["activations"], row["expected_activations"], sum(memory["peak"].values())]
            cells = [f"{size / 1e6:.2f}" for size in [*sizes, sent]]
            rows.append([str(row["ranks"]), format_options(row), *cells, f"{row['step_ms']:.0f}"])
        head = ["ranks", "options", "state per rank (MB)", "state by the formula (MB)", "all-gathered at the peak (MB)"]
        head += ["gradients before the last backward pass (MB)", "activations (MB)", "activations by the formula (MB)"]
        head += ["peak memory (MB)", "communication per rank (MB)", "step (ms)"]
        params = result["samples"]["rows"][0]["parameters"]
        lead = f"Measured on {hardware_of(result)}, {params:,} parameters, rank 0, one step:\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts)


def fsdp_options_table() -> str:
    """Return every row of the covering array, with its loss difference and whether its bytes match the formula."""
    parts = []
    for result in read_results("fsdp-options"):
        rows = []
        for row in result["samples"]["rows"]:
            options = {name.removeprefix("fsdp_"): value for name, value in row.items()}
            cells = [str(options.get("wrap", "-")), "yes" if options.get("reshard_after_forward", True) else "no"]
            cells += [str(options.get("shard_size", "DDP"))]
            cells += ["yes" if options.get(name) else "" for name in ("cpu_offload", "sync_every_micro_batch")]
            cells += [str(options.get("prefetch", "")), options["activation_checkpointing"], options["kernels"]]
            cells += ["yes" if options.get(name) else "" for name in ("compile", "async_save")]
            cells += [options.get("dtype", "float32"), str(options.get("vocab_size", 75))]
            sent = sum(ring_bytes(*parse_traffic(key, size)) for key, size in row["traffic"].items())
            is_exact = row["traffic"] == row["expected"] and row["state"] == row["expected_state"]
            cells += [f"{row['gap']:.1e}", f"{sent / 1e6:.2f}", "yes" if is_exact else "NO"]
            rows.append([str(row["ranks"]), *cells])
        head = ["ranks", "wrap", "reshard after forward", "shard size", "CPU offload", "sync every micro-batch"]
        head += ["prefetch", "activation checkpointing", "kernels", "compile", "async save", "dtype", "vocabulary size"]
        head += ["max loss difference", "communication per rank (MB)", "matches the formula"]
        lead = f"Measured on {hardware_of(result)}, {result['settings']['steps']} steps each:\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts) or "Not measured yet: `make bench-fsdp ARGS=--write`.\n"


def parse_traffic(key: str, size: int) -> tuple[str, int, int]:
    """Return kind, bytes and ranks of a collective. Its key in the result file is such as "all-gather over 4"."""
    kind, ranks = key.split(" over ")
    return kind, size, int(ranks)


def torture_table() -> str:
    """Return what opens after a kill at each point of a save, and the results of random kills and bit flips."""
    parts = []
    for result in read_results("torture"):
        samples = result["samples"]
        rows = [[str(row["rank"]), row["point"], str(row["sync"]), str(row["async"])] for row in samples["sweep"]]
        head = ["killed rank", "when it is killed, in the save of step 3", "step that loads after a synchronous save"]
        head += ["step that loads after an asynchronous save"]
        kills, flips = samples["random"], samples["flips"]
        left = "; ".join(f"{LEFTOVERS.get(name, name)} ({count})" for name, count in sorted(kills["left"].items()))
        text = (
            f"\n{kills['kills']} kills at random moments: after each one, every finished checkpoint loaded with the "
            f"values of its step. After the kill, the unfinished save was in one of these states: {left}. "
            f"{flips['refused']} of {flips['flipped']} checkpoints with one flipped bit were rejected.\n"
        )
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + format_table(head, rows) + text)
    return "\n".join(parts)


def generation_table() -> str:
    """Return the speed and the cost of each way to spread a model that generates text, and what kills did."""
    parts = []
    for result in read_results("generation"):
        samples, rows = result["samples"], []
        for row in samples["ways"]:
            names = [name for name in ("network_bytes", "all_gathered_bytes") if name in row]
            matches = all(math.isclose(row[name], row[f"predicted_{name}"], rel_tol=1e-9) for name in names)
            rows.append(
                [
                    f"`{row['spread']}`",
                    str(row["sequences"]),
                    f"{row['weights_bytes'] / 1e6:.1f}",
                    *([f"{row['all_gathered_bytes'] / 1e6:.1f}"] if "all_gathered_bytes" in row else []),
                    f"{row['network_bytes'] / 1e6:.3f}",
                    "yes" if matches else "no",
                    f"{row['tokens_per_second']:.1f}",
                ]
            )
        head = ["method", "sequences", "weights per rank (MB)"]
        if "all_gathered_bytes" in samples["ways"][0]:
            head.append("peak all-gathered memory (MB)")
        head.append("communication per round and rank (MB)")
        table = format_table([*head, "matches the formula", "tokens per second"], rows)
        text = ""
        if kills := samples.get("kills"):
            count, problems, memory = len(kills["kills"]), kills["problems"], kills["memory_bytes"][9:]
            text = (
                f"\nAn evaluation with {problems} problems was killed with SIGKILL {count} times at random moments. "
                "The same command continued each time. No problem was lost or solved twice. In a run without a kill, "
                f"rank 0 used {memory[0] / 1e6:.0f} MB after the tenth problem and {memory[-1] / 1e6:.0f} MB after the "
                "last.\n"
            )
        parts.append(f"Measured on {hardware_of(result)}, {samples['ranks']} ranks:\n\n" + table + text)
    return "\n".join(parts)


def save_speed_table() -> str:
    """Return the time to save the same bytes with `dcp.save` and with a verified save, synchronous or asynchronous."""
    rows = []
    for result in read_results("save-speed"):
        median = {name: sorted(values)[len(values) // 2] for name, values in result["samples"].items()}
        size = result["settings"]["bytes"]
        times = [f"{median[name]:.2f}" for name in ("bare_s", "ours_s", "stop_s")]
        ratios = [f"{median['bare_s'] / median['ours_s']:.0%}", f"{median['stop_s'] / median['ours_s']:.1%}"]
        rows.append([hardware_of(result), f"{size / 1e6:,.0f}", *times, *ratios])
    head = ["hardware", "checkpoint (MB)", "`dcp.save` and fsync (s)", "verified save (s)"]
    head += ["training pause of an asynchronous save (s)", "throughput of the verified save, relative to `dcp.save`"]
    return format_table([*head, "training pause, relative to the verified save"], rows)


def activations_table() -> str:
    """Return the tensors that a block of GPT-2 124M saves for its backward pass: B = 8, T = 1024, bf16, no dropout."""
    shape = GPTConfig(12, 12, 768, 1024, False, 50304)
    modes = ("none", "selective", "full")
    saved = {mode: saved_activations(shape, 8, 1024, torch.bfloat16, mode) for mode in modes}
    tensors: dict[str, Any] = {row.name: row for mode in modes for row in saved[mode]}
    first = [row.name for row in saved["none"]]
    rows = []
    for name in first + [name for name in tensors if name not in first]:
        row = tensors[name]
        is_saved = ["yes" if row in saved[mode] else "" for mode in modes]
        rows.append([name, row.shape, f"{row.bytes / 1e6:.1f}", *is_saved, row.why])
    sums = [f"{sum(row.bytes for row in saved[mode]) / 1e6:.1f}" for mode in modes]
    head = ["tensor", "shape", "size (MB)", *(f"saved with `{mode}`" for mode in modes), "needed for"]
    return format_table(head, [*rows, ["total (MB)", "", "", *sums, ""]])


FSDP_TABLES: dict[str, Callable[[], str]] = {
    "fsdp_memory": fsdp_memory_table,
    "fsdp_options": fsdp_options_table,
    "torture": torture_table,
    "generation": generation_table,
    "save_speed": save_speed_table,
    "activations": activations_table,
}
