"""Generate the tables about DeepSpeed: our flags next to the keys of its JSON, and the measured runs."""

from collections.abc import Callable
from typing import Any

from bench.tables.records import TRAINERS, format_table, hardware_of, read_results
from bench.trainer.deepspeed_config import build_deepspeed_config
from phase1_zero1.parallelize import Zero1Config
from phase3_fsdp.fsdp import FsdpConfig

KINDS = ("all-reduce", "reduce", "reduce-scatter", "all-gather")
EXAMPLE_RANKS, EXAMPLE_RANKS_PER_NODE = 8, 4

# For each row of the table: the phase, the flags, and what the key does not express.
EXAMPLES: list[tuple[str, dict[str, Any], str]] = [
    ("phase1", {}, "the optimizer is torch's AdamW, as in our trainer: `deepspeed.initialize(optimizer=...)`"),
    ("phase1", {"batch_size": 2}, ""),
    ("phase1", {"gradient_accumulation_steps": 16}, "ours counts micro-batches of all ranks, DeepSpeed's of one rank"),
    ("phase1", {"grad_clip": 0.5}, ""),
    ("phase1", {"dtype": "bfloat16"}, "DeepSpeed also reduces gradients of Linear in bfloat16, we use fp32"),
    ("phase1", {"optimizer": "muon"}, "DeepSpeed's own Muon; each parameter needs an attribute `use_muon`"),
    ("phase1", {"compile": True}, "call `engine.compile()`"),
    ("phase1", {"use_zero1": False}, ""),
    ("phase1", {"zero_stage": 2}, ""),
    ("phase1", {"zero1_bucket_mb": 4.0}, "our flag is in units of 2^20 bytes, DeepSpeed's keys are in elements"),
    ("phase1", {"zero1_backend": "naive"}, "DeepSpeed has one implementation, with flat buffers"),
    ("phase1", {"kernels": "triton"}, "call `phase2_triton.apply` on the model before `deepspeed.initialize`"),
    ("phase3", {}, "DeepSpeed reduces the gradients of every micro-batch"),
    ("phase3", {"use_fsdp": False}, ""),
    ("phase3", {"fsdp_wrap": "size"}, "DeepSpeed then gathers module by module, without a minimum size"),
    ("phase3", {"fsdp_min_num_params": 250_000}, "as above"),
    ("phase3", {"fsdp_reshard_after_forward": False}, ""),
    ("phase3", {"fsdp_shard_size": "node"}, "closest key: it shards only a second copy of the parameters in each node"),
    ("phase3", {"fsdp_shard_size": "1"}, ""),
    ("phase3", {"fsdp_cpu_offload": True}, ""),
    ("phase3", {"fsdp_activation_checkpointing": "full"}, "the model calls `deepspeed.checkpointing.checkpoint`"),
    ("phase3", {"fsdp_sync_every_micro_batch": True}, "DeepSpeed always does this"),
    ("phase3", {"fsdp_prefetch": 2}, "our flag counts FSDP units, DeepSpeed's key counts elements"),
    ("phase3", {"kernels": "triton"}, "as in phase 1"),
    ("phase3", {"async_save": True}, "the JSON has no key for a save from a copy in memory"),
]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys as one level: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changed_keys(phase: str, flags: dict[str, Any]) -> list[str]:
    """Return the keys of the JSON that flags of a phase change or remove, as text; without flags, all keys."""
    config_class = {"phase1": Zero1Config, "phase3": FsdpConfig}[phase]
    ranks = (EXAMPLE_RANKS, EXAMPLE_RANKS_PER_NODE)
    new = flatten(build_deepspeed_config(config_class(**{"dtype": "float32", **flags}), *ranks))
    if not flags:
        return [format_key(name, value) for name, value in new.items()]
    old = flatten(build_deepspeed_config(config_class(dtype="float32"), *ranks))
    changed = [format_key(name, value) for name, value in new.items() if old.get(name) != value or name not in old]
    if new["zero_optimization.stage"] != old["zero_optimization.stage"] and not new["zero_optimization.stage"]:
        return changed  # without ZeRO, its other keys have no meaning
    return changed + [f"without `{name.removeprefix('zero_optimization.')}`" for name in old.keys() - new.keys()]


def format_key(name: str, value: Any) -> str:
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else value
    return f"`{name.removeprefix('zero_optimization.')}: {text}`".replace("'", '"')


def deepspeed_keys_table() -> str:
    """Return our flags next to the keys of DeepSpeed's JSON. Keys without a section are in `zero_optimization`."""
    rows = []
    for phase, flags, note in EXAMPLES:
        ours = ", ".join(f"`--{name}={value}`" for name, value in flags.items()) or f"the defaults of {phase}"
        rows.append([ours, ", ".join(changed_keys(phase, flags)) or "no key", note])
    return format_table(["our flag", "DeepSpeed's JSON", "what differs"], rows)


def deepspeed_table() -> str:
    """Return our runs and those of DeepSpeed: loss difference, collectives and tensors of rank 0."""
    parts = []
    for result in read_results("deepspeed"):
        rows = []
        for row in result["samples"]["rows"]:
            sizes = dict.fromkeys(KINDS, 0)
            for each in row["collectives"]:
                sizes[each["kind"]] += each["tensor_bytes"]
            sent = sum(each["ring_bytes"] for each in row["collectives"])
            cells = [f"{sizes[kind] / 1e6:.2f}" for kind in KINDS] + [f"{sent / 1e6:.2f}"]
            cells += [f"{row['live_bytes'] / 1e6:.2f}"]
            rows.append([name_run(row), str(row["ranks"]), f"{row['loss_gap']:.1e}", *cells])
        head = ["run", "ranks", "max loss difference", *(f"{kind} (MB)" for kind in KINDS)]
        head += ["communication per rank (MB)", "tensors after the step (MB)"]
        samples = result["samples"]
        version, steps = samples["deepspeed"], samples["flags"]["max_iters"]
        lead = f"Measured on {hardware_of(result)}, DeepSpeed {version}, {steps} steps each:\n\n"
        parts.append(lead + format_table(head, rows))
    return "\n".join(parts)


def name_run(row: dict[str, Any]) -> str:
    """Return the trainer of a run and its options."""
    options = [f"`{name}={value}`" for name, value in row["options"].items()]
    if "json" not in row:
        return " ".join([TRAINERS[row["trainer"]], *options])
    stage = f"ZeRO-{row['json']['zero_optimization']['stage']}"
    return f"DeepSpeed {stage}, {'its defaults' if row['defaults'] else 'our options'}"


DEEPSPEED_TABLES: dict[str, Callable[[], str]] = {
    "deepspeed": deepspeed_table,
    "deepspeed_keys": deepspeed_keys_table,
}
