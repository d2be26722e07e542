"""The matrix: real runs measure its cells, and every fault of a cell is reported."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.matrix import matrix
from bench.matrix.cells import RunResult, make_config, matches_formula, run_cell
from bench.matrix.matrix import (
    MODEL,
    OPTIONS,
    Cell,
    find_faults,
    format_row,
    list_cells,
    main,
    make_row,
)
from bench.phases import find_package
from nanoGPT.costs import ring_bytes
from nanoGPT.errors import ConfigError
from tests.helpers.training import train_all
from workshop.ranks import RankFailed

SMALL = {**MODEL, "n_layer": 2, "n_embd": 32, "block_size": 16, "device": "cpu", "max_iters": 4}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[tuple[Cell, dict]]:
    """Four small cells, one for each phase, with their rows."""
    folder, runs = tmp_path_factory.mktemp("matrix"), []
    cells = [Cell("baseline", 1), Cell("phase1", 2), Cell("phase2", 1, {"kernels": "gelu"})]
    cells += [Cell("phase3", 2, {"fsdp_cpu_offload": True})]
    configs = [make_config(cell.phase, folder / str(i), **SMALL, **cell.options) for i, cell in enumerate(cells)]
    for ranks in (1, 2):
        pairs = zip(cells, configs, strict=True)
        train_all(ranks, [(find_package(cell.phase), config) for cell, config in pairs if cell.ranks == ranks])
    for cell, config in zip(cells, configs, strict=True):
        run = run_cell(cell.phase, cell.ranks, config)  # reads the results
        assert matches_formula(run.ledger), run.ledger
        runs.append((cell, run))
    return [(cell, make_row(cell, run, runs[0][1])) for cell, run in runs]


def test_every_cell_matches_the_baseline_and_the_formula(rows):
    """Each phase has the losses of the baseline and matches the formula. Only multiple ranks communicate."""
    for cell, row in rows:
        assert find_faults(cell, row) == [] and row["step_ms"] > 0 and len(row["losses"]) == 4
        assert (row["sent_bytes"] > 0) == (cell.ranks > 1) and sum(row["peak"].values()) > 0
        volumes = [ring_bytes(each["kind"], each["tensor_bytes"], each["ranks"]) for each in row["collectives"]]
        assert row["sent_bytes"] == pytest.approx(sum(volumes))
        assert cell.name in format_row(cell, row) and "yes" in format_row(cell, row)


def test_the_files_of_a_run_are_read(tmp_path):
    """The median step time excludes the first step and the step of the ledger. Expected values are computed by hand."""
    config = make_config("baseline", tmp_path, **SMALL)
    lines = [{"step": i, "loss": 3.0 + i, "step_ms": ms} for i, ms in enumerate((1000, 10, 500, 30, None))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "ledger.json").write_text('{"step": 2, "ranks": []}')
    result = run_cell("baseline", 1, config)
    assert result.step_ms == 20 and result.tokens_per_second == config.gradient_accumulation_steps * 2 * 16 / 0.020
    other = RunResult({**result.curve, 3: result.curve[3] + 0.5}, None, None, {})
    assert result.max_loss_difference(other) == other.max_loss_difference(result) == 0.5


def test_the_faults_of_a_cell_are_reported(rows):
    """A loss difference above the limit, a loss that is NaN, and memory that differs from the formula are faults."""
    cell, row = rows[1]
    for difference in (2e-5, float("nan")):
        assert "max loss difference" in find_faults(cell, {**row, "gap": difference})[0]
    (fault,) = find_faults(cell, {**row, "as_expected": False})
    assert fault == "model state or communication volume does not match the formula"


def test_a_fault_of_any_cell_fails_the_matrix(monkeypatch, capsys):
    """Each cell is compared with the first one. Wrong losses and failed ranks are printed and returned."""
    memory = {"peak": {}, "allocator_peak_bytes": None}
    first = {"state_bytes": {}, "expected_state_bytes": {}, "padding": 0, "collectives": [], "memory": memory}
    written: list[Any] = []

    def fake_run_cell(phase: str, ranks: int, config: Any) -> RunResult:
        if phase == "phase2":
            raise RankFailed("rank 1:\nno reason")
        return RunResult({0: 1.0 + 0.1 * (phase == "phase3")}, 5.0, 7.0, {"ranks": [first]})

    monkeypatch.setattr(matrix, "run_cell", fake_run_cell)
    monkeypatch.setattr(matrix, "list_cells", lambda _: [Cell(f"phase{n}", 2) for n in (1, 2, 3)])
    monkeypatch.setattr(matrix, "write_result", lambda *args: written.extend(args[-1]["rows"]))
    faults = main()
    assert [fault.split(":")[0] for fault in faults] == ["phase2 on 2 rank(s) failed", "phase3 on 2 rank(s)"]
    assert "max loss difference 1.0e-01" in faults[1] and [row["phase"] for row in written] == ["phase1", "phase3"]
    assert "failed: no reason" in capsys.readouterr().out


def test_the_cells_fit_the_machine():
    """No cell has more ranks than there are GPUs. Cells have valid options, and the first is the baseline."""
    assert {cell.ranks for cell in list_cells(2)} == {1, 2} and {cell.ranks for cell in list_cells(8)} == {1, 2, 4, 8}
    assert list_cells(1)[0] == Cell("baseline", 1)
    for cell in OPTIONS:
        make_config(cell.phase, Path("x"), **cell.options).check(cell.ranks)
    with pytest.raises(ConfigError, match="use 4 or more"):
        main(steps=3)
