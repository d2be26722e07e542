"""Compare `Zero1Optimizer.step` on one rank with torch's AdamW: 124M parameters on a GPU, 10M on a CPU.

    python -m bench.sharding.zero1_step              # print the ratio
    python -m bench.sharding.zero1_step --write      # also write bench/results/zero1-step-<hardware>.json

One rank communicates nothing, so the ratio is the overhead of flat buckets alone. As in training, the gradients are in
the buckets before the step.
"""

import statistics
import sys
import time
from typing import Any

import torch

from bench.sharding.zero1 import ADAMW, TEN_MILLION, build_model
from bench.tables.records import write_result
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.model import GPTConfig
from nanoGPT.optim import param_groups
from phase1_zero1.zero1 import Zero1Optimizer


def measure(count: int) -> dict[str, Any]:
    """Measure the milliseconds of `step`, without the gradient reduction. torch's AdamW and ZeRO-1 alternate."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    shape = GPTConfig(bias=False) if has_gpu else TEN_MILLION
    models = [build_model(device, shape) for _ in range(2)]
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
                optimizer.reduce_gradients()  # fills the buckets; in training, the backward pass does it
            if has_gpu:
                torch.cuda.synchronize()
            else:
                torch.ones(1 << 26)  # 256 MB: evicts the gradients from the CPU caches
            begin = time.perf_counter()
            optimizer.step()
            if has_gpu:
                torch.cuda.synchronize()
            if turn >= 5:
                samples[name].append(1000 * (time.perf_counter() - begin))
    ratio = statistics.median(samples["flat_ms"]) / statistics.median(samples["adamw_ms"])
    print(f"optimizer.step: time of flat buckets / time of AdamW = {ratio:.3f}")
    return {"parameters": sum(p.numel() for p in models[0].parameters()), "ratio": ratio, **samples}


def main(write: bool = False) -> None:
    """Measure both optimizers and print the ratio.

    Args:
        write: also write bench/results/zero1-step-<hardware>.json.
    """
    samples = measure(100)
    if write:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        settings = {"command": "python -m bench.sharding.zero1_step --write"}
        print(f"wrote {write_result('zero1-step', device, settings, samples)}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
