"""The machine code of the kernels, and of what torch.compile generates, for real GPUs: `make check-ptx`."""

import json

import pytest

from bench.kernels.resources import ARCHITECTURES, TABLE, list_launches
from tests.helpers.programs import run_with_compiled_kernels

TABLE_ROWS = json.loads(TABLE.read_text())["rows"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_table_lists_every_launch(architecture):
    """bench/kernels/resources.json has a row for each launch of each public function, forward and backward."""
    assert list_launches(architecture).keys() == TABLE_ROWS.keys()


@pytest.mark.slow
def test_every_kernel_compiles_for_real_gpus():
    """Compiled for A100, H100 and B200, each launch has the registers, shared memory and tensor-core instructions of
    the table.

    With another version of Triton, these may differ. With any version, no kernel spills registers, shared memory fits,
    tensor cores compute every product of half types, and no wgmma instruction waits for the one before it.
    """
    process = run_with_compiled_kernels("-m", "bench.kernels.resources")
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]


@pytest.mark.parametrize(
    ("case", "model", "custom_kernels"),
    [
        ("all", "gpt2", 14),
        ("none", "gpt2", 0),
        ("all", "llama", 4),
        ("none", "llama", 0),
    ],
)
@pytest.mark.slow
def test_the_code_of_torch_compile_compiles_for_an_h100(case, model, custom_kernels):
    """A model with all kernels, or without them, is one graph, and every kernel in its code compiles for an H100.

    No kernel computes in fp64, spills registers or has wgmma instructions that wait for each other. A planted kernel
    does: Inductor passes it a Python float as fp64, and its tile does not fit into registers.
    """
    process = run_with_compiled_kernels("-m", "tests.helpers.generated_code", case, model)
    assert process.returncode == 0, process.stderr[-3000:]
    kernels = json.loads(process.stdout)
    assert sum(not name.startswith("triton_") for name, _ in kernels) == custom_kernels
    assert not any(found for _, found in kernels), kernels
