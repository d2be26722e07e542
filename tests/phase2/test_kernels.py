"""Tests of properties that all kernels share: launches, tile sizes, and what only the machine code shows."""

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codecache import FxGraphHashDetails

from bench.kernels.resources import build_calls, record_call
from phase2_triton.kernels import (
    adamw,
    attention,
    core,
    cross_entropy,
    embedding,
    gelu,
    layernorm,
    linear_cross_entropy,
)
from phase2_triton.kernels.core import KernelError, hash_sources, is_interpreted
from tests.helpers.kernels import find_converted_numbers
from tests.helpers.programs import run_with_compiled_kernels


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


@pytest.mark.slow
def test_a_planted_spill_is_reported(compiled_facts):
    """A tile of 32,768 numbers in 4 warps does not fit into registers, and this is found."""
    (problem,) = compiled_facts["spill"]
    assert problem.startswith("planted on sm_90 spills"), problem


@pytest.mark.slow
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
from bench.kernels.machine_code import inspect_machine_code
from bench.kernels.resources import compile_for, find_problems, record_call
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
    ir = compile_first_launch(lambda: module.run_forward(logits, targets, 50304, -1, True))["ttir"]
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
spill = inspect_machine_code(compile_for("sm_90", one_row_kernel, (x, x, x, x, x, x, 32768), sizes))
spill = find_problems("planted", "sm_90", spill)
print(json.dumps({"spill": spill, "code": code}))
"""


Z, IDX = torch.zeros, torch.zeros(1, 3, dtype=torch.int64)
INVALID_CALLS = [
    (lambda: layernorm.layer_norm(Z(3, 5), Z(4)), r"weight has shape \(4,\): pass \(5,\)"),
    (lambda: layernorm.layer_norm(Z(3, 5).long(), Z(5)), "x is torch.int64: pass float32"),
    (lambda: layernorm.layer_norm(Z(1, 20000), Z(20000)), "the kernel supports up to 16384"),
    (lambda: layernorm.layer_norm(Z(3, 5, device="meta"), Z(5)), "where kernels cannot run"),
    (lambda: cross_entropy.cross_entropy(Z(3, 9), Z(4).long()), r"targets have shape \(4,\): pass \(3,\)"),
    (lambda: cross_entropy.cross_entropy(Z(3, 9), Z(3)), "targets are torch.float32.* pass int64"),
    (lambda: cross_entropy.cross_entropy(Z(3, 9), torch.full((3,), 9)), "target 9 is not one of 9 classes"),
    (
        lambda: linear_cross_entropy.linear_cross_entropy(Z(3, 9), Z(9, 5), torch.full((3,), 1)),
        r"weight has shape \(9, 5\)",
    ),
    (
        lambda: attention.causal_attention(Z(1, 2, 5, 16), Z(1, 2, 4, 16), Z(1, 2, 5, 16)),
        "pass three tensors of one type",
    ),
    (lambda: attention.causal_attention(*(Z(1, 1, 2, 160),) * 3), "heads have 160 channels"),
    (lambda: attention.causal_attention(*(Z(1, 2, 5, 16),) * 3, 1.0), "dropout_p=1.0 is out of range"),
    (lambda: embedding.embedding(IDX.short(), Z(5, 8), Z(4, 8)), r"torch.int16, on \S+: pass \(B, T\) of int64"),
    (lambda: embedding.embedding(IDX, Z(5, 8), Z(4, 7)), "pass two matrices of the same width and type"),
    (lambda: embedding.embedding(IDX, Z(5, 8), Z(4, 8), 2), "3 tokens from position 2 do not fit"),
    (lambda: gelu.bias_gelu(Z(3, 5), Z(4)), r"pass \(5,\), the width of x"),
    (lambda: gelu.bias_gelu(Z(3, 5), None, "sigmoid"), "use none or tanh"),
]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(("call", "words"), INVALID_CALLS, ids=[words[:20] for _, words in INVALID_CALLS])
def test_invalid_input_is_refused(call, words):
    """An unsuitable shape, type, number or device is refused."""
    if "is not one of" in words and not is_interpreted():
        pytest.skip("only the interpreter checks labels")
    with pytest.raises(KernelError, match=words):
        call()
