"""The check of the code that torch.compile generates for a GPU, on a machine without one."""

import subprocess

import pytest

from bench.compiled.__main__ import Options, main
from bench.compiled.check import PROBLEMS_FOUND
from nanoGPT.errors import ConfigError
from tests.helpers.programs import run_with_compiled_kernels

NAMES = ["phase 2, --kernels=all", "phase 3: checkpointed block"]
# It runs `python -m bench.compiled.check` with the command line's words, then checks graphs with planted problems.
PROGRAM = """
import runpy
try:
    runpy.run_module("bench.compiled.check", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    print("exit code", stop.code)
import torch, triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from bench.compiled.check import check_graph
from bench.compiled.generate import generate_code


@triton.jit
def scale_kernel(x, y, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i)
    tl.store(y + i, values * factor)
    tl.store(y + BLOCK + i, values / tl.sum(values, 0))


class Graph:
    def __init__(self, function):
        self.function = function

    def generate(self):
        with FakeTensorMode(), torch.device("cuda:0"):
            return generate_code(self.function, torch.zeros(32768))


def scale(x, size):
    y = torch.empty(2 * size, device=x.device)
    scale_kernel[(1,)](x, y, 0.1, BLOCK=size)
    return y


def branch(x):
    return x + 1 if x.sum() > 0 else x


for function in (lambda x: scale(x, 128), lambda x: scale(x, 32768), branch):
    print(check_graph(Graph(function)))
"""


@pytest.fixture(scope="module")
def printed_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Check two graphs of the trainers and three planted ones in one new interpreter, and return what it prints."""
    program = tmp_path_factory.mktemp("compiled") / "planted.py"
    program.write_text(PROGRAM)
    done = run_with_compiled_kernels(str(program), "sm_90", *NAMES)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_compiled_graphs_compile_for_an_h100(printed_lines):
    """The model with all kernels, and a checkpointed block, are one graph each, and every kernel compiles for an H100.

    No kernel computes in fp64, spills registers or has serialized wgmma instructions, and no tensor is copied because a
    kernel writes into it. `make check-ptx` checks all graphs, also for an A100.
    """
    _, model, block, code, *_ = printed_lines
    assert model.endswith("14 of them custom: 0 problems"), printed_lines
    assert block.endswith("0 of them custom: 0 problems") and code == "exit code 0", printed_lines


def test_planted_problems_are_found(printed_lines):
    """The check finds a Python float that Inductor passes as fp64, spilled registers, and a graph break."""
    with_float, spilling, broken = printed_lines[-3:]
    assert with_float == "(1, 1, ['scale_kernel computes in fp64'])"
    assert "scale_kernel computes in fp64" in spilling and "bytes of registers" in spilling
    assert "torch.compile fails" in broken


def test_a_check_that_cannot_start_is_an_error(monkeypatch):
    """If a check ends with Python's exit code 1, as after a failed import, this is an error and not a found problem."""
    ended = {"code": 1}
    monkeypatch.setattr(
        "bench.compiled.__main__.run_check",
        lambda *_: subprocess.CompletedProcess([], ended["code"], "", "ImportError: no torch"),
    )
    with pytest.raises(ConfigError, match="the check could not run: ImportError: no torch"):
        main(Options())
    ended["code"] = PROBLEMS_FOUND
    assert main(Options()) == 1


def test_a_torch_that_is_no_version_is_refused(tmp_path, monkeypatch):
    """--torch must be a version number, because it becomes the name of a directory; a failing venv is one sentence."""
    with pytest.raises(ConfigError, match=r"--torch=../other is not a version: use a number such as 2.11"):
        main(Options(torch="../other"))
    monkeypatch.setattr("bench.compiled.__main__.ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(ConfigError, match=r"--torch=2.11: Python could not create .*torch-2.11"):
        main(Options(torch="2.11"))


def test_an_unknown_architecture_is_refused():
    """An unknown architecture is one error that names the known ones."""
    with pytest.raises(ConfigError, match=r"sm_75 is unknown: use sm_80, sm_90, sm_100"):
        main(Options(architectures="sm_90,sm_75"))
