"""Kill nodes of an elastic job at random moments, restart them, and compare the losses with an uninterrupted run.

    python -m operate.node_kills --kills=30            # about eight minutes on 2 cores
    python -m operate.node_kills --kills=100 --nodes=3 --seed=3 --write    # also write bench/results/node-kills-*.json

Each node is a process of `make elastic` on this machine, with its own ranks. A node is killed with SIGKILL: either the
launcher with all its ranks, as if the machine had lost power, or one rank. Every fourth time it gets SIGTERM instead,
as if a cloud provider preempted the machine. The same node starts again after a few seconds, and the ranks resume from
the newest checkpoint. The job trains until all kills are done.
"""

import contextlib
import json
import os
import random
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

from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.job.watchdog import list_children
from operate.node_monitor import kill_processes
from workshop.imports import ROOT
from workshop.ranks import losses

RANKS_PER_NODE = 2
FLAGS = ["--device=cpu", "--n_layer=2", "--n_embd=32", "--n_head=2", "--block_size=16", "--batch_size=2"]
FLAGS += ["--gradient_accumulation_steps=8", "--log_interval=1", "--eval_interval=20", "--eval_iters=2"]
FLAGS += ["--always_save_checkpoint=True", "--max_iters=1000000", "--decay_lr=False", "--learning_rate=1e-4"]
TRAINER = "phase3_fsdp/train.py"
KINDS = ("node", "rank", "node", "SIGTERM")  # the kind of each loss, in turn
DESCRIPTIONS = {"node": "SIGKILL of a node", "rank": "SIGKILL of one rank", "SIGTERM": "SIGTERM to a node"}
CONTINUE_SECONDS = 300.0  # within which the job must train again
RESTART_SECONDS = 60.0  # within which the job must have noticed a lost node, and started again
AWAY_SECONDS = (0.0, 12.0)  # how long a node is away


@dataclass
class Cluster:
    """The nodes of an elastic job, each a process on this machine.

    Attributes:
        folder: for the logs of the nodes, and the run's directory.
        port, host: of the store.
        ranks: on each node.
        flags: of the trainer.
        nodes: the process of each node; None while it is away.
    """

    folder: Path
    port: int
    host: str = "127.0.0.1"
    ranks: int = RANKS_PER_NODE
    flags: list[str] = field(default_factory=lambda: FLAGS)
    nodes: dict[int, "subprocess.Popen[bytes] | None"] = field(default_factory=dict)

    @property
    def out_dir(self) -> Path:
        return self.folder / "run"

    def start_process(self, name: str, words: list[str]) -> "subprocess.Popen[bytes]":
        """Start `python -m operate.elastic words...` with its output in a log."""
        with open(self.folder / f"{name}.log", "ab") as log:
            command = [sys.executable, "-m", "operate.elastic", *words]
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def start_node(self, node: int, count: int) -> None:
        """Start or restart a node.

        Args:
            node: number of the node.
            count: largest number of nodes.
        """
        words = [f"--gpus={self.ranks}", f"--nodes=1:{count}", f"--store={self.host}:{self.port}", TRAINER]
        self.nodes[node] = self.start_process(f"node{node}", [*words, *self.flags, f"--out_dir={self.out_dir}"])

    def last_step(self) -> int:
        """Return the last logged step; -1 before the first one."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.out_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        return -1

    def wait_for_restart(self, starts: int) -> bool:
        """Wait until the job has started again, for at most RESTART_SECONDS. Return whether it has.

        Args:
            starts: number of its starts before a node was lost.
        """
        deadline = time.monotonic() + RESTART_SECONDS
        while len(list_starts(self.out_dir)) == starts:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def wait_for_ranks(self, ranks: int) -> None:
        """Wait until the job trains on a number of ranks.

        Raises:
            ConfigError: it did not within CONTINUE_SECONDS.
        """
        deadline = time.monotonic() + CONTINUE_SECONDS
        while not (starts := list_starts(self.out_dir)) or starts[-1][1] != ranks:
            if time.monotonic() > deadline:
                raise ConfigError(f"not {ranks} ranks within {CONTINUE_SECONDS:g} s: read the logs in {self.folder}")
            time.sleep(0.05)
        self.wait_for_progress()

    def wait_for_progress(self, steps: int = 3) -> None:
        """Wait until the job has logged new steps.

        Raises:
            ConfigError: the job logged no new steps within CONTINUE_SECONDS.
        """
        begin, path = time.monotonic(), self.out_dir / "metrics.jsonl"
        seen = path.stat().st_mtime_ns if path.exists() else 0
        changes = 0
        while changes < steps:
            if time.monotonic() - begin > CONTINUE_SECONDS:
                raise ConfigError(f"no progress within {CONTINUE_SECONDS:g} s: read the logs in {self.folder}")
            time.sleep(0.05)
            now = path.stat().st_mtime_ns if path.exists() else 0
            changes, seen = changes + (now != seen), now

    def count_alive(self) -> int:
        """Return the number of nodes whose processes run."""
        return sum(process is not None and process.poll() is None for process in self.nodes.values())

    def lose_node(self, node: int, kind: str, draw: random.Random) -> None:
        """Kill a node, or one of its ranks, or ask it to leave."""
        process = self.nodes[node]
        assert process is not None
        ranks = list_children(process.pid)
        if kind == "rank" and ranks:
            os.kill(draw.choice(ranks), signal.SIGKILL)
            return
        if kind == "SIGTERM":
            process.terminate()
        else:
            process.kill()
            kill_processes(ranks, signal.SIGKILL)
        process.wait(60)
        self.nodes[node] = None

    def stop(self) -> None:
        """Stop all nodes."""
        for process in self.nodes.values():
            if process and process.poll() is None:
                process.terminate()
        for process in self.nodes.values():
            if process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()


def lose_nodes(cluster: Cluster, kills: int, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Lose nodes at random moments, one after another.

    Returns:
        For each loss: its kind, the number of nodes whose processes ran before it, the number of ranks in the job, the
        step, whether the loss interrupted the job, the number of lost steps, the number of starts since the loss, and
        the seconds until the job trains again, from the moment when the node starts again. A loss does not interrupt
        the job if the node had not joined it yet.
    """
    rows = []
    for number in range(kills):
        time.sleep(draw.uniform(0.0, 4.0))
        node, kind = draw.randrange(count), KINDS[number % len(KINDS)]
        before, starts, alive = cluster.last_step(), list_starts(cluster.out_dir), cluster.count_alive()
        cluster.lose_node(node, kind, draw)
        if cluster.nodes[node] is None:
            time.sleep(draw.uniform(*AWAY_SECONDS))
            cluster.start_node(node, count)
        begin = time.monotonic()
        is_interrupted = cluster.wait_for_restart(len(starts))
        cluster.wait_for_progress()
        seconds = time.monotonic() - begin if is_interrupted else 0.0
        new_starts = list_starts(cluster.out_dir)[len(starts) :]
        lost = max(0, before + 1 - min(step for step, _ in new_starts)) if new_starts else 0
        row = {"kind": kind, "nodes_alive": alive, "ranks": starts[-1][1], "step": before}
        row |= {"interrupted": is_interrupted, "steps_lost": lost, "starts": len(new_starts), "seconds": seconds}
        rows.append(row)
        effect = f"{lost} step(s) lost" if is_interrupted else "the job was not interrupted"
        print(f"{number + 1}: {DESCRIPTIONS[kind]}, node {node} of {alive}, step {before}: {effect}", flush=True)
    return rows


def list_starts(out_dir: Path) -> list[tuple[int, int]]:
    """Return the step and the number of ranks of each start of the run."""
    log = out_dir / "log.txt"
    text = log.read_text() if log.exists() else ""
    found = re.findall(r"started at step (\d+) .*?, (\d+) rank\(s\)", text)
    return [(int(step), int(ranks)) for step, ranks in found]


def compare_curves(curve: dict[int, float], uninterrupted: dict[int, float]) -> dict[str, Any]:
    """Return the steps that a run has not logged, and its max loss difference to an uninterrupted run."""
    missing = sorted(set(uninterrupted) - set(curve))
    difference = max(abs(curve[step] - loss) for step, loss in uninterrupted.items() if step in curve)
    return {"missing_steps": missing, "max_loss_difference": difference}


def sample_curve(curve: dict[int, float], steps: int) -> dict[int, float]:
    """Return at most 51 evenly spaced steps of the curve of a run with this number of steps, for a picture."""
    interval = -(-steps // 50)
    return {step: loss for step, loss in curve.items() if step % interval == 0}


def measure(kills: int, nodes: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run the job with kills, and then an uninterrupted run on one node. Return the rows and the loss difference."""
    draw = random.Random(seed)
    cluster = Cluster(folder, random.SystemRandom().randrange(20000, 32000))
    store = cluster.start_process("store", ["serve", f"--port={cluster.port}"])
    try:
        time.sleep(4)
        for node in range(nodes):
            cluster.start_node(node, nodes)
        cluster.wait_for_progress()
        rows = lose_nodes(cluster, kills, nodes, draw)
    finally:
        cluster.stop()
        store.kill()
    return {"rows": rows, **measure_uninterrupted(cluster)}


def measure_uninterrupted(cluster: Cluster) -> dict[str, Any]:
    """Run the steps of a cluster's job again, without interruption, on one node. Return both curves, and compare them.

    Returns:
        The number of steps, the entries of `compare_curves`, and samples of both curves.
    """
    curve, out_dir = losses(cluster.out_dir), cluster.folder / "uninterrupted"
    command = [sys.executable, "-m", "nanoGPT.launch", "--gpus=2", TRAINER, *cluster.flags, f"--out_dir={out_dir}"]
    command.append(f"--max_iters={max(curve)}")
    with open(cluster.folder / "uninterrupted.log", "wb") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True)
    uninterrupted = losses(out_dir)
    curves = {"with lost nodes": curve, "uninterrupted": uninterrupted}
    curves = {name: sample_curve(each, max(curve)) for name, each in curves.items()}
    return {"steps": max(curve), **compare_curves(curve, uninterrupted), "curves": curves}


def main(kills: int = 10, nodes: int = 2, seed: int = 0, write: bool = False) -> None:
    """Kill nodes of an elastic job at random moments, and compare its losses with an uninterrupted run.

    Args:
        kills: how often a node is lost.
        nodes: of the job.
        seed: of the random moments.
        write: also write bench/results/node-kills-<hardware>.json.
    """
    folder = Path(tempfile.mkdtemp(prefix="node-kills-"))  # kept: it has the logs of all nodes, and the result
    result = measure(kills, nodes, seed, folder)
    (folder / "result.json").write_text(json.dumps(result))
    rows = [row for row in result["rows"] if row["interrupted"]]
    for kind in DESCRIPTIONS:
        of_kind = [row for row in rows if row["kind"] == kind]
        if of_kind:
            lost = sum(row["steps_lost"] for row in of_kind) / len(of_kind)
            print(f"{DESCRIPTIONS[kind]}: {len(of_kind)} times, {lost:.1f} steps lost on average")
    print(
        f"{len(rows)} of {kills} losses interrupted the job, and it continued after each; {result['steps']} steps; "
        f"steps that were not logged: {len(result['missing_steps'])}; "
        f"max loss difference to an uninterrupted run {result['max_loss_difference']:.2g}; logs in {folder}"
    )
    if write:
        settings = {"command": f"python -m operate.node_kills --kills={kills} --nodes={nodes} --seed={seed} --write"}
        print(f"wrote {write_result('node-kills', torch.device('cpu'), settings, result)}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
