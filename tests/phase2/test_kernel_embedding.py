"""Token + position embedding, interpreted, against plain torch in fp64."""

import pytest
import torch

from phase2_triton.kernels import embedding as module
from phase2_triton.kernels.core import KernelError, interpreting, launch
from phase2_triton.kernels.embedding import embedding
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_near,
    assert_registered,
    compile_whole,
    fixed_normal,
    gap,
    guard_bands,
    guarded,
)

pytestmark = pytest.mark.usefixtures("on_device")

TILES = {
    "embedding_forward": {"rows": 4, "block": 32},
    "embedding_positions": {"rows": 4, "block": 32},
    "embedding_windows": {"windows": 2, "length": 4, "block": 32},
    "embedding_tokens": {"rows": 2},
}


def tokens(B, T, V, seed=5):
    """A few tokens are frequent and most are rare, as in text."""
    drawn = torch.rand(B, T, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return (V * drawn**4).long().to(torch.get_default_device())


def weights(V, P, C, dtype=torch.float32):
    return tuple(fixed_normal((n, C), seed).to(dtype).requires_grad_() for seed, n in enumerate((V, P)))


def bound(idx, first=0, function=embedding):
    return lambda wte, wpe: function(idx, wte, wpe, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("B", "T", "V", "P", "C", "first"), [(1, 1, 5, 3, 769, 2), (3, 7, 75, 16, 1023, 4), (12, 64, 75, 64, 65, 0)]
)
def test_embedding_is_as_exact_as_torch(B, T, V, P, C, first, dtype):
    """Results to the last bit, and gradients, at ragged widths, odd numbers of tokens and a first position."""
    idx = tokens(B, T, V)
    assert_as_exact_as_torch(
        bound(idx, first), bound(idx, first, module.reference), weights(V, P, C, dtype), factor=0, gradient_factor=2
    )


def test_a_large_vocabulary():
    """With 50,257 rows, of which 64 tokens touch a few, every other row of the gradient is written, as 0."""
    idx, (wte, wpe) = tokens(2, 32, 50257), weights(50257, 32, 8)
    with guard_bands():
        dwte = module.tokens_op(torch.ones(2, 32, 8), idx, 50257)
    assert torch.equal(dwte, idx.flatten().bincount(minlength=50257).float()[:, None].expand(-1, 8))
    assert torch.equal(embedding(idx, wte, wpe), module.reference(idx, wte, wpe))


@pytest.mark.parametrize("kind", ["one token", "all different", "text"])
def test_windows_and_tiles(monkeypatch, kind):
    """Windows of 4 sorted tokens, 2 a program, and tiles of 2 rows: segments begin and end within windows."""
    monkeypatch.setattr(module, "config", lambda name, _: dict(TILES[name]))
    idx = {"one token": torch.full((3, 13), 6), "all different": torch.arange(39).view(3, 13), "text": tokens(3, 13, 9)}
    assert_as_exact_as_torch(
        bound(idx[kind]), bound(idx[kind], 0, module.reference), weights(39, 13, 70), gradient_factor=2
    )


def test_steps_are_right():
    """Sums by atomics, and by whole segments, are those of the shipped kernels."""
    idx, dout = tokens(4, 33, 75), fixed_normal((4, 33, 70)).float()
    with guard_bands():
        by_atomics, by_segments, shipped = (
            step(guarded(dout), idx, 75) for step in (module.atomic_step, module.sorted_step, module.tokens_op)
        )
    exact = torch.zeros(75, 70, dtype=torch.float64).index_add_(0, idx.flatten(), dout.view(-1, 70).double())
    for ours in (by_atomics, by_segments, shipped):
        assert_near(ours, exact.float(), exact, factor=4)


def test_no_tokens():
    """Without sequences, or with empty ones, the result is empty and the gradients are 0."""
    for B, T in ((0, 4), (3, 0)):
        wte, wpe = weights(5, 4, 8)
        out = embedding(torch.zeros(B, T, dtype=torch.int64), wte, wpe)
        out.sum().backward()
        assert out.shape == (B, T, 8) and not wte.grad.any() and not wpe.grad.any()


def test_any_layout():
    """Transposed tokens and weights, and a gradient that is expanded, give what contiguous ones give."""
    idx, base = tokens(7, 3, 20).t(), fixed_normal((12, 33)).float()
    wte, wpe = base[:, :20].t().requires_grad_(), base[:, 20:].t().requires_grad_()
    assert not (idx.is_contiguous() or wte.is_contiguous() or wpe.is_contiguous())
    ours, exact = embedding(idx, wte, wpe), module.reference(idx, wte, wpe)
    assert torch.equal(ours, exact)
    for a, b in zip(*(torch.autograd.grad(y.sum(), (wte, wpe)) for y in (ours, exact)), strict=True):  # of stride 0
        assert gap(a, b) <= 1e-5


@pytest.mark.heavy
def test_gradcheck():
    """In fp64, finite differences agree with the backward, for tokens that repeat."""
    idx = torch.tensor([[1, 3, 1], [1, 0, 3]])
    assert torch.autograd.gradcheck(bound(idx, 1), weights(5, 4, 3, torch.float64))


@pytest.mark.heavy
def test_the_ops_are_registered_well():
    """opcheck: schemas, fake tensors, autograd and AOT tracing hold."""
    idx, (wte, wpe) = tokens(2, 3, 5), weights(5, 4, 8)
    assert_registered(module.forward_op, (idx, wte, wpe, 1))
    assert_registered(module.tokens_op, (torch.randn(2, 3, 8), idx, 5))
    assert_registered(module.positions_op, (torch.randn(2, 3, 8), 1, 4))


@pytest.mark.heavy
def test_compiled_whole():
    """torch.compile(fullgraph=True) gives eager's results and gradients, also for other lengths and positions."""
    wte, wpe = weights(75, 16, 24)

    def f(idx, first):
        return embedding(idx, wte * 2, wpe, first)

    compiled = compile_whole(f)
    for T, first in ((4, 0), (7, 3), (9, 5)):
        idx = tokens(2, T, 75)
        ours, theirs = compiled(idx, first), f(idx, first)
        assert torch.equal(ours, theirs)
        pairs = zip(*(torch.autograd.grad(y.square().sum(), (wte, wpe)) for y in (ours, theirs)), strict=True)
        assert all(gap(a, b) <= 1e-4 for a, b in pairs)


def test_autocast_and_bfloat16():
    """Autocast leaves the weights' type, as it does with torch's; bfloat16 weights give torch's bits."""
    idx = tokens(3, 7, 20)
    for dtype in (torch.float32, torch.bfloat16):
        wte, wpe = weights(20, 16, 33, dtype)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            out, theirs = embedding(idx, wte, wpe), torch.nn.functional.embedding(idx, wte) + wpe[:7]
        assert out.dtype == dtype == theirs.dtype and torch.equal(out, theirs)
        exact = torch.autograd.grad(bound(idx, 0, module.reference)(wte.double(), wpe.double()).sum(), (wte, wpe))
        ours = torch.autograd.grad(out.sum(), (wte, wpe))
        assert [g.dtype for g in ours] == [dtype] * 2
        assert all(gap(a, b) <= 1e-5 + b.abs().max() * torch.finfo(dtype).eps for a, b in zip(ours, exact, strict=True))


def test_under_activation_checkpointing():
    """Recomputed in the backward, gradients are the same to the last bit; frozen positions get none."""
    idx, (wte, wpe) = tokens(3, 7, 20), weights(20, 16, 33)

    def gradients(recompute):
        f = torch.utils.checkpoint.checkpoint if recompute else lambda f, *args, **_: f(*args)
        return torch.autograd.grad(f(embedding, idx, wte, wpe, use_reentrant=False).square().sum(), (wte, wpe))

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))
    frozen = embedding(idx, wte, wpe.detach()).square().sum()
    assert torch.equal(torch.autograd.grad(frozen, wte)[0], gradients(False)[0])


def test_twice_is_bitwise_the_same():
    """Two backwards give the same bits, with a token that comes a hundred times: the sums have one order."""
    idx, dout = tokens(12, 64, 75), fixed_normal((12, 64, 33)).float()
    assert idx.flatten().bincount().max() > 100
    for op, args in ((module.tokens_op, (dout, idx, 75)), (module.positions_op, (dout, 0, 64))):
        assert torch.equal(op(*args), op(*args))


def test_past_2_to_the_31():
    """The last rows of a vocabulary of 2^25 with 65 channels lie past 2^31, and are found."""
    V, C = 2**25, 65
    wte, wpe = torch.empty(V, C, dtype=torch.float16), torch.zeros(2, C, dtype=torch.float16)
    wte[-2:] = torch.arange(2 * C).view(2, C)
    assert torch.equal(embedding(torch.tensor([[V - 1, V - 2]]), wte, wpe)[0], wte[-2:].flip(0))


def test_unknown_tokens():
    """A token that is not in the vocabulary is refused by name; in the kernel it gives NaN and no gradient."""
    base, wpe = (w.detach() for w in weights(7, 4, 8))
    wte = base[1:6]  # what would be read beyond it is a number
    for wrong in (5, -1, 2**40):
        idx = torch.tensor([[1, wrong, 2]])
        if interpreting():  # on a GPU, looking would wait for it
            with pytest.raises(KernelError, match=f"token {wrong} is not in the vocabulary of 5: give 0 to 4"):
                embedding(idx, wte, wpe)
        with guard_bands():
            out = torch.empty(1, 3, 8)
            launch(
                module.forward_kernel, (1, 1), idx, wte, wpe, out, 3, 3, 5, 8, 0, ROWS=4, BLOCK=8
            )  # fmt: skip
            dwte = module.tokens_op(torch.ones(1, 3, 8), idx, 5)
        assert out[0, 1].isnan().all() and torch.equal(out[0, ::2], wte[1:3] + wpe[:3:2])
        assert torch.equal(dwte.sum(1), torch.tensor([0.0, 8, 8, 0, 0]))


def test_what_a_call_costs():
    """Bytes that are read and written are those of the tensors."""
    there, back = module.cost(2, 6, 10, 8, 4, P=9)
    assert (there.read, there.written) == (4 * 8 * (12 + 6) + 8 * 12, 4 * 8 * 12)
    assert back.written == 4 * 8 * (10 + 9) and back.read == 2 * 4 * 8 * 12 + 8 * 12
    assert back.workspace >= 8 * (12 + 12 + 11)


WRONG = [
    (
        ((3,), torch.int64, (5, 8), (4, 8)),
        r"idx is \(3,\), torch.int64, on \S+: give \(B, T\) of int64",
    ),
    (((1, 3), torch.int16, (5, 8), (4, 8)), r"torch.int16, on \S+: give \(B, T\) of int64"),
    (((1, 3), torch.int64, (5, 8), (4, 7)), "give two matrices of one width and type"),
    (((1, 3), torch.int64, (0, 8), (4, 8)), "give at least one token and one channel"),
    (((1, 3), torch.int64, (5, 8), (4, 8), 2), "3 tokens from position 2 do not fit into the 4 rows of wpe"),
    (((1, 3), torch.int64, (5, 8), (4, 8), -1), "first=-1: give a number from 0"),
]


def test_wrong_input_is_one_sentence():
    """A shape, type or position that does not fit is refused, and the sentence says what to give."""
    for (shape, dtype, wte, wpe, *first), words in WRONG:
        with pytest.raises(KernelError, match=words) as refused:
            embedding(torch.zeros(shape, dtype=dtype), torch.zeros(wte), torch.zeros(wpe), *first)
        assert "\n" not in str(refused.value)
    with pytest.raises(KernelError, match="wte is torch.int64: give float32"):
        embedding(torch.zeros(1, 3).long(), torch.zeros(5, 8).long(), torch.zeros(4, 8))
