"""After a kill at any point of a sharded save, only complete checkpoints open (`make bench NAME=torture`)."""

from pathlib import Path

import pytest
import torch.distributed as dist

from bench.checkpoints.fault_points import POINTS_OF_EVERY_RANK, POINTS_OF_RANK_0, Saver, kill_at_every_point
from bench.checkpoints.torture import kill_at_random_moments
from nanoGPT.checkpoint.manifest import HashedFile
from nanoGPT.errors import SaveError
from tests.helpers.marks import mark_slow
from workshop.ranks import run_on_ranks

POINTS_AFTER_RENAME = {
    "after the final rename",
    "before it replaces LATEST",
    "after it replaces LATEST",
    "while it deletes an old checkpoint",
}


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["async", *mark_slow("sync")])
def test_a_checkpoint_opens_after_a_kill_at_every_point(mode):
    """After a kill of either rank, in either kind of save, the newest complete checkpoint opens, and the next save
    succeeds.

    Before the final rename, this is the checkpoint of the previous step; after it, the checkpoint of this step.
    """
    rows = kill_at_every_point([mode])
    assert [row["rank"] for row in rows if row["point"] in POINTS_OF_EVERY_RANK] == [0] * 3 + [1] * 3
    assert len(rows) == 6 + len(POINTS_OF_RANK_0) and set(POINTS_OF_RANK_0) > POINTS_AFTER_RENAME
    for row in rows:
        expected = 3 if row["point"] in POINTS_AFTER_RENAME else 2
        assert row[mode] == expected, row


@pytest.mark.slow
def test_every_checkpoint_opens_after_random_kills():
    """After each kill, every checkpoint opens and contains the values of its step."""
    assert kill_at_random_moments(60, seed=3) >= 60


def fail_in_the_background(out_dir: str) -> tuple[str, int]:
    """Fill the disk of rank 1 during an asynchronous save. Return the error of the next save and the newest step."""
    saver = Saver(out_dir, is_async=True)
    saver.save(1)
    saver.wait_for_save()
    write = HashedFile.write

    def write_to_full_disk(file: HashedFile, data: object) -> int:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(file, data)

    HashedFile.write = write_to_full_disk  # type: ignore[method-assign]
    saver.save(2)  # returns, because the error happens later, in the background
    assert saver.async_saver and saver.async_saver.pending_save and saver.async_saver.pending_save.exception()
    assert saver.async_saver.run.wants_save
    try:
        saver.save(3)
    except SaveError as error:
        return str(error), saver.load_newest()
    return "no error was raised", 0


def test_a_failure_in_the_background_is_raised_by_the_next_save(tmp_path):
    """If a save fails in the background, the next save raises the error on every rank.

    The failed save leaves no files, and requests the next save.
    """
    for message, newest in run_on_ranks(fail_in_the_background, 2, str(tmp_path), show=False):
        assert "step-00000002 was not saved: rank 1" in message and "No space left on device" in message
        assert newest == 1
    assert sorted(p.name for p in (Path(tmp_path) / "checkpoints").iterdir()) == ["LATEST", "step-00000001"]
