"""Where a step's time and memory go: torch's profiler around two steps of a phase's own trainer.

    make profile PHASE=phase3 GPUS=2
    make profile PHASE=phase1 GPUS=4 ARGS="--batch_size=4 --dropout=0.2"     # any field of the configuration

Writes into out/profile/PHASE-GPUS: a trace of every rank to open in Perfetto (ui.perfetto.dev), timeline.png with the
computation and the communication of rank 0 and how much of the latter the former hides, memory.png with its memory by
category, and operators.txt, the ten that take longest. On a GPU the timeline is of kernels, without one of operators.
"""

import contextlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from bench.cells import PHASES
from nanoGPT.config import TrainConfig, nearest, parse, validate
from nanoGPT.exits import ConfigError, one_sentence
from nanoGPT.ledger import Ledger
from nanoGPT.memory import CATEGORIES, Memory
from workshop.ranks import RankFailed, run_on_ranks

ROOT = Path(__file__).resolve().parents[1]
REMEMBERED, FIRST, LAST = 2, 3, 4  # the step whose memory is watched, and those that the profiler sees
FIXED = {"max_iters", "log_interval", "eval_iters", "out_dir", "init_from", "ledger"}
Spans = list[tuple[float, float]]  # begin and end, ms
COMMUNICATION = ("gloo:", "nccl")
NO_COMPUTATION = ("c10d::", "prim::", "profiler::", "autograd::", "step ", "record_param", "Optimizer.", "FSDP::", "##")


def profiled(package: str, config: TrainConfig, folder: Path) -> None:
    """Train a few steps on this rank, and write what the profiler and the memory's watcher saw."""
    with open(folder / f"rank{os.environ.get('RANK', 0)}.err", "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())  # the profiler says there when it starts and stops
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if config.device.startswith("cuda") else []
    profiler = torch.profiler.profile(activities=activities)
    remembered: list[Memory] = []

    @contextlib.contextmanager
    def watch(ledger: Ledger, step: int) -> Iterator[None]:
        if step == FIRST:
            profiler.start()
        if step == REMEMBERED:
            with Memory(ledger.model, ledger.optimizer, ledger.run.device) as memory:
                yield
            remembered.append(memory)
        else:
            with torch.profiler.record_function(f"step {step}"):
                yield
        if step == LAST:
            profiler.stop()

    with mock.patch.object(Ledger, "watch", watch):
        importlib.import_module(f"{package}.train").train(config)
    rank = dist.get_rank() if dist.is_initialized() else 0
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    if rank == 0:
        sort = "self_device_time_total" if len(activities) > 1 else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=sort, row_limit=10, max_name_column_width=60)
        (folder / "operators.txt").write_text(table)
        found = {"spans": spans_of(profiler.events()), "memory": remembered[0].timeline}
        (folder / "timeline.json").write_text(json.dumps(found))


def spans_of(events: Any) -> dict[str, list[tuple[str, float, float]]]:
    """Steps, computation and communication, in ms since the first; each kind's spans by their begin."""
    on_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    found: dict[str, list[tuple[str, float, float]]] = {"step": [], "computation": [], "communication": []}
    zero = min(event.time_range.start for event in events if event.name.startswith("step "))
    for event in events:
        span = (event.name, (event.time_range.start - zero) / 1e3, (event.time_range.end - zero) / 1e3)
        here = (event.device_type == DeviceType.CUDA) == on_gpu
        if event.name.startswith("step ") and event.device_type != DeviceType.CUDA:
            found["step"].append(span)
        elif here and event.name.startswith(COMMUNICATION):
            found["communication"].append(span)
        elif here and not event.name.startswith(NO_COMPUTATION):
            found["computation"].append(span)
    return {kind: sorted(spans, key=lambda span: span[1]) for kind, spans in found.items()}


def union(spans: list[tuple[str, float, float]]) -> Spans:
    """The times at which at least one of some spans, in the order of their begins, goes on."""
    found: Spans = []
    for _, begin, end in spans:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def together(a: Spans, b: Spans) -> float:
    """For how long two unions go on at the same time."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def summary(spans: dict[str, list[tuple[str, float, float]]]) -> dict[str, float]:
    """Milliseconds of a step, those in which rank 0 computes and communicates, and how much of the latter is hidden."""
    computing, talking = union(spans["computation"]), union(spans["communication"])
    talk = sum(end - begin for begin, end in talking)
    return {
        "step_ms": sum(end - begin for _, begin, end in spans["step"]) / len(spans["step"]),
        "computation_ms": sum(end - begin for begin, end in computing) / len(spans["step"]),
        "communication_ms": talk / len(spans["step"]),
        "overlap": together(computing, talking) / talk if talk else 0.0,
    }


def draw_timeline(spans: dict[str, list[tuple[str, float, float]]], said: dict[str, float], path: Path) -> None:
    """Two rows of bars against time: what computes, and what is sent, where nothing computes in a darker colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots()
    computing, talking = union(spans["computation"]), union(spans["communication"])
    rows = (("communication", talking, "tab:orange"), ("computation", computing, "tab:blue"))
    for height, (_, bars, colour) in enumerate(rows):
        axes.broken_barh([(begin, end - begin) for begin, end in bars], (height - 0.4, 0.8), color=colour)
    for name, begin, _ in spans["step"]:
        axes.axvline(begin, color="grey", linewidth=0.8)
        axes.text(begin, 1.5, f" {name}", fontsize="small", va="bottom")
    axes.set_yticks([0, 1], [name for name, _, _ in rows])
    axes.set(xlabel="ms", ylim=(-0.5, 1.8))
    axes.set_title(f"{said['overlap']:.0%} of the communication goes on beside computation")
    figure.savefig(path)


def draw_memory(timeline: list[tuple[int, dict[str, int]]], path: Path) -> None:
    """Bytes by category, stacked, against the operators of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    events = [event for event, _ in timeline]
    stacks = [[totals[name] / 1e6 for _, totals in timeline] for name in CATEGORIES]
    axes.stackplot(events, stacks, labels=[name.replace("_", " ") for name in CATEGORIES], step="post")
    axes.set(xlabel="operators of the step, in their order", ylabel="MB on rank 0", xlim=(events[0], events[-1]))
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path)


def request(words: list[str]) -> tuple[str, int, TrainConfig]:
    """The phase, the ranks and the configuration that the command line asks for.

    Raises:
        ConfigError: one of them cannot be.
    """
    phase, ranks, *rest = [*words, *["phase3", "1"][len(words) :]]
    if phase not in PHASES:
        raise ConfigError(f"PHASE={phase} is unknown{nearest(phase, list(PHASES)) or ': give ' + ', '.join(PHASES)}")
    if not (ranks.isascii() and ranks.isdigit() and int(ranks)):
        raise ConfigError(f"GPUS={ranks} cannot be: give 1 or more")
    if taken := [word for word in rest if word.split("=")[0].lstrip("-") in FIXED]:
        raise ConfigError(f"{taken[0]} cannot be given: a profile sets {', '.join(sorted(FIXED))} itself")
    folder = Path("out") / "profile" / f"{phase}-{ranks}"
    trainer = ROOT / PHASES[phase] / "train.py"
    fixed = [f"--max_iters={LAST + 1}", "--log_interval=1", "--eval_iters=8", f"--out_dir={folder / 'run'}"]
    config: TrainConfig = parse(importlib.import_module(f"{PHASES[phase]}.train").Config, [*rest, *fixed], trainer)
    validate(config, int(ranks))
    config.check(int(ranks))
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device={config.device}: this machine has no GPU that torch can use; leave it out")
    return phase, int(ranks), config


def main(words: list[str]) -> None:
    """Profile, print the summary and the costliest operators, and say where the pictures are."""
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    phase, ranks, config = request(words)
    folder = Path(config.out_dir).parent.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "run").mkdir(parents=True)
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    device = "cuda" if on_gpu else "cpu"
    config.device = device
    try:
        run_on_ranks(profiled, ranks, PHASES[phase], config, folder, timeout=600, show=False, device=device)
    except RankFailed as failure:
        raise ConfigError(str(failure).strip().splitlines()[-1]) from None
    found = json.loads((folder / "timeline.json").read_text())
    said = summary(found["spans"])
    draw_timeline(found["spans"], said, folder / "timeline.png")
    draw_memory(found["memory"], folder / "memory.png")
    print((folder / "operators.txt").read_text())
    print(
        f"a step of rank 0: {said['step_ms']:.0f} ms, of them computing {said['computation_ms']:.0f}, communicating "
        f"{said['communication_ms']:.0f}, {said['overlap']:.0%} of that beside computation\n"
        f"wrote {folder}: timeline.png, memory.png, operators.txt, and rank0.json.gz and its like for ui.perfetto.dev"
    )


if __name__ == "__main__":
    with one_sentence():
        main(sys.argv[1:])
