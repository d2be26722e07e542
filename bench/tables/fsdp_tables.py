"""Phase 3's tables, made from the committed results; `bench.tables.tables` puts them into the documents."""

from collections.abc import Callable
from typing import Any

import torch

from bench.tables.records import hardware_of, read_results, table
from nanoGPT.memory.costs import ring_bytes
from nanoGPT.model import GPTConfig
from phase3_fsdp.activation_bytes import saved_activations


def kinds_of(row: dict[str, Any]) -> str:
    """A row's options that are not the defaults."""
    options = row["options"]
    if options.get("use_fsdp") is False:
        return "DDP"
    return ", ".join(f"`{name.removeprefix('fsdp_')}={value}`" for name, value in options.items()) or "FSDP"


def fsdp_memory_table() -> str:
    """State, gathered bytes, activations and time of the default model, beside the formula."""
    parts = []
    for result in read_results("fsdp-memory"):
        rows = []
        for row in result["samples"]["rows"]:
            ledger, memory = row["ledger"], row["ledger"]["memory"]
            counted, expected = (sum(ledger[name].values()) for name in ("state_bytes", "expected_state_bytes"))
            sent = sum(each["ring_bytes"] for each in ledger["collectives"])
            cells = [counted, expected, memory["peak"]["gathered"], memory["after_forward"]["gradients"]]
            cells += [memory["after_forward"]["activations"], row["expected_activations"], sum(memory["peak"].values())]
            numbers = [f"{cell / 1e6:.2f}" for cell in cells]
            rows.append([str(row["ranks"]), kinds_of(row), *numbers, f"{sent / 1e6:.2f}", f"{row['step_ms']:.0f} ms"])
        head = ["ranks", "", "state", "formula", "gathered at the peak", "gradients kept meanwhile", "activations"]
        head += ["arithmetic", "peak of all", "sent in a step", "step"]
        params = result["samples"]["rows"][0]["parameters"]
        lead = f"Measured on {hardware_of(result)}, {params:,} parameters, MB of rank 0:\n\n"
        parts.append(lead + table(head, rows))
    return "\n".join(parts)


def fsdp_options_table() -> str:
    """Every row of the covering array, with its loss difference and whether bytes are the formula's."""
    parts = []
    for result in read_results("fsdp-options"):
        rows = []
        for row in result["samples"]["rows"]:
            value = {name.removeprefix("fsdp_"): v for name, v in row.items()}
            words = [str(value.get("wrap", "-")), "yes" if value.get("reshard_after_forward", True) else "no"]
            words += [str(value.get("shard_size", "DDP"))]
            words += ["yes" if value.get(name) else "" for name in ("cpu_offload", "sync_every_micro_batch")]
            words += [str(value.get("prefetch", "")), value["activation_checkpointing"], value["kernels"]]
            words += ["yes" if value.get(name) else "" for name in ("compile", "async_save")]
            words += [value.get("dtype", "float32"), str(value.get("vocab_size", 75))]
            sent = sum(ring_bytes(*split(key, size)) for key, size in row["traffic"].items())
            exact = row["traffic"] == row["expected"] and row["state"] == row["expected_state"]
            words += [f"{row['gap']:.1e}", f"{sent / 1e6:.2f} MB", "to the byte" if exact else "OFF"]
            rows.append([str(row["ranks"]), *words])
        head = ["ranks", "wrap", "reshard", "shards", "offload", "sync every", "prefetch", "checkpointing", "kernels"]
        head += ["compile", "async save", "dtype", "rows", "losses off by", "sent", "state and traffic"]
        lead = f"Measured on {hardware_of(result)}, {result['settings']['steps']} steps each:\n\n"
        parts.append(lead + table(head, rows))
    return "\n".join(parts) or "Not measured yet: `make bench-fsdp ARGS=--write`.\n"


def split(key: str, size: int) -> tuple[str, int, int]:
    kind, ranks = key.split(" over ")
    return kind, size, int(ranks)


def torture_table() -> str:
    """What a kill at each point of a save leaves, and the kills and flips at random."""
    parts = []
    for result in read_results("torture"):
        samples = result["samples"]
        rows = [[str(row["rank"]), row["point"], str(row["sync"]), str(row["async"])] for row in samples["sweep"]]
        head = ["rank killed", "in the save of step 3", "opens, saved in the foreground", "in the background"]
        kills, flips = samples["random"], samples["flips"]
        left = ", ".join(f"{name} {count}" for name, count in sorted(kills["left"].items()))
        words = (
            f"\n{kills['kills']} kills at random moments: every time all that was saved opened, all numbers of its "
            f"step; they left ({left}). {flips['flipped']} flipped bits: {flips['refused']} refused.\n"
        )
        parts.append(f"Measured on {hardware_of(result)}:\n\n" + table(head, rows) + words)
    return "\n".join(parts)


def save_speed_table() -> str:
    """Saves of the same bytes: bare, ours, and what a save in the background stops."""
    rows = []
    for result in read_results("save-speed"):
        median = {name: sorted(values)[len(values) // 2] for name, values in result["samples"].items()}
        size = result["settings"]["bytes"]
        names = ("bare_s", "ours_s", "stop_s")
        cells = [hardware_of(result), f"{size / 1e6:,.0f} MB", *(f"{median[name]:.2f} s" for name in names)]
        share = f"{median['stop_s'] / median['ours_s']:.1%}"
        rows.append([*cells, f"{median['bare_s'] / median['ours_s']:.0%}", share])
    head = ["hardware", "bytes", "bare `dcp.save`, fsync", "ours", "stop of a background save"]
    return table([*head, "throughput of the bare one", "stop / ours"], rows)


def activations_table() -> str:
    """What a block of GPT-2 124M keeps for its backward, B = 8, T = 1024, bf16, no dropout."""
    shape = GPTConfig(12, 12, 768, 1024, False, 50304)
    modes = ("none", "selective", "full")
    kept = {mode: saved_activations(shape, 8, 1024, torch.bfloat16, mode) for mode in modes}
    named: dict[str, Any] = {row.name: row for mode in modes for row in kept[mode]}
    order = [row.name for row in kept["none"]] + [n for n in named if n not in {r.name for r in kept["none"]}]
    rows = []
    for name in order:
        row = named[name]
        where = ["yes" if row in kept[mode] else "" for mode in modes]
        rows.append([name, row.shape, f"{row.bytes / 1e6:.1f}", *where, row.why])
    sums = [f"{sum(row.bytes for row in kept[mode]) / 1e6:.1f}" for mode in modes]
    return table(["tensor", "shape", "MB", *modes, "kept for"], [*rows, ["together", "", "", *sums, ""]])


FSDP_TABLES: dict[str, Callable[[], str]] = {
    "fsdp_memory": fsdp_memory_table,
    "fsdp_options": fsdp_options_table,
    "torture": torture_table,
    "save_speed": save_speed_table,
    "activations": activations_table,
}
