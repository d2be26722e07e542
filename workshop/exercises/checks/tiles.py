"""Checks of the exercises on kernels in tiles. Triton's interpreter runs the kernels, between guard bands."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workshop.exercises.checks.triton import allocate, check_values, run_strictly, surround_with_nan
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import draw_normal, is_close

TILE, KEYS = 16, 8  # queries and keys of a tile of attention


def check_matmul(answer: ModuleType, _: Any) -> None:
    for M, N, K in ((4, 8, 6), (5, 3, 7), (3, 11, 7)):
        a, b = draw_normal(M, K), draw_normal(K, N, seed=1)
        counter = torch.zeros(1, dtype=torch.int64)
        c, grid = allocate(M, N), (-(-M // 4), -(-N // 8))
        args = (surround_with_nan(a), surround_with_nan(b), c, counter, M, N, K)
        run_strictly(answer.matmul_kernel, grid, *args, BM=4, BN=8, BK=2)
        story = f"A product of ({M}, {K}) and ({K}, {N}) in tiles of 4 x 8"
        last = (K - 1) // 2 * 2
        expect(
            not is_close(c, a[:, last:] @ b[last:]),
            f"{story} is that of the last step only: add the products of all steps.",
        )
        full = K // 2 * 2
        expect(
            full == K or not is_close(c, a[:, :full] @ b[:full]),
            f"{story} lacks the elements of K beyond the last full tile: the loop needs one more step, with a mask.",
        )
        advice = "Each load needs a mask for both dimensions, and other=0.0: a lane beyond K must add 0 to the sum."
        if M == 4:  # all tiles are full
            advice = (
                "a[i, k] is at i * K + k, and b[k, j] at k * N + j. In each step k is start + lane; sum over k, axis 1."
            )
        check_values(c, a @ b, story, advice)
        steps, programs = -(-K // 2), grid[0] * grid[1]
        expect(
            int(counter) == programs * steps * 24,
            f"{story} counts {int(counter)} loaded elements instead of {programs * steps * 24}: {programs} programs "
            f"with {steps} steps each, and two tiles per step.",
        )


def attend(answer: ModuleType, q: Tensor, k: Tensor, v: Tensor, programs: int) -> Tensor:
    """Return the result of the first programs; other rows are NaN."""
    T, HS = q.shape
    out = allocate(T, HS)
    args = (*map(surround_with_nan, (q, k, v)), out, T, HS**-0.5)
    run_strictly(answer.attention_kernel, (programs,), *args, HS=HS, BQ=TILE, BK=KEYS, RESCALES=True)
    return out


def check_flash_attention(answer: ModuleType, _: Any) -> None:
    T, HS = 43, 16
    q, k, v = (draw_normal(T, HS, seed=i) * 2 for i in range(3))
    exact = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    everything = F.scaled_dot_product_attention(q[None, :TILE], k[None, :TILE], v[None, :TILE])[0]
    y = attend(answer, q[:TILE], k[:TILE], v[:TILE], 1)
    expect(
        not is_close(y, everything, 1e-4),
        "Queries attend to keys after their own position: set those scores to -inf before the softmax.",
    )
    truncated = F.scaled_dot_product_attention(q[None, KEYS:TILE], k[None, :KEYS], v[None, :KEYS])[0]
    expect(
        not is_close(y[KEYS:], truncated, 1e-4),
        "The loop ends before the last keys that its queries see: the last query of program 0 sees its own key.",
    )
    check_rows(y, exact[:TILE], q[:TILE], k[:TILE], v[:TILE])
    later_k, later_v = (each.clone() for each in (k, v))
    later_k[TILE:], later_v[TILE:] = float("nan"), float("nan")
    y = attend(answer, q, later_k, later_v, 1)
    expect(
        bool(y[:TILE].isfinite().all()),
        "Program 0 loads keys or values of tiles above the diagonal, which none of its queries may see. It would do "
        "twice the work: the loop must end with the diagonal.",
    )
    y = attend(answer, q, k, v, -(-T // TILE))
    check_rows(y, exact, q, k, v)
    for scores in (300.0, -300.0):  # exp(300) is inf, and exp(-300) is 0
        q[:, 0], k[:, 0] = HS**0.5 * scores / 10, 10.0
        exact = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        y = attend(answer, q, k, v, -(-T // TILE))
        expect(
            is_close(y, exact, 1e-3),
            f"With scores near {scores:g}, the result is wrong: exp overflows, or all exponentials are 0. Subtract "
            "the largest score so far before exp. It is -inf before the first tile.",
        )


def check_rows(y: Tensor, exact: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the result for several tiles of keys."""
    scores = (q @ k.T * q.size(1) ** -0.5).masked_fill(~torch.ones(len(q), len(q), dtype=torch.bool).tril(), -torch.inf)
    maximum = torch.stack([scores[:, : end + KEYS].amax(1) for end in range(0, len(q), KEYS)], 1)
    is_growing = (maximum[:, 1:] > maximum[:, :-1]).any(1)
    wrong = ((y - exact).abs() > 1e-4).any(1) & ~y.isnan().any(1)
    expect(
        not (wrong.any() and is_growing[wrong].all()),
        "Rows in which a later tile contains the largest score are wrong: everything that was summed so far, the sum "
        "and the result, is relative to the old maximum. Multiply both by exp(old - new).",
    )
    advice = (
        "Does each query see its own key, is the factor exp(old - new), with the maximum of all tiles so far, and does "
        "each load have a mask for rows up to T?"
        if y.isnan().any()
        else "Compare the mask (it needs the positions of queries and keys in the sequence), scale and division."
    )
    check_values(y, exact, "the result for several tiles of keys", advice, 1e-4)


def check_query_gradient(answer: ModuleType, _: Any) -> None:
    HS = 16
    for T in (KEYS, TILE, 43):
        q, k, v, dy = (draw_normal(T, HS, seed=i) for i in range(4))
        scores = q @ k.T * HS**-0.5
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        logsumexp = scores.masked_fill(hidden, -torch.inf).logsumexp(1)
        weights, dweights = (scores - logsumexp[:, None]).exp(), dy @ v.T
        delta = (weights.masked_fill(hidden, 0) * dweights).sum(1)
        dq = allocate(T, HS)
        args = [surround_with_nan(each) for each in (q, k, v, dy, logsumexp, delta)]
        run_strictly(answer.query_gradient_kernel, (-(-T // TILE),), *args, dq, T, HS**-0.5, HS=HS, BQ=TILE, BK=KEYS)
        causal = weights.masked_fill(hidden, 0)
        right = (causal * (dweights - delta[:, None])) @ k * HS**-0.5
        expect(
            not is_close(dq, (causal * dweights) @ k * HS**-0.5, 1e-4),
            "dq lacks delta. A larger score takes weight from all other keys of its row: ds = p (dp - delta).",
        )
        # A tile on the diagonal also has keys that its queries must not see.
        last_key = (torch.arange(T) // TILE + 1) * TILE
        visible = torch.arange(T)[None, :] < -(-last_key // KEYS * KEYS).clamp(max=T)[:, None]
        everything = (weights * (dweights - delta[:, None])).masked_fill(~visible, 0) @ k * HS**-0.5
        expect(
            not is_close(dq, everything, 1e-4),
            "dq contains keys after their own position: their weights must be 0.",
        )
        expect(
            not is_close(dq * HS**-0.5, right, 1e-4),
            "The scale is missing: the scores are q k times scale, so dq is the sum of ds k times scale.",
        )
        advice = "Does each load have a mask for rows up to T?" if dq.isnan().any() else "Compare it with the formulas."
        check_values(dq, right, f"dq for {T} tokens", advice, 1e-4)
        later_k, later_v = (each.clone() for each in (k, v))
        later_k[TILE:], later_v[TILE:] = float("nan"), float("nan")
        args[1:3] = [surround_with_nan(each) for each in (later_k, later_v)]
        run_strictly(answer.query_gradient_kernel, (1,), *args, dq, T, HS**-0.5, HS=HS, BQ=TILE, BK=KEYS)
        expect(
            bool(dq[:TILE].isfinite().all()),
            "Program 0 loads keys or values of tiles above the diagonal, which none of its queries may see. It would "
            "do twice the work: the loop must end with the diagonal.",
        )
