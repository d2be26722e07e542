"""Describe what is easy to overlook in a configuration: its schedule, and what a resume has changed."""

from collections.abc import Iterator, Mapping
from typing import Any

from nanoGPT.job.parse import RUN_FIELDS
from nanoGPT.train_config import TrainConfig


def describe_changes(config: TrainConfig, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence that lists the values which differ from those of the checkpoint, if there are any.

    Args:
        config: the configuration of the run.
        saved: the configuration of the checkpoint, perhaps of another phase; that of the run itself, if it is new.
    """
    values = {name: value for name, value in vars(config).items() if name not in {*RUN_FIELDS, "init_from"}}
    changed = [name for name, value in values.items() if name in saved and saved[name] != value]
    if changed:
        changes = ", ".join(f"{name} {saved[name]} to {values[name]}" for name in changed)
        yield f"changed since the checkpoint: {changes}"


def describe_schedule(config: TrainConfig, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for a warm-up that is too long, and for a decay that ends at another step than before.

    Args:
        config: the configuration of the run.
        saved: the configuration of the checkpoint that the run resumes; that of the run itself, if it is new.
    """
    old_end, new_end = (
        each["max_iters"] if each["lr_decay_iters"] is None else each["lr_decay_iters"]
        for each in (saved, vars(config))
    )
    last_step = min(new_end, config.max_iters)
    if config.decay_lr and config.warmup_iters >= last_step:
        yield (
            f"the warm-up takes {config.warmup_iters} steps, and the decay of the learning rate ends at step "
            f"{last_step}, so there is no decay: use a shorter warm-up, such as --warmup_iters={last_step // 10}"
        )
    if config.decay_lr and old_end != new_end:
        yield (
            f"the learning rate now decays until step {new_end} instead of {old_end}: "
            f"--lr_decay_iters={old_end} keeps the decay as it was"
        )
