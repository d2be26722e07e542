"""The matrix: real runs measure its cells, and every fault of a cell is reported."""

import json
from typing import Any

from bench.matrix import matrix
from bench.matrix.cells import RunResult, make_config, run_cell
from bench.matrix.matrix import (
    MODEL,
    Cell,
    main,
)
from workshop.ranks import RankFailed

SMALL = {**MODEL, "n_layer": 2, "n_embd": 32, "block_size": 16, "device": "cpu", "max_iters": 4}


def test_the_files_of_a_run_are_read(tmp_path):
    """The median step time excludes the first step and the step of the ledger. Expected values are computed by hand."""
    config = make_config("baseline", tmp_path, **SMALL)
    lines = [{"step": i, "loss": 3.0 + i, "step_ms": ms} for i, ms in enumerate((1000, 10, 500, 30, None))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "ledger.json").write_text('{"step": 2, "ranks": []}')
    result = run_cell("baseline", 1, config)
    assert (
        result.step_ms == 20
        and result.tokens_per_second == config.gradient_accumulation_steps * config.batch_size * 16 / 0.020
    )


def test_a_fault_of_any_cell_fails_the_matrix(monkeypatch, capsys):
    """Each cell is compared with the first one. Wrong losses, bytes that differ from the formula, and failed ranks are
    printed and returned."""
    state = {"parameters": 4, "gradients": 4, "optimizer_state": 8}
    sent = {"kind": "all-reduce", "ranks": 2, "calls": 1, "tensor_bytes": 8, "ring_bytes": 8.0, "expected_bytes": 8}
    memory = {"peak": {"parameters": 4}, "allocator_peak_bytes": None}
    rank = {"state_bytes": state, "expected_state_bytes": state, "padding": 0, "collectives": [sent], "memory": memory}
    written: list[Any] = []

    def fake_run_cell(phase: str, ranks: int, config: Any) -> RunResult:
        if phase == "phase2":
            raise RankFailed("rank 1:\nno reason")
        loss = {"phase1": 1.0, "phase3": 1.1}.get(phase, float("nan"))
        wrong = {"collectives": [{**sent, "tensor_bytes": 12}]} if phase == "baseline" else {}
        return RunResult({0: loss}, 5.0, 7.0, {"ranks": [{**rank, **wrong}]})

    monkeypatch.setattr(matrix, "run_cell", fake_run_cell)
    cells = [Cell(phase, 2) for phase in ("phase1", "phase2", "phase3", "baseline")]
    monkeypatch.setattr(matrix, "list_cells", lambda _: cells)
    monkeypatch.setattr(matrix, "write_result", lambda *args: written.extend(args[-1]["rows"]))
    faults = main()
    assert [fault.split(":")[0] for fault in faults[:2]] == ["phase2 on 2 rank(s) failed", "phase3 on 2 rank(s)"]
    assert "max loss difference 1.0e-01" in faults[1] and "max loss difference" in faults[2], faults
    assert "does not match the formula" in faults[3], faults
    assert [row["sent_bytes"] for row in written] == [8.0] * 3
    assert "failed: no reason" in capsys.readouterr().out
