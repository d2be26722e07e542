"""Write one archive that sets up laptops without a network: this repository, wheels of all packages, prepared data.

    make offline-bundle                                             # write out/offline-bundle.tar
    tar xf offline-bundle.tar && cd sharded-nanogpt && make setup   # on each laptop, without a network

The wheels are made from the packages of .venv, so laptops get exactly what was tested here, also the CPU build of
PyTorch. They fit machines with the same operating system, processor and minor version of Python: make one archive for
each. The archive has the packages for `make setup`, `make jupyter` and `make preflight`.
"""

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA, DOWNLOADS
from workshop.copy_phase import MAX_DATASET_BYTES
from workshop.imports import ROOT
from workshop.set_up import BUNDLE, describe_platform

DEFAULT = ROOT / "out" / "offline-bundle.tar"
TOP = "sharded-nanogpt"  # the directory in the archive
EXTRAS = ("notebooks", "pytest")
INSTALLER_FILES = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")  # written by pip, not part of a wheel
COMPRESSION = 1  # a higher level takes several times as long


def find_packages() -> list[Distribution]:
    """Return the installed packages that the project, its build and EXTRAS need, directly or indirectly.

    Raises:
        ConfigError: a package is not installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    lines += [line for extra in EXTRAS for line in project["project"]["optional-dependencies"][extra]]
    found: dict[str, Distribution] = {}
    waiting = [(Requirement(line), "") for line in lines]
    visited = set()
    while waiting:
        requirement, extra = waiting.pop()
        key = (requirement.name, extra, *sorted(requirement.extras))
        if key in visited or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        visited.add(key)
        package = read_package(requirement)
        found[normalize(requirement.name)] = package
        needed = [Requirement(line) for line in package.requires or []]
        waiting += [(each, name) for each in needed for name in ("", *requirement.extras)]
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#") and normalize(Requirement(line).name) in found:
            read_package(Requirement(line))  # the set-up on a laptop demands these versions
    return [found[name] for name in sorted(found)]


def read_package(requirement: Requirement) -> Distribution:
    """Return an installed package.

    Raises:
        ConfigError: it is not installed, or has another version.
    """
    remedy = f'install it with `.venv/bin/python -m pip install "{requirement}"`'
    try:
        package = distribution(requirement.name)
    except PackageNotFoundError:
        raise ConfigError(f"{requirement.name} is not installed in .venv: {remedy}") from None
    if not requirement.specifier.contains(package.version, prereleases=True):
        raise ConfigError(f"{requirement.name} {package.version} is installed, but {requirement} is needed: {remedy}")
    return package


def normalize(name: str) -> str:
    """Return the name of a package as wheels spell it."""
    return re.sub(r"[-_.]+", "_", name).lower()


def name_wheel(package: Distribution) -> str:
    """Return the file name of a package's wheel: name, version, and the tags of its Python, ABI and platform."""
    tags = re.findall(r"^Tag: (\S+)", package.read_text("WHEEL") or "", re.MULTILINE)
    parts = [".".join(sorted(set(column))) for column in zip(*(tag.split("-") for tag in tags), strict=True)]
    return "-".join([normalize(package.name), package.version, *parts]) + ".whl"


def find_place(file: PackagePath, package: Distribution) -> str | None:
    """Return the path of an installed file in the wheel; None for a file that pip creates again."""
    parts = file.parts
    if "__pycache__" in parts or (parts[0].endswith(".dist-info") and file.name in INSTALLER_FILES):
        return None
    if parts[0] != "..":
        return str(PurePosixPath(*parts))
    outside = [part for part in parts if part != ".."]
    data = f"{normalize(package.name)}-{package.version}.data"
    if outside[0] != "bin":
        return str(PurePosixPath(data, "data", *outside))
    commands = {entry.name for entry in package.entry_points if entry.group in ("console_scripts", "gui_scripts")}
    return None if file.name in commands else str(PurePosixPath(data, "scripts", file.name))


def write_wheel(package: Distribution, folder: Path) -> Path:
    """Write the wheel of an installed package from its files.

    Raises:
        ConfigError: pip did not install it as a wheel, so its files are unknown.
    """
    if not package.files or package.read_text("WHEEL") is None:
        raise ConfigError(f"the files of {package.name} are unknown: install it again with pip")
    path, rows = folder / name_wheel(package), []
    info = next(file.parts[0] for file in package.files if file.parts[0].endswith(".dist-info"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION) as wheel:
        for file in package.files:
            source, place = Path(str(file.locate())), find_place(file, package)
            if place is None or not source.is_file():
                continue
            content = source.read_bytes()
            if "/scripts/" in place:
                content = re.sub(rb"\A#!\S*python\S*", b"#!python", content)  # pip writes the right path
            entry = zipfile.ZipInfo(place)
            entry.external_attr, entry.compress_type = source.stat().st_mode << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content, compresslevel=COMPRESSION)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            rows.append(f"{place},sha256={digest},{len(content)}")
        wheel.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,", ""]))
    return path


def list_data_files() -> Iterator[Path]:
    """Yield the files of the small prepared datasets, and the vocabulary of GPT-2.

    Raises:
        ConfigError: no dataset is prepared.
    """
    metas = sorted(DATA.glob("*/meta.json"))
    if not metas:
        raise ConfigError("no dataset is prepared: run `make data`")
    for meta in metas:
        files = [path for path in sorted(meta.parent.iterdir()) if path.suffix in (".bin", ".json")]
        if sum(path.stat().st_size for path in files) <= MAX_DATASET_BYTES:
            yield from files
    yield from sorted((DOWNLOADS / "tiktoken").glob("*"))


def list_repository_files() -> list[Path]:
    """Return the tracked files of this checkout."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError("this directory is not a git checkout: make the bundle in a clone of the repository")
    return [
        ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_symlink() | (ROOT / name).is_file()
    ]


def write_archive(to: Path, wheels: Iterable[Path]) -> None:
    """Write the archive. An existing one is replaced when the new one is complete."""
    bundle = f"{TOP}/{BUNDLE.name}"
    temporary = to.with_name(f".tmp-{to.name}")
    try:
        with tarfile.open(temporary, "w") as archive:
            for path in list_repository_files():
                archive.add(path, f"{TOP}/{path.relative_to(ROOT)}", recursive=False)
            for path in wheels:
                archive.add(path, f"{bundle}/wheels/{path.name}")
            for path in list_data_files():
                archive.add(path, f"{bundle}/data/{path.relative_to(DATA)}")
            content = json.dumps(describe_platform(), indent=1).encode()
            entry = tarfile.TarInfo(f"{bundle}/bundle.json")
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
        temporary.replace(to)
    finally:
        temporary.unlink(missing_ok=True)


def make_bundle(to: str = "") -> None:
    """Write one archive that sets up laptops without a network.

    Args:
        to: path of the archive; empty: out/offline-bundle.tar.
    """
    path, begin = Path(to) if to else DEFAULT, time.monotonic()
    if path.is_dir():
        raise ConfigError(f"TO={path} is a directory: give the path of a file, such as {path}/offline-bundle.tar")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tmp-wheels-") as folder:
        packages = find_packages()
        print(f"packing {len(packages)} packages; this takes a few minutes", flush=True)
        write_archive(path, [write_wheel(package, Path(folder)) for package in packages])
    machine = describe_platform()
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB in {time.monotonic() - begin:.0f} s")
    print(f"for {machine['platform']} with Python {machine['python']}; on each laptop, without a network, run:")
    print(f"    tar xf {path.name} && cd {TOP} && make setup")


if __name__ == "__main__":
    with report_errors():
        command_line(make_bundle, sys.argv[1:])
