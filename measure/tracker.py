"""Track the memory that a rank uses during a step, by category. The tracker counts every live storage of a tensor.

    with MemoryTracker(model, optimizer) as memory:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
    memory.peak            # {"parameters": 3179008, "gradients": ..., ...}, bytes
    memory.after_forward   # the same when the last backward pass began

The tracker is a dispatch mode. It receives the tensors that every operator returns, on any device, also fake tensors.
It does not count

- temporary memory inside an operator, or the rounding and fragmentation of the allocator. The value of
  `torch.cuda.max_memory_allocated` is therefore slightly larger.
- the copies that gloo makes of the tensors that it reduces. NCCL makes none.
- a tensor that existed before, unless it is passed to the tracker or an operator writes into it. DDP's buckets, into
  which gradients are copied, therefore count from the start.

Inside a dispatch mode torch runs a compiled model in eager mode. The tracker then measures the eager step. All later
calls of the model are eager, too, unless the tracked call runs inside `torch.compiler.set_stance("force_eager")`.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Totals = dict[str, int]  # bytes by category

# parameters        of this rank; the shards if they are sharded
# gradients         created in a backward pass and still alive after it, full or sharded
# optimizer_state
# gathered          all-gathered parameters of FSDP units, and the flat buffers of the all-gather
# activations       created in a forward pass, or in the recomputation of one
# other             everything else: temporaries of the backward pass and the optimizer, buffers of reduce-scatters
STATE = ("parameters", "gradients", "optimizer_state")
CATEGORIES = (*STATE, "gathered", "activations", "other")

# The category of some arguments of operators. The arguments are given by their positions or by their keyword.
ARGUMENT_CATEGORIES: dict[str, tuple[slice | str, str]] = {
    "fsdp::all_gather_copy_in": (slice(2), "gathered"),  # copies the shards, possibly in another dtype, into a buffer
    "c10d::_allgather_base_": (slice(1), "gathered"),
    "fsdp::split_with_sizes_copy": ("out", "gathered"),
    "fsdp::chunk_cat": ("out", "other"),  # the input of the reduce-scatter; gloo may keep it after the backward pass
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class LiveStorage:
    """A live storage: a weak reference, its bytes, its category, its first event, and whether it may be a gradient."""

    __slots__ = ("bytes", "category", "first_event", "may_be_gradient", "ref")

    def __init__(self, ref: Any, category: str, first_event: int, may_be_gradient: bool) -> None:
        self.ref, self.bytes, self.category = ref, 0, category
        self.first_event, self.may_be_gradient = first_event, may_be_gradient


class MemoryTracker(TorchDispatchMode):
    """Counts the storages of all tensors that are alive inside this context.

    On exit, also after an error, all hooks are removed.

    Args:
        model: its parameters and gradients count from the start.
        optimizer: its state counts from the start. With FSDP its parameters are the shards, even if a unit is
            all-gathered at the start.
        device: count only tensors on this device; None: on all devices.
        gradient_buffers: tensors that count as gradients from the start, such as the buckets of phase 1.
        on_operator: called with every operator outside the aten namespace and its arguments. This is cheaper than a
            second dispatch mode.
        keeps_timeline: whether to fill `timeline`. Many entries take time whenever a tensor becomes a gradient.

    Attributes:
        timeline: list of (event, bytes by category). An entry is added when the gathered bytes change, and when the
            total changes by more than 1% of its peak. Events are operators and resizes, numbered in order.
        part: name of the part of the step that runs now, which the caller may set at any time. `peak_of_part` returns
            the peak of each part.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        gradient_buffers: Iterable[Tensor] = (),
        on_operator: Callable[[Any, Any], None] = lambda operator, args: None,
        keeps_timeline: bool = True,
    ) -> None:
        super().__init__()
        self.keeps_timeline, self.gradient_buffers = keeps_timeline, gradient_buffers
        self.model, self.optimizer, self.device, self.on_operator = model, optimizer, device, on_operator
        self.timeline: list[tuple[int, Totals]] = []
        self._now: Totals = dict.fromkeys(CATEGORIES, 0)
        self._peak, self._peak_bytes = (0, dict(self._now)), 0
        self.part, self._parts, self._part_bytes = "", {"": self._peak}, {"": 0}
        self._last_entry = (-1, 0)  # gathered bytes and total bytes of the newest entry of the timeline
        self._after_forward: tuple[int, Totals] | None = None
        # By address of the C++ storage, which lives as long as its Python object.
        self._live: dict[int, LiveStorage] = {}
        self._freed: list[int] = []  # addresses freed since the last event; gloo's threads may free at any time
        self._event, self._forward_depth, self._in_backward = 0, 0, False

    # ---- results

    def snapshot(self) -> Totals:
        """Return the bytes by category now, or at the end of the context."""
        self._update_state()
        return dict(self._now)

    @property
    def peak(self) -> Totals:
        """Bytes by category at the time of the peak of the total."""
        return dict(self._peak[1])

    def peak_of_part(self) -> dict[str, Totals]:
        """Return the bytes by category at the peak of each part."""
        return {name: dict(totals) for name, (_, totals) in self._parts.items()}

    @property
    def after_forward(self) -> Totals | None:
        """Bytes by category when the last backward pass began; None before the first one."""
        return dict(self._after_forward[1]) if self._after_forward else None

    # ---- events

    def __enter__(self) -> "MemoryTracker":
        self._fake_mode = active_fake_mode()
        with contextlib.ExitStack() as undo:
            undo.callback(self._live.clear)  # deletes the weak references, so that counting stops
            undo.callback(self.snapshot)  # files the gradients of a backward pass that has just ended
            undo.callback(watch_resizes(self._on_resize))
            if self.model is not None:
                undo.callback(self.model.register_forward_pre_hook(self._enter_forward).remove)
                undo.callback(self.model.register_forward_hook(self._leave_forward, always_call=True).remove)
            if self.optimizer is not None:
                undo.callback(self.optimizer.register_step_post_hook(self._count_optimizer_state).remove)
            self._count_existing_tensors()
            super().__enter__()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._undo:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor runs the operator on local tensors, and those arrive here
        if is_special := func.namespace != "aten":  # a collective, or an operator of FSDP
            self.on_operator(func, args)
        if func.is_view:
            return func(*args, **(kwargs or {}))  # no new storage, or a copy that gloo makes of a tensor it reduces
        self._event += 1
        self._update_state()
        result = func(*args, **(kwargs or {}))
        is_new = not func._schema.is_mutable or func._schema.name == "aten::set_"  # which gives a tensor a new storage
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            self._count_tensor(tensor, is_new=is_new)
        if is_special and (entry := ARGUMENT_CATEGORIES.get(func._schema.name)):
            position, category = entry
            for tensor in tensors_in(args[position] if isinstance(position, slice) else (kwargs or {})[position]):
                self._count_tensor(tensor, category)
        self._record()
        return result

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage after a resize. FSDP frees and refills the full parameters of a unit with resizes."""
        self._event += 1
        self._update_state()
        if storage._cdata in self._live or self._is_counted(storage.device):
            self._count_storage(storage, "gathered")
            self._record()

    def _enter_forward(self, *_: Any) -> None:
        self._forward_depth += 1

    def _leave_forward(self, *_: Any) -> None:
        self._forward_depth -= 1

    def _count_optimizer_state(self, *_: Any) -> None:
        assert self.optimizer is not None
        for values in self.optimizer.state.values():
            for tensor in values.values():
                if isinstance(tensor, Tensor):
                    self._count_tensor(tensor, "optimizer_state")

    def _count_existing_tensors(self) -> None:
        """Count the parameters, gradients and optimizer state that exist at the start.

        Full parameters in an FSDP model are those that an evaluation has left all-gathered.
        """
        modules = list(self.model.modules()) if self.model else []
        is_fsdp = any(isinstance(module, FSDPModule) for module in modules)
        module_params = [p for module in modules for p in module.parameters(recurse=False)]
        groups = self.optimizer.param_groups if self.optimizer else []
        for param in [p for group in groups for p in group["params"]] + module_params:
            self._count_tensor(param, "gathered" if is_fsdp and not isinstance(param, DTensor) else "parameters")
            if param.grad is not None:
                self._count_tensor(param.grad, "gradients")
        for buffer in self.gradient_buffers:
            self._count_tensor(buffer, "gradients")
        if self.optimizer is not None:
            self._count_optimizer_state()
        self._record()

    # ---- counting

    def _update_state(self) -> None:
        """Remove the storages that have been freed, and detect the begin and the end of a backward pass."""
        if self._freed:
            self._remove_freed()
        if (in_backward := torch._C._current_graph_task_id() != -1) == self._in_backward:
            return
        if in_backward:
            self._after_forward = (self._event - 1, dict(self._now))
        else:
            for live in self._live.values():
                if live.may_be_gradient:
                    self._change_category(live, "gradients")
        self._in_backward = in_backward

    def _is_counted(self, device: torch.device) -> bool:
        """Return whether storages on this device are counted. Storages of fake tensors are on the meta device."""
        if device.type == "meta":
            return self._fake_mode is not None
        return self.device is None or device.type == self.device.type

    def _count_tensor(self, tensor: Tensor, category: str | None = None, is_new: bool = True) -> None:
        """Count the storage of a tensor if it is not counted yet, and set its category if one is given.

        Args:
            is_new: False if the tensor existed before this event, so that its storage counts from the start.
        """
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if getattr(local, "fake_mode", None) is not self._fake_mode or not self._is_counted(local.device):
            return  # for example, DTensor computes shapes with its own fake tensors
        self._count_storage(local.untyped_storage(), category, is_new)

    def _count_storage(self, storage: torch.UntypedStorage, category: str | None, is_new: bool = True) -> None:
        if self._freed:
            self._remove_freed()  # the new storage may have the address of a freed one
        size, key = self._size_of(storage), storage._cdata
        live = self._live.get(key)
        if live is None:
            ref = weakref.ref(storage, lambda _: self._freed.append(key))
            first_category = category or self._category_of_new_storage()
            may_be_gradient = self._in_backward and first_category == "other"
            live = self._live[key] = LiveStorage(ref, first_category, self._event if is_new else 0, may_be_gradient)
            if not is_new:
                self._add_to_earlier(size, first_category)
        elif category is not None and live.category not in STATE:  # ZeRO-1 all-gathers into its parameters
            self._change_category(live, category)
        self._now[live.category] += size - live.bytes
        live.bytes = size

    def _size_of(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()

    def _add_to_earlier(self, size: int, category: str) -> None:
        """Add bytes that have existed from the start to all recorded totals."""
        for totals in self._recorded_totals(0):
            totals[category] += size
        self._peak_bytes += size
        self._part_bytes = {name: total + size for name, total in self._part_bytes.items()}
        self._last_entry = self._last_entry[0], self._last_entry[1] + size

    def _category_of_new_storage(self) -> str:
        """Return "activations" in a forward pass or a recomputation, else "other".

        A backward pass runs with gradients disabled, except for a recomputation. The forward pass of a custom Function
        runs with gradients disabled too, so the forward hooks of the model count as well.
        """
        if torch.is_grad_enabled() or (self._forward_depth and not self._in_backward):
            return "activations"
        return "other"

    def _change_category(self, live: LiveStorage, category: str) -> None:
        """Move a storage to another category, also in everything that was recorded since its first event."""
        for totals in (self._now, *self._recorded_totals(live.first_event)):
            totals[live.category] -= live.bytes
            totals[category] += live.bytes
        live.category, live.may_be_gradient = category, False

    def _recorded_totals(self, first_event: int) -> Iterator[Totals]:
        """Yield everything that was recorded since an event, each once."""
        peaks = {id(peak): peak for peak in (self._peak, self._after_forward, *self._parts.values()) if peak}
        entries = itertools.takewhile(lambda entry: entry[0] >= first_event, reversed(self.timeline))
        for event, totals in itertools.chain(peaks.values(), entries):
            if event >= first_event:
                yield totals

    def _remove_freed(self) -> None:
        while self._freed:
            live = self._live.pop(self._freed.pop())
            self._now[live.category] -= live.bytes

    def _record(self) -> None:
        """Update the peaks, and add an entry to the timeline if the change is large enough."""
        now = self._now
        total = sum(now.values())
        if total > self._part_bytes.get(self.part, -1):
            self._parts[self.part], self._part_bytes[self.part] = (self._event, dict(now)), total
        if total > self._peak_bytes:
            self._peak, self._peak_bytes = (self._event, dict(now)), total
        if not self.keeps_timeline:
            return
        last_gathered, last_total = self._last_entry
        if last_gathered != now["gathered"] or 100 * abs(total - last_total) > self._peak_bytes:
            self.timeline.append((self._event, dict(now)))
            self._last_entry = now["gathered"], total


def watch_resizes(callback: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
    """Call `callback` after every `torch.UntypedStorage.resize_` from Python. Dispatch modes do not receive resizes.

    Returns:
        A function that ends this.
    """
    previous = vars(torch.UntypedStorage).get("resize_")  # of an outer tracker; torch's own method is inherited
    resize = torch.UntypedStorage.resize_

    def resize_and_call(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        callback(storage)
        return result

    def undo() -> None:
        if previous is None:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = previous  # type: ignore[method-assign]

    torch.UntypedStorage.resize_ = resize_and_call  # type: ignore[method-assign, assignment]
    return undo
