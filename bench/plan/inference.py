"""Predict what it takes to generate text: memory per rank, communication, and tokens per second. Needs no GPU.

    make plan MODEL=20b GPUS=2 GPU=a100-40 ARGS=--inference=True
    make plan MODEL=20b GPUS=2 GPU=a100-40 ARGS="--inference=True --batch_size=16 --block_size=8192"

`phase3_fsdp/evaluate.py --problems` has three ways to spread a model over the ranks. Its formulas
(`phase3_fsdp/solve/costs.py`) give the bytes; the rates of the planner (`bench/plan/speed.py`) give the time of a
round, in which every sequence gets one token:

    compute     the larger of 2 P FLOPs per sequence and of reading all weights and the cache from memory
    fsdp        the larger of compute and of the all-gathers, because the next layer is gathered while one computes
    offload     the larger of compute and of the all-gathers plus the copies from CPU memory
    tp          1/N of compute, plus the all-reduces: each waits for the layer before it

`--batch_size` is the number of sequences at a time (per rank with fsdp and offload, in total with tp), and
`--block_size` their length. A cache of this length is reserved. CUDA graphs or compiled kernels are assumed, so Python
costs no time.
"""

import json
from typing import Any

from bench.plan.plan import PlanConfig, resolve_gpu, resolve_shape
from bench.plan.planner import PCIE_BANDWIDTH, usable_bytes
from bench.plan.speed import MATMUL_EFFICIENCY, MEMORY_EFFICIENCY, Gpu, collective_seconds
from bench.tables.records import format_table
from nanoGPT.distributed.runtime import DTYPES
from nanoGPT.model import GPTConfig
from phase3_fsdp.solve import costs
from phase3_fsdp.solve.costs import ModelSize, Spread, SpreadCosts

GB = 1e9


def estimate_round(
    spread: Spread, predicted: SpreadCosts, size: ModelSize, gpu: Gpu, ranks: int, slots: int, itemsize: int
) -> float:
    """Return the seconds of a round, in which every sequence gets one token.

    Args:
        spread: fsdp, offload or tp.
        predicted: the costs of this way.
        size: of the model.
        gpu: the GPU, with the peak of the dtype.
        ranks: world size.
        slots: sequences, per rank or with tp in total.
        itemsize: bytes of a parameter.
    """
    share = ranks if spread == "tp" else 1
    flops = 2 * size.params * slots / share
    bytes_read = size.params * itemsize / share + predicted.cache
    compute = max(flops / (MATMUL_EFFICIENCY * gpu.peak), bytes_read / (MEMORY_EFFICIENCY * gpu.bandwidth))
    if ranks == 1:
        return max(compute, predicted.copied / PCIE_BANDWIDTH)
    if spread == "tp":
        activations = slots * size.channels * itemsize * (predicted.num_collectives - 1)
        logits = slots * size.vocab_size * itemsize
        return (
            compute
            + collective_seconds(gpu, "all-reduce", activations, ranks, predicted.num_collectives - 1)
            + collective_seconds(gpu, "all-gather", logits, ranks)
        )
    gathers = collective_seconds(gpu, "all-gather", size.params * itemsize, ranks, predicted.num_collectives)
    return max(compute, gathers + predicted.copied / PCIE_BANDWIDTH)


def predict_inference(shape: GPTConfig, gpu: Gpu, gpus: int, batch_size: int, dtype: str) -> dict[str, Any]:
    """Return the prediction for each way, and the way that an evaluation would choose.

    Args:
        shape: of the model; its block_size is the length of the sequences.
        gpu: the GPU of every rank.
        gpus: number of ranks.
        batch_size: sequences at a time.
        dtype: of weights and cache.
    """
    size, itemsize = costs.measure_gpt(shape), DTYPES[dtype].itemsize
    choice, reason = costs.choose_spread(
        size, gpus, batch_size, shape.block_size, itemsize, usable_bytes(gpu) / costs.RESERVE
    )
    ways = {}
    for spread in costs.SPREADS:
        if spread == "tp" and (gpus == 1 or size.kv_heads % gpus):
            continue
        predicted = costs.predict(spread, size, gpus, batch_size, shape.block_size, itemsize)
        seconds = estimate_round(spread, predicted, size, gpu.with_dtype(dtype), gpus, batch_size, itemsize)
        ways[spread] = {
            "weights_bytes": round(predicted.weights),
            "all_gathered_bytes": round(predicted.all_gathered),
            "cache_bytes": round(predicted.cache),
            "host_bytes": round(predicted.host),
            "network_bytes_per_round": round(predicted.network),
            "copied_bytes_per_round": round(predicted.copied),
            "round_seconds": seconds,
            "tokens_per_second": (1 if spread == "tp" else gpus) * batch_size / seconds,
            "fits": predicted.memory <= usable_bytes(gpu),
        }
    return {"params": size.params, "usable_bytes": round(usable_bytes(gpu)), "choice": choice, "reason": reason} | {
        "ways": ways
    }


def format_inference(found: dict[str, Any], title: str) -> str:
    """Return the prediction as a table and a recommendation."""
    rows = []
    for name, way in found["ways"].items():
        memory = way["weights_bytes"] + way["all_gathered_bytes"] + way["cache_bytes"]
        rows.append(
            [
                name,
                *(f"{way[key] / GB:.2f}" for key in ("weights_bytes", "all_gathered_bytes", "cache_bytes")),
                f"{memory / GB:.2f}",
                "yes" if way["fits"] else "no",
                f"{way['host_bytes'] / GB:.2f}",
                f"{way['network_bytes_per_round'] / GB:.4f}",
                f"{1e3 * way['round_seconds']:.1f}",
                f"{way['tokens_per_second']:,.0f}",
            ]
        )
    head = ["way", "weights (GB)", "all-gathered layers (GB)", "keys and values (GB)", "memory per rank (GB)", "fits"]
    head += ["CPU memory per rank (GB)", "communication per rank and round (GB)", "time of a round (ms)"]
    table = format_table([*head, "tokens per second"], rows)
    choice = found["choice"] or "none"
    usable = f"{found['usable_bytes'] / GB:.1f} GB of a GPU are usable"
    return f"{title}; {found['params']:,} parameters; {usable}\n\n{table}\nrecommended: {choice} ({found['reason']})"


def main(config: PlanConfig) -> None:
    """Print the prediction for the options of `make plan`."""
    shape, gpu = resolve_shape(config), resolve_gpu(config)
    found = predict_inference(shape, gpu, config.gpus, config.batch_size, config.dtype)
    title = f"{config.model} on {config.gpus} x {config.gpu}, {config.dtype}, {config.batch_size} sequence(s) of "
    title += f"{config.block_size} tokens at a time"
    print(json.dumps(found, indent=1) if config.json else format_inference(found, title))
