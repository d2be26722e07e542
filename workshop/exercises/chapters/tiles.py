"""Exercises on kernels in tiles: the matrix product, the order of its programs, a cache, and flash attention."""

from workshop.exercises.checks.tiles import (
    check_flash_attention,
    check_matmul,
    check_query_gradient,
)
from workshop.exercises.exercise import Exercise, plant_mistake

NOTEBOOK = "notebooks/05_triton_attention.py"

EXERCISES = [
    Exercise(
        name="tiles.1",
        title="Multiply two matrices in tiles",
        targets=(f"{NOTEBOOK}:matmul_kernel",),
        task="""Program (i, j) computes tile (i, j) of c = a b, BM x BN numbers. a is (M, K), b is (K, N), both row by
        row, and no size needs to be a multiple of its tile. Walk along K in steps of BK. In each step load a BM x BK
        tile of a and a BK x BN tile of b, each number once, and add their product. Also add BM * BK + BK * BN to
        `counter` with tl.atomic_add in each step: it counts what you load. Tiles are small here, so multiply with
        tl.sum(x[:, :, None] * y[None, :, :], axis=1).""",
        minutes=20,
        difficulty="medium",
        check=check_matmul,
        nudge="How many steps does a loop along K = 7 need with BK = 4, and what do the lanes beyond K contain?",
        idea="Lanes beyond an edge load 0, so they add nothing. Keep the sum in fp32, and store it once, with a mask.",
        line="total += tl.sum",
        mistakes=(
            plant_mistake("total += tl.sum", "total = tl.sum", "of the last step only"),
            plant_mistake("range(0, K, BK)", "range(0, K - K % BK, BK)", "beyond the last full tile"),
            plant_mistake("(rows < M) & (k[None, :] < K)", "rows < M", "reads outside"),
            plant_mistake("total, mask=(rows < M) & (columns < N))", "total)", "writes outside"),
        ),
    ),
    Exercise(
        name="tiles.2",
        title="Write flash attention",
        targets=(f"{NOTEBOOK}:attention_kernel",),
        task="""Program i computes causal attention for queries i * BQ to (i + 1) * BQ of one head. q, k, v and out are
        (T, HS) matrices, and T need not be a multiple of a tile. Loop over tiles of BK keys. Keep for each query the
        largest score, the sum of the exponentials, and the weighted sum of the values. No tile above the diagonal may
        be loaded: the loop ends with the last key that a query of this program sees. Multiply the scores by `scale`.
        RESCALES is for the experiment of the notebook, and True here.""",
        minutes=40,
        difficulty="hard",
        check=check_flash_attention,
        nudge="Which is the last key that the last query of program i sees?",
        idea="end = min(T, (i + 1) * BQ). In a tile, mask the scores with -inf, multiply the old sums by exp(old - "
        "new maximum), and add the new terms.",
        line="for start in range(0, tl.minimum",
        mistakes=(
            plant_mistake("tl.minimum(T, (tl.program_id(0) + 1) * BQ)", "T", "above the diagonal"),
            plant_mistake(
                'tl.full((BQ,), -float("inf"), tl.float32)', "tl.zeros((BQ,), tl.float32)", "before the first"
            ),
            plant_mistake(
                "tl.minimum(T, (tl.program_id(0) + 1) * BQ)",
                "tl.minimum(T, tl.program_id(0) * BQ + 1)",
                "the last keys that its queries see",
            ),
            plant_mistake(
                "rows[:, None] >= keys[None, :], tl.dot", "keys[None, :] < T, tl.dot", "after their own position"
            ),
            plant_mistake("result * decay[:, None]", "result", "relative to the old maximum"),
            plant_mistake(
                "v_tile = tl.load(v + keys[:, None] * HS + channels[None, :], mask=keys[:, None] < T, other=0.0)",
                "v_tile = tl.load(v + keys[:, None] * HS + channels[None, :])",
                "reads outside",
            ),
        ),
    ),
    Exercise(
        name="tiles.3",
        title="Write the gradient of the queries",
        targets=(f"{NOTEBOOK}:query_gradient_kernel",),
        task="""The backward pass of flash attention has no stored weights. Program i computes dq for queries i * BQ to
        (i + 1) * BQ of one head, from q, k, v, the gradient dy of the result, and two numbers per query: logsumexp, and
        delta = dy . y. Loop over tiles of BK keys up to the diagonal. p = exp(score - logsumexp), dp = dy . v,
        ds = p (dp - delta), and dq is the sum of ds k, times `scale`. T need not be a multiple of a tile.""",
        minutes=30,
        difficulty="hard",
        check=check_query_gradient,
        nudge="Which keys have a weight of 0, so that they must not change dq?",
        idea="It is the forward loop without a running maximum: exp(score - logsumexp) is already the weight.",
        line="dscores = weights *",
        mistakes=(
            plant_mistake("weights * (dweights - row_delta[:, None])", "weights * dweights", "delta"),
            plant_mistake(
                "tl.where(rows[:, None] >= keys[None, :], tl.exp(scores - row_logsumexp[:, None]), 0.0)",
                "tl.exp(scores - row_logsumexp[:, None])",
                "after their own position",
            ),
            plant_mistake("tl.dot(dscores, k_tile) * scale", "tl.dot(dscores, k_tile)", "The scale"),
            plant_mistake("tl.minimum(T, (tl.program_id(0) + 1) * BQ)", "T", "end with the diagonal"),
        ),
    ),
]
