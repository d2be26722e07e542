"""The activations that a forward pass of `GPT` saves for the backward pass: every tensor, its bytes, and its use.

    for row in saved_activations(shape, batch_size=8, tokens=1024):
        print(f"{row.bytes:>13,} B  {row.name} {row.shape}: {row.why}")
    activation_bytes(shape, 8, 1024, mode="selective")       # the full model

There are `B` sequences of `T` tokens, `C` channels in `nh` heads, and `V` rows of vocabulary. Without dropout a block
saves 16 tensors of (B, T, C). With `full` checkpointing it saves 1, its input; with `selective` it saves 11, its input
and the outputs of its matrix products and of attention. The list is not an estimate: it was recorded with
`torch.autograd.graph.saved_tensors_hooks`, each storage once, and `tests/measure/test_memory.py` compares its sums
with the bytes that `measure/tracker.py` measures. It is valid for the uncompiled model on a CPU, with parameters
in `dtype` (FSDP all-gathers them in this dtype; autocast would save additional copies). Dropout selects one of two
implementations of attention:

    dropout 0    one fused kernel: it saves its inputs, its output, and one log-sum-exp per row of scores
    dropout > 0  separate matrix products: they save three (B, nh, T, T) matrices in fp32, for every dtype

On a GPU torch has fused kernels for both cases, and dropout masks with one byte per element; these are not measured
here. The list omits the token ids and targets, which exist in every mode. It also omits the generator state, 5,056
bytes that each checkpoint saves for its dropout, because no operator returns it.
"""

from dataclasses import dataclass

import torch

from nanoGPT.model import GPTConfig
from phase3_fsdp.activation_checkpointing import select_checkpointed_blocks

ALL_MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that is saved for the backward pass, and the checkpointing modes that save it."""

    name: str
    shape: str
    bytes: int
    why: str
    modes: tuple[str, ...] = ("none",)


def saved_activations(
    shape: GPTConfig, batch_size: int, tokens: int, dtype: torch.dtype = torch.float32, mode: str = "none"
) -> list[SavedTensor]:
    """Return the tensors that one block saves, in the order in which its forward pass computes them.

    Args:
        shape: provides n_embd, n_head and dropout.
        batch_size: B. (With dropout in fp32 and B = 1, v is a view and not a copy. The view keeps c_attn's output
            alive, which needs 2 C more per token.)
        tokens: T.
        dtype: of the parameters and the activations.
        mode: none, full (saves the block's input), or selective (also the outputs of matrix products and of attention).
    """
    x, stats = batch_size * tokens * shape.n_embd * dtype.itemsize, 2 * batch_size * tokens * dtype.itemsize
    btc, matmul_modes = "(B, T, C)", ("none", "selective")
    dropout_mask = [SavedTensor("a dropout mask", btc, x, "dropout's backward")]
    rows = [
        SavedTensor("the block's input", btc, x, "ln_1's backward, and the start of a recomputation", ALL_MODES),
        SavedTensor("ln_1's mean and rstd", "2 (B, T, 1)", stats, "ln_1's backward"),
        SavedTensor("ln_1's output", btc, x, "the gradient of c_attn's weight"),
        *saved_attention_activations(shape, batch_size, tokens, dtype),
        SavedTensor("attn.c_proj's output", btc, x, "the recomputation (output of a matrix product)", ("selective",)),
        *(dropout_mask if shape.dropout else []),
        SavedTensor("x + attention", btc, x, "ln_2's backward"),
        SavedTensor("ln_2's mean and rstd", "2 (B, T, 1)", stats, "ln_2's backward"),
        SavedTensor("ln_2's output", btc, x, "the gradient of c_fc's weight"),
        SavedTensor("c_fc's output", "(B, T, 4C)", 4 * x, "GELU's backward", matmul_modes),
        SavedTensor("GELU's output", "(B, T, 4C)", 4 * x, "the gradient of mlp.c_proj's weight"),
        SavedTensor("mlp.c_proj's output", btc, x, "the recomputation (output of a matrix product)", ("selective",)),
        *(dropout_mask if shape.dropout else []),
    ]
    return [row for row in rows if mode in row.modes]


def saved_attention_activations(
    shape: GPTConfig, batch_size: int, tokens: int, dtype: torch.dtype
) -> list[SavedTensor]:
    """Return the tensors that attention saves: by one fused kernel, or with dropout by separate matrix products."""
    elements, rows = batch_size * tokens * shape.n_embd, batch_size * shape.n_head * tokens
    x, bhtc, bhtt = elements * dtype.itemsize, "(B, nh, T, C / nh)", "(B, nh, T, T)"
    name, why = "attention's output", "the gradient of c_proj's weight"
    if not shape.dropout:
        both = ("none", "selective")
        return [
            SavedTensor("c_attn's output", "(B, T, 3C)", 3 * x, "attention's backward (q, k, v)", both),
            SavedTensor("softmax's log-sum-exp", "(B, nh, T)", 4 * rows, "attention's backward", both),
            SavedTensor(name, "(B, T, C)", x, why, both),
        ]
    return [
        SavedTensor(
            "c_attn's output", "(B, T, 3C)", 3 * x, "the recomputation (output of a matrix product)", ("selective",)
        ),
        SavedTensor("q, scaled", f"{bhtc} fp32", 4 * elements, "the gradient of k"),
        SavedTensor("k, scaled", f"{bhtc} fp32", 4 * elements, "the gradient of q"),
        SavedTensor("softmax", f"{bhtt} fp32", 4 * rows * tokens, "softmax's backward"),
        SavedTensor("attention's dropout mask", f"{bhtt} fp32", 4 * rows * tokens, "dropout's backward"),
        SavedTensor("softmax after dropout", f"{bhtt} fp32", 4 * rows * tokens, "the gradient of v"),
        SavedTensor("v", f"{bhtc} fp32", 4 * elements, "the gradient of softmax"),
        SavedTensor(name, "(B, T, C)", x, why),
    ]


def saved_activations_outside_blocks(
    shape: GPTConfig, batch_size: int, tokens: int, dtype: torch.dtype = torch.float32
) -> list[SavedTensor]:
    """Return the tensors that the embeddings, the last LayerNorm, the head and the loss save in every mode."""
    x, logits = batch_size * tokens * shape.n_embd * dtype.itemsize, batch_size * tokens * shape.vocab_size
    stats = 2 * batch_size * tokens * dtype.itemsize
    mask = SavedTensor("the embedding's dropout mask", "(B, T, C)", x, "dropout's backward", ALL_MODES)
    return [
        SavedTensor("positions", "(T,) int64", 8 * tokens, "the gradient of wpe: the rows that get one", ALL_MODES),
        *([mask] if shape.dropout else []),
        SavedTensor("the last block's output", "(B, T, C)", x, "ln_f's backward", ALL_MODES),
        SavedTensor("ln_f's mean and rstd", "2 (B, T, 1)", stats, "ln_f's backward", ALL_MODES),
        SavedTensor("ln_f's output", "(B, T, C)", x, "the gradient of lm_head's weight", ALL_MODES),
        SavedTensor("log-probabilities", "(B T, V) fp32", 4 * logits, "the loss's backward", ALL_MODES),
    ]


def activation_bytes(
    shape: GPTConfig, batch_size: int, tokens: int, dtype: torch.dtype = torch.float32, mode: str = "none"
) -> int:
    """Return the bytes of activations that the full model has saved at the end of its forward pass.

    Args:
        mode: a value of `--fsdp_activation_checkpointing`: none, full, selective, every_2, every_3, ...

    Raises:
        ConfigError: the mode is not one of these.
    """
    checkpointed_mode = "selective" if mode == "selective" else "full"
    blocks = select_checkpointed_blocks(mode, shape.n_layer)
    block_modes = [checkpointed_mode if i in blocks else "none" for i in range(shape.n_layer)]
    rows = saved_activations_outside_blocks(shape, batch_size, tokens, dtype)
    for block_mode in block_modes:
        rows += saved_activations(shape, batch_size, tokens, dtype, block_mode)
    return sum(row.bytes for row in rows)
