# %% [markdown]
# # 5. Inside a GPU: tiled matrix products and flash attention
#
# *60 minutes. Read [notebook 4](04_triton.ipynb) first, for programs and masks, and
# [4b](04b_compiled_kernels.ipynb) for the roofline. You need Linux, but no GPU.*
#
# A GPU can multiply and add much faster than it can read its memory. Two kernels decide the speed of a GPT: the matrix
# product and attention. **How do they compute so much with so few reads?**
#
# You test five claims:
#
# - **A matrix product in tiles of B x B reads 1/B of the bytes that a naive one reads.**
# - **The order of the tiles decides how many of these reads leave the L2 cache.**
# - **Attention needs no T x T matrix: softmax can be computed from left to right, with two numbers per row.**
# - **The backward pass recomputes the attention weights from one saved number per row.**
# - **The interpreter shows wrong numbers, but no races.**
#
# Open `phase2_triton/kernels/attention.py` next to this page. This notebook writes the same kernel in its simplest
# form.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported, so set it first, also on a GPU machine

from collections import OrderedDict

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from workshop.pictures import draw_schedule

torch.manual_seed(1337);

# %% [markdown]
# ## a. The memory of a GPU
#
# You will compute how often a number must be used once it has been read.
#
# A GPU consists of *streaming multiprocessors* (SMs). Each one runs programs, and has its own fast memory. These are
# the **published** numbers of an H100 SXM. They are not measured here:
#
# | memory | size | who uses it | how fast |
# |---|---|---|---|
# | registers | 256 KB per SM, 33 MB in total | one thread | as fast as the arithmetic |
# | shared memory and L1 | 256 KB per SM | one program (a block of threads) | about 10 times device memory |
# | L2 cache | 50 MB | all SMs | faster than device memory |
# | device memory (HBM) | 80 GB | all SMs, and other GPUs through links | 3.35 TB/s |
# | tensor cores, bf16 | - | - | 989 TFLOP/s |
#
# Triton decides what is in registers and in shared memory. You decide the tiles, and the order of the programs.
#
# **Predict first:** a program reads a bf16 number from device memory (2 bytes). In how many multiplications and
# additions must it use this number, so that the tensor cores do not wait?

# %%
BANDWIDTH, PEAK = 3.35e12, 989e12  # bytes and FLOPs per second
print(f"ridge point: {PEAK / BANDWIDTH:.0f} FLOPs per byte, {2 * PEAK / BANDWIDTH:.0f} per bf16 number")


def compute_intensity(M: int, N: int, K: int) -> float:
    """Return the FLOPs per byte of an (M, K) x (K, N) product in bf16 that reads and writes everything once."""
    return 2 * M * N * K / (2 * (M * K + K * N + M * N))


for M, N, K in ((1, 768, 768), (16, 768, 768), (16384, 3072, 768), (16384, 50304, 768)):
    intensity = compute_intensity(M, N, K)
    bound = "memory" if intensity < PEAK / BANDWIDTH else "compute"
    print(f"({M:6}, {K}) x ({K}, {N:6}): {intensity:6.1f} FLOPs per byte, bound by {bound}")

# %% [markdown]
# A product with one row (generating one token) uses every weight that it reads for only one multiplication, so it is
# bound by memory. In training, with 16,384 rows, it is bound by compute, *if* each number is read only once. A naive
# kernel reads each number many times, as the next section shows.
#
# ## b. A matrix product in tiles
#
# You will write the product as a kernel, and count what it reads.
#
# Program (i, j) computes the tile (i, j) of the result, BM x BN. It walks along K, and in each step it loads a BM x BK
# tile of A and a BK x BN tile of B, and multiplies them. The kernel counts the elements that it loads.
#
# **Predict first:** for a (32, 64) x (64, 32) product, how many elements are loaded with tiles of 4 x 4, 8 x 8 and
# 32 x 32? How many with tiles of 1 x 1, the naive version?

# %%
@triton.jit
def matmul_kernel(a, b, c, counter, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    columns = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(a + rows * K + k[None, :], mask=(rows < M) & (k[None, :] < K), other=0.0)
        y = tl.load(b + k[:, None] * N + columns, mask=(k[:, None] < K) & (columns < N), other=0.0)
        total += tl.sum(x[:, :, None] * y[None, :, :], axis=1)  # tl.dot on a GPU: it needs tiles of 16 or more
        tl.atomic_add(counter, BM * BK + BK * BN)
    tl.store(c + rows * N + columns, total, mask=(rows < M) & (columns < N))

# %%
def multiply(a: Tensor, b: Tensor, tile: int) -> tuple[Tensor, int]:
    """Return the product, and the number of elements that its programs load."""
    (M, K), N = a.shape, b.size(1)
    c, counter = torch.empty(M, N), torch.zeros(1, dtype=torch.int64)
    grid = (triton.cdiv(M, tile), triton.cdiv(N, tile))
    matmul_kernel[grid](a, b, c, counter, M, N, K, BM=tile, BN=tile, BK=16)
    return c, int(counter)


a, b = torch.randn(32, 64), torch.randn(64, 32)
print("tile      elements loaded   formula 2 M N K / B   max error")
for tile in (4, 8, 32):
    c, loaded = multiply(a, b, tile)
    error = (c - a @ b).abs().max().item()
    print(f"{tile:2} x {tile:2} {loaded:15,} {2 * 32 * 32 * 64 // tile:21,} {error:14.1e}")
    assert loaded == 2 * 32 * 32 * 64 // tile and error < 1e-4
ragged = multiply(torch.ones(5, 7), torch.ones(7, 3), 4)[0]
assert torch.equal(ragged, torch.full((5, 3), 7.0))  # the masks work

# %% [markdown]
# A tile of B x B uses each loaded element B times, so it loads 1/B of the elements. (A tile of 1 x 1 would load 2 M N K
# = 131,072.) Larger tiles would be better still, but a tile of 128 x 128 sums already fills a quarter of an SM's
# registers. This is the central trade-off of every kernel: **reuse needs space close to the arithmetic.**
#
# ## c. Swizzling: the order of the tiles
#
# You will change only the order of the programs, and read less from device memory.
#
# Programs that run at the same time share the L2 cache. If they need the same tiles of A and B, only the first one
# reads them from device memory. In *row-major* order, programs (0, 0), (0, 1), (0, 2), ... share one row of A, and each
# needs another column of B. *Swizzled* order goes through groups of rows: down a few tiles, then to the next column.

# %%
def order_tiles(rows: int, columns: int, group: int) -> list[tuple[int, int]]:
    """Return the tiles in the order in which programs compute them: `group` rows at a time, column by column."""
    return [
        (row, column)
        for first in range(0, rows, group)
        for column in range(columns)
        for row in range(first, min(first + group, rows))
    ]


for group, name in ((1, "Row-major"), (4, "Swizzled, groups of 4 rows")):
    numbers = {tile: number for number, tile in enumerate(order_tiles(8, 8, group))}
    rows = {f"row {i}": [f"{'●○'[numbers[i, j] >= 16]} {numbers[i, j]}" for j in range(8)] for i in range(8)}
    draw_schedule(rows, f"{name}: order of the tiles (●: the first 16)", "column of tiles", colors="●○")

# %% [markdown]
# **Predict first:** 16 programs run at the same time. How many different rows of A and columns of B do the first 16
# programs need in each order?

# %%
def count_reads(order: list[tuple[int, int]], cached: int) -> int:
    """Return how many panels (rows of A, columns of B) are read, with a cache of the `cached` last used ones."""
    cache: OrderedDict = OrderedDict()
    reads = 0
    for row, column in order:
        for panel in (("A", row), ("B", column)):
            reads += panel not in cache
            cache[panel] = True
            cache.move_to_end(panel)
            if len(cache) > cached:
                cache.popitem(last=False)
    return reads


# %%
first16 = {group: order_tiles(8, 8, group)[:16] for group in (1, 4)}
for group, tiles in first16.items():
    print(f"groups of {group}: {len({i for i, _ in tiles})} rows of A, {len({j for _, j in tiles})} columns of B")
print("\npanels read from device memory for 32 x 32 tiles, by a model of a cache with room for 12 panels:")
for group in (1, 2, 4, 8, 32):
    print(f"groups of {group:2}: {count_reads(order_tiles(32, 32, group), 12):5}")
assert count_reads(order_tiles(32, 32, 8), 12) < count_reads(order_tiles(32, 32, 1), 12) / 3

# %% [markdown]
# The first 16 tiles need 2 + 8 panels (rows of A, columns of B) in row-major order, and 4 + 4 in swizzled order. A
# square region needs the fewest panels. The counts for 32 x 32 tiles come from a **model of a cache**, not from a
# GPU. They show the principle: with groups that are too small, each column of B is read again for each group. With
# groups that are too large, the rows of A do not fit into the cache.
#
# ## d. Flash attention, derived from the online softmax
#
# You will derive an attention that never stores its scores.
#
# For one query, attention computes scores s_j = q k_j, weights exp(s_j - m) with the maximum m, and the weighted mean
# of the values. The problem is m: it is known only after the last key. So the plain version stores all scores: T x T
# for each head.
#
# Suppose that we have seen some of the keys, and know their maximum m, the sum l of exp(s_j - m), and the sum o of
# exp(s_j - m) v_j. Now a tile of new keys arrives, with scores s':
#
# 1. The new maximum is m' = max(m, max s').
# 2. The old terms were computed with m. exp(s_j - m') = exp(s_j - m) exp(m - m'), so all of them need the same factor,
#    exp(m - m'). Multiply l and o by it.
# 3. Add the new terms: exp(s' - m') to l, and exp(s' - m') v' to o.
#
# At the end the result is o / l. This is exact, and no approximation. Each program needs one tile of queries, m, l and
# o. It loads the tiles of keys and values one after another.
#
# **Predict first:** T = 1,024 tokens, heads of 64 channels, bf16. How many bytes of scores does a head store in the
# plain version? How many bytes do q, k, v and the result have together?

# %%
T, HS = 1024, 64
print(f"scores {2 * T * T / 1e6:.1f} MB, q, k, v and the result {2 * 4 * T * HS / 1e6:.2f} MB: {2 * T * T / (8 * T * HS):.0f} times as much")

# %%
@triton.jit
def attention_kernel(q, k, v, out, T, scale, HS: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, RESCALES: tl.constexpr):
    rows, channels = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, HS)
    queries = tl.load(q + rows[:, None] * HS + channels[None, :], mask=rows[:, None] < T, other=0.0)
    maximum, total = tl.full((BQ,), -float("inf"), tl.float32), tl.zeros((BQ,), tl.float32)
    result = tl.zeros((BQ, HS), tl.float32)
    for start in range(0, tl.minimum(T, (tl.program_id(0) + 1) * BQ), BK):  # tiles above the diagonal are skipped
        keys = start + tl.arange(0, BK)
        k_tile = tl.load(k + keys[:, None] * HS + channels[None, :], mask=keys[:, None] < T, other=0.0)
        v_tile = tl.load(v + keys[:, None] * HS + channels[None, :], mask=keys[:, None] < T, other=0.0)
        scores = tl.where(rows[:, None] >= keys[None, :], tl.dot(queries, tl.trans(k_tile)) * scale, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights, decay = tl.exp(scores - new_maximum[:, None]), tl.exp(maximum - new_maximum)
        if RESCALES:
            total, result = total * decay, result * decay[:, None]
        total, result = total + tl.sum(weights, 1), result + tl.dot(weights, v_tile)
        maximum = new_maximum
    tl.store(out + rows[:, None] * HS + channels[None, :], result / total[:, None], mask=rows[:, None] < T)

# %%
def attend(q: Tensor, k: Tensor, v: Tensor, rescales: bool = True) -> Tensor:
    """Return causal attention of one head: (T, HS) queries, keys and values."""
    (T, HS), out = q.shape, torch.empty_like(q)
    attention_kernel[(triton.cdiv(T, 16),)](q, k, v, out, T, HS**-0.5, HS=HS, BQ=16, BK=16, RESCALES=rescales)
    return out


def compute_exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.double()[None], k.double()[None], v.double()[None], is_causal=True)[0]


for T in (16, 50, 128):  # 50 is not a multiple of the tile
    q, k, v = torch.randn(3, T, 32)
    error = (attend(q, k, v) - compute_exact(q, k, v)).abs().max().item()
    print(f"T = {T:3}: max error {error:.1e}")
    assert error < 1e-5

# %% [markdown]
# The kernel is exact up to rounding, also for a T that is not a multiple of the tile, and it never writes scores to
# device memory. The mask hides later keys within a tile. The bound of the loop skips all tiles above the diagonal,
# about half of the work. The kernel of phase 2 is this one, with a backward pass (section e).
#
# ### Something broken on purpose
#
# Leave out step 2: do not rescale the old terms.
#
# **Predict first:** is the result wrong for T = 16? For T = 128? For which rows?

# %%
for T in (16, 128):
    q, k, v = torch.randn(3, T, 32)
    errors = (attend(q, k, v, rescales=False) - compute_exact(q, k, v)).abs().amax(1)
    print(f"T = {T:3}: max error {errors.max():.1e}; rows with an error above 1e-5: {(errors > 1e-5).sum()} of {T}")
    assert (errors[:16] < 1e-5).all() and (T == 16 or (errors[16:] > 1e-5).float().mean() > 0.5)

# %% [markdown]
# Rows 0 to 15 are right, because they have only one tile of keys. Most other rows are wrong: those in which a later
# tile raises the maximum. A test with short sequences would pass. This is why every kernel of this repository is tested
# with several tiles, and with sizes that are not multiples of a tile. (`bugs.4` is such a bug.)
#
# ## e. The backward pass: recompute the attention weights
#
# You will derive the backward pass, and write the kernel for the gradient of the queries.
#
# For one query, let p be its softmax weights, s its scores, y = sum of p_j v_j its result, and dy the gradient of y.
# The chain rule gives the gradient of the weights, dp_j = dy · v_j. Softmax mixes all scores of a row:
#
# ```
# ds_j = p_j (dp_j - D)        D = sum over i of p_i dp_i
# dq   = scale * sum over j of ds_j k_j
# dk_j = scale * sum over queries of ds_j q        dv_j = sum over queries of p_j dy
# ```
#
# Two problems remain. A tile of keys does not have the full row that D needs. But D = sum of p_i (dy · v_i) = dy · y,
# one number per query, which is known before the loop. And the weights p were never stored. The forward pass saves
# one number per query, the log-sum-exp L = log(sum of exp(s_j)). Then p_j = exp(s_j - L), for any tile, without a
# running maximum.
#
# **Predict first:** a forward pass needs two matrix products per tile (q k and p v). How many does the backward pass
# need, if one kernel computes dq, and another one dk and dv?

# %% answer="query_gradient_kernel"
@triton.jit
def query_gradient_kernel(q, k, v, dy, logsumexp, delta, dq, T, scale, HS: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    """Compute the gradient of the queries of one tile."""
    rows, channels = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, HS)
    inside, places = rows[:, None] < T, rows[:, None] * HS + channels[None, :]
    queries, dys = tl.load(q + places, mask=inside, other=0.0), tl.load(dy + places, mask=inside, other=0.0)
    row_logsumexp = tl.load(logsumexp + rows, mask=rows < T, other=0.0)
    row_delta = tl.load(delta + rows, mask=rows < T, other=0.0)
    result = tl.zeros((BQ, HS), tl.float32)
    for start in range(0, tl.minimum(T, (tl.program_id(0) + 1) * BQ), BK):
        keys = start + tl.arange(0, BK)
        k_tile = tl.load(k + keys[:, None] * HS + channels[None, :], mask=keys[:, None] < T, other=0.0)
        v_tile = tl.load(v + keys[:, None] * HS + channels[None, :], mask=keys[:, None] < T, other=0.0)
        scores = tl.dot(queries, tl.trans(k_tile)) * scale
        weights = tl.where(rows[:, None] >= keys[None, :], tl.exp(scores - row_logsumexp[:, None]), 0.0)
        dweights = tl.dot(dys, tl.trans(v_tile))
        dscores = weights * (dweights - row_delta[:, None])
        result += tl.dot(dscores, k_tile) * scale
    tl.store(dq + places, result, mask=inside)

# %%
def compute_query_gradient(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of (T, HS) queries of causal attention."""
    (T, HS), dq = q.shape, torch.empty_like(q)
    scores = (q @ k.T * HS**-0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    logsumexp, delta = scores.logsumexp(1), (dy * attend(q, k, v)).sum(1)  # phase 2 saves logsumexp and y
    query_gradient_kernel[(triton.cdiv(T, 16),)](q, k, v, dy, logsumexp, delta, dq, T, HS**-0.5, HS=HS, BQ=16, BK=16)
    return dq


for T in (16, 50, 128):
    q, k, v, dy = torch.randn(4, T, 32)
    exact_q = q.double().requires_grad_()
    F.scaled_dot_product_attention(exact_q[None], k.double()[None], v.double()[None], is_causal=True)[0].backward(dy.double())
    error = (compute_query_gradient(q, k, v, dy) - exact_q.grad).abs().max().item()
    print(f"T = {T:3}: max error of dq {error:.1e}")
    assert error < 1e-5

# %% [markdown]
# This kernel needs three products per tile: the scores, dweights and dq. The kernel for dk and dv recomputes the
# scores and dweights, and needs two more: seven in total, where one kernel for all three gradients would need five.
# But dq is a sum over keys, and dk and dv are sums over queries. In one kernel, one of them would need atomic
# additions, and its last digits would change from run to run (notebook 4, section g). Phase 2 therefore has two
# kernels.
#
# ## f. What the interpreter cannot show
#
# You will write a kernel that is wrong on every GPU, and right in the interpreter.
#
# **Predict first:** 64 programs add their element to one sum. They load the sum, add, and store it. What is the result
# in the interpreter? On a GPU?

# %%
@triton.jit
def racing_sum_kernel(x, out):
    value = tl.load(x + tl.program_id(0))
    tl.store(out, tl.load(out) + value)  # the bug: between load and store, another program may store its own sum


x, out = torch.ones(64), torch.zeros(1)
racing_sum_kernel[(64,)](x, out)
print(f"sum of 64 ones in the interpreter: {out.item():g}")
assert out.item() == 64

# %% [markdown]
# The interpreter runs one program after the other, so the sum is right. On a GPU programs run at the same time, and
# most additions are lost. The interpreter also hides:
#
# | what | why | how this repository checks it |
# |---|---|---|
# | races | programs run one after the other | no kernel writes where another one writes; sums go through partial results in a fixed order |
# | speed | NumPy computes | bytes and FLOPs by formula; `make bench NAME=kernels` on a GPU |
# | registers and spills | there are none | compiled ahead of time for real architectures (notebook 4b, section a) |
# | tensor cores | products are computed in fp32 | the machine code is searched for their instructions |
# | serialized `wgmma` | on an H100, `wgmma` instructions overlap, unless ptxas makes each one wait for the one before it. With Triton 3.6 it does so in the backward pass of attention (dk and dv) with three stages, and not with two | [`make check-ptx`](../docs/measuring.md#compiled-code-will-it-run-on-a-gpu) reads ptxas's warnings |
# | fp64 constants | Python floats look the same | the compiled code is searched for fp64 instructions |
#
# ## To take home
#
# 1. A number that is read from device memory must be used several hundred times, or the tensor cores wait.
# 2. A tile of B x B uses each loaded element B times.
# 3. Reuse needs space: registers and shared memory limit the size of a tile.
# 4. The order of the programs decides what is in the L2 cache. Square regions share the most data.
# 5. Softmax needs the maximum; the online softmax corrects the earlier terms when the maximum grows.
# 6. Flash attention keeps m, l and o for each query, and stores no scores.
# 7. It is exact. It does more arithmetic and moves far fewer bytes.
# 8. A missing rescaling is right for short sequences: test with several tiles.
# 9. The backward pass needs the log-sum-exp and dy · y of each row. With them, every tile can be computed
#    independently.
# 10. The interpreter shows wrong numbers, but no races, and no speed.
# 11. First write a reference, then count the bytes, then write the kernel, and then measure the time.
#
# ## Exercises
#
# A program checks these exercises: `make exercise N=tiles.1` writes the task into `work/`.
#
# | exercise | task |
# |---|---|
# | `tiles.1` | multiply two matrices in tiles |
# | `tiles.2` | write flash attention |
# | `tiles.3` | write the gradient of its queries |
# | `triton.2` | add a tile to an online softmax |
# | `triton.3` | write causal attention over all keys |
# | `bugs.4` | fix an attention that is right only for short sequences |
#
# **1. Rectangular tiles.** Predict first: a tile has BM x BN sums, and the registers allow 16,384 of them. How many
# elements does the product load for 128 x 128, 256 x 64 and 512 x 32? Check it with the counter and smaller tiles.
#
# <details><summary>Hint</summary>
#
# A program loads (BM + BN) K elements, and there are M N / (BM BN) programs: M N K (1/BM + 1/BN). For a given area, a
# square is best.
#
# </details>
