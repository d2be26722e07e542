"""`workshop.offline_bundle`: an archive with the repository, wheels and data. test_setup.py installs from a bundle."""

import tarfile

from tests.helpers.wheels import write_wheel
from workshop.offline_bundle import download_wheels, list_data_files, list_requirements, write_archive
from workshop.set_up import describe_platform


def test_the_archive_has_the_repository_the_wheels_and_the_data(tmp_path, monkeypatch):
    """The archive has all committed files, wheels with what they need, the datasets, and the platform."""
    assert {"setuptools>=77", "jupyter", "pytest>=8"} <= {*list_requirements()}
    for name, needs in (("alpha", ["beta"]), ("beta", [])):
        write_wheel(tmp_path, name, *needs)
    for name, value in (("INDEX_URL", "http://127.0.0.1:9"), ("NO_INDEX", "1"), ("FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(f"PIP_{name}", value)
    (tmp_path / "wheels").mkdir()
    wheels = download_wheels(["alpha"], tmp_path / "wheels")
    assert [path.name.partition("-")[0] for path in wheels] == ["alpha", "beta"]
    write_archive(tmp_path / "bundle.tar", wheels)
    with tarfile.open(tmp_path / "bundle.tar") as archive:
        names = {name.removeprefix("sharded-nanogpt/") for name in archive.getnames()}
        assert archive.getmember("sharded-nanogpt/phase3_fsdp/data").issym()
        platform = archive.extractfile("sharded-nanogpt/offline-bundle/bundle.json").read().decode()
    assert {"Makefile", "workshop/set_up.py", "docs/layout.md"} <= names
    assert {f"nanoGPT/data/shakespeare_char/{name}" for name in ("meta.json", "train.bin", "val.bin")} <= names
    assert {f"offline-bundle/wheels/{path.name}" for path in wheels} <= names
    assert all(value in platform for value in describe_platform().values())


def test_the_archive_has_no_data_of_the_user(tmp_path, monkeypatch):
    """A dataset from the user's own text stays on this machine."""
    for name in ("shakespeare", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").touch()
    (tmp_path / "shakespeare" / "prepare.py").touch()
    monkeypatch.setattr("workshop.offline_bundle.DATA", tmp_path)
    monkeypatch.setattr("workshop.offline_bundle.DOWNLOADS", tmp_path)
    assert list(list_data_files()) == [tmp_path / "shakespeare" / "meta.json"]
