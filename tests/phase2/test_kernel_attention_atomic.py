"""Tests of the attention backward pass with five matrix products, in the interpreter."""

import pytest
import torch

from phase2_triton.kernels import attention, attention_atomic
from phase2_triton.kernels.attention import reference
from phase2_triton.kernels.attention_atomic import causal_attention_atomic
from phase2_triton.kernels.core import KernelError
from tests.helpers.attention import compute_dropout_mask, make_projection, run_sdpa, split_heads
from tests.helpers.kernels import assert_as_exact_as_torch, assert_registered, gap, import_variant

pytestmark = pytest.mark.usefixtures("on_device")


def run_atomic(qkv):
    return causal_attention_atomic(*split_heads(qkv))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3, 1, 16), (2, 2, 257, 24), (1, 3, 97, 80), (2, 1, 65, 128)])
def test_five_products_are_as_exact_as_torch(shape, dtype):
    """Gradients are as exact as torch's, for ragged lengths and widths, with views of one projection."""
    assert_as_exact_as_torch(run_atomic, run_sdpa, (make_projection(*shape, dtype),), gradient_factor=3.0)


@pytest.mark.parametrize(("block", "step", "num_heads"), [(16, 64, 1), (64, 16, 2), (32, 32, 1)])
def test_any_tile_size_works(block, step, num_heads, monkeypatch):
    """Other tiles divide the diagonal, the full tiles and the last tile differently, and many programs add to a row."""
    monkeypatch.setattr(attention, "select_config", lambda *_: {"block": block, "step": step, "heads": num_heads})
    for T in (97, 128):
        assert_as_exact_as_torch(run_atomic, run_sdpa, (make_projection(1, 2, T, 17),), gradient_factor=3.0)


def test_dropout_matches_the_deterministic_backward():
    """With dropout, dq, dk and dv are those of the backward with seven products, and of the reference's mask."""
    seed = torch.tensor([2**62 + 12345])
    mask = compute_dropout_mask(seed, 1, 3, 65, 0.2)
    qkv = make_projection(1, 3, 65, 24)
    results = [
        torch.autograd.grad(op(qkv).square().sum(), qkv)[0]
        for op in (
            lambda x: attention_atomic.forward_op(*split_heads(x), seed, 0.2, 0.25)[0],
            lambda x: attention.forward_op(*split_heads(x), seed, 0.2, 0.25)[0],
            lambda x: reference(*split_heads(x), 0.2, 0.25, mask),
        )
    ]
    assert gap(results[0], results[1]) < 1e-5 and gap(results[0], results[2]) < 1e-4


def test_gradcheck():
    """Gradients are right in fp64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    call = lambda *x: attention_atomic.forward_op(*x, None, 0.0, 0.7)[0]  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v), fast_mode=True)


def test_unsupported_calls_are_refused():
    """Under torch.use_deterministic_algorithms the function is refused, as are wrong arguments under its own name."""
    q = torch.zeros(1, 1, 17, 16)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(KernelError, match="causal_attention_atomic: .* not deterministic.*: use causal_attention$"):
            causal_attention_atomic(q, q, q)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(KernelError, match="^causal_attention_atomic: dropout_p=1.5 is out of range"):
        causal_attention_atomic(q, q, q, 1.5)


def test_opcheck():
    """torch.library.opcheck passes for both operators, with a mask of dropout too."""
    q, k, v = (x.detach().requires_grad_() for x in split_heads(make_projection(1, 2, 17, 8)))
    seed = torch.tensor([7])
    assert_registered(attention_atomic.forward_op, (q, k, v, seed, 0.2, 0.5))
    y, lse = attention.run_forward(q.detach(), k, v, None, 0.0, 0.5)
    assert_registered(attention_atomic.backward_op, (y, q.detach(), k.detach(), v.detach(), y, lse, None, 0.0, 0.5))


@pytest.mark.parametrize(
    ("source", "planted"),
    [
        ("dy_row, T, HS, BLOCK_D, STEP, True)", "dy_row, T, HS, BLOCK_D, STEP, False)"),
        ("T if AFTER else", "T // STEP * STEP if AFTER else"),
        ("add_rows(dq_sum, dq_tile, start, row,", "add_rows(dq_sum, dq_tile, first, row,"),
        ("total * SCALE", "total"),
        ("tl.zeros_like(product)", "product"),
    ],
    ids=["no mask", "no last tile", "wrong rows", "no scale", "no zeros"],
)  # fmt: skip
def test_planted_bugs_are_found(source, planted, tmp_path, monkeypatch):
    """A missing mask, last tile or factor, sums in the wrong rows or a buffer without zeros change the gradients."""
    kernels = import_variant(tmp_path, attention_atomic, "planted_" + str(abs(hash(planted))), [(source, planted)])
    monkeypatch.setattr(attention, "select_config", lambda *_: {"block": 32, "step": 16, "heads": 1})
    q, k, v = (x.detach() for x in split_heads(make_projection(1, 2, 41, 16)))
    dy = torch.randn(1, 2, 41, 16)
    y, lse = attention.run_forward(q, k, v, None, 0.0, 0.25)
    arguments = (dy, q, k, v, y, lse, None, 0.0, 0.25)
    wrong, right = kernels.backward_op(*arguments), attention.backward_op(*arguments)
    assert max(gap(a, b) for a, b in zip(attention_atomic.backward_op(*arguments), right, strict=True)) < 1e-5
    assert not max(gap(a, b) for a, b in zip(wrong, right, strict=True)) < 1e-3
