"""Checks of the bug hunt: each compares a kernel with torch where its planted bug shows, and where it does not."""

from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F

from phase2_triton.kernels import attention, cross_entropy, layernorm, linear_cross_entropy
from workshop.exercises.checks.triton import allocate, check_values, run_strictly, surround_with_nan
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import draw_normal, is_close

FIX = "The file contains the repository's code with one planted bug. Find it and fix it."


def check_tail(answer: ModuleType, _: Any) -> None:
    for V, block in ((16, 16), (20, 16), (21, 8)):
        logits, targets = draw_normal(3, V) - 4, torch.tensor([1, V - 1, -1])
        losses = cross_entropy.run_two_pass_step(surround_with_nan(logits), targets, block=block)
        exact = F.cross_entropy(logits, targets, reduction="none", ignore_index=-1)
        expect(bool(losses[2] == 0), "The loss of an ignored target must be 0.")
        tail = "the vocabulary fills all tiles" if V % block == 0 else "the last tile has lanes beyond V"
        check_values(
            losses,
            exact,
            f"the loss for V = {V} and tiles of {block}, where {tail},",
            "A lane beyond V must add exp(-inf) = 0 to the sum. If only the last tile is wrong, look at its padding.",
        )


def check_variance(answer: ModuleType, _: Any) -> None:
    for N in (32, 20):
        x, weight, bias = draw_normal(4, N) + 3, draw_normal(N, seed=1), draw_normal(N, seed=2)
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
    x, branch = draw_normal(4, 20) * 100, draw_normal(4, 20, seed=5)
    total, _ = layernorm.add_layer_norm(x, branch, torch.ones(20))
    check_values(total, x + branch, "total", "With HAS_BRANCH the kernel stores the sum of both inputs.")


def check_sums(answer: ModuleType, _: Any) -> None:
    x, w = (draw_normal(96, 16).abs() + 1).half(), (draw_normal(75, 16, seed=2) / 10).half()
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
        f"The relative error of dW is {one:.1e} with one chunk of rows and {many:.1e} with 96 chunks: it grows with "
        "the number of additions. The total must be summed in fp32, and rounded to half precision once at the end.",
    )


def check_long_sequences(answer: ModuleType, _: Any) -> None:
    for T in (8, 70):
        q, k, v = (draw_normal(1, 2, T, 16, seed=i) * 2 for i in range(3))
        y, lse = allocate(1, T, 2, 16).transpose(1, 2), allocate(1, 2, T)
        strides = [stride for each in (q, k, v) for stride in each.stride()[:3]]
        constants = {"SCALE": 0.25, "DROPOUT": 0.0, "SPLIT": True, "PRECISION": "ieee", "HEADS": 1, "HS": 16}
        run_strictly(
            attention.forward_kernel, (2 * -(-T // 16),), q, k, v, y, lse, None, *strides, T, 2,
            **constants, BLOCK_D=16, BLOCK=16, STEP=16,
        )  # fmt: skip
        blocks = "one block of keys" if T <= 16 else "several blocks of keys"
        exact = attention.reference(q, k, v)
        scores = (q @ k.transpose(-2, -1) * 0.25).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
        advice = "When a larger score appears, everything that was summed so far must be scaled down: row_sum and acc."
        check_values(
            lse, scores.logsumexp(-1) / torch.tensor(2.0).log(), f"lse for {T} tokens, with {blocks},", advice, 1e-4
        )
        check_values(y, exact, f"y for {T} tokens, with {blocks}, while lse is right,", advice, 1e-4)


HALF_SUM = "total.copy_((total.half() + a.t().half() @ b.half()).to(total.dtype))"
