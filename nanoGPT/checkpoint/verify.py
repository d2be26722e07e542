"""Verify the size and the hash of every file in every checkpoint of a run.

    .venv/bin/python -m nanoGPT.checkpoint.verify --out_dir=out/my-run

Nothing is repaired. A damaged checkpoint is reported, and a resume skips it.
"""

import sys
from pathlib import Path

from nanoGPT.checkpoint.manifest import DamagedCheckpoint, read_manifest, step_directories, verify_files
from nanoGPT.errors import ConfigError
from nanoGPT.files import is_present
from nanoGPT.job.command import command_line, report_errors


def main(out_dir: str) -> None:
    """Verify the size and the hash of every file in every checkpoint of a run.

    Args:
        out_dir: the run's directory; the run may be training.
    """
    checkpoints = step_directories(Path(out_dir))
    if not checkpoints:
        raise ConfigError(f"there is no checkpoint under {out_dir}: use the --out_dir of a run")
    damaged = 0
    for path in checkpoints:
        try:
            manifest = read_manifest(path)
            verify_files(path, manifest)
            size = sum(file["size"] for file in manifest["files"])
            print(
                f"{path.name}: complete, {len(manifest['files'])} file(s), {size:,} bytes, {manifest.get('phase', '')}"
            )
        except DamagedCheckpoint as reason:
            if not is_present(path):
                print(f"{path.name}: deleted while it was read, because the run keeps only its newest checkpoints")
                continue
            damaged += 1
            print(f"{path.name}: damaged, {reason}")
    if damaged:
        raise ConfigError(
            f"{damaged} of {len(checkpoints)} checkpoints are damaged: a resume uses the newest complete one"
        )


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
