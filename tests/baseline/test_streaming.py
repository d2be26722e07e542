"""Streaming documents into shards: the files, resuming after a kill, and refused input."""

import glob
import json
import random
import signal
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanoGPT.errors import ConfigError
from nanoGPT.prepare import directory, streaming
from nanoGPT.prepare.streaming import Corpus, hub_corpus, prepare_stream
from nanoGPT.prepare.tokenizer import Gpt2Tokenizer
from tests.helpers.checkpoints import read_files
from tests.helpers.programs import run_in_new_interpreter
from tests.helpers.training import open_data

DOCUMENTS = 300
SHARD_SIZE = 2000  # tokens; this makes about ten shards
WORDS = ["the", "sea", "Ocean", "naïve", "海", "cat's", "1984", "--", "running\n", "", "<|endoftext|>", "été", "🙂"]


def generate_documents(count: int) -> list[Any]:
    """Return different documents of 0 to 119 words, some with the name of the separator. Two are missing."""
    rng = random.Random(count)
    texts: list[Any] = [" ".join(rng.choices(WORDS, k=rng.randrange(120))) for _ in range(count)]
    return [None if i in (3, 4) else text for i, text in enumerate(texts)]


def write_corpus(folder: Path, documents: list[Any], column: str = "text") -> Corpus:
    """Write documents in row groups of 40 into a file with a second column. The folder has pattern characters."""
    (folder / "in[1]").mkdir(parents=True, exist_ok=True)
    table = pa.table({column: documents, "url": ["page"] * len(documents)})
    pq.write_table(table, folder / "in[1]" / "0.parquet", row_group_size=40)
    return open_parquet(folder)


def open_parquet(folder: Path) -> Corpus:
    """Return the parquet files in `in*` as a corpus; load_dataset reads their paths as patterns."""
    files = [glob.escape(str(path)) for path in sorted(folder.glob("in*/*.parquet"))]
    return Corpus("the corpus", "check the files", {"files": files}, {"path": "parquet", "data_files": files})


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr(streaming, "BATCH", 32)
    return write_corpus(tmp_path, generate_documents(DOCUMENTS))


def read_shards(folder: Path) -> list[np.ndarray]:
    """Return the shards in the order of the stream, each of shape (tokens,)."""
    splits = json.loads((folder / "meta.json").read_text())["splits"]
    return [np.fromfile(folder / file["name"], dtype="<u2") for file in (*splits["val"], *splits["train"])]


def expected_stream() -> list[int]:
    """Return the tokens of the documents, with a separator before each."""
    bpe = Gpt2Tokenizer().bpe
    return [token for text in generate_documents(DOCUMENTS) for token in (50256, *bpe.encode_ordinary(text or ""))]


def prepare_until_interrupt(folder: Path, corpus: Corpus, after: int) -> None:
    """Prepare the corpus until the iterator over documents raises KeyboardInterrupt, after `after` documents."""
    real_encode = streaming.encode_documents

    def encode_until_interrupt(batches: Iterator[list[str]]) -> Iterator[bytes]:
        for i, ids in enumerate(real_encode(batches)):
            if i == after:
                raise KeyboardInterrupt
            yield ids

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(streaming, "encode_documents", encode_until_interrupt)
        prepare_stream(folder, corpus, SHARD_SIZE)


def get_refusal(*arguments: Any) -> str:
    """Assert that `prepare_stream` raises a ConfigError, and return its message."""
    with pytest.raises(ConfigError) as caught:
        prepare_stream(*arguments)
    return str(caught.value)


def test_shards_contain_the_documents(tmp_path, corpus, monkeypatch):
    """The shards contain the documents, with a separator before each. Each shard begins with a document, and is full
    except for the last. A second run changes nothing, and a trainer reads every shard."""
    monkeypatch.setattr(directory, "VAL_TOKENS", 700)
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    shards, files = read_shards(tmp_path / "web"), read_files(tmp_path / "web")
    assert np.concatenate(shards).tolist() == expected_stream() and len(shards) > 5
    assert all(shard[0] == 50256 for shard in shards)
    assert 700 <= len(shards[0]) < 1500 and all(SHARD_SIZE <= len(shard) < 3000 for shard in shards[1:-1])
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    assert read_files(tmp_path / "web") == files
    data = open_data(str(tmp_path / "web"), block_size=32, batch_size=64, seed=1)
    windows = [row.astype(np.uint16).tobytes() for row in data.batch("train", 0, 0)[0].numpy()]
    assert all(sum(window in shard.tobytes() for window in windows) for shard in shards[1:-1])


def test_max_tokens_ends_the_stream_at_that_token(tmp_path, corpus):
    """--max_tokens ends the stream after exactly that number of tokens, including those of the val split."""
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE, max_tokens=5001)
    assert np.concatenate(read_shards(tmp_path / "web")).tolist() == expected_stream()[:5001]


KILLED_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from nanoGPT.prepare import streaming

replace = os.replace
def replace_or_die(source, target):
    if str(target).endswith("train_000003.bin"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = replace_or_die
streaming.prepare_stream(Path(sys.argv[1]), streaming.Corpus(*json.loads(sys.argv[2])), int(sys.argv[3]))
"""


def test_a_kill_while_a_shard_is_written_changes_no_file(tmp_path, corpus):
    """If SIGKILL stops a process while it writes its fourth shard, the next run continues and writes identical files,
    also after interruptions at other documents."""
    folder = tmp_path / "web"
    words = ["-c", KILLED_PROGRAM, str(folder), json.dumps(astuple(corpus)), str(SHARD_SIZE)]
    assert run_in_new_interpreter(*words).returncode == -signal.SIGKILL
    inodes = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert "progress.json" in inodes and "meta.json" not in inodes and "train_000002.bin" in inodes
    prepare_until_interrupt(folder, corpus, 33)
    prepare_stream(folder, corpus, SHARD_SIZE)
    assert (folder / "train_000002.bin").stat().st_ino == inodes["train_000002.bin"], "it was written again"
    prepare_stream(tmp_path / "uninterrupted", corpus, SHARD_SIZE)
    assert read_files(folder) == read_files(tmp_path / "uninterrupted")
    for after in (0, DOCUMENTS - 1):
        prepare_until_interrupt(tmp_path / str(after), corpus, after)
        prepare_stream(tmp_path / str(after), corpus, SHARD_SIZE)
        assert read_files(tmp_path / str(after)) == read_files(folder)


def measure_peak(tmp_path: Path, count: int) -> int:
    """Return the peak memory of Python and numpy during a run over `count` long documents."""
    corpus = write_corpus(tmp_path / str(count), [" ".join(["word"] * 500)] * count)
    tracemalloc.start()
    prepare_stream(tmp_path / str(count) / "web", corpus, 20_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_is_constant(tmp_path, corpus):
    """Eight times as many documents and shards need no more memory."""
    prepare_stream(tmp_path / "warm", corpus, SHARD_SIZE)  # imports modules and loads GPT-2's vocabulary
    assert measure_peak(tmp_path, 960) < 1.2 * measure_peak(tmp_path, 120)


def test_other_flags_and_damaged_files_are_refused(tmp_path, corpus):
    """A dataset, or the progress of one, from another source or other flags is not overwritten, and neither is one
    whose files are damaged. The message names the file to remove."""
    prepare_stream(tmp_path / "full", corpus, SHARD_SIZE)
    prepare_until_interrupt(tmp_path / "web", corpus, 200)
    before = read_files(tmp_path / "full"), read_files(tmp_path / "web")
    assert f"`rm {tmp_path}/full/meta.json`" in get_refusal(tmp_path / "full", corpus, SHARD_SIZE, 5000)
    assert f"`rm {tmp_path}/web/progress.json`" in get_refusal(tmp_path / "web", corpus, SHARD_SIZE + 1)
    prepare_stream(tmp_path / "full", hub_corpus("Skylion007/openwebtext"), directory.SHARD_TOKENS)  # `make data`
    assert (read_files(tmp_path / "full"), read_files(tmp_path / "web")) == before
    (tmp_path / "web" / "train_000001.bin").write_bytes(b"short")
    assert "train_000001.bin does not have" in get_refusal(tmp_path / "web", corpus, SHARD_SIZE)
    for name, folder in (("progress.json", "web"), ("meta.json", "full")):
        (tmp_path / folder / name).write_text("{")
        assert name in get_refusal(tmp_path / folder, corpus, SHARD_SIZE)
        assert (tmp_path / folder / name).read_text() == "{"


def test_unreadable_sources_are_refused(tmp_path, corpus, monkeypatch):
    """A missing text column, a truncated file, too little text, a missing network and a missing package
    are each refused with an error that says what to do."""
    web = tmp_path / "web"
    other = write_corpus(tmp_path / "other", ["a"], column="body")
    assert "has no column `text` of strings" in get_refusal(web, other, SHARD_SIZE)
    assert "use more text" in get_refusal(web, corpus, directory.SHARD_TOKENS)
    assert "leaves nothing to train on" in get_refusal(web, corpus, SHARD_SIZE, SHARD_SIZE)
    file = tmp_path / "in[1]" / "0.parquet"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "check the files" in get_refusal(web, corpus, SHARD_SIZE)
    for module in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)
    assert "check the network, or prepare files of your own" in get_refusal(
        web, hub_corpus("Skylion007/openwebtext"), 100
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install -e '.[web]'" in get_refusal(web, corpus, SHARD_SIZE)


PROGRAM_THAT_STOPS_EARLY = """
import json, sys
from pathlib import Path
from nanoGPT.prepare import streaming
streaming.prepare_stream(Path(sys.argv[1]), streaming.Corpus(*json.loads(sys.argv[2])), 1000, 5000)
"""


@pytest.mark.slow
def test_a_program_that_stops_early_exits_with_code_0(tmp_path, corpus):
    """A program that stops in the middle of a file exits with code 0. Arrow's threads neither hang nor abort it."""
    words = ["-c", PROGRAM_THAT_STOPS_EARLY, str(tmp_path / "web"), json.dumps(astuple(corpus))]
    result = run_in_new_interpreter(*words)
    assert (result.returncode, result.stderr) == (0, "")
