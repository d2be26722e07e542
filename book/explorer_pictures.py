"""Draw a static picture of each recording, for browsers without scripts: the same data as the interactive page."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from bench.plan.planner import usable_bytes
from bench.plan.speed import GIB, GPUS
from book.charts import Chart, Grid, Timeline, draw_chart

MB = 1e6
INPUTS = ("model", "gpu", "dtype", "block_size", "batch_size", "gpus", "micro_batches", "optimizer")  # of the planner
Samples = dict[str, Any]
Picture = Chart | Grid | Timeline


def render_pictures(name: str, samples: Samples) -> str:
    """Return the pictures of a recording, which only a browser without scripts shows, as HTML without blank lines."""
    figures = [draw_chart(picture, f"picture-{i}") for i, picture in enumerate(PICTURES[name](samples))]
    return "\n".join(["<noscript>", *figures, "</noscript>"])


def draw_ring(samples: Samples) -> list[Picture]:
    """Draw the sends of an all-reduce over 4 ranks on a ring, and the bytes of each collective over 4 ranks."""
    runs = [run for run in samples["runs"] if run["ranks"] == 4]
    example = next(run for run in runs if (run["collective"], run["algorithm"]) == ("all-reduce", "ring"))
    rows = {
        f"step {number}": [(f"chunk {send['chunk']}", f"{send['chunk']} to rank {send['to']}") for send in sends]
        for number, sends in enumerate(example["steps"], start=1)
    }
    sent: dict[str, dict[str, float]] = {}
    for run in runs:
        size = sum(sends[0].get("bytes", 0) for sends in run["steps"])
        sent.setdefault(run["collective"], {})[run["algorithm"]] = size
    return [
        Grid(
            "the chunk that each of 4 ranks sends in an all-reduce on a ring",
            [f"rank {rank}" for rank in range(4)],
            rows,
        ),
        Chart(f"sent by rank 0 of 4, for a tensor of {example['tensor_bytes']:,} bytes (bytes)", sent),
    ]


def draw_fsdp_step(samples: Samples) -> list[Picture]:
    """Draw the memory of rank 0 after each event of three recorded steps."""
    first = samples["runs"][0]["options"]
    rows: dict[str, dict[str, float]] = {}
    for run in samples["runs"]:
        changes = [
            f"{key.removeprefix('fsdp_')}={value}" for key, value in run["options"].items() if value != first[key]
        ]
        if len(changes) > 1 or any("prefetch" in change for change in changes):
            continue
        for number, sizes in enumerate(run["memory"][0], start=1):
            rows.setdefault(str(number), {})[", ".join(changes) or "defaults"] = sum(sizes) / MB
    rows = dict(sorted(rows.items(), key=lambda item: int(item[0])))
    return [Chart("memory of rank 0 after each event (MB)", rows, "event of the step")]


def read_cases(samples: Samples) -> list[dict[str, Any]]:
    """Return the planner's recorded cases as objects."""
    return [dict(zip(samples["cases"]["fields"], values, strict=True)) for values in samples["cases"]["values"]]


def draw_will_it_fit(samples: Samples) -> list[Picture]:
    """Draw the planner's peak memory of each row, for the question of the page."""
    cases = read_cases(samples)
    asked = cases[0]
    same = [case for case in cases if all(case[key] == asked[key] for key in INPUTS)]
    usable = usable_bytes(GPUS[asked["gpu"]]) / GIB
    title = (
        f"peak memory (GiB) of {asked['model']} on {asked['gpus']} x {asked['gpu']}, {asked['batch_size']} sequences "
        f"of {asked['block_size']:,} tokens per GPU; {usable:.1f} GiB are usable"
    )
    rows = {samples["rows"][case["row"]]["name"]: {"": case["peak_bytes"] / GIB} for case in same}
    return [Chart(title, rows)]


def draw_kill_save(samples: Samples) -> list[Picture]:
    """Draw which step opens after a kill at each moment of a save."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for kill in samples["kills"]:
        cells = rows.setdefault(f"{kill['mode']}, rank {kill['rank']}", [])
        cells.append((f"step {kill['step']} opens", str(kill["step"])))
    length = max(map(len, rows.values()))
    padded = {label: cells + [("", "")] * (length - len(cells)) for label, cells in rows.items()}
    title = "the step that opens after a kill of a rank at each moment of a save, in the order of the table below"
    return [Grid(title, [str(number) for number in range(1, length + 1)], padded)]


def draw_layout(samples: Samples) -> list[Picture]:
    """Draw the parameters and the owners of the first bucket on 4 ranks."""
    layout = next(each for each in samples["layouts"] if each["ranks"] == 4)
    bucket, shapes = layout["buckets"][0], dict(samples["parameters"])
    begin, params = 0, {}
    for name in bucket["params"]:
        size = math.prod(shapes[name])
        params[name] = [(float(begin), float(begin + size))]
        begin += size
    owners = {f"rank {r}": [(float(r * bucket["slice"]), float((r + 1) * bucket["slice"]))] for r in range(4)}
    rows = {"parameters": params, "slices of the ranks": owners}
    return [Timeline("the first bucket of GPT-2 with ZeRO-1 on 4 ranks", rows, "elements")]


def draw_bug_museum(samples: Samples) -> list[Picture]:
    """Draw the training losses of the right trainer and of all faulty ones."""
    curves = {"no fault": samples["right"], **{each["fault"]: each for each in samples["exhibits"]}}
    rows = {str(i): {name: curve["loss"][i] for name, curve in curves.items()} for i in range(samples["steps"])}
    return [Chart("training loss; equal curves cover each other", rows, "step")]


def draw_train_diffs(samples: Samples) -> list[Picture]:
    """Draw the number of lines that each change of train.py adds and removes."""
    rows = {}
    for phase in samples["phases"]:
        for hunk in phase["hunks"]:
            tags = ", ".join(lesson["tag"] for lesson in hunk["lessons"])
            label = f"{phase['title']}, line {hunk['line']}: {tags}"
            rows[label] = {"added": hunk["added"], "removed": hunk["removed"]}
    return [Chart("lines of train.py that each change adds and removes", rows)]


def draw_flash_attention(samples: Samples) -> list[Picture]:
    """Draw the tile that computes each score, in the order of the kernel."""
    tokens, tile = samples["tokens"], samples["tile"]
    cells = [[("", "")] * tokens for _ in range(tokens)]
    for number, step in enumerate(samples["steps"], start=1):
        for i in range(step["query"], min(step["query"] + tile, tokens)):
            for j in range(step["key"], min(step["key"] + tile, i + 1)):
                cells[i][j] = (f"tile {number}", str(number))
    rows = {f"query {i}": row for i, row in enumerate(cells)}
    return [
        Grid("the tile that computes each score; empty scores are masked", [f"key {j}" for j in range(tokens)], rows)
    ]


def draw_roofline(samples: Samples) -> list[Picture]:
    """Draw the time for memory traffic and for arithmetic of each kernel on one GPU."""
    gpu, sizes = samples["gpus"]["h100"], ("gpt2", 16, 1024)
    shape = next(s for s in samples["shapes"] if (s["model"], s["batch_size"], s["block_size"]) == sizes)
    rows = {
        f"{name}, {which}": {"memory": 1e6 * size / gpu["bandwidth"], "arithmetic": 1e6 * flops / gpu["peak"]}
        for name, which, size, flops in shape["costs"]
    }
    return [
        Chart("shortest time on an H100 (µs), GPT-2, 16 sequences of 1,024 tokens; the longer bar is the limit", rows)
    ]


def draw_overlap(samples: Samples) -> list[Picture]:
    """Draw computation and communication of each method with the smallest buckets."""
    size = samples["sizes_mb"][0]
    rows = {
        run["method"]: {name: run[name] for name in ("computation", "communication")}
        for run in samples["runs"]
        if run["bucket_mb"] == size
    }
    return [Timeline(f"{samples['steps']} steps on {samples['ranks']} ranks, buckets of {size} MB", rows)]


PICTURES: dict[str, Callable[[Samples], Sequence[Picture]]] = {
    "ring": draw_ring,
    "fsdp_step": draw_fsdp_step,
    "will_it_fit": draw_will_it_fit,
    "kill_save": draw_kill_save,
    "layout": draw_layout,
    "bug_museum": draw_bug_museum,
    "train_diffs": draw_train_diffs,
    "flash_attention": draw_flash_attention,
    "roofline": draw_roofline,
    "overlap": draw_overlap,
}
