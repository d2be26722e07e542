"""`make watch` and `make plot`: they show what the files of a run contain, also if files are missing or cut off."""

import io
import json
import shutil
import time
from pathlib import Path

import pytest
from rich.console import Console

from nanoGPT.errors import ConfigError
from operate import plot, watch
from operate.run_files import read_json_lines
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import tiny, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on two ranks that has ended."""
    out = tmp_path_factory.mktemp("pictures") / "run"
    train("phase3_fsdp", 2, tiny("phase3_fsdp", out, n_layer=1, gradient_accumulation_steps=2))
    return out


def show(folder: Path) -> str:
    """Return what `make watch` shows of a run."""
    console = Console(file=io.StringIO(), width=120)
    console.print(watch.render(folder))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_watch_shows_the_last_values(run):
    """The panel has the last step, loss and checkpoint, and one row per rank. The command exits when the run ends."""
    last = [line for line in read_json_lines(run / "metrics.jsonl") if line["loss"] is not None][-1]
    picture = show(run)
    assert f"step 11 of 12  loss {last['loss']:.4f}" in picture and "step-00000012" in picture
    assert sum("ended" in line for line in picture.splitlines()) == 2
    assert watch.format_sparkline([1.0, float("nan"), 2.0]) == "▁█"  # a loss that is not finite is left out
    assert "step 11 of 12" in run_program("operate.watch", f"--run={run}").output


def test_watch_shows_a_run_that_has_just_begun(run, tmp_path):
    """A run without metrics, with a heartbeat that was cut off and with a silent rank is shown."""
    (tmp_path / "heartbeat").mkdir()
    assert "no step has been logged yet" in show(tmp_path) and not watch.has_ended(tmp_path)
    beat = json.loads((run / "heartbeat" / "rank0.json").read_text())
    (tmp_path / "heartbeat" / "rank1.json").write_text('{"step": 1, "st')
    for seconds, has_ended in ((0.0, True), (time.time(), False)):  # silent for more than a minute, and alive
        (tmp_path / "heartbeat" / "rank0.json").write_text(json.dumps({**beat, "ended": False, "time": seconds}))
        assert "s ago" in show(tmp_path) and watch.has_ended(tmp_path) == has_ended


def test_plot_draws_runs_and_prints_a_summary(run, tmp_path, monkeypatch, capsys):
    """The figure is written, and the summary has the last loss and the best validation loss of each run."""
    shutil.copytree(run, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    plot.main(f"{run},other")
    lines = read_json_lines(run / "metrics.jsonl")
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    best = min(line["val_loss"] for line in lines if line["val_loss"] is not None)
    header, first, second, written = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["run", "ranks", "steps"] and written == "wrote out/plot.png"
    assert first.split()[1:5] == second.split()[1:5] == ["2", "12", f"{losses[-1]:.4f}", f"{best:.4f}"]
    assert (tmp_path / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="has no metrics"):
        plot.main(str(tmp_path))
    assert_refused(run_program("operate.watch", f"--run={tmp_path}"), "is not the directory of a run")
