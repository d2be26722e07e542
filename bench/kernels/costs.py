"""The minimum cost of every kernel for the shapes of a model: bytes and FLOPs, from the kernels' `cost` functions."""

from dataclasses import dataclass

from phase2_triton.kernels import (
    adamw,
    attention,
    cross_entropy,
    embedding,
    gelu,
    layernorm,
    linear_cross_entropy,
)
from phase2_triton.kernels.core import Cost

HALF, FULL = 2, 4  # bytes of an element in bfloat16 and in fp32


@dataclass(frozen=True)
class Shapes:
    """The shapes of one call of every kernel.

    Attributes:
        batch_size, block_size: sequences, and tokens in each of them.
        n_embd, n_head, vocab_size: of the model.
        parameters, tensors: elements and tensors that the optimizer updates. Tensors change only its workspace.
    """

    batch_size: int
    block_size: int
    n_embd: int
    n_head: int
    vocab_size: int
    parameters: int
    tensors: int = 1


def list_kernel_costs(shapes: Shapes) -> dict[str, dict[str, Cost]]:
    """Return the cost of each pass of each kernel: forward and backward, or all. Tensors are in bfloat16.

    The optimizer and the embedding use fp32.
    """
    B, T, C, V = shapes.batch_size, shapes.block_size, shapes.n_embd, shapes.vocab_size
    M = B * T
    pairs: dict[str, Cost | tuple[Cost, Cost]] = {
        "LayerNorm": layernorm.cost(M, C, HALF),
        "residual add + LayerNorm": layernorm.cost(M, C, HALF, branch=True),
        "cross-entropy of given logits": cross_entropy.cost(M, V, HALF),
        "linear + cross-entropy": linear_cross_entropy.cost(M, C, V, HALF),
        "attention": attention.cost(B, shapes.n_head, T, C // shapes.n_head, HALF),
        "bias + GELU": gelu.cost(M, 4 * C, HALF),
        "embedding, fp32": embedding.cost(B, T, V, C, FULL),
        f"AdamW, {shapes.parameters / 1e6:.0f}M parameters": adamw.cost(shapes.parameters, FULL, shapes.tensors),
    }
    return {
        name: dict(zip(("forward", "backward"), cost, strict=True)) if isinstance(cost, tuple) else {"all": cost}
        for name, cost in pairs.items()
    }
