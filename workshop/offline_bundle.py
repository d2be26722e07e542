"""Write one archive that sets up laptops without a network: this repository, wheels of all packages, prepared data.

    .venv/bin/python -m workshop.offline_bundle                   # write out/offline-bundle.tar; needs a network
    tar xf offline-bundle.tar && cd sharded-nanogpt && make setup   # on each laptop, without a network

`pip download` gets the wheels of the versions in .venv, so laptops get exactly what was tested here, also the CPU build
of PyTorch. They fit machines with the same operating system, processor and minor version of Python: make one archive
for each. The archive has the packages for `make setup`, `make notebooks` and `make preflight`.
"""

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA, DOWNLOADS
from nanoGPT.job.command import command_line, report_errors
from workshop.copy_phase import MAX_DATASET_BYTES
from workshop.imports import ROOT
from workshop.set_up import BUNDLE, describe_platform

ARCHIVE = ROOT / "out" / "offline-bundle.tar"
TOP = "sharded-nanogpt"  # the directory in the archive
EXTRAS = ("notebooks", "pytest")


def run(command: list[str], remedy: str) -> str:
    """Run a program in the repository, which prints its own errors, and return its output.

    Raises:
        ConfigError: it failed.
    """
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(f"`{' '.join(command[:5])} ...` failed (its messages are above): {remedy}")
    return done.stdout


def list_requirements() -> list[str]:
    """Return what the project, its build and EXTRAS require."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    lines = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    return lines + [line for extra in EXTRAS for line in extras[extra]]


def download_wheels(requirements: list[str], folder: Path) -> list[Path]:
    """Download the wheels of these requirements and of what they need, in the versions that are installed here.

    Raises:
        ConfigError: pip failed.
    """
    pip, remedy = [sys.executable, "-m", "pip"], "check the network, and repeat this"
    pins = folder / "pins.txt"
    pins.write_text(run([*pip, "freeze", "--exclude-editable"], remedy))
    download = [*pip, "download", "--quiet", "--only-binary=:all:", f"--dest={folder}", f"--constraint={pins}"]
    if version("torch").endswith("+cpu") and any(line.startswith("torch") for line in requirements):
        run([*download, "--no-deps", "--extra-index-url=https://download.pytorch.org/whl/cpu", "torch"], remedy)
    run([*download, f"--find-links={folder}", *requirements], remedy)
    return sorted(folder.glob("*.whl"))


def list_data_files() -> Iterator[Path]:
    """Yield the files of the small prepared datasets of this repository, and the vocabulary of GPT-2.

    Datasets from a user's own text stay on this machine.

    Raises:
        ConfigError: no dataset is prepared.
    """
    metas = [meta for meta in sorted(DATA.glob("*/meta.json")) if (meta.parent / "prepare.py").exists()]
    if not metas:
        raise ConfigError("no dataset is prepared: run `make data`")
    for meta in metas:
        files = [path for path in sorted(meta.parent.iterdir()) if path.suffix in (".bin", ".json")]
        if sum(path.stat().st_size for path in files) <= MAX_DATASET_BYTES:
            yield from files
    yield from sorted((DOWNLOADS / "tiktoken").glob("*"))


def set_time(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Set the time of a prepared file to now, so that make does not prepare it again."""
    entry.mtime = int(time.time())
    return entry


def write_archive(to: Path, wheels: list[Path]) -> None:
    """Write the archive with the newest commit. An existing archive is replaced when the new one is complete.

    Raises:
        ConfigError: this directory is not a git checkout.
    """
    bundle, temporary = f"{TOP}/{BUNDLE.name}", to.with_name(f".tmp-{to.name}")
    try:
        archive_command = ["git", "archive", f"--prefix={TOP}/", f"--output={temporary.resolve()}", "--format=tar"]
        run([*archive_command, "HEAD"], "make the bundle in a clone of the repository")
        with tarfile.open(temporary, "a") as archive:
            for path in wheels:
                archive.add(path, f"{bundle}/wheels/{path.name}")
            for path in list_data_files():
                archive.add(path, f"{TOP}/{path.relative_to(ROOT)}", filter=set_time)
            content = json.dumps(describe_platform(), indent=1).encode()
            entry = tarfile.TarInfo(f"{bundle}/bundle.json")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        temporary.replace(to)
    finally:
        temporary.unlink(missing_ok=True)


def make_bundle() -> None:
    """Write one archive that sets up laptops without a network, out/offline-bundle.tar."""
    ARCHIVE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ARCHIVE.parent, prefix=".tmp-wheels-") as folder:
        print("downloading the packages of .venv as wheels; this takes a few minutes", flush=True)
        write_archive(ARCHIVE, download_wheels(list_requirements(), Path(folder)))
    machine, size = describe_platform(), ARCHIVE.stat().st_size
    print(f"{ARCHIVE}: {size / 1e6:.0f} MB, for {machine['platform']} with Python {machine['python']}")
    print(f"on each laptop, without a network, run:\n    tar xf {ARCHIVE.name} && cd {TOP} && make setup")


if __name__ == "__main__":
    with report_errors():
        command_line(make_bundle, sys.argv[1:])
