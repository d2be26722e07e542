"""What every part of a campaign is called with, and how it reports that it cannot run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What every part is called with.

    Attributes:
        folder: directory of the campaign.
        dry_run: run on the CPU, with tiny shapes.
        nanogpt: a checkout of nanoGPT, or None.
        commit: git commit of the code, for a machine without git; or None.
        log: the log of the part that runs; or None, if it has none.
    """

    folder: Path
    dry_run: bool
    nanogpt: str | None = None
    commit: str | None = None
    log: Path | None = None

    @property
    def device(self) -> Any:
        """The torch.device of all measurements."""
        import torch

        return torch.device("cpu") if self.dry_run else torch.device("cuda", 0)

    @property
    def tuned_table(self) -> Path:
        """The table of tile sizes that the tuning has written; it may not exist."""
        return self.folder / "configs.json"


class Skipped(Exception):
    """Raised by a part that cannot run on this machine. The message is the reason."""
