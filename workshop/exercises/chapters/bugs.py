"""A bug hunt: real kernels with one planted bug each. The same bugs are in `tests/phase2/test_planted_kernels.py`."""

from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F

from phase2_triton.kernels import attention, cross_entropy, layernorm, linear_cross_entropy
from phase2_triton.kernels.core import launch
from workshop.exercises.chapters.triton import Buffers, check_values, surround
from workshop.exercises.exercise import Exercise, draw, expect, is_close, mistake

FIX = "The file contains the repository's code with one planted bug. Find it and fix it."


def check_tail(answer: ModuleType, _: Any) -> None:
    for V, block in ((16, 16), (20, 16), (21, 8)):
        logits, targets = draw(3, V) - 4, torch.tensor([1, V - 1, -1])
        losses = cross_entropy.run_two_pass_step(surround(logits), targets, block=block)
        exact = F.cross_entropy(logits, targets, reduction="none", ignore_index=-1)
        expect(losses[2] == 0, "The loss of an ignored target must be 0.")
        tail = "the vocabulary fills all tiles" if V % block == 0 else "the last tile has lanes beyond V"
        check_values(
            losses,
            exact,
            f"the loss for V = {V} and tiles of {block}, where {tail},",
            "A lane beyond V must add exp(-inf) = 0 to the sum. If only the last tile is wrong, look at its padding.",
        )


def check_variance(answer: ModuleType, _: Any) -> None:
    for N in (32, 20):
        x, weight, bias = draw(4, N) + 3, draw(N, seed=1), draw(N, seed=2)
        y = layernorm.layer_norm(x, weight, bias)
        exact = F.layer_norm(x, (N,), weight, bias)
        padding = "no padding" if N == 32 else "12 lanes of padding"
        expect(not is_close(y + exact.mean() * 0, exact - bias, 1e-4), "The bias is not added.")
        check_values(
            y,
            exact,
            f"y for rows of {N} elements, with {padding} in a tile,",
            "A lane of padding contains 0, and 0 - mean is not 0: it must not count in the variance.",
        )
    x, branch = draw(4, 20) * 100, draw(4, 20, seed=5)
    total, _ = layernorm.add_layer_norm(x, branch, torch.ones(20))
    check_values(total, x + branch, "total", "With HAS_BRANCH the kernel stores the sum of both inputs.")


def check_far_rows(answer: ModuleType, _: Any) -> None:
    """Check rows that begin 2^30 elements apart. Only their pages use memory; rows before them make wrong reads visible."""
    buffer = torch.empty(2**32 + 8, dtype=torch.float16)
    logits = buffer[2**31 :].as_strided((3, 8), (2**30, 1)).copy_(draw(3, 8))
    exact_logits, targets = logits.float().clone(), torch.tensor([1, 2, 3])
    gradient = exact_logits.softmax(1) - F.one_hot(targets, 8)
    losses, peaks, totals = (torch.full((3,), float("nan")) for _ in range(3))
    args = (targets, losses, peaks, totals, 3, 8, 8, 4, 2**30, -1, 0.0, 0.0)
    launch(cross_entropy.forward_kernel, (3,), logits, *args, GRADIENT=True, ROWS=1, BLOCK=4, TAIL=4)
    exact = F.cross_entropy(exact_logits, targets, reduction="none")
    check_values(losses[:2], exact[:2], "the loss of rows 0 and 1", "These rows begin below element 2^31.", 1e-4)
    far = "Row 2 begins at element 2^31. A product of 32-bit integers wraps around there: which offset is not 64 bits wide?"
    check_values(losses, exact, "the loss of row 2", far, 1e-4)
    check_values(logits, gradient, "the gradient", f"The gradient of the target is p - 1. {far}", 2e-3)


def check_sums(answer: ModuleType, _: Any) -> None:
    x, w = (draw(96, 16).abs() + 1).half(), (draw(75, 16, seed=2) / 10).half()
    targets = torch.full((96,), 3)

    def compute_dw(chunk_bytes: int) -> torch.Tensor:
        leaf = w.detach().requires_grad_()
        loss = linear_cross_entropy.linear_cross_entropy(x, leaf, targets, reduction="sum", chunk_bytes=chunk_bytes)
        return torch.autograd.grad(loss, leaf)[0].double()

    leaf = w.double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(F.linear(x.double(), leaf), targets, reduction="sum"), leaf)
    one, many = ((compute_dw(size) - exact).abs().max().item() / exact.abs().max().item() for size in (2**20, 150))
    expect(
        one < 1e-2, f"The relative error of dW is {one:.1e} with a single chunk: the product a.T @ b is wrong. "
        "Each chunk must be added to the total."
    )  # fmt: skip
    expect(
        many < 1e-3,
        f"The relative error of dW is {one:.1e} with one chunk of rows and {many:.1e} with 96 chunks: it grows with the number "
        "of additions. The total must be summed in fp32, and rounded to half precision once at the end.",
    )


def check_ignored(answer: ModuleType, _: Any) -> None:
    logits = draw(3, 9).requires_grad_()
    loss = cross_entropy.cross_entropy(logits, torch.tensor([2, -1, 4]))
    exact = F.cross_entropy(logits, torch.tensor([2, -1, 4]), ignore_index=-1)
    expect(
        is_close(loss, exact),
        f"The mean loss is {float(loss):.4f} instead of {float(exact):.4f}: divide by the number of targets that count.",
    )
    total = cross_entropy.cross_entropy(logits, torch.tensor([2, -1, 4]), reduction="sum")
    expect(is_close(total, 2 * exact), "With reduction=sum the result must be the sum of the losses.")
    loss = cross_entropy.cross_entropy(logits, torch.full((3,), -1))
    expect(
        bool(loss == 0),
        f"The loss of a batch whose targets are all ignored is {float(loss)}: 0 / 0 is NaN, and one such batch makes all "
        "weights NaN. The loss must be 0.",
    )


def check_long_sequences(answer: ModuleType, _: Any) -> None:
    for T in (8, 70):
        q, k, v = (draw(1, 2, T, 16, seed=i) * 2 for i in range(3))
        buffers = Buffers()
        y, lse = buffers.allocate(1, T, 2, 16).transpose(1, 2), buffers.allocate(1, 2, T)
        strides = [stride for each in (q, k, v) for stride in each.stride()[:3]]
        constants = {"SCALE": 0.25, "DROPOUT": 0.0, "SPLIT": True, "PRECISION": "ieee", "HEADS": 1, "HS": 16}
        launch(
            attention.forward_kernel, (2 * -(-T // 16),), q, k, v, y, lse, None, *strides, T, 2,
            **constants, BLOCK_D=16, BLOCK=16, STEP=16,
        )  # fmt: skip
        buffers.check()
        blocks = "one block of keys" if T <= 16 else "several blocks of keys"
        exact = attention.reference(q, k, v)
        scores = (q @ k.transpose(-2, -1) * 0.25).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
        advice = "When a larger score appears, everything that was summed so far must be scaled down: row_sum and acc."
        check_values(lse, scores.logsumexp(-1) / torch.tensor(2.0).log(), f"lse for {T} tokens, with {blocks},", advice, 1e-4)
        check_values(y, exact, f"y for {T} tokens, with {blocks}, while lse is right,", advice, 1e-4)


HALF_SUM = "total.copy_((total.half() + a.t().half() @ b.half()).to(total.dtype))"

EXERCISES = [
    Exercise(
        name="bugs.1",
        title="Fix a loss that is wrong for most vocabularies",
        targets=("phase2_triton.kernels.cross_entropy:two_pass_kernel",),
        task=f"{FIX} The loss is right if the tile size divides V. GPT-2 has 50,257 tokens, and its loss is too large.",
        minutes=5,
        difficulty="easy",
        check=check_tail,
        nudge="Compare a vocabulary that fills all tiles with one that does not.",
        idea="Which value must a lane beyond V have, so that it adds nothing to a sum of exponentials?",
        line="total += tl.sum",
        planted=(mistake('other=float("-inf")))\n        total', "other=0.0))\n        total", "the last tile has lanes beyond V"),),
        mistakes=(
            mistake('other=float("-inf")))\n        total', "other=-1.0))\n        total", "must add exp(-inf) = 0"),
            mistake("tl.where(target != ignore_index, tl.log(total) - (target_logit - peak), 0.0)", "tl.log(total) - (target_logit - peak)", "an ignored target"),
        ),
    ),
    Exercise(
        name="bugs.2",
        title="Fix a LayerNorm that is wrong at a width of 769",
        targets=("phase2_triton.kernels.layernorm:forward_kernel",),
        task=f"{FIX} The result is right for a width of 768 = 3 * 256 only if the tile has no padding.",
        minutes=10,
        difficulty="easy",
        check=check_variance,
        nudge="Is the mean right? Is the variance?",
        idea="The padding is loaded as 0, but the variance needs x - mean.",
        line="centred =",
        planted=(mistake("tl.where(mask, v - row_mean[:, None], 0.0)", "v - row_mean[:, None]", "12 lanes of padding"),),
        mistakes=(
            mistake("tl.where(mask, v - row_mean[:, None], 0.0)", "tl.where(mask, v, 0.0) - row_mean[:, None]", "must not count in the variance"),
            mistake("        tl.store(total + offs, rounded, mask=mask)", "        tl.store(total + offs, to_fp32(tl.load(x + offs, mask=mask)), mask=mask)", "the sum of both inputs"),
        ),
    ),
    Exercise(
        name="bugs.3",
        title="Fix a loss that is wrong only for large batches",
        targets=("phase2_triton.kernels.cross_entropy:forward_kernel",),
        task=f"{FIX} With 65,536 rows of 50,304 logits, the last rows have a wrong loss. Smaller batches are right.",
        minutes=15,
        difficulty="hard",
        check=check_far_rows,
        nudge="How many elements do the logits have? What is the largest 32-bit integer?",
        idea="Triton multiplies two 32-bit integers in 32 bits. Convert the row to int64 before the multiplication.",
        line="base =",
        planted=(mistake("tl.minimum(rows, M - 1).to(tl.int64)[:, None]", "tl.minimum(rows, M - 1)[:, None]", "wraps around"),),
        mistakes=(
            mistake("tl.minimum(rows, M - 1).to(tl.int64)[:, None] * stride", "(tl.minimum(rows, M - 1)[:, None] * stride).to(tl.int64)", "wraps around"),
            mistake("dz = exp(target_logit - peak) * scale - SMOOTHING / V - (1 - SMOOTHING)", "dz = exp(target_logit - peak) * scale", "The gradient of the target is p - 1"),
        ),
    ),
    Exercise(
        name="bugs.4",
        title="Fix a gradient that loses precision with the number of chunks",
        targets=("phase2_triton.kernels.linear_cross_entropy:add_product",),
        task=f"{FIX} The loss kernel processes the rows in chunks, and adds the gradient of each chunk to dW. In half precision "
        "the error of dW grows with the number of chunks.",
        minutes=10,
        difficulty="medium",
        check=check_sums,
        nudge="In which type is the running sum rounded?",
        idea="Compute the product and the sum in the type of `total`, which is fp32.",
        line="total.addmm_(a.t().to",
        planted=(mistake("total.addmm_(a.t().to(total.dtype), b.to(total.dtype))", HALF_SUM, "it grows with the number of additions"),),
        mistakes=(
            mistake("total.addmm_(a.t().to(total.dtype), b.to(total.dtype))", "total.copy_(total.addmm(a.t().to(total.dtype), b.to(total.dtype)).half())", "must be summed in fp32"),
            mistake("total.addmm_(a.t().to(total.dtype), b.to(total.dtype))", "total.sub_(a.t().to(total.dtype) @ b.to(total.dtype))", "the product a.T @ b is wrong"),
        ),
    ),
    Exercise(
        name="bugs.5",
        title="Fix a loss that makes all weights NaN",
        targets=("phase2_triton.kernels.cross_entropy:reduce",),
        task=f"{FIX} In fine-tuning, the targets of a prompt are ignored. A run stopped with a loss that is not finite, in the "
        "first batch that contained only prompts.",
        minutes=5,
        difficulty="easy",
        check=check_ignored,
        nudge="How many targets count in such a batch?",
        idea="Divide by at least 1.",
        line="return total if",
        planted=(mistake(".clamp(min=1)", "", "0 / 0 is NaN"),),
        mistakes=(
            mistake("is_counted.sum().clamp(min=1)", "is_counted.numel()", "divide by the number of targets that count"),
            mistake("is_counted.sum().clamp(min=1)", "(is_counted.sum() + 1)", "divide by the number of targets that count"),
        ),
    ),
    Exercise(
        name="bugs.6",
        title="Fix an attention that is right only for short sequences",
        targets=("phase2_triton.kernels.attention:forward_kernel",),
        task=f"{FIX} Sequences that fit into one block of keys are right. The saved lse is right for all lengths, but y is not.",
        minutes=15,
        difficulty="hard",
        check=check_long_sequences,
        nudge="Which values does the loop keep from one block of keys to the next?",
        idea="acc is a sum of exponentials too: it is relative to the largest score so far.",
        line="acc = tl.dot(p.to",
        planted=(mistake("acc * correction,", "acc,", "while lse is right"),),
        mistakes=(
            mistake("row_sum = row_sum * correction +", "row_sum = row_sum +", "lse for 70 tokens"),
            mistake("acc * correction,", "acc * (1 / correction),", "while lse is right"),
        ),
    ),
]
