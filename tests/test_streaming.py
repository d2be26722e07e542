"""Streaming documents into shards: what is written, what survives a kill, and what is refused."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanoGPT import streaming
from nanoGPT.config import PACKAGE
from nanoGPT.data import Gpt2Tokenizer
from nanoGPT.streaming import Corpus, parquet_corpus, prepare_stream

DOCUMENTS = 300
SHARD = 2000  # tokens: about ten shards, and documents that begin in one and end in the next
WORDS = [
    "the",
    "sea",
    "Ocean",
    "naïve",
    "海",
    "cat's",
    "1984",
    "--",
    "running\n",
    "gradient,",
    "",
    "shard",
    "tokens",
    "of",
    "wine",
    "dark",
    "été",
    "🙂",
    "over",
]


def texts(count: int) -> list[str]:
    """Documents of 0 to 120 words, all different; every 50th has the separator's name in it."""
    chance = random.Random(count)
    made = [" ".join(chance.choices(WORDS, k=chance.randrange(120))) for _ in range(count)]
    return [text + "<|endoftext|>" + text if i % 50 == 7 else text for i, text in enumerate(made)]


def write_parquet(path: Path, documents: list[Any], column: str = "text") -> None:
    path.parent.mkdir(exist_ok=True)
    table = pa.table({column: documents, "url": [f"page {i}" for i in range(len(documents))]})
    pq.write_table(table, path, row_group_size=40)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "BATCH", 32)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """The documents in two files, whose folder's name a pattern would take for a set of characters."""
    documents = texts(DOCUMENTS)
    write_parquet(tmp_path / "web[1]" / "0.parquet", documents[:130])
    write_parquet(tmp_path / "web[1]" / "1.parquet", documents[130:])
    return parquet_corpus(f"{tmp_path}/web*/*.parquet")


def expected_stream(documents: list[str]) -> list[int]:
    bpe = Gpt2Tokenizer().bpe
    return [token for text in documents for token in (50256, *bpe.encode_ordinary(text))]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def shards_of(folder: Path) -> list[np.ndarray]:
    """The shards in the order of the stream, (tokens,) each."""
    splits = json.loads((folder / "meta.json").read_text())["splits"]
    return [np.fromfile(folder / file["name"], dtype="<u2") for file in (*splits["val"], *splits["train"])]


def uninterrupted(tmp_path: Path, corpus: Corpus) -> dict[str, bytes]:
    prepare_stream(tmp_path / "whole", corpus, SHARD)
    return files_of(tmp_path / "whole")


def dying(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the documents' iterator raise after `after` documents."""
    whole = streaming.encode

    def encode(batches: Iterator[list[str]]) -> Iterator[np.ndarray]:
        for i, ids in enumerate(whole(batches)):
            if i == after:
                raise KeyboardInterrupt
            yield ids

    monkeypatch.setattr(streaming, "encode", encode)


def interrupt(folder: Path, corpus: Corpus, after: int) -> None:
    """Run until `after` documents were packed, and no further."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        dying(monkeypatch, after)
        with pytest.raises(KeyboardInterrupt):
            prepare_stream(folder, corpus, SHARD)


def test_shards_decode_back(tmp_path: Path, corpus: Corpus) -> None:
    """The shards, one after the other, decode to the documents with a separator before each."""
    prepare_stream(tmp_path / "web", corpus, SHARD)
    stream = np.concatenate(shards_of(tmp_path / "web")).tolist()
    assert stream == expected_stream(texts(DOCUMENTS))
    separators = [i for i, token in enumerate(stream) if token == 50256]
    parts = [stream[a + 1 : b] for a, b in zip(separators, [*separators[1:], None], strict=True)]
    assert [Gpt2Tokenizer().bpe.decode(part) for part in parts] == texts(DOCUMENTS)


def test_special_text_stays_text(tmp_path: Path) -> None:
    """The characters <|endoftext|> inside a document do not become the separator."""
    write_parquet(tmp_path / "in" / "0.parquet", ["<|endoftext|>" * 3] * 20)
    prepare_stream(tmp_path / "web", parquet_corpus(f"{tmp_path}/in/*"), 50)
    assert np.count_nonzero(np.concatenate(shards_of(tmp_path / "web")) == 50256) == 20


def test_missing_texts_are_empty_documents(tmp_path: Path) -> None:
    """A row without a text becomes a document without tokens, so that later documents keep their number."""
    write_parquet(tmp_path / "in" / "0.parquet", ["one two three", None, "four five six"])
    prepare_stream(tmp_path / "web", parquet_corpus(f"{tmp_path}/in/*"), 4)
    assert np.concatenate(shards_of(tmp_path / "web")).tolist() == expected_stream(
        ["one two three", "", "four five six"]
    )


def test_shard_sizes(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Val comes first with its own size, every train shard but the last is full, and the sidecar has their hashes."""
    monkeypatch.setattr(streaming, "VAL_TOKENS", 700)
    prepare_stream(tmp_path / "web", corpus, SHARD)
    sizes = [len(shard) for shard in shards_of(tmp_path / "web")]
    assert sizes[0] == 700 and set(sizes[1:-1]) == {SHARD} and 0 < sizes[-1] <= SHARD and len(sizes) > 5
    meta = json.loads((tmp_path / "web" / "meta.json").read_text())
    files = [file for split in meta["splits"].values() for file in split]
    written = files_of(tmp_path / "web")
    assert meta["dtype"] == "uint16" and meta["tokenizer"]["name"] == "gpt2"
    assert set(written) == {"meta.json", *(file["name"] for file in files)}
    assert all(hashlib.sha256(written[file["name"]]).hexdigest() == file["sha256"] for file in files)


def test_max_tokens(tmp_path: Path, corpus: Corpus) -> None:
    """--max_tokens ends the stream at that very token, val's included."""
    prepare_stream(tmp_path / "web", corpus, SHARD, max_tokens=5001)
    shards = shards_of(tmp_path / "web")
    assert [len(shard) for shard in shards] == [SHARD, SHARD, 1001]
    assert np.concatenate(shards).tolist() == expected_stream(texts(DOCUMENTS))[:5001]


KILLED = """
import os, signal, sys
from pathlib import Path
from nanoGPT import streaming

replace = os.replace
def dying(source, target):
    if str(target).endswith("train_000003.bin"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = dying
streaming.prepare_stream(Path(sys.argv[1]), streaming.parquet_corpus(sys.argv[2]), int(sys.argv[3]))
"""


def test_sigkill_while_a_shard_is_written(tmp_path: Path, corpus: Corpus) -> None:
    """A process that SIGKILL ends while it writes its fourth shard is gone on with, to the very same files."""
    whole, folder = uninterrupted(tmp_path, corpus), tmp_path / "web"
    command = [sys.executable, "-c", KILLED, str(folder), f"{tmp_path}/web*/*.parquet", str(SHARD)]
    assert subprocess.run(command, cwd=PACKAGE.parent, capture_output=True).returncode == -signal.SIGKILL
    left = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert set(left) > {"val_000000.bin", "train_000001.bin", "train_000002.bin", "progress.json"}
    assert any(name.startswith(".tmp-") for name in left) and "meta.json" not in left
    prepare_stream(folder, corpus, SHARD)
    assert files_of(folder) == whole
    assert all(
        (folder / name).stat().st_ino == left[name] for name in left if name.endswith("2.bin") and "tmp" not in name
    )


@pytest.mark.parametrize("after", [0, 1, 33, 129, 130, 131, 257, DOCUMENTS - 1])
def test_interrupted_anywhere(tmp_path: Path, corpus: Corpus, after: int) -> None:
    """Wherever in the stream a run is interrupted, the next one ends with the very same files."""
    interrupt(tmp_path / "web", corpus, after)
    prepare_stream(tmp_path / "web", corpus, SHARD)
    assert files_of(tmp_path / "web") == uninterrupted(tmp_path, corpus)


def test_interrupted_again_and_again(tmp_path: Path, corpus: Corpus) -> None:
    """A run that never gets far at a time, in a document that fills several shards, still ends with the same files."""
    bytes_before = uninterrupted(tmp_path, corpus)
    for _ in range(4):
        interrupt(tmp_path / "web", corpus, 60)
    prepare_stream(tmp_path / "web", corpus, SHARD)
    assert files_of(tmp_path / "web") == bytes_before


def test_one_document_over_many_shards(tmp_path: Path) -> None:
    """A document longer than several shards is gone on with in its middle."""
    write_parquet(tmp_path / "in" / "0.parquet", ["short", " ".join(texts(100)), *texts(20)])
    corpus = parquet_corpus(f"{tmp_path}/in/*")
    whole = uninterrupted(tmp_path, corpus)
    interrupt(tmp_path / "web", corpus, 2)
    progress = json.loads((tmp_path / "web" / "progress.json").read_text())
    assert progress["document"] == 1 and progress["offset"] > SHARD
    prepare_stream(tmp_path / "web", corpus, SHARD)
    assert files_of(tmp_path / "web") == whole


def test_killed_between_shard_and_progress(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that reached the disk without its line in progress.json is written again, the same."""
    whole, save = uninterrupted(tmp_path, corpus), streaming.Progress.save

    def dying_save(progress: streaming.Progress, folder: Path) -> None:
        if len(progress.files) == 3:
            raise KeyboardInterrupt
        save(progress, folder)

    monkeypatch.setattr(streaming.Progress, "save", dying_save)
    with pytest.raises(KeyboardInterrupt):
        prepare_stream(tmp_path / "web", corpus, SHARD)
    monkeypatch.undo()
    assert (tmp_path / "web" / "train_000002.bin").is_file()
    prepare_stream(tmp_path / "web", corpus, SHARD)
    assert files_of(tmp_path / "web") == whole


@pytest.mark.parametrize("max_tokens", [None, 5001])
def test_killed_at_the_very_end(tmp_path: Path, corpus: Corpus, max_tokens: int | None) -> None:
    """A run that was killed between its last shard and meta.json, or just after that, is finished by the next."""
    folder = tmp_path / "web"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(streaming, "write_meta", lambda *_: None)
        monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
        prepare_stream(folder, corpus, SHARD, max_tokens)
    progress = (folder / "progress.json").read_bytes()
    prepare_stream(folder, corpus, SHARD, max_tokens)
    done = files_of(folder)
    (folder / "progress.json").write_bytes(progress)
    prepare_stream(folder, corpus, SHARD, max_tokens)
    prepare_stream(tmp_path / "whole", corpus, SHARD, max_tokens)
    assert files_of(folder) == done == files_of(tmp_path / "whole")


def peak_of(folder: Path, documents: int) -> tuple[int, int]:
    """Most bytes that Python and numpy held during a run, and that Arrow ever held."""
    write_parquet(folder / "in" / "0.parquet", texts(documents))
    corpus = parquet_corpus(f"{folder}/in/*")
    tracemalloc.start()
    prepare_stream(folder / "web", corpus, SHARD)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, pa.default_memory_pool().max_memory()


def test_memory_is_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the documents take no more memory."""
    for name in ("warm", "one", "eight"):
        (tmp_path / name).mkdir()
    peak_of(tmp_path / "warm", DOCUMENTS)  # what is imported, and GPT-2's vocabulary
    once, arrow_once = peak_of(tmp_path / "one", DOCUMENTS)
    eight, arrow_eight = peak_of(tmp_path / "eight", 8 * DOCUMENTS)
    print(once, eight, arrow_once, arrow_eight)
    assert eight < once * 1.2 and arrow_eight < arrow_once * 1.2
