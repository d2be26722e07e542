"""The program that measures everything that needs a GPU, in a dry run on the CPU."""

import json

import pytest

from bench.gpu.__main__ import Task, check_machine, list_tasks, main, run_tasks
from bench.gpu.tasks import Place, Skipped, describe_machine
from nanoGPT.errors import ConfigError


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path, is_dry=True)


@pytest.mark.slow
def test_a_dry_run_measures_everything_once(tmp_path, capsys):
    """Every task ends well on the CPU and leaves a result. A second call runs none of them again."""
    words = ["--dry_run", f"--to={tmp_path}"]
    assert main(words) == 0
    names = [task.name for task in list_tasks(True)]
    records = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    assert {record["state"] for record in records} == {"done"} and all(record["result"] for record in records)
    capsys.readouterr()
    assert main(words) == 0 and capsys.readouterr().out == f"{len(names)} done\nnothing is left\n"
    with pytest.raises(ConfigError, match="has no results of a GPU"):
        main([*words, "--report"])


def test_what_fails_hangs_or_does_not_fit_is_reported(place, capsys):
    """A crash and a hang are recorded with their last line, and run again only with --retry. The rest is left."""
    tasks = [
        Task("crash", 60, words=("-c", "print('why'); raise SystemExit(7)")),
        Task("hang", 1, words=("-c", "import time; time.sleep(600)")),
        Task("long", 10**6, words=("-c", "print('fine')")),
    ]
    assert run_tasks(tasks, place, 60, is_retried=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "crash: why" in lines[0] and "hang: did not end within 1 s" in lines[1]
    assert lines[2:] == ["2 failed: crash, hang", "1 left: long"]
    for is_retried in (False, True):
        assert run_tasks(tasks[:1], place, 60, is_retried) == 1
        assert ("crash: why" in capsys.readouterr().out) == is_retried


def test_a_gpu_without_bfloat16_is_refused(tmp_path, monkeypatch):
    """A T4 is refused before any task starts."""
    for name, value in (("is_available", True), ("get_device_capability", (7, 5)), ("get_device_name", "Tesla T4")):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    with pytest.raises(Skipped, match="Tesla T4 does not compute in bfloat16"):
        describe_machine(Place(tmp_path, is_dry=False))


def test_results_of_another_machine_are_refused(place):
    """A directory with the results of another GPU, version or kernel is refused, and stays as it was."""
    record = {"result": {"identity": ["another GPU"]}, "state": "done"}
    (place.folder / "machine.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="results of another GPU, version or kernel: use another --to"):
        check_machine(place)
    assert json.loads((place.folder / "machine.json").read_text()) == record
