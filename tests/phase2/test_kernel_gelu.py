"""Bias + GELU and the product that ends in it, interpreted, against plain torch in fp64."""

import math

import pytest
import torch
from torch.nn import functional as F

from phase2_triton.kernels import gelu
from phase2_triton.kernels.core import KernelError, launch
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_near,
    assert_registered,
    compile_whole,
    fixed_normal,
    gap,
)

pytestmark = pytest.mark.usefixtures("on_device")

TILES = {
    "gelu_forward": {"rows": 2, "block": 64},
    "gelu_backward": {"rows": 2, "block": 64, "programs": 3},
    "linear_gelu": {"rows": 16, "cols": 32, "depth": 16, "group": 2},
    "linear_gelu_single": {"rows": 16, "cols": 32, "depth": 16, "group": 2},
}


def leaves(*shapes, dtype=torch.float32, scale=1.0):
    return tuple((scale * fixed_normal(s, seed)).to(dtype).requires_grad_() for seed, s in enumerate(shapes))


def plain(approximate):
    return lambda x, b=None: F.gelu(x if b is None else x + b, approximate=approximate)


def plain_linear(approximate):
    return lambda x, w, b=None: F.gelu(F.linear(x, w, b), approximate=approximate)


def ours(function, approximate):
    return lambda *tensors: function(*tensors, approximate=approximate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("M", "N", "bias", "approximate"), [(1, 769, True, "none"), (33, 1023, False, "tanh"), (129, 1600, True, "tanh")]
)
def test_bias_gelu_is_as_exact_as_torch(M, N, bias, approximate, dtype):
    """Results and gradients, at ragged widths and odd numbers of rows, with and without bias."""
    tensors = leaves((M, N), (N,), dtype=dtype, scale=2.0)[: 1 + bias]
    assert_as_exact_as_torch(ours(gelu.bias_gelu, approximate), plain(approximate), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("M", "K", "N", "bias", "approximate"),
    [(1, 769, 65, True, "tanh"), (33, 40, 1023, False, "none"), (129, 64, 1600, True, "none")],
)
def test_linear_gelu_is_as_exact_as_torch(M, K, N, bias, approximate, dtype):
    """Results and gradients of the product that ends in GELU: no tile is full in any direction."""
    tensors = leaves((M, K), (N, K), (N,), dtype=dtype, scale=0.5)[: 2 + bias]
    assert_as_exact_as_torch(ours(gelu.linear_gelu, approximate), plain_linear(approximate), tensors)


def test_tiles_and_programs_share_the_work_out(monkeypatch):
    """With tiles of 16 x 32 in groups of 2, the last of which is lower, and 3 programs for dB, nothing is left out."""
    monkeypatch.setattr(gelu, "config", lambda name, _: dict(TILES[name]))
    assert_as_exact_as_torch(ours(gelu.linear_gelu, "none"), plain_linear("none"), leaves((75, 50), (100, 50), (100,)))
    assert_as_exact_as_torch(ours(gelu.bias_gelu, "none"), plain("none"), leaves((75, 100), (100,)))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_large_and_tiny_values(approximate):
    """1e30 either way overflows nothing; where GELU is nearly 0, its digits are right, which torch's are not."""
    x = torch.tensor([-1e30, -1e4, -7.0, -5.0, -3.0, -1e-6, 0.0, 1e-6, 3.0, 7.0, 1e4, 1e30], requires_grad=True)
    y = gelu.bias_gelu(x, approximate=approximate)
    (slope,) = torch.autograd.grad(y.sum(), x)
    v = x.detach().double()
    exact = v * torch.special.erfc(-v / math.sqrt(2)) / 2
    if approximate == "tanh":
        exact = v * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))
    assert ((y - exact).abs() <= 5e-6 * exact.abs()).all()
    assert torch.equal(slope[:2], torch.zeros(2)) and torch.equal(slope[-2:], torch.ones(2))
    assert slope[6] == 0.5 and not slope.isnan().any()


def test_the_fitted_normal_distribution():
    """GELU by the polynomial keeps 5 digits down to -10, where torch's has none, and 6 digits from -3 upwards."""
    x = torch.linspace(-10, 10, 4000)
    exact = x.double() * torch.special.erfc(-x.double() / math.sqrt(2)) / 2
    mine, torchs = ((y - exact).abs() / exact.abs() for y in (gelu.bias_gelu(x), F.gelu(x)))
    assert mine.max() < 5e-6 and mine[x > -3].max() < 1e-6 and torchs.max() > 0.5


def test_no_rows():
    """M = 0 gives an empty result and gradients of 0."""
    x, w, b = leaves((0, 40), (7, 40), (7,))
    y = gelu.bias_gelu(gelu.linear_gelu(x, w, b), b)
    y.sum().backward()
    assert y.shape == (0, 7) and x.grad.shape == (0, 40) and not w.grad.any() and not b.grad.any()


def test_any_layout_and_shape():
    """Transposed, sliced and three-dimensional inputs, a strided bias and an expanded gradient are no different."""
    w, b = torch.randn(14, 6).t()[:, :12], torch.randn(12)[::2]
    for x in (torch.randn(12, 40).t(), torch.randn(4, 5, 24)[..., ::2]):
        leaf = x.detach().requires_grad_()
        y = gelu.bias_gelu(gelu.linear_gelu(leaf, w, b), b)
        exact = F.gelu(F.gelu(F.linear(leaf.double(), w.double(), b.double())) + b.double())
        assert y.shape == (*x.shape[:-1], 6) and gap(y, exact) <= 1e-5
        ours_dx, expected = (torch.autograd.grad(z.sum(), leaf)[0] for z in (y, exact))  # of stride 0
        assert gap(ours_dx, expected) <= 1e-5


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.heavy
def test_gradcheck(approximate, monkeypatch):
    """In fp64, finite differences agree with the backwards."""
    monkeypatch.setattr(gelu, "config", lambda name, _: dict(TILES[name]))
    tensors = leaves((3, 5), (4, 5), (4,), dtype=torch.float64)
    assert torch.autograd.gradcheck(ours(gelu.linear_gelu, approximate), tensors)
    assert torch.autograd.gradcheck(ours(gelu.bias_gelu, approximate), leaves((3, 5), (5,), dtype=torch.float64))


@pytest.mark.heavy
def test_the_ops_are_registered_well():
    """opcheck: schemas, fake tensors, autograd and AOT tracing hold."""
    x, w, b = leaves((3, 5), (4, 5), (4,))
    pre = torch.randn(3, 4)
    assert_registered(gelu.linear_op, (x, w, b, True, torch.float32, True))
    assert_registered(gelu.linear_op, (x.detach(), w.detach(), None, False, torch.bfloat16, False))
    assert_registered(gelu.forward_op, (pre.requires_grad_(), b, False, torch.float32))
    assert_registered(gelu.backward_op, (pre.detach(), pre.detach(), None, False, True))


@pytest.mark.heavy
def test_compiled_whole():
    """torch.compile(fullgraph=True) gives eager's results and gradients, also with another number of rows."""
    _, w, b = leaves((1, 20), (30, 20), (30,))

    def f(x):
        return gelu.bias_gelu(gelu.linear_gelu(x * 2, w, b, "tanh"), b)

    compiled = compile_whole(f)
    for M in (4, 7, 9):
        (x,) = leaves((M, 20))
        y, expected = compiled(x), f(x)
        assert gap(y, expected) <= 1e-5
        pairs = zip(*(torch.autograd.grad(z.square().sum(), (x, w, b)) for z in (y, expected)), strict=True)
        assert all(gap(a, b) <= 1e-4 for a, b in pairs)


def test_autocast():
    """Under autocast the result is bfloat16, as exact as torch's, and gradients come in the master weights' fp32."""
    x, w, b = leaves((33, 64), (100, 64), (100,))
    dy = fixed_normal((33, 100))
    found = []
    for function in (gelu.linear_gelu, plain_linear("none")):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            y = function(x, w, b)
        found.append([y, *torch.autograd.grad(y, (x, w, b), dy.to(y.dtype))])
    exact = plain_linear("none")(*(t.double() for t in (x, w, b)))
    exact = [exact, *torch.autograd.grad(exact, (x, w, b), dy)]
    assert [t.dtype for t in found[0]] == [torch.bfloat16, *[torch.float32] * 3] == [t.dtype for t in found[1]]
    for mine, torchs, true in zip(*found, exact, strict=True):
        assert_near(mine, torchs, true)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        y = gelu.bias_gelu(x.detach())
    assert torch.equal(y, gelu.bias_gelu(x.detach()).bfloat16())  # rounded to the nearest


def test_under_activation_checkpointing():
    """Recomputed in the backward, gradients are the same to the last bit."""
    x, w, b = leaves((9, 20), (30, 20), (30,))

    def gradients(recompute):
        f = torch.utils.checkpoint.checkpoint if recompute else lambda f, *args, **_: f(*args)
        y = f(lambda *t: gelu.bias_gelu(gelu.linear_gelu(*t), b), x, w, b, use_reentrant=False)
        return torch.autograd.grad(y.square().sum(), (x, w, b))

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_twice_is_bitwise_the_same():
    """Two backwards over several programs give the same bits: the sums have one order."""
    x, b = leaves((1301, 70), (70,))

    def gradients():
        return torch.autograd.grad(gelu.bias_gelu(x, b).square().sum(), (x, b))

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_what_is_saved():
    """Without a gradient the pre-activation is not written and the result is the same; each gradient is optional."""
    x, w, b = leaves((9, 20), (30, 20), (30,))
    with torch.no_grad():
        without = gelu.linear_gelu(x, w, b)
    assert torch.equal(without, gelu.linear_gelu(x, w, b))
    assert gelu.linear_op(x, w, b, False, torch.float32, False)[1].numel() == 0
    for wanted in ((x,), (w,), (b,)):
        inputs = [t if t is wanted[0] else t.detach() for t in (x, w, b)]
        (alone,) = torch.autograd.grad(gelu.linear_gelu(*inputs).sum(), wanted)
        (together,) = torch.autograd.grad(gelu.linear_gelu(x, w, b).sum(), wanted)
        assert torch.equal(alone, together)


def test_flops_are_counted():
    """FlopCounterMode sees one product there and two back, as many as torch's own layer has."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton, which phase2_triton must do first

    x, w, b = leaves((9, 20), (30, 20), (30,))
    counts = []
    for f in (gelu.linear_gelu, plain_linear("none")):
        with FlopCounterMode(display=False) as counter:
            f(x, w, b).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts == [3 * 2 * 9 * 20 * 30] * 2


def test_past_2_to_the_31():
    """Rows that begin 2^30 elements apart are read and written where they are."""
    stride = 2**30
    x, y, dx, pre = (torch.empty(2 * stride + 8, dtype=torch.float16).as_strided((3, 8), (stride, 1)) for _ in range(4))
    x.copy_(torch.arange(24).view(3, 8) / 8 - 1)
    flags = {"HAS_BIAS": False, "TANH": False}
    launch(gelu.forward_kernel, (1, 1), x, None, y, 3, stride, **flags, ROWS=4, BLOCK=8)
    launch(
        gelu.backward_kernel, (1, 1), y, x, None, dx, torch.empty(0), 3, stride, **flags, SUM=False, ROWS=4, BLOCK=8
    )  # fmt: skip
    leaf = x.double().requires_grad_()
    exact = F.gelu(leaf)
    assert gap(y, exact) <= 2e-3 and gap(dx, torch.autograd.grad(exact, leaf, y.double())[0]) <= 4e-3
    a, w = torch.randn(3, 16).half(), torch.randn(8, 16).half()
    tiles = {"ROWS": 16, "COLS": 8, "DEPTH": 16, "GROUP": 8}
    launch(
        gelu.linear_kernel, (1,), a, w[[*range(8)]], None, y, pre, 3, stride, 16, **flags, **tiles, SAVE=True,
        PRECISION="ieee",
    )  # fmt: skip
    assert gap(pre, a.double() @ w.double().t()) <= 1e-2 and gap(y, F.gelu(pre.double())) <= 2e-3


def test_what_a_call_costs():
    """Bytes that are read and written are those of the tensors, and the roofline is the slower of memory and FLOPs."""
    M, N, K = 8, 12, 20
    there, back = gelu.cost(M, N, 2)
    assert (there.read, there.written) == (2 * M * N + 4 * N, 2 * M * N)
    assert (back.read, back.written) == (4 * M * N + 4 * N, 2 * M * N + 4 * N)
    there, back = gelu.linear_cost(M, N, K, 2)
    assert there.read == 2 * (M * K + N * K) + 4 * N and there.written == 2 * 2 * M * N
    assert 0 <= there.flops - 2 * M * N * K <= 50 * M * N and 0 <= back.flops - 4 * M * N * K <= 50 * M * N
    assert there.seconds(1.0, 1e30) == there.read + there.written and there.seconds(1e30, 1.0) == there.flops


WRONG = [
    (lambda: gelu.bias_gelu(torch.zeros(3, 5), torch.zeros(4)), r"bias is \(4,\): give \(5,\), as the result is wide"),
    (lambda: gelu.bias_gelu(torch.zeros(())), "no last dimension"),
    (lambda: gelu.bias_gelu(torch.zeros(3, 5), approximate="sigmoid"), "'sigmoid' is unknown: give none or tanh"),
    (lambda: gelu.bias_gelu(torch.zeros(3, 5).long()), "x is torch.int64: give float32"),
    (lambda: gelu.linear_gelu(torch.zeros(3, 5), torch.zeros(5, 4)), r"weight is \(5, 4\): give \(N, 5\), as x is"),
    (lambda: gelu.linear_gelu(torch.zeros(3, 5), torch.zeros(4, 5).half()), "give one type, or use autocast"),
    (lambda: gelu.linear_gelu(torch.zeros(3, 5, device="meta"), torch.zeros(4, 5)), "on meta, where it cannot run"),
]


def test_wrong_input_is_one_sentence():
    """A shape, type, device or option that does not fit is refused, and the sentence says what to give."""
    for call, words in WRONG:
        with pytest.raises(KernelError, match=words) as refused:
            call()
        assert "\n" not in str(refused.value)


def test_a_second_derivative_is_refused():
    """Neither operator is differentiable twice, and says so instead of giving half of it."""
    x, w = fixed_normal((4, 6), 1).float().requires_grad_(), fixed_normal((5, 6), 2).float().requires_grad_()
    for y in (gelu.linear_gelu(x, w), gelu.bias_gelu(x)):
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            gradient.square().sum().backward()
