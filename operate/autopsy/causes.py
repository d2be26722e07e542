"""Find the cause of a failure, or of a slow run, in the evidence. The first rule that applies gives the answer."""

import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from operate.autopsy.evidence import Evidence
from operate.known_errors import KNOWN_ERRORS

MIN_BEATS = 6  # heartbeats of each rank, one per second, to decide which rank is slow
MIN_OTHERS_WAITING = 0.4  # fraction of heartbeats in which the other ranks wait for a straggler, at least
MAX_OWN_WAITING = 0.5  # of a straggler, as a fraction of the smallest waiting of the others
MIN_DEVIATION = 3.1  # of two fractions of waiting heartbeats, in standard errors, so that a short run is not blamed
MIN_LEAK_RECORDS = 12  # records of memory
MIN_LEAK = 0.05  # growth in the second half of a run, as a fraction of the memory at its start

# A regular expression for an error's message, its cause, and what to do: errors of the program, then those of its
# environment.
ERRORS: tuple[tuple[str, str, str], ...] = (
    (
        r"ready only once|marked as ready twice",
        "DDP received the gradient of a parameter twice in one backward pass",
        "use non-reentrant checkpointing (use_reentrant=False), or remove find_unused_parameters=True and call each "
        "block once per forward pass",
    ),
    (
        r"not on the expected device|[Ee]xpected all tensors to be on the same device|but found at least two devices",
        "a tensor is on a different device than the model",
        "move the tensor with to(run.device) before the forward pass",
    ),
    (
        r"out of memory|can't allocate memory",
        "memory ran out",
        "use activation checkpointing, a smaller --batch_size or more ranks: the message lists what uses the memory",
    ),
    *KNOWN_ERRORS,
)


@dataclass(frozen=True)
class Cause:
    """The answer of the autopsy.

    Attributes:
        kind: one word for tables: hang, killed, nan, ...
        text: which rank, in which step, why.
        evidence: what proves it, one sentence per line.
        remedy: what to do.
    """

    kind: str
    text: str
    evidence: list[str] = field(default_factory=list)
    remedy: str = ""


def describe_heartbeat(rank: int, heartbeat: dict[str, Any]) -> str:
    """Return where a rank was at its last heartbeat."""
    waits = ", waiting for other ranks" if heartbeat.get("waits") else ""
    waits = ", waiting for its GPU" if heartbeat.get("waits_for_device") else waits
    place = f"rank {rank}: step {heartbeat.get('step')}, {heartbeat.get('stage')}"
    return f"{place}, at {heartbeat.get('line') or 'an unknown line'}{waits}"


def compare_collectives(evidence: Evidence) -> Iterator[str]:
    """Yield how far each rank got in its sequence of collectives, if they differ, from torch's flight recorders."""
    for backend, by_rank in evidence.collectives.items():
        default = {rank: [e for e in entries if e.get("pg_id") == 0] for rank, entries in by_rank.items()}
        last = {rank: entries[-1] for rank, entries in default.items() if entries}  # of the group of all ranks
        numbers = {rank: int(entry.get("collective_seq_id", 0)) for rank, entry in last.items()}
        if len(set(numbers.values())) < 2:
            continue
        behind = min(numbers, key=numbers.__getitem__)
        ahead = max(numbers, key=numbers.__getitem__)
        names = {rank: str(entry.get("profiling_name", "?")).partition(":")[2] for rank, entry in last.items()}
        yield (
            f"flight recorder of {backend}: rank {ahead} has called collective {numbers[ahead]} ({names[ahead]}), and "
            f"rank {behind} only {numbers[behind]} ({names[behind]})"
        )


def find_mismatch(evidence: Evidence) -> Cause | None:
    """Find a rank that called another collective than the others: it was aborted, or received data of another size."""
    aborted = [rank for rank, text in evidence.stacks.items() if "Fatal Python error: Aborted" in text]
    text = " ".join([evidence.exit_line, *evidence.failures.values()])
    has_wrong_size = "collective mismatch" in text or "doesn't match expected size" in text
    on_gpu = any(beat.get("device") == "cuda" for beat in evidence.heartbeats.values())
    # The abort is a SIGSEGV if faulthandler crashes on the stack of a thread that runs.
    was_aborted = bool(aborted) and ("SIGABRT" in text or "SIGSEGV" in text)
    if not has_wrong_size and (on_gpu or not was_aborted):  # NCCL also aborts after a timeout
        return None
    others = [rank for rank in evidence.stacks if rank not in aborted]
    rank = aborted[0] if aborted else next(iter(evidence.failures))
    location = evidence.location(rank) or "an unknown line"
    lines = [f"rank {each} was at {evidence.location(each)}" for each in others if evidence.location(each)]
    return Cause(
        "mismatch",
        f"the ranks called different collectives: rank {rank} called one at {location} that the "
        "other ranks did not call",
        [*lines[:4], *compare_collectives(evidence)],
        "call every collective on all ranks: move it out of `if rank == 0`",
    )


def find_hang(evidence: Evidence) -> Cause | None:
    """Find the rank at fault in the message of the watchdog, if the job hung."""
    if not evidence.verdict:
        return None
    text = evidence.verdict.partition("; stacks of all ranks")[0]
    ranks = [int(number) for number in re.findall(r"^rank (\d+)", text)]
    others = [describe_heartbeat(r, beat) for r, beat in evidence.heartbeats.items() if r not in ranks]
    stacks = evidence.folder / "stacks" / f"rank{ranks[0] if ranks else 0}.txt"
    if "the process is stopped" in text:  # it continued to write its stacks, and called more collectives
        remedy = "find what stopped this process with SIGSTOP, such as a debugger or the batch system, and resume"
        return Cause("hang", text, others[:3], remedy)
    lines = [*others[:3], *compare_collectives(evidence)]
    return Cause("hang", text, lines, f"look at this line of code, and at the stacks of all threads in {stacks}")


def find_divergence(evidence: Evidence) -> Cause | None:
    """Find the ranks that the diagnostics reported for different norms or parameters."""
    for text in evidence.failures.values():
        if match := re.search(r"DivergedRanks: (step \d+: .*): (.*)", text):
            kind = "norm" if "gradient norms" in match[1] else "diverged"
            return Cause(kind, match[1], describe_records(evidence), match[2])
    return None


def format_number(value: float | None) -> str:
    """Return a number with six digits; the diagnostics write None for NaN and infinity."""
    return "not finite" if value is None else f"{value:.6g}"


def describe_records(evidence: Evidence) -> list[str]:
    """Return the loss and the gradient norm of each rank in its last record."""
    return [
        f"rank {rank}: loss {format_number(records[-1]['local_loss'])}, gradient norm "
        f"{format_number(records[-1]['grad_norm'])} in its last record"
        for rank, records in list(evidence.records.items())[:4]
        if records
    ]


def find_non_finite(evidence: Evidence) -> Cause | None:
    """Find the ranks, and the first weight and block, whose values are not finite."""
    text = next((text for text in evidence.failures.values() if "NonFiniteLoss" in text), evidence.exit_line)
    if "not finite" not in text:
        return None
    step = re.search(r"step (\d+)", text.partition("NonFiniteLoss")[2] or text)
    bad = [rank for rank, records in evidence.records.items() if records and records[-1]["local_loss"] is None]
    if bad and len(bad) < len(evidence.records):
        where = f"rank(s) {bad} alone"
        remedy = "look at the data and the device of this rank: the other ranks have finite losses"
    elif evidence.records:
        where, remedy = "every rank", "use a lower --learning_rate or --grad_clip, and resume from the last checkpoint"
    else:
        where = "some rank"
        remedy = "resume with --diagnostics_interval=1 to find the rank and the layer, or use a lower --learning_rate"
    lines = describe_records(evidence)
    for rank in bad[:1]:
        lines += describe_first_non_finite(evidence.records[rank][-1])
    return Cause("nan", f"the loss of {where} is not finite in step {step[1] if step else '?'}", lines, remedy)


def describe_first_non_finite(record: dict[str, Any]) -> list[str]:
    """Return the first weight and the first activation that are not finite."""
    lines = []
    for name, label in (("weight_norms", "weight"), ("activation_rms", "activation")):
        first = next((key for key, value in record.get(name, {}).items() if value is None), None)
        lines += [f"the first {label} that is not finite: {first}"] if first else []
    return lines


def find_error(evidence: Evidence) -> Cause | None:
    """Find the first rank that raised an exception or was killed."""
    if match := re.search(r"rank (\d+): it was killed by (\w+)", evidence.exit_line):
        beat = evidence.heartbeats.get(int(match[1]), {})
        remedy = "search dmesg for the out-of-memory killer, read logs/ and the log of the batch system, and resume"
        text = f"rank {match[1]} was killed by {match[2]}"
        lines = [describe_heartbeat(int(match[1]), beat)] if beat else []
        return Cause("killed", text, lines, remedy)
    rank, text = evidence.root_failure or (None, "")
    if rank is None:
        match = re.search(r"exit code \d+: rank (\d+): (.*)", evidence.exit_line)
        rank, text = (int(match[1]), match[2]) if match else (None, "")
    if rank is None:
        return None
    location = evidence.location(rank)
    lines = [f"{text[:300]}", *([f"at {location}"] if location else [])]
    for pattern, cause, remedy in ERRORS:
        if re.search(pattern, text):
            return Cause("error", f"rank {rank}: {cause}", lines, remedy)
    place = f" at {location}" if location else ""
    return Cause("error", f"rank {rank} failed first{place}: {text[:200]}", lines[1:], "fix this error, and resume")


def find_damage(evidence: Evidence) -> Cause | None:
    """Find a damaged checkpoint."""
    if not evidence.damaged:
        return None
    name, reason = next(iter(evidence.damaged.items()))
    used = evidence.checkpoint.name if evidence.checkpoint else "none"
    return Cause(
        "checkpoint",
        f"the checkpoint {name} is damaged: {reason}",
        [f"the newest complete checkpoint is {used}"],
        "check the disk and the file system; a resume uses the newest complete checkpoint",
    )


def find_leak(evidence: Evidence) -> Cause | None:
    """Find a rank whose memory grows from record to record, also in the second half of the run."""
    for rank, records in evidence.records.items():
        sizes = [each["memory"]["allocated"] for each in records if each["memory"]["allocated"]]
        if len(sizes) < MIN_LEAK_RECORDS:
            continue
        half = sizes[len(sizes) // 2 :]
        growth = half[-1] - half[0]
        steps = records[-1]["step"] - records[-len(half)]["step"]
        rises = sum(later > earlier for earlier, later in zip(half, half[1:], strict=False))
        if growth > MIN_LEAK * sizes[0] and rises >= 0.7 * (len(half) - 1):
            per_step = growth / max(1, steps)
            return Cause(
                "leak",
                f"the memory of rank {rank} grows by {per_step / 1e6:.2f} MB per step",
                [f"it was {half[0] / 1e6:,.1f} MB in the middle of the run, and {half[-1] / 1e6:,.1f} MB at its end"],
                "look for tensors that stay referenced after a step, such as losses in a list without .detach()",
            )
    return None


def find_straggler(evidence: Evidence) -> Cause | None:
    """Find a rank that rarely waits, while all others wait for it."""
    beats = {rank: each for rank, each in evidence.heartbeats.items() if each.get("beats", 0) >= MIN_BEATS}
    if len(beats) < 2 or len(beats) < len(evidence.heartbeats):
        return None
    waiting = {rank: each["waiting_beats"] / each["beats"] for rank, each in beats.items()}
    slowest, next_slowest = sorted(waiting, key=waiting.__getitem__)[:2]
    others = [fraction for rank, fraction in waiting.items() if rank != slowest]
    if min(others) < MIN_OTHERS_WAITING or waiting[slowest] > MAX_OWN_WAITING * min(others):
        return None
    pair = [beats[rank] for rank in (slowest, next_slowest)]
    mean = sum(each["waiting_beats"] for each in pair) / sum(each["beats"] for each in pair)
    error = math.sqrt(mean * (1 - mean) * sum(1 / each["beats"] for each in pair))  # of equally fast ranks
    if waiting[next_slowest] - waiting[slowest] < MIN_DEVIATION * error:
        return None
    return Cause(
        "straggler",
        f"rank {slowest} is slower than all others, which wait for it {statistics.fmean(others):.0%} of the time",
        [f"fraction of heartbeats in which each rank waits: { {r: round(w, 2) for r, w in waiting.items()} }"],
        f"check the device, the node and the data of rank {slowest} on host {beats[slowest].get('host')}",
    )


RULES: tuple[Callable[[Evidence], Cause | None], ...] = (
    find_hang,
    find_divergence,
    find_non_finite,
    find_mismatch,
    find_error,
    find_damage,
    find_leak,
    find_straggler,
)


def find_cause(evidence: Evidence) -> Cause:
    """Return the answer of the first rule that applies; a run without a fault has the kind "none"."""
    for rule in RULES:
        if cause := rule(evidence):
            return cause
    running = [rank for rank, beat in evidence.heartbeats.items() if not beat.get("ended")]
    if running:
        lines = [describe_heartbeat(rank, evidence.heartbeats[rank]) for rank in running[:4]]
        return Cause("none", "no fault was found: the run is still training, or all its processes were killed", lines)
    stopped = next((line for line in evidence.log if "stopped by" in line), "")
    return Cause("none", "no fault: the run was stopped by a signal" if stopped else "no fault: the run has ended")
