"""Starting and ending a job: real launchers, real signals, real exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT, TINY, gap, tiny, train
from workshop.ranks import losses

LONG = {**TINY, "max_iters": 100000, "eval_interval": 100000, "stall_seconds": 1000}


def words(**fields) -> list[str]:
    return [f"--{name}={value}" for name, value in fields.items()]


def launch(out: Path, ranks: int, phase: str = "phase3_fsdp", **fields) -> subprocess.Popen:
    """`python -m nanoGPT.launch` in a process of its own."""
    command = [sys.executable, "-m", "nanoGPT.launch", f"--gpus={ranks}", f"{phase}/train.py"]
    return subprocess.Popen(
        [*command, *words(**{**LONG, **fields, "out_dir": out, "device": "cpu"})],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def await_steps(out: Path, steps: int, process: subprocess.Popen) -> None:
    for _ in range(600):
        if (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text().count("\n") >= steps:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no progress within 60 seconds")


def rank_pids(out: Path) -> list[int]:
    return [json.loads(p.read_text())["pid"] for p in sorted((out / "heartbeat").glob("rank*.json"))]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_job_from_start_to_sample(tmp_path):
    """Four launched ranks train to the end, exit 0, print each logged line once, and a sample of text."""
    process = launch(tmp_path, 4, max_iters=6)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert output.count("step     3  loss") == 1 and "A sample from" in output and "Traceback" not in output
    assert "device cpu (found no GPU)" in output or "device cpu (asked for)" in output
    assert gap(losses(tmp_path), train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", max_iters=6))) < 1e-5


def test_sigterm_saves_and_resumes(tmp_path):
    """SIGTERM to the launcher ends the step, saves and exits 0; the line it prints resumes, with exact losses."""
    process = launch(tmp_path / "cut", 2, max_iters=300, dropout=0.2)
    await_steps(tmp_path / "cut", 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "--init_from=resume" in output and "A sample" not in output, output
    stopped = max(losses(tmp_path / "cut"))
    assert (tmp_path / "cut" / "checkpoints" / f"step-{stopped + 1:08d}").is_dir()
    ends = {"max_iters": stopped + 4, "lr_decay_iters": 300, "stall_seconds": 1000, "eval_interval": 100000}
    resumed = train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "cut", init_from="resume", **ends))
    whole = train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "whole", **ends))
    assert resumed == whole


def test_a_killed_rank_ends_the_job(tmp_path):
    """SIGKILL of one rank: the launcher names it, returns 137, and no other rank is left."""
    process = launch(tmp_path, 2)
    await_steps(tmp_path, 2, process)
    time.sleep(1.5)  # a heartbeat
    pids = rank_pids(tmp_path)
    os.kill(pids[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 137, output
    assert output.splitlines()[-1].startswith("error: rank 1: it was killed by SIGKILL"), output
    assert "Traceback" not in output
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_with_their_launcher(ranks, tmp_path):
    """SIGKILL of the launcher: its ranks end by themselves within seconds, also where there is only one."""
    process = launch(tmp_path, ranks, phase="nanoGPT")
    await_steps(tmp_path, 1, process)
    time.sleep(1.5)
    pids = rank_pids(tmp_path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not all(gone(pid) for pid in pids):
        time.sleep(0.1)
    assert len(pids) == ranks and all(gone(pid) for pid in pids), f"ranks {pids} were still there after 5 seconds"


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_before_training_ends_the_job(ranks, tmp_path):
    """SIGTERM while ranks start, at whatever moment, ends the job within seconds and leaves no rank."""
    for delay in (2.0, 3.0, 4.0):
        out = tmp_path / str(delay)
        process = launch(out, ranks, phase="nanoGPT")
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=40)
        assert process.returncode in (0, -15, 143) and "Traceback" not in output, (delay, process.returncode, output)
        assert process.returncode != 0 or "--init_from=resume" in output


def test_two_runs_do_not_share_a_directory(tmp_path):
    """A second run into a directory that a run is writing into is refused; the first goes on."""
    first = launch(tmp_path, 1, phase="nanoGPT")
    await_steps(tmp_path, 1, first)
    second = launch(tmp_path, 1, phase="nanoGPT")
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 2 and "another run is writing into" in output, output
    first.send_signal(signal.SIGTERM)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 0, output


def test_a_loss_that_blows_up_returns_3(tmp_path):
    """Through the launcher a loss that is not finite is one sentence and exit code 3."""
    process = launch(tmp_path, 2, learning_rate=1e30, grad_clip=0)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert "not finite" in output.splitlines()[-1] and output.count("error:") == 1


@pytest.mark.parametrize("phase", ["phase1_zero1", "phase3_fsdp"])
def test_torchrun_works_from_a_phase_directory(phase, tmp_path):
    """`cd phase3_fsdp && torchrun --standalone --nproc_per_node=2 train.py` trains to the end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    done = subprocess.run(
        [*torchrun, *words(**{**TINY, "out_dir": tmp_path, "max_iters": 2, "device": "cpu"})],
        cwd=ROOT / phase,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(losses(tmp_path)) == [0, 1]


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1"])
def test_two_nodes_on_loopback(phase, tmp_path):
    """Two launchers, each one node with one rank, are one job with the losses of one process."""
    (tmp_path / "run").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    node = [sys.executable, "-m", "nanoGPT.launch", "--gpus=1", "--nnodes=2"]
    fields = {**TINY, "max_iters": 3, "out_dir": tmp_path / "run", "device": "cpu"}
    nodes = [
        subprocess.Popen(
            [*node, f"--node_rank={rank}", f"{phase}/train.py", *words(**fields)],
            cwd=ROOT,
            env={**os.environ, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], outputs
    assert gap(losses(tmp_path / "run"), train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", max_iters=3))) < 1e-6


def test_stacks_on_a_signal(tmp_path):
    """SIGUSR1 writes every thread's stack, and the run goes on."""
    process = launch(tmp_path, 1, phase="nanoGPT")
    await_steps(tmp_path, 2, process)
    time.sleep(1.5)
    os.kill(rank_pids(tmp_path)[0], signal.SIGUSR1)
    await_steps(tmp_path, len(losses(tmp_path)) + 2, process)
    stacks = (tmp_path / "stacks" / "rank0.txt").read_text()
    assert "train.py" in stacks and "in _watch" in stacks
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_directory_for_each_run(ranks, tmp_path):
    """Without --out_dir the launcher makes a directory of its own for each run."""
    from nanoGPT.config import TrainConfig
    from nanoGPT.launch import Place, choose_out_dir

    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        chosen = [choose_out_dir(TrainConfig(), [], ROOT / "nanoGPT/train.py", Place(gpus=ranks))[0] for _ in range(3)]
    finally:
        os.chdir(before)
    assert len(set(chosen)) == 3 and all(word.startswith("--out_dir=out/nanoGPT-") for word in chosen)
