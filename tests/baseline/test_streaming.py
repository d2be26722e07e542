"""Streaming documents into shards: the files, resuming after a kill, and refused input."""

import hashlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.errors import ConfigError
from nanoGPT.files import PACKAGE
from nanoGPT.prepare import corpus as corpora
from nanoGPT.prepare import streaming
from nanoGPT.prepare.corpus import Corpus, hub_corpus, parquet_corpus
from nanoGPT.prepare.streaming import prepare_stream
from nanoGPT.tokenizer import Gpt2Tokenizer
from tests.helpers.datasets import prepare_twice_at_once
from tests.helpers.programs import DEADLINE

DOCUMENTS = 300
SHARD_SIZE = 2000  # tokens; this makes about ten shards, and some documents span two
WORDS = ["the", "sea", "Ocean", "naïve", "海", "cat's", "1984", "--", "running\n", "", "tokens", "dark", "été", "🙂"]


def generate_documents(count: int) -> Iterator[str]:
    """Yield different documents of 0 to 119 words. Every 50th contains the name of the separator."""
    rng = random.Random(count)
    for i in range(count):
        text = " ".join(rng.choices(WORDS, k=rng.randrange(120)))
        yield text + "<|endoftext|>" + text if i % 50 == 7 else text


def write_parquet(path: Path, documents: list[Any], column: str = "text") -> None:
    """Write a file with a second column, in row groups of 40 documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema({column: pa.infer_type(documents), "url": pa.string()})
    with pq.ParquetWriter(path, schema) as writer:
        for i in range(0, len(documents), 40):
            group = documents[i : i + 40]
            writer.write_table(pa.table({column: group, "url": [f"page {i}"] * len(group)}, schema))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "BATCH", 32)


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    """Write the documents into two files, in a folder whose name contains pattern characters. Return a pattern for the
    files."""
    documents = list(generate_documents(DOCUMENTS))
    write_parquet(tmp_path / "in[1]" / "0.parquet", documents[:130])
    write_parquet(tmp_path / "in[1]" / "1.parquet", documents[130:])
    return f"{tmp_path}/in*/*.parquet"


@pytest.fixture
def corpus(pattern: str) -> Corpus:
    return parquet_corpus(pattern)


def write_corpus(tmp_path: Path, documents: list[Any], column: str = "text") -> Corpus:
    write_parquet(tmp_path / "one" / "0.parquet", documents, column)
    return parquet_corpus(f"{tmp_path}/one/*.parquet")


def expected_stream(documents: list[str]) -> list[int]:
    """Return the tokens of the documents, with a separator before each."""
    bpe = Gpt2Tokenizer().bpe
    return [token for text in documents for token in (50256, *bpe.encode_ordinary(text))]


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_shards(folder: Path) -> list[np.ndarray]:
    """Return the shards in the order of the stream, each of shape (tokens,)."""
    splits = json.loads((folder / "meta.json").read_text())["splits"]
    return [np.fromfile(folder / file["name"], dtype="<u2") for file in (*splits["val"], *splits["train"])]


def prepare_without_interruption(tmp_path: Path, corpus: Corpus) -> dict[str, bytes]:
    """Prepare the corpus in the folder `uninterrupted`, and return its files."""
    prepare_stream(tmp_path / "uninterrupted", corpus, SHARD_SIZE)
    return read_files(tmp_path / "uninterrupted")


def prepare_until_interrupt(folder: Path, corpus: Corpus, after: int) -> None:
    """Prepare the corpus until the iterator over documents raises KeyboardInterrupt, after `after` documents."""
    real_encode = streaming.encode_documents

    def encode_until_interrupt(batches: Iterator[list[str]]) -> Iterator[np.ndarray]:
        for i, ids in enumerate(real_encode(batches)):
            if i == after:
                raise KeyboardInterrupt
            yield ids

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(streaming, "encode_documents", encode_until_interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_stream(folder, corpus, SHARD_SIZE)


def test_shards_decode_to_the_documents(tmp_path: Path, corpus: Corpus) -> None:
    """The concatenated shards decode to the documents, with a separator before each."""
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    stream = np.concatenate(read_shards(tmp_path / "web")).tolist()
    assert stream == expected_stream(list(generate_documents(DOCUMENTS)))
    separators = [i for i, token in enumerate(stream) if token == 50256]
    parts = [stream[a + 1 : b] for a, b in zip(separators, [*separators[1:], None], strict=True)]
    assert [Gpt2Tokenizer().bpe.decode(part) for part in parts] == list(generate_documents(DOCUMENTS))


def test_the_separators_name_in_a_text_is_not_a_separator(tmp_path: Path) -> None:
    """The characters <|endoftext|> inside a document are not encoded as the separator."""
    prepare_stream(tmp_path / "web", write_corpus(tmp_path, ["<|endoftext|>" * 3] * 20), 50)
    assert np.count_nonzero(np.concatenate(read_shards(tmp_path / "web")) == 50256) == 20


def test_missing_texts_are_empty_documents(tmp_path: Path) -> None:
    """A row without a text becomes an empty document, so that the numbers of later documents stay the same."""
    prepare_stream(tmp_path / "web", write_corpus(tmp_path, ["one two three", None, "four five six"]), 4)
    written = np.concatenate(read_shards(tmp_path / "web")).tolist()
    assert written == expected_stream(["one two three", "", "four five six"])


def test_every_train_shard_but_the_last_is_full(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The val split comes first and has its own size. Every train shard except the last is full, and meta.json has all
    hashes."""
    monkeypatch.setattr(streaming, "VAL_TOKENS", 700)
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    sizes = [len(shard) for shard in read_shards(tmp_path / "web")]
    assert sizes[0] == 700 and set(sizes[1:-1]) == {SHARD_SIZE} and 0 < sizes[-1] <= SHARD_SIZE and len(sizes) > 5
    meta, written = json.loads((tmp_path / "web" / "meta.json").read_text()), read_files(tmp_path / "web")
    files = [file for split in meta["splits"].values() for file in split]
    assert meta["dtype"] == "uint16" and meta["tokenizer"]["name"] == "gpt2"
    assert set(written) == {"meta.json", *(file["name"] for file in files)}
    assert all(hashlib.sha256(written[file["name"]]).hexdigest() == file["sha256"] for file in files)


def test_max_tokens_ends_the_stream_at_that_token(tmp_path: Path, corpus: Corpus) -> None:
    """--max_tokens ends the stream after exactly that number of tokens, including those of the val split."""
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE, max_tokens=5001)
    shards = read_shards(tmp_path / "web")
    assert [len(shard) for shard in shards] == [SHARD_SIZE, SHARD_SIZE, 1001]
    assert np.concatenate(shards).tolist() == expected_stream(list(generate_documents(DOCUMENTS)))[:5001]


def test_windows_stay_within_a_shard(tmp_path: Path, corpus: Corpus) -> None:
    """TokenData opens the result and reads from every train shard. No window spans two shards."""
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    train = [shard.astype(np.int64) for shard in read_shards(tmp_path / "web")[1:]]
    length = 33
    shard_of_window = {
        shard[i : i + length].tobytes(): n for n, shard in enumerate(train) for i in range(len(shard) - length + 1)
    }
    data = TokenData(str(tmp_path / "web"), block_size=length - 1, batch_size=64, seed=1)
    shards_read = set()
    for step in range(60):
        x, y = data.batch("train", TRAIN, step, 0)
        for row in np.concatenate((x.numpy(), y.numpy()[:, -1:]), axis=1):
            shards_read.add(shard_of_window[row.tobytes()])  # a KeyError is a window that spans two shards
    assert shards_read == set(range(len(train)))


def test_a_repository_with_subsets_has_the_same_tokens(tmp_path: Path) -> None:
    """A dataset with the layout of the Hugging Face Hub, and with subsets and columns in its README, has the same
    tokens."""
    repository = tmp_path / "repository"
    write_parquet(repository / "sample" / "0.parquet", list(generate_documents(DOCUMENTS)))
    write_parquet(repository / "other" / "0.parquet", ["another subset"])
    column_types = "features: [{name: text, dtype: string}, {name: url, dtype: string}]"
    subsets = [f"{{config_name: {name}, data_files: {name}/*.parquet}}" for name in ("other", "sample")]
    card = ["---", "configs:", *(f"- {subset}" for subset in subsets)]
    card += ["dataset_info:", f"- {{config_name: sample, {column_types}}}", "---"]
    (repository / "README.md").write_text("\n".join(card))
    prepare_stream(tmp_path / "web", hub_corpus(str(repository), "sample"), SHARD_SIZE)
    assert np.concatenate(read_shards(tmp_path / "web")).tolist() == expected_stream(
        list(generate_documents(DOCUMENTS))
    )


KILLED_PROGRAM = """
import os, signal, sys
from pathlib import Path
from nanoGPT.prepare import corpus as corpora
from nanoGPT.prepare import corpus
from nanoGPT.prepare import streaming

replace = os.replace
def replace_or_die(source, target):
    if str(target).endswith("train_000003.bin"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = replace_or_die
streaming.prepare_stream(Path(sys.argv[1]), corpus.parquet_corpus(sys.argv[2]), int(sys.argv[3]))
"""


def test_a_kill_while_a_shard_is_written_changes_no_file(tmp_path: Path, pattern: str) -> None:
    """If SIGKILL stops a process while it writes its fourth shard, the next run continues and writes identical
    files."""
    folder, corpus = tmp_path / "web", parquet_corpus(pattern)
    command = [sys.executable, "-c", KILLED_PROGRAM, str(folder), pattern, str(SHARD_SIZE)]
    assert subprocess.run(command, cwd=PACKAGE.parent, capture_output=True).returncode == -signal.SIGKILL
    inodes = {path.name: path.stat().st_ino for path in folder.iterdir()}
    complete_shards = {"val_000000.bin", "train_000001.bin", "train_000002.bin"}
    assert set(inodes) > complete_shards | {"progress.json"} and "meta.json" not in inodes
    assert any(name.startswith(".tmp-") for name in inodes)
    prepare_stream(folder, corpus, SHARD_SIZE)
    assert read_files(folder) == prepare_without_interruption(tmp_path, corpus)
    # The complete shards were not written again.
    assert all((folder / name).stat().st_ino == inodes[name] for name in complete_shards)


@pytest.mark.parametrize("after", [0, 1, 33, 129, 130, 131, 257, DOCUMENTS - 1])
def test_an_interruption_anywhere_changes_no_file(tmp_path: Path, corpus: Corpus, after: int) -> None:
    """After an interruption at any document, the next run writes identical files."""
    prepare_until_interrupt(tmp_path / "web", corpus, after)
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    assert read_files(tmp_path / "web") == prepare_without_interruption(tmp_path, corpus)


def test_repeated_interruptions_change_no_file(tmp_path: Path, corpus: Corpus) -> None:
    """Runs that are interrupted after 60 documents each make progress, and the last one writes identical files."""
    for _ in range(3):
        prepare_until_interrupt(tmp_path / "web", corpus, 60)
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    assert read_files(tmp_path / "web") == prepare_without_interruption(tmp_path, corpus)


def test_a_run_resumes_in_the_middle_of_a_document(tmp_path: Path) -> None:
    """A document that is longer than several shards is continued in its middle."""
    corpus = write_corpus(tmp_path, ["short", " ".join(generate_documents(100)), *generate_documents(20)])
    prepare_until_interrupt(tmp_path / "web", corpus, 2)
    progress = json.loads((tmp_path / "web" / "progress.json").read_text())
    assert progress["document"] == 1 and progress["offset"] > SHARD_SIZE
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    assert read_files(tmp_path / "web") == prepare_without_interruption(tmp_path, corpus)


def test_a_shard_without_its_progress_is_written_again(tmp_path: Path, corpus: Corpus) -> None:
    """If a run stops between writing a shard and its entry in progress.json, the next run writes an identical shard
    again."""
    real_save = streaming.StreamProgress.save

    def save_or_interrupt(progress: streaming.StreamProgress, folder: Path) -> None:
        if len(progress.files) == 3:
            raise KeyboardInterrupt
        real_save(progress, folder)

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(streaming.StreamProgress, "save", save_or_interrupt)
        prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    assert (tmp_path / "web" / "train_000002.bin").is_file()
    prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    assert read_files(tmp_path / "web") == prepare_without_interruption(tmp_path, corpus)


@pytest.mark.parametrize("max_tokens", [None, 5001])
def test_a_run_stopped_at_its_end_is_completed(tmp_path: Path, corpus: Corpus, max_tokens: int | None) -> None:
    """If a run stops just before or just after it writes meta.json, the next run completes it."""

    def raise_interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "web"
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(streaming, "write_meta", raise_interrupt)
        prepare_stream(folder, corpus, SHARD_SIZE, max_tokens)
    progress = (folder / "progress.json").read_bytes()
    prepare_stream(folder, corpus, SHARD_SIZE, max_tokens)
    finished = read_files(folder)
    (folder / "progress.json").write_bytes(progress)
    prepare_stream(folder, corpus, SHARD_SIZE, max_tokens)
    prepare_stream(tmp_path / "uninterrupted", corpus, SHARD_SIZE, max_tokens)
    assert read_files(folder) == finished == read_files(tmp_path / "uninterrupted")


def measure_peaks(tmp_path: Path, count: int) -> tuple[int, int]:
    """Return the peak memory of Python and numpy, and that of Arrow, during a run over `count` long documents."""
    rng = random.Random(count)
    corpus = write_corpus(tmp_path / str(count), [" ".join(rng.choices(WORDS, k=500)) for _ in range(count)])
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.system_memory_pool())  # a new pool counts from 0
    pa.set_memory_pool(pool)
    tracemalloc.start()
    prepare_stream(tmp_path / str(count) / "web", corpus, 20_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pa.set_memory_pool(before)
    return peak, pool.max_memory()


def test_memory_is_constant(tmp_path: Path) -> None:
    """Eight times as many documents and shards need no more memory."""
    # A first run imports modules and loads GPT-2's vocabulary, which must not count.
    prepare_stream(tmp_path / "warm", write_corpus(tmp_path, list(generate_documents(20))), 100)
    peak, arrow_peak = measure_peaks(tmp_path, 120)
    eightfold_peak, eightfold_arrow_peak = measure_peaks(tmp_path, 960)
    assert peak > 0 and eightfold_peak < 1.2 * peak
    assert arrow_peak > 0 and eightfold_arrow_peak < 1.5 * arrow_peak


def test_a_second_run_changes_nothing(tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    """If the dataset is already prepared, the same command prints this and changes no file."""
    before = prepare_without_interruption(tmp_path, corpus)
    times = [path.stat().st_mtime_ns for path in sorted((tmp_path / "uninterrupted").iterdir())]
    capsys.readouterr()
    assert prepare_without_interruption(tmp_path, corpus) == before
    assert capsys.readouterr().out == "uninterrupted: already prepared\n"
    assert times == [path.stat().st_mtime_ns for path in sorted((tmp_path / "uninterrupted").iterdir())]


def test_a_dataset_with_a_missing_shard_is_prepared_again(tmp_path: Path, corpus: Corpus) -> None:
    """If a shard is missing, the same command prepares the dataset again."""
    before = prepare_without_interruption(tmp_path, corpus)
    (tmp_path / "uninterrupted" / "train_000002.bin").unlink()
    assert prepare_without_interruption(tmp_path, corpus) == before


def test_a_command_without_flags_keeps_an_existing_dataset(
    tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that `make` runs, without flags, does not change a dataset that was prepared with flags."""
    before = prepare_without_interruption(tmp_path, corpus)
    prepare_stream(tmp_path / "uninterrupted", hub_corpus("Skylion007/openwebtext"), streaming.SHARD_TOKENS)
    assert read_files(tmp_path / "uninterrupted") == before and "already prepared" in capsys.readouterr().out


def get_refusal(*arguments: Any) -> str:
    """Assert that `prepare_stream` raises a ConfigError of one line, and return its message."""
    with pytest.raises(ConfigError) as caught:
        prepare_stream(*arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence and not sentence.endswith(".")
    return sentence


def test_other_flags_and_sources_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    """A dataset, or the progress of one, from another source or other flags is not overwritten."""
    before = prepare_without_interruption(tmp_path, corpus)
    assert f"`rm {tmp_path}/uninterrupted/meta.json`" in get_refusal(
        tmp_path / "uninterrupted", corpus, SHARD_SIZE, 5000
    )
    assert "belongs to a different source" in get_refusal(
        tmp_path / "uninterrupted", write_corpus(tmp_path, list(generate_documents(90))), SHARD_SIZE
    )
    assert read_files(tmp_path / "uninterrupted") == before
    prepare_until_interrupt(tmp_path / "web", corpus, 200)
    before = read_files(tmp_path / "web")
    assert f"`rm {tmp_path}/web/progress.json`" in get_refusal(tmp_path / "web", corpus, SHARD_SIZE + 1)
    assert "use those again to continue" in get_refusal(
        tmp_path / "web", write_corpus(tmp_path, list(generate_documents(90))), SHARD_SIZE
    )
    assert read_files(tmp_path / "web") == before


def test_damaged_progress_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    """A shard of a wrong size and a damaged progress.json are refused. The error names the command that starts over."""
    prepare_until_interrupt(tmp_path / "web", corpus, 200)
    (tmp_path / "web" / "train_000001.bin").write_bytes(b"short")
    sentence = get_refusal(tmp_path / "web", corpus, SHARD_SIZE)
    assert (
        "train_000001.bin does not have the 4,000 bytes" in sentence
        and f"`rm {tmp_path}/web/progress.json`" in sentence
    )
    (tmp_path / "web" / "progress.json").write_text("{")
    assert "progress.json is damaged (" in get_refusal(tmp_path / "web", corpus, SHARD_SIZE)


def invalid_progress_files(valid: dict[str, Any]) -> Iterator[str]:
    """Yield contents of progress.json with other types, fields or numbers than are ever written."""
    train, val = valid["splits"]["train"], valid["splits"]["val"]
    yield from ("[]", "null", "{}", "[" * 200_000)
    for splits in ([], None, {"train": train}, {"train": 3, "val": val}, {"train": train, "val": [None]}):
        yield json.dumps({**valid, "splits": splits})
    for change in ({"tokens": "1"}, {"tokens": -1}, {"tokens": True}, {"name": "../val_000000.bin"}, {"name": 1}):
        yield json.dumps({**valid, "splits": {"train": train, "val": [{**val[0], **change}]}})
    for name, value in (("document", -1), ("document", 1.5), ("offset", "0"), ("offset", None), ("offset", True)):
        yield json.dumps({**valid, name: value})


def test_invalid_progress_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    """A progress.json with invalid types, fields or numbers is refused, and the shards are unchanged."""
    prepare_until_interrupt(tmp_path / "web", corpus, 200)
    before = read_files(tmp_path / "web")
    path = tmp_path / "web" / "progress.json"
    for text in invalid_progress_files(json.loads(before["progress.json"])):
        path.write_text(text)
        assert "progress.json is damaged (" in get_refusal(tmp_path / "web", corpus, SHARD_SIZE), text[:200]
    path.write_bytes(before["progress.json"])
    assert read_files(tmp_path / "web") == before


@pytest.mark.parametrize("name", ["meta.json", "train_000002.bin", "progress.json", "train_000001.bin"])
def test_a_file_with_a_read_error_is_not_treated_as_missing(
    name: str, tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the file system raises an error for a file, the file is not treated as missing. Nothing is deleted or written
    again."""
    if name in ("meta.json", "train_000002.bin"):
        prepare_stream(tmp_path / "web", corpus, SHARD_SIZE)
    else:
        prepare_until_interrupt(tmp_path / "web", corpus, 200)
    before = read_files(tmp_path / "web")
    (tmp_path / "web" / name).unlink()
    (tmp_path / "web" / name).symlink_to(name)  # ELOOP
    monkeypatch.setattr("nanoGPT.files.RETRY_DELAYS", ())
    assert f"{name} cannot be read (Too many levels of symbolic links)" in get_refusal(
        tmp_path / "web", corpus, SHARD_SIZE
    )
    (tmp_path / "web" / name).unlink()
    assert read_files(tmp_path / "web") == {other: before[other] for other in before if other != name}


def test_a_damaged_meta_json_is_kept(tmp_path: Path, corpus: Corpus) -> None:
    """A meta.json that cannot be parsed may describe hours of work. It is neither deleted nor overwritten."""
    before = prepare_without_interruption(tmp_path, corpus) | {"meta.json": b"{"}
    (tmp_path / "uninterrupted" / "meta.json").write_bytes(b"{")
    assert "remove this file to prepare the dataset again" in get_refusal(
        tmp_path / "uninterrupted", corpus, SHARD_SIZE
    )
    assert read_files(tmp_path / "uninterrupted") == before


def test_a_parquet_file_with_a_read_error_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local file whose size cannot be read is named. Without this file, the dataset would be a different one."""
    write_parquet(tmp_path / "in" / "0.parquet", list(generate_documents(20)))
    (tmp_path / "in" / "1.parquet").symlink_to("1.parquet")  # ELOOP
    monkeypatch.setattr("nanoGPT.files.RETRY_DELAYS", ())
    with pytest.raises(ConfigError, match="1.parquet cannot be read"):
        parquet_corpus(f"{tmp_path}/in/*.parquet")


def test_concurrent_runs_prepare_a_dataset_once(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If two runs prepare the same dataset, the second one waits, and does not touch the files of the first."""
    has_started, may_continue, written, real_replace = threading.Event(), threading.Event(), [], os.replace

    def slow_replace(source: Any, target: Any) -> None:
        written.append(Path(target).name)
        if len(written) == 3:
            has_started.set()
            assert may_continue.wait(DEADLINE)
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", slow_replace)
    prepare_twice_at_once(
        lambda: prepare_stream(tmp_path / "web", corpus, SHARD_SIZE), has_started, may_continue, monkeypatch
    )
    output = capsys.readouterr().out
    shards = [name for name in written if name.endswith(".bin")]
    assert len(shards) == len(set(shards)) and output.endswith("web: already prepared\n")
    monkeypatch.undo()
    assert read_files(tmp_path / "web") == prepare_without_interruption(tmp_path, corpus)


def test_unreadable_sources_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    """A missing file, a missing text column, a damaged file and a truncated file are each refused with an error that
    says what to do."""
    web = tmp_path / "web"
    with pytest.raises(ConfigError, match="matches no file: give a pattern"):
        parquet_corpus(f"{tmp_path}/none/*.parquet")
    assert "has no column `text` of strings" in get_refusal(
        web, write_corpus(tmp_path, ["a"], column="body"), SHARD_SIZE
    )
    assert "has no column `text` of strings" in get_refusal(web, write_corpus(tmp_path, [1, 2]), SHARD_SIZE)
    assert not web.exists()
    second = tmp_path / "in[1]" / "1.parquet"
    middle, content = second.stat().st_size // 2, second.read_bytes()
    second.write_bytes(content[: middle - 2000] + bytes(4000) + content[middle + 2000 :])
    sentence = get_refusal(web, corpus, SHARD_SIZE)
    assert "cannot be read beyond document 1" in sentence and "run the same command again" in sentence
    second.write_bytes(content)
    prepare_stream(web, corpus, SHARD_SIZE)
    assert read_files(web) == prepare_without_interruption(tmp_path, corpus)
    second.write_bytes(content[:middle])
    assert "check that every file is a complete parquet file" in get_refusal(tmp_path / "new", corpus, SHARD_SIZE)


def test_an_unreachable_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, the error says so and names --input."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    sentence = get_refusal(tmp_path / "web", hub_corpus("Skylion007/openwebtext"), SHARD_SIZE)
    assert "Skylion007/openwebtext cannot be opened (ConnectionError: " in sentence
    assert "check the network, or use local parquet" in sentence


def test_a_missing_extra_is_named(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `datasets` is not installed, the error names the extra that installs it."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install -e '.[web]'" in get_refusal(tmp_path / "web", corpus, SHARD_SIZE)


def test_too_few_tokens_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    """A corpus that is too small for two splits is refused. The error names a shard size that works in the same
    folder."""
    total = len(expected_stream(list(generate_documents(DOCUMENTS))))
    for shard_tokens in (total, total + 1, streaming.SHARD_TOKENS):
        sentence = get_refusal(tmp_path / "web", corpus, shard_tokens)
        assert f"has only {total:,} tokens, too few" in sentence and f"--shard_tokens={total // 10}" in sentence
    prepare_stream(tmp_path / "web", corpus, total // 10)
    assert "leaves nothing to train on" in get_refusal(tmp_path / "new", corpus, SHARD_SIZE, SHARD_SIZE)
    assert "use 2 or more" in get_refusal(tmp_path / "new", corpus, 1)


@pytest.mark.parametrize("name", ["openwebtext", "fineweb_edu"])
def test_prepare_scripts_accept_local_files(
    tmp_path: Path, pattern: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prepare.py prepares local files into the folder of its dataset, with the flags that it documents."""
    monkeypatch.setattr("nanoGPT.files.DATA", tmp_path)
    flags = [f"--input={pattern}", f"--shard_tokens={SHARD_SIZE}", "--max_tokens=5001"]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *flags])
    runpy.run_path(str(PACKAGE / "data" / name / "prepare.py"), run_name="__main__")
    assert [len(shard) for shard in read_shards(tmp_path / name)] == [SHARD_SIZE, SHARD_SIZE, 1001]


PROGRAM_THAT_STOPS_EARLY = """
import sys
from pathlib import Path
from nanoGPT.prepare import corpus as corpora
from nanoGPT.prepare import corpus
from nanoGPT.prepare import streaming
streaming.prepare_stream(Path(sys.argv[1]), corpus.parquet_corpus(sys.argv[2]), 1000, 5000)
"""


def test_a_program_that_stops_early_exits_with_code_0(tmp_path: Path) -> None:
    """A program that stops in the middle of a file exits with code 0. Arrow's threads neither hang nor abort it."""
    write_corpus(tmp_path, list(generate_documents(1000)))
    command = [sys.executable, "-c", PROGRAM_THAT_STOPS_EARLY, str(tmp_path / "web"), f"{tmp_path}/one/*.parquet"]
    result = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=DEADLINE)
    assert (result.returncode, result.stderr) == (0, "")
