"""Access to the files of this repository."""

import subprocess
from pathlib import Path

from tests.helpers.training import ROOT


def list_files(pattern: str) -> list[Path]:
    """Return the files that match a pattern: tracked and new files, without ignored files and links."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", pattern], cwd=ROOT, capture_output=True)
    files = [ROOT / name for name in names.stdout.decode().split()]
    return [path for path in files if path.is_file() and not path.is_symlink()]
