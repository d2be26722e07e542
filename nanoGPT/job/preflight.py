"""Refuse a run that cannot work, before any rank starts: what the launcher checks, and each rank once more."""

from pathlib import Path

from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import pick_device, pick_dtype
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.memory.device import check_parameters_fit
from nanoGPT.train_config import TrainConfig, validate

PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def preflight(config: TrainConfig, world_size: int, local_world_size: int) -> TokenData:
    """Refuse, before any process group starts and anything is written, whatever can be known not to work.

    Returns:
        The run's data.

    Raises:
        ConfigError: one sentence that says what to do.
    """
    validate(config, world_size)
    device, _ = pick_device(config.device, 0, local_world_size, world_size)
    pick_dtype(config.dtype, device)
    known = config.init_from in ("scratch", "resume", *PRETRAINED)
    if not known and not (config.init_from and Path(config.init_from).is_dir()):
        close = did_you_mean(config.init_from, ["scratch", "resume", *PRETRAINED])
        raise ConfigError(
            f"--init_from={config.init_from} is neither scratch, resume, {', '.join(PRETRAINED)} nor a directory{close}"
        )
    data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    if device.type == "cpu" and config.init_from in ("scratch", "resume"):
        check_parameters_fit(config, data.tokenizer["vocab_size"], world_size, local_world_size)
    return data
