"""The tile sizes of a measurement: those in the repository, or those that this campaign has tuned.

A row of our kernels contains `tiles`: "committed" or "tuned".
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from bench.campaign.folder import CampaignFolder, Part
from bench.campaign.scheduler import find_problems
from bench.campaign.settings import Settings
from phase2_triton.apply import parse_kernels
from phase2_triton.kernels import core

COMMITTED_TABLE = core.CONFIG_FILE
MEASURED_AS = {"layernorm": ("layernorm", "add_layernorm")}  # kernels of --kernels that several parts measure


@contextlib.contextmanager
def use_tuned_table(settings: Settings) -> Iterator[None]:
    """Let the kernels use the rows that this campaign has tuned, if there are any.

    torch.compile stores generated code with its tile sizes on disk, so the key of this cache contains the table.
    """
    path = settings.tuned_table if settings.tuned_table.exists() else COMMITTED_TABLE
    tag = torch.compiler.config.cache_key_tag + hashlib.sha256(path.read_bytes()).hexdigest()
    with (
        mock.patch.object(core, "CONFIG_FILE", path),
        mock.patch.object(torch.compiler.config, "cache_key_tag", tag),
    ):
        core.load_config_table.cache_clear()
        try:
            yield
        finally:
            core.load_config_table.cache_clear()


def name_tiles() -> str:
    """Return which tile sizes the kernels of this process use."""
    return "committed" if core.CONFIG_FILE == COMMITTED_TABLE else "tuned"


@contextlib.contextmanager
def record_tile_rows() -> Iterator[dict[str, list[dict[str, int]]]]:
    """Record the rows of the table that the kernels use: key of configs.json -> all rows for this device."""
    tile_rows, find_rows = {}, core.find_rows

    def find_and_record(key: str) -> list[dict[str, int]]:
        tile_rows[key] = find_rows(key)
        return tile_rows[key]

    with mock.patch.object(core, "find_rows", find_and_record):
        yield tile_rows


def read_tuned_table(folder: CampaignFolder) -> dict[str, Any]:
    """Return the table that a campaign has tuned; it is empty before the tuning."""
    path = folder.path / "configs.json"
    return json.loads(path.read_text()) if path.exists() else {}


def is_correct_with_tuned_table(record: dict[str, Any], table: dict[str, Any]) -> bool:
    """Return whether a part of `tuned_times` has found a kernel correct with the rows that the table contains now."""
    if record["state"] != "done" or find_problems(record):
        return False
    return all(rows in table.get(key, {}).values() for key, rows in record["result"]["tile_rows"].items())


def find_correct_kernels(folder: CampaignFolder, kernels: tuple[str, ...]) -> list[str]:
    """Return the kernels that the campaign has found correct with its tuned tile sizes."""
    table = read_tuned_table(folder)
    records = {kernel: folder.read(Part("tuned_times", kernel, "")) for kernel in kernels}
    return [kernel for kernel, record in records.items() if is_correct_with_tuned_table(record, table)]


def choose_tiles(settings: Settings, kernels: str) -> str | None:
    """Return the tile sizes that a trainer must use: the tuned ones only if all its kernels are correct with them.

    Args:
        kernels: a value of `--kernels`.

    Returns:
        "committed" or "tuned"; None for a trainer without kernels.
    """
    names = parse_kernels("all" if kernels in ("auto", "triton") else kernels)  # both select some of all
    measured = tuple(part for name in sorted(names) for part in MEASURED_AS.get(name, (name,)))
    if not measured:
        return None
    is_tuned = find_correct_kernels(CampaignFolder(settings.folder), measured) == list(measured)
    return "tuned" if is_tuned else "committed"
