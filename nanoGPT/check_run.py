"""Check a run before training: first in the launcher, before any rank starts, and then again on each rank."""

from pathlib import Path

import torch

from measure.memory_limits import check_parameters_fit, check_state_fits
from nanoGPT.checkpoint.hugging_face import PRETRAINED
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.algorithms import choose_attention
from nanoGPT.distributed.runtime import pick_device, pick_dtype
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.train_config import TrainConfig, validate


def check_run(config: TrainConfig, world_size: int, local_world_size: int) -> TokenData:
    """Check everything that can be checked before a process group starts and before any file is written.

    Returns:
        The run's data.

    Raises:
        ConfigError: the run cannot work; the message says what to do.
    """
    validate(config, world_size)
    device, _ = pick_device(config.device, 0, local_world_size, world_size, config.supports_mps)
    dtype, _ = pick_dtype(config.dtype, device)
    choose_attention(config.attention, config.deterministic, device, dtype, config.dropout)
    is_known = config.init_from in ("scratch", "resume", *PRETRAINED)
    if not is_known and not (config.init_from and Path(config.init_from).is_dir()):
        suggestion = did_you_mean(config.init_from, ["scratch", "resume", *PRETRAINED])
        raise ConfigError(
            f"--init_from={config.init_from} is neither scratch, resume, {', '.join(PRETRAINED)} nor a directory"
            f"{suggestion}"
        )
    data = TokenData.from_config(config)
    is_on_cpu = device.type == "cpu" or config.min_gpu_state(world_size, local_world_size) == 0  # CPU offload
    if is_on_cpu and config.init_from in ("scratch", "resume"):
        check_parameters_fit(config, data.tokenizer["vocab_size"], world_size, local_world_size)
    if device.type == "cuda" and config.init_from in ("scratch", "resume"):
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
        check_state_fits(config, data.tokenizer["vocab_size"], world_size, local_world_size, gpu_bytes)
    return data
