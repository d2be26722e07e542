"""`make offline-bundle`: wheels from the installed packages, which pip installs again without a network."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

import pytest

from nanoGPT.errors import ConfigError
from workshop import offline_bundle
from workshop.offline_bundle import find_packages, make_bundle, name_wheel, write_archive, write_wheel
from workshop.set_up import describe_platform


def install(wheels: list[Path], prefix: Path) -> Path:
    """Install wheels into a new directory, without a network and without their dependencies. Return site-packages."""
    options = ["--no-index", "--no-deps", "--ignore-installed", "--quiet", "--prefix", str(prefix)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels)], check=True, env=environment)
    (site,) = prefix.glob("lib*/python*/site-packages")
    return site


def test_repacked_packages_are_installed_again(tmp_path):
    """pip installs the wheels of installed packages: all files with their bytes, commands, and an executable program.

    cloudpickle has only modules, tqdm has a command, and ruff is a program.
    """
    packages = [distribution(name) for name in ("cloudpickle", "tqdm", "ruff")]
    site = install([write_wheel(package, tmp_path) for package in packages], tmp_path / "prefix")
    for package in packages:
        for file in package.files or []:
            if file.name in offline_bundle.INSTALLER_FILES or file.suffix == ".pyc":
                continue
            copy, original = site.joinpath(*file.parts), Path(str(file.locate()))
            assert copy.exists(), file
            if file.name != "tqdm":  # a command, which names the Python that runs it
                assert copy.read_bytes() == original.read_bytes(), file
    assert os.access(tmp_path / "prefix" / "bin" / "ruff", os.X_OK)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([tmp_path / "prefix" / "bin" / "tqdm", "--version"], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_packages_of_the_project_are_found():
    """The bundle needs torch, numpy, setuptools for the build, and what these need; not the packages of the linters."""
    try:
        names = {package.name.lower() for package in find_packages()}
    except ConfigError as error:  # `make setup` and `make test` do not install Jupyter
        assert "jupyter is not installed in .venv: install it with" in str(error)
        return
    assert {"torch", "numpy", "setuptools", "sympy", "jupyterlab", "pytest"} <= names
    assert not {"ruff", "mypy", "wandb", "sharded-nanogpt"} & names


def test_the_archive_has_the_repository_the_wheels_and_the_data(tmp_path):
    """The archive has every tracked file with its links, the wheels, the datasets, and the platform."""
    wheel = write_wheel(distribution("cloudpickle"), tmp_path)
    write_archive(tmp_path / "bundle.tar", [wheel])
    with tarfile.open(tmp_path / "bundle.tar") as archive:
        names = set(archive.getnames())
        assert archive.getmember("sharded-nanogpt/phase3_fsdp/data").issym()
        platform = archive.extractfile("sharded-nanogpt/offline-bundle/bundle.json").read().decode()
    assert {f"sharded-nanogpt/{name}" for name in ("Makefile", "workshop/set_up.py", "docs/layout.md")} <= names
    data = {f"data/shakespeare_char/{name}" for name in ("meta.json", "train.bin", "val.bin")}
    assert {f"sharded-nanogpt/offline-bundle/{name}" for name in (f"wheels/{wheel.name}", *data)} <= names
    assert all(value in platform for value in describe_platform().values())
    assert [path.name for path in tmp_path.glob(".tmp*")] == []


def test_wheel_names_have_all_tags_and_problems_are_explained(tmp_path):
    """A wheel for several platforms is named after all of them. A directory as TO= is refused."""
    info = tmp_path / "My.Package-2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: My.Package\nVersion: 2\n")
    (info / "WHEEL").write_text("Tag: cp311-cp311-manylinux_2_17_x86_64\nTag: cp311-cp311-manylinux2014_x86_64\n")
    package = PathDistribution(info)
    assert name_wheel(package) == "my_package-2-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
    with pytest.raises(ConfigError, match="the files of My.Package are unknown"):
        write_wheel(package, tmp_path)
    with pytest.raises(ConfigError, match="is a directory: give the path of a file"):
        make_bundle(str(tmp_path))
    assert not zipfile.is_zipfile(tmp_path / name_wheel(package))
