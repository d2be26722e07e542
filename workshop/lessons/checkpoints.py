"""Helpers of notebook 7: read the index of a checkpoint, kill ranks, record saves, and shorten what ranks print.

`workshop/lessons/checkpoint_pictures.py` draws it.
"""

import contextlib
import io
import re
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from nanoGPT.checkpoint import shards
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.manifest import HashedFile
from nanoGPT.checkpoint.shards import SafeReader
from phase3_fsdp import train as trainer
from phase3_fsdp.sharded_checkpoint import AsyncSaver
from workshop.ranks import run_on_ranks, start_ranks

Chunk = Mapping[str, Any]  # a saved part of a tensor: key, first, size, file, begin, end
Event = tuple[str, float, float]  # kind, begin and end in seconds


def read_index(checkpoint: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the full shape and the dtype of every tensor in a sharded checkpoint, by name."""
    index = SafeReader(checkpoint).index.state_dict_metadata
    return {key: (tensor.size, tensor.properties.dtype) for key, tensor in index.items()}


def list_chunks(checkpoint: Path) -> list[dict[str, Any]]:
    """Return every chunk of every tensor: its position in the tensor, and its file and byte range."""
    index = SafeReader(checkpoint).read_metadata()
    sizes = {(key, c.offsets): c.sizes for key, t in index.state_dict_metadata.items() for c in t.chunks}
    return [
        {
            "key": entry.fqn,
            "first": tuple(entry.offset),
            "size": tuple(sizes[entry.fqn, entry.offset]),
            "file": info.relative_path,
            "begin": info.offset,
            "end": info.offset + info.length,
        }
        for entry, info in index.storage_data.items()
    ]


def select_chunks(chunks: Sequence[Chunk], key: str) -> list[Chunk]:
    """Return the chunks of one tensor, sorted by their first element."""
    return sorted((chunk for chunk in chunks if chunk["key"] == key), key=lambda chunk: chunk["first"])


def check_index(checkpoint: Path) -> None:
    """Check that the chunks of each tensor contain each element once, and that byte ranges do not overlap.

    Raises:
        AssertionError: an element is missing or saved twice, or byte ranges overlap.
    """
    chunks = list_chunks(checkpoint)
    for key, (shape, _) in read_index(checkpoint).items():
        assert sum(torch.Size(chunk["size"]).numel() for chunk in select_chunks(chunks, key)) == shape.numel()
    for file in {chunk["file"] for chunk in chunks}:
        spans = sorted((chunk["begin"], chunk["end"]) for chunk in chunks if chunk["file"] == file)
        assert all(left[1] <= right[0] for left, right in zip(spans, spans[1:], strict=False))


def load_with_dcp(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load all full tensors in one process with PyTorch's reader, which does not check the manifest."""
    state = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in read_index(checkpoint).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that there is no process group
        dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return state


def find_difference(state: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> tuple[str, int, int]:
    """Return the tensor, the row and the column of the only element in which two states differ."""
    [key] = [key for key in state if not torch.equal(other[key], state[key])]
    [(row, column)] = (other[key] != state[key]).nonzero().tolist()
    return key, row, column


def list_distinct_numbers(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the different numbers in the tensors, sorted."""
    return sorted({int(number) for tensor in tensors.values() for number in tensor.unique()})


def capture_output(folder: str, function: Callable, *args: Any) -> list[str]:
    """Call `run_on_ranks`, and return the lines that the ranks print, without the path of `folder`."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_on_ranks(function, *args)
    return output.getvalue().replace(folder + "/", "").splitlines()


def run_until_killed(victim: int, function: Callable, *args: Any) -> None:
    """Start two ranks, wait until rank `victim` is killed, and kill the other rank if it does not exit."""
    assert run_until_exit(20, function, *args)[victim] == -signal.SIGKILL


def run_until_exit(seconds: float, function: Callable, *args: Any) -> list[int | None]:
    """Start two ranks, wait until they exit, and return their exit codes. Kill ranks that take too long.

    Returns:
        The exit code of each rank: None if it was still running after `seconds`.
    """
    with tempfile.TemporaryDirectory() as rendezvous:
        started = start_ranks(function, 2, *args, folder=rendezvous)
        for process, _ in started:
            process.join(seconds)
        exit_codes = [process.exitcode for process, _ in started]
        for process, _ in started:
            process.kill()
            process.join()
    return exit_codes


def print_directory(root: Path) -> None:
    """Print the files of a checkpoint directory with their sizes in bytes."""
    for path in sorted(root.iterdir()):
        if path.is_dir():
            files = ", ".join(f"{file.name} {file.stat().st_size:,}" for file in sorted(path.iterdir()))
            print(f"    {path.name + '/':20} {files or '(empty)'}")
        else:
            print(f"    {path.name:20} contains {path.read_text().strip()}")


def list_reads() -> dict[str, list[str]]:
    """Record which files the calling rank reads for each tensor, from now on. Return the record."""
    files: dict[str, list[str]] = {}
    read_data = dcp.FileSystemReader.read_data

    def recorded_read_data(self: dcp.FileSystemReader, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            files.setdefault(item.dest_index.fqn, []).append(self.storage_data[item.storage_index].relative_path)
        return read_data(self, plan, planner)

    dcp.FileSystemReader.read_data = recorded_read_data  # type: ignore[method-assign]
    return files


def slow_down_disk(seconds: float) -> None:
    """Add a pause to the flush of each file."""
    close = HashedFile.close

    def slow_close(file: HashedFile) -> None:
        time.sleep(0 if file.closed else seconds)  # PyTorch's writer closes each file twice
        close(file)

    HashedFile.close = slow_close  # type: ignore


def record_saves() -> list[Event]:
    """Record each step, stop for a save, copy and write as an `Event`, from now on. Return the record."""
    events: list[Event] = []

    @contextlib.contextmanager
    def record(kind: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        events.append((kind, begin, time.perf_counter()))

    def wrap_method(owner: Any, name: str, kind: str) -> None:
        method = getattr(owner, name)

        def recorded_method(*args: Any, **kwargs: Any) -> Any:
            with record(kind):
                return method(*args, **kwargs)

        setattr(owner, name, recorded_method)

    wrap_method(CheckpointDirectory, "save", "stop")
    wrap_method(AsyncSaver, "begin_save", "stop")
    wrap_method(AsyncSaver, "copy_to_cpu", "copy")
    wrap_method(shards, "write_shards", "write")
    wrap_method(trainer, "train_step", "step")
    return events


def select_spans(events: Sequence[Event], kind: str) -> list[tuple[float, float]]:
    """Return begin and end of the events of one kind."""
    return [(begin, end) for event_kind, begin, end in events if event_kind == kind]


def count_overlapped_steps(events: Sequence[Event]) -> int:
    """Return the number of steps during which a file was written."""
    steps, writes = select_spans(events, "step"), select_spans(events, "write")
    return sum(any(begin < w_end and w_begin < end for w_begin, w_end in writes) for begin, end in steps)


def check_saves(timelines: Mapping[str, Sequence[Event]]) -> None:
    """Check that an asynchronous save stops the training for less time, and that a copy waits for the save before it.

    Raises:
        AssertionError: one of the two is wrong.
    """
    synchronous = timelines["synchronous"]
    assert count_overlapped_steps(synchronous) == 0 < count_overlapped_steps(timelines["asynchronous"])
    assert all(end - begin >= 0.12 for begin, end in select_spans(synchronous, "stop"))
    shortest = {name: min(e - b for b, e in select_spans(events, "stop")) for name, events in timelines.items()}
    assert shortest["asynchronous"] < shortest["synchronous"]
    for name in ("asynchronous", "asynchronous, slower disk"):
        copies = select_spans(timelines[name], "copy")[1:]
        for (_, write_end), (copy_begin, _) in zip(select_spans(timelines[name], "write"), copies, strict=False):
            assert copy_begin > write_end


def shorten_paths(text: str, folder: str) -> str:
    """Shorten absolute paths to their last two parts, and the temporary files of notebook cells to "this notebook"."""
    text = re.sub(r"[^\s\"(]*ipykernel_\d+/\d+\.py", "this notebook", text.replace(folder + "/", ""))
    return re.sub(r"/[^\"]*/([^/\"]+/[^/\"]+\.py)", r"\1", text)


def read_main_thread(run: Path, rank: int, folder: str) -> list[str]:
    """Return the stack of a rank's main thread, innermost frame first, without the wrappers of PyTorch."""
    text = shorten_paths((run / "stacks" / f"rank{rank}.txt").read_text(), folder)
    thread = next(part for part in text.split("hread 0x") if "phase3_fsdp/train.py" in part)
    frames = re.findall(r'File "(.*)", line (\d+) in (\w+)', thread)
    wrappers = ("wrapper", "decorate_context", "inner", "_fn", "_call_impl", "_wrapped_call_impl", "__call__")
    return [f"{file}:{line}, {name}" for file, line, name in frames if name not in wrappers]
