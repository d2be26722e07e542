"""Tests of properties that all kernels share: launches, and compilation for three architectures without a GPU."""

import contextlib
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch._inductor.codecache import FxGraphHashDetails

from bench.kernels import ladder, tune
from bench.kernels.forecast import SM_COUNT
from bench.kernels.resources import ARCHITECTURES, REPORT, build_calls, record_call
from bench.tables.records import read_results
from phase2_triton.kernels import adamw, core
from phase2_triton.kernels.core import hash_sources, load_config_table
from tests.helpers.kernels import find_converted_numbers
from tests.helpers.programs import run_with_compiled_kernels

REPORTS = json.loads(REPORT.read_text())  # by version of Triton
WRITE_REPORT = "run with each version of Triton in it: python -m bench.kernels.resources --write"


@pytest.mark.parametrize("call", build_calls(4096))
def test_a_call_neither_waits_for_the_device_nor_compiles_for_its_rows(call):
    """Every call runs on meta tensors, which contain no numbers. 4,096 and 4,160 tokens use the same compiled
    kernels."""
    launches = record_call("sm_90", build_calls(4096)[call])
    other_launches = record_call("sm_90", build_calls(4160)[call])
    assert launches
    assert [(k.__name__, options) for k, _, options in launches] == [
        (k.__name__, options) for k, _, options in other_launches
    ]
    for kernel, args, _ in launches:
        assert find_converted_numbers(kernel, args) == set()


def test_changed_kernels_are_compiled_again():
    """torch.compile stores graphs on disk. Their key contains the kernels' code, so that it never uses an old graph."""
    assert hash_sources() in torch.compiler.config.cache_key_tag
    assert hash_sources() in FxGraphHashDetails(None, [], {}, []).cache_key_tag


def test_the_committed_report_is_up_to_date():
    """bench/results/kernel-resources.json describes the kernels as they are now, with each version of Triton in it."""
    assert all(report["sources"] == hash_sources() for report in REPORTS.values()), WRITE_REPORT


def test_the_ladder_describes_the_kernels(monkeypatch):
    """The committed ladder lists the steps of the kernels as they are now, and a step requests the bytes that it shows.

    Only attention with all keys at once spills registers.
    """
    (result,) = read_results("kernel-ladder")
    rows, steps = result["samples"]["rows"], ladder.list_steps()
    assert result["settings"]["sources"] == hash_sources(), "run: python -m bench.kernels.ladder --write"
    assert [(row["kernel"], row["step"]) for row in rows] == [(step.kernel, step.number) for step in steps]
    assert [row["kernel"] for row in rows if row["stack_bytes"]] == ["attention, forward"]
    monkeypatch.setattr(core, "current_architecture", lambda: ladder.ARCHITECTURE)
    for row, step in zip(rows, steps, strict=True):
        if row["kernel"] == "cross-entropy":
            with ladder.count_requested_bytes() as counts:
                step.run("cpu")
            assert counts == {"loaded": row["loaded"], "stored": row["stored"]}, step


@pytest.mark.slow
def test_the_committed_report_can_be_reproduced():
    """Compiled again for an H100, the kernels match the committed report of this Triton.

    With another version of Triton the numbers can differ, but no kernel may spill registers.
    """
    process = run_with_compiled_kernels("-m", "bench.kernels.resources", "--json", "sm_90")
    assert process.returncode == 0, process.stderr[-3000:]
    kernels = json.loads(process.stdout)["kernels"]["sm_90"]
    if triton.__version__ in REPORTS:
        assert kernels == REPORTS[triton.__version__]["kernels"]["sm_90"], WRITE_REPORT
    assert not [name for name, facts in kernels.items() if facts["stack_bytes"] or facts["spill_instructions"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("version", REPORTS)
def test_compiled_kernels_stay_within_limits(version, architecture):
    """No kernel spills registers, shared memory fits, and every tl.dot uses tensor cores, except in fp32.

    No kernel has wgmma instructions that wait for each other. LayerNorm sums a row within one warp: only the mean
    and rstd of each row of a program, 4 bytes each, pass through shared memory. A sum over 4 warps would need more.
    """
    kernels = REPORTS[version]["kernels"][architecture]
    assert len(kernels) >= 20
    for name, facts in kernels.items():
        assert facts["stack_bytes"] == 0 and facts["spill_instructions"] == 0, name
        assert facts["shared_bytes"] <= ARCHITECTURES[architecture] * 1024, name
        assert facts["registers"] <= 255, name
        assert not facts["serialized_wgmma"], name
        if "layer_norm" in name and "forward_kernel" in name:
            assert facts["shared_bytes"] == 4 * facts["constants"]["ROWS"], name
        if facts["has_dot"] and "fp32" not in name:  # exact fp32 products do not use tensor cores
            assert facts["tensor_cores"], name
    assert any(facts["has_dot"] for facts in kernels.values())


@pytest.mark.parametrize("version", REPORTS)
def test_all_persistent_programs_run_at_the_same_time(version):
    """On an H100, LayerNorm's backward starts as many programs as fit, by their registers and their shared memory.

    With two pipeline stages, its loads are copies that run ahead.
    """
    table = load_config_table()["layernorm_backward"]
    rows = table.get(f"sm_90 with Triton {version[:3]}", table["sm_90"])
    for width, call in itertools.product((768, 1600), ("layer_norm", "add_layer_norm")):
        option = "HAS_BIAS" if call == "layer_norm" else "HAS_DTOTAL"
        facts = REPORTS[version]["kernels"]["sm_90"][f"{call} {width}: backward_kernel {option}"]
        row = next(row for row in rows if width <= row["up_to"])
        registers = -(-facts["registers"] // 8) * 8 * 32 * facts["num_warps"]
        per_multiprocessor = min(65536 // registers, 228 * 1024 // (facts["shared_bytes"] + 1024))
        assert row["programs"] <= per_multiprocessor * SM_COUNT, (call, width, per_multiprocessor)
        assert facts["constants"]["NUM_STAGES"] == row["num_stages"]
        assert (facts["async_copies"] > 0) == (row["num_stages"] > 1), (call, width)


def test_the_configuration_table_is_consistent():
    """Each kernel has rows for a GPU and for the interpreter, sorted by width, with the same tile sizes."""
    for kernel, rows_by_device in load_config_table().items():
        assert {"cuda", "interpreter"} <= rows_by_device.keys(), kernel
        optional_fields = {"num_warps", "num_stages", "up_to", "heads"}
        names = {frozenset(row) - optional_fields for device_rows in rows_by_device.values() for row in device_rows}
        assert len(names) == 1, kernel
        for device_rows in rows_by_device.values():
            assert [row["up_to"] for row in device_rows] == sorted(row["up_to"] for row in device_rows), kernel


def test_rows_can_be_for_one_version_of_triton(monkeypatch):
    """With Triton 3.6 on an H100, dk and dv have their own row, which tuning changes. Others use that of sm_90."""
    rows = load_config_table()["attention_dkv"]
    with core.record_launches("sm_90"):
        for version, name in (("3.6.0", "sm_90 with Triton 3.6"), ("3.9.0", "sm_90")):
            monkeypatch.setattr(triton, "__version__", version)
            assert core.find_rows("attention_dkv") is rows[name] is tune.architecture_rows("attention_dkv")


def test_a_launch_selects_the_device_of_its_tensors(monkeypatch):
    """A compiled kernel is launched on the GPU of its tensors, even if another GPU is the current one.

    There may be no GPU here, so the test records the selected device and the launch instead.
    """
    events = []

    @contextlib.contextmanager
    def select(device):
        events.append(device)
        yield
        events.append("end")

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: events.append(grid)

    x = torch.zeros(3)
    monkeypatch.setattr(core, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_of", select)
    monkeypatch.setattr(torch.cuda, "device", select)
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)
    core.launch(Kernel(), (7,), x)
    assert events[0] is x and events[1:] == [(7,), "end"]
    events.clear()
    on_gpu_1 = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    adamw.launch_update(Kernel(), (7,), on_gpu_1)
    assert events == [torch.device("cuda", 1), (7,), "end"]


@pytest.fixture(scope="module")
def compiled_facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compile kernels for an H100 in one new interpreter, and return what CODE_PROGRAM reads in their code."""
    process = run_with_compiled_kernels("-c", CODE_PROGRAM, str(tmp_path_factory.mktemp("compiled")))
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout)


def test_a_planted_spill_is_reported(compiled_facts):
    """A tile of 32,768 numbers in 4 warps does not fit into registers, and the report shows the spill."""
    facts = compiled_facts["spill"]
    assert facts["stack_bytes"] > 0 and facts["spill_instructions"] > 0, facts


def test_what_the_interpreter_cannot_show_is_in_the_machine_code(compiled_facts):
    """AdamW tests its addresses before it uses 16-byte accesses, and cross-entropy waits before it overwrites logits.

    Without either, the interpreter computes the same numbers. Planted copies of the kernels lack it in their code.
    """
    assert compiled_facts["code"] == {
        "adamw": {"tests addresses": True, "16-byte accesses": True},
        "adamw without test": {"tests addresses": False, "16-byte accesses": True},
        "cross_entropy": [True, True],
        "cross_entropy without barrier": [False, False],
    }


CODE_PROGRAM = """
import json, re, sys
from pathlib import Path
import torch
from bench.kernels.resources import compile_for, compile_launch, record_call
from phase2_triton.kernels import adamw, cross_entropy
from phase2_triton.kernels.layernorm import one_row_kernel
from tests.helpers.kernels import import_variant


def compile_first_launch(call):
    return compile_for("sm_90", *record_call("sm_90", call)[0]).asm


def inspect_adamw(module):
    def step():
        p = torch.empty(4096, device="meta", requires_grad=True)
        p.grad = torch.empty_like(p)
        module.TritonAdamW([p]).step()

    ptx = compile_first_launch(step)["ptx"]
    tests = re.search(r"and\\.b64\\s+%rd\\d+, %rd\\d+, 15;", ptx)
    return {"tests addresses": tests is not None, "16-byte accesses": "ld.global.v4" in ptx}


def find_barriers(module):
    logits, targets = torch.empty(64, 50304, device="meta"), torch.empty(64, dtype=torch.int64, device="meta")
    ir = compile_first_launch(lambda: module.run_forward(logits, targets, 50304, -1, 0.0, 0.0, True))["ttir"]
    first_gradient, last_gradient = (each.start() for each in list(re.finditer("tt.store", ir))[3:5])
    target_logit, target_gradient = ir.rindex("tt.reduce", 0, first_gradient), ir.rindex("tt.store")
    return ["barrier" in ir[target_logit:first_gradient], "barrier" in ir[last_gradient:target_gradient]]


folder = Path(sys.argv[1])
bare_adamw = import_variant(folder, adamw, "bare_adamw", [("((p | g | m | v) % 16 == 0) & ", "")])
bare_loss = import_variant(folder, cross_entropy, "bare_loss", [("        tl.debug_barrier()", "        pass")])
x = torch.empty(32768, device="meta")
sizes = {"EPS": 1e-5, "HAS_BIAS": True, "BLOCK": 32768}
code = {
    "adamw": inspect_adamw(adamw),
    "adamw without test": inspect_adamw(bare_adamw),
    "cross_entropy": find_barriers(cross_entropy),
    "cross_entropy without barrier": find_barriers(bare_loss),
}
spill = compile_launch(one_row_kernel, (x, x, x, x, x, x, 32768), sizes, "sm_90")
print(json.dumps({"spill": spill, "code": code}))
"""
