"""Bad input gets one sentence that says what to do and exit code 2. It prints no traceback and loses no data."""

import dataclasses
import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

from bench.plan.plan import PlanConfig
from nanoGPT import export
from nanoGPT.checkpoint.shards import RestrictedUnpickler, SafeReader
from nanoGPT.distributed.runtime import pick_device, pick_dtype
from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA
from nanoGPT.job.command import command_line
from nanoGPT.train_config import TrainConfig, validate
from phase3_fsdp.fsdp import FsdpConfig
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import ROOT, open_data, tiny, train

SHAPE = ["--n_layer=1", "--n_embd=16", "--n_head=2", "--block_size=8"]
FLAGS = ["--device=cpu", "--max_iters=2", "--eval_iters=1", *SHAPE]


def run_trainer(out: Path, *words: str):
    """Run a trainer with a tiny configuration on the CPU."""
    return run_program("nanoGPT/train.py", f"--out_dir={out}", *FLAGS, *words)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--bach_size=3", ["--bach_size", "did you mean --batch_size?"]),
        ("--compile=maybe", ["maybe", "--compile"]),
        ("--batch_size", ["--batch_size needs a value", "--batch_size=VALUE"]),
        ("--dtype=float8", ["float8", "bfloat16"]),
        ("--dropout=1.5", ["in [0, 1)"]),
        ("--n_embd=130", ["--n_embd=130", "--n_head=4"]),
        ("--device=tpu", ["auto, cpu, cuda or mps"]),
        ("--dataset=shakespear", ["did you mean shakespeare?"]),
        ("--block_size=100000000", ["longer than the val split", "--block_size="]),
        ("--vocab_size=10", ["10 rows", "larger --vocab_size"]),
        ("--init_from=nosuch", ["neither scratch, resume"]),
        ("--init_from=resume", ["no checkpoint under", "--out_dir"]),
        ("--track=tensorboard", ["[track]"]),
        ("config/nope.py", ["there is no config file config/nope.py"]),
    ],
)
def test_a_wrong_flag_is_refused_with_one_sentence(flag, words, tmp_path):
    """An invalid flag or config file is refused before training starts, and the error says what would work."""
    extra = ["--n_head=4"] if "n_embd" in flag else []
    assert_refused(run_trainer(tmp_path / "run", flag, *extra), *words)


def test_a_config_file_may_set_known_fields_only(tmp_path):
    """If a config file has an unknown field, a wrong type or a syntax error, the message names file or field."""
    for line, words in [
        ("batch_sise = 4", ["batch_sise", "did you mean --batch_size?"]),
        ("batch_size = 'x'", ["--batch_size", "bad.py"]),
        ("batch_size = ", ["bad.py does not run", "SyntaxError"]),
        ("import nothing_here", ["ModuleNotFoundError"]),
    ]:
        (tmp_path / "bad.py").write_text(line + "\n")
        assert_refused(run_trainer(tmp_path / "run", str(tmp_path / "bad.py")), *words)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_a_blocked_path_is_named(name, tmp_path):
    """If a path is a directory instead of a file, or a file instead of a directory, the error names it."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / name
    path.mkdir() if "." in name else path.touch()
    assert_refused(run_trainer(tmp_path / "run"), name)


def test_an_indivisible_accumulation_lists_what_works():
    """If the micro-batches are not divisible by the ranks, the error lists numbers of both that work."""
    with pytest.raises(ConfigError, match=r"multiple of 3, such as 9, or one of \[1, 2, 4, 8\] ranks"):
        validate(TrainConfig(gradient_accumulation_steps=8), world_size=3)


def test_more_ranks_than_gpus_names_both_remedies(monkeypatch):
    """Four ranks on a machine with one GPU are refused, and the error suggests one rank or the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="GPUS=1, or --device=cpu"):
        pick_device("auto", 0, 4, 4)
    assert pick_device("auto", 0, 1, 1)[0] == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [pick_device("auto", rank, 4, 8)[0].index for rank in range(4)] == [0, 1, 2, 3]


def test_a_device_that_the_machine_or_the_trainer_does_not_have_is_refused(monkeypatch):
    """--device=cuda without a GPU, and --device=mps with several processes or FSDP, are refused. `auto` avoids them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="torch finds no GPU on this machine"):
        pick_device("cuda", 0, 1, 1)
    assert [pick_device("auto", 0, ranks, ranks)[0].type for ranks in (1, 2)] == ["mps", "cpu"]
    assert pick_device("auto", 0, 1, 1, FsdpConfig().supports_mps)[0].type == "cpu"
    with pytest.raises(ConfigError, match="--device=mps supports only one process"):
        pick_device("mps", 0, 1, 2)


def test_bfloat16_on_a_gpu_without_it_is_refused(monkeypatch):
    """On a GPU without bfloat16, the error names the GPU and suggests float16. There, --dtype=auto selects float16."""
    capabilities = {"cuda:0": (7, 5), "cuda:1": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[str(device)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match=r"not supported by this GPU \(Tesla T4\): use --dtype=float16"):
        pick_dtype("bfloat16", torch.device("cuda", 0))
    assert pick_dtype("auto", torch.device("cuda", 0))[0] == torch.float16
    assert pick_dtype("auto", torch.device("cuda", 1))[0] == torch.bfloat16
    assert pick_dtype("auto", torch.device("cpu"))[0] == torch.float32


def copy_dataset(tmp_path: Path) -> Path:
    """Copy the prepared dataset shakespeare_char and return the new directory."""
    folder = tmp_path / "my_data"
    shutil.copytree(DATA / "shakespeare_char", folder)
    return folder


@pytest.mark.parametrize("damage", ["truncated", "foreign", "missing"])
def test_a_damaged_dataset_is_named(damage, tmp_path):
    """If a .bin is truncated, changed or missing, or meta.json is broken, the error names the file."""
    folder = copy_dataset(tmp_path)
    if damage == "truncated":
        os.truncate(folder / "train.bin", 1001)
        words = ["train.bin has 1,001 bytes", "prepare it again"]
    elif damage == "foreign":
        content = bytearray((folder / "val.bin").read_bytes())
        content[7] ^= 1
        (folder / "val.bin").write_bytes(content)
        words = ["val.bin is not the file that was prepared"]
    else:
        (folder / "val.bin").unlink()
        words = ["val.bin is missing"]
    assert_refused(run_trainer(tmp_path / "run", f"--dataset={folder}"), *words)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    """If a token id exceeds the vocabulary of the tokenizer, the error names the id. The model raises no IndexError."""
    folder = copy_dataset(tmp_path)
    ids = np.full(2000, 75, dtype=np.uint16)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "val.bin").write_bytes(ids.tobytes())
    meta["splits"]["val"] = [
        {"name": "val.bin", "tokens": len(ids), "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
    ]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert_refused(run_trainer(tmp_path / "run", f"--dataset={folder}"), "token id 75", "vocabulary of 75")


def test_a_dataset_that_is_not_prepared_names_the_command():
    """If openwebtext is not prepared, the error contains the command that prepares it."""
    if (DATA / "openwebtext" / "meta.json").exists():
        pytest.skip("openwebtext is prepared on this machine")
    with pytest.raises(ConfigError, match="make data DATASET=openwebtext"):
        open_data("openwebtext", 8, 1, 1)


def test_resume_with_another_shape_or_tokenizer_is_refused(tmp_path):
    """Resuming with another depth, context or tokenizer is refused. The error names the flag and the saved value."""
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, max_iters=1))
    resume = ("nanoGPT/train.py", f"--out_dir={tmp_path}", "--init_from=resume", "--max_iters=2")
    assert_refused(run_program(*resume, "--n_layer=3"), "--n_layer=3", "n_layer=2")
    assert_refused(run_program(*resume, "--block_size=8"), "--block_size=8", "block_size=16")
    assert_refused(run_program(*resume, "--optimizer=muon"), "--optimizer=muon", "trained with optimizer=adamw")
    assert_refused(run_program(*resume, "--dataset=shakespeare"), "different tokenizer", "--dataset=shakespeare_char")
    assert_refused(run_program(*resume[:-1], "--max_iters=1", "--n_head=4"), "--n_head=4")
    assert run_program(*resume).code == 0
    assert_refused(run_program(*resume[:-1], "--max_iters=1"), "is past it: raise --max_iters")


class MaliciousPickle:
    """A pickle that would run a command when it is opened."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return (os.system, (f"touch {self.witness}",))


class MaliciousGetattr:
    def __reduce__(self):
        return (getattr, (TensorProperties, "__init__"))


def test_a_malicious_ckpt_is_not_opened(tmp_path):
    """A ckpt.pt that would run code is refused, and its code does not run."""
    witness = tmp_path / "ran"
    torch.save({"model": MaliciousPickle(witness)}, tmp_path / "ckpt.pt")
    assert_refused(run_trainer(tmp_path / "run", f"--init_from={tmp_path}"), "could run code")
    (tmp_path / "ckpt.pt").write_bytes(pickle.dumps(MaliciousPickle(witness)))
    assert_refused(run_trainer(tmp_path / "run", f"--init_from={tmp_path}"))
    assert not witness.exists()


def test_a_malicious_index_of_shards_is_not_opened(tmp_path):
    """A sharded checkpoint whose `.metadata` would run code is refused, and the code does not run."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(MaliciousPickle(tmp_path / "ran")))
    with pytest.raises(ConfigError, match="posix.system, which could run code"):
        SafeReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


def test_an_index_of_another_python_is_read():
    """Python 3.11.2 pickles the member of an enum as a call of getattr. Other calls of getattr are refused.

    Python 3.13 pickles a path with another name of its module.
    """
    member, file = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {_MEM_FORMAT_ENCODING: lambda member: (getattr, (type(member), member.name))}
    pickler.dump(member)
    assert b"getattr" in file.getvalue() and RestrictedUnpickler(io.BytesIO(file.getvalue())).load() is member
    with pytest.raises(pickle.UnpicklingError, match="could run code"):
        RestrictedUnpickler(io.BytesIO(pickle.dumps(MaliciousGetattr()))).load()
    for module in (b"pathlib", b"pathlib._local"):
        index = b"c" + module + b"\nPosixPath\n(V/run\ntR."
        assert RestrictedUnpickler(io.BytesIO(index)).load() == Path("/run")


def test_a_boolean_flag_needs_no_value():
    """A boolean flag without a value means True. If a required flag is missing, the error names it."""
    assert command_line(PlanConfig, ["--json"]).json and command_line(PlanConfig, ["--json", "--gpus=2"]).gpus == 2
    assert not command_line(PlanConfig, ["--json", "False"]).json
    with pytest.raises(ConfigError, match="--out_dir is missing: add --out_dir=VALUE"):
        command_line(export.main, ["--to=x"])


def test_a_port_in_use_is_named(tmp_path):
    """If the rendezvous port of a multi-node job is in use, the error names the port and MASTER_PORT."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        words = ["operate.launch", "--gpus=1", "--nnodes=2", "nanoGPT/train.py", f"--out_dir={tmp_path}"]
        port = str(listener.getsockname()[1])
        assert_refused(run_program(*words, MASTER_PORT=port), f"port {port} is in use", "MASTER_PORT")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes=2", "--node_rank=1", "--master_addr=nowhere.invalid", "nanoGPT/train.py"], "cannot be resolved"),
        (["--nnodes=2", "--node_rank=2", "nanoGPT/train.py"], "NODE_RANK"),
        (["phase9_none/train.py"], "give nanoGPT/train.py"),
        (["--gpus=1"], "name the trainer"),
        (["--gpus=3", "nanoGPT/train.py", "--device=cpu", "--out_dir=/tmp/never-made"], "multiple of 3"),
    ],
)
def test_the_launcher_refuses_wrong_arguments(words, message):
    """An unknown master, a wrong node rank, a missing trainer, or ranks that do not divide the micro-batches, are
    refused before any rank starts."""
    outcome = run_program("operate.launch", *words)
    assert_refused(outcome, message)
    assert "rank(s)" not in outcome.output


def test_help_lists_every_field_with_underscores():
    """--help exits with code 0 and lists every field of the dataclass."""
    outcome = run_program("phase3_fsdp/train.py", "--help", COLUMNS="200")
    assert outcome.code == 0
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name} " in outcome.output, field.name


def test_make_prints_the_error_and_fails(python):
    """With a bad flag, `make` prints the error of the trainer and fails, without a traceback."""
    environment = {**os.environ, "MAKEFLAGS": "", "MAKELEVEL": "0"}
    cases = [(["baseline", "ARGS=--bach_size=3"], "did you mean"), (["phase2", "ARGS=--kernels=x"], "use all, none")]
    for words, message in cases:
        words = ["--old-file=.venv/.core", f"PY={python}", *words]  # so that make does not install packages
        completed = subprocess.run(["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True)
        output = completed.stdout + completed.stderr
        assert completed.returncode != 0 and message in output and "Traceback" not in output, completed
