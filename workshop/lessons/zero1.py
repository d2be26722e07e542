"""Helpers of notebooks 3 and 3b: the layout of buckets, the timeline of a step, and tables.

`workshop/lessons/zero1_pictures.py` draws it.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanoGPT.checkpoint.shards import SafeReader
from nanoGPT.dataset import TokenData
from phase1_zero1.zero1 import Zero1Optimizer
from workshop.lessons.loss_curves import compute_max_loss_difference
from workshop.ranks import losses


def shorten_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter, without the parts that all names share."""
    return {p: name.removeprefix("transformer.").removesuffix(".weight") for name, p in model.named_parameters()}


def describe_buckets(model: nn.Module, optimizer: Zero1Optimizer) -> list[dict[str, Any]]:
    """Return the parameters of each bucket, and the slice and the shards of the calling rank.

    Returns:
        One dictionary per bucket: its `length` in elements, its `params` as (name, elements), the `slice` of this rank
        as (begin, end), and its `shards` as (name, first element of the parameter, begin and end in the bucket).
    """
    names = shorten_names(model)
    return [
        {
            "length": bucket.flat_params.numel(),
            "params": [(names[p], p.numel()) for p in bucket.params],
            "slice": (bucket.local_slice.start, bucket.local_slice.stop),
            "shards": [(names[s.param], s.offset, s.bucket_slice.start, s.bucket_slice.stop) for s in bucket.shards],
        }
        for bucket in optimizer.buckets
    ]


def print_shards(layouts: Sequence[Sequence[Mapping[str, Any]]], number: int) -> None:
    """Print the slice and the shards of each rank in one bucket. `layouts[rank][bucket]` is from describe_buckets."""
    for rank, buckets in enumerate(layouts):
        begin, end = buckets[number]["slice"]
        print(f"rank {rank}: elements {begin:,} to {end:,} of bucket {number}")
        for name, offset, left, right in buckets[number]["shards"]:
            numel = right - left
            print(f"    {name:16} {numel:6,} elements: {offset:,} to {offset + numel:,} of the flattened parameter")


def print_padding(layouts: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Print for each rank the elements of its shards and of the padding in its slices."""
    for rank, buckets in enumerate(layouts):
        shards = [shard for bucket in buckets for shard in bucket["shards"]]
        shard_elements = sum(right - left for _, _, left, right in shards)
        slice_elements = sum(bucket["slice"][1] - bucket["slice"][0] for bucket in buckets)
        padding = slice_elements - shard_elements
        print(f"rank {rank}: {len(shards):2} shards, {shard_elements:6,} elements, {padding:3} elements of padding")


def print_traffic(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the collectives that a ledger has counted."""
    for row in rows:
        print(f"{row['kind']:15} {row['calls']:3} calls  {row['ring_bytes'] / 4:9,.0f} elements communicated per rank")


def compute_max_param_difference(result: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the largest difference between the parameters of two runs."""
    return (result["params"] - other["params"]).abs().max().item()


def print_backends(
    runs: Mapping[str, Path], formulas: Mapping[str, tuple[float, float]], baseline: Mapping[int, float], P: int
) -> None:
    """Print what the ledger of each run has measured, next to the formulas, and check the losses.

    Args:
        runs: directory of the run of each implementation of ZeRO-1, on 4 ranks.
        formulas: model state per rank (bytes, in units of P), and communication per rank (elements, in P(N-1)/N).
        baseline: losses of one process.
        P: number of parameters.
    """
    print("        model state per rank          communication per rank      calls     max loss difference")
    print("        (bytes, in units of P)        (elements, in P(N-1)/N)     per step  from one process")
    print("            min     max  formula          measured  formula")
    for name, run in runs.items():
        ranks = json.loads((run / "ledger.json").read_text())["ranks"]
        rows = ranks[0]["collectives"]
        state = [sum(rank["state_bytes"].values()) / P for rank in ranks]
        volume = sum(row["ring_bytes"] / 4 for row in rows) / (P * (len(ranks) - 1) / len(ranks))
        loss_difference = compute_max_loss_difference(losses(run), baseline)
        print(
            f"{name:6} {min(state):8.3f} {max(state):7.3f} {formulas[name][0]:8.3f}     "
            f"{volume:13.4f} {formulas[name][1]:8} {sum(row['calls'] for row in rows):14} {loss_difference:20.1e}"
        )
        assert loss_difference < 1e-5


def record_timeline(
    model: nn.Module, make_optimizer: Callable[[], Zero1Optimizer], data: TokenData, steps: int
) -> dict[str, Any]:
    """Run steps, and return the parameter names of each bucket and the timeline of each step on this rank.

    An event is (name, bucket or None, begin, end, gradients ready at the end), with times in seconds. The methods of
    each bucket are wrapped, to record every call.
    """
    names = shorten_names(model)
    events: list[tuple] = []
    ready_times: list[float] = []
    for p in model.parameters():  # before the optimizer registers its hooks, so that this hook runs first
        p.register_post_accumulate_grad_hook(lambda p: ready_times.append(time.perf_counter()))
    optimizer = make_optimizer()

    def record(event_name: str, number: int | None, method: Callable) -> Callable:
        def recorded_method(*args: Any) -> Any:
            begin, result = time.perf_counter(), method(*args)
            events.append((event_name, number, begin, time.perf_counter(), len(ready_times)))
            return result

        return recorded_method

    for number, bucket in enumerate(optimizer.buckets):
        for method_name in ("start_reduce", "finish_reduce", "update_shards", "start_gather"):
            setattr(bucket, method_name, record(method_name, number, getattr(bucket, method_name)))
    recorded_steps = []
    for step in range(steps):
        x, y = data.batch("train", step, dist.get_rank())
        events.clear()
        ready_times.clear()
        dist.barrier()
        loss = record("forward", None, model)(x, y)
        record("backward", None, loss.backward)()
        record("step", None, optimizer.step)()
        recorded_steps.append({"events": list(events), "ready_times": list(ready_times)})
    return {"buckets": [[names[p] for p in bucket.params] for bucket in optimizer.buckets], "steps": recorded_steps}


def count_gradients_ready_at_reduce(step: Mapping[str, Any]) -> dict[int, int]:
    """Return how many gradients were ready when each bucket started its reduce-scatter, in the order of the starts."""
    return {number: count for name, number, _, _, count in step["events"] if name == "start_reduce"}


def print_ready_gradients(timeline: Mapping[str, Any]) -> None:
    """Print how many gradients were ready when each bucket was reduced, in the first two steps."""
    ready_in_step_0, ready_in_step_1 = (count_gradients_ready_at_reduce(step) for step in timeline["steps"][:2])
    print("                                           gradients ready when the reduce-scatter starts")
    print("bucket                                                           in step 0   in step 1")
    for number, names in enumerate(timeline["buckets"]):
        bucket_names = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
        print(f"{number}  {bucket_names:61} {ready_in_step_0[number]:9} {ready_in_step_1[number]:11}")
    print("order in step 0:", list(ready_in_step_0), " order in step 1:", list(ready_in_step_1))


def count_early_reduces(step: Mapping[str, Any]) -> int:
    """Return how many buckets started their reduce-scatter before `backward()` returned."""
    backward_end = next(end for name, _, _, end, _ in step["events"] if name == "backward")
    return sum(begin < backward_end for name, _, begin, _, _ in step["events"] if name == "start_reduce")


def print_norms(results: Mapping[str, Sequence[Mapping[str, Any]]], reference: Mapping[str, Any]) -> None:
    """Print the gradient norm of step 0 that each rank computes, for each way to clip."""
    print(f"gradient norm in step 0, in one process: {reference['norms'][0]:.6f}")
    print("gradient norm in step 0, on ranks 0 to 3:")
    for name, ranks in results.items():
        print(f"    {name:6} " + "  ".join(f"{rank['norms'][0]:.6f}" for rank in ranks))
    sum_of_squares = sum(rank["norms"][0] ** 2 for rank in results["local"])
    print(f"square root of the sum of the squared local norms: {sum_of_squares**0.5:.6f}")


def list_moment_chunks(checkpoint: Path, name: str) -> list[tuple[int, int]]:
    """Return (first element, number of elements) of each saved chunk of a parameter's first moment."""
    key = f"optimizer.transformer.{name}.weight.exp_avg"
    chunks = SafeReader(checkpoint).read_metadata().state_dict_metadata[key].chunks
    return sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in chunks)


def print_chunks(checkpoint: Path, parameters: Sequence[str]) -> None:
    """Print the files of a checkpoint, and the chunks in which the first moments of some parameters are saved."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = ", ".join(file["name"] for file in manifest["files"])
    print(f"{checkpoint.name}, saved by {manifest['world_size']} ranks: {files}")
    for parameter in parameters:
        chunks = list_moment_chunks(checkpoint, parameter)
        ranges = ", ".join(f"{begin:,} to {begin + numel:,}" for begin, numel in chunks)
        print(f"    {parameter:15} chunks of the first moment: {ranges}")
