"""Weights & Biases, without a network: names, a run that continues after a resume, and missing credentials."""

from pathlib import Path

import pytest

from tests.helpers.programs import assert_refused, make_flags, run_program
from tests.helpers.training import TINY

NAMES = {"WANDB_PROJECT": "our-project", "WANDB_NAME": "our-run", "WANDB_RUN_GROUP": "our-group"}


def read_offline_runs(out: Path) -> dict[str, list[bytes]]:
    """Return the records that Weights & Biases wrote in its offline mode: one file per start, by the id of the run."""
    records: dict[str, list[bytes]] = {}
    for path in sorted((out / "wandb").glob("offline-run-*/run-*.wandb")):
        records.setdefault(path.stem.removeprefix("run-"), []).append(path.read_bytes())
    return records


def test_a_resumed_run_continues_its_wandb_run(tmp_path):
    """The run has the project, the name and the group of the environment. After a resume, it has the same id."""
    out = tmp_path / "run"
    fields = {**TINY, "out_dir": out, "track": "wandb", "max_iters": 3}
    for changes in ({}, {"init_from": "resume", "max_iters": 6}):
        outcome = run_program("nanoGPT/train.py", *make_flags(**{**fields, **changes}), WANDB_MODE="offline", **NAMES)
        assert outcome.code == 0 and "--track=wandb failed" not in outcome.output, outcome.output
    ((run_id, starts),) = read_offline_runs(out).items()
    assert (out / "wandb_run_id").read_text().strip() == run_id and len(starts) == 2
    for records in starts:
        assert all(name.encode() in records for name in NAMES.values())
        assert b"grad_norm" in records and b"val_loss" in records


@pytest.mark.parametrize("words", [["operate.launch", "--gpus=2", "nanoGPT/train.py"], ["nanoGPT/train.py"]])
def test_missing_credentials_are_one_sentence_before_the_run(words, tmp_path):
    """Without a login, a key or the offline mode, no rank starts, and nothing is written."""
    variables = {"WANDB_MODE": "", "WANDB_API_KEY": "", "WANDB_IDENTITY_TOKEN_FILE": "", "HOME": str(tmp_path)}
    flags = make_flags(**{**TINY, "out_dir": tmp_path / "run", "track": "wandb"})
    assert_refused(run_program(*words, *flags, **variables), "--track=wandb has no credentials", "WANDB_API_KEY")
    assert not (tmp_path / "run").exists()
