"""Tests of the token + position embedding kernels in the interpreter, against plain torch in fp64."""

import pytest
import torch

from phase2_triton.kernels import embedding as module
from phase2_triton.kernels.core import KernelError, is_interpreted, launch
from phase2_triton.kernels.embedding import embedding
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_registered,
    draw_normal,
    gap,
    guard_bands,
)

pytestmark = pytest.mark.usefixtures("on_device")

TILES = {
    "embedding_forward": {"rows": 4, "block": 32},
    "embedding_positions": {"rows": 4, "block": 32},
    "embedding_windows": {"windows": 2, "length": 4, "block": 32},
    "embedding_tokens": {"rows": 2},
}


def make_tokens(B, T, V):
    """Return random tokens (B, T). As in text, a few tokens are frequent and most are rare."""
    uniform = torch.rand(B, T, generator=torch.Generator("cpu").manual_seed(5), device="cpu")
    return (V * uniform**4).long().to(torch.get_default_device())


def make_weights(V, P, C, dtype=torch.float32):
    return tuple(draw_normal((n, C), seed).to(dtype).requires_grad_() for seed, n in enumerate((V, P)))


def bind_tokens(idx, first=0, function=embedding):
    return lambda wte, wpe: function(idx, wte, wpe, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("B", "T", "V", "P", "C", "first"), [(1, 1, 5, 3, 769, 2), (3, 7, 75, 16, 1023, 4), (12, 64, 75, 64, 65, 0)]
)
def test_embedding_is_as_exact_as_torch(B, T, V, P, C, first, dtype):
    """Results are bitwise identical and gradients as exact as torch's, at odd sizes and with a first position."""
    idx = make_tokens(B, T, V)
    assert_as_exact_as_torch(
        bind_tokens(idx, first),
        bind_tokens(idx, first, module.reference),
        make_weights(V, P, C, dtype),
        factor=0,
        gradient_factor=2,
    )


@pytest.mark.parametrize("kind", ["one token", "all different", "text"])
def test_segments_can_begin_and_end_within_windows(monkeypatch, kind):
    """Results are exact with windows of 4 sorted tokens, 2 windows per program, and tiles of 2 rows."""
    monkeypatch.setattr(module, "select_config", lambda name, _: dict(TILES[name]))
    idx = {
        "one token": torch.full((3, 13), 6),
        "all different": torch.arange(39).view(3, 13),
        "text": make_tokens(3, 13, 9),
    }
    assert_as_exact_as_torch(
        bind_tokens(idx[kind]), bind_tokens(idx[kind], 0, module.reference), make_weights(39, 13, 70), gradient_factor=2
    )


def test_any_layout_works():
    """Transposed tokens and weights, and an expanded gradient, give the results of contiguous tensors."""
    idx, base = make_tokens(7, 3, 20).t(), draw_normal((12, 33)).float()
    wte, wpe = base[:, :20].t().requires_grad_(), base[:, 20:].t().requires_grad_()
    assert not (idx.is_contiguous() or wte.is_contiguous() or wpe.is_contiguous())
    ours, exact = embedding(idx, wte, wpe), module.reference(idx, wte, wpe)
    assert torch.equal(ours, exact)
    # The gradient of y.sum() has a stride of 0.
    for a, b in zip(*(torch.autograd.grad(y.sum(), (wte, wpe)) for y in (ours, exact)), strict=True):
        assert gap(a, b) <= 1e-5


@pytest.mark.heavy
def test_the_operators_pass_opcheck():
    """Schemas, fake tensors, autograd and AOT tracing are correct."""
    idx, (wte, wpe) = make_tokens(2, 3, 5), make_weights(5, 4, 8)
    assert_registered(module.forward_op, (idx, wte, wpe, 1))
    assert_registered(module.tokens_op, (torch.randn(2, 3, 8), idx, 5))
    assert_registered(module.positions_op, (torch.randn(2, 3, 8), 1, 4))


def test_unknown_tokens_are_refused():
    """An error names a token that is not in the vocabulary. In the kernel, such a token gives NaN and no gradient."""
    base, wpe = (w.detach() for w in make_weights(7, 4, 8))
    wte = base[1:6]  # an out-of-bounds read would return a number, not NaN
    for token in (5, -1, 2**40):
        idx = torch.tensor([[1, token, 2]])
        if is_interpreted():  # on a GPU, this check would wait for the device
            with pytest.raises(KernelError, match=f"token {token} is not in the vocabulary of 5: use 0 to 4"):
                embedding(idx, wte, wpe)
        with guard_bands():
            out = torch.empty(1, 3, 8)
            launch(
                module.forward_kernel, (1, 1), idx, wte, wpe, out, 3, 3, 5, 8, 0, ROWS=4, BLOCK=8
            )  # fmt: skip
            dwte = module.tokens_op(torch.ones(1, 3, 8), idx, 5)
        assert out[0, 1].isnan().all() and torch.equal(out[0, ::2], wte[1:3] + wpe[:3:2])
        assert torch.equal(dwte.sum(1), torch.tensor([0.0, 8, 8, 0, 0]))
