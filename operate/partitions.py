"""Cut nodes of an elastic job off the network, reconnect them, and compare the losses with an uninterrupted run.

    python -m operate.partitions              # about four minutes on 2 cores; needs no root rights
    python -m operate.partitions --write      # also write bench/results/partitions-*.json

Each node, and the store, has its own network namespace on this machine, with its own address. A bridge connects the
namespaces. All nodes see the same directory, also a node that is cut off: this is the dangerous case, in which two
groups of ranks could write into one run. The program cuts one node off in the middle of training, in two ways:

    dropped packets    the bridge drops every packet from and to the node; no process gets an error
    interface down     the node's network interface is switched off

The other nodes must continue from the newest checkpoint. The node that is cut off must end its ranks before that, and
exit with a message. Then the network works again, the node starts again, and it joins the job. A last cut is so short
that the job must not notice it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.tables.elastic_tables import WAYS
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.job.watchdog import list_children, read_state_and_parent
from operate.node_kills import CONTINUE_SECONDS, FLAGS, Cluster, list_starts, measure_uninterrupted
from operate.node_monitor import LOST_SECONDS
from workshop.imports import ROOT

NODES = 3
SWITCH_VARIABLE = "NANOGPT_SWITCH"  # set in the process that runs in the namespace of the bridge
# The way, the node, and the seconds of each cut; None: until the job has continued and the node has ended. Node 0 has
# rank 0, which writes the metrics and the manifests.
CUTS: tuple[tuple[str, int, float | None], ...] = (
    ("drop", 0, None),
    ("drop", 2, None),
    ("down", 0, None),
    ("down", 1, None),
    ("drop", 0, 3.0),
)
TRAIN_SECONDS = 5.0  # between a start of the job and a cut
UNSHARE = ("unshare", "--user", "--map-root-user", "--net")


def explain_missing_namespaces() -> str | None:
    """Return why this machine cannot create network namespaces with a bridge between them; None if it can."""
    script = "ip link add bridge0 type bridge && ip link add port0 type veth peer name eth0"
    try:
        done = subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return f"{error.filename} cannot be started ({error.strerror})"
    return None if done.returncode == 0 else " ".join(done.stderr.split()) or f"unshare exited with {done.returncode}"


def run_ip(*words: str) -> None:
    """Run the command `ip words...` in the namespace of the bridge."""
    subprocess.run(["ip", *words], check=True)


@dataclass
class Network:
    """Network namespaces with the addresses 10.77.0.1, 10.77.0.2 and so on, and a bridge between them.

    Attributes:
        holders: for each namespace, a process that keeps it.
    """

    holders: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def add_namespaces(self, count: int) -> None:
        """Create the bridge, and the namespaces with one network interface each."""
        run_ip("link", "set", "lo", "up")
        run_ip("link", "add", "bridge0", "type", "bridge")
        run_ip("link", "set", "bridge0", "up")
        for number in range(count):
            self.holders.append(subprocess.Popen(["unshare", "--net", "sleep", "infinity"]))
            own = Path("/proc/self/ns/net").readlink()
            while Path(f"/proc/{self.holders[-1].pid}/ns/net").readlink() == own:
                time.sleep(0.01)
            port, pid = f"port{number}", str(self.holders[-1].pid)
            run_ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
            run_ip("link", "set", port, "up", "master", "bridge0")
            for words in (f"address add {self.address(number)}/24 dev eth0", "link set eth0 up", "link set lo up"):
                subprocess.run([*self.enter(number), "ip", *words.split()], check=True)

    def address(self, number: int) -> str:
        """Return the address of a namespace."""
        return f"10.77.0.{number + 1}"

    def enter(self, number: int) -> list[str]:
        """Return the words that start a command in a namespace."""
        return ["nsenter", f"--net=/proc/{self.holders[number].pid}/ns/net"]

    def cut(self, number: int, way: str) -> None:
        """Cut a namespace off."""
        if way == "drop":
            run_ip("link", "set", f"port{number}", "nomaster")
        else:
            subprocess.run([*self.enter(number), "ip", "link", "set", "eth0", "down"], check=True)

    def reconnect(self, number: int) -> None:
        """Undo `cut`."""
        run_ip("link", "set", f"port{number}", "master", "bridge0")
        subprocess.run([*self.enter(number), "ip", "link", "set", "eth0", "up"], check=True)

    def close(self) -> None:
        """End the processes that keep the namespaces."""
        for holder in self.holders:
            holder.kill()
            holder.wait()


@dataclass
class NetworkCluster(Cluster):
    """The nodes of an elastic job, each in its own network namespace. The store has namespace 0.

    Attributes:
        network: the namespaces.
    """

    network: Network = field(default_factory=Network)

    def start_process(self, name: str, words: list[str]) -> "subprocess.Popen[bytes]":
        number = 0 if name == "store" else 1 + int(name.removeprefix("node"))
        with open(self.folder / f"{name}.log", "ab") as log:
            command = [*self.network.enter(number), sys.executable, "-m", "operate.elastic", *words]
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def list_ranks(self, node: int) -> list[int]:
        """Return the process ids of the ranks of a node."""
        process = self.nodes[node]
        return list_children(process.pid) if process else []

    def read_error(self, node: int) -> str:
        """Return the last error that a node has printed."""
        lines = re.findall(r"^error.*", (self.folder / f"node{node}.log").read_text(errors="replace"), re.MULTILINE)
        return lines[-1] if lines else ""


def cut_node(cluster: NetworkCluster, way: str, node: int) -> dict[str, Any]:
    """Cut a node off until the job has continued and the node has ended, and let it join again.

    Returns:
        The way, the node and the step; the seconds until its ranks and the node had ended, until the other nodes
        started, and until the node had joined again; the number of its ranks that still ran when the others started;
        the number of ranks after the cut, and after the node had joined again; the number of lost steps; the exit code
        and the message of the node.

    Raises:
        ConfigError: the job did not continue, or the node did not end, within CONTINUE_SECONDS.
    """
    process = cluster.nodes[node]
    assert process is not None
    before, starts, ranks = cluster.last_step(), len(list_starts(cluster.out_dir)), cluster.list_ranks(node)
    begin = time.monotonic()
    cluster.network.cut(1 + node, way)
    seconds: dict[str, float] = {}
    overlap = None
    while len(seconds) < 3:
        now = time.monotonic() - begin
        if now > CONTINUE_SECONDS:
            raise ConfigError(f"node {node}, {WAYS[way]}: only {seconds} in {now:.0f} s: read {cluster.folder}")
        alive = [rank for rank in ranks if read_state_and_parent(rank)[0] not in ("", "Z")]
        if not alive:
            seconds.setdefault("ranks_ended", now)
        if process.poll() is not None:
            seconds.setdefault("node_ended", now)
        if len(list_starts(cluster.out_dir)) > starts:
            seconds.setdefault("others_started", now)
            overlap = len(alive) if overlap is None else overlap
        time.sleep(0.05)
    cluster.wait_for_progress()
    new_starts = list_starts(cluster.out_dir)[starts:]
    cluster.network.reconnect(1 + node)
    begin, count = time.monotonic(), len(new_starts) + starts
    cluster.start_node(node, NODES)
    if not cluster.wait_for_restart(count):
        raise ConfigError(f"node {node} did not join again: read {cluster.folder}")
    cluster.wait_for_progress()
    seconds["joined"] = time.monotonic() - begin
    return {
        "way": way,
        "node": node,
        "step": before,
        "seconds": seconds,
        "ranks_in_both": overlap,
        "ranks_after": new_starts[-1][1],
        "ranks_joined": list_starts(cluster.out_dir)[-1][1],
        "steps_lost": max(0, before + 1 - min(step for step, _ in new_starts)),
        "exit_code": process.returncode,
        "message": cluster.read_error(node),
    }


def describe_cut(row: dict[str, Any]) -> str:
    """Return one line about a cut."""
    ended, others, joined = (row["seconds"][name] for name in ("ranks_ended", "others_started", "joined"))
    return (
        f"node {row['node']}, {WAYS[row['way']]}, step {row['step']}: its ranks ended after {ended:.1f} s (exit code "
        f"{row['exit_code']}); the others started after {others:.1f} s, while {row['ranks_in_both']} of its ranks ran; "
        f"{row['steps_lost']} step(s) lost; it joined again after {joined:.1f} s"
    )


def cut_briefly(cluster: NetworkCluster, way: str, node: int, seconds: float) -> dict[str, Any]:
    """Cut a node off for a few seconds. Return how often the job started again, and how long no step was logged."""
    starts = len(list_starts(cluster.out_dir))
    cluster.network.cut(1 + node, way)
    begin = time.monotonic()
    time.sleep(seconds)
    cluster.network.reconnect(1 + node)
    cluster.wait_for_progress()
    pause = time.monotonic() - begin
    time.sleep(LOST_SECONDS)
    new_starts = len(list_starts(cluster.out_dir)) - starts
    return {"way": way, "node": node, "cut_seconds": seconds, "pause_seconds": pause, "starts": new_starts}


def count_lines_out_of_order(out_dir: Path) -> int:
    """Return how many lines of the metrics do not have the step after that of the line before.

    Two groups of ranks that write into one run would leave such lines.
    """
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line.get("loss") is not None]
    return sum(later != earlier + 1 for earlier, later in zip(steps, steps[1:], strict=False))


def measure(folder: Path, cuts: tuple[tuple[str, int, float | None], ...]) -> dict[str, Any]:
    """Run the job with cuts, and then an uninterrupted run. Return the rows and the loss difference."""
    network = Network()
    flags = [*FLAGS, "--gradient_accumulation_steps=6"]  # 3 nodes, 2 nodes and 1 node divide it
    cluster = NetworkCluster(folder, 29400, host=network.address(0), ranks=1, flags=flags, network=network)
    rows, brief_cuts = [], []
    store = None
    try:
        network.add_namespaces(1 + NODES)
        store = cluster.start_process("store", ["serve", f"--port={cluster.port}"])
        time.sleep(4)
        for node in range(NODES):
            cluster.start_node(node, NODES)
        cluster.wait_for_ranks(NODES)
        for way, node, seconds in cuts:
            time.sleep(TRAIN_SECONDS)
            if seconds is None:
                rows.append(cut_node(cluster, way, node))
                print(describe_cut(rows[-1]), flush=True)
            else:
                brief_cuts.append(cut_briefly(cluster, way, node, seconds))
                print(f"node {node}, {WAYS[way]} for {seconds:g} s: {brief_cuts[-1]['starts']} restart(s)", flush=True)
    finally:
        cluster.stop()
        if store:
            store.kill()
        network.close()
    result = measure_uninterrupted(cluster)
    return {
        "nodes": NODES,
        "rows": rows,
        "brief": brief_cuts,
        "gaps": count_lines_out_of_order(cluster.out_dir),
        **result,
    }


def main(cuts: int = len(CUTS), write: bool = False) -> None:
    """Cut nodes of an elastic job off the network, and compare its losses with an uninterrupted run.

    Args:
        cuts: how many of the cuts in CUTS to make, from the first one on.
        write: also write bench/results/partitions-<hardware>.json.
    """
    enter_namespaces()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="partitions-"))  # kept: it has the logs of all nodes, and the result
    result = measure(folder, CUTS[:cuts])
    (folder / "result.json").write_text(json.dumps(result))
    print(
        f"{len(result['rows'])} cuts; {result['steps']} steps; steps that were not logged: "
        f"{len(result['missing_steps'])}; lines out of order: {result['gaps']}; max loss difference to an "
        f"uninterrupted run {result['max_loss_difference']:.2g}; logs in {folder}"
    )
    if write:
        settings = {"command": "python -m operate.partitions --write"}
        print(f"wrote {write_result('partitions', torch.device('cpu'), settings, result)}")


def enter_namespaces() -> None:
    """Replace this process by the same program in new user and network namespaces.

    Raises:
        ConfigError: this machine does not allow it.
    """
    if SWITCH_VARIABLE in os.environ:
        return
    if reason := explain_missing_namespaces():
        raise ConfigError(f"this machine cannot create network namespaces ({reason}): use another machine")
    os.environ[SWITCH_VARIABLE] = "1"
    os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, "-m", "operate.partitions", *sys.argv[1:]])


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
