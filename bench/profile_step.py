"""Profile the time of a training step: torch's profiler records two steps of a phase's trainer.

    make profile PHASE=phase3 GPUS=2
    make profile PHASE=phase1 GPUS=4 ARGS="--batch_size=4 --dropout=0.2"     # any field of the configuration

The command writes into out/profile/PHASE-GPUS:

- rank0.json.gz, rank1.json.gz, ...: the timeline of every rank, which Perfetto (ui.perfetto.dev) opens, and without a
  network the page chrome://tracing of Chromium
- timeline.json: the begin and the end of the computation and the communication of rank 0
- operators.txt: the ten operators that take longest

It prints how much of the communication overlaps with computation. On a GPU, kernels count as computation. Without a
GPU, these are the operators that compute in the thread of the training loop.
"""

import importlib
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType

from bench.phases import PHASES, ROOT, Ranks, find_phase, load_config_class
from nanoGPT import observers
from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.job.parse import parse
from nanoGPT.train_config import TrainConfig, validate
from operate.launch import split_arguments
from operate.ranks import RankFailed, run_on_ranks

FIRST, LAST = 2, 3  # steps that the profiler records
FIXED_FIELDS = {"max_iters", "log_interval", "eval_iters", "out_dir", "init_from", "eval_only", "observers"}
FIXED_FIELDS |= {"ledger", "diagnostics_interval", "track", "stall_seconds"}  # of observers that are not used
Spans = list[tuple[float, float]]  # begin and end, ms
COMMUNICATION = ("gloo:", "nccl")
# Prefixes of the profiler events that count as computation on a CPU. Events of autograd nodes, DDP and FSDP do not
# count, because they also contain waiting. Phase 2's optimizer calls its kernels outside of any operator, so the event
# of its step counts. A compiled model has one event per graph.
COMPUTATION = (
    "aten::",
    "fsdp::",
    "phase2_triton::",
    "torch::distributed::reducer::",
    "Optimizer.step#TritonAdamW",
    "## Call CompiledFxGraph",
)


class Observer(observers.Observer):
    """Profiles a few steps, and writes the trace of this rank into the directory above that of the run.

    Rank 0 also writes the spans and the operators.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if config.device.startswith("cuda") else []
        self.sort = "self_device_time_total" if len(activities) > 1 else "self_cpu_time_total"
        self.profiler = torch.profiler.profile(activities=activities)

    def begin_step(self, step: int) -> None:
        if step == FIRST:
            wait_for_collectives()
            self.profiler.start()
        torch.get_device_module(self.run.device).synchronize()  # on a CPU, it does nothing
        self.span = torch.profiler.record_function(f"step {step}")
        self.span.__enter__()

    def end_step(self, step: int, loss_sum: Tensor, grad_norm: Tensor) -> None:
        torch.get_device_module(self.run.device).synchronize()  # on a CPU, it does nothing
        self.span.__exit__(None, None, None)
        if step == LAST:
            wait_for_collectives()
            self.profiler.stop()

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            return
        folder = Path(self.config.out_dir).parent
        self.profiler.export_chrome_trace(str(folder / f"rank{self.run.rank}.json.gz"))
        if self.run.is_main:
            averages = self.profiler.key_averages()
            averages[:] = [each for each in averages if not each.key.startswith("step ")]  # they contain all others
            table = averages.table(sort_by=self.sort, row_limit=10, max_name_column_width=60)
            (folder / "operators.txt").write_text(table)
            (folder / "timeline.json").write_text(json.dumps(collect_spans(self.profiler.events())))


def train_on_rank(package: str, config: TrainConfig) -> None:
    """Train a few steps on this rank. The profiler logs its start and stop to stderr, which goes into a file."""
    with open(Path(config.out_dir).parent / f"rank{os.environ.get('RANK', 0)}.err", "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    importlib.import_module(f"{package}.train").train(config)


def wait_for_collectives() -> None:
    """Wait until gloo's threads are idle. A collective that ends after the profiler would write into freed memory."""
    if dist.is_initialized():
        dist.barrier()
    time.sleep(0.2)


def collect_spans(events: Any) -> dict[str, list[tuple[str, float, float]]]:
    """Return the spans of steps, computation and communication: name, begin and end (ms), sorted by begin.

    Times are relative to the begin of the first step. On a GPU, computation and communication are those of the GPU. The
    steps are those of the host, which waits for the GPU at their ends: the profiler also reports a named range for each
    stream of the GPU, but only with the kernels that this thread has started directly.
    """
    uses_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    spans: dict[str, list[tuple[str, float, float]]] = {"step": [], "computation": [], "communication": []}
    steps = [each for each in events if each.name.startswith("step ") and each.device_type == DeviceType.CPU]
    zero, thread = min(event.time_range.start for event in steps), steps[0].thread
    for event in events:
        span = (event.name, (event.time_range.start - zero) / 1e3, (event.time_range.end - zero) / 1e3)
        is_counted = (event.device_type == DeviceType.CUDA) == uses_gpu  # on a GPU, only GPU events count
        if event in steps:
            spans["step"].append(span)
        elif is_counted and event.name.startswith(COMMUNICATION):
            spans["communication"].append(span)
        elif is_counted and is_computation(event, thread, uses_gpu):
            spans["computation"].append(span)
    return {kind: sorted(items, key=lambda span: span[1]) for kind, items in spans.items()}


def is_computation(event: Any, thread: int, uses_gpu: bool) -> bool:
    """Return whether an event is a kernel, or on a CPU an operator that computes in `thread`.

    Operators of gloo's threads do not count: they only copy the data that gloo sends.
    """
    if uses_gpu:  # the profiler also reports named ranges (record_function) as GPU events
        return not event.is_user_annotation
    return event.thread == thread and event.name.startswith(COMPUTATION)


def merge(spans: list[tuple[str, float, float]]) -> Spans:
    """Merge spans that overlap. The input must be sorted by begin."""
    merged: Spans = []
    for _, begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersect(a: Spans, b: Spans) -> Spans:
    """Return the spans that are in both of two merged lists."""
    intersection, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            intersection.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return intersection


def sum_durations(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def summarize(spans: dict[str, list[tuple[str, float, float]]]) -> dict[str, float]:
    """Return the mean milliseconds per step of rank 0, by activity.

    `exposed_ms` is communication without computation. `rest_ms` is the time without computation and communication.
    `overlap` is the fraction of the communication that overlaps with computation.
    """
    steps = merge(spans["step"])
    computation, communication = (intersect(merge(spans[kind]), steps) for kind in ("computation", "communication"))
    computation_ms, communication_ms = sum_durations(computation), sum_durations(communication)
    overlap_ms, total_ms = sum_durations(intersect(computation, communication)), sum_durations(steps)
    count = len(spans["step"])
    return {
        "step_ms": total_ms / count,
        "computation_ms": computation_ms / count,
        "communication_ms": communication_ms / count,
        "exposed_ms": (communication_ms - overlap_ms) / count,
        "rest_ms": (total_ms - computation_ms - communication_ms + overlap_ms) / count,
        "overlap": overlap_ms / communication_ms if communication_ms else 0.0,
    }


def format_summary(summary: dict[str, float]) -> str:
    """Return the summary as text. The three times in its first line add up to the step."""
    return (
        f"a step of rank 0 takes {summary['step_ms']:.0f} ms: {summary['computation_ms']:.0f} ms computation, "
        f"{summary['exposed_ms']:.0f} ms communication without computation, {summary['rest_ms']:.0f} ms Python and "
        "waiting\n"
        f"communication takes {summary['communication_ms']:.0f} ms in total, "
        f"{summary['overlap']:.0%} of it overlaps with computation"
    )


def parse_request(words: list[str]) -> tuple[str, int, TrainConfig]:
    """Return the phase, the number of ranks and the configuration of a command line.

    Raises:
        ConfigError: one of them is invalid.
    """
    arguments, trainer, rest = split_arguments(words)
    ranks, phase = command_line(Ranks, arguments).gpus, find_phase(trainer)
    if fixed_flags := [word for word in rest if word.split("=")[0].lstrip("-") in FIXED_FIELDS]:
        names = ", ".join(sorted(FIXED_FIELDS))
        raise ConfigError(f"{fixed_flags[0]} cannot be used here: make profile sets {names}; leave it out")
    folder = Path("out").resolve() / "profile" / f"{phase}-{ranks}"
    fixed = [f"--max_iters={LAST + 1}", "--log_interval=1", "--eval_iters=8", f"--out_dir={folder / 'run'}"]
    config = parse(load_config_class(phase), [*rest, *fixed], ROOT / PHASES[phase] / "train.py", ranks)
    validate(config, ranks)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device={config.device} needs a GPU, and torch finds none: leave out --device")
    return phase, ranks, config


def main(words: list[str]) -> None:
    """Profile; print the most expensive operators, the summary, and the paths of the files."""
    phase, ranks, config = parse_request(words)
    folder = Path(config.out_dir).parent
    uses_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    config = replace(config, device="cuda" if uses_gpu else "cpu")
    shutil.rmtree(folder, ignore_errors=True)
    summary = profile_into(folder, PHASES[phase], ranks, config)
    print((folder / "operators.txt").read_text())
    print(f"{format_summary(summary)}\nwrote {folder}: operators.txt, and rank*.json.gz: open these in ui.perfetto.dev")


def profile_into(folder: Path, package: str, ranks: int, config: TrainConfig) -> dict[str, float]:
    """Profile on real ranks, and return the summary.

    Raises:
        ConfigError: a rank failed; the message is the last line of its error.
    """
    (folder / "run").mkdir(parents=True)
    config = replace(config, observers="bench.profile_step")
    try:
        run_on_ranks(train_on_rank, ranks, package, config, timeout=600, show=False, device=config.device)
    except RankFailed as failure:
        last_line = str(failure).strip().splitlines()[-1]
        raise ConfigError(last_line.removeprefix("nanoGPT.errors.ConfigError: ")) from None
    return summarize(json.loads((folder / "timeline.json").read_text()))


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
