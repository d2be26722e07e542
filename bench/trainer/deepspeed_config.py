"""Generate the JSON with which DeepSpeed trains as one of our trainers does.

    build_deepspeed_config(Zero1Config(dtype="float32"), world_size=8)["zero_optimization"]["stage"]    # 1

DeepSpeed itself is not needed. `EXAMPLES` has one row for each of our flags that changes how the work is divided among
the ranks. docs/results.md shows these rows, each with the keys that this module generates.
"""

from typing import Any

from bench.tables.records import format_table
from nanoGPT.errors import ConfigError
from nanoGPT.train_config import TrainConfig
from phase1_zero1.parallelize import Zero1Config
from phase3_fsdp.fsdp import FsdpConfig

BYTES_PER_ELEMENT = 4  # DeepSpeed's buckets are in elements, ours in bytes of fp32
BLOCK = "nanoGPT.model.Block"
ALWAYS = 10**9  # elements; with stage3_max_live_parameters, no parameter of a smaller model is freed
EXAMPLE_RANKS, EXAMPLE_RANKS_PER_NODE = 8, 4

# For each row of the table: the phase, the flags, and what the key does not express.
EXAMPLES: list[tuple[str, dict[str, Any], str]] = [
    ("phase1", {}, "the optimizer is our torch AdamW: `deepspeed.initialize(optimizer=...)`"),
    ("phase1", {"batch_size": 2}, ""),
    ("phase1", {"gradient_accumulation_steps": 16}, "ours counts the micro-batches of all ranks, DeepSpeed's of one"),
    ("phase1", {"grad_clip": 0.5}, ""),
    ("phase1", {"dtype": "bfloat16"}, "DeepSpeed also reduces the gradients of Linear in bfloat16, we reduce in fp32"),
    ("phase1", {"optimizer": "muon"}, "DeepSpeed's own Muon; each parameter needs an attribute `use_muon`"),
    ("phase1", {"compile": True}, "call `engine.compile()`"),
    ("phase1", {"use_zero1": False}, ""),
    ("phase1", {"zero_stage": 2}, ""),
    ("phase1", {"zero1_bucket_mb": 4.0}, "ours is in 2^20 bytes, DeepSpeed's in elements"),
    ("phase1", {"zero1_backend": "naive"}, "DeepSpeed has one implementation, with flat buffers"),
    ("phase1", {"kernels": "triton"}, "call `phase2_triton.apply` on the model before `deepspeed.initialize`"),
    ("phase3", {}, "DeepSpeed reduces the gradients of every micro-batch"),
    ("phase3", {"use_fsdp": False}, ""),
    ("phase3", {"fsdp_wrap": "size"}, "DeepSpeed then gathers module by module, without a minimum size"),
    ("phase3", {"fsdp_min_num_params": 250_000}, "as above"),
    ("phase3", {"fsdp_reshard_after_forward": False}, ""),
    ("phase3", {"fsdp_shard_size": "node"}, "closest key: only a second copy of the parameters is per node"),
    ("phase3", {"fsdp_shard_size": "1"}, ""),
    ("phase3", {"fsdp_cpu_offload": True}, ""),
    ("phase3", {"fsdp_activation_checkpointing": "full"}, "the model calls `deepspeed.checkpointing.checkpoint`"),
    ("phase3", {"fsdp_sync_every_micro_batch": True}, "always so with DeepSpeed"),
    ("phase3", {"fsdp_prefetch": 2}, "ours counts units, DeepSpeed elements"),
    ("phase3", {"kernels": "triton"}, "as in phase 1"),
    ("phase3", {"async_save": True}, "no equivalent to a copy in memory in the JSON"),
]


def build_deepspeed_config(
    config: TrainConfig, world_size: int, ranks_per_node: int | None = None, defaults: bool = False
) -> dict[str, Any]:
    """Return the JSON for `deepspeed.initialize` that corresponds to a trainer's configuration.

    Args:
        config: a configuration of the baseline, phase 1 or phase 3.
        world_size: number of ranks.
        ranks_per_node: None: all ranks are on one node.
        defaults: keep DeepSpeed's own defaults for everything inside a ZeRO stage.

    Raises:
        ConfigError: the dtype is auto, or a rank has no micro-batch.
    """
    if config.dtype == "auto":
        raise ConfigError("--dtype=auto depends on the device: use --dtype=float32, bfloat16 or float16")
    if config.gradient_accumulation_steps % world_size:
        raise ConfigError(
            f"--gradient_accumulation_steps={config.gradient_accumulation_steps} is not divisible by the {world_size} "
            "ranks: use a multiple"
        )
    zero = {"stage": 0}
    if isinstance(config, Zero1Config) and config.use_zero1:
        zero = zero1_keys(config)
    elif isinstance(config, FsdpConfig) and config.use_fsdp:
        zero = zero3_keys(config, world_size, ranks_per_node or world_size)
    result = {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps // world_size,
        "gradient_clipping": config.grad_clip,
        "zero_optimization": {"stage": zero["stage"]} if defaults else zero,
    }
    if config.optimizer == "muon":
        result["optimizer"] = {"type": "Muon", "params": {"lr": config.learning_rate}}
    elif zero["stage"]:
        result["zero_allow_untested_optimizer"] = True  # without it, DeepSpeed refuses torch's AdamW
    if "offload_optimizer" in zero:
        result["zero_force_ds_cpu_optimizer"] = False  # the same
    if config.dtype != "float32":
        result["torch_autocast"] = {"enabled": True, "dtype": config.dtype}
    return result


def zero1_keys(config: Zero1Config) -> dict[str, Any]:
    """Return the keys for ZeRO-1 or ZeRO-2."""
    elements = max(1, int(config.zero1_bucket_mb * 2**20) // BYTES_PER_ELEMENT)
    return {
        "stage": config.zero_stage,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
        "overlap_comm": True,  # as zero1.py does; DeepSpeed's default is False
        # False: reduce each gradient only to the rank that needs it. True, the default: all-reduce all gradients.
        "use_multi_rank_bucket_allreduce": False,
    }


def zero3_keys(config: FsdpConfig, world_size: int, ranks_per_node: int) -> dict[str, Any]:
    """Return the keys for ZeRO-3, or for stage 0 if each rank stores the full model."""
    replica = config.ranks_per_replica(world_size, ranks_per_node)
    if replica == 1:
        return {"stage": 0}
    kept = 0 if config.fsdp_reshard_after_forward else ALWAYS
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "stage3_param_persistence_threshold": 0,  # also shard small parameters, as FSDP does
        "stage3_max_live_parameters": kept,
        "stage3_max_reuse_distance": kept,
    }
    if not config.wraps_by_size:
        zero["leaf_module"] = {"classes": [BLOCK]}  # gather all parameters of a block together
    if replica < world_size:
        zero["zero_hpz_partition_size"] = replica
    if config.fsdp_prefetch:
        zero["stage3_prefetch_bucket_size"] = config.fsdp_prefetch * count_block_parameters(config)
    if config.fsdp_cpu_offload:
        offload = {"device": "cpu", "pin_memory": config.device != "cpu"}
        zero |= {"offload_param": offload, "offload_optimizer": offload}
    return zero


def count_block_parameters(config: TrainConfig) -> int:
    """Return the number of parameters of one block: four matrices of the MLP and attention, and two LayerNorms."""
    width = config.n_embd
    biases = (3 + 1 + 4 + 1) * width + 2 * width if config.bias else 0
    return 12 * width * width + 2 * width + biases


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
    """Return our flags beside the keys of DeepSpeed's JSON. Keys without a section are in `zero_optimization`."""
    rows = []
    for phase, flags, note in EXAMPLES:
        ours = ", ".join(f"`--{name}={value}`" for name, value in flags.items()) or f"the defaults of {phase}"
        rows.append([ours, ", ".join(changed_keys(phase, flags)) or "no key", note])
    return format_table(["our flag", "DeepSpeed's JSON", "what differs"], rows)
