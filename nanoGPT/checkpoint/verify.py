"""Read every checkpoint of a run to the last byte, and report whether each one holds.

    make verify-checkpoint ARGS=--out_dir=out/my-run
    python -m nanoGPT.checkpoint.verify --out_dir=out/my-run

Nothing is repaired: a checkpoint that does not verify is named, and a resume passes it over.
"""

import sys
from pathlib import Path

from nanoGPT.checkpoint.manifest import Damaged, read_manifest, step_directories, verify_files
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.files import is_present


def main(out_dir: str) -> None:
    """Read every checkpoint of a run to the last byte, and report whether each one holds.

    Args:
        out_dir: the run; it may be training.
    """
    found = step_directories(Path(out_dir))
    if not found:
        raise ConfigError(f"there is no checkpoint under {out_dir}: give the --out_dir of a run")
    damaged = 0
    for path in found:
        try:
            manifest = read_manifest(path)
            verify_files(path, manifest)
            size = sum(file["size"] for file in manifest["files"])
            print(f"{path.name}: whole, {len(manifest['files'])} file(s), {size:,} bytes, {manifest.get('phase', '')}")
        except Damaged as reason:
            if not is_present(path):
                print(f"{path.name}: deleted while it was read, as the run keeps its newest checkpoints only")
                continue
            damaged += 1
            print(f"{path.name}: damaged, {reason}")
    if damaged:
        raise ConfigError(f"{damaged} of {len(found)} checkpoints are damaged: a resume takes the newest whole one")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
