"""Cross-entropy kernels, on given logits and fused with the head, interpreted, against plain torch in fp64."""

import pytest
import torch
from functorch.compile import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from phase2_triton.kernels import cross_entropy as given
from phase2_triton.kernels import linear_cross_entropy as fused
from phase2_triton.kernels.core import KernelError, interpreting, launch, tile
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_registered,
    compile_whole,
    fixed_integers,
    fixed_normal,
    gap,
    guard_bands,
    guarded,
)

pytestmark = pytest.mark.usefixtures("on_device")


def targets(M, V, ignored=True):
    labels = fixed_integers(V, (M,))
    if ignored and M > 2:
        labels[1::5] = -1
    return labels


def plain(logits, labels, **options):
    """torch's own, which the references are compared with too."""
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("M", "V"), [(1, 769), (33, 1023), (129, 75), (16, 50257), (16, 50304)])
def test_cross_entropy_is_as_exact_as_torch(M, V, dtype):
    """Loss and gradient, where the last tile is ragged, rows are odd in number and some targets are ignored."""
    logits = (3 * fixed_normal((M, V))).to(dtype).requires_grad_()
    labels = targets(M, V)
    assert_as_exact_as_torch(
        lambda z: given.cross_entropy(z, labels), lambda z: plain(z, labels, ignore_index=-1), (logits,)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 0.3, "z_loss": 1.0}]
)
def test_cross_entropys_options(options, reduction):
    """Label smoothing, z-loss and the sum are those of the reference, in loss and gradient, also over tiles."""
    labels, logits = targets(9, 300), (4 * fixed_normal((9, 300))).float().requires_grad_()
    assert_as_exact_as_torch(
        lambda z: given.cross_entropy(z, labels, reduction=reduction, **options),
        lambda z: given.reference(z, labels, reduction=reduction, **options),
        (logits,),
    )


def test_the_reference_is_torchs_cross_entropy():
    """The specification agrees with F.cross_entropy, smoothing and ignored targets included."""
    labels, logits = targets(9, 300), 4 * fixed_normal((9, 300))
    for options in ({}, {"label_smoothing": 0.2}, {"reduction": "sum"}):
        ours = given.reference(logits, labels, **options)
        assert ours.item() == pytest.approx(plain(logits, labels, ignore_index=-1, **options).item(), rel=1e-12)


def test_small_tiles_make_many_passes():
    """With tiles of 64 columns and 2 rows, so that maximum and sum are carried over tiles, the loss is the same."""
    logits, labels = (5 * fixed_normal((7, 1000))).float(), targets(7, 1000)
    with guard_bands():
        losses, peaks, totals = (guarded(torch.zeros(7)) for _ in range(3))
        z = guarded(logits)
        launch(
            given.forward_kernel, (4,), z, labels, losses, peaks, totals, 7, 1000, 1000, 1000, -1, 0.0, 0.0,
            SMOOTH=False, GRADIENT=True, ROWS=2, BLOCK=64,
        )  # fmt: skip
    leaf = logits.double().requires_grad_()
    exact = F.cross_entropy(leaf, labels, ignore_index=-1, reduction="none")
    assert gap(losses, exact) <= 2e-6 and gap(peaks + totals.log(), logits.double().logsumexp(1)) <= 2e-6
    assert gap(z, torch.autograd.grad(exact.sum(), leaf)[0]) <= 1e-6


def test_step_1_is_right():
    """The two-pass kernel gives the reference's losses."""
    logits, labels = (5 * fixed_normal((5, 1023))).float(), targets(5, 1023)
    with guard_bands():
        losses = given.two_passes(guarded(logits), labels, block=256)
    assert gap(losses, F.cross_entropy(logits.double(), labels, ignore_index=-1, reduction="none")) <= 2e-6


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_logits(scale):
    """Logits of ten thousand either way, and of minus infinity, overflow nothing."""
    logits = (scale * fixed_normal((6, 70)).abs()).float()
    logits[:, :3] = float("-inf")
    labels = torch.full((6,), 5)
    assert_as_exact_as_torch(
        lambda z: given.cross_entropy(z, labels), lambda z: plain(z, labels), (logits.requires_grad_(),)
    )


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
@pytest.mark.parametrize("offset", [-500.0, 1e3, 1e6])
def test_logits_that_share_a_large_offset(offset, options):
    """What all logits of a row have in common costs no digits of their differences, in either loss and in step 1."""
    logits, labels = (fixed_normal((6, 300)) + offset).float().requires_grad_(), targets(6, 300, ignored=False)
    assert_as_exact_as_torch(
        lambda z: given.cross_entropy(z, labels, **options), lambda z: plain(z, labels, **options), (logits,)
    )
    if not options:
        exact = F.cross_entropy(logits.double(), labels, reduction="none")
        assert gap(given.two_passes(logits.detach(), labels), exact) <= 3e-6


def test_a_second_derivative_is_refused():
    """Neither loss is differentiable twice, and says so instead of giving half of it."""
    x, w, labels = torch.randn(6, 8, requires_grad=True), torch.randn(70, 8, requires_grad=True), targets(6, 70)
    for inputs in ((x, w), (x, w.detach()), (x.detach(), w)):
        leaves = [leaf for leaf in inputs if leaf.requires_grad]
        gradient, *_ = torch.autograd.grad(fused.linear_cross_entropy(*inputs, labels), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            gradient.square().sum().backward()


def test_a_loss_scale_beyond_float16_scales_the_gradient():
    """65,536, where a loss scaler begins, is no number in float16: the product is made in fp32."""
    x, w, labels = (fixed_normal((6, 8), 1) / 100).half(), fixed_normal((70, 8), 2).half() / 100, targets(6, 70)
    grads = []
    for loss in (fused.linear_cross_entropy, lambda x, w, labels: plain(F.linear(x, w), labels, ignore_index=-1)):
        leaf = x.detach().requires_grad_()
        grads += torch.autograd.grad(loss(leaf, w, labels) * 65536, leaf)
    assert grads[0].isfinite().all() and gap(*grads) <= 0.01 * grads[1].abs().max()


def test_fp64_stays_fp64_under_autocast():
    """As torch's autocast does, ours leaves fp64 alone."""
    x, w, labels = torch.randn(6, 8).double(), torch.randn(70, 8).double(), targets(6, 70)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        loss = fused.linear_cross_entropy(x, w, labels)
    assert loss.dtype == torch.float64 and abs(loss - fused.reference(x, w, labels)) <= 1e-12


@pytest.mark.parametrize("M", [0, 4])
def test_no_target_that_counts(M):
    """With no rows, or all targets ignored, loss and gradients are 0 and not 0/0, fused or not."""
    labels = torch.full((M,), -1)
    logits, x, w = (torch.randn(shape, requires_grad=True) for shape in ((M, 70), (M, 8), (70, 8)))
    loss = given.cross_entropy(logits, labels) + fused.linear_cross_entropy(x, w, labels)
    loss.backward()
    assert loss.item() == 0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in (logits, x, w))


def test_padded_columns_do_not_count():
    """With 50 of 64 columns real, the loss is that of the 50 and the others' gradient is 0."""
    logits, labels = torch.randn(5, 64, requires_grad=True), targets(5, 50)
    loss = given.cross_entropy(logits, labels, vocab_size=50, label_smoothing=0.1)
    exact = given.reference(logits.double()[:, :50], labels, label_smoothing=0.1)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[:, 50:].any() and gradient[:, :50].any()


def test_logits_of_any_layout():
    """A transposed, a sliced and a three-dimensional tensor of logits give what a contiguous copy gives."""
    base = torch.randn(40, 6)
    for logits, labels in ((base.t(), targets(6, 40)), (base[::3, 1:5], targets(14, 4)), (base.view(4, 10, 6), None)):
        labels = torch.zeros(4, 10, dtype=torch.int64) if labels is None else labels
        leaf = logits.detach().requires_grad_()
        loss = given.cross_entropy(leaf, labels)
        exact = given.reference(logits.double(), labels)
        assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
        assert torch.autograd.grad(loss, leaf)[0].shape == logits.shape


def test_in_place_takes_no_new_memory():
    """`in_place` writes the gradient into the memory of the logits, and a second backward is refused."""
    source, labels = torch.randn(5, 64, requires_grad=True), targets(5, 64)
    logits = source * 2
    loss = given.cross_entropy(logits, labels, in_place=True)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    plain_logits = (source * 2).detach().requires_grad_()
    (expected,) = torch.autograd.grad(given.reference(plain_logits, labels), plain_logits)
    assert gap(gradient, expected) <= 1e-6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)


HEADS = [(1, 24, 769, 1), (33, 40, 1023, 4), (16, 8, 50257, 2), (65, 48, 75, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("M", "K", "V", "chunks"), HEADS)
def test_the_fused_head_is_as_exact_as_torch(M, K, V, chunks, dtype):
    """Loss, dx and dW in one chunk or several, whose last is smaller."""
    x, w = (fixed_normal(shape, seed).to(dtype).requires_grad_() for shape, seed in (((M, K), 1), ((V, K), 2)))
    labels, bytes_each = targets(M, V), -(-M // chunks) * V * dtype.itemsize
    assert_as_exact_as_torch(
        lambda x, w: fused.linear_cross_entropy(x, w, labels, chunk_bytes=bytes_each),
        lambda x, w: plain(F.linear(x, w), labels, ignore_index=-1),
        (x, w),
    )


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1, "z_loss": 0.01}, {"reduction": "sum"}])
def test_the_fused_heads_options(options):
    """Its options mean what they mean on given logits."""
    x, w = (fixed_normal(shape, seed).float().requires_grad_() for shape, seed in (((9, 16), 1), ((300, 16), 2)))
    labels = targets(9, 300)
    assert_as_exact_as_torch(
        lambda x, w: fused.linear_cross_entropy(x, w, labels, chunk_bytes=2400, **options),
        lambda x, w: fused.reference(x, w, labels, **options),
        (x, w),
    )


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no F.linear_cross_entropy")
def test_the_fused_head_agrees_with_torchs():
    """F.linear_cross_entropy gives the same loss and gradients."""
    x, w = (fixed_normal(shape, seed).float().requires_grad_() for shape, seed in (((9, 16), 1), ((300, 16), 2)))
    labels = targets(9, 300)
    ours = fused.linear_cross_entropy(x, w, labels)
    theirs = F.linear_cross_entropy(x, w, labels, ignore_index=-1)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for a, b in zip(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(theirs, (x, w)), strict=True):
        assert gap(a, b) <= 1e-6


def test_the_fused_head_computes_only_what_is_asked_for():
    """Without gradients, or with a frozen head, fewer products are made; chunks never hold more than their limit."""
    x, w, labels = torch.randn(6, 8, requires_grad=True), torch.randn(70, 8), targets(6, 70)
    from torch.utils.flop_counter import FlopCounterMode

    product = 2 * 6 * 8 * 70
    for frozen, expected in ((True, 2 * product), (False, 3 * product)):
        with FlopCounterMode(display=False) as counter:
            fused.linear_cross_entropy(x, w.detach().requires_grad_(not frozen), labels).backward()
        assert counter.get_total_flops() == expected
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fused.linear_cross_entropy(x, w, labels)
    assert counter.get_total_flops() == product
    for M in (1, 5336, 5337, 65536):
        rows = fused.chunk_rows(M, 50304, 2, fused.CHUNK_BYTES)
        assert rows * 50304 * 2 <= fused.CHUNK_BYTES and rows * -(-M // rows) < M + rows


@pytest.mark.parametrize("loss_of", ["given", "fused"])
@pytest.mark.heavy
def test_gradcheck(loss_of):
    """In fp64, finite differences agree with the backward, with every option on."""
    labels, options = torch.tensor([1, -1, 8]), {"label_smoothing": 0.1, "z_loss": 0.1}
    if loss_of == "given":
        z = fixed_normal((3, 9)).requires_grad_()
        assert torch.autograd.gradcheck(lambda z: given.cross_entropy(z, labels, **options), (z,))
    else:
        x, w = fixed_normal((3, 4), 1).requires_grad_(), fixed_normal((9, 4), 2).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, w: fused.linear_cross_entropy(x, w, labels, **options), (x, w))


@pytest.mark.heavy
def test_the_ops_are_registered_well():
    """opcheck: schemas, fake tensors, autograd and AOT tracing hold for every op of both files."""
    z, labels, x, w = torch.randn(6, 70, requires_grad=True), targets(6, 70), torch.randn(6, 8), torch.randn(70, 8)
    rows = (torch.randn(6), torch.randn(6), torch.rand(6) + 1)
    assert_registered(given.forward_op, (z, labels, 70, -1, 0.1, 0.0, False))
    assert_registered(given.backward_op, (rows[0], z.detach(), labels, *rows[1:], 70, -1, 0.1, 0.0))
    assert_registered(given.backward_op_, (rows[0], z.detach().clone(), labels, *rows[1:], 70, -1, 0.1, 0.0))
    leaves = (x.requires_grad_(), w.requires_grad_())
    assert_registered(fused.forward_op, (*leaves, labels, torch.float32, -1, 0.1, 0.1, True, True, 1000))


@pytest.mark.heavy
def test_compiled_whole():
    """torch.compile(fullgraph=True) gives eager's loss and gradients; the numbers given as options arrive."""
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(70, 8, requires_grad=True)
    labels = targets(6, 70)

    def loss(x, w):
        h = x * 2
        head = fused.linear_cross_entropy(h, w, labels, label_smoothing=0.25, z_loss=0.125)
        return head + given.cross_entropy(h @ w.t(), labels, label_smoothing=0.25, in_place=True)

    for a, b in zip(
        torch.autograd.grad(compile_whole(loss)(x, w), (x, w)),
        torch.autograd.grad(loss(x, w), (x, w)),
        strict=True,
    ):
        assert gap(a, b) <= 1e-6 * b.abs().max()


def test_autocast_multiplies_in_bfloat16():
    """Under autocast the head's loss is near fp32's but not it, and dW comes in the type of the fp32 weight."""
    x, w = torch.randn(33, 64, requires_grad=True), torch.randn(300, 64, requires_grad=True)
    labels = targets(33, 300)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        loss = fused.linear_cross_entropy(x.bfloat16(), w, labels)
    exact = fused.reference(x.double(), w.double(), labels)
    assert 0 < abs(loss.item() - exact.item()) < 0.05
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert dx.dtype == dw.dtype == torch.float32 and loss.dtype == torch.float32


WRONG = [
    (
        lambda: given.cross_entropy(torch.zeros(3, 9), torch.zeros(4, dtype=torch.int64)),
        r"targets are \(4,\).* give \(3,\)",
    ),
    (lambda: given.cross_entropy(torch.zeros(3, 9), torch.zeros(3)), "targets are torch.float32.* give int64"),
    (
        lambda: given.cross_entropy(torch.zeros(3, 9), torch.full((3,), 9)),
        "target 9 is not one of 9 classes: give 0 to 8",
    ),
    (lambda: given.cross_entropy(torch.zeros(3, 9), torch.full((3,), -100)), "target -100 is not one of 9 classes"),
    (lambda: given.cross_entropy(torch.zeros(3, 9).long(), torch.full((3,), 1)), "x is torch.int64: give float32"),
    (
        lambda: given.cross_entropy(torch.zeros(3, 9, device="meta"), torch.full((3,), 1)),
        "on meta, where it cannot run",
    ),
    (lambda: given.cross_entropy(torch.zeros(3, 9), torch.full((3,), 1), vocab_size=10), "vocab_size=10 of 9 columns"),
    (lambda: given.cross_entropy(torch.zeros(()), torch.zeros((), dtype=torch.int64)), r"x is \(\): give"),
    (lambda: given.cross_entropy(torch.zeros(3, 9), torch.full((3,), 1), reduction="none"), "give mean or sum"),
    (
        lambda: fused.linear_cross_entropy(torch.zeros(3, 9), torch.zeros(9, 5), torch.full((3,), 1)),
        r"weight is \(9, 5\) and x \(3, 9\)",
    ),
    (
        lambda: fused.linear_cross_entropy(
            torch.zeros(3, 9), torch.zeros(5, 9), torch.full((3,), 1), label_smoothing=1.0
        ),
        "label_smoothing=1.0: give a number",
    ),
    (lambda: given.cross_entropy(torch.zeros(3, 9), torch.full((3,), 1), vocab_size=0), "vocab_size=0 of 9 columns"),
    (
        lambda: given.cross_entropy(torch.zeros(3, 9), torch.full((3,), 1), z_loss=-1.0),
        "z_loss=-1.0: give a number from 0",
    ),
    (lambda: given.cross_entropy(torch.zeros(3, 9), None), "targets are None: give"),
    (
        lambda: fused.linear_cross_entropy(torch.zeros(3, 9), torch.zeros(5, 9), torch.full((3,), 1), chunk_bytes=0),
        "chunk_bytes=0: give a number from 1",
    ),
    (lambda: fused.linear_cross_entropy(torch.zeros(()), torch.zeros(5, 9), torch.full((), 1)), r"and x \(\): give"),
    (lambda: fused.linear_cross_entropy(torch.zeros(3, 0), torch.zeros(5, 0), torch.full((3,), 1)), r"x is \(3, 0\)"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words[:24] for _, words in WRONG])
def test_wrong_input_is_one_sentence(call, words):
    """A shape, type, device, option or label that does not fit is refused, and the sentence says what to give."""
    if "is not one of" in words and not interpreting():
        pytest.skip("labels are looked at in the interpreter only")
    with pytest.raises(KernelError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_an_unknown_label_reads_nothing_and_gives_nan():
    """Where labels are not looked at, as on a GPU, one that is no class makes its loss NaN and touches no memory."""
    losses, peaks, totals = (guarded(torch.zeros(2)) for _ in range(3))
    labels, z = torch.tensor([2**40, 1]), guarded(torch.zeros(2, 9))
    launch(
        given.forward_kernel, (1,), z, labels, losses, peaks, totals, 2, 9, 9, 9, -1, 0.0, 0.0,
        SMOOTH=False, GRADIENT=True, ROWS=2, BLOCK=tile(9),
    )  # fmt: skip
    assert losses[0].isnan() and losses[1].item() == pytest.approx(torch.tensor(9.0).log().item())
    assert z[0].isnan().all() and z[1].isfinite().all()  # no optimizer is to step on half of a batch


def test_a_compiler_for_gpus_gets_a_product_that_it_knows():
    """Traced on fake bfloat16 tensors of a GPU, dW is a product in fp32 and a sum: an addmm with
    a type of its own has no lowering."""
    found = []

    def note(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def summed(total, a, b):
        total = total * 1
        fused.add_product(total, a, b)
        return total

    with FakeTensorMode():
        a, b = (torch.empty(8, n, dtype=torch.bfloat16, device="cuda") for n in (50, 16))
        assert aot_function(summed, fw_compiler=note)(torch.empty(50, 16, device="cuda"), a, b).shape == (50, 16)
    assert "aten.mm.dtype" in found and not [name for name in found if "addmm" in name]
