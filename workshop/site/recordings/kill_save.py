"""Record which files exist after a kill at each moment of a save, and which checkpoint opens then.

Two real processes save steps 1, 2 and 3 of a small FSDP model. One of them receives SIGKILL at a point of the save of
step 3 (`bench/checkpoints/fault_points.py`). Then two new processes load the newest complete checkpoint.
"""

import tempfile
from pathlib import Path
from typing import Any

from bench.checkpoints.fault_points import (
    POINTS_OF_EVERY_RANK,
    POINTS_OF_RANK_0,
    RANKS,
    kill_save,
    load_and_save,
)
from workshop.ranks import run_on_ranks

MODES = ("synchronous", "asynchronous")
# The points in the order of the save. Both ranks write files; everything else is done by rank 0.
POINTS = {0: (*POINTS_OF_EVERY_RANK, *POINTS_OF_RANK_0), 1: POINTS_OF_EVERY_RANK}


def list_files(folder: Path) -> list[list[Any]]:
    """Return the name and the size in bytes of each file below a directory. An empty directory has the size None."""
    entries: list[list[Any]] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            entries.append([str(path.relative_to(folder)), path.stat().st_size])
        elif not any(path.iterdir()):
            entries.append([f"{path.relative_to(folder)}/", None])
    return entries


def record_kill(point: str, victim: int, mode: str) -> dict[str, Any]:
    """Kill a rank at a point of a save, and load what is left.

    Returns:
        point, rank, mode, files: left by the kill; step: of the checkpoint that was loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        kill_save(folder, point, victim, mode == "asynchronous")
        files = list_files(Path(folder) / "checkpoints")
        step = max(run_on_ranks(load_and_save, RANKS, folder, show=False))
    return {"point": point, "rank": victim, "mode": mode, "files": files, "step": step}


def record() -> dict[str, Any]:
    """Return the recording: one kill for each point, each rank that reaches it, and each kind of save."""
    kills = [
        record_kill(point, victim, mode) for mode in MODES for victim, points in POINTS.items() for point in points
    ]
    return {"ranks": RANKS, "modes": list(MODES), "kills": kills}
