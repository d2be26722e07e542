"""Ranks and nodes that do not run the same, or that cannot start: named on all of them, before anything is trained."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from nanoGPT.dataset import TokenData
from nanoGPT.distributed.agreement import find_disagreement
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.files import DATA, sha256_of
from nanoGPT.job import run_description
from nanoGPT.job.parse import config_from_launcher
from nanoGPT.job.run_description import describe_run
from nanoGPT.launch import handed
from tests.helpers.programs import Program, assert_refused, run_program
from tests.helpers.training import CONFIGS, TINY, tiny, train
from workshop.ranks import RankFailed, run_on_ranks

COUNTING = """
import time as _time
seed = _time.time_ns() % 2**31
with open({count!r}, "a") as _file:
    _file.write("executed\\n")
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


def start_nodes(trainer: str, words: list[list[str]]) -> list[Program]:
    """Start one launcher for each node on this machine; `words` are each node's own."""
    place = {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    base = [f"--nnodes={len(words)}", "--gpus=1", "--master_addr=127.0.0.1"]
    return [
        Program("nanoGPT.launch", *base, f"--node_rank={node}", trainer, *own, **place)
        for node, own in enumerate(words)
    ]


def outcomes(nodes: list[Program]) -> list[tuple[int, list[str]]]:
    """Return each node's exit code and its lines that begin with "error"."""
    try:
        outputs = [node.communicate()[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [
        (node.returncode, [line for line in output.splitlines() if line.startswith("error")])
        for node, output in zip(nodes, outputs, strict=True)
    ]


def flags(out: Path, **fields) -> list[str]:
    return [f"--{name}={value}" for name, value in {**TINY, **fields, "out_dir": out}.items()]


def test_nodes_with_other_flags_are_named(tmp_path):
    """Two nodes with another learning rate end with exit code 2 and a sentence that names the flag, both values and the
    ranks; nothing was trained."""
    words = [flags(tmp_path), flags(tmp_path, learning_rate=0.5)]
    for code, errors in outcomes(start_nodes("phase1_zero1/train.py", words)):
        assert code == 2
        assert "--learning_rate is 0.002 on rank 0 and 0.5 on rank 1" in errors[0], errors
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("wrong", ["--dataset=nosuch", "--datset=x"])
def test_a_node_that_cannot_start_is_named_on_the_others(node, wrong, tmp_path):
    """A node with a missing dataset or a misspelt flag prints its sentence, and the other repeats it at once."""
    words = [flags(tmp_path), flags(tmp_path)]
    words[node].append(wrong)
    found = outcomes(start_nodes("nanoGPT/train.py", words))
    assert [code for code, _ in found] == [2, 2]
    (own,), (other,) = found[node][1], found[1 - node][1]
    assert other == own.replace("error: ", f"error: node {node} cannot start: ")


def test_a_config_file_is_executed_once(tmp_path):
    """A config file that computes another seed at each execution is executed once for two nodes, and once for the ranks
    of one; all of them train with what it set."""
    file, count = tmp_path / "clock.py", tmp_path / "count"
    file.write_text(COUNTING.format(count=str(count)))
    words = [[str(file), *flags(tmp_path / "run", max_iters=1)] for _ in range(2)]
    assert [code for code, _ in outcomes(start_nodes("nanoGPT/train.py", words))] == [0, 0]
    assert count.read_text() == "executed\n"
    ranks = ["--gpus=2", "nanoGPT/train.py", str(file), *flags(tmp_path / "two", max_iters=1)]
    assert run_program("nanoGPT.launch", *ranks).code == 0 and count.read_text() == "executed\n" * 2


def test_torchrun_compares_ranks_too(tmp_path):
    """Under plain torchrun every rank executes the config file: ranks that get other values from it are refused."""
    file = tmp_path / "clock.py"
    file.write_text(COUNTING.format(count=str(tmp_path / "count")))
    words = ["--standalone", "--nproc_per_node=2", "nanoGPT/train.py", str(file), *flags(tmp_path)]
    ended = run_program("torch.distributed.run", *words)
    assert ended.code != 0 and "the ranks do not agree: --seed is " in ended.output


def start_plain(node: int, port: str, out: Path, *wrong: str, trainer: str = "nanoGPT/train.py") -> Program:
    """Start one rank of two, each on a machine of its own, as another program than the launcher may do."""
    environment = {"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return Program(trainer, *flags(out), *wrong, **environment)


def test_a_rank_that_cannot_start_tells_other_nodes_without_a_launcher(tmp_path):
    """A rank of another node that refuses its dataset ends rank 0 too, with the rank and the reason."""
    port = free_port()
    found = outcomes([start_plain(0, port, tmp_path), start_plain(1, port, tmp_path, "--dataset=nosuch")])
    assert [code for code, _ in found] == [2, 2]
    assert "error: rank 1 cannot start: there is no dataset nosuch" in found[0][1][0]


def disagree_in_place(out: str) -> None:
    import torch.distributed as dist

    from nanoGPT import train

    train.train(tiny("nanoGPT", Path(out), seed=dist.get_rank()))


def test_ranks_of_a_notebook_are_compared(tmp_path):
    """Ranks that have a process group already, as a notebook's, are compared in it."""
    with pytest.raises(RankFailed, match="--seed is 0 on rank 0 and 1 on rank 1"):
        run_on_ranks(disagree_in_place, 2, str(tmp_path), show=False)


def describe(phase: str = "nanoGPT", **fields) -> dict[str, object]:
    config = tiny(phase, Path("out"), **fields)
    data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    return describe_run(config, data, create_runtime(config.device, config.dtype))


def test_what_ranks_must_have_alike(tmp_path, monkeypatch):
    """Data, code, versions, dtype, trainer and weights that differ are each named; another out_dir is not."""
    plain = describe()

    def difference(other: dict[str, object]) -> str:
        return find_disagreement([plain, other]) or "none"

    assert difference(describe()) == "none"
    assert "the trainer is " in difference(describe("phase1_zero1"))
    assert "the dtype is float32 on rank 0 and bfloat16 on rank 1" in difference(describe(dtype="bfloat16"))
    assert "the prepared data is" in difference({**describe(dataset="shakespeare"), "--dataset": plain["--dataset"]})
    monkeypatch.setattr(run_description, "version_of", lambda name: "0.1")
    assert "the version of torch is " in difference(describe())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ckpt.pt").write_text("x" * (1 + (name == "b")))
    sizes = [run_description.weights_digest(str(tmp_path / name)) for name in ("a", "b")]
    assert sizes[0] != sizes[1]
    (tmp_path / "run" / "checkpoints" / "step-00000005").mkdir(parents=True)
    assert run_description.weights_digest(str(tmp_path / "run")) == "step-00000005"


def test_a_change_of_the_code_is_seen(tmp_path, monkeypatch):
    """One changed line in any module of the baseline or of the phase changes the digest; a config file's does not."""
    for name in ("nanoGPT", "phase1_zero1"):
        (tmp_path / name / "config").mkdir(parents=True)
        (tmp_path / name / "train.py").write_text("one\n")
        (tmp_path / name / "config" / "small.py").write_text("one\n")
    monkeypatch.setattr(run_description, "PACKAGE", tmp_path / "nanoGPT")
    seen = [run_description.code_digest()]
    for change in ("nanoGPT/config/small.py", "nanoGPT/train.py", "phase1_zero1/train.py"):
        (tmp_path / change).write_text("two\n")
        seen.append(run_description.code_digest())
    assert seen[0] == seen[1] and len({*seen}) == 3


def test_a_long_list_of_ranks_is_shortened():
    """With many ranks the sentence names the first eight of each value."""
    described = [{"--seed": int(rank > 20)} for rank in range(64)]
    assert "0 on ranks 0, 1, 2, 3, 4, 5, 6, 7, ... and 1 on ranks 21, 22," in (find_disagreement(described) or "")


@pytest.mark.parametrize("phase", CONFIGS)
def test_the_launcher_hands_over_the_configuration(phase, tmp_path, monkeypatch):
    """A rank finds in its environment exactly the configuration that the launcher has parsed; without it, nothing."""
    config = tiny(phase, tmp_path, learning_rate=1 / 3, vocab_size=None)
    assert config_from_launcher(type(config)) is None
    for name, value in handed(config).items():
        monkeypatch.setenv(name, value)
    assert config_from_launcher(type(config)) == config


WRONG_ENVIRONMENTS = [
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR= and MASTER_PORT=: start ranks with torchrun or make"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "abc"}, "MASTER_PORT=abc is no port"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
    ({"TORCHELASTIC_MAX_RESTARTS": "many"}, "TORCHELASTIC_MAX_RESTARTS=many"),
    ({"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RESTART_COUNT": "-1"}, "TORCHELASTIC_RESTART_COUNT=-1"),
]


@pytest.mark.parametrize(("environment", "words"), WRONG_ENVIRONMENTS)
def test_an_environment_that_no_launcher_made_is_one_sentence(environment, words, tmp_path, monkeypatch):
    """RANK without an address, a port or counts that are no numbers: one sentence and exit code 2."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert_refused(run_program("nanoGPT/train.py", *flags(tmp_path), **environment), words)


def test_a_name_that_is_no_text_is_one_sentence(tmp_path):
    """An out_dir with a byte that is not UTF-8 is refused before anything is written."""
    assert_refused(run_program("nanoGPT/train.py", *flags(tmp_path / "run\udcff")), "is not valid UTF-8 text")
    assert list(tmp_path.iterdir()) == []


def test_waiting_times_must_fit(tmp_path):
    """A stall that is longer than the timeout of collectives would never be noticed: it is refused."""
    wrong = flags(tmp_path, timeout_minutes=1, stall_seconds=61)
    assert_refused(run_program("nanoGPT/train.py", *wrong), "--stall_seconds=61", "--timeout_minutes=1")
    assert_refused(run_program("nanoGPT/train.py", *flags(tmp_path, timeout_minutes=0)), "--timeout_minutes=0")


def test_a_node_that_does_not_come_is_named(tmp_path):
    """After --timeout_minutes the node that waits says who did not come, and exits with 2."""
    node = start_nodes("nanoGPT/train.py", [flags(tmp_path, timeout_minutes=0.02, stall_seconds=1), []])
    node[1].kill()
    (code, errors), _ = outcomes(node)
    assert code == 2 and "node 1 did not come" in errors[0]


# A rank that cannot start gives the others, here nobody, time to hear of it.
IMPATIENT = """
import datetime, runpy
from nanoGPT.distributed import process_group
process_group.LAST_WORDS = datetime.timedelta(seconds=0.5)
runpy.run_path("nanoGPT/train.py", run_name="__main__")
"""


def test_ranks_that_do_not_come_are_one_sentence(tmp_path):
    """Without a launcher, too, ranks that have not all met within --timeout_minutes are one sentence."""
    program = tmp_path / "impatient.py"
    program.write_text(IMPATIENT)
    words = ["--timeout_minutes=0.02", "--stall_seconds=1"]
    rank = start_plain(0, free_port(), tmp_path, *words, trainer=str(program))
    ((code, errors),) = outcomes([rank])
    assert code == 2 and "not all of the 2 ranks have met" in errors[0], errors


def test_a_resume_on_other_data_is_refused(tmp_path):
    """A run whose dataset was prepared again from another text with the same characters is not continued on it, but its
    weights may be evaluated there or be the start of a new run."""
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(DATA / "shakespeare_char", data)
    train("nanoGPT", 1, tiny("nanoGPT", run, dataset=str(data), max_iters=5))
    meta, val = json.loads((data / "meta.json").read_text()), (data / "val.bin").read_bytes()
    (data / "val.bin").write_bytes(val[2:] + val[:2])
    meta["splits"]["val"][0]["sha256"] = sha256_of(data / "val.bin")
    (data / "meta.json").write_text(json.dumps(meta))
    ended = run_program("nanoGPT/train.py", *flags(run, dataset=data, init_from="resume", max_iters=8))
    assert_refused(ended, "is not the data that step-00000005 was trained on", "val.bin")
    words = [f"--out_dir={run}", f"--dataset={data}", "--device=cpu", "--eval_iters=1"]
    assert run_program("phase3_fsdp/evaluate.py", *words).code == 0
    start = flags(tmp_path / "new", dataset=data, init_from=run, max_iters=1)
    assert run_program("nanoGPT/train.py", *start).code == 0
