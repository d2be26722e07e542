"""Find out whether a run can log in to Weights & Biases, before its ranks start."""

import netrc
import os
from urllib.parse import urlsplit

from nanoGPT.errors import ConfigError

WANDB_REMEDY = "run `.venv/bin/wandb login`, or set WANDB_API_KEY, or set WANDB_MODE=offline"


def has_credentials(track: str) -> bool:
    """Return whether a tracker, a value of --track, needs no credentials or has them.

    Weights & Biases takes them from an environment variable or from the file that `wandb login` writes.
    """
    if track != "wandb" or os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def check_credentials(track: str) -> None:
    """Check that a tracker, a value of --track, has credentials. Only the rank that logs the metrics needs them.

    Raises:
        ConfigError: they are missing.
    """
    if not has_credentials(track):
        raise ConfigError(f"--track={track} has no credentials: {WANDB_REMEDY}", on_one_rank=True)
