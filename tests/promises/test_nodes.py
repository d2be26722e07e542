"""Jobs on multiple nodes: two hosts with a network between them, and the Slurm script."""

import contextlib
import ctypes
import datetime
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from nanoGPT.errors import ConfigError
from operate.connection import find_interface, interface_address
from operate.nodes import NodeConfig, Rendezvous
from tests.helpers.programs import DEADLINE, Program, await_steps, find_free_port, make_flags
from tests.helpers.slurm import SCONTROL, SRUN
from tests.helpers.training import ROOT, TINY, gap, tiny, train
from workshop.ranks import losses

SHORT = {**TINY, "n_layer": 1, "max_iters": 3, "gradient_accumulation_steps": 4}
SLURM = ROOT / "operate" / "deploy" / "slurm.sh"
CLONE_NEWNS, CLONE_NEWNET, MS_BIND, MS_REC, MS_SLAVE = 0x20000, 0x40000000, 0x1000, 0x4000, 0x80000  # of Linux


def run(command: str) -> None:
    completed = subprocess.run(command.split(), capture_output=True, text=True)
    assert completed.returncode == 0, (command, completed.stderr)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Create two connected network namespaces, 10.77.0.1 and 10.77.0.2. Yield the name of each.

    As on Debian, each host resolves its own name to 127.0.1.1. On the first host, `master` is 127.0.1.1, too.
    """
    names = [f"nano{os.getpid()}{letter}" for letter in "ab"]
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and `ip`")
    results = [subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True) for name in names]
    try:
        if errors := [each.stderr for each in results if each.returncode]:
            pytest.skip(f"cannot create a network namespace: {errors[0].strip()}")
        run(f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}")
        for i, name in enumerate(names):
            for arguments in (f"address add 10.77.0.{i + 1}/24 dev {name}", f"link set {name} up", "link set lo up"):
                run(f"ip -n {name} {arguments}")
            hosts = Path("/etc/netns", name, "hosts")  # `enter_host` mounts it as /etc/hosts
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()} {'master' * (i == 0)}\n")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def enter_host(name: str, output: Path) -> int:
    """Move this process into a network namespace, as `ip netns exec` does. Return a descriptor of its output file."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
    assert libc.setns(namespace, CLONE_NEWNET) == 0 and libc.unshare(CLONE_NEWNS) == 0, ctypes.get_errno()
    os.close(namespace)
    assert libc.mount(b"", b"/", None, MS_REC | MS_SLAVE, None) == 0, ctypes.get_errno()
    assert libc.mount(f"/etc/netns/{name}/hosts".encode(), b"/etc/hosts", None, MS_BIND, None) == 0, ctypes.get_errno()
    return os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same run with the baseline in one process."""
    return train("nanoGPT", 1, tiny("nanoGPT", tmp_path_factory.mktemp("one"), **SHORT))


def test_two_hosts_form_one_job(one_process, tmp_path, monkeypatch):
    """Two hosts with a rank each have the losses of one process.

    The hosts know only the address of the master, and their own names resolve to loopback addresses.
    """
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    fields = make_flags(**{**SHORT, "out_dir": tmp_path / "run", "device": "cpu"})
    with two_hosts() as hosts:
        nodes = []
        for rank, (host, master) in enumerate(zip(hosts, ("master", "10.77.0.1"), strict=True)):
            words = ["--gpus=1", "--nnodes=2", f"--node_rank={rank}", f"--master_addr={master}"]
            open_output = partial(enter_host, host, tmp_path / host)
            nodes.append(Program("operate.launch", *words, "phase3_fsdp/train.py", *fields, open_output=open_output))
        codes = [node.wait() for node in nodes]
    assert codes == [0, 0], [(tmp_path / host).read_text() for host in hosts]
    assert gap(losses(tmp_path / "run"), one_process) < 1e-5


def test_two_nodes_with_the_same_number_are_refused(monkeypatch):
    """If two nodes have the same NODE_RANK, the job does not start. After its start, another node is refused at once.

    A node that is started again before all nodes have connected takes the place of its earlier start.
    """
    monkeypatch.setenv("MASTER_PORT", find_free_port())
    timeout = datetime.timedelta(seconds=60)
    first, second, again, late = (Rendezvous(NodeConfig(1, 2, rank)) for rank in (0, 1, 1, 1))
    for rendezvous in (first, second, again):
        rendezvous.open(timeout)
    with pytest.raises(ConfigError, match="another node has NODE_RANK=1: give each node its own"):
        second.fetch("config files", [0])
    again.publish("error", None)  # it can start
    with first.share_errors():
        first.compare_gpus()
    with pytest.raises(ConfigError, match="has started with another node 1: give each node its own NODE_RANK"):
        late.open(timeout)


def test_the_interface_of_the_master_is_found():
    """A loopback address uses the loopback interface, and another local address the interface that has it.

    For an IPv6 address, the result is None.
    """
    if not sys.platform.startswith("linux"):
        pytest.skip("interfaces are looked up only on Linux")
    assert find_interface("127.0.0.1") == find_interface("localhost") == "lo"
    assert find_interface("fd00::1") is None
    for _, name in socket.if_nameindex():
        if address := interface_address(name):
            assert find_interface(address) == name


# The environment of a Slurm job with two nodes. The test runs both nodes on this machine.
JOB = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}


def create_slurm_job(tmp_path: Path, python: str, **variables: str) -> dict[str, str]:
    """Write the simulated commands of Slurm into tmp_path, and return the environment of a job that writes there.

    The job runs `python`. `variables` replace those of `JOB`.
    """
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {**JOB, **variables, "SLURM_JOB_ID": find_free_port(), "OUT_DIR": str(tmp_path / "run"), "PY": python}
    return {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_the_slurm_script_runs_two_nodes_and_resumes(one_process, tmp_path, python):
    """The sbatch script starts one launcher per node and trains to the end. The same job resumes when it starts again.

    The script replaces itself with srun, so that srun receives its signals. srun gets the processors of the job.
    """
    job = create_slurm_job(tmp_path, python)
    script = ["bash", SLURM, *make_flags(**{**SHORT, "device": "cpu"})]
    completed = subprocess.run(script, cwd=ROOT, env=job, capture_output=True, text=True, timeout=DEADLINE)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count("A sample from") == 1, "only one node writes the sample"
    assert gap(losses(tmp_path / "run"), one_process) < 1e-5
    job |= {"ONLY_PRINT": "", "SLURM_CPUS_PER_TASK": "64"}
    with subprocess.Popen(script, cwd=ROOT, env=job, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0 and output.startswith(f"{process.pid} 64 ")
    assert output.rstrip().endswith(f"--out_dir={tmp_path}/run --init_from=resume")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM])
def test_only_the_time_limit_requeues_a_slurm_job(number, tmp_path, python):
    """At the time limit (SIGHUP, SIGUSR1), a job saves and requeues itself. After scancel (SIGTERM), it only saves.

    A job that is refused does not requeue itself.
    """
    job = create_slurm_job(tmp_path, python, SLURM_JOB_NODELIST="node1", SLURM_NNODES="1")
    long_run = make_flags(**{**SHORT, "device": "cpu", "max_iters": 100000, "eval_interval": 100000})
    with subprocess.Popen(["bash", SLURM, *long_run], cwd=ROOT, env=job, start_new_session=True) as process:
        await_steps(tmp_path / "run", 2, process)
        os.killpg(process.pid, number)  # as Slurm does: the shell and the launcher of each node get the signal
        assert process.wait(DEADLINE) == 0
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
    requeued = tmp_path / "scontrol.requeued"
    assert requeued.exists() == (number != signal.SIGTERM)
    assert not requeued.exists() or requeued.read_text().strip() == job["SLURM_JOB_ID"]
    if number == signal.SIGHUP:  # log.txt still ends with the signal if a later start of the job is refused
        requeued.unlink()
        assert subprocess.run(["bash", SLURM, "--learning_rat=3"], cwd=ROOT, env=job, timeout=DEADLINE).returncode == 2
        assert not requeued.exists()
