"""Test whether sharded checkpoints survive kills. This test trains nothing, it only saves.

    make bench NAME=torture                          # every point of a save, then 500 kills at random moments
    make bench NAME=torture ARGS="--kills=20"        # only 20 kills at random moments

Two ranks save a small model, sharded by FSDP, again and again. Before each save, they set every number of the model to
the number of the step. A kill is a SIGKILL of one rank, at a named point of a save or at a random moment. The other
rank is killed after it, as the launcher does. Then two new ranks load the newest complete checkpoint, and every number
in it must equal its step.
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.checkpoints.fault_points import RANKS, Saver, kill_at_every_point, kill_ranks, load_and_save
from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.job.command import command_line, report_errors
from operate.ranks import collect, run_on_ranks, start_ranks


def save_forever(out_dir: str, is_async: bool) -> None:
    """Load the newest complete checkpoint, print its step, and save the following steps until this rank is killed."""
    saver = Saver(out_dir, is_async)
    step = saver.load_newest() if step_directories(Path(out_dir)) else 0
    print(f"loaded {step}")
    while True:
        step += 1
        saver.save(step)


def kill_at_random_moments(kills: int, seed: int) -> int:
    """Kill the ranks again and again, each time after at least one more save. Return the last step.

    Raises:
        AssertionError: a saved step was lost, or a checkpoint was loaded that was not complete.
    """
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "checkpoints").mkdir()
        for kill in range(kills):
            previous_step = find_newest_step(folder)
            with tempfile.TemporaryDirectory() as rendezvous:
                started = start_ranks(save_forever, RANKS, folder, kill % 2 == 1, folder=rendezvous)
                await_step(folder, previous_step + 1, started)
                time.sleep(generator.uniform(0, 0.1))
                started[generator.randrange(RANKS)][0].kill()
                time.sleep(generator.choice([0, 0.02]))
                kill_ranks(started)
        last = find_newest_step(folder)
        loaded = max(run_on_ranks(load_and_save, RANKS, folder, show=False))
        assert loaded == last, f"step {last} was saved last, but step {loaded} was loaded"
    return last


def find_newest_step(folder: str) -> int:
    """Return the newest step that has a checkpoint directory, or 0."""
    return max((int(p.name.removeprefix("step-")) for p in step_directories(Path(folder))), default=0)


def await_step(folder: str, step: int, started: list[tuple[Any, Any]]) -> None:
    """Wait until the ranks have loaded the checkpoint before `step` and saved `step`."""
    deadline = time.monotonic() + 60
    while find_newest_step(folder) < step:
        if not all(process.is_alive() for process, _ in started) or time.monotonic() > deadline:
            collect(started, 5, show=True)  # raises if a rank failed
            raise AssertionError(f"step {step} was not saved within 60 s")
        time.sleep(0.005)
    message = started[0][1].recv()
    assert message == ("line", f"loaded {step - 1}"), f"rank 0 sent {message}, but step {step - 1} was the newest"


def main(kills: int = 500, seed: int = 1) -> None:
    """Kill saves, and check that no saved step is lost.

    Args:
        kills: number of kills at random moments.
        seed: seed of the random moments.
    """
    kill_at_every_point()
    last_step = kill_at_random_moments(kills, seed)
    print(f"{kills} kills at random moments: every saved step loaded, {last_step} in total")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
