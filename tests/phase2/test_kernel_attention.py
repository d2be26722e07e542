"""Causal attention's kernels, interpreted, against plain torch in fp64."""

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from phase2_triton.kernels import attention
from phase2_triton.kernels.attention import causal_attention, reference, store_rows
from phase2_triton.kernels.core import KernelError, jit, launch, tile, tl
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_registered,
    compile_whole,
    fixed_normal,
    gap,
    guard_bands,
    guarded,
)

pytestmark = pytest.mark.usefixtures("on_device")


def projection(B, nh, T, hs, dtype=torch.float32):
    """What the model's heads are views of: (B, T, 3, nh, hs)."""
    return fixed_normal((B, T, 3, nh, hs), 1).to(dtype).requires_grad_()


def heads(qkv):
    """q, k and v, (B, nh, T, hs), without a copy."""
    return qkv.permute(2, 0, 3, 1, 4).unbind()


def ours(qkv):
    return causal_attention(*heads(qkv))


def torchs(qkv):
    return F.scaled_dot_product_attention(*heads(qkv), is_causal=True)


def same(many, others):
    return all(torch.equal(a, b) for a, b in zip(many, others, strict=True))


def philox(seed, *counters):
    """Philox4x32-7's first word, by int64 whose low 32 bits count (Salmon et al. 2011)."""
    low = 2**32 - 1
    k0, k1 = seed & low, seed >> 32
    c0, c1, c2, c3 = counters
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((b >> 32) & low) ^ c1 ^ k0, b & low, ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0


def dropout_mask(seed, B, nh, T, p):
    """What the kernels must keep, (B, nh, T, T), by plain torch."""
    which = torch.arange(B * nh).view(B, nh, 1, 1)
    bits = philox(seed, torch.arange(T), torch.arange(T)[:, None], which, torch.tensor(0))
    folded = torch.where(bits < 2**31, bits, 2**32 - 1 - bits)  # 31 bits, as Triton makes a number in [0, 1) of it
    return folded.float() * 4.6566127342e-10 >= p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3, 1, 16), (2, 2, 257, 24), (1, 1, 257, 64), (1, 3, 97, 80), (2, 1, 65, 128)])
def test_attention_is_as_exact_as_torch(shape, dtype):
    """Results and gradients, for ragged lengths and widths, from views into one projection."""
    assert_as_exact_as_torch(ours, torchs, (projection(*shape, dtype),), gradient_factor=3.0)


@pytest.mark.parametrize(("block", "step", "together"), [(16, 64, 1), (64, 16, 2)])
def test_any_tiles(block, step, together, monkeypatch):
    """Blocks and steps of other sizes meet the diagonal elsewhere; a program may take one head or several."""
    monkeypatch.setattr(attention, "config", lambda *_: {"block": block, "step": step, "heads": together})
    assert_as_exact_as_torch(ours, torchs, (projection(1, 2, 97, 17),), gradient_factor=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_scores(dtype):
    """Scores of 1e4 and of -1e4 overflow nothing. A score that is rounded once in fp32 changes a result by as much as
    the score is large, and how torch's own sums are rounded depends on the processor."""
    qkv = projection(1, 2, 65, 64, dtype).detach()
    qkv[:, :, :2] *= 60
    largest = float(qkv[:, :, 0].double().norm(dim=-1).max() * qkv[:, :, 1].double().norm(dim=-1).max() / 8)
    assert largest > 1e4
    rounding = torch.finfo(torch.float32).eps * largest
    assert_as_exact_as_torch(ours, torchs, (qkv.requires_grad_(),), gradient_factor=3.0, allowed=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dropout_is_the_reference_with_the_same_mask(dtype):
    """Forward and both backward kernels drop what Philox in plain torch drops, and scale what is kept."""
    B, nh, T, hs = 2, 2, 97, 24
    seed = torch.tensor([2**62 + 12345])
    keep = dropout_mask(seed, B, nh, T, 0.2)

    def mine(qkv):
        return attention.forward_op(*heads(qkv), seed, 0.2, 0.25)[0]

    def plain(qkv):
        return reference(*heads(qkv), 0.2, 0.25, keep)

    assert_as_exact_as_torch(mine, plain, (projection(B, nh, T, hs, dtype),), gradient_factor=3.0)


def test_the_masks_look_random():
    """A fifth is dropped, in every head, and neighbours in each direction are dropped independently."""
    B, nh, T, p = 2, 4, 128, 0.2
    torch.manual_seed(3)
    flat = torch.zeros(B, nh, T, T)
    y = causal_attention(flat, flat, torch.eye(T).expand(B, nh, T, T), p)  # row i is its mask over i + 1
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    kept = (y > 0).float()
    assert not kept[..., ~seen].any()
    share = kept[..., seen].mean(-1)  # (B, nh), of 8,256 pairs each: 5 sigma are 0.022
    assert gap(share, torch.full_like(share, 1 - p)) < 0.022 and len(share.unique()) > 1
    off = (kept - (1 - p)) * seen
    pairs = [
        (off[..., 1:], off[..., :-1]),
        (off[..., 1:, :], off[..., :-1, :]),
        (off[:, 1:], off[:, :-1]),
        (off[1:], off[:-1]),
    ]
    for a, b in pairs:
        assert abs((a * b).sum() / (a * b).count_nonzero() / (p * (1 - p))) < 0.04  # at least 5 sigma of each


def test_torchs_seed_decides_the_mask():
    """The same manual_seed gives the same bits, another one does not, and without dropout no number is drawn."""
    qkv = projection(1, 2, 33, 16).detach()

    def seeded(seed):
        torch.manual_seed(seed)
        return causal_attention(*heads(qkv), 0.3)

    assert torch.equal(seeded(1), seeded(1)) and not torch.equal(seeded(1), seeded(2))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    causal_attention(*heads(qkv))
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_copied_in_the_model():
    """Views of one projection reach the kernel as they are, and the result is (B, T, C) without a copy."""
    q, k, v = heads(projection(2, 3, 20, 16).detach())
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "launch", lambda *args, **options: seen.append(args) or launch(*args, **options))
        y = causal_attention(q, k, v)
    assert [x.data_ptr() for x in seen[0][2:5]] == [x.data_ptr() for x in (q, k, v)]
    rows = y.transpose(1, 2)
    assert rows.is_contiguous() and rows.contiguous().view(2, 20, 48).data_ptr() == y.data_ptr()


def test_any_layout_and_expanded_gradients():
    """Three different layouts, one without whole rows, and a gradient of stride 0 give what contiguous ones give."""
    B, nh, T, hs = 2, 3, 33, 24
    q, k, v = (x.detach() for x in heads(projection(B, nh, T, hs)))
    q, k, v = q, k.contiguous(), v.transpose(2, 3).contiguous().transpose(2, 3)
    leaves = [x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k, v)]
    views = [x.requires_grad_() for x in (q, k, v)]
    for total in (torch.sum, lambda y: y[..., 0].sum(), lambda y: (y.transpose(2, 3).contiguous() ** 2).sum()):
        mine, plain = causal_attention(*views), causal_attention(*leaves)
        assert torch.equal(mine, plain)
        assert same(torch.autograd.grad(total(mine), views), torch.autograd.grad(total(plain), leaves))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    gradients = torch.autograd.grad(causal_attention(*views).sum(), views)
    for ours, theirs in zip(gradients, torch.autograd.grad(reference(*exact).sum(), exact), strict=True):
        assert gap(ours, theirs) <= 1e-5


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.heavy
def test_gradcheck(p):
    """In fp64, finite differences agree with the backward, with dropout too."""
    q, k, v = (fixed_normal((1, 2, 4, 2), seed).requires_grad_() for seed in (1, 2, 3))
    seed = torch.tensor([11]) if p else None
    assert torch.autograd.gradcheck(lambda *x: attention.forward_op(*x, seed, p, 0.7)[0], (q, k, v))


def huge(dtype=torch.float16):
    """q, k, v and dy of (1, 1, 3, 16) whose third rows lie 2^31 numbers behind their first ones.

    As much memory lies before them, so that an offset that wraps around stays inside; what is not touched is not there.
    """
    rows = torch.empty(2**32 + 64, dtype=dtype)[2**31 :]
    found = []
    for i in range(4):
        x = rows.as_strided((1, 1, 3, 16), (2**31, 2**31, 2**30, 1), rows.storage_offset() + 16 * i)
        found.append(x.copy_(fixed_normal((1, 1, 3, 16), i)))
    return found


def far_and_near(kernels):
    """Whether results and gradients of `huge` tensors are those of their contiguous copies."""
    results = []
    for q, k, v, dy in (huge(), [x.contiguous() for x in huge()]):
        y, lse = kernels.forward_op(q, k, v, None, 0.0, 0.25)
        results.append((y, lse, *kernels.backward_op(dy, q, k, v, y, lse, None, 0.0, 0.25)))
    return same(*results)


def test_offsets_past_2_31():
    """Rows more than 2^31 numbers apart are read where they are."""
    assert far_and_near(attention)


@jit
def far_kernel(out, stride, ROWS: tl.constexpr):
    """Store ones into three rows of 16, by the kernels' own helper."""
    store_rows(out, tl.full((ROWS, 16), 1.0, tl.float32), 0, stride, 3, 16, 16, ROWS)


def test_rows_are_stored_past_2_31():
    """A row more than 2^31 numbers behind the first is written where it belongs."""
    out, *_ = huge()
    launch(far_kernel, (1,), out, 2**30, ROWS=16)
    assert (out == 1).all()


def test_saved_tensors_may_change_their_layout():
    """Offloaded to memory without strides and back, what was saved gives the same gradients."""
    qkv = projection(2, 3, 33, 16)
    with torch.autograd.graph.save_on_cpu():
        y = ours(qkv)
    assert same(torch.autograd.grad(y.square().sum(), qkv), torch.autograd.grad(ours(qkv).square().sum(), qkv))


def test_fp32_products_are_as_exact_as_torch_allows(monkeypatch):
    """Tensor cores may round fp32 to tf32 where torch.set_float32_matmul_precision lets torch's own products."""
    seen = []
    monkeypatch.setattr(attention, "launch", lambda *_, **options: seen.append(options["PRECISION"]))
    ours(projection(1, 1, 4, 16)).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        ours(projection(1, 1, 4, 16)).sum().backward()
    assert seen == ["ieee"] * 3 + ["tf32"] * 3


@pytest.mark.heavy
def test_the_ops_are_registered_well():
    """opcheck: schemas, fake tensors, autograd and AOT tracing hold, with dropout and without."""
    q, k, v = heads(projection(2, 2, 5, 4))
    for seed, p in ((None, 0.0), (torch.tensor([5]), 0.2)):
        assert_registered(attention.forward_op, (q, k, v, seed, p, 0.5))
        plain = [x.detach() for x in (q, k, v)]
        y, lse = attention.forward_op(*plain, seed, p, 0.5)
        assert_registered(attention.backward_op, (torch.ones_like(y), *plain, y, lse, seed, p, 0.5))


@pytest.mark.heavy
def test_compiled_whole():
    """torch.compile(fullgraph=True) gives eager's results and gradients, also for other lengths."""

    def f(qkv):
        return ours(qkv * 2).transpose(1, 2).reshape(2, -1, 32) + 1

    compiled = compile_whole(f)
    for T in (5, 8, 9):
        qkv = projection(2, 2, T, 16)
        mine, plain = compiled(qkv), f(qkv)
        assert gap(mine, plain) <= 1e-5
        gradients = (torch.autograd.grad(y.square().sum(), qkv)[0] for y in (mine, plain))
        assert gap(*gradients) <= 1e-4


@pytest.mark.heavy
def test_compiled_dropout():
    """Compiled, torch's seed decides the mask too, and the backward uses the forward's."""
    compiled = compile_whole(lambda q, k, v: causal_attention(q, k, v, 0.3) * 1)
    q, k, v = (x.detach().requires_grad_() for x in heads(projection(2, 2, 9, 16)))

    def seeded(seed):
        torch.manual_seed(seed)
        return compiled(q, k, v)

    y = seeded(1)
    assert torch.equal(y, seeded(1)) and not torch.equal(y, seeded(2))
    dy = fixed_normal(y.shape).float()
    (dv,) = torch.autograd.grad(y, v, dy)
    assert abs((dv * v).sum() - (dy * y).sum()) <= 1e-5 * (dy * y).abs().sum()  # y is linear in v


def test_autocast():
    """Under autocast fp32 heads are taken in bfloat16, as SDPA takes them, and gradients come back in fp32."""

    def under(function):
        def cast(qkv):
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                return function(qkv)

        return cast

    assert ours(projection(1, 1, 3, 16)).dtype == torch.float32
    assert under(ours)(projection(1, 1, 3, 16)).dtype == torch.bfloat16
    assert_as_exact_as_torch(under(ours), under(torchs), (projection(1, 2, 65, 32),), gradient_factor=3.0)


def test_under_activation_checkpointing():
    """Recomputed in the backward, dropout drops the same: gradients are the same to the last bit."""
    qkv = projection(2, 2, 33, 16)

    def gradient(recompute):
        torch.manual_seed(5)
        f = torch.utils.checkpoint.checkpoint if recompute else lambda f, *args, **_: f(*args)
        y = f(lambda x: causal_attention(*heads(x), 0.2), qkv, use_reentrant=False)
        return torch.autograd.grad(y.square().sum(), qkv)

    assert same(gradient(True), gradient(False))


def test_twice_is_bitwise_the_same():
    """Two runs give the same bits: each sum has one order."""
    qkv = projection(1, 2, 260, 32)

    def there_and_back():
        y = ours(qkv)
        return y, *torch.autograd.grad(y.square().sum(), qkv)

    assert same(there_and_back(), there_and_back())


def test_steps_agree():
    """All keys at once, and the mask on every block, give what the shipped forward gives."""
    q, k, v = (x.contiguous() for x in heads(projection(2, 1, 97, 24).detach()))
    exact = reference(*(x.double() for x in (q, k, v)))
    with guard_bands():
        given = tuple(guarded(x) for x in (q, k, v))
        y, lse, step_1 = torch.empty(2, 97, 1, 24).transpose(1, 2), torch.empty(2, 1, 97), torch.empty_like(q)
        sizes = {"HS": 24, "BLOCK_D": 32, "BLOCK": 32, "KEYS": tile(97)}
        launch(attention.all_keys_kernel, (4, 2), *given, step_1, 97, 24**-0.5, **sizes)
        attention.run(attention.forward_kernel, "attention_forward", given, (y, lse), None, 0.0, 24**-0.5, SPLIT=False)
    assert gap(step_1, exact) <= 1e-6 and gap(y, exact) <= 1e-6


def test_nothing_to_do():
    """No sequences, and sequences of no tokens, give empty results and gradients."""
    for shape in ((0, 2, 5, 16), (2, 2, 0, 16)):
        q = torch.zeros(shape, requires_grad=True)
        y = causal_attention(q, q, q, 0.1)
        assert y.shape == shape and torch.autograd.grad(y.sum(), q)[0].shape == shape


def test_flops_and_bytes():
    """FlopCounterMode counts all pairs, as for SDPA; `cost` the half that is computed, and each tensor once."""
    qkv = projection(2, 3, 64, 16)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        y = ours(qkv)
        assert counter.get_total_flops() == 4 * 2 * 3 * 64 * 64 * 16
        y.sum().backward()
    assert counter.get_total_flops() == 14 * 2 * 3 * 64 * 64 * 16
    there, back = attention.cost(2, 3, 64, 16, 4)
    size = 4 * y.numel()
    assert (there.read, there.written, there.workspace) == (3 * size, size + 4 * 2 * 3 * 64, 0)
    assert (back.read, back.written, back.workspace) == (5 * size + 4 * 2 * 3 * 64, 3 * size, 4 * 2 * 3 * 64)
    assert there.flops == 4 * 16 * 2 * 3 * sum(range(65)) and back.flops == 2.5 * there.flops


WRONG = [
    (
        lambda good: (good, good[:, :, :4], good),
        r"float32 \(1, 2, 4, 16\).*give three of one type and one shape \(B, nh, T, hs\)",
    ),
    (lambda good: (good[0], good[0], good[0]), r"float32 \(2, 5, 16\).*one shape \(B, nh, T, hs\)"),
    (lambda good: (good, good, good.half()), "torch.float16 .*give three of one type"),
    (lambda good: (good.long(),) * 3, "q is torch.int64: give float32"),
    (lambda good: (good.to("meta"),) * 3, "q is on meta, where it cannot run"),
    (
        lambda good: (torch.zeros(1, 1, 2, 160),) * 3,
        "heads are 160 wide, above 128: use F.scaled_dot_product_attention",
    ),
    (lambda good: (good, good, good, 1.0), "dropout_p is 1.0: give a probability from 0 to below 1"),
    (lambda good: (good, good, good, 0.0, -1.0), "scale is -1.0: give a positive number"),
]


@pytest.mark.parametrize(("args", "sentence"), WRONG, ids=[sentence[:30] for _, sentence in WRONG])
def test_one_sentence(args, sentence):
    """What the kernels cannot take is refused in one sentence that says what to give."""
    with pytest.raises(KernelError, match=sentence) as caught:
        causal_attention(*args(torch.zeros(1, 2, 5, 16)))
    assert "\n" not in str(caught.value)


def planted(folder, name, right, wrong):
    """The kernels' file with one thing made wrong, as a module of its own."""
    source = Path(attention.__file__).read_text()
    assert right in source
    path = folder / f"{name}.py"
    path.write_text(source.replace(right, wrong).replace('kernel_op("', f'kernel_op("{name}_'))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLANTED = {
    "nothing": ("queries >= keys, scores", "queries >= keys, scores"),
    "sees_the_next": ("queries >= keys, scores", "queries + 1 >= keys, scores"),
    "misses_itself": ("queries >= keys, scores", "queries > keys, scores"),
    "masked_by_zero": ('scores, -float("inf"))', "scores, 0.0)"),
    "never_shrinks": ("acc * shrink, input", "acc, input"),
    "reads_the_next_head": ("(first + rows < T) & (cols < HS), other", "(first + rows < T), other"),
    "dkv_sees_all": ("own >= others if DQ else others >= own", "own >= others if DQ else others >= 0"),
    "dkv_drops_others": ("own if DQ else others, others if DQ else own", "own, others"),
    "no_delta": ("(dp - slope)", "dp"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name, tmp_path):
    """Kernels that are wrong in one place do not pass for exact; with nothing planted the same check passes."""
    kernels = planted(tmp_path, name, *PLANTED[name])
    kernels.config = lambda *_: {"block": 32, "step": 32, "heads": 2}
    seed = torch.tensor([7])
    keep = dropout_mask(seed, 1, 2, 97, 0.2)
    with contextlib.nullcontext() if name == "nothing" else pytest.raises(AssertionError, match="off by"):
        assert_as_exact_as_torch(
            lambda qkv: kernels.forward_op(*heads(qkv), seed, 0.2, 0.2)[0],
            lambda qkv: reference(*heads(qkv), 0.2, 0.2, keep),
            (projection(1, 2, 97, 24),),
            gradient_factor=3.0,
        )


def test_a_planted_overflow_is_caught(tmp_path):
    """Offsets of 32 bits wrap around at 2^31."""
    kernels = planted(tmp_path, "wraps", "rows.to(tl.int64) * stride", "rows * stride")
    assert not far_and_near(kernels)
