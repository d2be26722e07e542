"""AdamW in one launch, interpreted, against torch.optim.AdamW."""

import copy

import pytest
import torch

from phase2_triton.kernels import adamw
from phase2_triton.kernels.adamw import TritonAdamW
from phase2_triton.kernels.core import KernelError, interpreting, launch
from tests.helpers.kernels import assert_near, fixed_normal, gap

pytestmark = pytest.mark.usefixtures("on_device")

SHAPES = [(1,), (769,), (33, 65), (3, 5), (20000,)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def made(kind, dtype=torch.float32, shapes=SHAPES, **options):
    """An optimizer with two groups, the first of which decays and has a learning rate of its own."""
    params = [torch.nn.Parameter(fixed_normal(s, seed).to(dtype)) for seed, s in enumerate(shapes)]
    groups = [{"params": params[:2], "weight_decay": 0.5, "lr": 3e-2}, {"params": params[2:], "weight_decay": 0.0}]
    return params, kind(groups, **OPTIONS, **options)


def give(params, step, missing=()):
    for i, p in enumerate(params):
        gradient = fixed_normal(p.shape, 100 * step + i) * 10.0 ** (i - 2)
        p.grad = None if (step, i) in missing else gradient.to(p.dtype)


def run(kind, steps, dtype=torch.float32, missing=(), **options):
    params, optimizer = made(kind, dtype, **options)
    for step in range(steps):
        give(params, step, missing)
        optimizer.step()
    return params, optimizer


def test_20_steps_are_as_exact_as_torchs():
    """Two groups, odd sizes and gradients that are missing at times: as near to fp64 as torch's fused AdamW is."""
    missing = [(0, 1), (3, 2), (4, 2), (9, 0)]
    ours, mine = run(TritonAdamW, 24, missing=missing)
    fused, theirs = run(torch.optim.AdamW, 24, missing=missing, fused=True)
    exact, wide = run(torch.optim.AdamW, 24, torch.float64, missing=missing)
    for a, b, c in zip(ours, fused, exact, strict=True):
        assert_near(a, b, c)
        for name in ("exp_avg", "exp_avg_sq"):
            assert_near(mine.state[a][name], theirs.state[b][name], wide.state[c][name])
        assert mine.state[a]["step"].item() == wide.state[c]["step"].item()


def test_nearly_every_bit_is_torchs():
    """Rounding where torch's fused form on a CPU does, few elements differ, and those by a unit: one in a hundred
    beside torch's CPU build, one in five beside its CUDA build."""
    for a, b in zip(run(TritonAdamW, 10)[0], run(torch.optim.AdamW, 10, fused=True)[0], strict=True):
        assert gap(a, b) <= 2 * b.abs().max() * 2**-23
        assert a.is_cuda or (a != b).sum() <= max(2, a.numel() // (4 if torch.version.cuda else 100))


def test_half_precision_is_computed_in_fp32():
    """float16 parameters and moments are rounded once a step, as in torch's fused form."""
    ours, mine = run(TritonAdamW, 20, torch.float16)
    fused, theirs = run(torch.optim.AdamW, 20, torch.float16, fused=True)
    for a, b in zip(ours, fused, strict=True):
        assert a.dtype == mine.state[a]["exp_avg"].dtype == torch.float16
        assert gap(a, b) <= 2e-3 * b.abs().max()
        assert gap(mine.state[a]["exp_avg"], theirs.state[b]["exp_avg"]) <= 2e-3 * mine.state[a]["exp_avg"].abs().max()


def test_steps_1_and_2_are_the_reference():
    """A launch a tensor, and one for all, both give what plain torch gives in fp64, and write nothing else."""
    factors = adamw.factors_of({"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, 3)
    for size in (1, 769, 5000):
        start = [fixed_normal((size,), seed).float() for seed in range(4)]
        start[3] = start[3].abs()
        four = [banded(t) for t in start]
        adamw.step_1(*four, factors)
        exact = adamw.reference(*(t.double() for t in start), factors)
        assert all(gap(a, b) <= 1e-6 for a, b in zip((four[0], *four[2:]), exact, strict=True))
        p = torch.nn.Parameter(banded(start[0]))
        optimizer = TritonAdamW([p], lr=0.01, weight_decay=0.1)
        p.grad = banded(start[1])
        optimizer.state[p] = {"step": torch.tensor(2.0), "exp_avg": banded(start[2]), "exp_avg_sq": banded(start[3])}
        optimizer.step()
        assert torch.equal(p, four[0]) and torch.equal(p.grad, start[1])
        for tensor in (*four, p, p.grad, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
            around = tensor.detach().as_strided((size + 128,), (1,), 0)
            assert (around[:64] == 7).all() and (around[-64:] == 7).all()


def test_a_million_and_three_elements(monkeypatch):
    """2^20 + 3 elements beside one element are cut into chunks, by one launch, without a remainder left over."""
    counted = []
    launched = adamw.run
    monkeypatch.setattr(adamw, "run", lambda *args, **options: counted.append(1) or launched(*args, **options))
    params = [torch.nn.Parameter(torch.ones(size)) for size in (2**20 + 3, 1, 0)]
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    TritonAdamW(params, lr=0.1, weight_decay=0.0).step()
    assert len(counted) == 1 and all(gap(p, torch.full_like(p, 0.9)) <= 1e-6 for p in params)


def banded(tensor):
    """Between bands of numbers: what is computed from NaN is NaN, and written over NaN would not be seen."""
    buffer = torch.full((tensor.numel() + 128,), 7.0)
    buffer[64:-64] = tensor
    return buffer[64:-64]


@pytest.mark.parametrize("fused", [True, None])
def test_state_dicts_go_both_ways(fused):
    """8 steps by torch, 8 by ours and 8 by torch again, through state dicts, are 24 steps by torch."""
    params, optimizer = made(torch.optim.AdamW, fused=fused)
    kept, reference = made(torch.optim.AdamW, fused=fused)
    for step in range(24):
        if step in (8, 16):
            values, state = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
            params, optimizer = made(TritonAdamW) if step == 8 else made(torch.optim.AdamW, fused=fused)
            for p, value in zip(params, values, strict=True):
                p.data.copy_(value)
            optimizer.load_state_dict(state)
        for ps, o in ((params, optimizer), (kept, reference)):
            give(ps, step)
            o.step()
    assert all(gap(a, b) <= 1e-6 * b.abs().max() for a, b in zip(params, kept, strict=True))
    ours, theirs = optimizer.state_dict(), reference.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for mine, its in zip(ours["state"].values(), theirs["state"].values(), strict=True):
        assert {k: (v.dtype, v.shape, v.device) for k, v in mine.items()} == {
            k: (v.dtype, v.shape, v.device) for k, v in its.items()
        }


def test_tables_follow_what_moves():
    """Tables are kept while nothing moves, and made anew for other gradients, another group and after a deep copy."""
    params, optimizer = made(TritonAdamW)
    give(params, 0)
    optimizer.step()
    first = dict(optimizer.tables)
    optimizer.step()
    assert all(optimizer.tables[name][1] is table for name, (_, table) in first.items())
    late = torch.nn.Parameter(torch.ones(7))
    optimizer.add_param_group({"params": [late]})
    params.append(late)
    plain = torch.optim.AdamW(copy.deepcopy(optimizer.param_groups))
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others = [p for group in plain.param_groups for p in group["params"]]
    again = copy.deepcopy(optimizer)
    copies = [p for group in again.param_groups for p in group["params"]]
    for ps, o in ((params, optimizer), (others, plain), (copies, again)):
        give(ps, 1)
        o.step()
    assert optimizer.tables[0, 0, "addresses"][1] is not first[0, 0, "addresses"][1]
    assert optimizer.tables[0, 0, "chunks"][1] is first[0, 0, "chunks"][1]
    for a, b, c in zip(params, others, copies, strict=True):
        assert gap(a, b) <= 1e-6 * b.abs().max() and torch.equal(a, c)


def test_mixed_types_and_ages(monkeypatch):
    """One launch for each type and number of steps: float16 beside fp32, and a parameter that joins late."""
    counted = []
    launched = adamw.run
    monkeypatch.setattr(adamw, "run", lambda *args, **options: counted.append(1) or launched(*args, **options))
    params = [torch.nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in (torch.float32, torch.float16, torch.float32)]
    optimizer = TritonAdamW(params, lr=0.1)
    for late in (True, False):
        for p in params[: 2 if late else 3]:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert len(counted) == 2 + 3
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 2, 1]
    expected = 1 - 0.1 * 0.01 - 0.1
    assert gap(params[2], torch.full((5,), expected)) <= 1e-6


def test_closure_schedulers_and_compilers():
    """A closure's loss is returned, a scheduler's rate is used, compiled callers work, and autograd sees the write."""
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


def test_nothing_to_do():
    """Without any gradient nothing happens, and no state is made."""
    params, optimizer = made(TritonAdamW)
    optimizer.step()
    assert not optimizer.state and torch.equal(params[0], fixed_normal((1,), 0).float())


def test_past_2_to_the_31():
    """The last chunk of a tensor of 2^31 + 5 elements is found there."""
    size, block = 2**31 + 5, 1024
    four = [torch.empty(size, dtype=torch.float16) for _ in range(4)]
    for tensor in four:
        tensor[-5:] = 1.0
    launch(
        adamw.multi_tensor_kernel, (1,), torch.tensor([t.data_ptr() for t in four]), torch.tensor([size]),
        torch.zeros(1, dtype=torch.int32), torch.tensor([2**31 // block], dtype=torch.int32), four[0], 1,
        1.0, 0.5, 0.5, 0.5, 1.0, 1e-8, -0.25, BLOCK=block,
    )  # fmt: skip
    assert torch.equal(four[0][-5:], torch.full((5,), 0.75).half()) and torch.equal(four[2][-5:], torch.ones(5).half())


def test_what_a_step_costs():
    """16 bytes in and 12 out for each element in fp32; the tables are a thousandth of that."""
    cost = adamw.cost(10**8, 4, tensors=148)
    assert (cost.read, cost.written) == (16 * 10**8, 12 * 10**8) and cost.workspace < cost.read / 1000


def param(gradient, dtype=torch.float32, shape=(3, 4)):
    p = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    p.grad = gradient
    return p


def stepped(p, **options):
    TritonAdamW([p], **options).step()


def loaded(**options):
    donor = torch.optim.AdamW([param(None)], **options)
    TritonAdamW([param(None)]).load_state_dict(donor.state_dict())


WRONG = [
    (
        lambda: stepped(param(None), amsgrad=True),
        "amsgrad: it has no such option: leave it off, or use torch.optim.AdamW",
    ),
    (lambda: stepped(param(None), fused=True, foreach=True), "foreach, fused: it has no such option"),
    (lambda: TritonAdamW([{"params": [param(None)], "maximize": True}]), "maximize: it has no such option"),
    (lambda: loaded(amsgrad=True), "amsgrad: it has no such option"),
    (
        lambda: stepped(param(torch.ones(3, 4).to_sparse())),
        r"a gradient is torch.sparse_coo .* give a dense torch.float32",
    ),
    (lambda: stepped(param(torch.ones(4, 3).t())), "is not contiguous"),
    (
        lambda: stepped(param(torch.ones(3, 4).double(), torch.float64)),
        "a parameter is torch.float64: give float32, bfloat16",
    ),
    (lambda: stepped(param(torch.ones(3, 4).bfloat16(), torch.bfloat16)), "the interpreter computes bfloat16 wrongly"),
]


def test_what_it_cannot_take_is_one_sentence():
    """Options, types and layouts that would be wrong are refused before anything is changed."""
    for call, words in WRONG:
        if "interpreter" in words and not interpreting():
            continue
        with pytest.raises(KernelError, match=words) as refused:
            call()
        assert "\n" not in str(refused.value)
    good, bad = param(torch.ones(3, 4)), param(torch.ones(4, 3).t())
    optimizer = TritonAdamW([{"params": [good]}, {"params": [bad]}])
    with pytest.raises(KernelError):
        optimizer.step()
    assert not optimizer.state and torch.equal(good, torch.ones(3, 4))
    with pytest.raises(TypeError, match="weight_dacey"):
        TritonAdamW([good], weight_dacey=0.0)


def test_a_state_of_another_shape_is_refused():
    """The kernel is handed addresses, so moments or parameters of another size, type or layout must never reach it."""

    def grown(p):
        p.data = torch.zeros(9, 9)
        p.grad = torch.zeros(9, 9)

    def halved(p):
        p.data = p.data.half()
        p.grad = torch.zeros_like(p)

    for change in (grown, halved):
        p = torch.nn.Parameter(torch.zeros(5, 7))
        optimizer = TritonAdamW([p])
        p.grad = torch.ones_like(p)
        optimizer.step()
        change(p)
        with pytest.raises(KernelError, match="exp_avg is .* and its parameter .*: load the state of this model"):
            optimizer.step()
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        small, large = torch.nn.Parameter(torch.zeros(8, 64)), torch.nn.Parameter(torch.zeros(4096, 64))
        small.grad, large.grad = torch.ones_like(small), torch.ones_like(large)
        source = kind([small], **({"momentum": 0.9, "lr": 0.1} if kind is torch.optim.SGD else {}))
        source.step()
        optimizer = TritonAdamW([large])
        optimizer.state = {large: dict(source.state[small])}
        with pytest.raises(KernelError, match="load"):
            optimizer.step()
