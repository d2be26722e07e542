"""Record one training step of FSDP: every all-gather and reduce-scatter, and the memory of every rank after it.

The runs are real: 4 processes train the default model for a CPU, which `phase3_fsdp.fsdp.shard_model` shards, once for
each combination of three options. FSDP marks its work with names for the profiler, such as
`FSDP::all_gather (transformer.h.0)`. The memory tracker receives these marks, the collectives with their tensors, and
every tensor that is created.
"""

import dataclasses
import itertools
import re
import time
from typing import Any

import torch.distributed as dist

from measure.ledger import COLLECTIVES
from measure.tracker import CATEGORIES, MemoryTracker, tensors_in
from nanoGPT.costs import ring_bytes
from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer
from phase3_fsdp.costs import expected_traffic
from phase3_fsdp.fsdp import FsdpConfig, init_shards, put_parameters_on_meta, shard_model
from workshop.ranks import run_on_ranks

RANKS = 4
STEP = 1  # the second step of the run, because the first one also allocates the optimizer state
CONFIG = FsdpConfig(
    dataset="shakespeare_char",
    device="cpu",
    dtype="float32",
    n_layer=4,
    n_head=4,
    n_embd=128,
    block_size=64,
    batch_size=8,
    gradient_accumulation_steps=RANKS,
    dropout=0.0,
)
ROOT_UNIT = "root"
SWITCHES: dict[str, tuple[Any, ...]] = {  # values of the options; the first one of each is the default
    "fsdp_activation_checkpointing": ("none", "full"),
    "fsdp_reshard_after_forward": (True, False),
}
MARK = re.compile(r"FSDP::(\w+)(?: \((?:transformer\.)?(.*)\))?")

DIRECTIONS = {"pre_forward": "forward", "pre_backward": "backward"}
COLLECTIVE_MARKS = {"all_gather": "all-gather", "post_backward_reduce": "reduce-scatter"}


class StepRecorder:
    """Records the events of one step on this rank.

    Args:
        reshards: whether FSDP frees a unit after its forward.

    Attributes:
        memory: the memory tracker of the step; set it before the step begins.
        events: list of (kind, unit, bytes of the full tensor). The kinds are all-gather, forward, free, recompute,
            backward, reduce-scatter and update.
        entries: for each event, the number of entries of the tracker's timeline when the event began.
        times: for each event, when it began, in seconds of `time.perf_counter`.
    """

    def __init__(self, reshards: bool) -> None:
        self.reshards = reshards
        self.memory: MemoryTracker | None = None
        self.events: list[tuple[str, str, int]] = []
        self.entries: list[int] = []
        self.times: list[float] = []
        self.open_marks: list[str] = []

    def see(self, operator: Any, args: Any) -> None:
        """Record an operator that is about to run, if it begins or ends an event."""
        if operator.namespace == "profiler":
            if "enter" in operator.__name__:
                self.open_marks.append(args[0])
                self.begin_mark(args[0])
            else:
                self.end_mark(self.open_marks.pop())
        elif operator.namespace == "c10d" and (found := COLLECTIVES.get(operator.__name__.split(".")[0])):
            kind, position = found
            last_kind, unit, _ = self.events[-1]
            assert last_kind == kind, f"{kind} was called during {last_kind}"
            self.events[-1] = (kind, unit, sum(t.nbytes for t in tensors_in(args[position])))

    def begin_mark(self, text: str) -> None:
        """Record the begin of a collective, of freeing a unit, or of the update."""
        if text.startswith("Optimizer.step"):
            self.add("update", ROOT_UNIT)
        elif match := MARK.fullmatch(text):
            stage, unit = match[1], match[2] or ROOT_UNIT
            is_freed = stage == "post_forward" and self.reshards and unit != ROOT_UNIT
            if stage in COLLECTIVE_MARKS:
                self.add(COLLECTIVE_MARKS[stage], unit)
            elif is_freed or stage == "post_backward_reshard":
                self.add("free", unit)

    def end_mark(self, text: str) -> None:
        """Record the begin of a unit's forward or backward pass: all that FSDP does before it has ended.

        FSDP prefetches other units inside this preparation or directly after it.
        """
        if (match := MARK.fullmatch(text)) and match[1] in DIRECTIONS:
            self.add(DIRECTIONS[match[1]], match[2] or ROOT_UNIT)
        elif "_prefetch for " in text and not self.open_marks:  # the unit has not computed anything yet
            position = next(i for i in reversed(range(len(self.events))) if self.events[i][0] in DIRECTIONS.values())
            kind, unit, _ = self.events.pop(position)
            del self.entries[position], self.times[position]
            self.add(kind, unit)

    def watch_modules(self, model: GPT) -> None:
        """Record when a block is recomputed, and when the root continues after the last block."""

        def begin_block(unit: str) -> None:
            if self.events[-1][:2] == ("backward", unit):
                self.events[-1] = ("recompute", unit, 0)

        def end_block(unit: str) -> None:
            if self.events[-1][:2] == ("recompute", unit):
                self.add("backward", unit)

        for i in range(len(model.blocks)):
            first, last = (model.get_submodule(f"transformer.h.{i}.{name}") for name in ("ln_1", "mlp"))
            first.register_forward_pre_hook(lambda *_, unit=f"h.{i}": begin_block(unit))
            # A recomputation ends early, with an exception, as soon as it has all tensors that the backward needs.
            last.register_forward_hook(lambda *_, unit=f"h.{i}": end_block(unit), always_call=True)
        head = model.get_submodule("transformer.ln_f")
        head.register_forward_pre_hook(lambda *_: self.add("forward", ROOT_UNIT))

    def add(self, kind: str, unit: str) -> None:
        """Add an event that begins now. The size of a collective is not known yet."""
        assert self.memory is not None
        self.events.append((kind, unit, 0))
        self.entries.append(len(self.memory.timeline))
        self.times.append(time.perf_counter())

    def memory_after_events(self) -> list[list[int]]:
        """Return the bytes by category after each event, in the order of CATEGORIES."""
        assert self.memory is not None
        timeline = self.memory.timeline
        ends = [*self.entries[1:], len(timeline)]
        return [[timeline[end - 1][1][name] for name in CATEGORIES] for end in ends]


def run_step(options: dict[str, Any]) -> dict[str, Any]:
    """Train this rank with some options up to step STEP, and record that step. Collective."""
    config = dataclasses.replace(CONFIG, **options)
    run = create_runtime(config.device, config.dtype)
    data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    vocab_size = data.tokenizer["vocab_size"]
    with put_parameters_on_meta():
        model = GPT(GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": vocab_size}))
    model = shard_model(model, config, run)
    init_shards(model, config, run)
    optimizer = configure_optimizer(model, config)
    recorder = StepRecorder(config.fsdp_reshard_after_forward)
    for step in range(STEP + 1):
        batch = data.batch("train", TRAIN, step, run.rank)
        if step == STEP:
            recorder.watch_modules(model)
        dist.barrier()
        with MemoryTracker(model, optimizer, on_operator=recorder.see if step == STEP else ignore) as memory:
            recorder.memory = memory
            loss = model(*batch)
            loss.backward()
            optimizer.step()
        local_loss = loss.item()
        del loss
        optimizer.zero_grad()
    traffic = expected_traffic(model, config, run)
    losses: list[Any] = [None] * run.world_size
    dist.all_gather_object(losses, local_loss)
    return {
        "events": recorder.events,
        "times": recorder.times,
        "memory": recorder.memory_after_events(),
        "peak": [memory.peak[name] for name in CATEGORIES],
        "loss": sum(losses) / len(losses),
        "expected": {kind: traffic[kind, RANKS] for kind in ("all-gather", "reduce-scatter")},
    }


def ignore(operator: Any, args: Any) -> None:
    """Record nothing: the step only warms up."""


def run_steps(all_options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Record a step for each set of options on this rank. Collective."""
    return [run_step(options) for options in all_options]


def list_options() -> list[dict[str, Any]]:
    """Return all combinations of the switches. The first one has all defaults."""
    return [dict(zip(SWITCHES, values, strict=True)) for values in itertools.product(*SWITCHES.values())]


def record_runs(all_options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a step for each set of options on all ranks.

    Returns:
        For each: options, loss (mean over all ranks), events (the same on every rank), begin_ms (by rank and event,
        since the first event of any rank), memory (bytes by rank, event and category), peak (bytes by rank and
        category), expected: bytes of the full tensors by kind of collective (`expected_traffic`); and ring_bytes that
        each rank sends for them.

    Raises:
        RuntimeError: the ranks recorded different events.
    """
    by_rank = run_on_ranks(run_steps, RANKS, all_options, show=False)
    runs = []
    for options, ranks in zip(all_options, zip(*by_rank, strict=True), strict=True):
        first, zero = ranks[0], min(each["times"][0] for each in ranks)
        if any(each["events"] != first["events"] for each in ranks):
            raise RuntimeError("the ranks recorded different events: FSDP must run the same collectives on every rank")
        runs.append(
            {
                "options": options,
                "loss": first["loss"],
                "events": [list(event) for event in first["events"]],
                "begin_ms": [[round(1e3 * (begin - zero), 2) for begin in each["times"]] for each in ranks],
                "memory": [each["memory"] for each in ranks],
                "peak": [each["peak"] for each in ranks],
                "expected": first["expected"],
                "ring_bytes": {kind: ring_bytes(kind, size, RANKS) for kind, size in first["expected"].items()},
            }
        )
    return runs


def record() -> dict[str, Any]:
    """Return the recording: ranks, step, units, categories of memory, switches: values by option; and the runs."""
    return {
        "ranks": RANKS,
        "step": STEP,
        "units": [ROOT_UNIT, *(f"h.{i}" for i in range(CONFIG.n_layer))],
        "categories": list(CATEGORIES),
        "switches": {name: list(values) for name, values in SWITCHES.items()},
        "runs": record_runs(list_options()),
    }
