"""Flags that users of nanoGPT, FSDP and torchrun know do what they expect, or one sentence names the replacement."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.gpu.__main__ import parse_arguments
from nanoGPT.checkpoint.manifest import serialize_manifest
from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line
from nanoGPT.job.parse import parse
from nanoGPT.observers import add_flags, find_default_observers
from nanoGPT.options import llama
from nanoGPT.prepare import own_text
from nanoGPT.sample import SampleConfig
from nanoGPT.train import learning_rate
from nanoGPT.train_config import TrainConfig, field_names
from phase3_fsdp.fsdp import FsdpConfig
from tests.helpers.checkpoints import list_steps
from tests.helpers.programs import Program, make_flags
from tests.helpers.training import ROOT, TINY, call_train_all, read_metric, tiny, train, train_all
from workshop.ranks import losses, run_on_ranks

PHASES = ["nanoGPT", "phase1_zero1", "phase3_fsdp"]
TRAINER = ROOT / "nanoGPT" / "train.py"


def read_run_files(out: Path) -> dict[str, bytes]:
    """Return the content of a run's files, apart from heartbeats, locks and the stacks of a crash."""
    files = [out / "metrics.jsonl", out / "env.json", *(out / "checkpoints").rglob("*")]
    return {str(path): path.read_bytes() for path in files if path.is_file()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--fsdp_wrap=1e6"], {"min_num_params": 1_000_000}),
        (["--fsdp_wrap", "250000"], {"min_num_params": 250_000}),
        (["--fsdp_activation_checkpointing=True"], {"fsdp_activation_checkpointing": "full"}),
        (["--max_iters=1e3"], {"max_iters": 1000}),
    ],
)
def test_short_forms_of_flags(words, expected):
    """Numbers accept 1e6, and checkpointing accepts True and False."""
    config = parse(FsdpConfig, ["--device=cpu", *words], ROOT / "phase3_fsdp" / "train.py")
    config.check(4)
    assert {name: getattr(config, name) for name in expected} == expected


def test_an_observer_may_define_a_flag_of_another_trainer(tmp_path, monkeypatch):
    """A flag that an observer defines is its own, on the command line and in a config file."""
    (tmp_path / "my_budget.py").write_text(
        "from dataclasses import dataclass\n\nfrom nanoGPT import observers\n\n\n"
        "@dataclass\nclass Flags(observers.Flags):\n    epochs: int = 1\n    tokens: int = 1\n"
        "\n\nclass Observer(observers.Observer):\n    pass\n"
    )
    (tmp_path / "config.py").write_text("epochs = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = [str(tmp_path / "config.py"), "--device=cpu", "--observers=my_budget", "--tokens=5"]
    config = parse(FsdpConfig, words, ROOT / "phase3_fsdp" / "train.py")
    assert (config.epochs, config.tokens) == (3, 5)


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    """`~` begins a path in flags and config files: alone, in a list, and after `FILE:`. A prompt does not change."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "config.py").write_text('out_dir = "~/run"\n')
    words = ["--device=cpu", str(tmp_path / "config.py"), "--dataset=~/a:3,~/b:1", "--init_from", "~/weights"]
    config = parse(TrainConfig, words, TRAINER)
    assert [config.out_dir, config.init_from] == ["/home/me/run", "/home/me/weights"]
    assert config.dataset == "/home/me/a:3,/home/me/b:1"
    for start, expected in (("FILE:~/p.txt", "FILE:/home/me/p.txt"), ("~/p", "~/p"), ("a,~", "a,~")):
        assert command_line(SampleConfig, [f"--start={start}"]).start == expected
    assert parse_arguments(["--to=~/gpu"]).to == Path("/home/me/gpu")


def test_a_fraction_is_not_an_integer():
    """1.5e-1 and 1e300 are refused for an integer, in one sentence."""
    for value in ("1.5e0", "1e-3", "1e300", "e6"):
        with pytest.raises(ConfigError, match=f"--max_iters={value} is invalid: use int"):
            parse(TrainConfig, [f"--max_iters={value}"], TRAINER)


def test_later_values_override_earlier_ones(tmp_path):
    """Flags override config files, later files override earlier ones, and files override a checkpoint and defaults.

    A config file next to the trainer overrides the file of nanoGPT with the same name.
    """
    (tmp_path / "a.py").write_text("n_layer = 3\nbatch_size = 5\nseed = 9\n")
    (tmp_path / "b.py").write_text("batch_size = 6\nseed = 8\n")
    words = [str(tmp_path / "a.py"), "--seed=7", str(tmp_path / "b.py"), "--device=cpu"]
    config = parse(TrainConfig, words, ROOT / "nanoGPT" / "train.py")
    assert (config.n_layer, config.batch_size, config.seed, config.n_head) == (3, 6, 7, TrainConfig().n_head)
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    saved = {**vars(TrainConfig()), "n_layer": 9, "batch_size": 5, "seed": 4, "out_dir": "moved since"}
    files = [{"name": "ckpt.pt", "size": 1, "sha256": ""}]
    manifest = {"config": saved, "step": 4, "world_size": 1, "versions": {}, "files": files}
    (folder / "manifest.json").write_text(serialize_manifest(manifest))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "train_gpt2.py").write_text("batch_size = 6\nseed = 6\n")
    words = ["config/train_gpt2.py", "--seed=7", "--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--device=cpu"]
    config = parse(TrainConfig, words, tmp_path / "train.py")
    assert (config.n_layer, config.batch_size, config.seed) == (9, 6, 7)
    assert config.out_dir == str(tmp_path / "run") and config.init_from == "resume"


def test_an_empty_value_is_refused():
    """The value of a shell variable that is not set is not the current directory, and not the newest run."""
    for target, flag in ((SampleConfig, "out_dir"), (own_text.main, "input")):
        with pytest.raises(ConfigError, match=f"--{flag}= is empty: give a value, or leave out the flag"):
            command_line(target, [f"--{flag}="])


def test_a_fraction_is_written_as_in_python():
    """.1 and 1. are numbers in Python and in nanoGPT's config files."""
    config = parse(TrainConfig, ["--dropout=.1", "--weight_decay=1."], TRAINER)
    assert (config.dropout, config.weight_decay) == (0.1, 1.0)


def test_a_config_file_may_compute_its_values(tmp_path):
    """A whole float is an integer, also in a field of text, and a number of numpy keeps its value."""
    path = tmp_path / "computed.py"
    path.write_text(
        "import numpy as np\nfsdp_shard_size = 4 / 2\nseed = 1e18\ncompile = 0.0\ndropout = np.float32(0.1)"
    )
    config = parse(FsdpConfig, [str(path), "--device=cpu"], TRAINER)
    assert (config.fsdp_shard_size, config.seed, config.compile) == ("2", 10**18, False)
    assert config.dropout == float(np.float32(0.1)) != 0.1


def test_a_constant_learning_rate():
    """With decay_lr=False every step has the learning rate that was given, without warm-up."""
    config = TrainConfig(decay_lr=False, learning_rate=1e-3, warmup_iters=5, max_iters=10)
    assert {learning_rate(step, config) for step in range(12)} == {1e-3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train each phase on 2 ranks, with checkpoints after steps 2 and 4."""
    out = tmp_path_factory.mktemp("runs")
    fields = {"max_iters": 4, "eval_interval": 2}
    train_all(2, [(phase, tiny(phase, out / phase, **fields)) for phase in PHASES])
    return out


def test_an_evaluation_alone(runs, capsys):
    """With eval_only=True a run prints the validation loss of a checkpoint, and changes no file of the run."""
    before = [read_run_files(runs / phase) for phase in PHASES]
    val_losses = {phase: read_metric(runs / phase, "val_loss") for phase in PHASES}
    for step, more in ((4, {}), (2, {"resume_step": 2})):
        fields = {"init_from": "resume", "eval_only": True, **more}
        run_on_ranks(call_train_all, 2, [(phase, tiny(phase, runs / phase, **fields)) for phase in PHASES])
        lines = [line for line in capsys.readouterr().out.splitlines() if "val loss" in line]
        assert lines == [f"[0] step     {step}  val loss {val_losses[phase][step]:.4f}" for phase in PHASES]
    assert all(before) and [read_run_files(runs / phase) for phase in PHASES] == before


def test_an_older_checkpoint_is_resumed(runs, tmp_path):
    """With resume_step=2 a run repeats the steps after it exactly; the newer checkpoints are kept under other names."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    fields = {"init_from": "resume", "max_iters": 4, "eval_interval": 2}
    repeated = train_all(2, [(phase, tiny(phase, tmp_path / phase, resume_step=2, **fields)) for phase in PHASES])
    for phase, curve in zip(PHASES, repeated, strict=True):
        out = tmp_path / phase
        assert curve == losses(runs / phase) and sorted(curve) == [0, 1, 2, 3]
        assert list_steps(runs / phase) == list_steps(out) == ["step-00000002", "step-00000004"]
        assert [path.name for path in (out / "checkpoints").glob(".newer-*")] == [".newer-step-00000004"]
        (before,) = out.glob("metrics-before-*.jsonl")
        assert before.read_bytes() == (runs / phase / "metrics.jsonl").read_bytes()


def test_a_second_torchrun_gets_a_new_directory(tmp_path):
    """Two runs by plain torchrun without out_dir do not share a directory; a third resumes the newest."""
    words = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", str(TRAINER)]
    words += make_flags(**{**TINY, "max_iters": 2, "device": "cpu"})
    directories: list[set[Path]] = []
    for more in ([], [], ["--init_from=resume", "--max_iters=3"]):
        program = Program(*words, *more, cwd=tmp_path)
        output, _ = program.communicate()
        assert program.returncode == 0, output
        directories.append(set((tmp_path / "out").iterdir()))
    (first,) = directories[0]
    (second,) = directories[1] - directories[0]
    assert directories[1] == directories[2] and first.name.startswith("nanoGPT-")
    assert list_steps(first) == ["step-00000002"] and list_steps(second) == ["step-00000002", "step-00000003"]
    assert json.loads((second / "env.json").read_text())["config"]["out_dir"] == f"out/{second.name}"


def test_a_run_saves_every_few_minutes(tmp_path):
    """With --save_every_minutes, a run also saves between evaluations, and resumes there with the same losses."""
    fields = {"max_iters": 6, "eval_interval": 6}
    plain = tiny("phase3_fsdp", tmp_path / "plain", **fields)
    timed = tiny("phase3_fsdp", tmp_path / "timed", save_every_minutes=1e-9, keep_checkpoints=12, **fields)
    curves = train_all(2, [("phase3_fsdp", timed), ("phase3_fsdp", plain)])
    assert curves[0] == curves[1] and list_steps(tmp_path / "plain") == ["step-00000006"]
    names = list_steps(tmp_path / "timed")  # the ranks ask each other after the first step, then less often
    assert names[0] == "step-00000001" and names[-1] == "step-00000006" and len(names) > 2
    shutil.rmtree(tmp_path / "timed" / "checkpoints" / names[-1])
    (tmp_path / "timed" / "checkpoints" / "LATEST").write_text(names[-2] + "\n")
    assert train("phase3_fsdp", 2, dataclasses.replace(timed, init_from="resume")) == curves[0]


def test_flags_of_other_trainers_are_explained(tmp_path):
    """A flag of another trainer is refused, also in a config file. The flags that the answer names exist."""
    known = field_names(add_flags(FsdpConfig, find_default_observers()))
    advice = {name: answer for names, answer in FsdpConfig.FOREIGN_FLAGS.items() for name in names.split()}
    assert {field.name for field in dataclasses.fields(llama.Flags)} <= advice.keys()
    for name, answer in advice.items():
        assert name not in known and set(re.findall(r"--(\w+)", answer)) <= {*known}
        (tmp_path / "theirs.py").write_text(f"{name} = 'nccl'\n")
        for words in ([f"--{name}=x"], [str(tmp_path / "theirs.py")]):
            with pytest.raises(ConfigError, match=f"{name}.* not a flag of this trainer: "):
                parse(FsdpConfig, words, TRAINER)
    with pytest.raises(ConfigError, match="unknown flag --wdd; --help lists"):
        parse(FsdpConfig, ["--wdd=1"], TRAINER)
