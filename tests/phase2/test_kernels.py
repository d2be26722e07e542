"""What holds for every kernel: how it is launched, and what it compiles to for three architectures with no GPU."""

import json
import os
import subprocess
import sys

import pytest

from bench.kernels.resources import ARCHITECTURES, calls, recorded, sources
from bench.tables.records import RESULTS
from phase2_triton.kernels.core import table
from tests.helpers.kernels import numbers_converted
from tests.helpers.training import ROOT

REPORT = RESULTS / "kernel-resources.json"


@pytest.mark.parametrize("call", calls(4096))
def test_a_call_never_looks_at_the_device_nor_compiles_for_its_rows(call):
    """On meta tensors, which hold no numbers, every call runs; 4,096 and 4,160 tokens are compiled for alike."""
    launches = recorded("sm_90", calls(4096)[call])
    more = recorded("sm_90", calls(4160)[call])
    assert launches
    assert [(k.__name__, options) for k, _, options in launches] == [(k.__name__, options) for k, _, options in more]
    for kernel, args, _ in launches:
        assert numbers_converted(kernel, args) == set()


def test_the_committed_report_is_fresh():
    """bench/results/kernel-resources.json was made from these kernels, and for an H100 they compile to it again; with
    another Triton, to what does not spill either."""
    committed = json.loads(REPORT.read_text())
    again = "run: python -m bench.kernels.resources --write"
    assert committed["sources"] == sources(), again
    words = [sys.executable, "-m", "bench.kernels.resources", "--json", "sm_90"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    found = report["kernels"]["sm_90"]
    assert report["triton"] != committed["triton"] or found == committed["kernels"]["sm_90"], again
    assert not [name for name, facts in found.items() if facts["stack_bytes"] or facts["spill_instructions"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gates(architecture):
    """Nothing spills, shared memory fits, and wherever there is a dot the tensor cores do it."""
    kernels = json.loads(REPORT.read_text())["kernels"][architecture]
    assert len(kernels) >= 20
    for name, facts in kernels.items():
        assert facts["stack_bytes"] == 0 and facts["spill_instructions"] == 0, name
        assert facts["shared_bytes"] <= ARCHITECTURES[architecture] * 1024, name
        assert facts["registers"] <= 255, name
        if facts["has_dot"] and "fp32" not in name:  # whose products are exact, by the ordinary units
            assert facts["tensor_cores"], name
    assert any(facts["has_dot"] for facts in kernels.values())


def test_a_planted_spill_is_seen():
    """A tile of 65,536 numbers in 4 warps cannot be held in registers: the report says so."""
    words = [sys.executable, "-c", PLANTED]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    facts = json.loads(done.stdout)
    assert facts["stack_bytes"] > 0 and facts["spill_instructions"] > 0, done.stderr


PLANTED = """
import json, torch
from bench.kernels.resources import compiled
from phase2_triton.kernels.layernorm import one_row_kernel
x = torch.empty(65536, device="meta")
args = (x, x, x, x, x, x, 65536, 1e-5)
print(json.dumps(compiled(one_row_kernel, args, {"HAS_BIAS": True, "BLOCK": 65536}, "sm_90")))
"""


def test_the_table_is_sound():
    """Each kernel has rows for a GPU and for the interpreter, by rising width, with the same tile sizes."""
    for kernel, rows in table().items():
        assert {"cuda", "interpreter"} <= rows.keys(), kernel
        one_sided = {"num_warps", "num_stages", "up_to", "heads"}
        names = {frozenset(row) - one_sided for where in rows.values() for row in where}
        assert len(names) == 1, kernel
        for where in rows.values():
            assert [row["up_to"] for row in where] == sorted(row["up_to"] for row in where), kernel


def test_the_model_is_one_graph_for_a_gpu_too():
    """Traced for a GPU with none at hand, the model with all kernels is one graph, and they write to results alone."""
    words = [sys.executable, "-c", GRAPH]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    norm, norm_back = ["mean", "rstd", "y"], ["layernorm", "backward_kernel", ["db", "dw", "dx"]]
    assert found["forward"] == [
        ["embedding", "forward_kernel", ["out"]],
        ["layernorm", "forward_kernel", norm],
        ["attention", "forward_kernel", ["lse", "y"]],
        ["layernorm", "forward_kernel", ["mean", "rstd", "total", "y"]],
        ["gelu", "forward_kernel", ["y"]],
        ["layernorm", "forward_kernel", norm],
        ["cross_entropy", "forward_kernel", ["logits", "losses", "peaks", "totals"]],
    ]
    assert found["backward"] == [
        norm_back,
        ["gelu", "backward_kernel", ["db", "dx"]],
        norm_back,
        ["attention", "backward_kernel", ["delta", "out"]],
        ["attention", "backward_kernel", ["out", "out_v"]],
        norm_back,
        ["embedding", "windows_kernel", ["sums"]],
        ["embedding", "tokens_kernel", ["dwte"]],
        ["embedding", "positions_kernel", ["dwpe"]],
    ]


GRAPH = """
import json
import torch, triton
from triton.backends.compiler import GPUTarget


class Driver:  # a GPU that is only asked for its kind
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


triton.runtime.driver.set_active(Driver())
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from nanoGPT.model import GPT, GPTConfig
from phase2_triton import apply
from phase2_triton.kernels import checks, core

core.architecture = lambda: "sm_90"
checks.unavailable_reason = apply.unavailable_reason = lambda _: None
found = {"forward": [], "backward": []}


def look(name):
    def compiler(graph, _):
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                kernel = getattr(kernel, "fn", kernel)
                module = kernel.__module__.split(".")[-1]
                found[name].append((module, kernel.__name__, sorted(node.kwargs["tensors_to_clone"])))
        return graph

    return compiler


with torch.device("meta"):
    net = GPT(GPTConfig(1, 2, 32, 16, True, 75))
    apply.apply_kernels(net)
    idx = torch.zeros(2, 16, dtype=torch.int64)
backend = aot_autograd(fw_compiler=look("forward"), bw_compiler=look("backward"))
torch.compile(net, backend=backend, fullgraph=True)(idx, idx)[1].backward()
print(json.dumps(found))
"""
