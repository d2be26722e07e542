"""Measure an idea that phase 2 does not use: add the MLP's result in the kernel of the next block's LayerNorm.

    python -m bench.kernels.residual_fusion             # ten seconds
    python -m bench.kernels.residual_fusion --write     # also write bench/results/residual-fusion-<hardware>.json

`DeferredBlock` returns the residual stream and the MLP's result as two tensors, and the next block adds them with
`add_layer_norm`. This counts, per element of the residual stream and per block, the bytes that all operators read and
write in a training step under autocast, and the bytes of activations when the backward pass begins.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.memory.tracker import MemoryTracker
from nanoGPT.model import GPT, GPTConfig, KVCache
from phase2_triton.apply import KernelBlock, apply_kernels
from phase2_triton.kernels.layernorm import add_layer_norm
from phase3_fsdp.activation_checkpointing import checkpoint_activations

SHAPE = GPTConfig(n_layer=3, n_head=2, n_embd=64, block_size=32, vocab_size=64, bias=False)
BATCH_SIZE = 4
MODES = ("none", "full")
Pair = tuple[Tensor, Tensor]


class DeferredBlock(KernelBlock):
    """A block that leaves the addition of the MLP's result to its successor."""

    def forward(self, x: Tensor | Pair, cache: KVCache | None = None) -> Pair:  # type: ignore[override]
        """Compute a block.

        Args:
            x: the residual stream; or the residual stream, and the result to add to it.
            cache: as in `Block`.

        Returns:
            The residual stream, and the MLP's result, which is not added to it yet.
        """
        first, second = self.ln_1, self.ln_2
        if isinstance(x, Tensor):
            h = first(x)
        else:
            x, h = add_layer_norm(*x, first.weight, first.bias, first.eps)
        x, h = add_layer_norm(x, self.attn(h, cache), second.weight, second.bias, second.eps)
        return x, self.mlp(h)


class DeferredGPT(GPT):
    """A model of `DeferredBlock`s. The result of the last block is added as before."""

    def compute_features(self, idx: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        x, branch = super().compute_features(idx, caches)
        return x + branch


class ByteCounter(TorchDispatchMode):
    """Count the bytes of the inputs and outputs of all operators, except those that only create a view."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        inputs, outputs = (
            {leaf.untyped_storage().data_ptr(): leaf.numel() * leaf.itemsize for leaf in tree_leaves(part)}
            for part in (
                [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)],
                [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)],
            )
        )
        if not outputs.keys() <= inputs.keys() or op._schema.is_mutable:
            self.bytes += sum(inputs.values()) + sum(outputs.values())
        return result


def build_model(is_deferred: bool) -> GPT:
    """Return a model with the layernorm, gelu and attention kernels, with the MLP's result added now or later."""
    model = GPT(SHAPE)
    model.init_weights(0)
    apply_kernels(model, "attention,gelu,layernorm")
    if is_deferred:
        model.__class__ = DeferredGPT
        for block in model.blocks:
            block.__class__ = DeferredBlock
    return model


def measure_step(is_deferred: bool, mode: str) -> dict[str, Any]:
    """Return the loss and the gradient norm of a step, the bytes of all operators, and those of saved activations.

    Args:
        is_deferred: use `DeferredBlock`.
        mode: of activation checkpointing, none or full.
    """
    model = build_model(is_deferred)
    checkpoint_activations(model, mode)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(SHAPE.vocab_size, (2, BATCH_SIZE, SHAPE.block_size), generator=generator)
    with MemoryTracker(model) as memory, ByteCounter() as counter:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*batch)
        loss.backward()
    assert memory.after_forward is not None
    gradient = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])
    norm = gradient.double().norm().item()
    saved_bytes = memory.after_forward["activations"]
    return {"loss": loss.item(), "grad_norm": norm, "moved_bytes": counter.bytes, "saved_bytes": saved_bytes}


def main(write: bool = False) -> None:
    """Measure both models, with and without activation checkpointing.

    Args:
        write: also write bench/results/residual-fusion-<hardware>.json.
    """
    elements = BATCH_SIZE * SHAPE.block_size * SHAPE.n_embd * SHAPE.n_layer
    rows = []
    for mode in MODES:
        for is_deferred in (False, True):
            row = {"checkpointing": mode, "is_deferred": is_deferred, **measure_step(is_deferred, mode)}
            rows.append(row)
            moved, saved = (row[name] / elements for name in ("moved_bytes", "saved_bytes"))
            print(
                f"checkpointing {mode}, {'deferred' if is_deferred else 'now'}: loss {row['loss']:.6f}, gradient norm "
                f"{row['grad_norm']:.6f}, per element and block: {moved:.2f} bytes moved, {saved:.2f} bytes saved"
            )
    if write:
        settings = {"command": "python -m bench.kernels.residual_fusion --write", "elements": elements}
        print(f"wrote {write_result('residual-fusion', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
