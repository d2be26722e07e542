"""What bad input gets: one sentence that says what to do, exit code 2, no traceback, nothing lost."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.plan.plan import PlanConfig
from nanoGPT import export
from nanoGPT.cli.command_line import command_line
from nanoGPT.distributed.runtime import pick_device, pick_dtype
from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA
from nanoGPT.job.parse import parse
from nanoGPT.launch import master_port
from nanoGPT.train_config import TrainConfig, validate
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import ROOT, tiny, train

SHAPE = ["--n_layer=1", "--n_embd=16", "--n_head=2", "--block_size=8"]
FLAGS = ["--device=cpu", "--max_iters=2", "--eval_iters=1", *SHAPE]


def attempt(out: Path, *words: str, trainer: str = "nanoGPT/train.py", **environment: str):
    return run_program(trainer, f"--out_dir={out}", *FLAGS, *words, **environment)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--bach_size=3", ["--bach_size", "did you mean --batch_size?"]),
        ("--zzz=3", ["--zzz", "--help"]),
        ("--batch_size=four", ["--batch_size", "four"]),
        ("--compile=maybe", ["maybe", "--compile"]),
        ("--batch_size", ["--batch_size needs a value", "--batch_size=VALUE"]),
        ("stray", ["stray"]),
        ("--dtype=float8", ["float8", "bfloat16"]),
        ("--batch_size=0", ["--batch_size=0", "1 or more"]),
        ("--gradient_accumulation_steps=0", ["1 or more"]),
        ("--max_iters=-5", ["--max_iters=-5"]),
        ("--learning_rate=-1", ["above 0"]),
        ("--learning_rate=nan", ["above 0"]),
        ("--dropout=1.5", ["from 0 up to"]),
        ("--beta2=1", ["--beta2=1", "from 0 up to"]),
        ("--min_lr=-1e-5", ["--min_lr=-1e-05", "0 or more"]),
        ("--keep_checkpoints=1", ["3 or more"]),
        ("--n_embd=130", ["--n_embd=130", "--n_head=4"]),
        ("--device=tpu", ["auto, cpu, cuda or mps"]),
        ("--dataset=nope", ["there is no dataset nope"]),
        ("--dataset=shakespear", ["did you mean shakespeare?"]),
        ("--block_size=100000000", ["longer than the train split", "--block_size="]),
        ("--vocab_size=10", ["10 rows", "larger --vocab_size"]),
        ("--init_from=nosuch", ["neither scratch, resume"]),
        ("--init_from=gpt2x", ["did you mean gpt2?"]),
        ("--init_from=", ["neither scratch, resume"]),
        ("--seed=46116860184273879040000000", ["--seed=", "up to"]),
        ("--batch_size=999999999999", ["--batch_size=", "up to"]),
        ("--init_from=resume", ["no checkpoint under", "--out_dir"]),
        ("--track=wandb", ["[track]"]),
        ("config/nope.py", ["there is no config file config/nope.py"]),
    ],
)
def test_a_wrong_flag_is_one_sentence(flag, words, tmp_path):
    """A flag or file that cannot be is refused before anything starts, with what would work."""
    extra = ["--n_head=4"] if "n_embd" in flag else []
    assert_refused(attempt(tmp_path / "run", flag, *extra), *words)


def test_a_config_file_may_set_known_fields_only(tmp_path):
    """A misspelt, mistyped or broken line in a config file names the file and the field."""
    for line, words in [
        ("batch_sise = 4", ["batch_sise", "did you mean batch_size?"]),
        ("batch_size = 'x'", ["--batch_size", "bad.py"]),
        ("batch_size = ", ["bad.py does not run", "SyntaxError"]),
        ("import nothing_here", ["ModuleNotFoundError"]),
    ]:
        (tmp_path / "bad.py").write_text(line + "\n")
        assert_refused(attempt(tmp_path / "run", str(tmp_path / "bad.py")), *words)


def test_a_config_file_sets_values_of_the_fields_type(tmp_path):
    """A string in a config file becomes what the flag would have become."""
    (tmp_path / "good.py").write_text('compile = "False"\nlearning_rate = "6e-4"\nn_layer = 3\n')
    config = parse(TrainConfig, [str(tmp_path / "good.py"), "--device", "cpu"], ROOT / "nanoGPT" / "train.py")
    assert (config.compile, config.learning_rate, config.n_layer, config.device) == (False, 6e-4, 3, "cpu")


def test_a_flag_may_be_two_words(monkeypatch):
    """`--device cpu` is `--device=cpu`, also for the defaults that follow the device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = parse(TrainConfig, ["--device", "cpu", "--out_dir", "/x/conf.py"], ROOT / "nanoGPT" / "train.py")
    assert config.n_embd == 128 and not config.compile and config.out_dir == "/x/conf.py"
    assert parse(TrainConfig, [], ROOT / "nanoGPT" / "train.py").n_embd == 768


@pytest.mark.parametrize(
    "place",
    [{"RANK": "5", "WORLD_SIZE": "2"}, {"RANK": "abc"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "0"}],
)
def test_nonsense_in_the_environment(place, tmp_path):
    """RANK and WORLD_SIZE that cannot be are one sentence, not a wait for ranks that never come."""
    assert_refused(attempt(tmp_path / "run", **place), "the environment has")


@pytest.mark.parametrize("name", ["metrics.jsonl", "heartbeat", "env.json", "checkpoints"])
def test_something_in_the_way(name, tmp_path):
    """A directory where a file goes, or the other way round, is named."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / name
    path.mkdir() if "." in name else path.touch()
    assert_refused(attempt(tmp_path / "run"), name)


@pytest.mark.parametrize("harm", ["shape", "missing", "heads", "layers", "no model_args", "a list"])
def test_weights_that_do_not_fit(harm, tmp_path):
    """Weights of another shape than their own description, or a description of no GPT-2, are refused, not broadcast."""
    from nanoGPT.model import GPT, GPTConfig

    shape = GPTConfig(1, 2, 16, 8, False, 75)
    content: Any = {"model": dict(GPT(shape).state_dict()), "model_args": dict(shape.__dict__)}
    if harm == "shape":
        content["model"]["transformer.h.0.ln_1.weight"] = torch.ones(1)
    elif harm == "missing":
        del content["model"]["transformer.wpe.weight"]
    elif harm == "heads":
        content["model_args"]["n_head"] = 3
    elif harm == "layers":
        content["model_args"]["n_layer"] = "x"
    elif harm == "no model_args":
        del content["model_args"]
    else:
        content = [content]
    torch.save(content, tmp_path / "ckpt.pt")
    assert_refused(attempt(tmp_path / "run", f"--init_from={tmp_path}"), str(tmp_path))


def test_accumulation_lists_what_works():
    """Micro-batches that do not divide among the ranks: the sentence lists the numbers that do."""
    with pytest.raises(ConfigError, match=r"multiple of 3, such as 9, or one of \[1, 2, 4, 8\] ranks"):
        validate(TrainConfig(gradient_accumulation_steps=8), world_size=3)


def test_a_huge_accumulation_is_refused_at_once():
    """Of two thousand million micro-batches the numbers of ranks that work are not looked for one by one."""
    with pytest.raises(ConfigError, match=r"one of \[1\] ranks"):
        validate(TrainConfig(gradient_accumulation_steps=2**31 - 1), world_size=2)


def test_accumulation_is_checked_before_ranks_start():
    """`make baseline GPUS=3` with 16 micro-batches fails with the sentence and starts no rank."""
    ended = run_program("nanoGPT.launch", "--gpus=3", "nanoGPT/train.py", "--device=cpu", "--out_dir=/tmp/never-made")
    assert_refused(ended, "multiple of 3")
    assert "rank(s)" not in ended.output


def test_more_ranks_than_gpus_names_both_remedies(monkeypatch):
    """Four ranks on a machine with one GPU: use one, or the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="GPUS=1, or --device=cpu"):
        pick_device("auto", 0, 4, 4)
    assert pick_device("auto", 0, 1, 1)[0] == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [pick_device("auto", rank, 4, 8)[0].index for rank in range(4)] == [0, 1, 2, 3]


def test_apples_gpu_is_for_one_process(monkeypatch):
    """On a Mac one process takes its GPU by itself; several take the CPU, and cannot be given the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert [pick_device("auto", 0, ranks, ranks)[0].type for ranks in (1, 2)] == ["mps", "cpu"]
    with pytest.raises(ConfigError, match="--device=mps runs one process"):
        pick_device("mps", 0, 1, 2)


def test_cuda_without_a_gpu(monkeypatch):
    """--device=cuda on a machine without a GPU says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no GPU that torch can use"):
        pick_device("cuda", 0, 1, 1)


def test_bfloat16_on_hardware_without_it(monkeypatch):
    """A GPU without bfloat16 is named, with float16 as the way out; auto takes float16 there by itself."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match="Tesla T4 lacks: use --dtype=float16"):
        pick_dtype("bfloat16", torch.device("cuda", 0))
    assert pick_dtype("auto", torch.device("cuda", 0))[0] == torch.float16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: not including_emulation)
    assert pick_dtype("auto", torch.device("cuda", 0))[0] == torch.bfloat16
    assert pick_dtype("auto", torch.device("cpu"))[0] == torch.float32


def copy_of_dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "my_data"
    shutil.copytree(DATA / "shakespeare_char", folder)
    return folder


@pytest.mark.parametrize("change", [{"vocab_size": "x"}, {"vocab_size": -1}, {"name": "bert"}, {"sha256": None}])
def test_a_tokenizer_that_cannot_be(change, tmp_path):
    """A meta.json whose tokenizer is unknown or not described is refused before it is needed."""
    folder = copy_of_dataset(tmp_path)
    meta = json.loads((folder / "meta.json").read_text())
    meta["tokenizer"] |= change
    (folder / "meta.json").write_text(json.dumps(meta))
    assert_refused(attempt(tmp_path / "run", f"--dataset={folder}"), "meta.json is not that of a dataset")


@pytest.mark.parametrize("harm", ["truncated", "foreign", "missing", "meta"])
def test_a_damaged_dataset_is_named(harm, tmp_path):
    """A truncated, foreign or missing .bin, or a broken meta.json, is named with the command that mends it."""
    folder = copy_of_dataset(tmp_path)
    if harm == "truncated":
        os.truncate(folder / "train.bin", 1001)
        words = ["train.bin has 1,001 bytes", "prepare it again"]
    elif harm == "foreign":
        content = bytearray((folder / "val.bin").read_bytes())
        content[7] ^= 1
        (folder / "val.bin").write_bytes(content)
        words = ["val.bin is not the file that was prepared"]
    elif harm == "missing":
        (folder / "val.bin").unlink()
        words = ["val.bin is missing"]
    else:
        (folder / "meta.json").write_text("{}")
        words = ["meta.json is not that of a dataset"]
    assert_refused(attempt(tmp_path / "run", f"--dataset={folder}"), *words)


def test_a_token_beyond_the_vocabulary(tmp_path):
    """A dataset whose ids go beyond its tokenizer's vocabulary is refused with the id, not with an index error."""
    import hashlib

    folder = copy_of_dataset(tmp_path)
    ids = np.full(2000, 75, dtype=np.uint16)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "val.bin").write_bytes(ids.tobytes())
    meta["splits"]["val"] = [
        {"name": "val.bin", "tokens": len(ids), "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
    ]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert_refused(attempt(tmp_path / "run", f"--dataset={folder}"), "token id 75", "vocabulary of 75")


def test_a_dataset_that_is_not_prepared_names_the_command():
    """openwebtext, which nobody prepared here, is refused with the command that prepares it."""
    if (DATA / "openwebtext" / "meta.json").exists():
        pytest.skip("openwebtext is prepared on this machine")
    ended = run_program("nanoGPT/train.py", "--device=cpu", "--dataset=openwebtext", "--out_dir=/tmp/never-made")
    assert_refused(ended, "make data DATASET=openwebtext")


def test_out_dir_must_be_writable():
    """An out_dir that cannot be made is refused."""
    assert_refused(attempt(Path("/proc/x")), "/proc/x cannot be written")


def test_a_new_run_does_not_touch_an_old_one(tmp_path):
    """Starting from scratch where checkpoints are stops, and leaves them."""
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, max_iters=1))
    assert_refused(attempt(tmp_path), "holds checkpoints up to step-00000001", "--init_from=resume")
    assert (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").exists()


def test_resume_with_another_shape_or_tokenizer(tmp_path):
    """Resuming with another depth, context or tokenizer names the flag and what the checkpoint has."""
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, max_iters=1, eval_iters=1))
    resume = ("nanoGPT/train.py", f"--out_dir={tmp_path}", "--init_from=resume", "--max_iters=2")
    assert_refused(run_program(*resume, "--n_layer=3"), "--n_layer=3", "n_layer=2")
    assert_refused(run_program(*resume, "--block_size=8"), "--block_size=8", "block_size=16")
    assert_refused(run_program(*resume, "--dataset=shakespeare"), "another tokenizer", "--dataset=shakespeare_char")
    assert_refused(run_program(*resume[:-1], "--max_iters=1", "--n_head=4"), "--n_head=4")
    assert run_program(*resume).code == 0
    assert_refused(run_program(*resume[:-1], "--max_iters=1"), "beyond it: raise --max_iters")


def test_an_empty_checkpoint_directory_falls_back(tmp_path):
    """A newest checkpoint that is an empty directory is skipped with the reason, and the one before is resumed."""
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, max_iters=1, eval_iters=1))
    (tmp_path / "checkpoints" / "step-00000007").mkdir()
    ended = run_program("nanoGPT/train.py", f"--out_dir={tmp_path}", "--init_from=resume", "--max_iters=2")
    assert ended.code == 0 and "skipping step-00000007: it has no manifest.json" in ended.output, ended


class Runs:
    """A pickle that would run a command when opened."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return (os.system, (f"touch {self.witness}",))


def test_a_malicious_ckpt_is_not_opened(tmp_path):
    """A ckpt.pt that would run code is refused, and runs none."""
    witness = tmp_path / "ran"
    torch.save({"model": Runs(witness)}, tmp_path / "ckpt.pt")
    assert_refused(attempt(tmp_path / "run", f"--init_from={tmp_path}"), "could run code")
    (tmp_path / "ckpt.pt").write_bytes(pickle.dumps(Runs(witness)))
    assert_refused(attempt(tmp_path / "run", f"--init_from={tmp_path}"))
    assert not witness.exists()


def test_a_malicious_index_of_shards_is_not_opened(tmp_path):
    """A `.metadata` of a sharded checkpoint that would run code is refused, and runs none."""
    from nanoGPT.checkpoint.shards import SafeReader

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(ConfigError, match="posix.system, which could run code"):
        SafeReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", ["nothing", "text", "other"])
def test_a_directory_that_is_no_model(content, tmp_path):
    """--init_from a directory without a model, or with a broken one, says what it should hold."""
    folder = tmp_path / "model"
    folder.mkdir()
    if content == "text":
        (folder / "ckpt.pt").write_text("not a checkpoint")
    if content == "other":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    assert_refused(attempt(tmp_path / "run", f"--init_from={folder}"))


def test_weights_that_cannot_be_downloaded(tmp_path):
    """--init_from=gpt2 without a network is one sentence."""
    assert_refused(
        attempt(tmp_path / "run", "--init_from=gpt2", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)), "gpt2 could not be"
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--n_layer=x", "--n_layer=x cannot be: give None or a whole number"),
        ("--gpus=x", "--gpus=x cannot be: give a whole number"),
        ("--price=x", "--price=x cannot be: give None or a number"),
        ("--blocksize=1", "--blocksize=1 is unknown; did you mean --block_size?"),
        ("--zzz=1", "--zzz=1 is unknown; --help lists all flags"),
        ("--gpus", "--gpus needs a value: write --gpus=VALUE"),
        ("--json=maybe", "--json=maybe cannot be: give one of 'True', 'False'"),
    ],
)
def test_what_tyro_says_is_said_in_a_sentence(word, said):
    """A wrong type, an unknown flag, or one without its value."""
    with pytest.raises(ConfigError) as refused:
        command_line(PlanConfig, [word])
    assert str(refused.value) == said


def test_the_flag_of_a_switch_needs_no_value():
    """Alone it turns on; and a command whose flag is missing says which."""
    assert command_line(PlanConfig, ["--json"]).json and command_line(PlanConfig, ["--json", "--gpus=2"]).gpus == 2
    assert not command_line(PlanConfig, ["--json", "False"]).json
    with pytest.raises(ConfigError, match="^--out_dir is missing: give --out_dir=VALUE, the run$"):
        command_line(export.main, ["--to=x"])


@pytest.mark.parametrize("port", ["http", "0", "65536"])
def test_a_port_that_cannot_be(port, monkeypatch):
    """A MASTER_PORT that no socket takes is one sentence."""
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"MASTER_PORT={port} is no port"):
        master_port()


def test_a_port_in_use(tmp_path):
    """When the rendezvous port of a job of several nodes is taken, the sentence names it and MASTER_PORT."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        words = ["nanoGPT.launch", "--gpus=1", "--nnodes=2", "nanoGPT/train.py", f"--out_dir={tmp_path}"]
        port = str(taken.getsockname()[1])
        assert_refused(run_program(*words, MASTER_PORT=port), f"port {port} is in use", "MASTER_PORT")


def test_a_port_in_use_under_torchrun(tmp_path):
    """The same for ranks that torchrun started with a fixed port."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert_refused(attempt(tmp_path / "run", **place), f"port {port} is in use")


def test_the_launcher_refuses_what_is_no_trainer():
    """A phase without a trainer, a wrong node rank, or no trainer at all: one sentence."""
    assert_refused(run_program("nanoGPT.launch", "phase9_none/train.py"), "give nanoGPT/train.py")
    assert_refused(run_program("nanoGPT.launch", "--nnodes=2", "--node_rank=2", "nanoGPT/train.py"), "NODE_RANK")


@pytest.mark.parametrize("address", ["", "nowhere.invalid"])
def test_a_node_that_cannot_be_found(address):
    """A MASTER_ADDR that is no host is one sentence, before anything waits for it."""
    words = ["nanoGPT.launch", "--nnodes=2", "--node_rank=1", f"--master_addr={address}", "nanoGPT/train.py"]
    assert_refused(run_program(*words), f"MASTER_ADDR={address} is no host")
    assert_refused(run_program("nanoGPT.launch", "--gpus=0", "nanoGPT/train.py"), "at least 1")
    assert_refused(run_program("nanoGPT.launch", "--gpus=1"), "name the trainer")
    assert_refused(run_program("nanoGPT.launch", "--gpsu=1", "nanoGPT/train.py"))


def test_prepare_refuses_what_is_no_text(tmp_path):
    """One's own text that is missing, binary or too short is refused."""
    prepare = "nanoGPT/data/shakespeare_char/prepare.py"
    assert_refused(run_program(prepare, f"--input={tmp_path}/none.txt"), "cannot be read")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 200)
    assert_refused(run_program(prepare, f"--input={tmp_path}/binary.txt"), "UTF-8")
    (tmp_path / "short.txt").write_text("short")
    assert_refused(run_program(prepare, f"--input={tmp_path}/short.txt"), "at least 100")


def test_help_lists_every_field_with_underscores():
    """--help exits 0 and lists every field of the dataclass."""
    import dataclasses

    ended = run_program("phase3_fsdp/train.py", "--help", COLUMNS="200")
    assert ended.code == 0
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name} " in ended.output, field.name


def test_through_make_it_is_a_sentence_and_a_failure():
    """`make` passes a bad flag's sentence and failure on, without a traceback."""
    environment = {**os.environ, "MAKEFLAGS": "", "MAKELEVEL": "0"}
    wrong = [(["baseline", "ARGS=--bach_size=3"], "did you mean"), (["phase2", "ARGS=--kernels=x"], "give all, none")]
    for words, said in wrong:
        if not Path(sys.executable).is_relative_to(ROOT / ".venv"):
            pytest.skip("make uses .venv, and these tests run from another environment")
        words = ["--old-file=.venv/.core", *words]  # a test installs nothing
        done = subprocess.run(["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr, done
