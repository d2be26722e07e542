"""Saves in another thread: what they write, on which GPU, and when the run waits for them."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nanoGPT.checkpoint import shards
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.manifest import HashedFile, step_directories
from nanoGPT.errors import DivergedRanks, NonFiniteLoss
from nanoGPT.job.start import start
from phase3_fsdp.sharded_checkpoint import AsyncSaver
from tests.helpers.checkpoints import make_directory
from tests.helpers.training import tiny
from workshop.ranks import run_on_ranks


def make_async_saver(directory: CheckpointDirectory, weight: float = 0.0) -> AsyncSaver:
    """Return a saver of a model with one weight."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return AsyncSaver(directory, model, torch.optim.AdamW(model.parameters()), directory.run)


def test_the_saving_thread_uses_the_gpu_of_its_rank(tmp_path, monkeypatch):
    """The saving thread selects its rank's GPU before it writes. A new thread would use GPU 0.

    The selected GPU is recorded and not set, because this also runs where there is no GPU.
    """
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append((threading.get_ident(), device)))
    monkeypatch.setattr(shards, "write_shards", lambda files, tensors: calls.append("write"))
    directory = make_directory(tmp_path)
    directory.run.device = torch.device("cuda", 3)
    saver = make_async_saver(directory)
    saver.begin_save(5, {})
    saver.wait_for_save()
    (thread, device), written = calls
    assert device == torch.device("cuda", 3) and thread != threading.get_ident() and written == "write"


def test_a_save_writes_the_weights_of_its_beginning(tmp_path, monkeypatch):
    """Weights that change during a save, or before the next save begins, are not in its files."""
    written, may_write = [], threading.Event()

    def record(files: object, tensors: dict[str, torch.Tensor]) -> None:
        may_write.wait()
        written.append(tensors["model.weight"].item())

    monkeypatch.setattr(shards, "write_shards", record)
    saver = make_async_saver(make_directory(tmp_path), weight=1.0)
    for step in (1, 2):
        saver.begin_save(step, {})
        torch.nn.init.constant_(saver.model.weight, step + 1.0)
        threading.Timer(0.05, may_write.set).start()
    saver.wait_for_save()
    assert written == [1.0, 2.0]


def fail_during_save(out: str, error: type[Exception]) -> list[str]:
    """Raise an error while a save is in progress. Return the checkpoints that exist when the run has ended."""
    close = HashedFile.close

    def close_slowly(file: HashedFile) -> None:
        time.sleep(0.3)
        close(file)

    HashedFile.close = close_slowly  # type: ignore[method-assign]
    try:
        with start(tiny("phase3_fsdp", Path(out))) as run:
            saver = make_async_saver(CheckpointDirectory(out, run, 3))
            saver.run = run
            run.observers.members.append(saver)
            saver.begin_save(2, {})
            raise error("step 3")
    except error:
        names = [path.name for path in step_directories(Path(out))]
        dist.barrier()
        return names


@pytest.mark.parametrize("error", [NonFiniteLoss, DivergedRanks])
def test_an_error_of_all_ranks_waits_for_the_previous_save(error, tmp_path):
    """If a loss is not finite or ranks have diverged, the run waits for a save in progress: its state is good."""
    names = run_on_ranks(fail_during_save, 2, str(tmp_path), error, show=False)
    assert names == [["step-00000002"], ["step-00000002"]]
