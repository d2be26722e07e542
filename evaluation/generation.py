"""Generate the answers to many problems at once, with every rank running the model the same number of times.

Each rank has `batch_size` slots. A slot holds one sequence and its keys and values; when the sequence ends, the next
one takes its slot (continuous batching, Yu et al. 2022, in its simplest form). In one *round* every rank runs the model
once: it reads a new prompt, or generates one token for each of its sequences, or, with nothing left to do, runs a
single token. A model that is sharded with FSDP all-gathers its layers in every round, so all ranks must take part. One
all-gather of a layer serves the sequences of all ranks.

With tensor parallelism all ranks compute the same sequences, and rank 0 decides which token comes next.

A sampled token depends only on the key (seed, problem, attempt, position) and on the logits.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.sample import KVCache

CACHE_STEP = 64  # tokens by which a cache grows at least


class LayerCache(KVCache):
    """Keys and values of one layer for sequences of different lengths: two (slots, nh, capacity, hs) tensors."""

    def __init__(self, step: "SlotCache") -> None:
        super().__init__()
        self.step = step

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.step.longest

    @length.setter
    def length(self, value: int) -> None:
        pass  # SlotCache counts the tokens, once for all layers

    @property
    def first_position(self) -> Tensor:
        return self.step.positions

    @property
    def mask(self) -> Tensor | None:  # type: ignore[override]
        return self.step.mask

    def extend(self, k: Tensor, v: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Store (B, nh, T, hs) keys and values of the rows of this forward pass, and return all that they may read."""
        step, T = self.step, k.size(2)
        self._grow(k, v, step.longest + T if step.row is not None else step.window)
        assert self.keys is not None and self.values is not None
        if step.row is not None:  # a new prompt: it reads only itself
            self.keys[step.row, :, :T], self.values[step.row, :, :T] = k[0], v[0]
            return k, v
        rows = torch.arange(k.size(0), device=k.device)
        self.keys[rows, :, step.positions[:, 0]] = k[:, :, 0]
        self.values[rows, :, step.positions[:, 0]] = v[:, :, 0]
        return self.keys[:, :, : step.window], self.values[:, :, : step.window]

    def _grow(self, k: Tensor, v: Tensor, length: int) -> None:
        """Make room for `length` tokens per slot. The capacity doubles, so a token is copied once on average."""
        capacity = self.keys.size(2) if self.keys is not None else 0
        if length <= capacity:
            return
        capacity = min(max(length, 2 * capacity, CACHE_STEP), max(length, self.step.limit))
        for name, like, old in (("keys", k, self.keys), ("values", v, self.values)):
            new = like.new_zeros(self.step.slots, like.size(1), capacity, like.size(3))
            if old is not None:
                new[:, :, : old.size(2)] = old
            setattr(self, name, new)


class SlotCache:
    """The caches of all layers, and which sequence is in which slot.

    Attributes:
        lengths: tokens in each slot.
        longest: number of tokens before this forward pass, of the longest sequence in it.
        positions: (B, 1), the position of the next token of each sequence.
        window: number of tokens that a forward pass of one token reads, a multiple of CACHE_STEP or the limit. With a
            window of another size for every token, cuDNN would build a plan for every token.
        mask: (B, 1, 1, window), which tokens each sequence may read; None for a new prompt.
        row: the slot of a new prompt; None if all slots generate.

    Args:
        layers: number of layers.
        slots: number of sequences.
        limit: largest number of tokens of a sequence.
        device: of the model.
    """

    def __init__(self, layers: int, slots: int, limit: int, device: torch.device) -> None:
        self.slots, self.limit, self.device = slots, limit, device
        self.lengths = [0] * slots
        self.longest, self.window, self.row = 0, 0, None  # type: int, int, int | None
        self.positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.mask: Tensor | None = None
        self.layers = [LayerCache(self) for _ in range(layers)]

    def begin(self, slot: int | None) -> list[LayerCache]:
        """Prepare a forward pass of one new prompt, (1, T), for a slot; or with None of one token per slot, (slots, 1).

        Empty slots compute, and nothing reads them.
        """
        self.row = slot
        if slot is not None:
            self.longest, self.mask = 0, None
            self.positions = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            return self.layers
        self.longest = max(self.lengths)
        self.positions = torch.tensor(self.lengths, device=self.device)[:, None]
        self.window = max(self.longest + 1, min(self.limit, -(-(self.longest + 1) // CACHE_STEP) * CACHE_STEP))
        self.mask = (torch.arange(self.window, device=self.device) <= self.positions)[:, None, None]
        return self.layers

    def free_slot(self, slot: int) -> None:
        """Forget the sequence in a slot. When all slots are empty, the memory is freed."""
        self.lengths[slot] = 0
        if not any(self.lengths):
            for layer in self.layers:
                layer.keys = layer.values = None


class LanguageModel(Protocol):
    """What generation needs from a model."""

    def new_cache(self, slots: int, limit: int) -> SlotCache:
        """Return an empty cache for `slots` sequences of at most `limit` tokens."""
        ...

    def next_logits(self, ids: Tensor, cache: SlotCache | None, slot: int | None) -> Tensor:
        """Return the fp32 logits of the next token, (B, V), without padding ids.

        Args:
            ids: (1, T), a prompt for `slot`; or (slots, 1), the last token of each sequence.
            cache: of the sequences; None: nothing is kept.
            slot: the slot of a new prompt; None: one token per slot.
        """
        ...


@dataclass(frozen=True)
class Task:
    """One sequence to generate: an attempt at a problem.

    Attributes:
        problem, attempt: which problem, and which attempt at it.
        ids: the prompt.
        max_new: number of tokens to generate at most.
        has_ended: whether generated tokens end the answer.
    """

    problem: int
    attempt: int
    ids: list[int]
    max_new: int
    has_ended: Callable[[list[int]], bool] = field(default=lambda _: False, compare=False)


@dataclass
class Result:
    """The result of a task.

    Attributes:
        ids: the generated tokens.
        seconds: from the round that read the prompt to the one that finished the task.
        is_cut_off: whether the answer has not ended, but reached its largest number of tokens.
    """

    problem: int
    attempt: int
    ids: list[int]
    seconds: float
    is_cut_off: bool


@dataclass
class RunningSequence:
    """A task in a slot. `begin` is the time at which its prompt was read."""

    task: Task
    begin: float
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest one with temperature 0, else at random by probability."""

    temperature: float = 0.0
    seed: int = 1337

    def choose(self, logits: Tensor, running: Sequence[RunningSequence]) -> list[int]:
        """Return the next token of each sequence, from their (B, V) fp32 logits."""
        if self.temperature < 1e-5:  # the likeliest token; a division would give infinite logits
            return logits.argmax(-1).tolist()
        rows = zip(logits.cpu(), running, strict=True)  # the same draws on every device
        return [self.sample(row, each.task, len(each.ids)) for row, each in rows]

    def sample(self, logits: Tensor, task: Task, position: int) -> int:
        """Return a random next token of a task, from (V,) logits on the CPU.

        It is the first token whose cumulative probability exceeds a uniform number. torch's multinomial takes 8 times
        as long: 0.9 ms with GPT-2's vocabulary.
        """
        key = f"{self.seed}/{task.problem}/{task.attempt}/{position}"
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
        cumulative = (logits.double() / self.temperature).softmax(0).cumsum(0)  # (V,)
        number = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * cumulative[-1]
        return int(torch.searchsorted(cumulative[:-1], number, right=True))


class Generator:
    """Runs tasks on all ranks in rounds. Create it on every rank with the same arguments, and call `run` on every rank.

    Args:
        model: this rank's part of the model.
        run: this rank's Runtime.
        slots: sequences per rank, or with `is_replicated` in total.
        limit: largest number of tokens of a sequence, its prompt included.
        sampling: how tokens are chosen.
        is_replicated: all ranks compute the same sequences (tensor parallelism); else each rank has its own.
    """

    def __init__(
        self,
        model: LanguageModel,
        run: Runtime,
        slots: int,
        limit: int,
        sampling: Sampling,
        is_replicated: bool,
    ) -> None:
        self.model, self.runtime, self.slots, self.sampling = model, run, slots, sampling
        self.is_shared = is_replicated and run.world_size > 1
        self.groups = 1 if is_replicated else run.world_size  # of ranks with different sequences
        self.group = 0 if is_replicated else run.rank
        self.cache = model.new_cache(slots, limit)
        self.active: dict[int, RunningSequence] = {}
        self.waiting: deque[tuple[int, Task]] = deque()  # tasks with a slot whose prompt has not been read
        self.finished: list[Result] = []
        self.rounds, self.should_stop = 0, False

    @torch.no_grad()
    def run(self, tasks: Sequence[Task]) -> Iterator[list[Result]]:
        """Compute all tasks, or stop early after a signal to any rank. Collective.

        Yields:
            After each round, the new results of all ranks. Every rank gets the same lists.
        """
        queue = deque(tasks)
        while True:
            results, free = self._exchange()
            for owner in assign_slots(free, len(queue)):
                task = queue.popleft()
                if owner == self.group:
                    used = {*self.active, *(slot for slot, _ in self.waiting)}
                    self.waiting.append((next(slot for slot in range(self.slots) if slot not in used), task))
                free[owner] -= 1
            yield results
            if self.should_stop or (not queue and all(count == self.slots for count in free)):
                return
            self._run_round()

    def _exchange(self) -> tuple[list[Result], list[int]]:
        """Return the new results of all ranks, and the number of free slots of each group. Collective."""
        free = self.slots - len(self.active) - len(self.waiting)
        results, self.finished = self.finished, []
        mine = torch.tensor([free, len(results), self.runtime.stop_reason is not None])
        counts = mine[None].repeat(self.runtime.world_size, 1)
        if self.runtime.world_size > 1:
            dist.all_gather(list(counts.unbind()), mine, group=self.runtime.group)
        self.should_stop = bool(counts[:, 2].any())
        if self.groups > 1 and counts[:, 1].any():
            results = [result for part in self.runtime.gather(results) for result in part]
        return results, counts[: self.groups, 0].tolist()

    def _run_round(self) -> None:
        """Run the model once."""
        self.rounds += 1
        self.runtime.enter_stage(f"round {self.rounds}")
        if self.waiting:
            self._read_prompt(*self.waiting.popleft())
        elif self.active:
            self._generate()
        else:  # the other ranks need this rank's shards
            self.model.next_logits(torch.zeros(1, 1, dtype=torch.int64, device=self.runtime.device), None, None)

    def _read_prompt(self, slot: int, task: Task) -> None:
        begin = time.perf_counter()
        logits = self.model.next_logits(torch.tensor([task.ids], device=self.runtime.device), self.cache, slot)
        self.cache.lengths[slot] = len(task.ids)
        self.active[slot] = RunningSequence(task, begin)
        self._append({slot: 0}, logits)

    def _generate(self) -> None:
        ids = [self.active[slot].ids[-1] if slot in self.active else 0 for slot in range(self.slots)]
        logits = self.model.next_logits(torch.tensor(ids, device=self.runtime.device)[:, None], self.cache, None)
        for slot in self.active:
            self.cache.lengths[slot] += 1
        self._append({slot: slot for slot in self.active}, logits)

    def _append(self, row_of_slot: dict[int, int], logits: Tensor) -> None:
        """Choose the next token of each slot, and finish the sequences that end with it."""
        running = [self.active[slot] for slot in row_of_slot]
        if self.is_shared:  # rounding may differ between ranks; the tokens must not
            tokens = torch.zeros(len(running), dtype=torch.int64)
            if self.runtime.is_main:
                tokens = torch.tensor(self.sampling.choose(logits[list(row_of_slot.values())], running))
            dist.broadcast(tokens, 0, group=self.runtime.group)
            chosen = tokens.tolist()
        else:
            chosen = self.sampling.choose(logits[list(row_of_slot.values())], running)
        for slot, token in zip(row_of_slot, chosen, strict=True):
            sequence = self.active[slot]
            sequence.ids.append(token)
            task, ids = sequence.task, sequence.ids
            has_ended = task.has_ended(ids)
            if has_ended or len(ids) == task.max_new:
                seconds = time.perf_counter() - sequence.begin
                self.finished.append(Result(task.problem, task.attempt, ids, seconds, not has_ended))
                del self.active[slot]
                self.cache.free_slot(slot)


def assign_slots(free: Sequence[int], tasks: int) -> list[int]:
    """Return the owner of each of the next tasks: always the group with most free slots, the first of them if equal."""
    free = list(free)
    owners: list[int] = []
    while tasks > len(owners) and max(free) > 0:
        owner = free.index(max(free))
        free[owner] -= 1
        owners.append(owner)
    return owners
