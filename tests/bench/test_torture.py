"""A sharded save that is killed, at any point: what was there before opens, and nothing else does. (`make torture`)"""

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from bench.checkpoints.fault_points import EVERY_RANK, RANK_0, Saver, kill_at
from bench.checkpoints.torture import flips, random_kills
from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.checkpoint.writer import HashedFile
from nanoGPT.errors import SaveError
from workshop.ranks import run_on_ranks

CASES = [(point, rank) for rank in (0, 1) for point in EVERY_RANK] + [(point, 0) for point in RANK_0]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("point", "rank"), CASES)
@pytest.mark.heavy
def test_a_kill_at_every_point_of_a_save(point, rank, mode):
    """Killed before the directory has its name, the step before opens; after that, this one; and saving goes on."""
    published = ("after the rename", "before LATEST", "after LATEST", "in the retention")
    assert kill_at(point, rank, mode == "async") == (3 if point in published else 2)


def test_twenty_kills_at_random_moments():
    """After each of 20 kills everything that was saved opens, and every number is of its step."""
    found = random_kills(20, seed=3)
    assert found["kills"] == 20 and found["last_step"] >= 20


def test_twenty_flipped_bits():
    """Each of 20 flipped bits, anywhere in a sharded checkpoint, is found."""
    assert flips(20, seed=3) == 20


def keeps_what_it_was(out_dir: str) -> int:
    saver = Saver(out_dir, in_background=True)
    slowly(0.2)
    for step in (1, 2, 3):
        saver.save(step)  # the next step's numbers are there while this one's are still being written
    saver.box.drain()
    return saver.open_newest()


def slowly(seconds: float) -> None:
    """Let each file take so long to write."""
    write = HashedFile.write

    def slow(file: HashedFile, data: object) -> int:
        time.sleep(seconds if file.tell() == 0 else 0)
        return write(file, data)

    HashedFile.write = slow  # type: ignore[method-assign]


def test_a_save_in_the_background_keeps_what_was(tmp_path):
    """What is saved in the background is the state at the call, whatever training has made of it since; a save that
    comes before the last has ended waits for it."""
    assert run_on_ranks(keeps_what_it_was, 2, str(tmp_path), show=False) == [3, 3]
    assert [p.name for p in step_directories(tmp_path)] == [f"step-{step:08d}" for step in (3, 2, 1)]


def fails_in_the_background(out_dir: str) -> tuple[str, int]:
    saver = Saver(out_dir, in_background=True)
    saver.save(1)
    saver.box.drain()
    write = HashedFile.write

    def full(file: HashedFile, data: object) -> int:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(file, data)

    HashedFile.write = full  # type: ignore[method-assign]
    saver.save(2)  # returns: nothing is known yet
    try:
        saver.save(3)
    except SaveError as error:
        return str(error), saver.open_newest()
    return "nothing was said", 0


def test_a_failure_in_the_background_is_raised_by_the_next_save(tmp_path):
    """Of a full disk in the background every rank hears at its next save; nothing of the failed one is left."""
    for said, opened in run_on_ranks(fails_in_the_background, 2, str(tmp_path), show=False):
        assert "step-00000002 was not saved: rank 1" in said and "is full" in said
        assert opened == 1
    assert sorted(p.name for p in (Path(tmp_path) / "checkpoints").iterdir()) == ["LATEST", "step-00000001"]
