"""Find tile sizes and warps for this GPU and write them into phase2_triton/kernels/configs.json.

    python -m bench.kernels.tune                          # print the best rows
    python -m bench.kernels.tune --only=attention_forward # tune only this key of configs.json
    python -m bench.kernels.tune --write                  # write the rows, under this architecture's name

The search is hill climbing. It starts from the current row and tries each number halved and doubled. It keeps a faster
row and repeats until no row is faster, which takes some dozens of compilations. It skips candidates that do not
compile, need too much memory or return a wrong result. Run `python -m bench.kernels.resources --write` afterwards: it
reports kernels that spill registers.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels.cases import GPT2_WIDTHS, Case, build_cases
from bench.kernels.kernels import Stopwatch, build_passes, find_kernel_device, parse_names
from nanoGPT.job.command import command_line, report_errors
from phase2_triton.kernels.core import (
    CONFIG_FILE,
    architecture_with_version,
    current_architecture,
    load_config_table,
)

Row = dict[str, int]
TIMED = {  # key of configs.json: the case, and the pass of it, that run this kernel
    "layernorm_forward": ("layernorm", "forward"),
    "layernorm_backward": ("layernorm", "backward"),
    "cross_entropy_forward": ("loss", "step"),
    "cross_entropy_backward": ("cross_entropy", "backward"),
    "attention_forward": ("attention", "forward"),
    "attention_dq": ("attention", "backward"),
    "attention_dkv": ("attention", "backward"),
    "gelu_forward": ("gelu", "forward"),
    "gelu_backward": ("gelu", "backward"),
    "embedding_forward": ("embedding", "forward"),
    "embedding_windows": ("embedding", "backward"),
    "embedding_tokens": ("embedding", "backward"),
    "embedding_positions": ("embedding", "backward"),
    "adamw": ("adamw", "step"),
}
FIXED = {"up_to", "heads"}  # numbers that are not tuned


@dataclass
class Options:
    """Tune the tile sizes and warps of kernels."""

    only: str = "all"
    """all, or some keys of configs.json"""
    write: bool = False
    """write configs.json"""
    to: str = str(CONFIG_FILE)
    """path of the file to write"""


def measure_size(key: str, case: Case) -> int:
    """Return the size that the kernel's rows in the table are sorted by, for this case."""
    if key == "adamw":
        return max(row["up_to"] for row in load_config_table()[key]["cuda"])
    if key in ("embedding_tokens", "cross_entropy_forward"):
        return case.inputs[1].size(0)  # rows of a weight
    return case.inputs[1 if key.startswith("embedding") else 0].size(-1)


def list_neighbors(row: Row) -> Iterator[Row]:
    """Yield the rows in which one number is half or twice as large; `num_stages` changes by one."""
    for name, value in row.items():
        if name in FIXED:
            continue
        for other in (value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2):
            if other >= 1 and (name != "num_warps" or other <= 16):
                yield {**row, name: other}


def list_architecture_rows(key: str) -> list[Row]:
    """Return the rows of this architecture in the loaded table; the first call copies the rows of `cuda`.

    If there are rows for this version of Triton only, the kernel uses those, and they are tuned.
    """
    rows, architecture = load_config_table()[key], current_architecture()
    if (name := architecture_with_version(architecture)) in rows:
        return rows[name]
    return rows.setdefault(architecture, [dict(row) for row in rows["cuda"]])


def set_row(key: str, row: Row) -> None:
    """Put a row into the loaded table, in place of the row for the same size."""
    rows = list_architecture_rows(key)
    rows[:] = sorted([*(r for r in rows if r["up_to"] != row["up_to"]), row], key=lambda r: r["up_to"])


def compute_reference(case: Case) -> Any:
    """Return the results of torch's contender, to check each candidate against; None for an optimizer's step."""
    name = next(name for name in case.contenders if name in ("eager", "sdpa", "fused"))
    return None if case.kernel == "adamw" else compute_results(case, name)


def compute_results(case: Case, contender: str) -> list[torch.Tensor]:
    """Return a contender's results, and the gradients of its inputs for fixed gradients of the results."""
    output = case.contenders[contender](*case.inputs)
    results = list(output) if isinstance(output, tuple) else [output]
    if case.is_step:
        return results
    gradients = [torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype) for y in results]
    leaves = [x for x in case.inputs if x.requires_grad]
    return [*results, *torch.autograd.grad(results, leaves, gradients)]


def is_correct(case: Case, reference: Any) -> bool:
    """Return whether each result is within 5% of the reference value plus 5% of the reference's standard deviation."""
    if reference is None:
        return True
    pairs = zip(compute_results(case, "ours"), reference, strict=True)
    return all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05 * standard_deviation(b)) for a, b in pairs)


def standard_deviation(result: torch.Tensor) -> float:
    """Return the standard deviation; for a scalar it is 0."""
    return result.float().std(correction=0).item()


def time_candidate(case: Case, pass_name: str, watch: Stopwatch, rounds: int, reference: Any) -> float:
    """Return the shortest time with the loaded table, in ms: other processes on the machine disturb it least.

    Return infinity if the kernel cannot run or is wrong.

    Raises:
        RuntimeError: the kernel made the CUDA context unusable, for example by an illegal memory access.
    """
    try:
        if not is_correct(case, reference):
            return float("inf")
        call = build_passes(case, "ours")[pass_name]
        call()
        return min(watch.time(call) for _ in range(rounds))
    except Exception:  # for example too much shared memory, or a tile size that Triton rejects
        watch.check_device()
        return float("inf")


def climb(key: str, case: Case, watch: Stopwatch, rounds: int) -> tuple[Row, float, float]:
    """Search from the current row. Return the best row, its time in ms, and the time of the current row in ms.

    Args:
        rounds: timed calls of each candidate.
    """
    pass_name, size, reference = TIMED[key][1], measure_size(key, case), compute_reference(case)
    best = {**next(row for row in list_architecture_rows(key) if size <= row["up_to"]), "up_to": size}
    set_row(key, best)
    best_ms = start_ms = time_candidate(case, pass_name, watch, rounds, reference)
    has_improved = True
    while has_improved:
        has_improved = False
        try:
            for row in list_neighbors(best):
                set_row(key, row)
                candidate_ms = time_candidate(case, pass_name, watch, rounds, reference)
                if candidate_ms < 0.98 * best_ms:
                    best, best_ms, has_improved = row, candidate_ms, True
        finally:  # also if a candidate made the CUDA context unusable
            set_row(key, best)
    return best, best_ms, start_ms


def format_table(table: dict[str, dict[str, list[Row]]]) -> str:
    """Return the table as JSON with one line per row."""
    kernels = []
    for kernel, architectures in table.items():
        parts = [
            f'    "{architecture}": [\n' + ",\n".join(f"      {json.dumps(row)}" for row in rows) + "\n    ]"
            for architecture, rows in architectures.items()
        ]
        kernels.append(f'  "{kernel}": {{\n' + ",\n".join(parts) + "\n  }")
    return "{\n" + ",\n".join(kernels) + "\n}\n"


def main(options: Options) -> None:
    device = find_kernel_device()
    watch, tuned = Stopwatch(device), set()
    rounds = 10 if device.type == "cuda" else 2
    for key in parse_names(options.only, list(TIMED)):
        for case in build_cases(device, {TIMED[key][0]}, list(GPT2_WIDTHS)):
            if (key, measure_size(key, case)) in tuned:
                continue
            tuned.add((key, measure_size(key, case)))
            row, best_ms, start_ms = climb(key, case, watch, rounds)
            print(f"{key:24}{case.shape:28}{start_ms:9.3f} to {best_ms:9.3f} ms  {row}", flush=True)
    if options.write:
        with open(options.to, "w") as file:
            file.write(format_table(load_config_table()))
        print(f"wrote the rows of {current_architecture()} into {options.to}")


if __name__ == "__main__":
    with report_errors():
        main(command_line(Options, sys.argv[1:]))
