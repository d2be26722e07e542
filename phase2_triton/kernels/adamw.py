"""AdamW (Loshchilov & Hutter 2019): all parameters of a group in one launch.

    p = p (1 - lr wd)        m = m + (g - m) (1 - beta1)        v = beta2 v + (1 - beta2) g^2
    p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Each element is read and written once: 16 bytes in and 12 out in fp32, for some 15 FLOPs. GPT-2 has 148 tensors, many of
768 elements, so that the time goes into launches unless they are made together.

Steps: 1 a launch for each tensor; 2 one launch for all, multi-tensor. A program has a chunk of one tensor: a table
tells which, and a second one where the tensor, its gradient and its moments are. Both stay on the device until one of
these moves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phase2_triton.kernels.core import HALVES, Cost, KernelError, config, jit, launch, tl, to_fp32, unavailable_reason

MOMENTS = ("exp_avg", "exp_avg_sq")
UNSUPPORTED = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")


def reference(p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """p, m and v after a step in plain torch; see `factors_of`."""
    decay, lerp, beta2, rest, root, eps, rate = factors
    m = m + (g - m) * lerp
    v = v * beta2 + rest * g * g
    return p * decay + rate * m / (v.sqrt() / root + eps), m, v


def factors_of(group: dict[str, Any], step: int) -> tuple[float, ...]:
    """The numbers of one step, found in double precision: in fp32, 1 - 0.999 has 4 digits."""
    lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    root, rate = (1 - beta2**step) ** 0.5, -lr / (1 - beta1**step)
    return 1 - lr * decay, 1 - beta1, beta2, 1 - beta2, root, eps, rate


@jit
def update(p, g, m, v, at, inside, decay, lerp, beta2, rest, root, eps, rate):
    """One chunk, rounded where torch's fused AdamW on a CPU rounds: fma, and divisions and roots that are exact."""
    grad = to_fp32(tl.load(g + at, mask=inside))
    old = to_fp32(tl.load(m + at, mask=inside))
    mean = tl.fma(grad - old, lerp, old)
    square = tl.fma(rest * grad, grad, to_fp32(tl.load(v + at, mask=inside)) * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(square), root) + eps
    param = to_fp32(tl.load(p + at, mask=inside)) * decay + tl.div_rn(rate * mean, denominator)
    tl.store(p + at, param, mask=inside)
    tl.store(m + at, mean, mask=inside)
    tl.store(v + at, square, mask=inside)


@jit
def one_tensor_kernel(p, g, m, v, size, decay, lerp, beta2, rest, root, eps, rate, BLOCK: tl.constexpr):
    """Step 1: a chunk of the one tensor a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    update(p, g, m, v, at, at < size, decay, lerp, beta2, rest, root, eps, rate)


@jit
def multi_tensor_kernel(
    addresses, sizes, owners, chunks, like, tensors, decay, lerp, beta2, rest, root, eps, rate, BLOCK: tl.constexpr
):  # fmt: skip
    """Step 2: the tables tell a program its tensor and chunk; `like` is there for its type."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    first = tl.load(chunks + program).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    size = tl.load(sizes + owner)
    p = tl.load(addresses + owner)
    g = tl.load(addresses + tensors + owner)
    m = tl.load(addresses + 2 * tensors + owner)
    v = tl.load(addresses + 3 * tensors + owner)
    if ((p | g | m | v) % 16 == 0) & (first + BLOCK <= size):  # four elements at a time, and no mask
        update(
            tl.multiple_of(p.to(like.dtype), 16), tl.multiple_of(g.to(like.dtype), 16),
            tl.multiple_of(m.to(like.dtype), 16), tl.multiple_of(v.to(like.dtype), 16),
            at, None, decay, lerp, beta2, rest, root, eps, rate,
        )  # fmt: skip
    else:
        update(
            p.to(like.dtype), g.to(like.dtype), m.to(like.dtype), v.to(like.dtype),
            at, at < size, decay, lerp, beta2, rest, root, eps, rate,
        )  # fmt: skip


def run(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **options: Any) -> None:
    """Launch, on a GPU without `launch`: outside of an operator its wrapper records each launch in a table that is
    never emptied. With no fusion but the fma's above, a GPU rounds as the interpreter does."""
    if like.is_cuda:
        with torch.cuda.device(like.device):
            kernel[grid](*args, **options, enable_fp_fusion=False)
    else:
        launch(kernel, grid, *args, **options, enable_fp_fusion=False)


def local(tensor: Any) -> Tensor:
    """This rank's shard of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def chunk_tables(sizes: Sequence[int], block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sizes of the tensors; the tensor of each program; and which of its chunks the program has."""
    counts = torch.tensor([-(-size // block) for size in sizes], device="cpu")
    owners = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    before = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    chunks = torch.arange(len(owners), device="cpu") - before
    return torch.tensor(sizes, device="cpu"), owners.int(), chunks.int()


def sent(table: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


class TritonAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` by one kernel; state dicts can be loaded by either from the other.

    Computes in fp32. Moments have their parameter's type, as torch's have. Parameters without a gradient are left
    alone. DTensors are updated shard by shard.

    Args:
        params: float32, bfloat16 or float16, contiguous; or groups of them.
        lr: learning rate.
        betas: decay of the gradient's mean and of its square's.
        eps: added to the denominator.
        weight_decay: decoupled; times the learning rate.
        unsupported: torch's other options, which must be off.

    Raises:
        KernelError: an option, parameter or gradient that it cannot take.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **unsupported: Any,
    ) -> None:
        self.tables: dict[tuple[int, int, str], tuple[list[Any], Any]] = {}
        refuse_options(unsupported, *UNSUPPORTED)
        super().__init__(params, lr, betas, eps, weight_decay, **unsupported)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        refuse_options(param_group, *UNSUPPORTED)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            refuse_options(group, "amsgrad", "maximize")  # the others only say how torch computed
        super().__setstate__(state)
        for values in self.state.values():
            if "step" in values:  # torch's fused form has it on the GPU, where reading it would wait
                values["step"] = torch.as_tensor(values["step"]).cpu()
            values.update({name: values[name].contiguous() for name in MOMENTS if name in values})
        self.tables = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; `closure` computes the loss first, and its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():  # a compiler cannot see through addresses
            torch.compiler.disable(self.update_all)()
        else:
            self.update_all()
        return loss

    def update_all(self) -> None:
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for _, params in groups:
            for p in params:
                state = self.state.get(p, {})
                refuse(local(p), local(p.grad), {name: local(state[name]) for name in MOMENTS if name in state})
                if state and not {"step", *MOMENTS} <= state.keys():
                    raise KernelError(f"TritonAdamW: a state has {sorted(state)}: load one of AdamW")
        for number, (group, params) in enumerate(groups):
            for part, (alike, step) in enumerate(self.buckets(params)):
                self.update(group, (number, part), alike, step)

    def buckets(self, params: list[Tensor]) -> list[tuple[list[Tensor], int]]:
        """Parameters that one launch can take, which are all, but for types, devices and the steps they have had."""
        found: dict[Any, list[Tensor]] = {}
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0, device="cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
            found.setdefault((p.dtype, p.device, int(state["step"])), []).append(p)
        return [(alike, step) for (*_, step), alike in found.items()]

    def update(self, group: dict[str, Any], slot: tuple[int, int], params: list[Tensor], step: int) -> None:
        """One launch for parameters of a type, a device and a step."""
        states = [self.state[p] for p in params]
        averages = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        places = [
            local(tensor).data_ptr() for tensors in (params, [p.grad for p in params], *averages) for tensor in tensors
        ]
        like, sizes = local(params[0]), [local(p).numel() for p in params]
        options = config("adamw", max(sizes))
        block, device = options.pop("block"), like.device
        addresses = self.kept(
            (*slot, "addresses"), [device, *places], lambda: sent(torch.tensor(places, device="cpu"), device)
        )
        tables = self.kept(
            (*slot, "chunks"), [device, block, *sizes], lambda: [sent(t, device) for t in chunk_tables(sizes, block)]
        )
        run(
            multi_tensor_kernel, (len(tables[1]),), like, addresses, *tables, like, len(params),
            *factors_of(group, step), BLOCK=block, **options,
        )  # fmt: skip
        torch.autograd.graph.increment_version(params)  # as any operator that writes does: autograd must notice

    def kept(self, name: tuple[int, int, str], of: list[Any], made: Callable[[], Any]) -> Any:
        """A table, made anew where what it was made of has changed: gradients often move, sizes hardly ever change."""
        if name not in self.tables or self.tables[name][0] != of:
            self.tables[name] = of, made()
        return self.tables[name][1]


def refuse_options(options: dict[str, Any], *names: str) -> None:
    if wanted := ", ".join(name for name in names if options.get(name)):
        raise KernelError(f"TritonAdamW: {wanted}: it has no such option: leave it off, or use torch.optim.AdamW")


def refuse(p: Tensor, grad: Tensor, moments: dict[str, Tensor]) -> None:
    """Refuse what the kernel, which gets addresses and one size, would read wrongly or beyond its end."""
    if reason := unavailable_reason(p.device.type):
        raise KernelError(f"TritonAdamW: a parameter is on {p.device}, where it cannot run: {reason}")
    if p.dtype not in (torch.float32, *HALVES):
        raise KernelError(f"TritonAdamW: a parameter is {p.dtype}: give float32, bfloat16 or float16")
    if p.dtype == torch.bfloat16 and p.device.type == "cpu":
        raise KernelError("TritonAdamW: the interpreter computes bfloat16 wrongly: give float32 or float16")
    if grad.layout != torch.strided or grad.dtype != p.dtype or grad.device != p.device:
        given = f"{grad.layout} {grad.dtype} on {grad.device}"
        raise KernelError(f"TritonAdamW: a gradient is {given}: give a dense {p.dtype} on {p.device}")
    for name, moment in moments.items():
        if moment.shape != p.shape or moment.dtype != p.dtype or moment.device != p.device:
            given = f"{moment.dtype} {tuple(moment.shape)} on {moment.device}"
            like = f"{p.dtype} {tuple(p.shape)} on {p.device}"
            raise KernelError(f"TritonAdamW: {name} is {given} and its parameter {like}: load the state of this model")
    if not all(tensor.is_contiguous() for tensor in (p, grad, *moments.values())):
        raise KernelError("TritonAdamW: a parameter, gradient or moment is not contiguous: give it as .contiguous()")


def cost(elements: int, itemsize: int, tensors: int = 1) -> Cost:
    """One step; the workspace are the tables."""
    programs = elements // config("adamw", elements)["block"] + tensors
    return Cost(4 * elements * itemsize, 3 * elements * itemsize, 15 * elements, 8 * programs + 40 * tensors)


def step_1(p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: tuple[float, ...]) -> None:
    """One tensor by a launch of its own."""
    options = config("adamw", p.numel())
    block = options.pop("block")
    run(one_tensor_kernel, (-(-p.numel() // block),), p, p, g, m, v, p.numel(), *factors, BLOCK=block, **options)
