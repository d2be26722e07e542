"""Damaged files of every format: each opens, or is refused with one ConfigError within seconds.

A normal run of the tests tries 150 random files per format, and `-m slow` tries 10,000.
"""

import atexit
import copy
import dataclasses
import functools
import json
import os
import pickle
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench.suite import execution as suite_run
from bench.suite import file as suite_file
from nanoGPT.checkpoint.manifest import serialize_manifest
from nanoGPT.checkpoint.shards import SafeReader, read_index, read_shards
from nanoGPT.checkpoint.state import load_training_state
from nanoGPT.checkpoint.weights import find_checkpoint, read_weights
from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.errors import ConfigError
from nanoGPT.export import write_hf
from nanoGPT.files import sha256_of
from nanoGPT.job.parse import parse
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer
from nanoGPT.prepare.directory import write_tokens
from nanoGPT.prepare.streaming import StreamProgress, load_progress
from nanoGPT.schema import Count, FileName, Range, SchemaError, check_schema
from nanoGPT.train_config import TrainConfig
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import ROOT, tiny, train

FEW_CASES, MANY_CASES = 60, 10_000
MAX_SECONDS = 5.0  # of processor time per file

# ---- valid files of every format


def write_dataset(folder: Path) -> Callable[[], object]:
    """Write a dataset of 400 bytes. Return a function that opens it and reads a batch."""
    files = {}
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes(bytes(200))
        files[split] = [{"name": f"{split}.bin", "tokens": 100, "sha256": sha256_of(folder / f"{split}.bin")}]
    tokenizer = {"name": "char", "vocab_size": 3, "sha256": "a" * 64, "characters": "abc"}
    meta = {"source": {"text_sha256": "b" * 64}, "tokenizer": tokenizer, "dtype": "uint16", "splits": files}
    (folder / "meta.json").write_text(json.dumps(meta))
    return lambda: TokenData(str(folder), 8, 2, 1).batch("train", TRAIN, 0, 0)


@functools.cache
def create_checkpoint() -> Path:
    """Train one step, once per process, and return the output directory."""
    folder = Path(tempfile.mkdtemp(prefix="schemas-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train("nanoGPT", 1, tiny("nanoGPT", folder, max_iters=1, n_layer=1, n_embd=8, n_head=1, eval_interval=1))
    return folder


def write_checkpoint(folder: Path) -> Callable[[], object]:
    """Write a run with one checkpoint. Return a function that parses its configuration for a resume and reads its
    weights."""
    shutil.copytree(create_checkpoint(), folder, dirs_exist_ok=True)

    def open_run() -> None:
        parse(TrainConfig, [f"--out_dir={folder}", "--init_from=resume", "--device=cpu"], ROOT / "nanoGPT/train.py")
        checkpoint = find_checkpoint(folder)
        shape, weights, _ = read_weights(str(folder))
        assert checkpoint.step >= 0 and shape.n_layer > 0 and weights

    return open_run


def write_suite(folder: Path) -> Callable[[], object]:
    """Write the file of a suite. Return a function that loads it."""
    text = (ROOT / "bench" / "suite" / "suites" / "wrapping.toml").read_text()
    (folder / "mine.toml").write_text(text)
    return lambda: suite_file.load_suite(str(folder / "mine.toml"))


def write_run(folder: Path) -> Callable[[], object]:
    """Write a run of a suite. Return a function that reads it and its status."""
    suite_run.Run(folder, "phase1", 2, "plain", 1, ["--max_iters=3"], 5.0, 3).save()
    suite_run.write_status(folder, "done")

    def read() -> None:
        suite_run.read_status(folder)
        run = suite_run.read_run(folder)
        assert run.minutes > 0 and all(isinstance(word, str) for word in run.words)

    return read


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
    StreamProgress(source, {"train": [], "val": files}, 3, 1).save(folder)

    def read() -> None:
        progress = load_progress(folder, source)
        assert progress.document >= 0 and progress.next_size() >= 0

    return read


def write_shards(folder: Path) -> Callable[[], object]:
    """Write the shards of two tensors. Return a function that reads both."""
    folder.mkdir(exist_ok=True)
    tensors = {"model.a": torch.ones(3, 5), "model.b": torch.arange(4.0)}
    torch.distributed.checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)

    def read() -> None:
        reader = SafeReader(folder)
        for key, (size, dtype) in read_index(folder).items():
            read_shards(reader, {key: torch.empty(size, dtype=dtype)}, no_dist=True)

    return read


FORMATS: dict[str, tuple[Callable[[Path], Callable[[], object]], str]] = {
    "meta.json": (write_dataset, "meta.json"),
    "manifest.json": (write_checkpoint, "checkpoints/step-00000001/manifest.json"),
    "suite.toml": (write_suite, "mine.toml"),
    "run.json": (write_run, "run.json"),
    "status.json": (write_run, "status.json"),
    "progress.json": (write_progress, "progress.json"),
    ".metadata": (write_shards, ".metadata"),
    "config.json": (write_hugging_face, "config.json"),
    "model.safetensors": (write_hugging_face, "model.safetensors"),
}

# ---- random damage

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**8, 10**30]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["O", "uint32", "float64", "../x", "/etc/passwd", "..", "train.bin\0", "a" * 300, "resume", "gelu"]
    ),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
DEEP = "[" * 100_000


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested JSON."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from list_paths(inner, (*path, key))


def change_value(value: Any, path: tuple[Any, ...], change: str, new_value: Any) -> Any:
    """Return a copy of nested JSON in which one value is replaced or removed."""
    copied = copy.deepcopy(value)
    parent = copied
    for key in path[:-1]:
        parent = parent[key]
    if change == "removed":
        del parent[path[-1]]
    else:
        parent[path[-1]] = new_value
    return copied


def serialize(name: str, value: Any) -> bytes:
    """Return a document as bytes. A manifest gets a valid checksum, as an attacker would compute it."""
    if name == "manifest.json" and isinstance(value, dict):
        return serialize_manifest(value).encode()
    return json.dumps(value).encode()


@st.composite
def damaged_files(draw: st.DrawFn, name: str, original: bytes) -> bytes:
    """Draw a damaged file: one value of its JSON is changed or removed, or its bytes are truncated, flipped, replaced
    or extended."""
    kinds = ["truncated", "flipped", "replaced", "inserted"]
    kind = draw(st.sampled_from([*kinds, *(["value"] * 8 if name.endswith(".json") else [])]))
    if kind == "value":
        value = json.loads(original)
        path = draw(st.sampled_from(sorted(list_paths(value), key=str)))
        return serialize(name, change_value(value, path, draw(st.sampled_from(["removed", "replaced"])), draw(VALUES)))
    if kind == "replaced":
        return draw(st.one_of(st.binary(max_size=40), VALUES.map(lambda value: serialize(name, value))))
    position = draw(st.integers(0, len(original) - 1))
    if kind == "truncated":
        return original[:position]
    if kind == "flipped":
        return (
            original[:position]
            + bytes([original[position] ^ (1 << draw(st.integers(0, 7)))])
            + original[position + 1 :]
        )
    return original[:position] + draw(st.binary(min_size=1, max_size=8)) + original[position:]


@contextmanager
def assert_opens_or_refused() -> Iterator[None]:
    """Assert that the block raises nothing except a ConfigError of one line, and takes less than MAX_SECONDS."""
    start = time.process_time()  # unlike wall time, independent of other programs
    try:
        yield
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
    seconds = time.process_time() - start
    assert seconds < MAX_SECONDS, f"took {seconds:.1f} s"


def open_damaged_files(name: str, folder: Path, cases: int) -> int:
    """Open `cases` damaged files of a format. Each must open or be refused with one error. Return their number."""
    tried = 0
    write, name_in_folder = FORMATS[name]
    read, file = write(folder), folder / name_in_folder
    original = file.read_bytes()
    read()

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=cases == FEW_CASES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged_files(name, original))
    def attempt(content: bytes) -> None:
        nonlocal tried
        file.write_bytes(content)
        with assert_opens_or_refused():
            read()
        tried += 1

    attempt()
    return tried


@pytest.mark.heavy
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_opens_or_is_refused(name, tmp_path):
    """A randomly damaged file either opens or is refused with one error within seconds."""
    assert open_damaged_files(name, tmp_path, FEW_CASES) == FEW_CASES


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", FORMATS)
def test_ten_thousand_damaged_files_open_or_are_refused(name, tmp_path):
    """The same claim for 10,000 random files of each format."""
    assert open_damaged_files(name, tmp_path, MANY_CASES) == MANY_CASES


# ---- hostile files that random damage would not produce


def replace_by_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def extend_as_sparse_file(file: Path) -> None:
    os.truncate(file, 1 << 40)


def write_deep_json(file: Path) -> None:
    file.write_text(DEEP)


def write_long_number(file: Path) -> None:
    file.write_text("1" * 10_000)


DAMAGES = [
    replace_by_fifo,
    replace_by_directory,
    replace_by_device,
    extend_as_sparse_file,
    write_deep_json,
    write_long_number,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FORMATS)
def test_something_else_instead_of_a_file_is_refused(name, damage, tmp_path):
    """A FIFO, a directory, an endless device, a sparse file of a terabyte, JSON of 100,000 levels and a number of
    10,000 digits are each refused at once."""
    write, name_in_folder = FORMATS[name]
    read, file = write(tmp_path), tmp_path / name_in_folder
    damage(file)
    start = time.process_time()
    if name == "status.json" or (name, damage) == (".metadata", extend_as_sparse_file):
        read()  # such a status counts as pending; an index ends before the sparse part
    else:
        with pytest.raises(ConfigError):
            read()
    assert time.process_time() - start < MAX_SECONDS


@pytest.mark.parametrize("dtype", ["O", "float64", "<u2", "uint64", "U10"])
def test_other_dtypes_of_token_ids_are_refused(dtype, tmp_path):
    """A meta.json with another dtype than uint16 or uint32, such as one of object pointers, is refused before the data
    is read."""
    read = write_dataset(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "dtype": dtype}))
    with pytest.raises(ConfigError, match=r"\$\.dtype is "):
        read()
    fields = {**dataclasses.asdict(tiny("nanoGPT", tmp_path / "run")), "dataset": tmp_path}
    words = [f"--{name}={value}" for name, value in fields.items() if value is not None]
    assert_refused(run_program("nanoGPT/train.py", *words), "does not describe a dataset")


HOSTILE_MANIFESTS = [
    ({"model_args": {"n_layer": 10**8}}, "n_layer"),
    ({"model_args": {"n_embd": 10**7}}, "n_embd"),
    ({"model_args": {"n_head": 3}}, "not divisible"),
    ({"model_args": {"vocab_size": 10**9}}, "but its model has"),
    ({"files": [{"name": "../../ckpt.pt", "size": 1, "sha256": ""}]}, "no complete checkpoint"),
    ({"config": {"n_layer": "many"}}, "no valid configuration"),
    ({"config": []}, "no valid configuration"),
    ({"config": {"compile_mode": []}}, "no valid configuration"),
    ({"data": {}}, "does not describe a training run"),
    ({"best_val_loss": "low"}, "does not describe a training run"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_refused(change, message, tmp_path):
    """A manifest with a valid checksum and impossible values is refused within seconds."""
    read = write_checkpoint(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    for key, value in change.items():
        manifest[key] = {**manifest[key], **value} if key == "model_args" else value
    path.write_text(serialize_manifest(manifest))
    start = time.process_time()
    with pytest.raises(ConfigError, match=message):
        read()
    assert time.process_time() - start < MAX_SECONDS


def test_an_optimizer_state_of_another_shape_is_refused(tmp_path):
    """A tensor of the optimizer state that has another shape or dtype, or that the optimizer does not have, is refused
    with its name."""
    write_checkpoint(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000001"
    content = torch.load(path / "ckpt.pt", weights_only=True)
    config = tiny("nanoGPT", tmp_path, n_layer=1, n_embd=8, n_head=1)
    model = GPT(GPTConfig.from_dict(content["model_args"]))
    optimizer = configure_optimizer(model, config)
    load_training_state(path, model, optimizer)
    changes = ({"exp_avg": torch.zeros(1)}, {"exp_avg": torch.zeros(1, dtype=torch.int64)}, {"other": torch.ones(1)})
    for change in changes:
        state = {**content["optimizer"]["state"], 0: {**content["optimizer"]["state"][0], **change}}
        torch.save({**content, "optimizer": {**content["optimizer"], "state": state}}, path / "ckpt.pt")
        with pytest.raises(ConfigError, match=f"{next(iter(change))} (of|for) transformer.wte"):
            load_training_state(path, model, optimizer)


def test_a_hostile_index_of_shards_is_refused(tmp_path):
    """An index of files in other directories, of bytes beyond the end of a file, or of tensors larger than all files is
    refused. No memory is allocated for it."""
    train("phase3_fsdp", 1, tiny("phase3_fsdp", tmp_path, max_iters=1, n_layer=1, eval_interval=1))
    folder = tmp_path / "checkpoints" / "step-00000001"
    index = SafeReader(folder).read_metadata()
    rng, hostile_indexes = random.Random(1), []
    for field, value in (("relative_path", "../x"), ("offset", 10**9), ("length", 10**9), ("offset", -1)):
        hostile = copy.deepcopy(index)
        setattr(rng.choice(list(hostile.storage_data.values())), field, value)
        hostile_indexes.append(hostile)
    too_large = copy.deepcopy(index)
    next(iter(too_large.state_dict_metadata.values())).size = torch.Size([10**6, 10**6])
    for hostile in [*hostile_indexes, too_large]:
        (folder / ".metadata").write_bytes(pickle.dumps(hostile))
        with pytest.raises(ConfigError, match="not a valid index of shards"):
            SafeReader(folder).read_metadata()


def test_integer_weights_are_refused(tmp_path):
    """Weights of an integer dtype are refused."""
    read = write_hugging_face(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].to(torch.int64)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError):
        read()


class ExampleFormat(TypedDict):
    """A format with every kind of field."""

    name: FileName
    size: Annotated[int, Range(1, 8)]
    rate: NotRequired[float]
    kind: NotRequired[Literal["a", "b"]]
    flags: NotRequired[dict[str, bool | str]]
    more: NotRequired[Annotated[list[Count], Range(1, 2)]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 9}, "$.size is 9: must be from 1 to 8"),
        ({"size": True}, "$.size is true or false: must be an integer"),
        ({"name": ".."}, "$.name is '..': must match"),
        ({"name": "a\n"}, None),  # a valid name of a file
        ({"name": "a/b"}, "$.name is 'a/b': must match"),
        ({"name": None}, "$.name is null: must be a string"),
        ({"rate": 1}, None),
        ({"rate": 10**400}, "$.rate is an integer: must be a number"),
        ({"kind": "c"}, "$.kind is 'c': must be 'a' or 'b'"),
        ({"flags": {"x": 1}}, "$.flags['x'] is 1: must be true or false or a string"),
        ({"flags": []}, "$.flags is a list: must be an object"),
        ({"more": [1, -1]}, "$.more[1] is -1: must be from 0 to"),
        ({"more": []}, "$.more is []: must have from 1 to 2 items"),
        ({"unknown": 1}, None),
    ],
)
def test_a_schema_error_names_the_path_the_value_and_the_expected_type(fields, message):
    """A value that violates a schema is reported with its path, its value and the expected form. Missing keys are
    named, and unknown keys are ignored."""
    value = {"name": "a", "size": 1, **fields}
    if message is None:
        assert check_schema(value, ExampleFormat) is value
    else:
        with pytest.raises(SchemaError, match=re.escape(message)):
            check_schema(value, ExampleFormat)
    del value["size"]
    with pytest.raises(SchemaError, match=re.escape("is missing") if fields.keys() == {"unknown"} else ""):
        check_schema(value, ExampleFormat)
