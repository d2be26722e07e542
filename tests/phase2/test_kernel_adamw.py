"""Tests of the AdamW kernels in the interpreter, against torch.optim.AdamW."""

import pytest
import torch

from phase2_triton.kernels import adamw
from phase2_triton.kernels.adamw import TritonAdamW
from phase2_triton.kernels.core import KernelError
from tests.helpers.kernels import GuardedBuffers, assert_near, draw_normal, gap

pytestmark = pytest.mark.usefixtures("on_device")

SHAPES = [(1,), (769,), (33, 65), (3, 5), (20000,)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def make_optimizer(optimizer_class, dtype=torch.float32, **options):
    """Return parameters and an optimizer with two groups. The first group has weight decay and another learning
    rate."""
    params = [torch.nn.Parameter(draw_normal(s, seed).to(dtype)) for seed, s in enumerate(SHAPES)]
    groups = [{"params": params[:2], "weight_decay": 0.5, "lr": 3e-2}, {"params": params[2:], "weight_decay": 0.0}]
    return params, optimizer_class(groups, **OPTIONS, **options)


def set_gradients(params, step, missing=()):
    """Set fixed random gradients of a step. `missing` contains pairs (step, parameter index) without a gradient."""
    for i, p in enumerate(params):
        gradient = draw_normal(p.shape, 100 * step + i) * 10.0 ** (i - 2)
        p.grad = None if (step, i) in missing else gradient.to(p.dtype)


def run_steps(optimizer_class, steps, dtype=torch.float32, missing=(), **options):
    params, optimizer = make_optimizer(optimizer_class, dtype, **options)
    for step in range(steps):
        set_gradients(params, step, missing)
        optimizer.step()
    return params, optimizer


def test_24_steps_are_as_exact_as_torchs():
    """With two groups, odd sizes and some missing gradients, the kernel is as near to fp64 as torch's fused AdamW on a
    CPU, which rounds at the same places."""
    missing = [(0, 1), (3, 2), (4, 2), (9, 0)]
    ours, our_optimizer = run_steps(TritonAdamW, 24, missing=missing)
    with torch.device("cpu"):
        fused, fused_optimizer = run_steps(torch.optim.AdamW, 24, missing=missing, fused=True)
        exact, exact_optimizer = run_steps(torch.optim.AdamW, 24, torch.float64, missing=missing)
    for a, b, c in zip(ours, fused, exact, strict=True):
        assert_near(a.cpu(), b, c)
        for name in ("exp_avg", "exp_avg_sq"):
            state = our_optimizer.state[a][name].cpu()
            assert_near(state, fused_optimizer.state[b][name], exact_optimizer.state[c][name])
        assert our_optimizer.state[a]["step"].item() == exact_optimizer.state[c]["step"].item()


def test_half_precision_is_computed_in_fp32():
    """float16 parameters and moments are rounded once per step, as in torch's fused form."""
    ours, our_optimizer = run_steps(TritonAdamW, 20, torch.float16)
    fused, fused_optimizer = run_steps(torch.optim.AdamW, 20, torch.float16, fused=True)
    for a, b in zip(ours, fused, strict=True):
        assert a.dtype == our_optimizer.state[a]["exp_avg"].dtype == torch.float16
        assert gap(a, b) <= 2e-3 * b.abs().max()
        assert (
            gap(our_optimizer.state[a]["exp_avg"], fused_optimizer.state[b]["exp_avg"])
            <= 2e-3 * our_optimizer.state[a]["exp_avg"].abs().max()
        )


def test_a_step_writes_only_its_tensors():
    """At sizes that no tile divides, a step matches plain torch in fp64, and writes nothing outside of its tensors."""
    factors = adamw.compute_factors({"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, 3)
    for size in (1, 769, 5000):
        start = [draw_normal((size,), seed).float() for seed in range(4)]
        start[3] = start[3].abs()
        bands = GuardedBuffers(7)
        p, gradient, *moments = (bands.allocate(t.shape, t.dtype, t.device).copy_(t) for t in start)
        param = torch.nn.Parameter(p)
        optimizer = TritonAdamW([param], lr=0.01, weight_decay=0.1)
        param.grad = gradient
        state = {"step": torch.tensor(2.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        optimizer.state[param] = state
        optimizer.step()
        exact = adamw.reference(*(t.double() for t in start), factors)
        assert all(gap(a, b) <= 1e-6 for a, b in zip((param, *moments), exact, strict=True))
        assert torch.equal(gradient, start[1])
        assert bands.are_bands_intact()


def test_types_sizes_and_numbers_of_steps_can_differ():
    """One step updates tensors of two types and of any size, also an empty one, one whose gradient appears later, and
    one of 2^20 + 3 elements, which is split into chunks."""
    kinds = ((2**20 + 3, torch.float32), (0, torch.float32), (1, torch.float16), (5, torch.float32))
    params = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size, dtype in kinds]
    optimizer = TritonAdamW(params, lr=0.1)
    for is_first_step in (True, False):
        for p in params[: 3 if is_first_step else 4]:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 2, 2, 1]
    once = 1 - 0.1 * 0.01 - 0.1
    twice = once * (1 - 0.1 * 0.01) - 0.1
    assert gap(params[3], torch.full((5,), once)) <= 1e-6 and gap(params[0], torch.full((2**20 + 3,), twice)) <= 1e-6


def test_closures_schedulers_and_compiled_callers_work():
    """step returns the closure's loss and uses the scheduler's rate. Autograd detects the in-place write."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = TritonAdamW([p], lr=0.1, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.1][step])

    def closure():
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    scheduler.step()
    graph = (p * p).sum()
    torch.compile(lambda: optimizer.step(), backend="eager")()
    assert gap(p, torch.full((3,), 1 - 0.1 - 0.01)) <= 1e-6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def make_param(gradient, dtype=torch.float32, shape=(3, 4)):
    p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    p.grad = gradient
    return p


def step_once(p, **options):
    TritonAdamW([p], **options).step()


INVALID_CALLS = [
    (lambda: step_once(make_param(None), amsgrad=True), "does not support amsgrad: leave it off"),
    (lambda: step_once(make_param(torch.ones(3, 4).to_sparse())), "use a dense torch.float32"),
    (lambda: step_once(make_param(torch.ones(4, 3).t())), "is not contiguous"),
    (lambda: step_once(make_param(torch.ones(3, 4).double(), torch.float64)), "a parameter is torch.float64"),
]


def test_invalid_input_is_refused_before_anything_changes():
    """Unsupported options, types and layouts are refused, and then no parameter has changed."""
    for call, words in INVALID_CALLS:
        with pytest.raises(KernelError, match=words):
            call()
    good, bad = make_param(torch.ones(3, 4)), make_param(torch.ones(4, 3).t())
    optimizer = TritonAdamW([{"params": [good]}, {"params": [bad]}])
    with pytest.raises(KernelError):
        optimizer.step()
    assert not optimizer.state and torch.equal(good, torch.ones(3, 4))


def test_a_state_of_another_shape_is_refused():
    """The kernel receives addresses, so tensors of another size, type or layout must never reach it."""
    for changed in (torch.zeros(9, 9), torch.zeros(5, 7).half()):
        p = make_param(torch.ones(5, 7), shape=(5, 7))
        optimizer = TritonAdamW([p])
        optimizer.step()
        p.data, p.grad = changed, torch.zeros_like(changed)
        with pytest.raises(KernelError, match="exp_avg is .* and its parameter .*: load this model's state"):
            optimizer.step()
    p = make_param(torch.ones(3, 4))
    source = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    source.step()
    optimizer = TritonAdamW([p])
    optimizer.state = {p: dict(source.state[p])}
    with pytest.raises(KernelError, match="load the state of an AdamW"):
        optimizer.step()
