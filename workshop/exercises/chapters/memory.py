"""Exercises on the planner's formulas: parameters, FLOPs and communication."""

from workshop.exercises.checks.memory import (
    check_count,
    check_flops,
    check_ring_bytes,
    check_tokens_to_hide,
)
from workshop.exercises.exercise import Exercise, plant_mistake

EXERCISES = [
    Exercise(
        name="memory.1",
        title="Count the parameters of GPT-2",
        targets=("nanoGPT.costs:count_gpt2_params",),
        task="""To find the largest model, the planner counts the parameters of many models, and builds none of them.
        Return the number of parameters of a GPT from n_layer, n_embd, vocab_size, block_size and bias. The token
        embedding and the head are tied.""",
        minutes=10,
        difficulty="easy",
        check=check_count,
        nudge="Which matrices does a block have? Write each as a multiple of C * C.",
        idea="c_attn 3, c_proj 1, c_fc 4 and c_proj 4 times C * C; then embeddings, LayerNorms and biases.",
        line="block = 12",
        mistakes=(
            plant_mistake(
                "(shape.vocab_size + shape.block_size) * C", "(2 * shape.vocab_size + shape.block_size) * C", "tied"
            ),
            plant_mistake(
                "(shape.vocab_size + shape.block_size) * C", "shape.vocab_size * C", "the position embedding is missing"
            ),
            plant_mistake("11 * C if shape.bias", "9 * C if shape.bias", "with biases"),
        ),
    ),
    Exercise(
        name="memory.2",
        title="Count the FLOPs per token",
        targets=("nanoGPT.model:GPTConfig.flops_per_token",),
        task="""Model FLOPs utilization compares a run with the peak of the device. Return the FLOPs of forward and
        backward pass per token, for the matrix products with N parameters and for attention over T = block_size
        tokens.""",
        minutes=10,
        difficulty="easy",
        check=check_flops,
        nudge="A matrix product has 2 FLOPs per weight and token. How many products does the backward pass add?",
        idea="6 N, where N excludes the position embedding, plus 12 L C T for the scores and their product with v.",
        line="return 6 * params",
        mistakes=(
            plant_mistake(
                " + 12 * self.n_layer * self.n_embd * self.block_size",
                "",
                "The attention scores are missing",
            ),
            plant_mistake(" - self.block_size * self.n_embd", "", "its rows are looked up"),
            plant_mistake("6 * params + 12", "2 * params + 4", "only the forward"),
        ),
    ),
    Exercise(
        name="memory.3",
        title="Predict the volume of a collective",
        targets=("nanoGPT.costs:ring_bytes",),
        task="""The ledger and the planner compare strategies by the bytes that a rank sends with the ring
        algorithm. Return them for a full tensor of `tensor_bytes` bytes. For a
        broadcast, return the mean over the ranks: N - 1 ranks send the full tensor, and the last rank sends nothing.
        (The exercises collectives.1 to collectives.3 implement the ring.)""",
        minutes=5,
        difficulty="easy",
        check=check_ring_bytes,
        nudge="Which part of the tensor does a rank not have to send?",
        idea="(N-1)/N of the tensor, and twice as much for an all-reduce.",
        line="return (2 if",
        mistakes=(
            plant_mistake('(2 if kind == "all-reduce" else 1)', "1", "sends twice as much as either"),
            plant_mistake('(2 if kind == "all-reduce" else 1)', "2", "Only an all-reduce sends twice as much"),
            plant_mistake(" * (ranks - 1) / ranks", "", "You count the full tensor"),
        ),
    ),
    Exercise(
        name="memory.4",
        title="Predict when communication is hidden",
        targets=("nanoGPT.costs:tokens_to_hide",),
        task="""While a unit computes, FSDP all-gathers the next one. Every token needs `computed` FLOPs per parameter,
        and every parameter has `moved` bytes on the link, whatever the number of tokens. Return the number of tokens
        per rank and micro-batch for which both take equally long. How many does an H100 need over NVLink (400e12
        FLOP/s, 400e9 bytes/s), and how many between nodes with one adapter of 50e9 bytes/s each?""",
        minutes=10,
        difficulty="medium",
        check=check_tokens_to_hide,
        nudge="Write down both times for one parameter: on the link, and in the matrix products.",
        idea="moved / bandwidth seconds on the link; computed * tokens / flops seconds of computation.",
        line="return moved",
        mistakes=(
            plant_mistake("* flops / computed", "* computed / flops", "Both must take equally long"),
            plant_mistake(" / computed", "", "Both must take equally long"),
            plant_mistake("moved / bandwidth", "moved * bandwidth", "Both must take equally long"),
        ),
    ),
]
