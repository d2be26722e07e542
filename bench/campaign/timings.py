"""Stages that time kernels and find tile sizes for them."""

import contextlib
import math
import time
from typing import Any

import torch

from bench.campaign.checks import check_kernel
from bench.campaign.settings import Settings
from bench.campaign.tiles import name_tiles, record_tile_rows, use_tuned_table
from bench.kernels.cases import GPT2_WIDTHS, build_cases
from bench.kernels.kernels import Stopwatch, measure, measure_limits
from bench.kernels.tune import TIMED, climb, format_table, row_size
from nanoGPT.files import write_atomically
from phase2_triton.kernels import core

ROUNDS = 30
WITH_OUR_KERNELS = ("ours", "ours, deterministic", "product, bias_gelu")  # the contenders that run them


def time_kernel(settings: Settings, kernel: str, is_tuned: bool) -> dict[str, Any]:
    """Return the rows of `bench.kernels` for a kernel, and the limits of the device.

    Args:
        is_tuned: use the tuned rows, and check the kernel's results with them first.
    """
    device = settings.device
    torch.manual_seed(0)
    watch, rows = Stopwatch(device), []
    with use_tuned_table(settings) if is_tuned else contextlib.nullcontext():
        with record_tile_rows() as tile_rows:
            problems = check_kernel(settings, kernel)["problems"] if is_tuned else []
        for case in build_cases(device, {kernel}, list(GPT2_WIDTHS)):
            rows += measure(case, watch, 1 if settings.dry_run else ROUNDS)
            del case
            if not settings.dry_run:
                torch.cuda.empty_cache()
        for row in rows:
            row["tiles"] = name_tiles() if row["contender"] in WITH_OUR_KERNELS else None
    limits = measure_limits(watch, device)
    return {"limits": limits, "rows": rows, "tile_rows": tile_rows, "problems": problems}


def tune_key(settings: Settings, key: str, seconds: float) -> dict[str, Any]:
    """Tune one key of configs.json at every width, within the time. Write the table of this campaign after each width.

    Args:
        seconds: time for all widths together; a width that is reached late keeps its row, except the first one.
    """
    device, rows, problems = settings.device, [], []
    watch, deadline = Stopwatch(device), time.monotonic() + (1 if settings.dry_run else seconds)
    tuned: set[int] = set()
    with use_tuned_table(settings):
        for case in build_cases(device, {TIMED[key][0]}, list(GPT2_WIDTHS)):
            size = row_size(key, case)
            if size in tuned or (tuned and time.monotonic() > deadline):
                continue
            tuned.add(size)
            try:
                row, best_ms, start_ms = climb(key, case, watch, 1 if settings.dry_run else 10, deadline)
            finally:
                write_atomically(settings.tuned_table, format_table(core.load_config_table()).encode())
            if math.isfinite(best_ms):
                rows.append({"shape": case.shape, "row": row, "ms": best_ms, "ms_before": start_ms})
            else:
                problems.append(f"{case.shape}: no row runs")
    return {"key": key, "rows": rows, "problems": problems}
