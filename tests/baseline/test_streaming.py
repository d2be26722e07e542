"""Streaming documents into shards: what is written, what survives a kill, and what is refused."""

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

DOCUMENTS = 300
SHARD = 2000  # tokens: about ten shards, and documents that begin in one and end in the next
WORDS = ["the", "sea", "Ocean", "naïve", "海", "cat's", "1984", "--", "running\n", "", "tokens", "dark", "été", "🙂"]


def texts(count: int) -> Iterator[str]:
    """Documents of 0 to 119 words, all different; every 50th has the separator's name in it."""
    chance = random.Random(count)
    for i in range(count):
        text = " ".join(chance.choices(WORDS, k=chance.randrange(120)))
        yield text + "<|endoftext|>" + text if i % 50 == 7 else text


def write_parquet(path: Path, documents: list[Any], column: str = "text") -> None:
    """A file with a second column, in row groups of 40 that are written one by one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema({column: pa.infer_type(documents), "url": pa.string()})
    with pq.ParquetWriter(path, schema) as writer:
        for i in range(0, len(documents), 40):
            some = documents[i : i + 40]
            writer.write_table(pa.table({column: some, "url": [f"page {i}"] * len(some)}, schema))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "BATCH", 32)


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    """The documents in two files, in a folder whose name `datasets` would take for a pattern."""
    documents = list(texts(DOCUMENTS))
    write_parquet(tmp_path / "in[1]" / "0.parquet", documents[:130])
    write_parquet(tmp_path / "in[1]" / "1.parquet", documents[130:])
    return f"{tmp_path}/in*/*.parquet"


@pytest.fixture
def corpus(pattern: str) -> Corpus:
    return parquet_corpus(pattern)


def corpus_of(tmp_path: Path, documents: list[Any], column: str = "text") -> Corpus:
    write_parquet(tmp_path / "one" / "0.parquet", documents, column)
    return parquet_corpus(f"{tmp_path}/one/*.parquet")


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


def interrupt(folder: Path, corpus: Corpus, after: int) -> None:
    """Run until the documents' iterator raises, `after` documents on."""
    whole = streaming.encode

    def dying(batches: Iterator[list[str]]) -> Iterator[np.ndarray]:
        for i, ids in enumerate(whole(batches)):
            if i == after:
                raise KeyboardInterrupt
            yield ids

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(streaming, "encode", dying)
        with pytest.raises(KeyboardInterrupt):
            prepare_stream(folder, corpus, SHARD)


def test_shards_decode_back(tmp_path: Path, corpus: Corpus) -> None:
    """The shards, one after the other, decode to the documents with a separator before each."""
    prepare_stream(tmp_path / "web", corpus, SHARD)
    stream = np.concatenate(shards_of(tmp_path / "web")).tolist()
    assert stream == expected_stream(list(texts(DOCUMENTS)))
    separators = [i for i, token in enumerate(stream) if token == 50256]
    parts = [stream[a + 1 : b] for a, b in zip(separators, [*separators[1:], None], strict=True)]
    assert [Gpt2Tokenizer().bpe.decode(part) for part in parts] == list(texts(DOCUMENTS))


def test_special_text_stays_text(tmp_path: Path) -> None:
    """The characters <|endoftext|> inside a document do not become the separator."""
    prepare_stream(tmp_path / "web", corpus_of(tmp_path, ["<|endoftext|>" * 3] * 20), 50)
    assert np.count_nonzero(np.concatenate(shards_of(tmp_path / "web")) == 50256) == 20


def test_missing_texts_are_empty_documents(tmp_path: Path) -> None:
    """A row without a text becomes a document without tokens, so that later documents keep their number."""
    prepare_stream(tmp_path / "web", corpus_of(tmp_path, ["one two three", None, "four five six"]), 4)
    written = np.concatenate(shards_of(tmp_path / "web")).tolist()
    assert written == expected_stream(["one two three", "", "four five six"])


def test_shard_sizes(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Val comes first with its own size, every train shard but the last is full, and the sidecar has their hashes."""
    monkeypatch.setattr(streaming, "VAL_TOKENS", 700)
    prepare_stream(tmp_path / "web", corpus, SHARD)
    sizes = [len(shard) for shard in shards_of(tmp_path / "web")]
    assert sizes[0] == 700 and set(sizes[1:-1]) == {SHARD} and 0 < sizes[-1] <= SHARD and len(sizes) > 5
    meta, written = json.loads((tmp_path / "web" / "meta.json").read_text()), files_of(tmp_path / "web")
    files = [file for split in meta["splits"].values() for file in split]
    assert meta["dtype"] == "uint16" and meta["tokenizer"]["name"] == "gpt2"
    assert set(written) == {"meta.json", *(file["name"] for file in files)}
    assert all(hashlib.sha256(written[file["name"]]).hexdigest() == file["sha256"] for file in files)


def test_max_tokens(tmp_path: Path, corpus: Corpus) -> None:
    """--max_tokens ends the stream at that very token, val's included."""
    prepare_stream(tmp_path / "web", corpus, SHARD, max_tokens=5001)
    shards = shards_of(tmp_path / "web")
    assert [len(shard) for shard in shards] == [SHARD, SHARD, 1001]
    assert np.concatenate(shards).tolist() == expected_stream(list(texts(DOCUMENTS)))[:5001]


def test_windows_stay_within_a_shard(tmp_path: Path, corpus: Corpus) -> None:
    """TokenData opens the result, reads from every train shard, and no window of it spans two."""
    prepare_stream(tmp_path / "web", corpus, SHARD)
    train = [shard.astype(np.int64) for shard in shards_of(tmp_path / "web")[1:]]
    length = 33
    inside = {
        shard[i : i + length].tobytes(): n for n, shard in enumerate(train) for i in range(len(shard) - length + 1)
    }
    data = TokenData(str(tmp_path / "web"), block_size=length - 1, batch_size=64, seed=1)
    seen = set()
    for step in range(60):
        x, y = data.batch("train", TRAIN, step, 0)
        for row in np.concatenate((x.numpy(), y.numpy()[:, -1:]), axis=1):
            seen.add(inside[row.tobytes()])  # a KeyError is a window that spans two shards
    assert seen == set(range(len(train)))


def test_a_repository_with_subsets(tmp_path: Path) -> None:
    """A dataset that is laid out as on the hub, its subsets and columns named in its README, gives the same tokens."""
    repository = tmp_path / "repository"
    write_parquet(repository / "sample" / "0.parquet", list(texts(DOCUMENTS)))
    write_parquet(repository / "other" / "0.parquet", ["another subset"])
    column_types = "features: [{name: text, dtype: string}, {name: url, dtype: string}]"
    subsets = [f"{{config_name: {name}, data_files: {name}/*.parquet}}" for name in ("other", "sample")]
    card = ["---", "configs:", *(f"- {subset}" for subset in subsets)]
    card += ["dataset_info:", f"- {{config_name: sample, {column_types}}}", "---"]
    (repository / "README.md").write_text("\n".join(card))
    prepare_stream(tmp_path / "web", hub_corpus(str(repository), "sample"), SHARD)
    assert np.concatenate(shards_of(tmp_path / "web")).tolist() == expected_stream(list(texts(DOCUMENTS)))


KILLED = """
import os, signal, sys
from pathlib import Path
from nanoGPT.prepare import corpus as corpora
from nanoGPT.prepare import corpus
from nanoGPT.prepare import streaming

replace = os.replace
def dying(source, target):
    if str(target).endswith("train_000003.bin"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = dying
streaming.prepare_stream(Path(sys.argv[1]), corpus.parquet_corpus(sys.argv[2]), int(sys.argv[3]))
"""


def test_sigkill_while_a_shard_is_written(tmp_path: Path, pattern: str) -> None:
    """A process that SIGKILL ends while it writes its fourth shard is gone on with, to the very same files."""
    folder, corpus = tmp_path / "web", parquet_corpus(pattern)
    command = [sys.executable, "-c", KILLED, str(folder), pattern, str(SHARD)]
    assert subprocess.run(command, cwd=PACKAGE.parent, capture_output=True).returncode == -signal.SIGKILL
    left = {path.name: path.stat().st_ino for path in folder.iterdir()}
    whole_shards = {"val_000000.bin", "train_000001.bin", "train_000002.bin"}
    assert set(left) > whole_shards | {"progress.json"} and "meta.json" not in left
    assert any(name.startswith(".tmp-") for name in left)
    prepare_stream(folder, corpus, SHARD)
    assert files_of(folder) == uninterrupted(tmp_path, corpus)
    assert all((folder / name).stat().st_ino == left[name] for name in whole_shards)  # they were not written again


@pytest.mark.parametrize("after", [0, 1, 33, 129, 130, 131, 257, DOCUMENTS - 1])
def test_interrupted_anywhere(tmp_path: Path, corpus: Corpus, after: int) -> None:
    """Wherever in the stream a run is interrupted, the next one ends with the very same files."""
    interrupt(tmp_path / "web", corpus, after)
    prepare_stream(tmp_path / "web", corpus, SHARD)
    assert files_of(tmp_path / "web") == uninterrupted(tmp_path, corpus)


def test_interrupted_again_and_again(tmp_path: Path, corpus: Corpus) -> None:
    """A run that gets 60 documents on at a time comes to an end, and to the very same files."""
    for _ in range(3):
        interrupt(tmp_path / "web", corpus, 60)
    prepare_stream(tmp_path / "web", corpus, SHARD)
    assert files_of(tmp_path / "web") == uninterrupted(tmp_path, corpus)


def test_one_document_over_many_shards(tmp_path: Path) -> None:
    """A document longer than several shards is gone on with in its middle."""
    corpus = corpus_of(tmp_path, ["short", " ".join(texts(100)), *texts(20)])
    interrupt(tmp_path / "web", corpus, 2)
    progress = json.loads((tmp_path / "web" / "progress.json").read_text())
    assert progress["document"] == 1 and progress["offset"] > SHARD
    prepare_stream(tmp_path / "web", corpus, SHARD)
    assert files_of(tmp_path / "web") == uninterrupted(tmp_path, corpus)


def test_killed_between_shard_and_progress(tmp_path: Path, corpus: Corpus) -> None:
    """A shard that reached the disk without its line in progress.json is written again, the same."""
    save = streaming.Progress.save

    def dying(progress: streaming.Progress, folder: Path) -> None:
        if len(progress.files) == 3:
            raise KeyboardInterrupt
        save(progress, folder)

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(streaming.Progress, "save", dying)
        prepare_stream(tmp_path / "web", corpus, SHARD)
    assert (tmp_path / "web" / "train_000002.bin").is_file()
    prepare_stream(tmp_path / "web", corpus, SHARD)
    assert files_of(tmp_path / "web") == uninterrupted(tmp_path, corpus)


@pytest.mark.parametrize("max_tokens", [None, 5001])
def test_killed_at_the_very_end(tmp_path: Path, corpus: Corpus, max_tokens: int | None) -> None:
    """A run that was killed just before meta.json was written, or just after, is finished by the next."""

    def dying(*_: Any) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "web"
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(streaming, "write_meta", dying)
        prepare_stream(folder, corpus, SHARD, max_tokens)
    progress = (folder / "progress.json").read_bytes()
    prepare_stream(folder, corpus, SHARD, max_tokens)
    finished = files_of(folder)
    (folder / "progress.json").write_bytes(progress)
    prepare_stream(folder, corpus, SHARD, max_tokens)
    prepare_stream(tmp_path / "whole", corpus, SHARD, max_tokens)
    assert files_of(folder) == finished == files_of(tmp_path / "whole")


def peaks(tmp_path: Path, count: int) -> tuple[int, int]:
    """Most bytes that Python and numpy, and that Arrow, held during a run over `count` long documents."""
    chance = random.Random(count)
    corpus = corpus_of(tmp_path / str(count), [" ".join(chance.choices(WORDS, k=500)) for _ in range(count)])
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.system_memory_pool())  # one that counts anew
    pa.set_memory_pool(pool)
    tracemalloc.start()
    prepare_stream(tmp_path / str(count) / "web", corpus, 20_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pa.set_memory_pool(before)
    return peak, pool.max_memory()


def test_memory_is_constant(tmp_path: Path) -> None:
    """Eight times the documents, in eight times the shards, take no more memory."""
    prepare_stream(tmp_path / "warm", corpus_of(tmp_path, list(texts(20))), 100)  # imports, and GPT-2's vocabulary
    (once, arrow_once), (eight, arrow_eight) = peaks(tmp_path, 120), peaks(tmp_path, 960)
    assert once > 0 and eight < 1.2 * once
    assert arrow_once > 0 and arrow_eight < 1.5 * arrow_once


def test_second_run_does_nothing(tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the dataset is there, the same command says so and touches nothing."""
    before = uninterrupted(tmp_path, corpus)
    times = [path.stat().st_mtime_ns for path in sorted((tmp_path / "whole").iterdir())]
    capsys.readouterr()
    assert uninterrupted(tmp_path, corpus) == before
    assert capsys.readouterr().out == "whole: already prepared\n"
    assert times == [path.stat().st_mtime_ns for path in sorted((tmp_path / "whole").iterdir())]


def test_a_damaged_dataset_is_made_again(tmp_path: Path, corpus: Corpus) -> None:
    """Where a shard is missing, the same command makes the dataset anew."""
    before = uninterrupted(tmp_path, corpus)
    (tmp_path / "whole" / "train_000002.bin").unlink()
    assert uninterrupted(tmp_path, corpus) == before


def test_no_flags_take_what_is_there(tmp_path: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that `make` gives, without flags, leaves a dataset alone that was made with flags."""
    before = uninterrupted(tmp_path, corpus)
    prepare_stream(tmp_path / "whole", hub_corpus("Skylion007/openwebtext"), streaming.SHARD_TOKENS)
    assert files_of(tmp_path / "whole") == before and "already prepared" in capsys.readouterr().out


def assert_refused(*arguments: Any) -> str:
    """The sentence with which `prepare_stream` refuses."""
    with pytest.raises(ConfigError) as caught:
        prepare_stream(*arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence and not sentence.endswith(".")
    return sentence


def test_refuses_other_flags_and_sources(tmp_path: Path, corpus: Corpus) -> None:
    """Neither a dataset nor the progress of another source or other flags is overwritten."""
    before = uninterrupted(tmp_path, corpus)
    assert f"`rm {tmp_path}/whole/meta.json`" in assert_refused(tmp_path / "whole", corpus, SHARD, 5000)
    assert "of another source" in assert_refused(tmp_path / "whole", corpus_of(tmp_path, list(texts(90))), SHARD)
    assert files_of(tmp_path / "whole") == before
    interrupt(tmp_path / "web", corpus, 200)
    before = files_of(tmp_path / "web")
    assert f"`rm {tmp_path}/web/progress.json`" in assert_refused(tmp_path / "web", corpus, SHARD + 1)
    assert "use those again to go on" in assert_refused(tmp_path / "web", corpus_of(tmp_path, list(texts(90))), SHARD)
    assert files_of(tmp_path / "web") == before


def test_refuses_damaged_progress(tmp_path: Path, corpus: Corpus) -> None:
    """A shard of another size than was written, and a broken progress.json, name the command that begins anew."""
    interrupt(tmp_path / "web", corpus, 200)
    (tmp_path / "web" / "train_000001.bin").write_bytes(b"short")
    sentence = assert_refused(tmp_path / "web", corpus, SHARD)
    assert "train_000001.bin is not the 4,000 bytes" in sentence and f"`rm {tmp_path}/web/progress.json`" in sentence
    (tmp_path / "web" / "progress.json").write_text("{")
    assert "progress.json is damaged (" in assert_refused(tmp_path / "web", corpus, SHARD)


def harms_of_progress(good: dict[str, Any]) -> Iterator[str]:
    """Texts of a progress.json that nothing here has written."""
    train, val = good["splits"]["train"], good["splits"]["val"]
    yield from ("[]", "null", "{}", "[" * 200_000)
    for splits in ([], None, {"train": train}, {"train": 3, "val": val}, {"train": train, "val": [None]}):
        yield json.dumps({**good, "splits": splits})
    for change in ({"tokens": "1"}, {"tokens": -1}, {"tokens": True}, {"name": "../val_000000.bin"}, {"name": 1}):
        yield json.dumps({**good, "splits": {"train": train, "val": [{**val[0], **change}]}})
    for name, value in (("document", -1), ("document", 1.5), ("offset", "0"), ("offset", None), ("offset", True)):
        yield json.dumps({**good, name: value})


def test_refuses_progress_that_cannot_be(tmp_path: Path, corpus: Corpus) -> None:
    """A progress.json with other types, fields or numbers than are written is refused, and shards stay as they are."""
    interrupt(tmp_path / "web", corpus, 200)
    before = files_of(tmp_path / "web")
    path = tmp_path / "web" / "progress.json"
    for harm in harms_of_progress(json.loads(before["progress.json"])):
        path.write_text(harm)
        assert "progress.json is damaged (" in assert_refused(tmp_path / "web", corpus, SHARD), harm[:200]
    path.write_bytes(before["progress.json"])
    assert files_of(tmp_path / "web") == before


@pytest.mark.parametrize("name", ["meta.json", "train_000002.bin", "progress.json", "train_000001.bin"])
def test_an_error_is_not_taken_for_absence(
    name: str, tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the file system gives an error for is not taken for missing: nothing is deleted or made again."""
    if name in ("meta.json", "train_000002.bin"):
        prepare_stream(tmp_path / "web", corpus, SHARD)
    else:
        interrupt(tmp_path / "web", corpus, 200)
    before = files_of(tmp_path / "web")
    (tmp_path / "web" / name).unlink()
    (tmp_path / "web" / name).symlink_to(name)  # ELOOP
    monkeypatch.setattr("nanoGPT.files.WAITS", ())
    assert f"{name} cannot be read (Too many levels of symbolic links)" in assert_refused(
        tmp_path / "web", corpus, SHARD
    )
    (tmp_path / "web" / name).unlink()
    assert files_of(tmp_path / "web") == {other: before[other] for other in before if other != name}


def test_a_damaged_meta_json_is_kept(tmp_path: Path, corpus: Corpus) -> None:
    """A meta.json that cannot be parsed stands for hours of work, and is neither deleted nor written again."""
    before = uninterrupted(tmp_path, corpus) | {"meta.json": b"{"}
    (tmp_path / "whole" / "meta.json").write_bytes(b"{")
    assert "remove that file to prepare the dataset again" in assert_refused(tmp_path / "whole", corpus, SHARD)
    assert files_of(tmp_path / "whole") == before


def test_a_parquet_file_that_gives_an_error_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local file whose size cannot be read is named; without it the dataset would be another one."""
    write_parquet(tmp_path / "in" / "0.parquet", list(texts(20)))
    (tmp_path / "in" / "1.parquet").symlink_to("1.parquet")  # ELOOP
    monkeypatch.setattr("nanoGPT.files.WAITS", ())
    with pytest.raises(ConfigError, match="1.parquet cannot be read"):
        parquet_corpus(f"{tmp_path}/in/*.parquet")


def test_two_at_once(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two that prepare the same dataset at once, the second waits, and takes no file from under the first."""
    arrived, go_on, written, replace = threading.Event(), threading.Event(), [], os.replace

    def slow(source: Any, target: Any) -> None:
        written.append(Path(target).name)
        if len(written) == 3:
            arrived.set()
            assert go_on.wait(60)
        replace(source, target)

    monkeypatch.setattr(os, "replace", slow)
    both = [threading.Thread(target=prepare_stream, args=(tmp_path / "web", corpus, SHARD)) for _ in range(2)]
    both[0].start()
    assert arrived.wait(60)
    both[1].start()
    said = ""
    while "waiting" not in said and len(written) == 3 and both[1].is_alive():
        said += capsys.readouterr().out
    go_on.set()
    for thread in both:
        thread.join(60)
    said += capsys.readouterr().out
    shards = [name for name in written if name.endswith(".bin")]
    assert len(shards) == len(set(shards)) and said.endswith("web: already prepared\n")
    monkeypatch.undo()
    assert files_of(tmp_path / "web") == uninterrupted(tmp_path, corpus)


def test_refuses_unreadable_sources(tmp_path: Path, corpus: Corpus) -> None:
    """No file, no text column, a damaged file and half a file: each is a sentence that says what to do."""
    web = tmp_path / "web"
    with pytest.raises(ConfigError, match="matches no file: give a pattern"):
        parquet_corpus(f"{tmp_path}/none/*.parquet")
    assert "has no column `text` of strings" in assert_refused(web, corpus_of(tmp_path, ["a"], column="body"), SHARD)
    assert "has no column `text` of strings" in assert_refused(web, corpus_of(tmp_path, [1, 2]), SHARD)
    assert not web.exists()
    second = tmp_path / "in[1]" / "1.parquet"
    middle, content = second.stat().st_size // 2, second.read_bytes()
    second.write_bytes(content[: middle - 2000] + bytes(4000) + content[middle + 2000 :])
    sentence = assert_refused(web, corpus, SHARD)
    assert "cannot be read beyond document 1" in sentence and "run the same command again" in sentence
    second.write_bytes(content)
    prepare_stream(web, corpus, SHARD)
    assert files_of(web) == uninterrupted(tmp_path, corpus)
    second.write_bytes(content[:middle])
    assert "check that every file is whole" in assert_refused(tmp_path / "new", corpus, SHARD)


def test_refuses_an_unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, the sentence says so and names --input."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    sentence = assert_refused(tmp_path / "web", hub_corpus("Skylion007/openwebtext"), SHARD)
    assert "Skylion007/openwebtext cannot be opened (ConnectionError: " in sentence
    assert "check the network, or give parquet files of your own with --input=" in sentence


def test_refuses_without_the_extra(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `datasets` is not installed, the sentence names the extra that has it."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install -e '.[web]'" in assert_refused(tmp_path / "web", corpus, SHARD)


def test_refuses_too_few_tokens(tmp_path: Path, corpus: Corpus) -> None:
    """A corpus too small for two splits is refused with a size that works, which the folder then takes."""
    total = len(expected_stream(list(texts(DOCUMENTS))))
    for shard_tokens in (total, total + 1, streaming.SHARD_TOKENS):
        sentence = assert_refused(tmp_path / "web", corpus, shard_tokens)
        assert f"holds {total:,} tokens, too few" in sentence and f"--shard_tokens={total // 10}" in sentence
    prepare_stream(tmp_path / "web", corpus, total // 10)
    assert "leaves nothing to train on" in assert_refused(tmp_path / "new", corpus, SHARD, SHARD)
    assert "give 2 or more" in assert_refused(tmp_path / "new", corpus, 1)


@pytest.mark.parametrize("name", ["openwebtext", "fineweb_edu"])
def test_scripts(tmp_path: Path, pattern: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """prepare.py puts local files where its own dataset goes, by the flags that it documents."""
    monkeypatch.setattr("nanoGPT.files.DATA", tmp_path)
    flags = [f"--input={pattern}", f"--shard_tokens={SHARD}", "--max_tokens=5001"]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *flags])
    runpy.run_path(str(PACKAGE / "data" / name / "prepare.py"), run_name="__main__")
    assert [len(shard) for shard in shards_of(tmp_path / name)] == [SHARD, SHARD, 1001]


STOPPED = """
import sys
from pathlib import Path
from nanoGPT.prepare import corpus as corpora
from nanoGPT.prepare import corpus
from nanoGPT.prepare import streaming
streaming.prepare_stream(Path(sys.argv[1]), corpus.parquet_corpus(sys.argv[2]), 1000, 5000)
"""


def test_the_interpreter_ends(tmp_path: Path) -> None:
    """A program that stops in the middle of a file ends with exit code 0; Arrow's threads neither hang nor abort it."""
    corpus_of(tmp_path, list(texts(1000)))
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "web"), f"{tmp_path}/one/*.parquet"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
