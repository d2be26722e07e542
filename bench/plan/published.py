"""Compare the planner's speed estimates with published measurements of other projects.

    python -m bench.plan.published              # a few seconds
    python -m bench.plan.published --write      # also write bench/results/published-<hardware>.json

There are two sources:
- torchtitan's tables for Llama 3 8B with FSDP2 (docs/performance.md of pytorch/torchtitan): H100 GPUs with 500 W and
  2.4 TB/s, 8 per host, 400 Gbit/s each; 2 sequences of 8,192 tokens per GPU, selective activation checkpointing.
- The README of karpathy/nanoGPT of December 2022: GPT-2 124M on 8 A100 of 40 GB, "~250ms / iter to 135ms / iter" with
  torch.compile. It used the defaults of that time, 12 sequences of 1,024 tokens per GPU, and not yet PyTorch's fused
  attention, GELU and AdamW.

The models are traced on fake tensors, and the planner's own functions predict the speed (`bench/plan/planner.py`).
Llama's blocks are defined below. The GPT-2 run uses the blocks of this repository with unfused attention and unfused
GELU.
"""

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
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

from bench.plan.options import Row
from bench.plan.planner import TRACED_LAYERS, estimate_communication, extrapolate
from bench.plan.speed import (
    ATTENTION_EFFICIENCY,
    GPUS,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Gpu,
    Roofline,
    apply_launch_bound,
    step_seconds,
)
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp.activation_checkpointing import MATMULS

H100_OF_500_W = replace(GPUS["h100"], bandwidth=2.4e12)
VOCAB, WIDTH, FFN, HEADS, KV_HEADS = 128256, 4096, 14336, 32, 8  # Llama 3 8B


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary embeddings, and SwiGLU (Grattafiori et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        kv_width = KV_HEADS * WIDTH // HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, kv_width, kv_width, WIDTH))
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ((WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH))
        )

    def attention(self, x: Tensor, rotation: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, -1, WIDTH // HEADS) for f in (self.q, self.k, self.v))
        q, k = rotate(q, rotation), rotate(k, rotation)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, WIDTH))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), rotation)
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs of channels of x (B, T, heads, channels) by complex fp32 numbers (T, channels / 2)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2).to(x.dtype)


def save_every_second_matmul() -> Callable[..., CheckpointPolicy]:
    """Return torchtitan's policy of selective checkpointing per operator: save attention and every second matmul."""
    matmuls = [0, 0]  # counted in the forward pass, and in the recomputation

    def policy(context: SelectiveCheckpointContext, operator: object, *_: object, **__: object) -> CheckpointPolicy:
        must_save = operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        if operator in MATMULS:
            matmuls[context.is_recompute] += 1
            must_save = bool(matmuls[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Llama(nn.Module):
    """Llama blocks with activation checkpointing, an embedding, and an untied output head."""

    def __init__(self, n_layer: int) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.norm, self.blocks = nn.RMSNorm(WIDTH), nn.ModuleList(LlamaBlock() for _ in range(n_layer))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x, rotation = self.wte(idx), torch.zeros(idx.shape[1], WIDTH // HEADS // 2, dtype=torch.complex64)
        for block in self.blocks:
            context_fn = partial(create_selective_checkpoint_contexts, save_every_second_matmul())
            x = checkpoint(block, x, rotation, use_reentrant=False, context_fn=context_fn)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def unfused_attention(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """Compute causal attention, storing the full matrix of scores."""
    scores = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(k.shape[-1]))
    is_future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)
    return F.softmax(scores.masked_fill(is_future, -math.inf), dim=-1) @ v


def unfused_gelu(x: Tensor, **_: object) -> Tensor:
    """Compute the tanh approximation of GELU with separate elementwise operators."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        make: returns a model with the given number of blocks; the model maps tokens and targets to the loss.
        dtype: of the parameters used in compute; autocast casts fp32 parameters.
        rate: the published speed in tokens/s per GPU.
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


def make_gpt2(n_layer: int) -> nn.Module:
    return GPT(GPTConfig(n_layer, 12, 768, 1024, True, 50304))


def torchtitan_run(name: str, gpu: Gpu, ranks: int, batch_size: int, compiled: bool, rate: float) -> Run:
    return Run(f"Llama 3 8B, {name}", gpu, ranks, batch_size, 8192, 32, Llama, torch.bfloat16, compiled, rate)


def nanogpt_run(compiled: bool, seconds: float) -> Run:
    rate = 12 * 1024 / seconds
    return Run("GPT-2 124M, 8 A100", GPUS["a100-40"], 8, 12, 1024, 12, make_gpt2, torch.float32, compiled, rate)


RUNS = [
    torchtitan_run("8 H100", H100_OF_500_W, 8, 2, False, 5762),
    torchtitan_run("8 H100", H100_OF_500_W, 8, 2, True, 6667),
    torchtitan_run("128 H100", H100_OF_500_W, 128, 2, False, 5605),
    torchtitan_run("128 H100", H100_OF_500_W, 128, 2, True, 6514),
    nanogpt_run(False, 0.250),
    nanogpt_run(True, 0.135),
]


@cache
def trace_model(run: Run, n_layer: int) -> tuple[Roofline, int]:
    """Trace a step of the run's model with `n_layer` blocks. Return its roofline and its number of parameters.

    The trace depends neither on the ranks nor on whether the model is compiled, so `predict_rate` fixes them.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        is_gpt2 = run.make is make_gpt2
        torch.set_default_dtype(run.dtype)
        stack.callback(torch.set_default_dtype, torch.float32)
        model = run.make(n_layer)
        if is_gpt2:
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", unfused_attention))
            stack.enter_context(mock.patch.object(F, "gelu", unfused_gelu))
        optimizer = torch.optim.AdamW(model.parameters(), fused=not is_gpt2, foreach=is_gpt2)
        x = torch.zeros(run.batch_size, run.block_size, dtype=torch.int64)
        for _ in range(2):  # the first step allocates the optimizer state; the second one counts
            optimizer.zero_grad()
            with Roofline(run.gpu) as roofline:
                with torch.autocast("cpu", torch.bfloat16, enabled=is_gpt2):
                    loss = model(x, x)
                loss.backward()
                del loss
                roofline.stage = "update"
                optimizer.step()
        return roofline, sum(p.numel() for p in model.parameters())


def predict_rate(run: Run) -> float:
    """Return the predicted tokens/s per GPU."""
    traced = replace(run, name="", ranks=1, compiled=False, rate=0.0)  # runs of one model share its traces
    rooflines, sizes = zip(*(trace_model(traced, n_layer) for n_layer in TRACED_LAYERS), strict=True)
    stages = extrapolate([r.compiled if run.compiled else r.eager for r in rooflines], run.n_layer)
    is_sharded = run.make is Llama
    if is_sharded:
        stages["update"] *= 2 / run.ranks  # the trace updates full bf16 parameters; a rank updates its fp32 shard
    if not run.compiled:
        stages = apply_launch_bound(stages, extrapolate([r.kernels for r in rooflines], run.n_layer))
    params = round(extrapolate([{"params": size} for size in sizes], run.n_layer)["params"])
    row: Row = ("phase3" if is_sharded else "baseline", {})
    sharded_traffic = {("all-gather", run.ranks): 2 * 2 * params, ("reduce-scatter", run.ranks): 4 * params}
    traffic = sharded_traffic if is_sharded else {("all-reduce", run.ranks): 4 * params}
    communication = estimate_communication(row, traffic, params, run.n_layer + 1, 1, run.gpu, run.compiled)
    return run.batch_size * run.block_size / step_seconds(stages, *communication)


def main(write: bool = False) -> None:
    """Print published and predicted speeds.

    Args:
        write: also write bench/results/published-<hardware>.json.
    """
    rows = []
    print(f"{'tokens/s per GPU':<34}{'':<10}{'published':>10}{'predicted':>10}")
    for run in RUNS:
        rate, mode = predict_rate(run), "compiled" if run.compiled else "eager"
        print(f"{run.name:<34}{mode:<10}{run.rate:>10,.0f}{rate:>10,.0f}  {rate / run.rate - 1:+.0%}")
        rows.append({"name": run.name, "mode": mode, "published": run.rate, "planned": rate})
    if write:
        efficiency = {"matmul": MATMUL_EFFICIENCY, "attention": ATTENTION_EFFICIENCY}
        efficiency |= {"memory": MEMORY_EFFICIENCY, "link": LINK_EFFICIENCY}
        settings = {"command": "python -m bench.plan.published --write", "shares_of_the_peak": efficiency}
        print(f"wrote {write_result('published', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
