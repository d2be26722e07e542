"""Kills and flipped bits: what a sharded checkpoint survives, and what is refused. No training, only saves.

    make torture                          # every point of a save, then 500 kills at random moments, 200 flipped bits
    make torture ARGS="--kills=20"        # fewer
    make torture ARGS=--write             # and bench/results/torture-<hardware>.json

Two ranks hold a small model sharded by FSDP, whose every number says which step it is of, and save it step after step.
A kill is a SIGKILL of one rank, at a named point of a save or at a random moment; the other is killed after it, as the
launcher does. Then two new ranks open the newest checkpoint that is whole, and every number must be of its step.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.checkpoints.fault_points import CPU, RANKS, Saver, end, open_and_save, sweep
from bench.tables.records import write_result
from nanoGPT.checkpoint.manifest import Damaged, read_manifest, step_directories, verify_files
from nanoGPT.cli.command_line import command_line
from workshop.ranks import collect, run_on_ranks, start_ranks

# ---- kills at random moments


def save_for_ever(out_dir: str, in_background: bool) -> None:
    saver = Saver(out_dir, in_background)
    step = saver.open_newest() if step_directories(Path(out_dir)) else 0
    print(f"opened {step}")
    while True:
        step += 1
        saver.save(step)


def random_kills(kills: int, seed: int) -> dict[str, Any]:
    """Kill again and again, each time after at least one more save.

    Returns:
        How many kills there were, what they left of the save in progress, and the last step.

    Raises:
        AssertionError: a saved step was lost, or something opened that was not whole.
    """
    draw = random.Random(seed)
    left: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "checkpoints").mkdir()
        for kill in range(kills):
            before_it = newest_step(folder)
            with tempfile.TemporaryDirectory() as meeting:
                started = start_ranks(save_for_ever, RANKS, folder, kill % 2 == 1, folder=meeting)
                await_step(folder, before_it + 1, started)
                time.sleep(draw.uniform(0, 0.1))
                started[draw.randrange(RANKS)][0].kill()
                time.sleep(draw.choice([0, 0.02]))
                end(started)
            left[what_is_left(folder)] += 1
        last = newest_step(folder)
        opened = max(run_on_ranks(open_and_save, RANKS, folder, show=False))
        assert opened == last, f"step {last} was saved, and {opened} opened"
    return {"kills": kills, "left": dict(left), "last_step": last}


def newest_step(folder: str) -> int:
    return max((int(p.name.removeprefix("step-")) for p in step_directories(Path(folder))), default=0)


def await_step(folder: str, step: int, started: list[tuple[Any, Any]]) -> None:
    """Wait until the ranks have opened what there was, and saved a step."""
    deadline = time.monotonic() + 60
    while newest_step(folder) < step:
        if not all(process.is_alive() for process, _ in started) or time.monotonic() > deadline:
            collect(started, 5, show=True)  # raises with what a rank said
            raise AssertionError(f"step {step} was not saved")
        time.sleep(0.005)
    said = started[0][1].recv()
    assert said == ("line", f"opened {step - 1}"), f"{said} where step {step - 1} was the newest"


def what_is_left(folder: str) -> str:
    """What a kill has left of the save in progress."""
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


def flips(count: int, seed: int) -> int:
    """Flip one bit of one byte, somewhere in a checkpoint of two ranks, again and again; how many were refused."""
    draw, refused = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(save_once, RANKS, folder, show=False)
        path = step_directories(Path(folder))[0]
        places = [(file, i) for file in sorted(path.iterdir()) for i in range(file.stat().st_size)]
        for file, position in draw.sample(places, count):
            whole = file.read_bytes()
            damaged = bytearray(whole)
            damaged[position] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            try:
                verify_files(path, read_manifest(path))
            except Damaged:
                refused += 1
            file.write_bytes(whole)
    return refused


def main(kills: int = 500, flipped: int = 200, seed: int = 1, write: bool = False) -> None:
    """Torture the checkpoints.

    Args:
        kills: at random moments.
        flipped: bits.
        seed: of the moments and places.
        write: also write bench/results/torture-<hardware>.json.
    """
    rows = sweep()
    killed = random_kills(kills, seed)
    print(f"{kills} kills at random moments, {kills} times all that was saved opened; they left {killed['left']}")
    refused = flips(flipped, seed)
    print(f"{flipped} flipped bits, {refused} refused")
    if write:
        settings = {"command": f"make torture ARGS='--kills={kills} --flipped={flipped}'", "ranks": RANKS, "seed": seed}
        samples = {"sweep": rows, "random": killed, "flips": {"flipped": flipped, "refused": refused}}
        print(f"wrote {write_result('torture', CPU, settings, samples)}")
    if refused < flipped:
        raise SystemExit(f"{flipped - refused} flipped bits were not refused")


if __name__ == "__main__":
    command_line(main, sys.argv[1:])
