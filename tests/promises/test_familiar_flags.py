"""Flags that users of nanoGPT, FSDP and torchrun know do what they expect, or one sentence names the replacement."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from nanoGPT.errors import ConfigError
from nanoGPT.job.parse import parse
from nanoGPT.optim import learning_rate
from nanoGPT.train_config import TrainConfig, validate
from phase3_fsdp.fsdp import FsdpConfig
from tests.helpers.programs import Program, make_flags
from tests.helpers.training import ROOT, TINY, call_train, read_metric, tiny, train
from workshop.ranks import run_on_ranks

TRAINER = ROOT / "nanoGPT" / "train.py"


def steps_saved(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def read_run_files(out: Path) -> dict[str, bytes]:
    """Return the content of a run's files, apart from heartbeats, locks and the stacks of a crash."""
    files = [out / "metrics.jsonl", out / "env.json", *(out / "checkpoints").rglob("*")]
    return {str(path): path.read_bytes() for path in files if path.is_file()}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--fsdp_min_num_params=1e6"], {"fsdp_min_num_params": 1_000_000, "wraps_by_size": True}),
        (["--fsdp_min_num_params", "2.5e5"], {"fsdp_min_num_params": 250_000, "wraps_by_size": True}),
        (["--fsdp_wrap=size"], {"wraps_by_size": True}),
        ([], {"wraps_by_size": False}),
        (["--fsdp_activation_checkpointing=True"], {"fsdp_activation_checkpointing": "full"}),
        (["--fsdp_activation_checkpointing=False"], {"fsdp_activation_checkpointing": "none"}),
        (["--max_iters=1e3"], {"max_iters": 1000}),
    ],
)
def test_short_forms_of_flags(words, expected):
    """A minimum size alone selects wrapping by size, integers accept 1e6, and checkpointing accepts True and False."""
    config = parse(FsdpConfig, ["--device=cpu", *words], ROOT / "phase3_fsdp" / "train.py")
    config.check(4)
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_fraction_is_not_an_integer():
    """1.5e-1 and 1e300 are refused for an integer, in one sentence."""
    for value in ("1.5e0", "1e-3", "1e300", "e6"):
        with pytest.raises(ConfigError, match=f"--max_iters={value} is invalid: use an integer"):
            parse(TrainConfig, [f"--max_iters={value}"], TRAINER)


def test_the_configuration_of_an_older_checkpoint_is_accepted():
    """Blocks with the earlier default of the minimum size, which older checkpoints contain, are the default."""
    older = FsdpConfig(fsdp_wrap="block", fsdp_min_num_params=1_000_000, use_fsdp=False)
    older.check(1)
    assert (older.fsdp_wrap, older.fsdp_min_num_params) == ("auto", None)


@pytest.mark.parametrize("name", ["backend", "wandb_log"])
def test_flags_of_nanogpt_are_explained(name, tmp_path):
    """A flag of nanoGPT that does not exist here is one sentence with the replacement, also in a config file."""
    (tmp_path / "theirs.py").write_text(f"{name} = 'nccl'\n")
    for words in ([f"--{name}=x"], [str(tmp_path / "theirs.py")]):
        with pytest.raises(ConfigError, match=f"{name}.* a flag of nanoGPT: (leave it out|use --track=wandb)"):
            parse(TrainConfig, words, TRAINER)


def test_a_constant_learning_rate():
    """With decay_lr=False every step has the learning rate that was given, without warm-up."""
    config = TrainConfig(decay_lr=False, learning_rate=1e-3, warmup_iters=5, max_iters=10)
    assert {learning_rate(step, config) for step in range(12)} == {1e-3}


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1", "phase3_fsdp"])
def test_an_evaluation_alone(phase, tmp_path, capsys):
    """With eval_only=True a run prints the validation loss of a checkpoint, and changes no file of the run."""
    train(phase, 2, tiny(phase, tmp_path, max_iters=7))
    val_losses, before = read_metric(tmp_path, "val_loss"), read_run_files(tmp_path)
    for step, more in ((7, {}), (5, {"resume_step": 5})):
        config = tiny(phase, tmp_path, init_from="resume", eval_only=True, **more)
        run_on_ranks(call_train, 2, phase, config)
        assert f"[0] step     {step}  val loss {val_losses[step]:.4f}\n" in capsys.readouterr().out
    assert read_run_files(tmp_path) == before


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1", "phase3_fsdp"])
def test_an_older_checkpoint_is_resumed(phase, tmp_path):
    """With resume_step=5 a run repeats the steps after it exactly; the newer checkpoints are kept under other names."""
    expected = train(phase, 2, tiny(phase, tmp_path, compile_mode="reduce-overhead"))  # of an earlier version
    assert steps_saved(tmp_path) == ["step-00000005", "step-00000010", "step-00000012"]
    assert train(phase, 2, tiny(phase, tmp_path, init_from="resume", resume_step=5)) == expected
    assert steps_saved(tmp_path) == ["step-00000005", "step-00000010", "step-00000012"]
    newer = sorted(path.name for path in (tmp_path / "checkpoints").glob(".newer-*"))
    assert newer == [".newer-step-00000010", ".newer-step-00000012"]
    with pytest.raises(Exception, match="there is no checkpoint step-00000007 .*choose one of step-00000012"):
        train(phase, 1, tiny(phase, tmp_path, init_from="resume", resume_step=7))
    config = parse(type(tiny(phase, tmp_path)), [f"--out_dir={tmp_path}", "--init_from=resume"], TRAINER)
    assert config.resume_step is None, "a later resume takes the newest checkpoint"
    assert config.compile_mode == "default", "the mode that no longer exists is replaced"


def test_a_step_to_resume_needs_a_resume():
    """resume_step without init_from=resume is refused."""
    with pytest.raises(ConfigError, match="--resume_step=5 needs --init_from=resume"):
        validate(TrainConfig(resume_step=5), 1)


def test_a_resume_without_a_directory_takes_the_newest_run_of_the_phase(tmp_path, monkeypatch):
    """init_from=resume finds the newest run of the phase, in a directory under out/ or in out itself."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(["nanoGPT-1", "nanoGPT-2", "phase3_fsdp-3"]):
        phase = name.split("-")[0]
        train(phase, 1, tiny(phase, tmp_path / "out" / name, max_iters=1, seed=seed))
    config = parse(TrainConfig, ["--init_from=resume", "--device=cpu"], TRAINER)
    assert (config.out_dir, config.seed) == ("out/nanoGPT-2", 1)
    train("phase3_fsdp", 1, tiny("phase3_fsdp", tmp_path / "out", max_iters=1, seed=3))
    assert parse(TrainConfig, ["--init_from=resume", "--device=cpu"], TRAINER) == config, "out is of another phase"
    fsdp_trainer = ROOT / "phase3_fsdp" / "train.py"
    assert parse(FsdpConfig, ["--init_from=resume", "--device=cpu"], fsdp_trainer).out_dir == "out"


def test_a_second_torchrun_gets_a_new_directory(tmp_path):
    """Two runs by plain torchrun without out_dir do not share a directory; a third resumes the newest."""
    words = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", str(TRAINER)]
    words += make_flags(**{**TINY, "max_iters": 2, "device": "cpu"})
    outputs = []
    for more in ([], [], ["--init_from=resume", "--max_iters=3"]):
        program = Program(*words, *more, cwd=tmp_path)
        outputs.append(program.communicate()[0])
        assert program.returncode == 0, outputs[-1]
    (second,) = (tmp_path / "out").glob("nanoGPT-*")
    assert f"this run writes into out/{second.name}" in outputs[1]
    assert steps_saved(tmp_path / "out") == ["step-00000002"]
    assert steps_saved(second) == ["step-00000002", "step-00000003"]
    assert json.loads((second / "env.json").read_text())["config"]["out_dir"] == f"out/{second.name}"


@pytest.mark.parametrize("phase", ["nanoGPT", "phase3_fsdp"])
def test_a_run_saves_every_few_minutes(phase, tmp_path):
    """With --save_every_minutes, a run also saves between evaluations, and resumes there with the same losses."""
    fields = {"max_iters": 12, "eval_interval": 12}
    timed = tiny(phase, tmp_path / "timed", **fields, save_every_minutes=1e-9, keep_checkpoints=12)
    curve = train(phase, 2, timed)
    names = steps_saved(tmp_path / "timed")  # the ranks ask each other about once a second, first after the first step
    assert names[0] == "step-00000001" and names[-1] == "step-00000012" and len(names) > 2
    shutil.rmtree(tmp_path / "timed" / "checkpoints" / names[-1])
    (tmp_path / "timed" / "checkpoints" / "LATEST").write_text(names[-2] + "\n")
    assert train(phase, 2, dataclasses.replace(timed, init_from="resume")) == curve
    assert train(phase, 2, tiny(phase, tmp_path / "plain", **fields)) == curve
    assert steps_saved(tmp_path / "plain") == ["step-00000012"]
