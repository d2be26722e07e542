"""The matrix: its cells are measured by real runs, and what is wrong in one is said."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from bench.matrix import matrix
from bench.matrix.cells import Found, as_expected, config_of, run_cell
from bench.matrix.matrix import LIMIT, MODEL, MODELS, OPTIONS, Cell, cells, faults, fits, line_of, main, row_of
from bench.matrix.plot import draw, draw_memory
from bench.tables import records as results
from nanoGPT.errors import ConfigError
from nanoGPT.memory.costs import ring_bytes
from workshop.ranks import RankFailed

SMALL = {**MODEL, "n_layer": 2, "n_embd": 32, "block_size": 16, "device": "cpu", "max_iters": 4}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[tuple[Cell, dict]]:
    """Four small cells, one of each phase."""
    folder, found = tmp_path_factory.mktemp("matrix"), []
    picked = [Cell("baseline", 1), Cell("phase1", 2), Cell("phase2", 1, {"kernels": "gelu"})]
    picked += [Cell("phase3", 2, {"fsdp_cpu_offload": True})]
    for i, cell in enumerate(picked):
        run = run_cell(cell.phase, cell.ranks, config_of(cell.phase, folder / str(i), **SMALL, **cell.options))
        assert as_expected(run.ledger), run.ledger
        found.append((cell, run))
    return [(cell, row_of(cell, run, found[0][1])) for cell, run in found]


def test_a_cell_is_a_run(rows):
    """Each phase has the baseline's losses and the formula's bytes, took time, and sent something if it has ranks."""
    for cell, row in rows:
        assert faults(cell, row) == [] and row["step_ms"] > 0 and len(row["losses"]) == 4
        assert (row["sent_bytes"] > 0) == (cell.ranks > 1) and sum(row["peak"].values()) > 0
        sent = [ring_bytes(each["kind"], each["tensor_bytes"], each["ranks"]) for each in row["collectives"]]
        assert row["sent_bytes"] == pytest.approx(sum(sent))
        assert cell.name in line_of(cell, row) and "equal" in line_of(cell, row)


def test_what_a_run_left_is_read(tmp_path):
    """By hand: the median of the steps but the first and the watched one, tokens by it, and the largest difference."""
    config = config_of("baseline", tmp_path, **SMALL)
    lines = [{"step": i, "loss": 3.0 + i, "step_ms": ms} for i, ms in enumerate((1000, 10, 500, 30, None))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "ledger.json").write_text('{"step": 2, "ranks": []}')
    found = run_cell("baseline", 1, config)
    assert found.step_ms == 20 and found.tokens_per_second == config.gradient_accumulation_steps * 2 * 16 / 0.020
    other = Found({**found.curve, 3: found.curve[3] + 0.5}, None, None, {})
    assert found.gap(other) == other.gap(found) == 0.5


def test_what_is_wrong_in_a_cell_is_said(rows):
    """Losses beyond the limit, losses that are no numbers, and bytes that are not the formula's are faults."""
    cell, row = rows[1]
    for gap in (2e-5, float("nan")):
        assert "losses are off" in faults(cell, {**row, "gap": gap})[0]
    assert faults(cell, {**row, "as_expected": False}) == ["its state or traffic is not the formula's"]


def test_what_is_wrong_in_any_cell_fails_the_matrix(monkeypatch, capsys):
    """Each cell is compared with the first; losses that are off, and a rank that fails, are told and returned."""
    memory = {"peak": {}, "allocator_peak_bytes": None}
    first = {"state_bytes": {}, "expected_state_bytes": {}, "padding": 0, "collectives": [], "memory": memory}
    written: list[Any] = []

    def pretend(phase: str, ranks: int, config: Any) -> Found:
        if phase == "phase2":
            raise RankFailed("rank 1:\nno reason")
        return Found({0: 1.0 + 0.1 * (phase == "phase3")}, 5.0, 7.0, {"ranks": [first]})

    monkeypatch.setattr(matrix, "run_cell", pretend)
    monkeypatch.setattr(matrix, "cells", lambda *_, **__: [Cell(f"phase{n}", 2) for n in (1, 2, 3)])
    monkeypatch.setattr(matrix, "report", lambda *words: written.extend(words[-1]))
    wrong = main()
    assert [fault.split(":")[0] for fault in wrong] == ["phase2 on 2 rank(s) failed", "phase3 on 2 rank(s)"]
    assert "off by 1.0e-01" in wrong[1] and [row["phase"] for row in written] == ["phase1", "phase3"]
    assert "failed: no reason" in capsys.readouterr().out


def test_the_picture_is_drawn(rows, tmp_path):
    """Memory and curves of the cells, from a result's file."""
    path = tmp_path / "matrix-here.json"
    result = {"hardware": "here", "versions": {"torch": "2"}, "samples": {"rows": [row for _, row in rows]}}
    path.write_text(json.dumps(result))
    draw(path)
    assert path.with_suffix(".png").stat().st_size > 10000
    axes = Figure().subplots()
    draw_memory(axes, [row for _, row in rows])
    held = [sum(row["peak"].values()) / 1e6 for _, row in rows if not row["options"]]
    tops = [max(bar.get_y() + bar.get_height() for bar in bars) for bars in zip(*axes.containers, strict=True)]
    assert tops == pytest.approx(held), "the bars of a stack stand on each other, in MB"


def test_cells_for_a_machine():
    """On two GPUs nothing with more ranks is run; options are the phases' own, and the first cell is the reference."""
    assert {cell.ranks for cell in cells(2)} == {1, 2} and {cell.ranks for cell in cells(8)} == {1, 2, 4, 8}
    assert cells(1)[0] == Cell("baseline", 1)
    for cell in OPTIONS:
        config_of(cell.phase, Path("x"), **cell.options).check(cell.ranks)
    assert {cell.name for cell in cells(8, "gpt2")} == {"baseline", "phase1", "phase2", "phase3"}
    assert cells(8, "gpt2", interpreted=True)[8] == Cell("phase2", 1, {"kernels": "gelu"})
    with pytest.raises(ConfigError, match="give 4 or more"):
        main(steps=3)


@pytest.mark.heavy
def test_what_a_machine_cannot_hold_is_left_out(monkeypatch):
    """GPT-2 124M in DDP needs 16 bytes a parameter on each rank, and more; FSDP shares them."""
    words = {**MODELS["gpt2"], "device": "cpu", "max_iters": 4}
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PHYS_PAGES": 5_000_000, "SC_PAGE_SIZE": 4096}[name])
    held = {(phase, n): fits(Cell(phase, n), words) for phase in ("phase2", "phase3") for n in (4, 8)}
    assert held == {("phase2", 4): True, ("phase2", 8): False, ("phase3", 4): True, ("phase3", 8): True}


def test_what_was_measured_keeps_its_limits():
    """Committed: every phase on 1, 2, 4 and 8 ranks has the baseline's losses, and state and traffic to the byte."""
    for result in results.read_results("gpt2-matrix"):
        rows = result["samples"]["rows"]
        assert {"phase1", "phase3"} <= {row["phase"] for row in rows if row["ranks"] == 8}
        for row in rows:
            assert row["gap"] <= LIMIT["float32"] and row["as_expected"], row
            assert sum(row["expected_state_bytes"].values()) > 16 * 123e6 / row["ranks"]
    for result in results.read_results("matrix"):
        rows = result["samples"]["rows"]
        plain = {(row["phase"], row["ranks"]) for row in rows if not row["options"]}
        if "cores" in result["hardware"]:
            assert plain == {(phase, n) for phase in ("baseline", "phase1", "phase2", "phase3") for n in (1, 2, 4, 8)}
        for row in rows:
            assert row["gap"] <= LIMIT[row["options"].get("dtype", "float32")] and row["as_expected"], row
