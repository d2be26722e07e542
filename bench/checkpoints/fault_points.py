"""A kill at every named point of a save, of either of two ranks, in the foreground and in the background.

`bench.checkpoints.torture` runs it and says what for.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanoGPT.checkpoint import directory as checkpoint
from nanoGPT.checkpoint import writer
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.state import allocate_state
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer
from phase3_fsdp.fsdp import FsdpConfig, init_device, init_shards, shard_model
from phase3_fsdp.sharded_checkpoint import ShardWriter, load_shards, training_state
from workshop.ranks import run_on_ranks, start_ranks

EVERY_RANK = ("before its files", "in a file", "after a file")
RANK_0 = (
    "before the manifest",
    "in the manifest",
    "before the rename",
    "after the rename",
    "before LATEST",
    "after LATEST",
    "in the retention",
)
RANKS = 2
CPU = torch.device("cpu")


class Saver:
    """One rank's part of a small sharded model, and the directory into which it is saved."""

    def __init__(self, out_dir: str, in_background: bool, keep: int = 3) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        run = Runtime(rank, rank, world_size, world_size, CPU, torch.float32)
        config = FsdpConfig(n_layer=2, n_embd=16, n_head=2, block_size=8, out_dir=out_dir, async_save=in_background)
        with init_device(config, run):
            self.model = GPT(GPTConfig(2, 2, 16, 8, False, 75))
        self.model = shard_model(self.model, config, run)
        init_shards(self.model, config, run)
        self.optimizer = configure_optimizer(self.model, config)
        allocate_state(self.optimizer)
        self.box, self.shards = CheckpointDirectory(out_dir, run, keep), ShardWriter(self.model, self.optimizer)
        self.copy = self.shards.copy if in_background else None

    @torch.no_grad()
    def save(self, step: int) -> None:
        for tensor in training_state(self.model, self.optimizer).values():
            tensor.fill_(step)
        self.box.save(step, self.shards.write, {"phase": "torture"}, self.copy)

    def open_newest(self) -> int:
        """The newest step that is whole.

        Raises:
            AssertionError: it holds a number of another step.
        """
        found = self.box.newest()
        load_shards(found.path, self.model, self.optimizer)
        for name, tensor in training_state(self.model, self.optimizer).items():
            assert bool((tensor == found.step).all()), f"{name} of {found.path} holds numbers of another step"
        return found.step


def open_and_save(out_dir: str) -> int:
    saver = Saver(out_dir, False)
    step = saver.open_newest()
    saver.save(9)
    saver.box.drain()
    return step


def end(started: list[tuple[Any, Any]]) -> None:
    for process, connection in started:
        process.kill()
        process.join()
        connection.close()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal comes before this ends


def before(function: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """The function, at whose call this process dies."""
    return lambda *args, **kwargs: die() if when(*args) else function(*args, **kwargs)


def after(function: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """The function, after whose call this process dies."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if when(*args):
            die()
        return result

    return run


def half_a_manifest(path: Path, text: str) -> None:
    if path.name == "manifest.json":
        path.write_text(text[: len(text) // 2])
        die()
    writer.write_and_sync(path, text)


def arm(point: str) -> None:
    """Make this process die at a point of its next save."""

    def publishes(path: Path, to: Path) -> bool:
        return to.name.startswith("step-")

    def is_manifest(path: Path, _: str) -> bool:
        return path.name == "manifest.json"

    files, path = writer.HashedFile, Path
    arms: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "before its files": (writer.NewFiles, "open", before(writer.NewFiles.open)),
        "in a file": (files, "write", after(files.write, lambda file, _: file.tell() > 2000)),
        "after a file": (files, "close", after(files.close)),
        "before the manifest": (checkpoint, "write_and_sync", before(writer.write_and_sync, is_manifest)),
        "in the manifest": (checkpoint, "write_and_sync", half_a_manifest),
        "before the rename": (path, "rename", before(path.rename, publishes)),
        "after the rename": (path, "rename", after(path.rename, publishes)),
        "before LATEST": (os, "replace", before(os.replace)),
        "after LATEST": (os, "replace", after(os.replace)),
        "in the retention": (shutil, "rmtree", before(shutil.rmtree, lambda gone: ".tmp-old-" in gone.name)),
    }
    where, name, deadly = arms[point]
    setattr(where, name, deadly)


def save_and_die(out_dir: str, point: str, victim: int, in_background: bool) -> None:
    saver = Saver(out_dir, in_background, keep=2)
    for step in (1, 2):
        saver.save(step)
    saver.box.drain()
    if dist.get_rank() == victim:
        arm(point)
    saver.save(3)
    saver.box.drain()
    time.sleep(60)  # until the death of the other ends this one too


def kill_at(point: str, victim: int, in_background: bool) -> int:
    """Kill a rank at a point of the save of step 3; the step that is then opened, 2 or 3.

    Raises:
        AssertionError: what is opened is not whole, or the next save leaves rubbish behind.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as meeting:
        started = start_ranks(save_and_die, RANKS, folder, point, victim, in_background, folder=meeting)
        deadline = time.monotonic() + 30
        while started[victim][0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert started[victim][0].exitcode == -signal.SIGKILL, f"rank {victim} was not killed {point}"
        end(started)
        step = max(run_on_ranks(open_and_save, RANKS, folder, show=False))
        rubbish = [p.name for p in (Path(folder) / "checkpoints").iterdir() if p.name.startswith(".tmp")]
        assert step in (2, 3) and not rubbish, (step, rubbish)
        return step


def sweep() -> list[dict[str, Any]]:
    """A kill at every point of a save, of rank 0 and of the other, in the foreground and in the background."""
    cases = [(point, rank) for rank in range(RANKS) for point in EVERY_RANK] + [(point, 0) for point in RANK_0]
    rows = []
    for point, rank in cases:
        opened = {mode: kill_at(point, rank, mode == "async") for mode in ("sync", "async")}
        rows.append({"point": point, "rank": rank, **opened})
        print(
            f"rank {rank} killed {point}: step {opened['sync']} opens, in the background {opened['async']}", flush=True
        )
    return rows
