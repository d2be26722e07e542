"""What a rank's memory holds during a step, by category: every live storage, counted as it is born, resized and freed.

    with Memory(model, optimizer) as memory:
        loss = model(x, y)[1]
        loss.backward()
        optimizer.step()
    memory.peak            # {"parameters": 3179008, "gradients": ..., ...}, bytes
    memory.after_forward   # the same just before the last backward: what it finds kept

A dispatch mode sees the tensors that every operator returns, on any device and fake ones too. It does not see what an
operator holds while it runs, nor the allocator's rounding and gaps: `torch.cuda.max_memory_allocated` is a little more.
Nor are the copies counted that gloo makes of what it reduces: NCCL makes none.
torch runs a compiled model uncompiled where a mode watches, so that what is counted is the model's eager step. A tensor
that was alive before counts from when it is given or first used; DDP's buckets, from the first gradient put into them.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Totals = dict[str, int]  # bytes by category

# parameters        this rank's: its shards of them where they are sharded
# gradients         born in a backward and alive after it, whole or shards
# optimizer_state
# gathered          whole parameters of FSDP units, and the flat buffers in which they travel
# activations       born in a forward, also in one that a backward runs again
# other             all else: temporaries of the backward and the optimizer, buffers of reduce-scatters
STATE = ("parameters", "gradients", "optimizer_state")
CATEGORIES = (*STATE, "gathered", "activations", "other")

# What operators tell of some of their arguments, named by their positions or their keyword.
TOLD_BY: dict[str, tuple[slice | str, str]] = {
    "fsdp::all_gather_copy_in": (slice(2), "gathered"),  # from shards, or copies of them in another dtype, to a buffer
    "c10d::_allgather_base_": (slice(1), "gathered"),
    "fsdp::split_with_sizes_copy": ("out", "gathered"),
    "fsdp::chunk_cat": ("out", "other"),  # the reduce-scatter's input, which gloo may hold beyond the backward's end
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class Held:
    """A live storage: its bytes, its category, the event that showed it first, and whether it may be a gradient."""

    __slots__ = ("bytes", "category", "maybe_gradient", "ref", "since")

    def __init__(self, ref: Any, category: str, since: int, maybe_gradient: bool) -> None:
        self.ref, self.bytes, self.category = ref, 0, category
        self.since, self.maybe_gradient = since, maybe_gradient


class Memory(TorchDispatchMode):
    """Counts the storages of the tensors that are alive inside it. Nothing stays behind when it ends, also by an error.

    Args:
        model: whose parameters and gradients are held from the start.
        optimizer: whose state is; with FSDP its parameters are the shards also where a unit is gathered at the start.
        device: count tensors on this device alone; None counts them wherever they are.
        also: told of every operator that is not aten's, and of its arguments: a second mode would cost as much as this.

    Attributes:
        timeline: (event, bytes by category): whenever gathered bytes changed, and whenever the total had moved by a
            hundredth of its peak. Events are operators and resizes, in their order.
        part: a name for what runs now, which may be set at any time; each has a peak of its own in `peak_of_part`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        also: Callable[[Any, Any], None] = lambda operator, args: None,
    ) -> None:
        super().__init__()
        self.model, self.optimizer, self.device, self.also = model, optimizer, device, also
        self.timeline: list[tuple[int, Totals]] = []
        self._now: Totals = dict.fromkeys(CATEGORIES, 0)
        self._peak, self._peak_bytes = (0, dict(self._now)), 0
        self.part, self._parts, self._part_bytes = "", {"": self._peak}, {"": 0}
        self._noted = (-1, 0)  # gathered bytes and all bytes in the newest entry of the timeline
        self._after_forward: tuple[int, Totals] | None = None
        self._held: dict[int, Held] = {}  # by the address of the C++ storage, which lives as long as the Python one
        self._dead: list[int] = []  # addresses of those that have died since; gloo's threads let go of them at any time
        self._event, self._forwards, self._in_backward = 0, 0, False

    # ---- what it tells

    def snapshot(self) -> Totals:
        """Bytes by category now, or when it ended."""
        self._look()
        return dict(self._now)

    @property
    def peak(self) -> Totals:
        """Bytes by category at the moment when they were most together."""
        return dict(self._peak[1])

    def peak_of_part(self) -> dict[str, Totals]:
        """Bytes by category at the peak of each part that was named."""
        return {name: dict(totals) for name, (_, totals) in self._parts.items()}

    @property
    def after_forward(self) -> Totals | None:
        """Bytes by category when the last backward began; None before one has."""
        return dict(self._after_forward[1]) if self._after_forward else None

    # ---- what it watches

    def __enter__(self) -> "Memory":
        self._fake_mode = active_fake_mode()
        with contextlib.ExitStack() as undo:
            undo.callback(self._held.clear)  # with their weak references, so that nothing is counted any more
            undo.callback(self.snapshot)  # gradients of a backward that has just ended get their name
            undo.callback(watch_resizes(self._resized))
            if self.model is not None:
                undo.callback(self.model.register_forward_pre_hook(self._enter_forward).remove)
                undo.callback(self.model.register_forward_hook(self._leave_forward, always_call=True).remove)
            if self.optimizer is not None:
                undo.callback(self.optimizer.register_step_post_hook(self._take_state).remove)
            self._take_what_is_there()
            super().__enter__()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._undo:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it runs on local tensors instead, and those come here
        if special := func.namespace != "aten":  # of a collective, or of FSDP
            self.also(func, args)
        if func.is_view:
            return func(*args, **(kwargs or {}))  # nothing new, or a copy that gloo made of what it reduces
        self._event += 1
        self._look()
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            self._see(tensor)
        if special and (told := TOLD_BY.get(func._schema.name)):
            where, category = told
            for tensor in tensors_in(args[where] if isinstance(where, slice) else (kwargs or {})[where]):
                self._see(tensor, category)
        self._note()
        return result

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP frees the whole parameters of a unit by giving their storages size 0, and refills them later."""
        self._event += 1
        self._look()
        if storage._cdata in self._held or self._counts(storage.device):
            self._count(storage, "gathered")
            self._note()

    def _enter_forward(self, *_: Any) -> None:
        self._forwards += 1

    def _leave_forward(self, *_: Any) -> None:
        self._forwards -= 1

    def _take_state(self, *_: Any) -> None:
        assert self.optimizer is not None
        for values in self.optimizer.state.values():
            for tensor in values.values():
                if isinstance(tensor, Tensor):
                    self._see(tensor, "optimizer_state")

    def _take_what_is_there(self) -> None:
        """Count what is given; whole parameters in an FSDP model are those that an evaluation has left gathered."""
        modules = list(self.model.modules()) if self.model else []
        sharded = any(isinstance(module, FSDPModule) for module in modules)
        whole = [p for module in modules for p in module.parameters(recurse=False)]
        groups = self.optimizer.param_groups if self.optimizer else []
        for param in [p for group in groups for p in group["params"]] + whole:
            self._see(param, "gathered" if sharded and not isinstance(param, DTensor) else "parameters")
            if param.grad is not None:
                self._see(param.grad, "gradients")
        if self.optimizer is not None:
            self._take_state()
        self._note()

    # ---- how it counts

    def _look(self) -> None:
        """Notice what has died, and whether a backward has begun or ended, since the last event."""
        if self._dead:
            self._bury()
        if (inside := torch._C._current_graph_task_id() != -1) == self._in_backward:
            return
        if inside:
            self._after_forward = (self._event - 1, dict(self._now))
        else:
            for held in self._held.values():
                if held.maybe_gradient:
                    self._refile(held, "gradients")
        self._in_backward = inside

    def _counts(self, device: torch.device) -> bool:
        """Whether storages there are counted. Those of fake tensors say that they are on the meta device."""
        if device.type == "meta":
            return self._fake_mode is not None
        return self.device is None or device.type == self.device.type

    def _see(self, tensor: Tensor, category: str | None = None) -> None:
        """Count a tensor's storage, if it is not counted yet, and file it under a category, if one is given."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if getattr(local, "fake_mode", None) is not self._fake_mode or not self._counts(local.device):
            return  # DTensor computes shapes on fake tensors of its own
        self._count(local.untyped_storage(), category)

    def _count(self, storage: torch.UntypedStorage, category: str | None) -> None:
        if self._dead:
            self._bury()  # before its address can be taken for that of one that has died
        size, key = storage.nbytes(), storage._cdata
        held = self._held.get(key)
        if held is None:
            ref = weakref.ref(storage, lambda _: self._dead.append(key))
            filed = category or self._category_at_birth()
            maybe_gradient = self._in_backward and filed == "other"
            held = self._held[key] = Held(ref, filed, self._event, maybe_gradient)
        elif category is not None and held.category not in STATE:  # ZeRO-1 gathers into its parameters
            self._refile(held, category)
        self._now[held.category] += size - held.bytes
        held.bytes = size

    def _category_at_birth(self) -> str:
        """A backward runs with gradients off, but for a forward that is run again; a custom Function's forward too."""
        if torch.is_grad_enabled() or (self._forwards and not self._in_backward):
            return "activations"
        return "other"

    def _refile(self, held: Held, category: str) -> None:
        """Move a storage to another category, also in all that was noted since its birth."""
        noted = itertools.takewhile(lambda entry: entry[0] >= held.since, reversed(self.timeline))
        known = {id(mark): mark for mark in (self._peak, self._after_forward, *self._parts.values()) if mark}
        marks = (mark for mark in known.values() if mark[0] >= held.since)
        for totals in (self._now, *(totals for _, totals in itertools.chain(marks, noted))):
            totals[held.category] -= held.bytes
            totals[category] += held.bytes
        held.category, held.maybe_gradient = category, False

    def _bury(self) -> None:
        while self._dead:
            held = self._held.pop(self._dead.pop())
            self._now[held.category] -= held.bytes

    def _note(self) -> None:
        """Keep the peak, and an entry of the timeline where it is worth one."""
        now = self._now
        total = sum(now.values())
        if total > self._part_bytes.get(self.part, -1):
            self._parts[self.part], self._part_bytes[self.part] = (self._event, dict(now)), total
        if total > self._peak_bytes:
            self._peak, self._peak_bytes = (self._event, dict(now)), total
        gathered, noted = self._noted
        if gathered != now["gathered"] or 100 * abs(total - noted) > self._peak_bytes:
            self.timeline.append((self._event, dict(now)))
            self._noted = now["gathered"], total


def watch_resizes(seen: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
    """Call `seen` after every `torch.UntypedStorage.resize_` from Python, of which no dispatch mode learns.

    Returns:
        What undoes it.
    """
    before = vars(torch.UntypedStorage).get("resize_")  # of another watcher; torch's own is inherited
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        seen(storage)
        return result

    def undo() -> None:
        if before is None:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]

    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign, assignment]
    return undo
