"""Check that a checkpoint belongs to the run that uses it: the same model, optimizer, tokenizer, data and position.

A run that resumes a checkpoint needs all of them, an evaluation only the model and the tokenizer.
"""

from collections.abc import Mapping
from typing import Any

from nanoGPT.checkpoint.manifest import Checkpoint
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPTConfig
from nanoGPT.tokenizer import TokenizerIdentity, describe_tokenizer
from nanoGPT.train_config import TrainConfig, field_names

# The fields that a model's configuration shares with that of a run. A run may change the dropout.
SHAPE = tuple(name for name in field_names(GPTConfig) if name in field_names(TrainConfig) and name != "dropout")


def check_shape(config: TrainConfig, checkpoint: Checkpoint, allows_shorter: bool = False) -> None:
    """Check that the configuration has the shape of the checkpoint's model.

    Args:
        allows_shorter: whether sequences may be shorter than the context of the model, as in an evaluation.

    Raises:
        ConfigError: a field differs; the message names it.
    """
    saved, name = checkpoint.manifest["model_args"], checkpoint.path.name
    for key in SHAPE:
        value = getattr(config, key)
        if value is None or value == saved[key] or (allows_shorter and key == "block_size" and value < saved[key]):
            continue
        remedy = "remove the flag" + ("" if allows_shorter else " to resume, or start a new run in another --out_dir")
        raise ConfigError(f"--{key}={value}, but {name} was trained with {key}={saved[key]}: {remedy}")


def check_same_tokenizer(
    config: TrainConfig, data: TokenData, name: str, tokenizer: TokenizerIdentity, dataset: str | None = None
) -> None:
    """Check that weights were trained with the tokenizer of the data.

    Args:
        config: of the run.
        data: of the run.
        name: of the checkpoint, or of the source of the weights.
        tokenizer: with which they were trained.
        dataset: on which they were trained, if it is known.

    Raises:
        ConfigError: they were not, so every token id would mean another text.
    """
    if data.tokenizer["sha256"] != tokenizer["sha256"]:
        remedy = f"use --dataset={dataset}" if dataset else "use a dataset that was prepared with that tokenizer"
        raise ConfigError(
            f"--dataset={config.dataset} has a different tokenizer ({describe_tokenizer(data.tokenizer)}) than {name} "
            f"({describe_tokenizer(tokenizer)}): {remedy}"
        )


def check_resume(config: TrainConfig, data: TokenData, checkpoint: Checkpoint) -> None:
    """Check that a run resumes a checkpoint with the same model, optimizer and data.

    Raises:
        ConfigError: one of them differs; the message names it.
    """
    name = checkpoint.path.name
    if checkpoint.step > config.max_iters:
        raise ConfigError(
            f"--max_iters={config.max_iters}, but {name} is past it: raise --max_iters, or use another --out_dir"
        )
    check_shape(config, checkpoint)
    if config.optimizer != (saved_optimizer := checkpoint.manifest["config"].get("optimizer", "adamw")):
        raise ConfigError(
            f"--optimizer={config.optimizer}, but {name} was trained with --optimizer={saved_optimizer}: remove the "
            f"flag to resume, or start a new run from its weights with --init_from={config.out_dir} and "
            "another --out_dir"
        )
    manifest = checkpoint.manifest
    check_same_tokenizer(config, data, name, manifest["data"]["tokenizer"], manifest["config"]["dataset"])
    identity, saved = data.identity, checkpoint.manifest["data"]
    if identity.get("weights") != saved.get("weights"):
        raise ConfigError(
            f"--dataset={config.dataset} is another mixture than that of {name}: use "
            f"--dataset={checkpoint.manifest['config']['dataset']} to resume, or start a new run from these weights "
            f"with --init_from={config.out_dir} and another --out_dir"
        )
    saved_files, files = saved["files"], identity["files"]
    if changed := sorted(file for file in {*saved_files, *files} if saved_files.get(file) != files.get(file)):
        raise ConfigError(
            f"--dataset={config.dataset} is not the data that {name} was trained on ({changed[0]} differs): prepare "
            "the original data again to resume, or start a new run from these weights with "
            f"--init_from={config.out_dir} and another --out_dir"
        )
    check_position(config, checkpoint.manifest["config"], name)


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
