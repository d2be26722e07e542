"""Fixtures that the tests of the benchmarks share."""

from pathlib import Path

import pytest

from bench.campaign.folder import CampaignFolder


@pytest.fixture
def folder(tmp_path: Path) -> CampaignFolder:
    """Return the directory of a new campaign that is a dry run."""
    folder = CampaignFolder(tmp_path / "campaign")
    folder.create({"dry_run": True})
    return folder
