"""The compiled graphs of the trainers: what torch.compile sees in each phase, with GPT-2's shapes and fake tensors.

The baseline, phase 1 on one rank and phase 2 compile the model as one graph, under autocast. Phase 3, and phase 1 on
several ranks, compile the embedding, a block, and the head with the loss on their own, so that no graph contains a
collective. In phase 3, FSDP has cast the parameters to bfloat16 before.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.compiled.generate import GeneratedCode, generate_code
from nanoGPT.model import GPT, GPTConfig
from phase2_triton.apply import apply_kernels
from phase3_fsdp.activation_checkpointing import checkpoint_activations

BATCH_SIZE = 8


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create floating-point tensors in this type. (`model.to` cannot change fake parameters.)"""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Graph:
    """One compiled graph.

    Attributes:
        name: who compiles it.
        kernels: the value of `--kernels`.
        part: the part of the model that is one graph: model, embedding, block or loss.
        is_cast: the parameters are in the type of the matrix products, as FSDP passes them; otherwise autocast is on.
        dropout: the value of `--dropout`.
        checkpointing: the value of `--fsdp_activation_checkpointing`.
        dtype: the type of the matrix products.
        bias: the value of `--bias`.
    """

    name: str
    kernels: str = "none"
    part: str = "model"
    is_cast: bool = False
    dropout: float = 0.0
    checkpointing: str = "none"
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False

    def generate(self) -> GeneratedCode:
        """Return the code that torch.compile generates for this graph. Call it after `install_fake_gpu`."""
        with FakeTensorMode():
            with torch.device("cuda:0"), default_dtype(self.dtype if self.is_cast else torch.float32):
                model = GPT(GPTConfig(n_layer=2, bias=self.bias, dropout=self.dropout))
                idx = torch.zeros(BATCH_SIZE, model.config.block_size, dtype=torch.int64)
                x = torch.zeros(*idx.shape, model.config.n_embd, requires_grad=True)  # (B, T, C)
            apply_kernels(model, self.kernels)
            checkpoint_activations(model, self.checkpointing)
            calls: dict[str, tuple[Any, ...]] = {
                "model": (model, idx, idx),
                "embedding": (model.embed, idx, 0),
                "block": (model.blocks[0], x),
                "loss": (model.compute_loss, x, idx),
            }
            with torch.autocast("cuda", self.dtype, enabled=not self.is_cast):
                return generate_code(*calls[self.part])


GRAPHS = [
    Graph("baseline, and phase 1 on 1 rank"),
    Graph("baseline with bias and dropout", bias=True, dropout=0.1),
    Graph("baseline in float16", dtype=torch.float16),
    Graph("phase 2, --kernels=loss", "loss"),
    Graph("phase 2, --kernels=all", "all"),
    Graph("phase 2, --kernels=all with bias and dropout", "all", bias=True, dropout=0.1),
    Graph("phase 2, --kernels=all in float16", "all", dtype=torch.float16),
    Graph("phase 2, --kernels=attention_atomic", "attention_atomic"),
    Graph("phase 2, --kernels=attention_atomic with dropout", "attention_atomic", dropout=0.1),
    Graph("phase 1 on several ranks: embedding", part="embedding"),
    Graph("phase 1 on several ranks: block", part="block"),
    Graph("phase 1 on several ranks: head and loss", part="loss"),
    Graph("phase 1 on several ranks, --kernels=all: embedding", "all", part="embedding"),
    Graph("phase 1 on several ranks, --kernels=all: block", "all", part="block"),
    Graph("phase 1 on several ranks, --kernels=all: head and loss", "all", part="loss"),
    Graph("phase 3: embedding", part="embedding", is_cast=True),
    Graph("phase 3: block", part="block", is_cast=True),
    Graph("phase 3: head and loss", part="loss", is_cast=True),
    Graph("phase 3: checkpointed block", part="block", is_cast=True, checkpointing="full"),
    Graph("phase 3: block with selective checkpointing", part="block", is_cast=True, checkpointing="selective"),
    Graph("phase 3, --kernels=all: embedding", "all", part="embedding", is_cast=True),
    Graph("phase 3, --kernels=all: block", "all", part="block", is_cast=True),
    Graph("phase 3, --kernels=all: head and loss", "all", part="loss", is_cast=True),
    Graph("phase 3, --kernels=attention_atomic: block", "attention_atomic", part="block", is_cast=True),
    Graph("phase 3 in float16: block", part="block", is_cast=True, dtype=torch.float16),
    Graph("phase 3 in float16: head and loss", part="loss", is_cast=True, dtype=torch.float16),
    Graph("phase 3, --kernels=all in float16: block", "all", part="block", is_cast=True, dtype=torch.float16),
    Graph("phase 3, --kernels=all in float16: head and loss", "all", part="loss", is_cast=True, dtype=torch.float16),
    Graph(
        "phase 3, --kernels=all: checkpointed block with bias and dropout",
        "all",
        part="block",
        is_cast=True,
        checkpointing="full",
        bias=True,
        dropout=0.1,
    ),
]
