"""Tests of the causal attention kernels in the interpreter, against plain torch in fp64."""

import contextlib
import math

import pytest
import torch
from torch.nn import functional as F

from phase2_triton.kernels import attention
from phase2_triton.kernels.attention import causal_attention, reference
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_registered,
    compile_full_graph,
    draw_normal,
    gap,
    guard,
    guard_bands,
    import_variant,
)

pytestmark = pytest.mark.usefixtures("on_device")


def make_projection(B, nh, T, hs, dtype=torch.float32):
    """Return a random projection (B, T, 3, nh, hs). As in the model, the heads are views of it."""
    return draw_normal((B, T, 3, nh, hs), 1).to(dtype).requires_grad_()


def split_heads(qkv):
    """Return q, k and v of shape (B, nh, T, hs) without a copy."""
    return qkv.permute(2, 0, 3, 1, 4).unbind()


def run_sdpa(qkv):
    return F.scaled_dot_product_attention(*split_heads(qkv), is_causal=True)


def compute_philox(seed, *counters):
    """Return the first word of Philox4x32-7, computed in the low 32 bits of int64 (Salmon et al. 2011)."""
    low = 2**32 - 1
    k0, k1 = seed & low, seed >> 32
    c0, c1, c2, c3 = counters
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((b >> 32) & low) ^ c1 ^ k0, b & low, ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0


def compute_dropout_mask(seed, B, nh, T, p):
    """Return the elements that the kernels must keep, (B, nh, T, T), computed in plain torch."""
    head_index = torch.arange(B * nh).view(B, nh, 1, 1)
    bits = compute_philox(seed, torch.arange(T), torch.arange(T)[:, None], head_index, torch.tensor(0))
    folded = torch.where(bits < 2**31, bits, 2**32 - 1 - bits)  # Triton computes a number in [0, 1) from 31 bits
    return folded.float() * 4.6566127342e-10 >= p


def run_kernels(qkv):
    return causal_attention(*split_heads(qkv))


def are_equal(tensors, others):
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3, 1, 16), (2, 2, 257, 24), (1, 1, 257, 64), (1, 3, 97, 80), (2, 1, 65, 128)])
def test_attention_is_as_exact_as_torch(shape, dtype):
    """Results and gradients are as exact as torch's, for ragged lengths and widths, with views of one projection."""
    assert_as_exact_as_torch(run_kernels, run_sdpa, (make_projection(*shape, dtype),), gradient_factor=3.0)


@pytest.mark.parametrize(("block", "step", "num_heads"), [(16, 64, 1), (64, 16, 2)])
def test_any_tile_size_works(block, step, num_heads, monkeypatch):
    """Other block and step sizes divide the diagonal differently. A program can compute one head or multiple heads."""
    monkeypatch.setattr(attention, "select_config", lambda *_: {"block": block, "step": step, "heads": num_heads})
    assert_as_exact_as_torch(run_kernels, run_sdpa, (make_projection(1, 2, 97, 17),), gradient_factor=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_scores_do_not_overflow(dtype):
    """Scores of 1e4 and -1e4 do not overflow.

    Rounding a score once in fp32 changes a result in proportion to the score. How torch rounds its own sums depends on
    the processor, so the test allows this additional error.
    """
    qkv = make_projection(1, 2, 65, 64, dtype).detach()
    qkv[:, :, :2] *= 60
    largest = float(qkv[:, :, 0].double().norm(dim=-1).max() * qkv[:, :, 1].double().norm(dim=-1).max() / 8)
    assert largest > 1e4
    rounding = torch.finfo(torch.float32).eps * largest
    assert_as_exact_as_torch(run_kernels, run_sdpa, (qkv.requires_grad_(),), gradient_factor=3.0, allowed=rounding)


def test_a_recomputed_weight_is_at_most_1():
    """A large score that the backward rounds up by 300 gives a weight of 1, and a NaN stays NaN.

    Whether the product of the backward is rounded as that of the forward depends on the processor. So the test lowers
    the lse of the forward instead.
    """
    q, k, v, dy = (draw_normal((1, 1, 1, 16), i).float() for i in range(4))
    lse = (q * k).sum(-1) * 0.25 / math.log(2)
    dq, dk, dv = attention.backward_op(dy, q, k, v, torch.zeros_like(v), lse - 300, None, 0.0, 0.25)
    dp = (dy * v).sum()
    for gradient, expected in ((dq, 0.25 * dp * k), (dk, 0.25 * dp * q), (dv, dy)):
        assert gap(gradient, expected) <= 1e-5
    for gradient in attention.backward_op(dy, q, k, v, v, lse * math.nan, None, 0.0, 0.25):
        assert gradient.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("B", "nh"), [(2, 2), (1, 3)])  # an odd number of heads: one head per program, as on a GPU
def test_dropout_matches_the_reference_with_the_same_mask(B, nh, dtype):
    """The forward and both backward kernels drop what Philox in plain torch drops, and scale the other elements."""
    T, hs = 97, 24
    seed = torch.tensor([2**62 + 12345])
    mask = compute_dropout_mask(seed, B, nh, T, 0.2)

    def run_with_dropout(qkv):
        return attention.forward_op(*split_heads(qkv), seed, 0.2, 0.25)[0]

    def run_reference(qkv):
        return reference(*split_heads(qkv), 0.2, 0.25, mask)

    assert_as_exact_as_torch(
        run_with_dropout, run_reference, (make_projection(B, nh, T, hs, dtype),), gradient_factor=3.0
    )


def test_any_layout_and_expanded_gradients_work():
    """Three layouts, one without contiguous rows, and a gradient of stride 0 match contiguous tensors."""
    B, nh, T, hs = 2, 3, 33, 24
    q, k, v = (x.detach() for x in split_heads(make_projection(B, nh, T, hs)))
    q, k, v = q, k.contiguous(), v.transpose(2, 3).contiguous().transpose(2, 3)
    leaves = [x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k, v)]
    views = [x.requires_grad_() for x in (q, k, v)]
    for reduce in (torch.sum, lambda y: y[..., 0].sum(), lambda y: (y.transpose(2, 3).contiguous() ** 2).sum()):
        from_views, from_contiguous = causal_attention(*views), causal_attention(*leaves)
        assert torch.equal(from_views, from_contiguous)
        assert are_equal(
            torch.autograd.grad(reduce(from_views), views), torch.autograd.grad(reduce(from_contiguous), leaves)
        )


def test_saved_tensors_can_change_their_layout():
    """save_on_cpu does not preserve strides. Tensors that it offloads and restores give the same gradients."""
    qkv = make_projection(2, 3, 33, 16)
    with torch.autograd.graph.save_on_cpu():
        y = run_kernels(qkv)
    assert are_equal(
        torch.autograd.grad(y.square().sum(), qkv), torch.autograd.grad(run_kernels(qkv).square().sum(), qkv)
    )


def test_fp32_products_follow_torchs_matmul_precision(monkeypatch):
    """Tensor cores use tf32 for fp32 products only if torch.set_float32_matmul_precision allows it."""
    precisions = []
    monkeypatch.setattr(attention, "launch", lambda *_, **options: precisions.append(options["PRECISION"]))
    run_kernels(make_projection(1, 1, 4, 16)).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        run_kernels(make_projection(1, 1, 4, 16)).sum().backward()
    assert precisions == ["ieee"] * 3 + ["tf32"] * 3


@pytest.mark.heavy
def test_the_operators_pass_opcheck():
    """Schemas, fake tensors, autograd and AOT tracing are correct, with and without dropout."""
    q, k, v = split_heads(make_projection(2, 2, 5, 4))
    for seed, p in ((None, 0.0), (torch.tensor([5]), 0.2)):
        assert_registered(attention.forward_op, (q, k, v, seed, p, 0.5))
        plain = [x.detach() for x in (q, k, v)]
        y, lse = attention.forward_op(*plain, seed, p, 0.5)
        assert_registered(attention.backward_op, (torch.ones_like(y), *plain, y, lse, seed, p, 0.5))


@pytest.mark.heavy
def test_compiled_dropout_follows_torchs_seed():
    """In compiled code, torch's seed also decides the mask, and the backward pass uses the forward's mask."""
    compiled = compile_full_graph(lambda q, k, v: causal_attention(q, k, v, 0.3) * 1)
    q, k, v = (x.detach().requires_grad_() for x in split_heads(make_projection(2, 2, 9, 16)))

    def run_with_seed(seed):
        torch.manual_seed(seed)
        return compiled(q, k, v)

    y = run_with_seed(1)
    assert torch.equal(y, run_with_seed(1)) and not torch.equal(y, run_with_seed(2))
    dy = draw_normal(y.shape).float()
    (dv,) = torch.autograd.grad(y, v, dy)
    assert abs((dv * v).sum() - (dy * y).sum()) <= 1e-5 * (dy * y).abs().sum()  # y is linear in v


def test_autocast_matches_sdpa():
    """Under autocast, fp32 heads are converted to bfloat16, as in SDPA, and gradients are returned in fp32."""

    def with_autocast(function):
        def run_under_autocast(qkv):
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                return function(qkv)

        return run_under_autocast

    assert run_kernels(make_projection(1, 1, 3, 16)).dtype == torch.float32
    assert with_autocast(run_kernels)(make_projection(1, 1, 3, 16)).dtype == torch.bfloat16
    assert_as_exact_as_torch(
        with_autocast(run_kernels), with_autocast(run_sdpa), (make_projection(1, 2, 65, 32),), gradient_factor=3.0
    )


def test_a_kernel_that_masks_every_block_matches_the_reference():
    """A kernel that also masks the blocks below the diagonal matches the reference."""
    q, k, v = (x.contiguous() for x in split_heads(make_projection(2, 1, 97, 24).detach()))
    exact = reference(*(x.double() for x in (q, k, v)))
    with guard_bands():
        guarded = tuple(guard(x) for x in (q, k, v))
        y, lse = torch.empty(2, 97, 1, 24).transpose(1, 2), torch.empty(2, 1, 97)
        attention.launch_blocks(
            attention.forward_kernel, "attention_forward", guarded, (y, lse), None, 0.0, 24**-0.5, SPLIT=False
        )
    assert gap(y, exact) <= 1e-6


def test_counted_flops():
    """FlopCounterMode counts all pairs of tokens, as for SDPA."""
    qkv = make_projection(2, 3, 64, 16)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        y = run_kernels(qkv)
        assert counter.get_total_flops() == 4 * 2 * 3 * 64 * 64 * 16
        y.sum().backward()
    assert counter.get_total_flops() == 14 * 2 * 3 * 64 * 64 * 16


DKV_MASK = "keep = dropout_mask(seed, queries, keys, head, DROPOUT)\n                kept_p"
PLANTED_BUGS = {
    "nothing": ("queries >= keys, scores", "queries >= keys, scores"),
    "attends_to_next_token": ("queries >= keys, scores", "queries + 1 >= keys, scores"),
    "ignores_own_token": ("queries >= keys, scores", "queries > keys, scores"),
    "masks_with_zero": ('scores, -float("inf"))', "scores, 0.0)"),
    "no_rescaling": ("acc * correction, input", "acc, input"),
    "reads_the_next_head": ("(first + rows < T) & (cols < HS), other", "(first + rows < T), other"),
    "dkv_without_mask": ("if AFTER == 0:", "if AFTER == 2:"),
    "dkv_drops_other_elements": (DKV_MASK, DKV_MASK.replace("queries, keys", "keys, queries")),
    "no_delta": ("(dp - row_delta)", "dp"),
    "one_mask_for_all_heads": ("keys, head, DROPOUT), p", "keys, head if HEADS > 1 else 0, DROPOUT), p"),
    "dp_is_not_rescaled": ("dp * (1 / (1 - DROPOUT))", "dp * (1 / (1 - (DROPOUT if HEADS > 1 else 0)))"),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # one of the bugs computes -inf - -inf
@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_a_planted_bug_is_caught(name, tmp_path):
    """Kernels with one planted bug fail the check of exactness. With nothing planted, the same check passes.

    A program computes two heads, or one head where their number is odd.
    """
    kernels = import_variant(tmp_path, attention, name, [PLANTED_BUGS[name]])
    kernels.select_config = lambda *_: {"block": 32, "step": 32, "heads": 2}
    seed = torch.tensor([7])
    with contextlib.nullcontext() if name == "nothing" else pytest.raises(AssertionError, match="error of"):
        for num_heads in (3, 2):
            keep = compute_dropout_mask(seed, 1, num_heads, 41, 0.2)
            assert_as_exact_as_torch(
                lambda qkv: kernels.forward_op(*split_heads(qkv), seed, 0.2, 0.2)[0],
                lambda qkv, keep=keep: reference(*split_heads(qkv), 0.2, 0.2, keep),
                (make_projection(1, num_heads, 41, 24),),
                gradient_factor=3.0,
            )
