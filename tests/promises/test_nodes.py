"""Jobs on several nodes: two hosts with a network between them, and the Slurm script."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoGPT.distributed.network import address_of, interface_towards
from tests.helpers.programs import as_flags
from tests.helpers.slurm import SCONTROL, SRUN
from tests.helpers.training import ROOT, TINY, gap, tiny, train
from workshop.ranks import losses

SHORT = {**TINY, "max_iters": 3, "gradient_accumulation_steps": 4}
SLURM = ROOT / "phase3_fsdp" / "slurm.sh"


def run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, joined by a cable; for each the words that run a command in it.

    In each, as Debian has it, the machine's own name is 127.0.1.1, and so is the master's on the master.
    """
    names = [f"nano{os.getpid()}{letter}" for letter in "ab"]
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and `ip`")
    made = [subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True) for name in names]
    try:
        if wrong := [each.stderr for each in made if each.returncode]:
            pytest.skip(f"no network namespace can be made: {wrong[0].strip()}")
        run(f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}")
        for i, name in enumerate(names):
            for what in (f"address add 10.77.0.{i + 1}/24 dev {name}", f"link set {name} up", "link set lo up"):
                run(f"ip -n {name} {what}")
            hosts = Path("/etc/netns", name, "hosts")  # `ip netns exec` shows it as /etc/hosts
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()} {'master' * (i == 0)}\n")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def outputs(nodes: list[subprocess.Popen], timeout: float) -> list[str]:
    """What each node's launcher prints, when all have ended; none is left."""
    try:
        return [node.communicate(timeout=timeout)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same run in one process, with the baseline."""
    return train("nanoGPT", 1, tiny("nanoGPT", tmp_path_factory.mktemp("one"), **SHORT))


def test_two_hosts_are_one_job(one_process, tmp_path):
    """Two hosts whose names are the loopback, two ranks on each, told only where the master is: the losses of one."""
    environment = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "MASTER_PORT")}
    launcher = [sys.executable, "-m", "nanoGPT.launch", "--gpus=2", "--nnodes=2"]
    fields = as_flags(**{**SHORT, "out_dir": tmp_path / "run", "device": "cpu"})
    with two_hosts() as hosts:
        nodes = [
            subprocess.Popen(
                [*host, *launcher, f"--node_rank={rank}", f"--master_addr={master}", "phase3_fsdp/train.py", *fields],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, (host, master) in enumerate(zip(hosts, ("master", "10.77.0.1"), strict=True))
        ]
        said = outputs(nodes, 100)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert gap(losses(tmp_path / "run"), one_process) < 1e-5


def test_the_interface_towards_the_master():
    """A loopback address is reached by the loopback; this machine's own by the interface that has it; no IPv6."""
    if not sys.platform.startswith("linux"):
        pytest.skip("interfaces are looked up on Linux")
    assert interface_towards("127.0.0.1") == interface_towards("localhost") == "lo"
    assert interface_towards("fd00::1") is None
    for _, name in socket.if_nameindex():
        if address := address_of(name):
            assert interface_towards(address) == name


# What a Slurm job finds in its environment, and the two programs of Slurm that it calls, for two nodes on one machine.
JOB = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}


def test_the_slurm_script_runs_two_nodes_and_resumes(one_process, tmp_path):
    """sbatch's script starts a launcher a node and trains to the end; the same job, started again, resumes. It becomes
    srun, which signals for it reach, and which has the job's processors."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {**JOB, "SLURM_JOB_ID": str(os.getpid()), "OUT_DIR": str(tmp_path / "run"), "PY": sys.executable}
    job |= {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", SLURM, *as_flags(**{**SHORT, "device": "cpu"})]
    done = subprocess.run(script, cwd=ROOT, env=job, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("A sample from") == 1, "one node writes it"
    assert gap(losses(tmp_path / "run"), one_process) < 1e-5
    job |= {"ONLY_SAY": "", "SLURM_CPUS_PER_TASK": "64"}
    with subprocess.Popen(script, cwd=ROOT, env=job, stdout=subprocess.PIPE, text=True) as again:
        said, _ = again.communicate(timeout=20)
    assert again.returncode == 0 and said.startswith(f"{again.pid} 64 ")
    assert said.rstrip().endswith(f"--out_dir={tmp_path}/run --init_from=resume")
