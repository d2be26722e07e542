"""Test whether sharded checkpoints survive kills and detect flipped bits. This test trains nothing, it only saves.

    make torture                          # every point of a save, then 500 kills at random moments, 200 flipped bits
    make torture ARGS="--kills=20"        # only 20 kills at random moments
    make torture ARGS=--write             # also write bench/results/torture-<hardware>.json

Two ranks save a small model, sharded by FSDP, again and again. Before each save, they set every number of the model to
the number of the step. A kill is a SIGKILL of one rank, at a named point of a save or at a random moment. The other
rank is killed after it, as the launcher does. Then two new ranks load the newest complete checkpoint, and every number
in it must equal its step.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.checkpoints.fault_points import CPU, RANKS, Saver, kill_at_every_point, kill_ranks, load_and_save
from bench.tables.records import write_result
from nanoGPT.checkpoint.manifest import DamagedCheckpoint, read_manifest, step_directories, verify_files
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from workshop.ranks import collect, run_on_ranks, start_ranks

# ---- kills at random moments


def save_forever(out_dir: str, is_async: bool) -> None:
    """Load the newest complete checkpoint, print its step, and save the following steps until this rank is killed."""
    saver = Saver(out_dir, is_async)
    step = saver.load_newest() if step_directories(Path(out_dir)) else 0
    print(f"loaded {step}")
    while True:
        step += 1
        saver.save(step)


def kill_at_random_moments(kills: int, seed: int) -> dict[str, Any]:
    """Kill the ranks again and again, each time after at least one more save.

    Returns:
        The number of kills, the number of times that each kind of unfinished save was left, and the last step.

    Raises:
        AssertionError: a saved step was lost, or a checkpoint was loaded that was not complete.
    """
    generator = random.Random(seed)
    left: Counter[str] = Counter()
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
            left[describe_unfinished_save(folder)] += 1
        last = find_newest_step(folder)
        loaded = max(run_on_ranks(load_and_save, RANKS, folder, show=False))
        assert loaded == last, f"step {last} was saved last, but step {loaded} was loaded"
    return {"kills": kills, "left": dict(left), "last_step": last}


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


def describe_unfinished_save(folder: str) -> str:
    """Return which part of the save in progress a kill has left. Result files use these texts as keys."""
    unfinished = list((Path(folder) / "checkpoints").glob(".tmp-step-*"))
    if not unfinished:
        return "nothing: between two saves"
    names = [p.name for p in unfinished[0].iterdir()]
    if "manifest.json" in names:
        return "all but the rename"
    return "files without a manifest" if names else "an empty directory"


# ---- flipped bits


def save_once(out_dir: str) -> None:
    Saver(out_dir, False).save(1)


def count_detected_flips(count: int, seed: int) -> int:
    """Flip one random bit in a checkpoint of two ranks, `count` times, and return how often verification detects it."""
    generator, detected = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(save_once, RANKS, folder, show=False)
        path = step_directories(Path(folder))[0]
        places = [(file, i) for file in sorted(path.iterdir()) for i in range(file.stat().st_size)]
        for file, position in generator.sample(places, count):
            original = file.read_bytes()
            damaged = bytearray(original)
            damaged[position] ^= 1 << generator.randrange(8)
            file.write_bytes(damaged)
            try:
                verify_files(path, read_manifest(path))
            except DamagedCheckpoint:
                detected += 1
            file.write_bytes(original)
    return detected


def main(kills: int = 500, flipped: int = 200, seed: int = 1, write: bool = False) -> None:
    """Kill saves and flip bits in checkpoints, and check that no saved step is lost and every flipped bit is detected.

    Args:
        kills: number of kills at random moments.
        flipped: number of flipped bits.
        seed: seed of the random moments and bits.
        write: also write bench/results/torture-<hardware>.json.
    """
    rows = kill_at_every_point()
    random_kills = kill_at_random_moments(kills, seed)
    print(f"{kills} kills at random moments: every saved step loaded; left of the save: {random_kills['left']}")
    detected = count_detected_flips(flipped, seed)
    print(f"{flipped} flipped bits, {detected} detected")
    if write:
        settings = {
            "command": f"make torture ARGS='--kills={kills} --flipped={flipped} --write'",
            "ranks": RANKS,
            "seed": seed,
        }
        samples = {"sweep": rows, "random": random_kills, "flips": {"flipped": flipped, "refused": detected}}
        print(f"wrote {write_result('torture', CPU, settings, samples)}")
    if detected < flipped:
        raise SystemExit(f"{flipped - detected} of {flipped} flipped bits were not detected")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
