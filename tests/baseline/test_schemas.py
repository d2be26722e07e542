"""Damaged files of every format: each opens, or is refused with one ConfigError within seconds."""

import json
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoGPT.checkpoint.ckpt import load_training_state
from nanoGPT.checkpoint.shards import SafeReader, read_shards
from nanoGPT.checkpoint.sources import read_weights
from nanoGPT.errors import ConfigError
from nanoGPT.export import write_hf
from nanoGPT.job.parse import parse
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer
from nanoGPT.prepare.directory import Progress, load_progress, write_tokens
from nanoGPT.train_config import TrainConfig
from tests.helpers.checkpoints import write_small_dataset
from tests.helpers.training import ROOT, open_data, tiny, train

MAX_SECONDS = 5.0  # of processor time per file
CHECKPOINT = "checkpoints/step-00000001"
HOSTILE_VALUES = [None, True, -1, 0, 2**31, 10**8, 10**30, float("nan"), "", "../x", "O", "a" * 300, [], [[]], {}]


def write_dataset(folder: Path) -> Callable[[], object]:
    """Write a dataset of 400 bytes. Return a function that opens it and reads a batch."""
    write_small_dataset(folder)
    return lambda: open_data(str(folder), 8, 2, 1).batch("train", 0, 0)


def write_run(folder: Path) -> Callable[[], object]:
    """Train one step. Return a function that parses its configuration for a resume and reads its weights."""
    train("nanoGPT", 1, tiny("nanoGPT", folder, max_iters=1, n_layer=1, n_embd=8, n_head=1, eval_interval=1))

    def open_run() -> None:
        parse(TrainConfig, [f"--out_dir={folder}", "--init_from=resume", "--device=cpu"], ROOT / "nanoGPT/train.py")
        assert read_weights(str(folder))[0].n_layer > 0

    return open_run


def write_hugging_face(folder: Path) -> Callable[[], object]:
    """Write a small GPT-2 in the format of Hugging Face. Return a function that opens it and reads every tensor."""
    shape = GPTConfig(1, 1, 8, 8, True, 16)
    model = GPT(shape)
    model.init_weights(1)
    write_hf(folder, shape, dict(model.named_parameters()), 16)

    def read() -> None:
        _, weights, _ = read_weights(str(folder))
        assert all(weights[name].numel() > 0 for name in weights)

    return read


def write_progress(folder: Path) -> Callable[[], object]:
    """Write the progress of a streamed dataset. Return a function that loads it."""
    source = {"hub": "a/b", "name": None, "shard_tokens": 4, "max_tokens": None}
    files = [write_tokens(folder, "val_000000.bin", np.arange(4, dtype=np.uint16))]
    Progress(source, {"train": [], "val": files}, 3).save(folder)
    return lambda: load_progress(folder, source)


def write_shards(folder: Path) -> Callable[[], object]:
    """Write the shards of two tensors. Return a function that reads both."""
    tensors = {"model.a": torch.ones(3, 5), "model.b": torch.arange(4.0)}
    torch.distributed.checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)

    def read() -> None:
        for key, size in SafeReader(folder).sizes.items():
            read_shards(SafeReader(folder), {key: torch.empty(size)}, no_dist=True)

    return read


FORMATS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "meta.json": write_dataset,
    f"{CHECKPOINT}/manifest.json": write_run,
    "progress.json": write_progress,
    ".metadata": write_shards,
    "config.json": write_hugging_face,
    "model.safetensors": write_hugging_face,
}


def damage(name: str, original: bytes, rng: random.Random) -> bytes:
    """Return a damaged file: one value of its JSON is replaced or removed, or its bytes are truncated or flipped."""
    if name.endswith(".json") and rng.random() < 0.8:
        parents, value = [], json.loads(original)
        stack = [value]
        while stack:
            if isinstance(inner := stack.pop(), dict | list) and inner:
                parents.append(inner)
                stack += inner.values() if isinstance(inner, dict) else inner
        parent = rng.choice(parents)
        key = rng.choice([*parent]) if isinstance(parent, dict) else rng.randrange(len(parent))
        if rng.random() < 0.2:
            del parent[key]
        else:
            parent[key] = rng.choice(HOSTILE_VALUES)
        return json.dumps(value).encode()
    position = rng.randrange(len(original))
    flipped = bytes([original[position] ^ (1 << rng.randrange(8))])
    return original[:position] + rng.choice([b"", flipped + original[position + 1 :]])


def assert_opens_or_refused(read: Callable[[], object]) -> None:
    """Assert that a function raises nothing except a ConfigError of one line, and takes less than MAX_SECONDS."""
    start = time.process_time()  # unlike wall time, independent of other programs
    with suppress(ConfigError):
        read()
    assert time.process_time() - start < MAX_SECONDS


@pytest.mark.heavy
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_opens_or_is_refused(name, tmp_path):
    """A randomly damaged file, a FIFO, an endless device and JSON of 100,000 levels each open or are refused with one
    error within seconds."""
    read, file = FORMATS[name](tmp_path), tmp_path / name
    original, rng = file.read_bytes(), random.Random(1)
    read()
    for _ in range(80):
        file.write_bytes(damage(name, original, rng))
        assert_opens_or_refused(read)
    file.write_text("[" * 100_000)
    assert_opens_or_refused(read)
    blocking = () if name == "model.safetensors" else (os.mkfifo, lambda path: path.symlink_to("/dev/zero"))
    for replace in (os.mkdir, *blocking):
        file.rmdir() if file.is_dir() else file.unlink()
        replace(file)
        with pytest.raises(ConfigError):
            read()


def test_other_dtypes_of_token_ids_are_refused(tmp_path):
    """A meta.json with another dtype than uint16 or uint32, such as one of object pointers, is refused before the data
    is read; the message names the file and the field."""
    read = write_dataset(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    for dtype in ("O", "float64", "<u2"):
        (tmp_path / "meta.json").write_text(json.dumps({**meta, "dtype": dtype}))
        with pytest.raises(ConfigError, match=r"/meta.json does not describe a dataset .*\$\.dtype"):
            read()


def test_an_optimizer_state_of_another_shape_is_refused(tmp_path):
    """A tensor of the optimizer state that has another shape than its parameter is refused with its name."""
    write_run(tmp_path)
    path = tmp_path / CHECKPOINT
    content = torch.load(path / "ckpt.pt", weights_only=True)
    model = GPT(GPTConfig.from_dict(content["model_args"]))
    optimizer = configure_optimizer(model, tiny("nanoGPT", tmp_path, n_layer=1, n_embd=8, n_head=1))
    changes = ({"exp_avg": torch.zeros(1)}, {"exp_avg_sq": torch.zeros(1, 2)})
    for change in changes:
        state = {**content["optimizer"]["state"], 0: {**content["optimizer"]["state"][0], **change}}
        torch.save({**content, "optimizer": {**content["optimizer"], "state": state}}, path / "ckpt.pt")
        words = f"the optimizer state of transformer.wte.weight .*such as {next(iter(change))}: its shape"
        with pytest.raises(ConfigError, match=words):
            load_training_state(path, model, optimizer)


def test_a_file_without_weights_is_refused(tmp_path):
    """A ckpt.pt without an entry for the model does not resume."""
    write_run(tmp_path)
    path = tmp_path / CHECKPOINT
    content = torch.load(path / "ckpt.pt", weights_only=True)
    model = GPT(GPTConfig.from_dict(content["model_args"]))
    optimizer = configure_optimizer(model, tiny("nanoGPT", tmp_path, n_layer=1, n_embd=8, n_head=1))
    torch.save({name: entry for name, entry in content.items() if name != "model"}, path / "ckpt.pt")
    with pytest.raises(ConfigError, match="ckpt.pt is not a checkpoint of nanoGPT"):
        load_training_state(path, model, optimizer)
