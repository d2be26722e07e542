"""Exercises on Triton kernels. Triton's interpreter runs them on the CPU, between guard bands."""

from workshop.exercises.checks.triton import (
    check_attention,
    check_layer_norm,
    check_layer_norm_backward,
    check_online_softmax,
)
from workshop.exercises.exercise import Exercise, plant_mistake

EXERCISES = [
    Exercise(
        name="triton.1",
        title="Write LayerNorm with one row per program",
        targets=("phase2_triton.kernels.layernorm:one_row_kernel",),
        task="""A program loads one row of N elements into a tile of BLOCK lanes, a power of two. It computes
        y, and stores the mean and rstd = 1 / sqrt(variance + EPS) of the row for the backward pass: x is read once, and
        y is written once. Rows follow each other without a gap. Compute in fp32, whatever the dtype of x is.""",
        minutes=20,
        difficulty="medium",
        check=check_layer_norm,
        nudge="What do the lanes beyond N contribute to the sum, and to the sum of squares?",
        idea="Load with other=0.0, subtract the mean, and set the lanes beyond N to 0 again before you square.",
        line="centred =",
        mistakes=(
            plant_mistake("tl.where(mask, v - row_mean, 0.0)", "v - row_mean", "must not count in the variance"),
            plant_mistake(
                "tl.store(y + row * N + cols, out, mask=mask)", "tl.store(y + row * N + cols, out)", "writes outside"
            ),
            plant_mistake("/ N + EPS", "/ N", "Add EPS"),
            plant_mistake(
                "tl.sum(centred * centred, 0) / N", "tl.sum(v * v, 0) / N - row_mean * row_mean", "loses its digits"
            ),
            plant_mistake("out = centred", "out = (v - row_mean.to(x.dtype.element_ty))", "y in float16"),
        ),
    ),
    Exercise(
        name="triton.2",
        title="Add a tile to an online softmax",
        targets=("phase2_triton.kernels.cross_entropy:add_tile",),
        task="""A row of 50,304 logits does not fit into the registers of a program. The kernel reads it tile by
        tile, in one pass. It keeps the largest logit so far, `peak`, and the sum of exp(z - peak), `total`. Return
        both after one more tile z, (ROWS, columns). All logits so far may be -inf.""",
        minutes=15,
        difficulty="medium",
        check=check_online_softmax,
        nudge="The old total is relative to the old peak. How do you make it relative to the new peak?",
        idea="exp(z - new) = exp(z - old) * exp(old - new), so the old total is multiplied by one factor.",
        line="return new_peak",
        mistakes=(
            plant_mistake("total * exp(peak - shift)", "total", "relative to the old maximum"),
            plant_mistake("tl.maximum(peak, tl.max(z, 1))", "tl.max(z, 1)", "larger of the old and the new maximum"),
            plant_mistake('tl.where(new_peak == float("-inf"), 0.0, new_peak)', "new_peak", "-inf - -inf is NaN"),
        ),
    ),
    Exercise(
        name="triton.3",
        title="Write causal attention over all keys",
        targets=("phase2_triton.kernels.attention:all_keys_kernel",),
        task="""This is step 1 of the attention kernel: a program has BLOCK queries of a head and attends to all
        keys at once. program_id(0) is the block of queries, and program_id(1) the head. load_rows and store_rows
        read and write a tile of a head's (T, HS) matrix, with masks.""",
        minutes=30,
        difficulty="hard",
        check=check_attention,
        nudge="Which (query, key) pairs are visible, and what score do the others need?",
        idea="scores = query key^T * SCALE, -inf where the key is after the query; then a softmax, then a product "
        "with value.",
        line="visible =",
        mistakes=(
            plant_mistake(
                "first + tl.arange(0, BLOCK)[:, None] >= tl.arange(0, KEYS)[None, :]",
                "tl.arange(0, KEYS)[None, :] < T",
                "the mask is missing",
            ),
            plant_mistake("tl.exp(scores - tl.max(scores, 1, keep_dims=True))", "tl.exp(scores)", "exp overflows"),
            plant_mistake(" * SCALE,", ",", "not multiplied by SCALE"),
            plant_mistake("tl.sum(p, 1, keep_dims=True)", "tl.sum(p, 0, keep_dims=True)", "over its keys, axis 1"),
        ),
    ),
    Exercise(
        name="triton.4",
        title="Write the backward pass of LayerNorm",
        targets=("phase2_triton.kernels.layernorm:backward_kernel",),
        task="""Compute dx row by row, and sums over all rows for dW and dB. Programs are persistent: program i
        takes the tiles of rows i, i + programs, ..., adds up its part of dW and dB, and writes it into its rows of
        `sums`. The result does not depend on the order of the programs. ATOMIC selects the older version, which
        adds to one row with atomics. The docstring at the top of layernorm.py has the formulas.""",
        minutes=40,
        difficulty="hard",
        check=check_layer_norm_backward,
        nudge="y depends on x in three ways: directly, through the mean, and through rstd.",
        idea="g = dy * weight; dx = rstd * (g - mean(g) - xhat * mean(g * xhat)). Lanes beyond N must be 0 in xhat "
        "and g.",
        line="out = row_rstd",
        mistakes=(
            plant_mistake(" - xhat * (tl.sum(g * xhat, 1) / N)[:, None]", "", "rstd also depends on x"),
            plant_mistake("        sums += program * (1 + HAS_BIAS) * N\n", "", "writes the sums into its own rows"),
            plant_mistake(
                "            out += to_fp32(tl.load(dtotal + offs, mask=mask, other=0.0))",
                "            pass",
                "add its gradient to dx",
            ),
            plant_mistake("dy + offs, mask=mask, other=0.0", "dy + offs, mask=mask", "without `other`"),
            plant_mistake("program * (1 + HAS_BIAS) * N", "program * 2 * N", "outside of its tensors"),
            plant_mistake("tl.atomic_add(sums + cols, dw_sum", "tl.store(sums + cols, dw_sum", "With ATOMIC, it adds"),
        ),
    ),
]
