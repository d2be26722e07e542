"""Measure how fast each way of spreading a model generates text, what it moves, and whether kills lose an answer.

    python -m bench.sharding.generation                # three ways with a 25M model on 2 gloo ranks; three minutes
    python -m bench.sharding.generation --kills=50     # also kill an evaluation 50 times; five more minutes
    python -m bench.sharding.generation --kills=50 --write

Each way generates the same tokens with 1 and with 8 sequences. The communication is what the ledger counts in one
round, and the all-gathered memory what the memory tracker counts. The kills are SIGKILL of a launcher and its ranks, 0
to 0.5 seconds after a new answer, while problems are left. The same command then continues.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.job.watchdog import list_children
from nanoGPT.memory.costs import storage_bytes
from nanoGPT.memory.tracker import MemoryTracker
from nanoGPT.metrics.ledger import CollectiveCounter
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp.solve import costs, gpt
from phase3_fsdp.solve.generation import Generator, Sampling, Task
from workshop.imports import ROOT
from workshop.ranks import run_on_ranks

SHAPE = GPTConfig(n_layer=8, n_head=8, n_embd=512, block_size=256, vocab_size=512, bias=False)  # 25.5M parameters
RANKS, SLOTS, TOKENS, REPEATS = 2, (1, 8), 24, 5
PROBLEMS = 200  # of the evaluation that is killed
MARGIN = 60  # problems that must be left when a run starts that will be killed; it solves fewer in half a second


def measure_way(spread: costs.Spread, slots: int) -> dict[str, Any]:
    """Return what one way costs on this rank, with `slots` sequences per rank (with tp, in total)."""
    run = create_runtime("cpu", "float32")
    full = GPT(SHAPE)
    full.init_weights(1)
    model = gpt.spread_gpt(SHAPE, dict(full.named_parameters()), spread, run)
    del full
    wrapped = gpt.GptModel(model, SHAPE.vocab_size, run.device)
    sequences = slots * (1 if spread == "tp" else run.world_size)
    seconds = []
    for _ in range(REPEATS):
        generator = Generator(wrapped, run, slots, 3 + TOKENS, Sampling(), spread == "tp")
        tasks = [Task(i, 0, [1 + i, 2, 3], TOKENS) for i in range(sequences)]
        begin = time.perf_counter()
        for _results in generator.run(tasks):
            pass
        seconds.append((time.perf_counter() - begin) / sequences / TOKENS)
    cache, counter = wrapped.new_cache(slots, 3 + TOKENS), CollectiveCounter()
    with torch.no_grad(), counter, MemoryTracker(model) as memory:
        wrapped.next_logits(torch.zeros(slots, 1, dtype=torch.int64), cache, None)
    predicted = costs.predict(spread, costs.measure_gpt(SHAPE), run.world_size, slots, 3 + TOKENS, 4)
    return {
        "spread": spread,
        "slots": slots,
        "sequences": sequences,
        "tokens_per_second": 1 / statistics.median(seconds),
        "weights_bytes": storage_bytes(model.parameters()),
        "predicted_weights_bytes": predicted.weights + predicted.host,
        "all_gathered_bytes": max(totals["gathered"] for _, totals in memory.timeline),
        "predicted_all_gathered_bytes": predicted.all_gathered,
        "network_bytes": sum(row["ring_bytes"] for row in counter.rows.values()),
        "predicted_network_bytes": predicted.network,
    }


def measure_memory(model: Path, folder: Path) -> list[int]:
    """Return the memory of rank 0 after each problem of an evaluation, in bytes."""
    process = start_evaluation(model, folder)
    assert process.wait(300) == 0
    lines = [json.loads(line) for line in next(folder.glob("progress_*")).read_text().splitlines()]
    return [line["memory_bytes"] for line in lines]


def count_lines(folder: Path) -> int:
    """Return the number of finished problems in a directory of answers."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("progress_*"))


def kill_evaluations(kills: int) -> dict[str, Any]:
    """Kill an evaluation at random moments until `kills` are done. Return how each continued."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        flags = ["--device=cpu", "--max_iters=2", "--eval_interval=2", "--eval_iters=2", f"--out_dir={model}"]
        command = [sys.executable, "-m", "nanoGPT.launch", "nanoGPT/train.py", *flags]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        memory = measure_memory(model, Path(temporary) / "memory")
        evaluation = 0
        while len(rows) < kills:
            to = Path(temporary) / f"answers-{evaluation}"
            evaluation += 1
            while len(rows) < kills and (before := count_lines(to)) < PROBLEMS - MARGIN:
                seconds = draw.uniform(0, 0.5)
                row = {"seconds": round(seconds, 3), "finished_before": before}
                process = start_evaluation(model, to)
                wait_for(process, to, before, seconds)
                stop_tree(process)
                if (after := count_lines(to)) < PROBLEMS:  # a kill after the last answer shows nothing
                    rows.append({**row, "finished_after": after})
                    print(f"kill {len(rows)}: {rows[-1]}", flush=True)
            process = start_evaluation(model, to)
            assert process.wait(300) == 0
            check_answers(to)
    return {"kills": rows, "evaluations": evaluation, "problems": PROBLEMS, "memory_bytes": memory}


def start_evaluation(model: Path, to: Path) -> "subprocess.Popen[bytes]":
    """Start `evaluate.py` on RANKS ranks."""
    flags = [f"--out_dir={model}", "--problems=arc-generated", f"--num={PROBLEMS}", "--tokens=24", "--batch_size=1"]
    flags += [f"--gpus={RANKS}", f"--to={to}", "--device=cpu", "--spread=fsdp"]
    command = [sys.executable, "phase3_fsdp/evaluate.py", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(process: "subprocess.Popen[bytes]", to: Path, before: int, seconds: float) -> None:
    """Wait until the evaluation has a new answer, and then for some seconds."""
    deadline = time.monotonic() + 60
    while count_lines(to) <= before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)


def stop_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill a launcher and its ranks."""
    ranks = list_children(process.pid)
    for pid in (process.pid, *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def check_answers(folder: Path) -> None:
    """Check that every problem has exactly one line, and the result all of them."""
    lines = [json.loads(line) for path in folder.glob("progress_*") for line in path.read_text().splitlines()]
    counts = Counter(line["number"] for line in lines)
    assert sorted(counts) == list(range(PROBLEMS)) and set(counts.values()) == {1}, counts
    result = json.loads(max(folder.glob("result_*.json")).read_text())
    assert len(result["problems"]) == PROBLEMS


def main(kills: int = 0, write: bool = False) -> None:
    """Measure the three ways, and kill an evaluation.

    Args:
        kills: number of kills.
        write: write the result into bench/results/.
    """
    torch.set_num_threads(1)
    rows = []
    for spread in costs.SPREADS:
        for slots in SLOTS:
            rows.append(run_on_ranks(measure_way, RANKS, spread, slots, show=False, timeout=600)[0])
            row = rows[-1]
            print(
                f"{spread:8} {row['sequences']:3} sequences: {row['tokens_per_second']:8.1f} tokens/s, "
                f"{row['network_bytes'] / 1e6:8.3f} MB per round and rank, "
                f"{row['all_gathered_bytes'] / 1e6:6.1f} MB all-gathered",
                flush=True,
            )
    samples: dict[str, Any] = {"ranks": RANKS, "params": SHAPE.count_params(), "ways": rows}
    if kills:
        samples["kills"] = kill_evaluations(kills)
        print(f"{kills} kills: the evaluation continued each time; no problem is lost, and none was solved twice")
    if write:
        settings = {"command": f"python -m bench.sharding.generation --kills={kills} --write", "tokens": TOKENS}
        write_result("generation", torch.device("cpu"), settings, samples)


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
