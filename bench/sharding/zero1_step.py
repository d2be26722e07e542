"""`Zero1Optimizer.step` at one rank against torch's AdamW, in turn: 124M parameters on a GPU, 10M on a CPU.

    python -m bench.sharding.zero1_step              # prints the ratio
    python -m bench.sharding.zero1_step --write      # and writes bench/results/zero1-step-<hardware>.json

Nothing is sent at one rank, so this is what flat buckets cost by themselves. Gradients lie in the buckets beforehand,
where the backward pass puts them in training.
"""

import statistics
import sys
import time
from typing import Any

import torch

from bench.sharding.zero1 import ADAMW, TEN_MILLION, model_on
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.model import GPTConfig
from nanoGPT.optim import param_groups
from phase1_zero1.zero1 import Zero1Optimizer


def measure(count: int) -> dict[str, Any]:
    """Milliseconds of `step` with gradients in place, torch's AdamW and flat in turn."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    shape = GPTConfig(bias=False) if cuda else TEN_MILLION
    models = [model_on(device, shape) for _ in range(2)]
    optimizers = [
        torch.optim.AdamW(param_groups(models[0], 0.1), **ADAMW),
        Zero1Optimizer(param_groups(models[1], 0.1), torch.optim.AdamW, **ADAMW),
    ]
    samples: dict[str, list[float]] = {"adamw_ms": [], "flat_ms": []}
    for turn in range(count + 5):
        for name, model, optimizer in zip(samples, models, optimizers, strict=True):
            for param in model.parameters():
                param.grad = torch.full_like(param, 1e-3)
            if isinstance(optimizer, Zero1Optimizer):
                optimizer.reduce_gradients()  # into the buckets, which the backward pass does in training
            if cuda:
                torch.cuda.synchronize()
            else:
                torch.ones(1 << 26)  # 256 MB, so that neither finds its gradients in a cache
            begin = time.perf_counter()
            optimizer.step()
            if cuda:
                torch.cuda.synchronize()
            if turn >= 5:
                samples[name].append(1000 * (time.perf_counter() - begin))
    ratio = statistics.median(samples["flat_ms"]) / statistics.median(samples["adamw_ms"])
    print(f"optimizer.step: flat over AdamW {ratio:.3f}")
    return {"parameters": sum(p.numel() for p in models[0].parameters()), "ratio": ratio, **samples}


def main(write: bool = False) -> None:
    """Measure, and print.

    Args:
        write: also write bench/results/zero1-step-<hardware>.json.
    """
    found = measure(100)
    if write:
        where = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        print(f"wrote {write_result('zero1-step', where, {'command': 'python -m bench.sharding.zero1_step'}, found)}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
