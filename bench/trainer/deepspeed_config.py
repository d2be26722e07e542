"""Generate the JSON with which DeepSpeed trains as one of our trainers does.

    build_deepspeed_config(Zero1Config(dtype="float32"), world_size=8)["zero_optimization"]["stage"]    # 1

DeepSpeed itself is not needed. `bench/tables/deepspeed_tables.py` writes a table of our flags and the generated keys.
"""

from typing import Any

from nanoGPT.errors import ConfigError
from nanoGPT.train_config import TrainConfig
from phase1_zero1.parallelize import Zero1Config
from phase3_fsdp.fsdp import FsdpConfig

BYTES_PER_ELEMENT = 4  # DeepSpeed's buckets are in elements, ours in bytes of fp32
BLOCK = "nanoGPT.model.Block"
ALWAYS = 10**9  # elements; with stage3_max_live_parameters, no parameter of a smaller model is freed


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
        result["zero_force_ds_cpu_optimizer"] = False  # without it, DeepSpeed refuses torch's AdamW with offload
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
        "reduce_bucket_size": count_block_parameters(config),  # FSDP reduces block by block; the default takes 2 GB
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
