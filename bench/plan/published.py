"""The planner's speed beside what others have measured and published.

    python -m bench.plan.published              # a few seconds
    python -m bench.plan.published --write      # and bench/results/published-<hardware>.json

Two sources. torchtitan's tables of Llama 3 8B under FSDP2 (docs/performance.md of pytorch/torchtitan): H100s of 500 W
and 2.4 TB/s, 8 a host, 400 Gbit/s each; sequences of 8,192, two a GPU, selective activation checkpointing. And the
README of karpathy/nanoGPT of December 2022: GPT-2 124M on 8 A100 of 40 GB, "~250ms / iter to 135ms / iter" by
torch.compile; with its defaults of then, 12 sequences of 1,024 a GPU, and without PyTorch's fused attention, GELU and
AdamW, which it took up later.

The models are traced on fake tensors as `bench/plan/plan.py` does: Llama's blocks are written below, nanoGPT's are
those of this repository with the attention and the GELU of then.
"""

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bench.plan.speed import (
    ATTENTION,
    GPUS,
    LINK,
    MATMUL,
    MEMORY,
    PARTS,
    Exchange,
    Gpu,
    Roofline,
    Sent,
    collective_seconds,
    step_seconds,
    waiting,
)
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp.activation_checkpointing import MATMULS

LAYERS = (2, 3)  # are traced; the rest follows in equal steps
H100_OF_500_W = replace(GPUS["h100"], bandwidth=2.4e12)
VOCAB, WIDTH, FFN, HEADS, KV_HEADS = 128256, 4096, 14336, 32, 8  # Llama 3 8B


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary embeddings, and SwiGLU (Grattafiori et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        narrow = KV_HEADS * WIDTH // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, narrow, narrow, WIDTH))
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ((WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH))
        )

    def attention(self, x: Tensor, turn: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, -1, WIDTH // HEADS) for f in (self.q, self.k, self.v))
        q, k = rotated(q, turn), rotated(k, turn)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, WIDTH))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), turn)
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Pairs of channels of (B, T, heads, channels), turned by (T, channels / 2) complex numbers in fp32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2).to(x.dtype)


def keep_every_second_product() -> Callable[..., CheckpointPolicy]:
    """torchtitan's selective checkpointing by operator: attention and every second product are kept."""
    seen = [0, 0]  # in the forward, and where it is run again

    def policy(context: SelectiveCheckpointContext, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        keep = operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        if operator in MATMULS:
            seen[context.is_recompute] += 1
            keep = bool(seen[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Llama(nn.Module):
    """The blocks, checkpointed, between an embedding and a head of its own."""

    def __init__(self, n_layer: int) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.norm, self.blocks = nn.RMSNorm(WIDTH), nn.ModuleList(LlamaBlock() for _ in range(n_layer))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x, turn = self.wte(idx), torch.zeros(idx.shape[1], WIDTH // HEADS // 2, dtype=torch.complex64)
        for block in self.blocks:
            kept = partial(create_selective_checkpoint_contexts, keep_every_second_product())
            x = checkpoint(block, x, turn, use_reentrant=False, context_fn=kept)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def attention_of_2022(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """With every pair's score in memory."""
    scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(k.shape[-1]))
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)
    return F.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v


def gelu_of_2022(x: Tensor, **_: object) -> Tensor:
    """By tanh, operator by operator."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        make: a model of some blocks, whose call takes tokens and targets and gives logits and the loss.
        dtype: of the parameters that compute; fp32 ones are cast by autocast.
        rate: what was published: tokens/s of a GPU.
    """

    name: str
    gpu: Gpu
    ranks: int
    batch_size: int
    block_size: int
    n_layer: int
    make: Callable[[int], nn.Module]
    dtype: torch.dtype
    compiled: bool
    rate: float


def nano(n_layer: int) -> nn.Module:
    return GPT(GPTConfig(n_layer, 12, 768, 1024, True, 50304))


def titan(name: str, gpu: Gpu, ranks: int, batch_size: int, compiled: bool, rate: float) -> Run:
    return Run(f"Llama 3 8B, {name}", gpu, ranks, batch_size, 8192, 32, Llama, torch.bfloat16, compiled, rate)


def nanogpt(compiled: bool, seconds: float) -> Run:
    rate = 12 * 1024 / seconds
    return Run("GPT-2 124M, 8 A100", GPUS["a100-40"], 8, 12, 1024, 12, nano, torch.float32, compiled, rate)


RUNS = [
    titan("8 H100", H100_OF_500_W, 8, 2, False, 5762),
    titan("8 H100", H100_OF_500_W, 8, 2, True, 6667),
    titan("128 H100", H100_OF_500_W, 128, 2, False, 5605),
    titan("128 H100", H100_OF_500_W, 128, 2, True, 6514),
    nanogpt(False, 0.250),
    nanogpt(True, 0.135),
]


def traced(run: Run, n_layer: int) -> tuple[Roofline, int]:
    """A step of a model of so many blocks, and its parameters."""
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        old = run.make is nano
        torch.set_default_dtype(run.dtype)
        stack.callback(torch.set_default_dtype, torch.float32)
        model = run.make(n_layer)
        if old:
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention_of_2022))
            stack.enter_context(mock.patch.object(F, "gelu", gelu_of_2022))
        optimizer = torch.optim.AdamW(model.parameters(), fused=not old, foreach=old)
        x = torch.zeros(run.batch_size, run.block_size, dtype=torch.int64)
        for _ in range(2):  # the first makes the optimizer's state
            optimizer.zero_grad()
            with Roofline(run.gpu) as roofline:
                with torch.autocast("cpu", torch.bfloat16, enabled=old):
                    loss = model(x, x)[1]
                loss.backward()
                del loss
                roofline.part = "update"
                optimizer.step()
        return roofline, sum(p.numel() for p in model.parameters())


def predicted(run: Run) -> float:
    """Tokens/s of a GPU."""
    few, more = (traced(run, n_layer) for n_layer in LAYERS)
    steps = run.n_layer - LAYERS[0]

    def whole(values: Callable[[Roofline], dict[str, float]]) -> dict[str, float]:
        return {p: values(few[0])[p] + steps * (values(more[0])[p] - values(few[0])[p]) for p in PARTS}

    gpu = whole(lambda r: r.compiled if run.compiled else r.eager)
    sharded = run.make is Llama
    if sharded:
        gpu["update"] *= 2 / run.ranks  # its traced parameters are of 2 bytes, and whole
    parts = gpu if run.compiled else waiting(gpu, whole(lambda r: r.kernels))
    params = few[1] + steps * (more[1] - few[1])

    def seconds(kind: str, size: float, calls: float) -> float:
        return collective_seconds(run.gpu, kind, size, run.ranks, calls)

    if sharded:
        units = run.n_layer + 1
        gather, reduce = seconds("all-gather", 2 * params, units), seconds("reduce-scatter", 4 * params, units)
        first, last = Exchange(gather, gather / units), Exchange(reduce, reduce / units)
        sent: tuple[Sent, Sent] = {"forward": first, "backward": first}, {"backward": last}
    else:
        buckets = math.ceil(4 * params / 25e6)
        total = seconds("all-reduce", 4 * params, buckets)
        sent = {}, {"backward": Exchange(total, total / buckets)}
    return run.batch_size * run.block_size / step_seconds(parts, *sent)


def main(write: bool = False) -> None:
    """Print the comparison.

    Args:
        write: also write bench/results/published-<hardware>.json.
    """
    rows = []
    print(f"{'tokens/s of a GPU':<34}{'':<10}{'published':>10}{'planned':>10}")
    for run in RUNS:
        found, mode = predicted(run), "compiled" if run.compiled else "eager"
        print(f"{run.name:<34}{mode:<10}{run.rate:>10,.0f}{found:>10,.0f}  {found / run.rate - 1:+.0%}")
        rows.append({"name": run.name, "mode": mode, "published": run.rate, "planned": found})
    if write:
        assumed = {"matmul": MATMUL, "attention": ATTENTION, "memory": MEMORY, "link": LINK}
        settings = {"command": "python -m bench.plan.published", "shares_of_the_peak": assumed}
        print(f"wrote {write_result('published', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
