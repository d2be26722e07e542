"""Record one training step of FSDP: every all-gather and reduce-scatter, and the memory of every rank after it.

The run is real: 4 processes train the default model for a CPU, which `phase3_fsdp.fsdp.shard_model` shards. FSDP marks
its work with names for the profiler, such as `FSDP::all_gather (transformer.h.0)`. The memory tracker receives these
marks, the collectives with their tensors, and every tensor that is created.
"""

import dataclasses
import re
from typing import Any

import torch.distributed as dist

from nanoGPT.dataset import TRAIN, TokenData
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.memory.costs import ring_bytes
from nanoGPT.memory.tracker import CATEGORIES, MemoryTracker, tensors_in
from nanoGPT.metrics.ledger import COLLECTIVES
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer
from phase3_fsdp.costs import expected_traffic
from phase3_fsdp.fsdp import FsdpConfig, init_device, init_shards, shard_model
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
MARK = re.compile(r"FSDP::(\w+)(?: \((?:transformer\.)?(.*)\))?")

DIRECTIONS = {"pre_forward": "forward", "pre_backward": "backward"}
COLLECTIVE_MARKS = {"all_gather": "all-gather", "post_backward_reduce": "reduce-scatter"}
FREEING = ("post_forward", "post_backward_reshard")  # marks that begin when a unit frees its full parameters


class StepRecorder:
    """Records the events of one step on this rank.

    Attributes:
        memory: the memory tracker of the step; set it before the step begins.
        events: list of (kind, unit, bytes of the full tensor). The kinds are all-gather, forward, free, backward,
            reduce-scatter and update.
        entries: for each event, the number of entries of the tracker's timeline when the event began.
    """

    def __init__(self) -> None:
        self.memory: MemoryTracker | None = None
        self.events: list[tuple[str, str, int]] = []
        self.entries: list[int] = []
        self.unit, self.direction = ROOT_UNIT, ""

    def see(self, operator: Any, args: Any) -> None:
        """Record an operator that is about to run, if it begins an event."""
        if operator.namespace == "profiler" and args and isinstance(args[0], str):
            self.see_mark(args[0])
        elif operator.namespace == "c10d" and (found := COLLECTIVES.get(operator.__name__.split(".")[0])):
            kind, position = found
            assert self.events[-1][0] == kind, f"{kind} was called during {self.events[-1]}"
            self.events[-1] = (kind, self.unit, sum(t.nbytes for t in tensors_in(args[position])))

    def see_mark(self, text: str) -> None:
        """Record the begin of a stage of a unit, or of the update."""
        if text.startswith("Optimizer.step"):
            self.add("update", ROOT_UNIT)
        elif match := MARK.fullmatch(text):
            stage, self.unit = match[1], match[2] or ROOT_UNIT
            is_root = self.unit == ROOT_UNIT
            self.direction = DIRECTIONS.get(stage, self.direction)
            if stage in COLLECTIVE_MARKS:
                self.add(COLLECTIVE_MARKS[stage], self.unit)
            elif stage == "all_gather_copy_out" or (stage == "pre_backward" and is_root):  # the root is still gathered
                self.add(self.direction, self.unit)
            elif stage in FREEING and not (stage == "post_forward" and is_root):
                self.add("free", self.unit)

    def add(self, kind: str, unit: str) -> None:
        """Add an event that begins now. The size of a collective is not known yet."""
        assert self.memory is not None
        self.events.append((kind, unit, 0))
        self.entries.append(len(self.memory.timeline))

    def memory_after_events(self) -> list[list[int]]:
        """Return the bytes by category after each event, in the order of CATEGORIES."""
        assert self.memory is not None
        timeline = self.memory.timeline
        ends = [*self.entries[1:], len(timeline)]
        return [[timeline[end - 1][1][name] for name in CATEGORIES] for end in ends]


def run_step() -> dict[str, Any]:
    """Train this rank up to step STEP, and record that step. Collective."""
    run = create_runtime(CONFIG.device, CONFIG.dtype)
    data = TokenData(CONFIG.dataset, CONFIG.block_size, CONFIG.batch_size, CONFIG.seed)
    vocab_size = data.tokenizer["vocab_size"]
    with init_device(CONFIG, run):
        model = GPT(GPTConfig.from_dict({**dataclasses.asdict(CONFIG), "vocab_size": vocab_size}))
    model = shard_model(model, CONFIG, run)
    init_shards(model, CONFIG, run)
    optimizer = configure_optimizer(model, CONFIG)
    for step in range(STEP + 1):
        recorder = StepRecorder()
        with MemoryTracker(model, optimizer, on_operator=recorder.see) as memory:
            recorder.memory = memory
            loss = model(*data.batch("train", TRAIN, step, run.rank))
            loss.backward()
            optimizer.step()
        local_loss = loss.item()
        del loss
        optimizer.zero_grad()
    traffic = expected_traffic(model, CONFIG, run)
    losses: list[Any] = [None] * run.world_size
    dist.all_gather_object(losses, local_loss)
    return {
        "events": recorder.events,
        "memory": recorder.memory_after_events(),
        "peak": [memory.peak[name] for name in CATEGORIES],
        "loss": sum(losses) / len(losses),
        "units": [ROOT_UNIT, *(f"h.{i}" for i in range(CONFIG.n_layer))],
        "expected": {kind: traffic[kind, RANKS] for kind in ("all-gather", "reduce-scatter")},
    }


def record() -> dict[str, Any]:
    """Run the step on all ranks, and return the recording.

    Returns:
        ranks, step, loss (mean over all ranks), units, categories of memory, events (the same on every rank), memory
        (bytes by rank, event and category), peak (bytes by rank and category), expected: bytes of the full tensors by
        kind of collective (`expected_traffic`); and ring_bytes that each rank sends for them.

    Raises:
        RuntimeError: the ranks recorded different events.
    """
    runs = run_on_ranks(run_step, RANKS, show=False)
    first = runs[0]
    if any(each["events"] != first["events"] for each in runs):
        raise RuntimeError("the ranks recorded different events: FSDP must run the same collectives on every rank")
    return {
        "ranks": RANKS,
        "step": STEP,
        "loss": first["loss"],
        "units": first["units"],
        "categories": list(CATEGORIES),
        "events": [list(event) for event in first["events"]],
        "memory": [each["memory"] for each in runs],
        "peak": [each["peak"] for each in runs],
        "expected": first["expected"],
        "ring_bytes": {kind: ring_bytes(kind, size, RANKS) for kind, size in first["expected"].items()},
    }
