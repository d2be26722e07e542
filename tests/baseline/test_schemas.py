"""Files of every format, broken in any way: refused in one sentence, within seconds, and never with another error.

In the ordinary suite each format gets some hundred random files, with `-m slow` more than 10,000.
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
from nanoGPT.checkpoint.manifest import seal
from nanoGPT.checkpoint.shards import SafeReader, read_index, read_shards
from nanoGPT.checkpoint.state import load_training_state
from nanoGPT.checkpoint.weights import find_newest, read_weights
from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.errors import ConfigError
from nanoGPT.export import write_hf
from nanoGPT.files import sha256_of
from nanoGPT.job.parse import parse
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer
from nanoGPT.prepare.directory import write_tokens
from nanoGPT.prepare.streaming import Progress, load_progress
from nanoGPT.schema import Count, FileName, Malformed, Within, check_schema
from nanoGPT.train_config import TrainConfig
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import ROOT, tiny, train

FEW, MANY = 150, 10_000
SECONDS = 5.0  # for one file

# ---- files of every format, whole


def write_dataset(folder: Path) -> Callable[[], object]:
    """Write a dataset of 400 bytes; return what opens it and reads a batch."""
    files = {}
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes(bytes(200))
        files[split] = [{"name": f"{split}.bin", "tokens": 100, "sha256": sha256_of(folder / f"{split}.bin")}]
    tokenizer = {"name": "char", "vocab_size": 3, "sha256": "a" * 64, "characters": "abc"}
    meta = {"source": {"text_sha256": "b" * 64}, "tokenizer": tokenizer, "dtype": "uint16", "splits": files}
    (folder / "meta.json").write_text(json.dumps(meta))
    return lambda: TokenData(str(folder), 8, 2, 1).batch("train", TRAIN, 0, 0)


@functools.cache
def one_checkpoint() -> Path:
    """Train once in this process for all tests; the run's directory."""
    folder = Path(tempfile.mkdtemp(prefix="schemas-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train("nanoGPT", 1, tiny("nanoGPT", folder, max_iters=1, n_layer=1, n_embd=8, n_head=1, eval_interval=1))
    return folder


def write_checkpoint(folder: Path) -> Callable[[], object]:
    """Write a run with one checkpoint; return what resumes its configuration and opens its weights."""
    shutil.copytree(one_checkpoint(), folder, dirs_exist_ok=True)

    def open_run() -> None:
        parse(TrainConfig, [f"--out_dir={folder}", "--init_from=resume", "--device=cpu"], ROOT / "nanoGPT/train.py")
        checkpoint = find_newest(folder)
        shape, weights = read_weights(str(folder))
        assert checkpoint.step >= 0 and shape.n_layer > 0 and weights

    return open_run


def write_suite(folder: Path) -> Callable[[], object]:
    """Write a suite's file; return what loads it."""
    text = (ROOT / "bench" / "suite" / "suites" / "wrapping.toml").read_text()
    (folder / "mine.toml").write_text(text)
    return lambda: suite_file.load(str(folder / "mine.toml"))


def write_run(folder: Path) -> Callable[[], object]:
    """Write a suite's run; return what reads it and its status."""
    suite_run.Run(folder, "phase1", 2, "plain", 1, ["--max_iters=3"], 5.0, 3).save()
    suite_run.write_status(folder, "done")

    def read() -> None:
        suite_run.read_status(folder)
        run = suite_run.read_run(folder)
        assert run.minutes > 0 and all(isinstance(word, str) for word in run.words)

    return read


def write_hugging_face(folder: Path) -> Callable[[], object]:
    """Write a small GPT-2 as Hugging Face does; return what opens it and reads every tensor."""
    shape = GPTConfig(1, 1, 8, 8, True, 16)
    model = GPT(shape)
    model.init_weights(1)
    write_hf(folder, shape, dict(model.named_parameters()), 16)

    def read() -> None:
        _, weights = read_weights(str(folder))
        assert all(weights[name].numel() > 0 for name in weights)

    return read


def write_progress(folder: Path) -> Callable[[], object]:
    """Write the progress of a streamed dataset; return what goes on from it."""
    source = {"hub": "a/b", "name": None, "shard_tokens": 4, "max_tokens": None}
    files = [write_tokens(folder, "val_000000.bin", np.arange(4, dtype=np.uint16))]
    Progress(source, {"train": [], "val": files}, 3, 1).save(folder)

    def read() -> None:
        progress = load_progress(folder, source)
        assert progress.document >= 0 and progress.next_size() >= 0

    return read


def write_shards(folder: Path) -> Callable[[], object]:
    """Write the shards of two tensors; return what reads one of them."""
    folder.mkdir(exist_ok=True)
    tensors = {"model.a": torch.ones(3, 5), "model.b": torch.arange(4.0)}
    torch.distributed.checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)

    def read() -> None:
        reader = SafeReader(folder)
        for key, (size, dtype) in read_index(folder).items():
            read_shards(reader, {key: torch.empty(size, dtype=dtype)}, alone=True)

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

# ---- broken in every way

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


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested JSON."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple[Any, ...], how: str, new: Any) -> Any:
    """Return nested JSON in which one value is replaced or left out."""
    whole = copy.deepcopy(value)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    if how == "left out":
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return whole


def dumped(name: str, value: Any) -> bytes:
    """Return a document as bytes; a manifest is sealed, as somebody hostile would."""
    if name == "manifest.json" and isinstance(value, dict):
        return seal(value).encode()
    return json.dumps(value).encode()


@st.composite
def broken(draw: st.DrawFn, name: str, whole: bytes) -> bytes:
    """Draw a broken file: one value of its JSON changed or left out, or its bytes cut, flipped or replaced."""
    kinds = ["cut", "flipped", "replaced", "inserted"]
    kind = draw(st.sampled_from([*kinds, *(["value"] * 8 if name.endswith(".json") else [])]))
    if kind == "value":
        value = json.loads(whole)
        path = draw(st.sampled_from(sorted(places(value), key=str)))
        return dumped(name, changed(value, path, draw(st.sampled_from(["left out", "replaced"])), draw(VALUES)))
    if kind == "replaced":
        return draw(st.one_of(st.binary(max_size=40), VALUES.map(lambda value: dumped(name, value))))
    place = draw(st.integers(0, len(whole) - 1))
    if kind == "cut":
        return whole[:place]
    if kind == "flipped":
        return whole[:place] + bytes([whole[place] ^ (1 << draw(st.integers(0, 7)))]) + whole[place + 1 :]
    return whole[:place] + draw(st.binary(min_size=1, max_size=8)) + whole[place:]


@contextmanager
def within_seconds() -> Iterator[None]:
    """Assert that what is inside raises nothing but a ConfigError, and takes no longer than SECONDS."""
    begin = time.process_time()  # another program may hold the processor for seconds
    try:
        yield
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
    took = time.process_time() - begin
    assert took < SECONDS, f"took {took:.1f} s"


def fuzz(name: str, folder: Path, cases: int) -> None:
    """Open `cases` broken files of a format: each opens, or is refused in one sentence."""
    write, place = FORMATS[name]
    read, file = write(folder), folder / place
    whole = file.read_bytes()
    read()

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=cases == FEW,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(broken(name, whole))
    def attempt(content: bytes) -> None:
        file.write_bytes(content)
        with within_seconds():
            read()

    attempt()


@pytest.mark.heavy
@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_file_is_one_sentence(name, tmp_path):
    """Whatever is wrong with a file, it either opens or is refused in one sentence within seconds."""
    fuzz(name, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", FORMATS)
def test_ten_thousand_broken_files_are_one_sentence_each(name, tmp_path):
    """The same with more than 10,000 random files of each format."""
    fuzz(name, tmp_path, MANY)


# ---- hostile files that chance would not find


def break_as_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def break_as_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def break_as_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def break_as_sparse(file: Path) -> None:
    os.truncate(file, 1 << 40)


def break_by_depth(file: Path) -> None:
    file.write_text(DEEP)


def break_by_digits(file: Path) -> None:
    file.write_text("1" * 10_000)


HARMS = [break_as_fifo, break_as_directory, break_as_device, break_as_sparse, break_by_depth, break_by_digits]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("name", FORMATS)
def test_something_else_in_the_place_of_a_file(name, harm, tmp_path):
    """A FIFO, a directory, an endless device, a sparse file of a terabyte, JSON 100,000 levels deep: each is refused at
    once."""
    write, place = FORMATS[name]
    read, file = write(tmp_path), tmp_path / place
    harm(file)
    begin = time.process_time()
    if name == "status.json" or (name, harm) == (".metadata", break_as_sparse):
        read()  # such a status counts as pending; an index ends before the hole
    else:
        with pytest.raises(ConfigError):
            read()
    assert time.process_time() - begin < SECONDS


@pytest.mark.parametrize("dtype", ["O", "float64", "<u2", "uint64", "U10"])
def test_token_ids_are_two_or_four_bytes(dtype, tmp_path):
    """A meta.json with another dtype, such as that of object pointers, is refused before a byte is read."""
    read = write_dataset(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "dtype": dtype}))
    with pytest.raises(ConfigError, match=r"\$\.dtype is "):
        read()
    fields = {**dataclasses.asdict(tiny("nanoGPT", tmp_path / "run")), "dataset": tmp_path}
    words = [f"--{name}={value}" for name, value in fields.items() if value is not None]
    assert_refused(run_program("nanoGPT/train.py", *words), "is not that of a dataset")


HOSTILE = [
    ({"model_args": {"n_layer": 10**8}}, "n_layer"),
    ({"model_args": {"n_embd": 10**7}}, "n_embd"),
    ({"model_args": {"n_head": 3}}, "not divisible"),
    ({"model_args": {"vocab_size": 10**9}}, "where its model has"),
    ({"files": [{"name": "../../ckpt.pt", "size": 1, "sha256": ""}]}, "no whole checkpoint"),
    ({"config": {"n_layer": "many"}}, "no configuration"),
    ({"config": []}, "no configuration"),
    ({"data": {}}, "not that of a training run"),
    ({"best_val_loss": "low"}, "not that of a training run"),
]


@pytest.mark.parametrize(("change", "words"), HOSTILE)
def test_a_hostile_manifest_is_one_sentence(change, words, tmp_path):
    """A manifest that is sealed well, but describes what cannot be, is refused within seconds."""
    read = write_checkpoint(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    for key, value in change.items():
        manifest[key] = {**manifest[key], **value} if key == "model_args" else value
    path.write_text(seal(manifest))
    begin = time.process_time()
    with pytest.raises(ConfigError, match=words):
        read()
    assert time.process_time() - begin < SECONDS


def test_an_optimizer_state_of_another_shape_is_refused(tmp_path):
    """A state that would be broadcast into place, or that the optimizer does not have, is refused by its name."""
    write_checkpoint(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000001"
    whole = torch.load(path / "ckpt.pt", weights_only=True)
    config = tiny("nanoGPT", tmp_path, n_layer=1, n_embd=8, n_head=1)
    model = GPT(GPTConfig.of(whole["model_args"]))
    optimizer = configure_optimizer(model, config)
    load_training_state(path, model, optimizer)
    changes = ({"exp_avg": torch.zeros(1)}, {"exp_avg": torch.zeros(1, dtype=torch.int64)}, {"other": torch.ones(1)})
    for change in changes:
        state = {**whole["optimizer"]["state"], 0: {**whole["optimizer"]["state"][0], **change}}
        torch.save({**whole, "optimizer": {**whole["optimizer"], "state": state}}, path / "ckpt.pt")
        with pytest.raises(ConfigError, match=f"{next(iter(change))} of "):
            load_training_state(path, model, optimizer)


def test_an_index_of_shards_that_lies_is_refused(tmp_path):
    """An index that names files elsewhere, bytes beyond a file's end, or tensors larger than all files is refused, and
    nothing is allocated for it."""
    train("phase3_fsdp", 1, tiny("phase3_fsdp", tmp_path, max_iters=1, n_layer=1, eval_interval=1))
    folder = tmp_path / "checkpoints" / "step-00000001"
    index = SafeReader(folder).read_metadata()
    draw, lies = random.Random(1), []
    for field, value in (("relative_path", "../x"), ("offset", 10**9), ("length", 10**9), ("offset", -1)):
        lie = copy.deepcopy(index)
        setattr(draw.choice(list(lie.storage_data.values())), field, value)
        lies.append(lie)
    large = copy.deepcopy(index)
    next(iter(large.state_dict_metadata.values())).size = torch.Size([10**6, 10**6])
    for lie in [*lies, large]:
        (folder / ".metadata").write_bytes(pickle.dumps(lie))
        with pytest.raises(ConfigError, match="no index of shards"):
            SafeReader(folder).read_metadata()


def test_weights_that_are_no_numbers_with_a_point_are_refused(tmp_path):
    """Weights of an integer dtype are no weights of this model."""
    read = write_hugging_face(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].to(torch.int64)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError):
        read()


class Named(TypedDict):
    """A format with every kind of field."""

    name: FileName
    size: Annotated[int, Within(1, 8)]
    rate: NotRequired[float]
    kind: NotRequired[Literal["a", "b"]]
    flags: NotRequired[dict[str, bool | str]]
    more: NotRequired[Annotated[list[Count], Within(1, 2)]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"size": 9}, "$.size is 9: must be from 1 to 8"),
        ({"size": True}, "$.size is true or false: must be an integer"),
        ({"name": ".."}, "$.name is '..': must match"),
        ({"name": "a\n"}, None),  # a file may be called so
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
def test_a_schema_names_the_place_and_what_it_must_be(fields, words):
    """What does not have the form of a format is named with its place, its value and what would be right; unknown keys
    are ignored, and a missing one is named."""
    value = {"name": "a", "size": 1, **fields}
    if words is None:
        assert check_schema(value, Named) is value
    else:
        with pytest.raises(Malformed, match=re.escape(words)):
            check_schema(value, Named)
    del value["size"]
    with pytest.raises(Malformed, match=re.escape("is missing") if fields.keys() == {"unknown"} else ""):
        check_schema(value, Named)
