"""Kill one of two ranks at every named point of a save, synchronous and asynchronous, and load what is left.

`bench.checkpoints.torture` runs these kills and describes the test.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanoGPT.checkpoint import directory as checkpoint
from nanoGPT.checkpoint import manifest as writer
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.files import write_atomically
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import allocate_state, configure_optimizer
from operate.ranks import run_on_ranks, start_ranks
from phase3_fsdp.fsdp import FsdpConfig, init_shards, put_parameters_on_meta, shard_model
from phase3_fsdp.sharded_checkpoint import AsyncSaver, load_shards, save_shards, training_state

# The points at which any rank can be killed, then those that only rank 0 reaches.
POINTS_OF_EVERY_RANK = ("before it opens a file", "while it writes a file", "after it closes a file")
POINTS_OF_RANK_0 = (
    "before it writes the manifest",
    "while it writes the manifest",
    "before the final rename",
    "after the final rename",
    "before it replaces LATEST",
    "after it replaces LATEST",
    "while it deletes an old checkpoint",
)
RANKS = 2
CPU = torch.device("cpu")


class Saver:
    """One rank's shard of a small FSDP model, and the checkpoint directory into which it is saved."""

    def __init__(self, out_dir: str, is_async: bool, keep: int = 3) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        run = Runtime(rank, rank, world_size, world_size, CPU, torch.float32)
        config = FsdpConfig(n_layer=1, n_embd=16, n_head=2, block_size=8, out_dir=out_dir, async_save=is_async)
        with put_parameters_on_meta():
            self.model = GPT(GPTConfig(1, 2, 16, 8, False, 75))
        self.model = shard_model(self.model, config, run)
        init_shards(self.model, config, run)
        self.optimizer = configure_optimizer(self.model, config)
        allocate_state(self.optimizer)
        self.checkpoints = CheckpointDirectory(out_dir, run, keep)
        self.async_saver = AsyncSaver(self.checkpoints, self.model, self.optimizer, run) if is_async else None

    @torch.no_grad()
    def save(self, step: int) -> None:
        """Set every number of the training state to `step` and save it."""
        for tensor in training_state(self.model, self.optimizer).values():
            tensor.fill_(step)
        fields = {"phase": "fsdp"}
        if self.async_saver:
            self.async_saver.begin_save(step, fields)
        else:
            self.checkpoints.save(step, lambda files: save_shards(files, self.model, self.optimizer), fields)

    def wait_for_save(self) -> None:
        """Wait until the asynchronous save is complete."""
        if self.async_saver:
            self.async_saver.wait_for_save()

    def load_newest(self) -> int:
        """Load the newest complete checkpoint and return its step.

        Raises:
            AssertionError: the checkpoint contains a number of another step.
        """
        newest = self.checkpoints.find()
        load_shards(newest, self.model, self.optimizer)
        for name, tensor in training_state(self.model, self.optimizer).items():
            assert bool((tensor == newest.step).all()), f"{name} in {newest.path} contains numbers of another step"
        return newest.step


def load_and_save(out_dir: str) -> int:
    """Load the newest complete checkpoint, save a later step, and return the step that was loaded."""
    saver = Saver(out_dir, False)
    step = saver.load_newest()
    saver.save(step + 9)
    saver.wait_for_save()
    return step


def load_and_save_all(out_dirs: list[str]) -> list[int]:
    """Call `load_and_save` for each directory, one after another on the same ranks."""
    return [load_and_save(out_dir) for out_dir in out_dirs]


def kill_ranks(started: list[tuple[Any, Any]]) -> None:
    for process, connection in started:
        process.kill()
        process.join()
        connection.close()


def kill_self(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # do not return before the signal arrives


def kill_before(function: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """Wrap a function so that its call kills this process first, if `when` accepts the arguments."""
    return lambda *args, **kwargs: kill_self() if when(*args) else function(*args, **kwargs)


def kill_after(function: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    """Wrap a function so that this process is killed after its call, if `when` accepts the arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if when(*args):
            kill_self()
        return result

    return run


def write_half_of_manifest(path: Path, content: bytes) -> None:
    """Write the first half of the manifest, then kill this process; write every other file normally."""
    if path.name == "manifest.json":
        path.write_bytes(content[: len(content) // 2])
        kill_self()
    write_atomically(path, content)


def arm_kill(point: str) -> None:
    """Patch the checkpoint code so that this process is killed at a point of its next save."""

    def is_final_rename(path: Path, to: Path) -> bool:
        return to.name.startswith("step-")

    def is_manifest(path: Path, _: bytes) -> bool:
        return path.name == "manifest.json"

    def is_latest(_: Path, to: Path) -> bool:
        return to.name == "LATEST"

    files, path = writer.HashedFile, Path
    patches: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "before it opens a file": (writer.NewFiles, "open", kill_before(writer.NewFiles.open)),
        "while it writes a file": (files, "write", kill_after(files.write, lambda file, _: file.tell() > 2000)),
        "after it closes a file": (files, "close", kill_after(files.close)),
        "before it writes the manifest": (
            checkpoint,
            "write_atomically",
            kill_before(write_atomically, is_manifest),
        ),
        "while it writes the manifest": (checkpoint, "write_atomically", write_half_of_manifest),
        "before the final rename": (path, "rename", kill_before(path.rename, is_final_rename)),
        "after the final rename": (path, "rename", kill_after(path.rename, is_final_rename)),
        "before it replaces LATEST": (os, "replace", kill_before(os.replace, is_latest)),
        "after it replaces LATEST": (os, "replace", kill_after(os.replace, is_latest)),
        "while it deletes an old checkpoint": (
            shutil,
            "rmtree",
            kill_before(shutil.rmtree, lambda folder: ".tmp-old-" in folder.name),
        ),
    }
    owner, name, replacement = patches[point]
    setattr(owner, name, replacement)


def save_two_steps(out_dir: str, is_async: bool) -> Saver:
    """Save steps 1 and 2 on this rank."""
    saver = Saver(out_dir, is_async, keep=2)
    for step in (1, 2):
        saver.save(step)
    saver.wait_for_save()
    return saver


def save_two_steps_of_each_kind(parent: str) -> None:
    """Save steps 1 and 2 synchronously into PARENT/sync, and asynchronously into PARENT/async."""
    for mode in ("sync", "async"):
        save_two_steps(f"{parent}/{mode}", mode == "async")


def save_and_die(out_dir: str, point: str, victim: int, is_async: bool) -> None:
    """Save steps 1 and 2 on this rank, then save step 3, which kills rank `victim` at a point.

    A directory that contains steps 1 and 2 already, from `save_two_steps`, keeps them.
    """
    has_steps = (Path(out_dir) / "checkpoints" / "LATEST").exists()  # no rank saves it before every rank has looked
    saver = Saver(out_dir, is_async, keep=2) if has_steps else save_two_steps(out_dir, is_async)
    if dist.get_rank() == victim:
        arm_kill(point)
    saver.save(3)
    saver.wait_for_save()
    time.sleep(60)  # the caller kills this rank after the victim


def kill_save(folder: str, point: str, victim: int, is_async: bool) -> None:
    """Save step 3 of a run that has steps 1 and 2, and kill rank `victim` at a point of that save.

    The other rank is killed after it, as the launcher does.

    Raises:
        AssertionError: the rank did not reach the point.
    """
    with tempfile.TemporaryDirectory() as rendezvous:
        started = start_ranks(save_and_die, RANKS, folder, point, victim, is_async, folder=rendezvous)
        deadline = time.monotonic() + 120
        while started[victim][0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert started[victim][0].exitcode == -signal.SIGKILL, f"rank {victim} was not killed {point}"
        kill_ranks(started)


def load_all(folders: list[str]) -> list[int]:
    """Load the newest checkpoint of each directory on two new ranks, and save a later step.

    Returns:
        The step that was loaded from each directory: 2 or 3.

    Raises:
        AssertionError: a checkpoint is not complete, or the next save leaves temporary files behind.
    """
    results = run_on_ranks(load_and_save_all, RANKS, folders, show=False)
    steps = [max(loaded) for loaded in zip(*results, strict=True)]
    for folder, step in zip(folders, steps, strict=True):
        leftovers = [p.name for p in (Path(folder) / "checkpoints").iterdir() if p.name.startswith(".tmp")]
        assert step in (2, 3) and not leftovers, (folder, step, leftovers)
    return steps


def kill_at_every_point(modes: Sequence[str] = ("sync", "async")) -> list[dict[str, Any]]:
    """Kill each rank at every point of a save that it reaches, synchronous and asynchronous, and load what is left.

    Args:
        modes: the kinds of saves.

    Returns:
        One row per point and rank, with the step that was loaded after the kill of each kind of save.
    """
    cases = [(point, rank) for rank in range(RANKS) for point in POINTS_OF_EVERY_RANK]
    cases += [(point, 0) for point in POINTS_OF_RANK_0]
    with tempfile.TemporaryDirectory() as parent:
        for mode in ("sync", "async"):
            os.mkdir(f"{parent}/{mode}")
        run_on_ranks(save_two_steps_of_each_kind, RANKS, parent, show=False)
        folders = []
        for point, rank in cases:
            for mode in modes:
                folders.append(f"{parent}/{point} {rank} {mode}")
                shutil.copytree(f"{parent}/{mode}", folders[-1])
                kill_save(folders[-1], point, rank, mode == "async")
        steps = load_all(folders)
    rows, loaded = [], iter(steps)
    for point, rank in cases:
        step_of_mode = {mode: next(loaded) for mode in modes}
        rows.append({"point": point, "rank": rank, **step_of_mode})
        text = ", ".join(f"step {step} loads after the {mode} save" for mode, step in step_of_mode.items())
        print(f"rank {rank} killed {point}: {text}", flush=True)
    return rows
