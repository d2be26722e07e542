"""A user's own text: every format with its defects, every tokenizer, interruptions, and what is refused."""

import json
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoGPT import export, sample
from nanoGPT.checkpoint.hugging_face import read_hf_tokenizer
from nanoGPT.errors import ConfigError
from nanoGPT.files import DOWNLOADS
from nanoGPT.prepare import directory, own_text
from nanoGPT.prepare.download import TIKTOKEN_FILES
from nanoGPT.prepare.own_text import OwnText, prepare_own_text
from nanoGPT.prepare.tokenizer import (
    CharTokenizer,
    Gpt2Tokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
    make_json_identity,
)
from tests.helpers.checkpoints import read_files
from tests.helpers.programs import DEADLINE, wait_until
from tests.helpers.training import open_data, tiny, train
from workshop.ranks import losses

POEM = "a rose is a rose is a rose, said the naïve poet\n" * 50


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let datasets be written into a new directory, which is returned."""
    (folder := tmp_path / "data").mkdir()
    monkeypatch.setattr(own_text, "DATA", folder)
    return folder


def read_ids(folder: Path) -> list[int]:
    """Return the token ids of a dataset: its val split, then its train split."""
    meta = open_data(str(folder), 4, 1, 1).datasets[0].meta
    files = [*meta["splits"]["val"], *meta["splits"]["train"]]
    return np.concatenate([np.fromfile(folder / file["name"], meta["dtype"]) for file in files]).tolist()


def read_text(folder: Path) -> str:
    """Return the text of a dataset: its val split, then its train split."""
    return load_tokenizer(open_data(str(folder), 4, 1, 1).tokenizer).decode(read_ids(folder))


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_every_format_and_its_defects(tmp_path, data, capsys):
    """A directory of .txt, .jsonl and .parquet files is one dataset, in the order of the paths, also with upper-case
    suffixes and links. Byte order marks, line ends of Windows, empty lines, and lines without a text change nothing
    else. The lines and the files of other kinds are counted."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "a folder, 'quoted'"
    bad = [b"", b"{broken", {"a": 1}, [1], "x", {"text": None}, b"\xff", {"text": "half \ud800"}]
    write(folder / "1.jsonl", b"\xef\xbb\xbf" + json.dumps({"text": "One\r\ntwo."}).encode() + b"\r", *bad)
    (folder / "2 ž.TXT").write_bytes("\ufeffŘeka\r\nteče\rdolů.".encode() * 10)
    (folder / "notes.md").write_text("ignored")
    (folder / ".copies").mkdir()
    for hidden in (folder / ".copies" / "1-copy.txt", folder / "._1.txt"):  # of Jupyter, and of macOS
        hidden.write_bytes(b"\xff hidden")
    (folder / "loop").symlink_to(folder)
    (tmp_path / "elsewhere").mkdir()
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    parquet.write_table(pyarrow.table({"text": ["row", None, ""], "url": ["x"] * 3}), folder / "sub" / "3.parquet")
    name = prepare_own_text(OwnText(folder), None, "char")
    assert name == "a_folder_quoted_" or re.fullmatch(r"\w[\w.-]*", name), name
    river = "Řeka\nteče\ndolů."
    expected = f"One\ntwo.\nhalf \ufffd\n{river}" + f"\ufeff{river}" * 9 + "\nrow"
    assert read_text(data / name) == expected
    output = capsys.readouterr().out
    assert "1.jsonl, line 3: it is not JSON" in output and "line 4: no text in `text`" in output
    assert "files to read: 3; files of other kinds, which are ignored: 1" in output
    assert "skipped 7 lines or rows without a text in `text`" in output
    assert "occurrences of U+FFFD in the text: 1." in output


@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
def test_a_text_is_encoded_in_pieces(tokenizer, tmp_path, data, monkeypatch):
    """In small pieces and small files, a text has the token ids of the full text, for any line breaks. A tenth is the
    val split."""
    monkeypatch.setattr(own_text, "PIECE", 7)
    generator = random.Random(1)
    words = ["a", "Don't", " the", "\n", "\n\n", " \n", "\t", "7", "!?", "é书"]
    text = "".join(generator.choices(words, k=3000))
    (tmp_path / "my.txt").write_text(text)
    assert len(list(OwnText(tmp_path / "my.txt").pieces())) > 50
    prepare_own_text(OwnText(tmp_path / "my.txt"), "x", tokenizer, shard_tokens=500)
    encode = Gpt2Tokenizer().encode if tokenizer == "gpt2" else CharTokenizer("".join(sorted({*text}))).encode
    meta = open_data(str(data / "x"), 4, 1, 1).datasets[0].meta
    ids = read_ids(data / "x")
    assert ids == encode(text)
    sizes = [file["tokens"] for file in meta["splits"]["train"]]
    assert sizes[:-1] == [500] * (len(sizes) - 1) and abs(meta["splits"]["val"][0]["tokens"] / len(ids) - 0.1) < 0.03


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_interrupted_preparation_continues(number, tmp_path, data, monkeypatch):
    """After a kill between two files, the same command keeps the complete files, and the dataset has the files of an
    uninterrupted preparation. Until then it has no meta.json."""
    source = write(tmp_path / "my.jsonl", *({"text": f"{i} {POEM[: 7 * i]}"} for i in range(200)))
    prepare_own_text(OwnText(source), "whole", "char", shard_tokens=9000)
    real_write, written = directory.write_tokens, []

    def fail(folder, name, ids):
        if len(written) == number:
            raise KeyboardInterrupt
        written.append(name)
        return real_write(folder, name, ids)

    monkeypatch.setattr(directory, "write_tokens", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare_own_text(OwnText(source), "cut", "char", shard_tokens=9000)
    assert not (data / "cut" / "meta.json").exists()
    monkeypatch.setattr(directory, "write_tokens", lambda *args: written.append(args[1]) or real_write(*args))
    prepare_own_text(OwnText(source), "cut", "char", shard_tokens=9000)
    assert len(written) == len({*written}) > 4, "no file is written twice"
    assert read_files(data / "cut") == read_files(data / "whole")


def test_a_preparation_waits_for_another_one(tmp_path, data, capsys):
    """While another process prepares the same text, a preparation waits, and then finds the text prepared."""
    (tmp_path / "poem.txt").write_text(POEM)
    prepare_own_text(OwnText(tmp_path / "poem.txt"), "other", "char")
    second = threading.Thread(target=prepare_own_text, args=(OwnText(tmp_path / "poem.txt"), None, "char"))
    with directory.dataset_lock(data / "poem"):
        second.start()
        wait_until(lambda: "poem: another process is preparing it; waiting" in capsys.readouterr().out)
        shutil.copytree(data / "other", data / "poem")
        before = (data / "poem" / "meta.json").stat().st_mtime_ns
    second.join(DEADLINE)
    assert (data / "poem" / "meta.json").stat().st_mtime_ns == before


def test_another_dataset_is_never_overwritten(tmp_path, data):
    """A dataset of another text or tokenizer, and one with a prepare.py, are refused and stay as they are. The error
    has the command that removes the dataset."""
    (tmp_path / "poem.txt").write_text(POEM)
    prepare_own_text(OwnText(tmp_path / "poem.txt"), None, "char")
    before = read_files(data / "poem")
    assert prepare_own_text(OwnText(tmp_path / "poem.txt"), None, "char") == "poem"
    (tmp_path / "other.txt").write_text(POEM + "more")
    for source, tokenizer in (("other.txt", "char"), ("poem.txt", "gpt2")):
        with pytest.raises(ConfigError, match="has a dataset of another text, tokenizer or flags") as caught:
            prepare_own_text(OwnText(tmp_path / source), "poem", tokenizer)
        assert read_files(data / "poem") == before
    (command,) = re.findall("`(rm -r .*)`", str(caught.value))
    subprocess.run(command, shell=True, check=True)
    prepare_own_text(OwnText(tmp_path / "poem.txt"), "poem", "gpt2")
    (data / "built_in").mkdir()
    (data / "built_in" / "prepare.py").write_text("precious")
    for name in ("built_in", "../x", ".hidden", "a:b"):
        with pytest.raises(ConfigError, match=f"--name={re.escape(name)} is taken, or has characters"):
            prepare_own_text(OwnText(tmp_path / "poem.txt"), name, "char")


REFUSED: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "missing": (lambda folder: folder / "none.txt", "char", "none.txt does not exist"),
    "short": (lambda folder: write(folder / "a.txt", b"short"), "char", "has 5 characters of text: use at least 100"),
    "field": (lambda folder: write(folder / "a.jsonl", {"body": POEM}), "char", "0 characters .* or correct --field"),
    "encoding": (lambda folder: write(folder / "a.txt", b"\xff" * 200), "char", "a.txt is not UTF-8 .*grep -naxv"),
    "UTF-16": (lambda folder: write(folder / "a.txt", "abc".encode("utf-16-le")), "char", "a.txt has NUL characters"),
    "tokenizer": (lambda folder: write(folder / "a.txt", POEM.encode()), "char2", "is neither char, nor gpt2"),
    "parquet": (lambda folder: write(folder / "a.parquet", b"x" * 200), "char", "has no readable column `text`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unusable_text_is_refused(case, tmp_path, data):
    """A text or a tokenizer that cannot be used is one sentence, and nothing is written."""
    make, tokenizer, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        prepare_own_text(OwnText(make(tmp_path / "data" / "in")), "x", tokenizer)
    assert not (data / "x").exists()


UNREADABLE: dict[tuple[str, str], Callable[[Path], object]] = {
    ("meta.json", "does not describe a dataset .*line 1 column 2"): lambda path: path.write_text("{"),
    ("meta.json", "cannot be read .*symbolic links"): lambda path: path.symlink_to(path.name),  # ELOOP
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_an_unreadable_file_is_kept(damage, tmp_path, data, monkeypatch):
    """A file that is damaged or raises an error of the file system is neither deleted nor replaced, because it may
    belong to a valid dataset."""
    monkeypatch.setattr("nanoGPT.files.RETRY_DELAYS", ())
    (tmp_path / "poem.txt").write_text(POEM)
    prepare_own_text(OwnText(tmp_path / "poem.txt"), None, "char")
    (name, message), folder = damage, data / "poem"
    (folder / name).unlink()
    UNREADABLE[damage](folder / name)
    before = {path.name: path.lstat().st_ino for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=f"{name} {message}"):
        prepare_own_text(OwnText(tmp_path / "poem.txt"), None, "char")
    assert {path.name: path.lstat().st_ino for path in folder.iterdir()} == before


def write_tokenizer(path: Path) -> Path:
    """Train a tokenizer of 300 tokens, as Hugging Face's models have it, and write its tokenizer.json."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet}
    tokenizer.train_from_iterator([POEM], tokenizers.trainers.BpeTrainer(**options))
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_of_hugging_face_is_part_of_the_data(tmp_path, data, capsys):
    """A tokenizer.json prepares a text, and is in the dataset, the checkpoint, the sample and the export. Weights with
    it are refused for other data, and characters of a prompt that it does not know are printed."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    definition = json.loads(path.read_text())
    definition["model"]["vocab"].pop("z")
    path.write_text(json.dumps(definition))
    source = write(tmp_path / "my.jsonl", *({"text": POEM} for _ in range(4)))
    prepare_own_text(OwnText(source), None, str(path))
    assert read_text(data / "my").split("<|endoftext|>") == [POEM] * 4
    out = tmp_path / "run"
    config = tiny("nanoGPT", out, dataset=str(data / "my"), model="llama", max_iters=2)
    train("nanoGPT", 1, config)
    assert losses(out)
    sample.main(sample.SampleConfig(out_dir=str(out), start="naïve roz", max_new_tokens=4, device="cpu"))
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-2].startswith("naïve ro")
    assert printed.err == "the tokenizer changes or drops these characters of --start: 'z'\n"
    export.main(str(out), str(tmp_path / "hf"))
    assert read_hf_tokenizer(tmp_path / "hf") == make_json_identity(path.read_text())
    end = load_tokenizer(make_json_identity(path.read_text())).end_of_text
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == end == 0
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def test_equal_tokenizers_have_equal_hashes(tmp_path):
    """A tokenizer.json that was written by another program, with other spaces and other fields, is the same tokenizer.
    Another merge is another tokenizer."""
    text = write_tokenizer(tmp_path / "tokenizer.json").read_text()
    content = json.loads(text)
    same = json.dumps({**content, "truncation": None, "extra": 1})
    assert make_json_identity(same)["sha256"] == make_json_identity(text)["sha256"]
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]  # as older versions do
    assert make_json_identity(json.dumps(content))["sha256"] == make_json_identity(text)["sha256"]
    for change in ("merges", "added"):
        other = json.loads(text)
        if change == "merges":
            other["model"]["merges"].reverse()
        else:
            other["added_tokens"][0]["content"] = "<|other|>"
        assert make_json_identity(json.dumps(other))["sha256"] != make_json_identity(text)["sha256"]


def test_a_known_vocabulary_with_more_tokens_is_another_tokenizer():
    """Tokens that were added to GPT-2's or to characters are kept, and single bytes are no characters."""
    vocab, merges = (DOWNLOADS / "tiktoken" / TIKTOKEN_FILES[name][0] for name in ("encoder.json", "vocab.bpe"))
    pairs = merges.read_text(encoding="utf-8").split("\n")[1:-1]
    gpt2 = {"type": "BPE", "vocab": json.loads(vocab.read_text()), "merges": pairs}
    characters = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    for model, size, name in ((gpt2, 50257, "gpt2"), (characters, 2, "char")):
        for content, expected in (
            ({}, (name, size)),
            ({"added_tokens": [{"id": size, "content": "<|im_start|>"}]}, ("tokenizers", size + 1)),
            ({"pre_tokenizer": {"type": "ByteLevel"}}, ("gpt2" if name == "gpt2" else "tokenizers", size)),
        ):
            identity = make_json_identity(json.dumps({"model": model, **content}))
            assert (identity["name"], identity["vocab_size"]) == expected


@pytest.mark.parametrize(("name", "is_known"), [("[EOS]", True), ("<other>", False)])
def test_the_separator_of_documents_is_known_or_printed(name, is_known, tmp_path, data, capsys):
    """Documents are separated by the end-of-text token. If no name is known, a line says that it is a line end."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    path.write_text(path.read_text().replace("<|endoftext|>", name))
    prepare_own_text(OwnText(write(tmp_path / "my.jsonl", *({"text": POEM} for _ in range(4)))), None, str(path))
    assert ("a line end separates documents" in capsys.readouterr().out) != is_known
    assert read_ids(data / "my").count(0) == (3 if is_known else 0)


def test_a_text_is_decoded_token_by_token(tmp_path):
    """Tokens of a byte-level tokenizer and of one with byte fallback, as Llama 2 has it, are decoded one by one to the
    same text as together, also if some bytes are not valid UTF-8. Half a character waits for the rest of it."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"▁rose": 256, "▁": 257, "é": 258}
    fallback = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    fallback.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    by_bytes = write_tokenizer(tmp_path / "tokenizer.json").read_text()
    words = [[256], [255, 256], [65, 257], [*"é".encode(), 258]]
    draw = random.Random(0)
    for definition, choices in ((by_bytes, [[i] for i in range(300)]), (fallback.to_str(), words)):
        tokenizer = HuggingFaceTokenizer(definition)
        ids = sum(draw.choices(choices, k=300), []) + tokenizer.encode("é")
        decode = tokenizer.start_decoding()
        text = decode(ids[:9]) + "".join(decode([i]) for i in ids[9:])
        assert text == tokenizer.decode(ids) and "\ufffd" in text
    decode = HuggingFaceTokenizer(fallback.to_str()).start_decoding()
    assert [decode([i]) for i in (256, *"é".encode(), 256)] == ["rose", "", "é", " rose"]


def test_special_tokens_in_a_text_are_printed(tmp_path, data, capsys):
    """A text that contains the end-of-text token, as a separator or by chance, is prepared, and a line counts them."""
    source = write(tmp_path / "my.jsonl", {"text": POEM + "<|endoftext|>" + POEM}, {"text": POEM + "</s>"})
    for name, tokenizer in (("b", "gpt2"), ("c", str(write_tokenizer(tmp_path / "tokenizer.json")))):
        prepare_own_text(OwnText(source), name, tokenizer)
        assert "occurrences of <|endoftext|> in the text: 1." in (output := capsys.readouterr().out)
        assert "</s>" not in output and read_text(data / name).count("<|endoftext|>") == 2
    prepare_own_text(OwnText(source), "a", "char")
    assert "special token" not in capsys.readouterr().out


def test_an_input_begins_with_the_special_tokens_of_its_model(tmp_path):
    """Models of Hugging Face expect such tokens before a prompt. A text for training is encoded without them."""
    tokenizers = pytest.importorskip("tokenizers")
    content = tokenizers.Tokenizer.from_file(str(write_tokenizer(tmp_path / "tokenizer.json")))
    assert HuggingFaceTokenizer(content.to_str()).encode("rose", is_input=True) == content.encode("rose").ids
    content.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = HuggingFaceTokenizer(content.to_str())
    text = tokenizer.encode("rose")
    assert 0 not in text and tokenizer.encode("rose", is_input=True) == [0, *text]


def test_settings_for_inputs_of_a_model_do_not_cut_the_text(tmp_path, data, capsys):
    """The truncation, padding and dropout of a tokenizer.json are not used. Characters that it drops are printed, a
    text that it cannot encode is refused, and a text with too few tokens is not prepared."""
    tokenizers = pytest.importorskip("tokenizers")
    source = write(tmp_path / "my.txt", POEM.encode())
    path = write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    exact = tokenizer.encode(POEM).ids
    tokenizer.model.dropout = 0.5
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "cut.json"))
    prepare_own_text(OwnText(source), "cut", str(tmp_path / "cut.json"))
    assert read_text(data / "cut") == POEM and read_ids(data / "cut") == exact
    content = json.loads(path.read_text())
    content["model"]["vocab"].pop("z")
    write(tmp_path / "z.txt", (1000 * POEM + "zoo\n").encode())
    (tmp_path / "drop.json").write_text(json.dumps(content))
    prepare_own_text(OwnText(tmp_path / "z.txt"), "drop", str(tmp_path / "drop.json"))
    printed = capsys.readouterr().out
    assert "changes or drops 1 of 17 different characters: 'z'" in printed  # although it is in no sample
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "rose": 1}))
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(ConfigError, match="cannot encode the text"):
        prepare_own_text(OwnText(source), "words", str(tmp_path / "words.json"))


def test_the_val_split_is_a_tenth_of_a_mixed_text(tmp_path, data):
    """The size of the val split is estimated from parts of the whole text, which may begin in another language."""
    folder = tmp_path / "mixed"
    write(folder / "a.txt", ("தமிழ் மொழி உலகில் உள்ள முதன்மையான மொழி.\n" * 500).encode())
    write(folder / "b.jsonl", *({"text": "The quick brown fox jumps over the lazy dog. " * 20} for _ in range(300)))
    splits = open_data(str(data / prepare_own_text(OwnText(folder), None, "gpt2")), 4, 1, 1).datasets[0].meta["splits"]
    val, train_tokens = splits["val"][0]["tokens"], splits["train"][0]["tokens"]
    assert abs(val / (val + train_tokens) - 0.1) < 0.03
