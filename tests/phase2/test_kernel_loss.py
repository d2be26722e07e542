"""Tests of the cross-entropy kernels, on logits and fused with the head, in the interpreter, against torch in fp64."""

import pytest
import torch
from functorch.compile import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from phase2_triton.kernels import cross_entropy as unfused
from phase2_triton.kernels import linear_cross_entropy as fused
from phase2_triton.kernels.core import launch
from tests.helpers.kernels import (
    assert_as_exact_as_torch,
    assert_registered,
    draw_integers,
    draw_normal,
    gap,
    guard,
    guard_bands,
)

pytestmark = pytest.mark.usefixtures("on_device")


def make_targets(M, V, ignored=True):
    labels = draw_integers(V, (M,))
    if ignored and M > 2:
        labels[1::5] = -1
    return labels


def torch_cross_entropy(logits, labels, **options):
    """Return torch's cross-entropy, computed in fp32 or fp64. The references are also compared with it."""
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("M", "V"), [(1, 769), (33, 1023), (129, 75), (16, 50257), (16, 50304)])
def test_cross_entropy_is_as_exact_as_torch(M, V, dtype):
    """Loss and gradient are as exact as torch's, with ragged tiles, odd numbers of rows and ignored targets."""
    logits = (3 * draw_normal((M, V))).to(dtype).requires_grad_()
    labels = make_targets(M, V)
    assert_as_exact_as_torch(
        lambda z: unfused.cross_entropy(z, labels), lambda z: torch_cross_entropy(z, labels, ignore_index=-1), (logits,)
    )


@pytest.mark.parametrize("full_columns", [0, 64, 960])
def test_maximum_and_sum_are_carried_over_tiles(full_columns):
    """Many tiles per row give the same loss and gradient: 2 rows and 64 columns without a mask, then 16 with a mask."""
    logits, labels = (5 * draw_normal((7, 1000))).float(), make_targets(7, 1000)
    with guard_bands():
        losses, peaks, totals = (guard(torch.zeros(7)) for _ in range(3))
        z = guard(logits)
        launch(
            unfused.forward_kernel, (4,), z, labels, losses, peaks, totals, 7, 1000, 1000, full_columns, 1000, -1,
            GRADIENT=True, ROWS=2, BLOCK=64, TAIL=16,
        )  # fmt: skip
    leaf = logits.double().requires_grad_()
    exact = F.cross_entropy(leaf, labels, ignore_index=-1, reduction="none")
    assert gap(losses, exact) <= 2e-6 and gap(peaks + totals.log(), logits.double().logsumexp(1)) <= 2e-6
    assert gap(z, torch.autograd.grad(exact.sum(), leaf)[0]) <= 1e-6


@pytest.mark.parametrize("offset", [-500.0, 1e6])
def test_a_large_common_offset_costs_no_precision(offset):
    """If all logits of a row have a large common offset, the kernels and step 1 are as exact as torch."""
    logits, labels = (draw_normal((6, 300)) + offset).float().requires_grad_(), make_targets(6, 300, ignored=False)
    assert_as_exact_as_torch(
        lambda z: unfused.cross_entropy(z, labels), lambda z: torch_cross_entropy(z, labels), (logits,)
    )
    exact = F.cross_entropy(logits.double(), labels, reduction="none")
    assert gap(unfused.run_two_pass_step(logits.detach(), labels), exact) <= 3e-6


def test_a_second_derivative_is_refused():
    """The fused loss has no second derivative. It raises an error instead of returning a part of it."""
    x, w, labels = torch.randn(6, 8, requires_grad=True), torch.randn(70, 8, requires_grad=True), make_targets(6, 70)
    for inputs in ((x, w), (x, w.detach()), (x.detach(), w)):
        leaves = [leaf for leaf in inputs if leaf.requires_grad]
        gradient, *_ = torch.autograd.grad(fused.linear_cross_entropy(*inputs, labels), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            gradient.square().sum().backward()


def test_a_loss_scale_beyond_float16_scales_the_gradient():
    """A loss scaler begins with 65,536, which float16 cannot represent. The product is computed in fp32."""
    x, w, labels = (draw_normal((6, 8), 1) / 100).half(), draw_normal((70, 8), 2).half() / 100, make_targets(6, 70)
    grads = []
    for loss in (
        lambda leaf: fused.linear_cross_entropy(leaf, w, labels, reduction="sum"),
        lambda leaf: torch_cross_entropy(F.linear(leaf, w), labels, ignore_index=-1, reduction="sum"),
    ):
        leaf = x.detach().requires_grad_()
        grads += torch.autograd.grad(loss(leaf) * 65536, leaf)
    assert grads[0].isfinite().all() and gap(*grads) <= 0.01 * grads[1].abs().max()


@pytest.mark.parametrize("M", [0, 4])
def test_loss_is_0_without_targets(M):
    """With no rows, or only ignored targets, loss and gradients are 0 and not 0/0, fused or not."""
    labels = torch.full((M,), -1)
    logits, x, w = (torch.randn(shape, requires_grad=True) for shape in ((M, 70), (M, 8), (70, 8)))
    loss = unfused.cross_entropy(logits, labels) + fused.linear_cross_entropy(x, w, labels)
    loss.backward()
    assert loss.item() == 0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in (logits, x, w))


def test_padded_columns_are_ignored():
    """If only 50 of 64 columns are real, the loss is computed from these 50. The gradient of the others is 0."""
    logits, labels = torch.randn(5, 64, requires_grad=True), make_targets(5, 50)
    loss = unfused.cross_entropy(logits, labels, vocab_size=50)
    exact = unfused.reference(logits.double()[:, :50], labels)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[:, 50:].any() and gradient[:, :50].any()


def test_logits_of_any_layout_work():
    """Transposed, sliced and 3-dimensional logits give the result of a contiguous copy."""
    base = torch.randn(40, 6)
    for logits, labels in (
        (base.t(), make_targets(6, 40)),
        (base[::3, 1:5], make_targets(14, 4)),
        (base.view(4, 10, 6), None),
    ):
        labels = torch.zeros(4, 10, dtype=torch.int64) if labels is None else labels
        leaf = logits.detach().requires_grad_()
        loss = unfused.cross_entropy(leaf, labels)
        exact = unfused.reference(logits.double(), labels)
        assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
        assert torch.autograd.grad(loss, leaf)[0].shape == logits.shape


HEADS = [(1, 24, 769, 1), (33, 40, 1023, 4), (16, 8, 50257, 2), (65, 48, 75, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("M", "K", "V", "chunks"), HEADS)
def test_the_fused_head_is_as_exact_as_torch(M, K, V, chunks, dtype):
    """Loss, dx and dW are as exact as torch's with one or multiple chunks, the last of which is smaller."""
    x, w = (draw_normal(shape, seed).to(dtype).requires_grad_() for shape, seed in (((M, K), 1), ((V, K), 2)))
    labels, chunk_size = make_targets(M, V), -(-M // chunks) * V * dtype.itemsize
    assert_as_exact_as_torch(
        lambda x, w: fused.linear_cross_entropy(x, w, labels, chunk_bytes=chunk_size),
        lambda x, w: torch_cross_entropy(F.linear(x, w), labels, ignore_index=-1),
        (x, w),
    )


@pytest.mark.parametrize("M", [1, 5336, 5337, 65536])
def test_chunks_never_exceed_their_size_limit(M):
    """A chunk of logits has at most CHUNK_BYTES, and the last chunk has at least one row."""
    rows = fused.chunk_rows(M, 50304, 2, fused.CHUNK_BYTES)
    assert rows * 50304 * 2 <= fused.CHUNK_BYTES and rows * -(-M // rows) < M + rows


@pytest.mark.heavy
def test_the_operators_pass_opcheck():
    """Schemas, fake tensors, autograd and AOT tracing are correct for every operator of both files."""
    z, labels, x, w = torch.randn(6, 70, requires_grad=True), make_targets(6, 70), torch.randn(6, 8), torch.randn(70, 8)
    rows = (torch.randn(6), torch.randn(6), torch.rand(6) + 1)
    assert_registered(unfused.forward_op, (z, labels, 70, -1))
    assert_registered(unfused.backward_op, (rows[0], z.detach(), labels, *rows[1:], 70, -1))
    leaves = (x.requires_grad_(), w.requires_grad_())
    assert_registered(fused.forward_op, (*leaves, labels, torch.float32, -1, True, True, 1000))


def test_an_unknown_label_reads_nothing_and_gives_nan():
    """On a GPU, labels are not checked. A label that is not a class gives a loss of NaN and reads no memory."""
    losses, peaks, totals = (guard(torch.zeros(2)) for _ in range(3))
    labels, z = torch.tensor([2**40, 1]), guard(torch.zeros(2, 9))
    launch(
        unfused.forward_kernel, (1,), z, labels, losses, peaks, totals, 2, 9, 9, 0, 9, -1,
        GRADIENT=True, ROWS=2, BLOCK=16, TAIL=16,
    )  # fmt: skip
    assert losses[0].isnan() and losses[1].item() == pytest.approx(torch.tensor(9.0).log().item())
    assert z[0].isnan().all() and z[1].isfinite().all()  # NaN prevents a step with the gradient of half a batch


def test_compilers_for_gpus_get_a_product_that_they_can_lower():
    """Traced on fake bfloat16 tensors of a GPU, dW is an fp32 product and a sum.

    An addmm with another result type has no lowering.
    """
    targets = []

    def record_targets(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def add_to_sum(total, a, b):
        total = total * 1
        fused.add_product(total, a, b)
        return total

    with FakeTensorMode():
        a, b = (torch.empty(8, n, dtype=torch.bfloat16, device="cuda") for n in (50, 16))
        compiled = aot_function(add_to_sum, fw_compiler=record_targets)
        assert compiled(torch.empty(50, 16, device="cuda"), a, b).shape == (50, 16)
    assert "aten.mm.dtype" in targets and not [name for name in targets if "addmm" in name]


def test_1_is_subtracted_from_the_target_in_fp32():
    """A probability of 0.9998 is 1 in half precision. Rounded before the subtraction, it would give no gradient."""
    logits = torch.zeros(16)
    logits[3] = torch.tensor(0.9998 / (0.0002 / 15)).log()
    label = torch.tensor(3)
    assert_as_exact_as_torch(
        lambda z: unfused.cross_entropy(z, label),
        lambda z: torch_cross_entropy(z, label),
        (logits.half().requires_grad_(),),
    )


def test_dw_is_summed_over_chunks_in_fp32():
    """Over 96 chunks, a sum of dW in half precision would exceed the tolerance."""
    x, w = (draw_normal((96, 16), 1).abs() + 1).half(), (draw_normal((75, 16), 2) / 10).half()
    labels = torch.full((96,), 3)
    assert_as_exact_as_torch(
        lambda w: fused.linear_cross_entropy(x.to(w.dtype), w, labels, reduction="sum", chunk_bytes=75 * 2),
        lambda w: torch_cross_entropy(F.linear(x.to(w.dtype), w), labels, reduction="sum"),
        (w.requires_grad_(),),
    )
