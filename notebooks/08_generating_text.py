# %% [markdown]
# # 8. Generating text with a model that is spread over ranks
#
# *20 minutes. Read [notebook 6](06_fsdp.ipynb) first, for FSDP and its all-gathers.*
#
# Suppose a model has 20 billion parameters, and you have two GPUs with 40 GB each. In bfloat16 the weights take 40 GB,
# so one
# GPU has no memory left for activations and a key-value cache. Sharding solves this. Phase 3 shards models for
# training. **Is FSDP also a good way to generate text?**
#
# You will measure what one generated token costs with FSDP and with tensor parallelism. Then you give FSDP more
# sequences at a time, and break tensor parallelism on purpose. Keep `evaluation/tensor_parallel.py` and
# `evaluation/generation.py` open next to this notebook. No GPU is needed.

# %%
import torch

from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.costs import storage_bytes
from measure.ledger import CollectiveCounter
from nanoGPT.model import GPT, GPTConfig
from evaluation import costs, gpt
from evaluation.generation import Generator, Sampling, Task
from workshop.pictures import draw_who_holds_what
from workshop.ranks import run_on_ranks

# %%
shape = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=256, bias=False)
P, L, C, V = shape.count_params(), shape.n_layer, shape.n_embd, shape.vocab_size
print(f"{P:,} parameters, {4 * P / 1e6:.2f} MB in float32")


def create_model() -> GPT:
    """Return a model with random weights. They are larger than at the start of training, so that its text varies."""
    model = GPT(shape)
    model.init_weights(seed=1)
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param += 0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
    return model.eval()


draw_who_holds_what(
    {"at rest": ["0.", ".1"], "while FSDP computes": ["01", "01"], "while tensor parallelism computes": ["0.", ".1"]},
    "The two halves of a layer's weight on two ranks",
)

# %% [markdown]
# ## a. What one token costs
#
# To generate a token, the model runs once for one position. Keys and values of the earlier positions are cached, but
# every weight is needed.
#
# - FSDP stores half of each layer on each of two ranks, and all-gathers a layer just before it computes.
# - Tensor parallelism stores half of each layer too: two of the four heads, and half of the MLP. Each rank computes
#   with its half. An all-reduce after the attention and another one after the MLP add up the partial results.
#
# **Predict first:** there are P parameters of 4 bytes and two ranks. How many bytes does a rank send per token
# with FSDP? With tensor parallelism, how many numbers are in one all-reduce, and how many all-reduces are there?

# %%
def measure_round(spread: str, slots: int) -> tuple[int, float, dict]:
    """Return a rank's bytes of weights, the bytes that it sends in one round, and the collectives of the round."""
    run = create_runtime("cpu", "float32")
    full = create_model()
    model = gpt.spread_gpt(shape, dict(full.named_parameters()), spread, run)
    wrapped, counter = gpt.GptModel(model, V, run.device), CollectiveCounter()
    with torch.no_grad(), counter:
        wrapped.next_logits(torch.zeros(slots, 1, dtype=torch.int64), wrapped.new_cache(slots, 1), None)
    calls = {kind: row["calls"] for (kind, _), row in counter.rows.items()}
    return storage_bytes(model.parameters()), sum(row["ring_bytes"] for row in counter.rows.values()), calls


for spread in ("fsdp", "tp"):
    weights, sent, calls = run_on_ranks(measure_round, 2, spread, 1, show=False)[0]
    predicted = costs.predict(spread, costs.measure_gpt(shape), ranks=2, slots=1, tokens=64, itemsize=4)
    print(f"{spread:5} weights per rank {weights / 1e6:.2f} MB, communication per token {sent / 1e6:.4f} MB: {calls}")
    assert sent == predicted.network and weights == predicted.weights

# %% [markdown]
# FSDP moves half of the model for every token: P x 4 x 1/2 bytes. Tensor parallelism moves 2 L + 1 vectors of C numbers
# (one for the embedding, whose rows are divided as well) and the logits. Both ways store almost the same weights.
#
# The formulas are in `evaluation/costs.py`, and the ledger counts exactly these bytes. They also give the memory
# and the communication of the model with 20 billion parameters, in bfloat16:

# %%
large = GPTConfig(n_layer=44, n_head=64, n_embd=6144, block_size=2048, vocab_size=50304, bias=False)
for spread in costs.SPREADS:
    predicted = costs.predict(spread, costs.measure_gpt(large), ranks=2, slots=1, tokens=2048, itemsize=2)
    print(f"{spread:8} {predicted.memory / 1e9:5.1f} GB per rank, {predicted.network / 1e9:.4f} GB sent per token")

# %% [markdown]
# `offload` is FSDP whose shards stay in the CPU's memory.
#
# ## b. One all-gather for many sequences
#
# FSDP has one advantage: the weights that a rank has gathered work for any number of sequences. Different ranks can
# even run different sequences. All ranks must run the model the same number of times, because the all-gathers need all
# ranks. `Generator` therefore works in *rounds*: in each round, every rank runs its model once.
#
# **Predict first:** 16 sequences of 12 tokens each, on two ranks with FSDP. How many rounds does it take with 1, 2 and
# 8 sequences per rank? How many bytes does a rank send per token?

# %%
def generate(spread: str, slots: int, sequences: int) -> tuple[dict[int, list[int]], int, float]:
    """Return the generated tokens of each sequence, the number of rounds, and the bytes that this rank sent."""
    run = create_runtime("cpu", "float32")
    full = create_model()
    model = gpt.GptModel(gpt.spread_gpt(shape, dict(full.named_parameters()), spread, run), V, run.device)
    generator, counter = Generator(model, run, slots, 15, Sampling(), spread == "tp"), CollectiveCounter()
    tasks = [Task(number, 0, [number, 1, 2], 12) for number in range(sequences)]
    with counter:
        ids = {result.problem: result.ids for results in generator.run(tasks) for result in results}
    return ids, generator.rounds, sum(row["ring_bytes"] for row in counter.rows.values())


reference = None
for slots in (1, 2, 8):
    ids, rounds, sent = run_on_ranks(generate, 2, "fsdp", slots, 16, show=False)[0]
    reference = reference or ids
    assert ids == reference
    print(f"{slots} per rank: {rounds:3} rounds, {sent / (16 * 12) / 1e6:.3f} MB per generated token")

# %% [markdown]
# With 8 sequences per rank, one all-gather of a layer serves 16 tokens. The three cases generate the same tokens. (A rank
# reads each prompt in a separate round, which also gives the first token. The last case therefore needs 8 + 11 rounds.)
#
# ## c. Something broken on purpose
#
# In each block, the last layer of attention and the last one of the MLP are *row-parallel*: each rank has the weights
# of some of the inputs, and computes a part of every output. An all-reduce adds up these parts. **Predict first:** what
# happens to the text if we leave out the all-reduce after each MLP? Does the program fail? Do the two ranks generate
# the same tokens?

# %%
def generate_without_reduction(is_broken: bool) -> tuple[list[int], bool]:
    """Return the tokens that this rank would choose, and whether all ranks choose the same."""
    run = create_runtime("cpu", "float32")
    full = create_model()
    model = gpt.spread_gpt(shape, dict(full.named_parameters()), "tp", run)
    for block in model.blocks if is_broken else []:
        block.mlp.c_proj._forward_hooks.clear()  # the all-reduce
    text = torch.arange(8)[None]
    with torch.no_grad():
        for _ in range(6):
            text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], dim=1)
    tokens = text[0, 8:].tolist()
    return tokens, all(other == tokens for other in run.gather(tokens))


# %%
for is_broken in (False, True):
    for rank, (tokens, is_same) in enumerate(run_on_ranks(generate_without_reduction, 2, is_broken, show=False)):
        name, agreement = "broken" if is_broken else "correct", "the same" if is_same else "DIFFERENT"
        print(f"{name:8} rank {rank}: {tokens}, {agreement} on all ranks")

# %% [markdown]
# Nothing fails, and the text is wrong. The two ranks even agree: after the first MLP their activations differ, but the
# head divides the vocabulary, and the all-gather gives both ranks the same logits, half from each. So agreement between
# ranks proves nothing here. The tests compare the tokens with those of one rank.
#
# ## Exercises
#
# 1. Four ranks instead of two: what does a token cost in both ways? Compare the ledger with the formulas.
# 2. A mixture of experts runs only some of its experts for a token. Which of the two ways can make use of that?
# 3. Give every sequence a prompt of 40 tokens. Which part of a run with FSDP is now cheap, and which is not?
#
# ## To take home
#
# - Training with FSDP all-gathers the weights for a whole batch; generation does so for every token.
# - FSDP moves P x (N-1)/N parameters per round, whatever the number of sequences.
# - So use FSDP with many sequences at a time, and give each rank different ones.
# - All ranks must run the model the same number of times: they work in rounds.
# - Tensor parallelism divides each layer. Weights stay where they are.
# - Column-parallel layers need no communication; row-parallel layers need an all-reduce of activations.
# - The two all-reduces per block are small. Their latency matters, not the bandwidth.
# - Tensor parallelism needs a number of ranks that divides the heads.
# - Key-value caches are divided with the heads.
# - `make evaluate` supports both ways (and FSDP with CPU offload), and chooses the first one that fits.
