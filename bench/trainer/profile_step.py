"""Where a step's time and memory go: torch's profiler around two steps of a phase's own trainer.

    make profile PHASE=phase3 GPUS=2
    make profile PHASE=phase1 GPUS=4 ARGS="--batch_size=4 --dropout=0.2"     # any field of the configuration

Writes into out/profile/PHASE-GPUS: a trace of every rank to open in Perfetto (ui.perfetto.dev), timeline.png with the
computation and the communication of rank 0 and how much of the latter the former hides, memory.png with its memory by
category, and operators.txt, the ten that take longest. On a GPU the timeline is of kernels; without one, of the
operators that compute, in the thread that runs the steps, and of gloo's threads.
"""

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from bench.matrix.cells import PHASES
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.job.parse import parse
from nanoGPT.memory.tracker import CATEGORIES, Memory
from nanoGPT.metrics.ledger import Ledger
from nanoGPT.train_config import TrainConfig, validate
from workshop.ranks import RankFailed, run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
# The steps that the profiler sees, and the one whose memory is watched: torch runs a compiled model uncompiled from
# then on.
FIRST, LAST, REMEMBERED = 2, 3, 4
FIXED = {"max_iters", "log_interval", "eval_iters", "out_dir", "init_from", "ledger"}
Spans = list[tuple[float, float]]  # begin and end, ms
COMMUNICATION = ("gloo:", "nccl")
# What computes on a CPU. Spans of autograd's nodes, of DDP and of FSDP are not here, for they also wait. Phase 2's
# optimizer calls its kernels with no operator around them; of a compiled model there is a span for a whole graph.
COMPUTATION = (
    "aten::",
    "fsdp::",
    "phase2_triton::",
    "torch::distributed::reducer::",
    "Optimizer.step#TritonAdamW",
    "## Call CompiledFxGraph",
)


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
            settle()
            profiler.start()
        if step == REMEMBERED:
            with Memory(ledger.model, ledger.optimizer, ledger.run.device) as memory:
                yield
            remembered.append(memory)
        else:
            with torch.profiler.record_function(f"step {step}"):
                yield
        if step == LAST:
            settle()
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


def settle() -> None:
    """Let gloo's threads end what is in flight: what ends after the profiler writes into memory that it has freed."""
    if dist.is_initialized():
        dist.barrier()
    time.sleep(0.2)


def spans_of(events: Any) -> dict[str, list[tuple[str, float, float]]]:
    """Steps, computation and communication, in ms since the first; each kind's spans by their begin."""
    on_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    found: dict[str, list[tuple[str, float, float]]] = {"step": [], "computation": [], "communication": []}
    steps = [each for each in events if each.name.startswith("step ") and each.device_type != DeviceType.CUDA]
    zero, thread = min(event.time_range.start for event in steps), steps[0].thread
    for event in events:
        span = (event.name, (event.time_range.start - zero) / 1e3, (event.time_range.end - zero) / 1e3)
        here = (event.device_type == DeviceType.CUDA) == on_gpu
        if event in steps:
            found["step"].append(span)
        elif here and event.name.startswith(COMMUNICATION):
            found["communication"].append(span)
        elif here and computes(event, thread, on_gpu):
            found["computation"].append(span)
    return {kind: sorted(spans, key=lambda span: span[1]) for kind, spans in found.items()}


def computes(event: Any, thread: int, on_gpu: bool) -> bool:
    """Whether an event is a kernel, or an operator that computes in this thread: gloo's copy what they send."""
    if on_gpu:  # where the profiler also shows the names that Python gave to what it started
        return not event.is_user_annotation
    return event.thread == thread and event.name.startswith(COMPUTATION)


def union(spans: list[tuple[str, float, float]]) -> Spans:
    """The times at which at least one of some spans, in the order of their begins, goes on."""
    found: Spans = []
    for _, begin, end in spans:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def together(a: Spans, b: Spans) -> Spans:
    """The times at which two unions go on."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def lasting(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def summary(spans: dict[str, list[tuple[str, float, float]]]) -> dict[str, float]:
    """Milliseconds of a step of rank 0: those in which it computes, in which it only communicates, and the rest; and
    how much of all communication is hidden."""
    steps = union(spans["step"])
    computing, talking = (together(union(spans[kind]), steps) for kind in ("computation", "communication"))
    computed, talked, both = lasting(computing), lasting(talking), lasting(together(computing, talking))
    whole, count = lasting(steps), len(spans["step"])
    return {
        "step_ms": whole / count,
        "computation_ms": computed / count,
        "communication_ms": talked / count,
        "exposed_ms": (talked - both) / count,
        "rest_ms": (whole - computed - talked + both) / count,
        "overlap": both / talked if talked else 0.0,
    }


def sentence(said: dict[str, float]) -> str:
    """The summary in words; its first line adds up."""
    return (
        f"a step of rank 0: {said['step_ms']:.0f} ms, of them computing {said['computation_ms']:.0f}, only "
        f"communicating {said['exposed_ms']:.0f}, neither {said['rest_ms']:.0f}: Python, and waiting\n"
        f"communicating in all {said['communication_ms']:.0f} ms, {said['overlap']:.0%} of that beside computation"
    )


def draw_timeline(spans: dict[str, list[tuple[str, float, float]]], said: dict[str, float], path: Path) -> None:
    """Two rows of bars against time: what computes, and what is sent, where nothing computes in a darker colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3), layout="constrained")
    axes = figure.subplots()
    computing, talking = union(spans["computation"]), union(spans["communication"])
    rows = (  # a bar has no edge, which would be wider than most bars are
        (0, talking, "#b34700", "sent while nothing computes"),
        (0, together(talking, computing), "#ffb366", "sent beside computation"),
        (1, computing, "tab:blue", "computation"),
    )
    for height, bars, colour, label in rows:
        places = [(begin, end - begin) for begin, end in bars]
        axes.broken_barh(places, (height - 0.4, 0.8), color=colour, linewidth=0, label=label)
    for name, begin, _ in spans["step"]:
        axes.axvline(begin, color="grey", linewidth=0.8)
        axes.text(begin, 1.5, f" {name}", fontsize="small", va="bottom")
    axes.set_yticks([0, 1], ["communication", "computation"])
    axes.set(xlabel="ms", ylim=(-0.5, 1.8))
    axes.set_title(f"{said['overlap']:.0%} of the communication goes on beside computation")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def draw_memory(timeline: list[tuple[int, dict[str, int]]], path: Path) -> None:
    """Bytes by category, stacked, against the operators of a step."""
    from matplotlib.figure import Figure

    from bench.matrix.plot import COLORS

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    events = [event for event, _ in timeline]
    stacks = [[totals[name] / 1e6 for _, totals in timeline] for name in CATEGORIES]
    labels, colours = [name.replace("_", " ") for name in CATEGORIES], [COLORS[name] for name in CATEGORIES]
    axes.stackplot(events, stacks, labels=labels, colors=colours, step="post")
    axes.set(xlabel="operators of the step, in their order", ylabel="MB on rank 0", xlim=(events[0], events[-1]))
    axes.legend(fontsize="small", reverse=True, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)


def request(words: list[str]) -> tuple[str, int, TrainConfig]:
    """The phase, the ranks and the configuration that the command line asks for.

    Raises:
        ConfigError: one of them cannot be.
    """
    phase, ranks, *rest = [*words, *["phase3", "1"][len(words) :]]
    if phase not in PHASES:
        raise ConfigError(
            f"PHASE={phase} is unknown{did_you_mean(phase, list(PHASES)) or ': give ' + ', '.join(PHASES)}"
        )
    if not (ranks.isascii() and ranks.isdigit() and int(ranks)):
        raise ConfigError(f"GPUS={ranks} cannot be: give 1 or more")
    if taken := [word for word in rest if word.split("=")[0].lstrip("-") in FIXED]:
        raise ConfigError(f"{taken[0]} cannot be given: a profile sets {', '.join(sorted(FIXED))} itself")
    folder = Path("out") / "profile" / f"{phase}-{ranks}"
    trainer = ROOT / PHASES[phase] / "train.py"
    fixed = [f"--max_iters={REMEMBERED + 1}", "--log_interval=1", "--eval_iters=8", f"--out_dir={folder / 'run'}"]
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
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    config.device = "cuda" if on_gpu else "cpu"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as space:
        fresh = Path(space) / folder.name
        said = profile_into(fresh, PHASES[phase], ranks, config)
        shutil.rmtree(folder, ignore_errors=True)  # the last profile stands until there is another
        fresh.rename(folder)
    print((folder / "operators.txt").read_text())
    print(
        f"{sentence(said)}\n"
        f"wrote {folder}: timeline.png, memory.png, operators.txt, and rank0.json.gz and its like for ui.perfetto.dev"
    )


def profile_into(folder: Path, package: str, ranks: int, config: TrainConfig) -> dict[str, float]:
    """Profile on real ranks, and draw; the summary.

    Raises:
        ConfigError: what a rank said, in its last line.
    """
    (folder / "run").mkdir(parents=True)
    config.out_dir = str(folder / "run")
    try:
        run_on_ranks(profiled, ranks, package, config, folder, timeout=600, show=False, device=config.device)
    except RankFailed as failure:
        last = str(failure).strip().splitlines()[-1]
        raise ConfigError(last.removeprefix("nanoGPT.errors.ConfigError: ")) from None
    found = json.loads((folder / "timeline.json").read_text())
    said = summary(found["spans"])
    draw_timeline(found["spans"], said, folder / "timeline.png")
    draw_memory(found["memory"], folder / "memory.png")
    return said


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
