"""`--observers`: modules of a user observe a run and stop it, and a run without the shell has the same losses."""

import re
from pathlib import Path
from typing import ClassVar

import pytest

from nanoGPT.errors import ConfigError
from nanoGPT.job.parse import parse
from nanoGPT.observers import Observer, Observers, find_default_observers
from nanoGPT.train_config import TrainConfig, validate
from operate.run_files import read_json_lines
from tests.helpers.programs import assert_refused, make_flags, run_program
from tests.helpers.training import ROOT, TINY, tiny, train
from workshop.ranks import losses, run_on_ranks

BLOCK = re.compile(r"```python\n# (\w+)\.py\n(.*?)```", re.DOTALL)
EXAMPLES = dict(BLOCK.findall((ROOT / "docs" / "observers.md").read_text()))


@pytest.fixture
def modules(tmp_path, monkeypatch) -> Path:
    """Write the examples of the guide as modules that Python finds, and return their folder."""
    for name, source in EXAMPLES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def launch(ranks: int, **fields: object) -> str:
    """Train phase 3 with torchrun, and return what it printed."""
    words = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "phase3_fsdp/train.py"]
    done = run_program(*words, *make_flags(**{**TINY, "n_layer": 1, **fields}))
    assert done.code == 0, done.output
    return done.output


def test_the_examples_of_the_guide_work(modules):
    """On two ranks, the observers of docs/observers.md write metrics, add norms, evaluate and stop the run
    early. The run saves before it stops. Together, the norms of the gradients are the
    clipped global norm."""
    assert list(EXAMPLES) == ["my_metrics", "my_norms", "my_evaluation", "my_early_stopping"]
    fields = {"max_iters": 2000, "eval_interval": 1, "learning_rate": 1e-9, "min_lr": 1e-9, "weight_decay": 0.0}
    names = ",".join(EXAMPLES)
    output = launch(2, out_dir=modules / "run", observers=names, second_interval=2, **fields)
    lines = read_json_lines(modules / "run" / "metrics.jsonl")
    rows = (modules / "run" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == [str(line["step"]) for line in lines if line["loss"] is not None]
    for line in [line for line in lines if "norm/lm_head.weight" in line or "grad_norm/lm_head.weight" in line]:
        squares = sum(value**2 for name, value in line.items() if name.startswith("grad_norm/"))
        assert squares**0.5 == pytest.approx(min(line["grad_norm"], 1.0), rel=1e-4)
    assert re.search(r"step 2: loss \d\.\d{4} on shakespeare_char", output)
    assert "stopped by the observer my_early_stopping; resume with --init_from=resume" in output and len(lines) < 100
    assert (modules / "run" / "checkpoints" / f"step-{lines[-1]['step'] + 1:08d}").is_dir()


def test_the_second_dataset_of_an_example_has_the_same_tokenizer(modules):
    """The loss on text of another tokenizer would mean nothing, so the example refuses it."""
    flags = make_flags(**TINY, out_dir=modules / "run", observers="my_evaluation", second_dataset="shakespeare")
    assert_refused(run_program("phase3_fsdp/train.py", *flags), "shakespeare has another tokenizer")


INTRUDER = """import torch
from nanoGPT import observers

class Observer(observers.Observer):
    def build(self, model, optimizer, first_step):
        self.model = model

    def log(self, line):
        if self.run.is_main:
            line["mine"] = torch.tensor(0.5)

    def end_step(self, step, loss_sum, grad_norm):
        self.model.eval()
"""


def test_an_observer_may_leave_the_model_in_evaluation_mode(tmp_path, monkeypatch):
    """Dropout is on again in the next step, and a tensor in a line of metrics is written as a number."""
    (tmp_path / "intruder.py").write_text(INTRUDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fields = {"max_iters": 3, "eval_interval": 3, "dropout": 0.5, "log_interval": 1}
    for name, observers in (("plain", ""), ("observed", "intruder")):
        launch(1, out_dir=tmp_path / name, observers=observers, **fields)
    assert losses(tmp_path / "plain") == losses(tmp_path / "observed")
    assert '"mine": 0.5' in (tmp_path / "observed" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--observers=my_evaluation", "--second_interval=0"], "--second_interval=0 is out of range"),
        (["--observers=my_metrics", "--second_interval=5"], "unknown flag --second_interval"),
        (["--observers=my_metric"], "my_metric is not a module with a class Observer"),
        (["--observers=my_class"], "my_class is not a module with a class Observer"),
        (["--observers=measure,my_ledger"], "my_ledger has a flag --ledger, which exists already"),
    ],
)
def test_flags_of_an_observer_are_checked(flags, problem, modules):
    """An invalid value, a flag of a module that does not observe the run, an unknown module, a class that does not
    extend Observer, and two flags with the same name are one error."""
    (modules / "my_class.py").write_text("class Observer:\n    pass\n")
    (modules / "my_ledger.py").write_text((ROOT / "measure" / "observer.py").read_text())
    with pytest.raises(ConfigError, match=problem):
        validate(parse(TrainConfig, flags, ROOT / "nanoGPT" / "train.py"), 1)


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_a_launcher_refuses_an_impossible_timeout(seconds):
    """A launcher asks for the timeout, which depends on --stall_seconds, before it checks any value."""
    config = parse(TrainConfig, [f"--stall_seconds={seconds}"], ROOT / "nanoGPT" / "train.py")
    with pytest.raises(ConfigError, match="--stall_seconds=.* is out of range"):
        _ = config.timeout


def test_an_explanation_that_fails_does_not_replace_the_error(capsys):
    """Its own error is printed, and the next observer explains the error."""

    class Failing(Observer):
        def explain(self, error):
            raise KeyError("broken")

    class Explaining(Observer):
        def explain(self, error):
            return "the reason"

    observers = Observers(None)
    observers.members = [Failing(None), Explaining(None)]
    assert observers.explain(ValueError()) == "the reason" and "KeyError: 'broken'" in capsys.readouterr().err


def test_a_run_without_observers_has_the_same_losses(tmp_path):
    """Without observers a run logs, saves and resumes, to the losses of a run with the shell. It leaves only the files
    of the core."""
    phase = "phase3_fsdp"
    watched = train(phase, 2, tiny(phase, tmp_path / "watched", max_iters=6, lr_decay_iters=6))
    for more in ({"max_iters": 4}, {"max_iters": 6, "init_from": "resume"}):
        train(phase, 2, tiny(phase, tmp_path / "alone", observers="", lr_decay_iters=6, **more))
    assert losses(tmp_path / "alone") == watched
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert names == {"checkpoints", "metrics.jsonl", "log.txt", "env.json", ".lock"}


class Recorder(Observer):
    """Records the calls of its methods."""

    calls: ClassVar[list[str]] = []

    def build(self, *args: object) -> None:
        self.calls.append("build")

    def begin_step(self, step: int) -> None:
        self.calls.append(f"begin {step}")

    def end_step(self, step: int, *args: object) -> None:
        self.calls.append(f"end {step}")

    def log(self, line: dict[str, object]) -> None:
        self.calls.append(f"log {line['step']}")

    def save(self, step: int, path: Path) -> None:
        self.calls.append(f"save {step}")
        assert path.name == f"step-{step:08d}"

    def end(self, error: BaseException | None) -> None:
        self.calls.append(f"end {type(error).__name__}")


def record_calls(out: str) -> list[str]:
    import nanoGPT.train
    from operate import observer

    observer.Observer = Recorder  # type: ignore[misc, assignment]
    nanoGPT.train.train(tiny("nanoGPT", Path(out), max_iters=2, eval_interval=1, observers="operate.observer"))
    return Recorder.calls


def test_all_ranks_see_the_same_moments(tmp_path):
    """Both ranks call the methods in the same order: build, then log, save, begin and end of each step, and the end."""
    one, two = run_on_ranks(record_calls, 2, str(tmp_path), show=False)
    assert one == two
    steps = ["begin 0", "end 0", "log 0", "save 1", "begin 1", "end 1", "log 1", "save 2", "log 2"]
    assert one == ["build", *steps, "end NoneType"] and find_default_observers() == "operate,measure"
