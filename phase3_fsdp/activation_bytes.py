"""What a forward of `GPT` keeps for its backward: every tensor, its bytes, and why.

    for row in kept_by_block(shape, batch_size=8, tokens=1024):
        print(f"{row.bytes:>13,} B  {row.name} {row.shape}: {row.why}")
    activation_bytes(shape, 8, 1024, mode="selective")       # the whole model

`B` sequences of `T` tokens, `C` channels in `nh` heads, `V` rows of vocabulary. Without dropout a block keeps 16
tensors of (B, T, C). One that is checkpointed keeps 1, its input; and with its products 10. Nothing is estimated: the
list was read off `torch.autograd.graph.saved_tensors_hooks`, each storage once, and `tests/baseline/test_memory.py`
compares its sums with what `nanoGPT/memory/tracker.py` counts. It holds for the model as it is, uncompiled, on a CPU,
with parameters in `dtype` (FSDP gathers them so; autocast keeps copies beside). Of attention there are two kinds;
dropout tells which:

    dropout 0    one fused kernel, which keeps what it was given, its output, and a logarithm for each row
    dropout > 0  plain matrix products, which keep three (B, nh, T, T) matrices in fp32, whatever the dtype

On a GPU torch has fused kernels for both, and masks of one byte an element: not measured here. Not in the list, since
they are there in every mode: token ids and targets; nor the state of the generator, 5,056 bytes that each checkpoint
saves for its dropout, since no operator returns them.
"""

from dataclasses import dataclass

import torch

from nanoGPT.model import GPTConfig
from phase3_fsdp.activation_checkpointing import checkpointed

ALWAYS = ("none", "selective", "full")


@dataclass(frozen=True)
class Kept:
    """A tensor that stays alive until the backward, and the modes of checkpointing in which it does."""

    name: str
    shape: str
    bytes: int
    why: str
    modes: tuple[str, ...] = ("none",)


def saved_activations(
    shape: GPTConfig, batch_size: int, tokens: int, dtype: torch.dtype = torch.float32, mode: str = "none"
) -> list[Kept]:
    """The tensors that one block keeps, in the order in which its forward makes them.

    Args:
        shape: its n_embd, n_head and dropout.
        batch_size: B. (With dropout, in fp32, the v of one sequence is no copy: it keeps c_attn's output, 2 C more.)
        tokens: T.
        dtype: of the parameters, and so of the activations.
        mode: none, or what is kept when the block is computed again: full (its input), or selective (its input and the
            results of its products).
    """
    x, stats = batch_size * tokens * shape.n_embd * dtype.itemsize, 2 * batch_size * tokens * dtype.itemsize
    btc, product = "(B, T, C)", ("none", "selective")
    dropped = [Kept("a dropout mask", btc, x, "says what to scale and what to drop in the gradient")]
    rows = [
        Kept("the block's input", btc, x, "ln_1 normalises it again; all else can be computed from it", ALWAYS),
        Kept("ln_1's mean and rstd", "2 (B, T, 1)", stats, "to normalise it again"),
        Kept("ln_1's output", btc, x, "the gradient of c_attn's weight"),
        *kept_by_attention(shape, batch_size, tokens, dtype),
        Kept("attn.c_proj's output", btc, x, "a product; by itself the addition keeps nothing", ("selective",)),
        *(dropped if shape.dropout else []),
        Kept("x + attention", btc, x, "ln_2 normalises it again"),
        Kept("ln_2's mean and rstd", "2 (B, T, 1)", stats, "to normalise it again"),
        Kept("ln_2's output", btc, x, "the gradient of c_fc's weight"),
        Kept("c_fc's output", "(B, T, 4C)", 4 * x, "GELU's derivative is taken there", product),
        Kept("GELU's output", "(B, T, 4C)", 4 * x, "the gradient of mlp.c_proj's weight"),
        Kept("mlp.c_proj's output", btc, x, "a product; by itself the addition keeps nothing", ("selective",)),
        *(dropped if shape.dropout else []),
    ]
    return [row for row in rows if mode in row.modes]


def kept_by_attention(shape: GPTConfig, batch_size: int, tokens: int, dtype: torch.dtype) -> list[Kept]:
    """What attention keeps between c_attn and c_proj, by the fused kernel, or with dropout by matrix products."""
    elements, rows = batch_size * tokens * shape.n_embd, batch_size * shape.n_head * tokens
    x, bhtc, bhtt = elements * dtype.itemsize, "(B, nh, T, C / nh)", "(B, nh, T, T)"
    out = Kept("attention's output", "(B, T, C)", x, "the gradient of c_proj's weight")
    if not shape.dropout:
        return [
            Kept("c_attn's output", "(B, T, 3C)", 3 * x, "q, k and v are views of it", ("none", "selective")),
            Kept("logarithms of softmax's sums", "(B, nh, T)", 4 * rows, "to compute each tile's softmax again"),
            out,
        ]
    return [
        Kept("c_attn's output", "(B, T, 3C)", 3 * x, "a product, of which the scaled copies are made", ("selective",)),
        Kept("q, scaled", f"{bhtc} fp32", 4 * elements, "the gradient of k"),
        Kept("k, scaled", f"{bhtc} fp32", 4 * elements, "the gradient of q"),
        Kept("softmax", f"{bhtt} fp32", 4 * rows * tokens, "its derivative is made of its output"),
        Kept("attention's dropout mask", f"{bhtt} fp32", 4 * rows * tokens, "says which weights were dropped"),
        Kept("softmax after dropout", f"{bhtt} fp32", 4 * rows * tokens, "the gradient of v"),
        Kept("v", f"{bhtc} fp32", 4 * elements, "the gradient of softmax"),
        out,
    ]


def kept_by_ends(shape: GPTConfig, batch_size: int, tokens: int, dtype: torch.dtype = torch.float32) -> list[Kept]:
    """The tensors that the embedding, the last LayerNorm and the head keep in every mode."""
    x, logits = batch_size * tokens * shape.n_embd * dtype.itemsize, batch_size * tokens * shape.vocab_size
    stats = 2 * batch_size * tokens * dtype.itemsize
    mask = Kept("the embedding's dropout mask", "(B, T, C)", x, "says what to scale and what to drop", ALWAYS)
    return [
        Kept("positions", "(T,) int64", 8 * tokens, "the rows of wpe that get a gradient", ALWAYS),
        *([mask] if shape.dropout else []),
        Kept("the last block's output", "(B, T, C)", x, "ln_f normalises it again", ALWAYS),
        Kept("ln_f's mean and rstd", "2 (B, T, 1)", stats, "to normalise it again", ALWAYS),
        Kept("ln_f's output", "(B, T, C)", x, "the gradient of lm_head's weight", ALWAYS),
        Kept("logits", "(B, T, V)", logits * dtype.itemsize, "whoever called the model holds them", ALWAYS),
        Kept("log-probabilities", "(B T, V) fp32", 4 * logits, "the loss's derivative is made of them", ALWAYS),
    ]


def activation_bytes(
    shape: GPTConfig, batch_size: int, tokens: int, dtype: torch.dtype = torch.float32, mode: str = "none"
) -> int:
    """Bytes that the whole model keeps at the end of its forward.

    Args:
        mode: as `--fsdp_activation_checkpointing` takes it: none, full, selective, every_2, every_3, ...

    Raises:
        ConfigError: another mode.
    """
    again = "selective" if mode == "selective" else "full"
    blocks = checkpointed(mode, shape.n_layer)
    modes = [again if i in blocks else "none" for i in range(shape.n_layer)]
    rows = kept_by_ends(shape, batch_size, tokens, dtype)
    for each in modes:
        rows += saved_activations(shape, batch_size, tokens, dtype, each)
    return sum(row.bytes for row in rows)
