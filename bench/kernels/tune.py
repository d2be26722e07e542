"""Find tile sizes and warps for this GPU and write them into phase2_triton/kernels/configs.json.

    python -m bench.kernels.tune                          # print what is found
    python -m bench.kernels.tune --only=attention_forward # some
    python -m bench.kernels.tune --write                  # into the table, under this architecture's name

From the row that is used now, each number is halved and doubled in turn, and what is faster is kept until nothing is: a
walk uphill, of some dozens of compilations. A candidate that does not compile, does not fit or gives another result is
passed over. Run `python -m bench.kernels.resources --write` afterwards: what spills is seen there.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels.cases import GPT2_WIDTHS, Case, cases
from bench.kernels.kernels import Stopwatch, kernel_device, names, passes
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from phase2_triton.kernels.core import TABLE, architecture, table

Row = dict[str, int]
TIMED = {  # a key of the table: the case and the pass in which its kernel runs
    "layernorm_forward": ("layernorm", "forward"),
    "layernorm_backward": ("layernorm", "backward"),
    "cross_entropy_forward": ("loss", "step"),
    "cross_entropy_backward": ("cross_entropy", "backward"),
    "attention_forward": ("attention", "forward"),
    "attention_dq": ("attention", "backward"),
    "attention_dkv": ("attention", "backward"),
    "gelu_forward": ("gelu", "forward"),
    "gelu_backward": ("gelu", "backward"),
    "linear_gelu": ("linear_gelu", "forward"),
    "embedding_forward": ("embedding", "forward"),
    "embedding_windows": ("embedding", "backward"),
    "embedding_tokens": ("embedding", "backward"),
    "embedding_positions": ("embedding", "backward"),
    "adamw": ("adamw", "step"),
}
FIXED = {"up_to", "heads", "group"}


@dataclass
class Options:
    """What to tune."""

    only: str = "all"
    """all, or some keys of configs.json"""
    rounds: int = 10
    """calls of each candidate that are timed"""
    write: bool = False
    """write configs.json"""
    to: str = str(TABLE)
    """the table to write"""


def width(key: str, case: Case) -> int:
    """What the kernel's rows in the table are sorted by, in this case."""
    if key == "adamw":
        return max(row["up_to"] for row in table()[key]["cuda"])
    if key in ("embedding_tokens", "linear_gelu", "cross_entropy_forward"):
        return case.inputs[1].size(0)  # rows of a weight
    return case.inputs[1 if key.startswith("embedding") else 0].size(-1)


def neighbours(row: Row) -> Iterator[Row]:
    """The rows in which one number is half or twice as large; stages go one up or down."""
    for name, value in row.items():
        if name in FIXED:
            continue
        for other in (value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2):
            if other >= 1 and (name != "num_warps" or other <= 16):
                yield {**row, name: other}


def in_use(key: str) -> list[Row]:
    """The rows of this architecture, as a list of its own that can be changed."""
    rows = table()[key]
    return rows.setdefault(architecture(), [dict(row) for row in rows["cuda"]])


def place(key: str, row: Row) -> None:
    """Put a row into the table in the place of the one that held for its width."""
    rows = in_use(key)
    rows[:] = sorted([*(r for r in rows if r["up_to"] != row["up_to"]), row], key=lambda r: r["up_to"])


def expected(case: Case) -> Any:
    """What torch's own contender gives, which every candidate must give too; None for an optimizer's step."""
    name = next(name for name in case.contenders if name in ("eager", "sdpa", "fused"))
    return None if case.kernel == "adamw" else results(case, name)


def results(case: Case, contender: str) -> list[torch.Tensor]:
    """What a contender gives, and the gradients of its inputs for some that are always the same."""
    found = case.contenders[contender](*case.inputs)
    found = list(found) if isinstance(found, tuple) else [found]
    if case.steps:
        return found
    gradients = [torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype) for y in found]
    wanted = [x for x in case.inputs if x.requires_grad]
    return [*found, *torch.autograd.grad(found, wanted, gradients)]


def agrees(case: Case, reference: Any) -> bool:
    if reference is None:
        return True
    pairs = zip(results(case, "ours"), reference, strict=True)
    return all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05 * spread(b)) for a, b in pairs)


def spread(result: torch.Tensor) -> float:
    """The standard deviation, 0 for a scalar."""
    return result.float().std(correction=0).item()


def milliseconds(case: Case, which: str, watch: Stopwatch, rounds: int, reference: Any) -> float:
    """The least time with the table as it stands, which other work disturbs least; infinite where it cannot run or is
    wrong."""
    try:
        if not agrees(case, reference):
            return float("inf")
        call = passes(case, "ours")[which]
        call()
        return min(watch.time(call) for _ in range(rounds))
    except Exception:  # too much shared memory, a tile that is no tile: the candidate is out
        return float("inf")


def climb(key: str, case: Case, watch: Stopwatch, rounds: int) -> tuple[Row, float, float]:
    """The best row that is found from the one in use: (row, its milliseconds, those at the start)."""
    which, size, reference = TIMED[key][1], width(key, case), expected(case)
    best = {**next(row for row in in_use(key) if size <= row["up_to"]), "up_to": size}
    place(key, best)
    least = start = milliseconds(case, which, watch, rounds, reference)
    better = True
    while better:
        better = False
        for row in neighbours(best):
            place(key, row)
            taken = milliseconds(case, which, watch, rounds, reference)
            if taken < 0.98 * least:
                best, least, better = row, taken, True
        place(key, best)
    return best, least, start


def dumped(rows_of: dict[str, dict[str, list[Row]]]) -> str:
    """The table as JSON with a line a row."""
    kernels = []
    for kernel, places in rows_of.items():
        parts = [
            f'    "{where}": [\n' + ",\n".join(f"      {json.dumps(row)}" for row in rows) + "\n    ]"
            for where, rows in places.items()
        ]
        kernels.append(f'  "{kernel}": {{\n' + ",\n".join(parts) + "\n  }")
    return "{\n" + ",\n".join(kernels) + "\n}\n"


def main(options: Options) -> None:
    device = kernel_device()
    watch, seen = Stopwatch(device), set()
    rounds = options.rounds if device.type == "cuda" else 2
    chosen = names(options.only, list(TIMED))
    for key in chosen:
        for case in cases(device, {TIMED[key][0]}, list(GPT2_WIDTHS)):
            if (key, width(key, case)) in seen:
                continue
            seen.add((key, width(key, case)))
            row, least, start = climb(key, case, watch, rounds)
            print(f"{key:24}{case.shape:28}{start:9.3f} to {least:9.3f} ms  {row}", flush=True)
    if options.write:
        with open(options.to, "w") as file:
            file.write(dumped(table()))
        print(f"wrote {options.to}, under {architecture()}")


if __name__ == "__main__":
    with report_errors():
        main(command_line(Options, sys.argv[1:]))
