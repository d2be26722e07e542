"""Check that a resumed run continues at the same position of its epoch."""

from collections.abc import Mapping
from typing import Any

from nanoGPT.errors import ConfigError
from nanoGPT.train_config import TrainConfig


def check_position(config: TrainConfig, saved: Mapping[str, Any], name: str) -> None:
    """Check that the next step of a resumed run reads the next sequences of the epoch.

    With `sampling=epoch`, a step reads batch_size * gradient_accumulation_steps sequences, and its number determines
    which ones. Both values may change if their product does not. Random sampling has no position.

    Args:
        config: the configuration of the resumed run.
        saved: the configuration in the checkpoint's manifest.
        name: the name of the checkpoint.

    Raises:
        ConfigError: the run would skip or repeat sequences.
    """
    old_sampling = saved.get("sampling", "random")
    if config.eval_only or "epoch" not in (config.sampling, old_sampling):
        return
    new_run = f"or start a new run from these weights with --init_from={config.out_dir} and another --out_dir"
    for field, old in (("sampling", old_sampling), ("seed", saved["seed"])):
        if (value := getattr(config, field)) != old:
            raise ConfigError(
                f"--{field}={value}, but {name} was trained with --{field}={old}, so sequences would be skipped or "
                f"repeated: use --{field}={old} to resume, {new_run}"
            )
    sequences = config.batch_size * config.gradient_accumulation_steps
    old_sequences = saved["batch_size"] * saved["gradient_accumulation_steps"]
    if sequences != old_sequences:
        raise ConfigError(
            f"--batch_size={config.batch_size} --gradient_accumulation_steps={config.gradient_accumulation_steps} read "
            f"{sequences} sequences per step, but {name} was trained with {old_sequences} and --sampling=epoch, so "
            f"sequences would be skipped or repeated: use values with the product {old_sequences} to resume, {new_run}"
        )
