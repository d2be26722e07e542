"""Weights in and out: a run's checkpoints, nanoGPT's ckpt.pt, and Hugging Face's GPT-2 directories.

    python -m nanoGPT.export --out_dir=out/my-run --to=exported                  # Hugging Face: AutoModel opens it
    python -m nanoGPT.export --out_dir=out/my-run --to=exported --format=ckpt    # nanoGPT's sample.py opens it

Whatever is read is read as tensors and plain values: a file that would run code is refused.
"""

import dataclasses
import json
import pickle
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

from nanoGPT.checkpoint import Checkpoint, Damaged, manifests, verify_files
from nanoGPT.config import C, ConfigError, TrainConfig, command_line, one_sentence
from nanoGPT.data import DOWNLOADS, TokenData
from nanoGPT.model import GPT, GPTConfig

if TYPE_CHECKING:
    from nanoGPT.runtime import Runtime

HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
SHAPE = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # (in, out) in GPT-2
GPT2_VOCAB, PADDED_VOCAB = 50257, 50304


@dataclass
class FullState:
    """A whole training state by parameter name, tied names once: the form that every payload can be turned into.

    Attributes:
        model: each parameter, whole, on the CPU.
        optimizer: for each parameter its state tensors, such as exp_avg; empty where only weights are known.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]


def tokenizer_rows(tokenizer: dict[str, Any]) -> int:
    """Rows of the embedding for a tokenizer: GPT-2's 50257 are padded to 50304, a multiple of 64."""
    return PADDED_VOCAB if tokenizer["vocab_size"] == GPT2_VOCAB else int(tokenizer["vocab_size"])


def starting_point(
    config: C, data: TokenData, checkpoint: Checkpoint | None
) -> tuple[C, GPTConfig, dict[str, Tensor] | None]:
    """Where a run begins.

    Returns:
        The configuration with the shape that the model really has, the model's own configuration, and its weights,
        or None when they are drawn (scratch) or come with the optimizer (resume).

    Raises:
        ConfigError: the shape, context or tokenizer of what is loaded does not fit what was asked for.
    """
    weights = None
    if checkpoint:
        check_resumed(config, data, checkpoint)
        shape = GPTConfig.of(checkpoint.manifest["model_args"])
    elif config.init_from == "scratch":
        rows = config.vocab_size or tokenizer_rows(data.tokenizer)
        shape = GPTConfig.of({**dataclasses.asdict(config), "vocab_size": rows})
    else:
        shape, weights = read_weights(config.init_from)
        if config.block_size > shape.block_size:
            raise ConfigError(
                f"--block_size={config.block_size} is longer than the {shape.block_size} positions that "
                f"{config.init_from} has: use --block_size={shape.block_size} or less"
            )
        shape.block_size = config.block_size
        weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][: config.block_size]
    if shape.vocab_size < data.tokenizer["vocab_size"]:
        raise ConfigError(
            f"the model has {shape.vocab_size} rows of vocabulary, but {config.dataset} needs "
            f"{data.tokenizer['vocab_size']}: use a dataset of the same tokenizer, or a larger --vocab_size"
        )
    shape.dropout = config.dropout
    return dataclasses.replace(config, **{name: getattr(shape, name) for name in SHAPE}), shape, weights


def check_resumed(config: TrainConfig, data: TokenData, checkpoint: Checkpoint) -> None:
    """Refuse to continue a checkpoint with another model or another tokenizer."""
    saved, name = checkpoint.manifest["model_args"], checkpoint.path.name
    for key in SHAPE:
        wanted = getattr(config, key)
        if wanted is not None and wanted != saved[key]:
            raise ConfigError(
                f"--{key}={wanted}, but {name} was trained with {key}={saved[key]}: leave the flag out to resume, "
                "or train anew in another --out_dir"
            )
    if data.tokenizer["sha256"] != checkpoint.manifest["data"]["tokenizer"]["sha256"]:
        raise ConfigError(
            f"--dataset={config.dataset} has another tokenizer than the one {name} was trained with: "
            f"use --dataset={checkpoint.manifest['config']['dataset']}"
        )


def about(config: TrainConfig, model_args: GPTConfig, data: TokenData, phase: str, best: float) -> dict[str, Any]:
    """What a checkpoint's manifest says of its run."""
    return {
        "phase": phase,
        "config": dataclasses.asdict(config),
        "model_args": dataclasses.asdict(model_args),
        "data": data.identity,
        "best_val_loss": best,
    }


# ---- the baseline's payload: nanoGPT's ckpt.pt


def write_ckpt(
    folder: Path, run: "Runtime", model: GPT, optimizer: torch.optim.Optimizer, step: int, facts: dict[str, Any]
) -> list[Path]:
    """Write `ckpt.pt` from a model and optimizer that every rank holds whole; rank 0 writes."""
    if not run.is_main:
        return []
    state = FullState(dict(model.named_parameters()), optimizer_by_name(model, optimizer))
    return [save_ckpt(folder / "ckpt.pt", state, step, facts)]


def save_ckpt(path: Path, state: FullState, step: int, facts: dict[str, Any]) -> Path:
    """Write nanoGPT's format: its keys, its order of the optimizer's parameters."""
    args = {k: v for k, v in facts["model_args"].items() if k != "gelu" or v != "none"}
    config = facts["config"]
    order = optimizer_order(state.model)
    decay = [i for i, name in enumerate(order) if state.model[name].dim() >= 2]
    groups = [
        {"params": decay, "weight_decay": config["weight_decay"]},
        {"params": list(range(len(decay), len(order))), "weight_decay": 0.0},
    ]
    defaults = {"lr": config["learning_rate"], "betas": (config["beta1"], config["beta2"]), "eps": 1e-8}
    defaults |= {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
    defaults |= {"fused": None, "decoupled_weight_decay": True}
    content = {
        "model": {**{k: v.detach() for k, v in state.model.items()}, HEAD: state.model[EMBEDDING].detach()},
        "optimizer": {
            "state": {i: state.optimizer[name] for i, name in enumerate(order) if name in state.optimizer},
            "param_groups": [{**defaults, **group} for group in groups],
        },
        "model_args": args,
        "iter_num": step,
        "best_val_loss": facts["best_val_loss"],
        "config": config,
    }
    torch.save(content, path)
    return path


def optimizer_order(params: dict[str, Tensor]) -> list[str]:
    """Parameter names in the order of `param_groups`: those that decay, then the others."""
    return [n for n, p in params.items() if p.dim() >= 2] + [n for n, p in params.items() if p.dim() < 2]


def optimizer_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state tensors by parameter name; the tensors themselves, not copies."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def read_ckpt(path: Path) -> tuple[FullState, dict[str, Any]]:
    """Read a `ckpt.pt` of this project or of nanoGPT: its state, and the rest of what it holds.

    Raises:
        ConfigError: it is no such file, or holds anything but tensors and plain values.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        model = {k.removeprefix("_orig_mod."): v for k, v in content.pop("model").items()}
        model = {k: v for k, v in model.items() if k != HEAD and not k.endswith(".attn.bias")}
        states = content.pop("optimizer", {"state": {}})["state"]
        order = optimizer_order(model)
        return FullState(model, {order[i]: state for i, state in states.items()}), content
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{path} holds more than tensors and plain values, so that opening it could run code: it is not opened"
        ) from None
    except (RuntimeError, KeyError, ValueError, AttributeError, EOFError, OSError, IndexError) as error:
        raise ConfigError(f"{path} is no checkpoint of nanoGPT ({type(error).__name__}): give another file") from None


def load_training_state(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's weights and optimizer state, whatever its payload, into a model that is held whole."""
    state = read_payload(path)
    load_whole(model, state.model)
    materialise(optimizer)
    for name, param in model.named_parameters():
        for key, value in state.optimizer.get(name, {}).items():
            optimizer.state[param][key].copy_(value)


def load_whole(model: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a model; the tied head comes with the embedding."""
    params = dict(model.named_parameters())
    if params.keys() != weights.keys():
        differ = sorted(params.keys() ^ weights.keys())
        raise ConfigError(f"the weights and the model differ in {len(differ)} parameters, such as {differ[0]}")
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(weights[name])


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state, by a step with zero gradients at learning rate zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# ---- any checkpoint, whole


def read_payload(path: Path) -> FullState:
    """The whole state in a checkpoint directory: from `ckpt.pt`, or put together from shards."""
    if (path / "ckpt.pt").is_file():
        return read_ckpt(path / "ckpt.pt")[0]
    reader = SafeReader(path)
    described = reader.read_metadata().state_dict_metadata
    tensors = {key: torch.empty(m.size, dtype=m.properties.dtype) for key, m in described.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ranks to talk to is what is wanted
        dcp.load(tensors, storage_reader=reader, planner=TensorsOnly(), no_dist=True)
    state = FullState({}, {})
    for key, tensor in tensors.items():
        kind, name = key.split(".", 1)
        if kind == "model":
            state.model[name] = tensor
        else:
            name, item = name.rsplit(".", 1)
            state.optimizer.setdefault(name, {})[item] = tensor
    return state


class SafeReader(FileSystemReader):
    """torch's reader of sharded checkpoints; the pickle in `.metadata` may name torch's own records only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with open(Path(self.path) / ".metadata", "rb") as file:
                OnlyRecords(file).load()
        except pickle.UnpicklingError as error:
            raise ConfigError(f"{self.path}/.metadata is not opened: {error}") from None
        return super().read_metadata(*args, **kwargs)


class OnlyRecords(pickle.Unpickler):
    """Refuses every global but those that describe tensors."""

    def find_class(self, module: str, name: str) -> Any:
        known = module == "torch.distributed.checkpoint.metadata" and isinstance(super().find_class(module, name), type)
        known |= (module, name) in {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        }
        known |= module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
        return super().find_class(module, name)


class TensorsOnly(DefaultLoadPlanner):
    """Loads tensors; anything else would be unpickled, and is refused."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ConfigError(f"{read_item.dest_index.fqn} is no tensor: this checkpoint is not opened")


def newest_whole(out_dir: Path) -> Checkpoint:
    """The newest checkpoint of a run that verifies; for one process, and nothing is moved aside."""
    for path, manifest in manifests(out_dir):
        try:
            verify_files(path, manifest)
            return Checkpoint(path, manifest)
        except Damaged as reason:
            print(f"skipping {path.name}: {reason}", file=sys.stderr)
    raise ConfigError(f"there is no whole checkpoint under {out_dir}: train first, or give the --out_dir of a run")


def read_weights(source: str) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Weights by parameter name, from a run's directory, a nanoGPT directory, a Hugging Face one, or a GPT-2 by name.

    Raises:
        ConfigError: none of these is there.
    """
    folder = Path(source)
    if source.startswith("gpt2") and not folder.is_dir():
        folder = download(source)
    if (folder / "checkpoints").is_dir():
        checkpoint = newest_whole(folder)
        return GPTConfig.of(checkpoint.manifest["model_args"]), read_payload(checkpoint.path).model
    if (folder / "ckpt.pt").is_file():
        state, rest = read_ckpt(folder / "ckpt.pt")
        return GPTConfig.of(rest["model_args"]), state.model
    if (folder / "config.json").is_file():
        return read_hf(folder)
    raise ConfigError(
        f"{source} holds neither checkpoints/, ckpt.pt nor config.json: give a run's or a model's directory"
    )


# ---- Hugging Face


def download(name: str) -> Path:
    """OpenAI's weights from the Hugging Face hub (extra `web`)."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(f"openai-community/{name}", allow_patterns=["config.json", "model.safetensors"]))
    except ImportError:
        raise ConfigError(f"--init_from={name} needs `.venv/bin/pip install -e '.[web]'`") from None
    except Exception as error:
        raise ConfigError(
            f"{name} could not be downloaded ({type(error).__name__}): check the network, or give a directory"
        ) from None


def read_hf(folder: Path) -> tuple[GPTConfig, dict[str, Tensor]]:
    """A Hugging Face GPT-2 directory: `config.json` and safetensors in one or several files.

    Raises:
        ConfigError: another architecture, or files that do not fit it.
    """
    try:
        hf = json.loads((folder / "config.json").read_text())
        if hf.get("model_type") != "gpt2":
            raise ConfigError(f"{folder} holds a {hf.get('model_type')} model: only gpt2 is known here")
        tensors = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        weights = {}
        for key, value in tensors.items():
            name = key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"
            if name != HEAD and not name.endswith((".attn.bias", ".attn.masked_bias")):
                weights[name] = value.t().contiguous() if name.endswith(CONV1D) else value
        gelu = "none" if hf.get("activation_function") == "gelu" else "tanh"
        return GPTConfig(
            hf["n_layer"], hf["n_head"], hf["n_embd"], hf["n_positions"], True, len(weights[EMBEDDING]), 0.0, gelu
        ), weights
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} is no Hugging Face GPT-2 with safetensors ({type(error).__name__}: {error})"
        ) from None


def write_hf(folder: Path, shape: GPTConfig, weights: dict[str, Tensor], rows: int) -> None:
    """Write a directory that `transformers` opens: Conv1D transposed, padding rows dropped, the head tied.

    Args:
        rows: the tokenizer's vocabulary; embedding rows from here on are padding.
    """
    tensors = {name: value.t() if name.endswith(CONV1D) else value for name, value in weights.items()}
    tensors[EMBEDDING] = tensors[EMBEDDING][:rows]
    if not shape.bias:  # Hugging Face's GPT-2 always has biases
        for name, value in weights.items():
            if ".ln_" in name or name.endswith(CONV1D):
                tensors[name.removesuffix("weight") + "bias"] = torch.zeros(value.shape[0], dtype=value.dtype)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    gpt2 = rows == GPT2_VOCAB
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu" if shape.gelu == "none" else "gelu_new",
        "n_layer": shape.n_layer,
        "n_head": shape.n_head,
        "n_embd": shape.n_embd,
        "n_positions": shape.block_size,
        "vocab_size": rows,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": rows - 1 if gpt2 else None,
        "eos_token_id": rows - 1 if gpt2 else None,
    }
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), shape.dropout)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    vocabulary = {
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": "vocab.json",
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee": "merges.txt",
    }
    for name, target in vocabulary.items():
        if gpt2 and (DOWNLOADS / "tiktoken" / name).is_file():
            shutil.copyfile(DOWNLOADS / "tiktoken" / name, folder / target)


def main(out_dir: str, to: str, format: Literal["hf", "ckpt"] = "hf") -> None:
    """Export a run's newest checkpoint, whatever phase and number of ranks wrote it.

    Args:
        out_dir: the run.
        to: directory to write.
        format: hf, for transformers; ckpt, for nanoGPT, with the optimizer.
    """
    checkpoint, folder = newest_whole(Path(out_dir)), Path(to)
    state, manifest = read_payload(checkpoint.path), checkpoint.manifest
    shape = GPTConfig.of(manifest["model_args"])
    folder.mkdir(parents=True, exist_ok=True)
    if format == "hf":
        write_hf(folder, shape, state.model, manifest["data"]["tokenizer"]["vocab_size"])
    else:
        save_ckpt(folder / "ckpt.pt", state, checkpoint.step, manifest)
    print(f"{checkpoint.path.name} of {out_dir} is in {folder} as {format}")


if __name__ == "__main__":
    with one_sentence():
        command_line(main, sys.argv[1:])
