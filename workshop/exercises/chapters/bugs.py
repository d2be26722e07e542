"""A bug hunt: real kernels with one planted bug each."""

from workshop.exercises.checks.bugs import (
    FIX,
    HALF_SUM,
    check_long_sequences,
    check_sums,
    check_tail,
    check_variance,
)
from workshop.exercises.exercise import Exercise, plant_mistake

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
        planted=(
            plant_mistake(
                'other=float("-inf")))\n        total', "other=0.0))\n        total", "the last tile has lanes beyond V"
            ),
        ),
        mistakes=(
            plant_mistake(
                'other=float("-inf")))\n        total', "other=-1.0))\n        total", "must add exp(-inf) = 0"
            ),
            plant_mistake(
                "tl.where(target != ignore_index, tl.log(total) - (target_logit - peak), 0.0)",
                "tl.log(total) - (target_logit - peak)",
                "an ignored target",
            ),
        ),
    ),
    Exercise(
        name="bugs.2",
        title="Fix a LayerNorm that is wrong at a width of 768",
        targets=("phase2_triton.kernels.layernorm:forward_kernel",),
        task=f"{FIX} The result is right at a width of 512 or 1,024, and wrong at a width of 768.",
        minutes=10,
        difficulty="easy",
        check=check_variance,
        nudge="Is the mean right? Is the variance?",
        idea="The padding is loaded as 0, but the variance needs x - mean.",
        line="centred =",
        planted=(
            plant_mistake(
                "tl.where(i * BLOCK + lanes < N, chunks[i] - row_mean, 0.0)",
                "chunks[i] - row_mean",
                "12 lanes of padding",
            ),
        ),
        mistakes=(
            plant_mistake(
                "tl.where(i * BLOCK + lanes < N, chunks[i] - row_mean, 0.0)",
                "tl.where(i * BLOCK + lanes < N, chunks[i], 0.0) - row_mean",
                "must not count in the variance",
            ),
            plant_mistake(
                "tl.store(total + rows * N + cols, rounded, mask=mask)",
                "tl.store(total + rows * N + cols, to_fp32(tl.load(x + rows * N + cols, mask=mask)), mask=mask)",
                "the sum of both inputs",
            ),
        ),
    ),
    Exercise(
        name="bugs.3",
        title="Fix a gradient that loses precision with the number of chunks",
        targets=("phase2_triton.kernels.linear_cross_entropy:add_product",),
        task=f"{FIX} The loss kernel processes the rows in chunks, and adds the gradient of each chunk to dW. In "
        "half precision the error of dW grows with the number of chunks.",
        minutes=10,
        difficulty="medium",
        check=check_sums,
        nudge="In which type is the running sum rounded?",
        idea="Compute the product and the sum in the type of `total`, which is fp32.",
        line="total.addmm_(a.t().to",
        planted=(
            plant_mistake(
                "total.addmm_(a.t().to(total.dtype), b.to(total.dtype))",
                HALF_SUM,
                "it grows with the number of additions",
            ),
        ),
        mistakes=(
            plant_mistake(
                "total.addmm_(a.t().to(total.dtype), b.to(total.dtype))",
                "total.copy_(total.addmm(a.t().to(total.dtype), b.to(total.dtype)).half())",
                "must be summed in fp32",
            ),
            plant_mistake(
                "total.addmm_(a.t().to(total.dtype), b.to(total.dtype))",
                "total.sub_(a.t().to(total.dtype) @ b.to(total.dtype))",
                "the product a.T @ b is wrong",
            ),
        ),
    ),
    Exercise(
        name="bugs.4",
        title="Fix an attention that is right only for short sequences",
        targets=("phase2_triton.kernels.attention:forward_kernel",),
        task=f"{FIX} Sequences that fit into one block of keys are right. The saved lse is right for all lengths, "
        "but y is not.",
        minutes=15,
        difficulty="hard",
        check=check_long_sequences,
        nudge="Which values does the loop keep from one block of keys to the next?",
        idea="acc is a sum of exponentials too: it is relative to the largest score so far.",
        line="acc = tl.dot(p.to",
        planted=(plant_mistake("acc * correction,", "acc,", "while lse is right"),),
        mistakes=(
            plant_mistake("row_sum = row_sum * correction +", "row_sum = row_sum +", "lse for 70 tokens"),
            plant_mistake("acc * correction,", "acc * (1 / correction),", "while lse is right"),
        ),
    ),
]
