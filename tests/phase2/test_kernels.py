"""Tests of properties that all kernels share: launches, and compilation for three architectures without a GPU."""

import json
import os
import subprocess
import sys

import pytest

from bench.kernels.resources import ARCHITECTURES, build_calls, hash_sources, record_call
from bench.tables.records import RESULTS
from phase2_triton.kernels.core import load_config_table
from tests.helpers.kernels import find_converted_numbers
from tests.helpers.programs import DEADLINE
from tests.helpers.training import ROOT

REPORT = RESULTS / "kernel-resources.json"


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


def test_the_committed_report_is_up_to_date():
    """Compiled again for an H100, the kernels match bench/results/kernel-resources.json.

    With another version of Triton the numbers can differ, but no kernel may spill registers.
    """
    committed = json.loads(REPORT.read_text())
    command = "run: python -m bench.kernels.resources --write"
    assert committed["sources"] == hash_sources(), command
    arguments = [sys.executable, "-m", "bench.kernels.resources", "--json", "sm_90"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    process = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads(process.stdout)
    kernels = report["kernels"]["sm_90"]
    assert report["triton"] != committed["triton"] or kernels == committed["kernels"]["sm_90"], command
    assert not [name for name, facts in kernels.items() if facts["stack_bytes"] or facts["spill_instructions"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_kernels_stay_within_limits(architecture):
    """No kernel spills registers, shared memory fits, and every tl.dot uses tensor cores, except in fp32."""
    kernels = json.loads(REPORT.read_text())["kernels"][architecture]
    assert len(kernels) >= 20
    for name, facts in kernels.items():
        assert facts["stack_bytes"] == 0 and facts["spill_instructions"] == 0, name
        assert facts["shared_bytes"] <= ARCHITECTURES[architecture] * 1024, name
        assert facts["registers"] <= 255, name
        if facts["has_dot"] and "fp32" not in name:  # exact fp32 products do not use tensor cores
            assert facts["tensor_cores"], name
    assert any(facts["has_dot"] for facts in kernels.values())


def test_a_planted_spill_is_reported():
    """A tile of 32,768 numbers in 4 warps does not fit into registers, and the report shows the spill."""
    arguments = [sys.executable, "-c", SPILL_PROGRAM]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    process = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    facts = json.loads(process.stdout)
    assert facts["stack_bytes"] > 0 and facts["spill_instructions"] > 0, process.stderr


SPILL_PROGRAM = """
import json, torch
from bench.kernels.resources import compile_launch
from phase2_triton.kernels.layernorm import one_row_kernel
x = torch.empty(32768, device="meta")
args = (x, x, x, x, x, x, 32768, 1e-5)
print(json.dumps(compile_launch(one_row_kernel, args, {"HAS_BIAS": True, "BLOCK": 32768}, "sm_90")))
"""


def test_the_configuration_table_is_consistent():
    """Each kernel has rows for a GPU and for the interpreter, sorted by width, with the same tile sizes."""
    for kernel, rows_by_device in load_config_table().items():
        assert {"cuda", "interpreter"} <= rows_by_device.keys(), kernel
        optional_fields = {"num_warps", "num_stages", "up_to", "heads"}
        names = {frozenset(row) - optional_fields for device_rows in rows_by_device.values() for row in device_rows}
        assert len(names) == 1, kernel
        for device_rows in rows_by_device.values():
            assert [row["up_to"] for row in device_rows] == sorted(row["up_to"] for row in device_rows), kernel


def test_the_model_is_one_graph_for_a_gpu():
    """Traced for a GPU on a machine without one, the model with all kernels is one graph.

    Each kernel writes only to its results.
    """
    arguments = [sys.executable, "-c", GRAPH_PROGRAM]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    process = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert process.returncode == 0, process.stderr[-3000:]
    launches = json.loads(process.stdout.splitlines()[-1])
    norm_results, norm_backward = ["mean", "rstd", "y"], ["layernorm", "backward_kernel", ["db", "dw", "dx"]]
    assert launches["forward"] == [
        ["embedding", "forward_kernel", ["out"]],
        ["layernorm", "forward_kernel", norm_results],
        ["attention", "forward_kernel", ["lse", "y"]],
        ["layernorm", "forward_kernel", ["mean", "rstd", "total", "y"]],
        ["gelu", "forward_kernel", ["y"]],
        ["layernorm", "forward_kernel", norm_results],
        ["cross_entropy", "forward_kernel", ["logits", "losses", "peaks", "totals"]],
    ]
    assert launches["backward"] == [
        norm_backward,
        ["gelu", "backward_kernel", ["db", "dx"]],
        norm_backward,
        ["attention", "backward_kernel", ["delta", "out"]],
        ["attention", "backward_kernel", ["out", "out_v"]],
        norm_backward,
        ["embedding", "windows_kernel", ["sums"]],
        ["embedding", "tokens_kernel", ["dwte"]],
        ["embedding", "positions_kernel", ["dwpe"]],
    ]


GRAPH_PROGRAM = """
import json
import torch, triton
from triton.backends.compiler import GPUTarget


class FakeDriver:  # a GPU that only reports its type
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


triton.runtime.driver.set_active(FakeDriver())
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

from nanoGPT.model import GPT, GPTConfig
from phase2_triton import apply
from phase2_triton.kernels import checks, core

core.current_architecture = lambda: "sm_90"
checks.unavailable_reason = apply.unavailable_reason = lambda _: None
launches = {"forward": [], "backward": []}


def make_recorder(direction):
    def record(graph, _):
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                kernel = getattr(kernel, "fn", kernel)
                module = kernel.__module__.split(".")[-1]
                launches[direction].append((module, kernel.__name__, sorted(node.kwargs["tensors_to_clone"])))
        return graph

    return record


with torch.device("meta"):
    net = GPT(GPTConfig(1, 2, 32, 16, True, 75))
    apply.apply_kernels(net)
    idx = torch.zeros(2, 16, dtype=torch.int64)
backend = aot_autograd(fw_compiler=make_recorder("forward"), bw_compiler=make_recorder("backward"))
torch.compile(net, backend=backend, fullgraph=True)(idx, idx)[1].backward()
print(json.dumps(launches))
"""
