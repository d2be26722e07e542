"""AdamW (Loshchilov & Hutter 2019): one launch updates all parameters of a group.

    p = p (1 - lr wd)        m = m + (g - m) (1 - beta1)        v = beta2 v + (1 - beta2) g^2
    p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The kernel reads and writes each element once: in fp32, 16 bytes in and 12 bytes out for about 15 FLOPs. GPT-2 has 148
tensors, many of 768 elements. With one launch per tensor, most of the time goes into the launches.

Therefore one launch updates all tensors (multi-tensor). Each program updates one chunk of one tensor. Two tables on the
device tell the program which tensor and chunk it has, and the addresses of the tensor, its gradient and its moments.
The tables are built again only when an address or a size changes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phase2_triton.kernels.core import (
    HALF_TYPES,
    Cost,
    KernelError,
    jit,
    launch,
    select_config,
    tl,
    to_fp32,
    unavailable_reason,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
UNSUPPORTED = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")


def reference(p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, m and v after one step, in plain torch. `factors`: see `compute_factors`."""
    decay, lerp, beta2, one_minus_beta2, sqrt_correction, eps, rate = factors
    m = m + (g - m) * lerp
    v = v * beta2 + one_minus_beta2 * g * g
    return p * decay + rate * m / (v.sqrt() / sqrt_correction + eps), m, v


def compute_factors(group: dict[str, Any], step: int) -> tuple[float, ...]:
    """Compute the numbers of one step, in double precision: in fp32, 1 - 0.999 has only 4 correct digits.

    Returns:
        1 - lr * wd; 1 - beta1; beta2; 1 - beta2; sqrt(1 - beta2^t); eps; -lr / (1 - beta1^t)
    """
    lr, eps, weight_decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    sqrt_correction = (1 - beta2**step) ** 0.5
    rate = -lr / (1 - beta1**step)
    return 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, sqrt_correction, eps, rate


@jit
def update_chunk(p, g, m, v, offs, mask, decay, lerp, beta2, one_minus_beta2, sqrt_correction, eps, rate):
    """Update one chunk.

    Each operation rounds where torch's fused AdamW rounds on a CPU: fused multiply-adds, exact divisions and roots.
    """
    grad = to_fp32(tl.load(g + offs, mask=mask))
    old_mean = to_fp32(tl.load(m + offs, mask=mask))
    mean = tl.fma(grad - old_mean, lerp, old_mean)
    square = tl.fma(one_minus_beta2 * grad, grad, to_fp32(tl.load(v + offs, mask=mask)) * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(square), sqrt_correction) + eps
    param = to_fp32(tl.load(p + offs, mask=mask)) * decay + tl.div_rn(rate * mean, denominator)
    tl.store(p + offs, param, mask=mask)
    tl.store(m + offs, mean, mask=mask)
    tl.store(v + offs, square, mask=mask)


@jit
def multi_tensor_kernel(
    addresses, sizes, owners, chunks, like, tensors,
    decay, lerp, beta2, one_minus_beta2, sqrt_correction, eps, rate, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program updates the chunk that the tables give it.

    Args:
        addresses: (4, tensors): of the parameters, the gradients, the means and the squares.
        sizes: (tensors,): elements of each tensor.
        owners: (programs,): the tensor of each program.
        chunks: (programs,): the chunk of that tensor.
        like: any of the parameters; the kernel only uses its type.
    """
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    first = tl.load(chunks + program).to(tl.int64) * BLOCK
    offs = first + tl.arange(0, BLOCK)
    size = tl.load(sizes + owner)
    p = tl.load(addresses + owner)
    g = tl.load(addresses + tensors + owner)
    m = tl.load(addresses + 2 * tensors + owner)
    v = tl.load(addresses + 3 * tensors + owner)
    if ((p | g | m | v) % 16 == 0) & (first + BLOCK <= size):  # a full, aligned chunk: 16-byte accesses without a mask
        update_chunk(
            tl.multiple_of(p.to(like.dtype), 16), tl.multiple_of(g.to(like.dtype), 16),
            tl.multiple_of(m.to(like.dtype), 16), tl.multiple_of(v.to(like.dtype), 16),
            offs, None, decay, lerp, beta2, one_minus_beta2, sqrt_correction, eps, rate,
        )  # fmt: skip
    else:
        update_chunk(
            p.to(like.dtype), g.to(like.dtype), m.to(like.dtype), v.to(like.dtype),
            offs, offs < size, decay, lerp, beta2, one_minus_beta2, sqrt_correction, eps, rate,
        )  # fmt: skip


def launch_update(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **options: Any) -> None:
    """Launch an update kernel on the device of `like`.

    On a GPU this does not call `launch`: `wrap_triton` outside of an operator stores every launch in a table that is
    never emptied. Fusion is off except for the explicit `tl.fma` calls, so a GPU rounds as the interpreter does.
    """
    if like.is_cuda:
        with torch.cuda.device(like.device):
            kernel[grid](*args, **options, enable_fp_fusion=False)
    else:
        launch(kernel, grid, *args, **options, enable_fp_fusion=False)


def to_local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def build_chunk_tables(sizes: Sequence[int], block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Build the tables of `multi_tensor_kernel` on the CPU: sizes, and owner and chunk of each program."""
    counts = torch.tensor([-(-size // block) for size in sizes], device="cpu")  # chunks of each tensor
    owners = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    first_programs = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    chunks = torch.arange(len(owners), device="cpu") - first_programs
    return torch.tensor(sizes, device="cpu"), owners.int(), chunks.int()


def copy_to_device(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to the device without waiting for the copy."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


class TritonAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with a Triton kernel. Both optimizers can load each other's state dicts.

    The kernel computes in fp32. As in torch, moments have the type of their parameter, and parameters without a
    gradient do not change. DTensors are updated shard by shard.

    Args:
        params: contiguous float32, bfloat16 or float16 tensors, or groups of them.
        lr: learning rate.
        betas: decay rates of the means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        unsupported: torch's other options, which must be off.

    Raises:
        KernelError: an option, a parameter or a gradient is not supported.
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
        check_options(unsupported, *UNSUPPORTED)
        super().__init__(params, lr, betas, eps, weight_decay, **unsupported)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_options(param_group, *UNSUPPORTED)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            check_options(group, "amsgrad", "maximize")  # the other options only select one of torch's implementations
        super().__setstate__(state)
        for values in self.state.values():
            if "step" in values:  # torch's fused AdamW stores it on the GPU, and reading it there would wait
                values["step"] = torch.as_tensor(values["step"]).cpu()
            values.update({name: values[name].contiguous() for name in MOMENTS if name in values})
        self.tables = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Call `closure` first, if given, and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():  # torch.compile cannot trace updates through addresses
            torch.compiler.disable(self.update_params)()
        else:
            self.update_params()
        return loss

    def update_params(self) -> None:
        """Check all parameters first, then update them, so that an error leaves every parameter unchanged."""
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for _, params in groups:
            for p in params:
                state = self.state.get(p, {})
                moments = {name: to_local(state[name]) for name in MOMENTS if name in state}
                check_update(to_local(p), to_local(p.grad), moments)
                if state and not {"step", *MOMENTS} <= state.keys():
                    raise KernelError(f"TritonAdamW: the state has {sorted(state)}: load the state of an AdamW")
        for group_index, (group, params) in enumerate(groups):
            for launch_index, (launch_params, step) in enumerate(self.group_by_launch(params)):
                self.update_together(group, (group_index, launch_index), launch_params, step)

    def group_by_launch(self, params: list[Tensor]) -> list[tuple[list[Tensor], int]]:
        """Count the step of each parameter, and group the parameters that one launch can update.

        Returns:
            Parameters of the same type, device and step count, each list with its step count.
        """
        groups: dict[Any, list[Tensor]] = {}
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0, device="cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
            groups.setdefault((p.dtype, p.device, int(state["step"])), []).append(p)
        return [(group, step) for (*_, step), group in groups.items()]

    def update_together(self, group: dict[str, Any], slot: tuple[int, int], params: list[Tensor], step: int) -> None:
        """Update parameters of the same type, device and step count in one launch; `slot` identifies their tables."""
        states = [self.state[p] for p in params]
        grads = [p.grad for p in params]
        means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        addresses = [to_local(tensor).data_ptr() for tensor in (*params, *grads, *means, *squares)]
        like, sizes = to_local(params[0]), [to_local(p).numel() for p in params]
        options = select_config("adamw", max(sizes))
        block, device = options.pop("block"), like.device
        address_table = self.get_table(
            (*slot, "addresses"),
            [device, *addresses],
            lambda: copy_to_device(torch.tensor(addresses, device="cpu"), device),
        )
        chunk_tables = self.get_table(
            (*slot, "chunks"),
            [device, block, *sizes],
            lambda: [copy_to_device(table, device) for table in build_chunk_tables(sizes, block)],
        )
        programs = len(chunk_tables[1])
        launch_update(
            multi_tensor_kernel, (programs,), like, address_table, *chunk_tables, like, len(params),
            *compute_factors(group, step), BLOCK=block, **options,
        )  # fmt: skip
        torch.autograd.graph.increment_version(params)  # as every in-place operator does, so that autograd detects it

    def get_table(self, name: tuple[int, int, str], contents: list[Any], build: Callable[[], Any]) -> Any:
        """Return a table, and build it again if its contents changed: gradients often move, sizes rarely change."""
        if name not in self.tables or self.tables[name][0] != contents:
            self.tables[name] = contents, build()
        return self.tables[name][1]


def check_options(options: dict[str, Any], *unsupported: str) -> None:
    """Check that unsupported options are off.

    Raises:
        KernelError: names the options that are on.
    """
    if names := ", ".join(name for name in unsupported if options.get(name)):
        raise KernelError(f"TritonAdamW does not support {names}: leave it off, or use torch.optim.AdamW")


def check_update(p: Tensor, grad: Tensor, moments: dict[str, Tensor]) -> None:
    """Check the tensors of one update. The kernel gets only addresses and one size, so it cannot check anything.

    Raises:
        KernelError: a device, type, shape or layout does not fit.
    """
    if reason := unavailable_reason(p.device.type):
        raise KernelError(f"TritonAdamW: a parameter is on {p.device}, where kernels cannot run: {reason}")
    if p.dtype not in (torch.float32, *HALF_TYPES):
        raise KernelError(f"TritonAdamW: a parameter is {p.dtype}: use float32, bfloat16 or float16")
    if p.dtype == torch.bfloat16 and p.device.type == "cpu":
        raise KernelError("TritonAdamW: the interpreter computes bfloat16 wrongly: use float32 or float16")
    if grad.layout != torch.strided or grad.dtype != p.dtype or grad.device != p.device:
        actual = f"{grad.layout} {grad.dtype} on {grad.device}"
        raise KernelError(f"TritonAdamW: a gradient is {actual}: use a dense {p.dtype} gradient on {p.device}")
    for name, moment in moments.items():
        if moment.shape != p.shape or moment.dtype != p.dtype or moment.device != p.device:
            actual = f"{moment.dtype} {tuple(moment.shape)} on {moment.device}"
            expected = f"{p.dtype} {tuple(p.shape)} on {p.device}"
            raise KernelError(f"TritonAdamW: {name} is {actual} and its parameter {expected}: load this model's state")
    if not all(tensor.is_contiguous() for tensor in (p, grad, *moments.values())):
        raise KernelError("TritonAdamW: a parameter, gradient or moment is not contiguous: call .contiguous() on it")


def cost(elements: int, itemsize: int, tensors: int = 1) -> Cost:
    """Return the cost of one step. The workspace is the size of the tables."""
    programs = elements // select_config("adamw", elements)["block"] + tensors
    return Cost(4 * elements * itemsize, 3 * elements * itemsize, 15 * elements, 8 * programs + 40 * tensors)
