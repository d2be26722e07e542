"""Options, markers and fixtures of all tests.

`pytest -m gpu --device=cuda` runs the tests of trainers and kernels on GPUs with NCCL. A test that cannot run there is
skipped with a reason.
"""

import atexit
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

# A make that a test starts must not read the variables of `make test ARGS=...`.
for variable in re.findall(r"(\w+)=", os.environ.pop("MAKEFLAGS", "")):
    os.environ.pop(variable, None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else each rank that compiles tests the processor for seconds
WRITES_NO_BYTECODE = sys.dont_write_bytecode


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="skip tests when they start a process")
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"])


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of tests that run at a time: 3 for 2 cores, because some tests wait.

    A test uses up to 2 GiB of memory. At most six tests share the GPUs at a time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    if config.getoption("--device") == "cuda":
        return max(2, min(6, cores // 2))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(2, min(3 * cores // 2, memory // (2 << 30)))


def pytest_configure(config: pytest.Config) -> None:
    """For tests on the CPU, select interpreted kernels and hide the GPUs. Start the server from which ranks are forked.

    Triton reads the setting for kernels when it is imported. The process that only distributes tests to workers imports
    nothing, so that the workers start immediately.
    """
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)  # else a worker takes more than a second to free a million objects
    # Each worker imports all test files. It reads the files that an earlier run has compiled, and would otherwise spend
    # half of its start-up compiling them, if PYTHONDONTWRITEBYTECODE is set.
    sys.dont_write_bytecode = False
    if config.getoption("--device") == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # jsonschema would build a grammar for a second
    gc.disable()  # imports leave no garbage behind, and each search for it visits a million objects
    import torch
    import torch._inductor.config

    from operate import ranks
    from operate.connection import use_batch_scheduling
    from tests.helpers.forking import start_rank_server
    from tests.helpers.programs import DEADLINE

    use_batch_scheduling()  # on 2 cores, 306 tests with ranks took 0.85 of the processor time
    torch.set_num_threads(1)  # several tests run at a time, and many of them start ranks
    ranks.DEFAULT_TIMEOUT = DEADLINE
    # Without vector instructions, g++ compiles Inductor's code in two thirds of the time. The slow cases of
    # test_compiled_equals_eager use vector instructions.
    torch._inductor.config.cpp.simdlen = 1
    # What many ranks and programs would import: a rank imports the test file of its function, and so pytest.
    ranks.PRELOADED += ["pytest", "tyro", "torch.distributed.optim", "triton.experimental.gluon"]
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()  # so that pytest prints the output of ranks and programs if a test fails
    if config.getoption("--device") == "cpu":  # as on a machine with GPUs, where NCCL and CUDA are torch's defaults
        torch._C._get_accelerator = lambda *_args: torch.device("cuda")
    start_rank_server()
    capture.suspend_global_capture()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker `gpu` to every test that runs on the device of `--device`: `pytest -m gpu --device=cuda`.

    Move the tests with the marker `long` to the front.
    """
    for item in items:
        if isinstance(item, pytest.Function) and uses_device(item):
            item.add_marker("gpu")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage again during the tests, but leave the objects of the imported modules alone.

    With `--fast`, let tests that start a process be skipped.
    """
    sys.dont_write_bytecode = WRITES_NO_BYTECODE
    if session.config.getoption("--fast"):
        BaseProcess.start = subprocess.Popen.__init__ = skip_process  # type: ignore[method-assign]
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # so that the interpreter frees these objects, after pytest's own search for garbage


def skip_process(*_args: object, **_options: object) -> None:
    pytest.skip("this test starts processes")


def uses_device(item: pytest.Function) -> bool:
    """Return whether a test uses the fixture `device`, also through `on_device` or `need_ranks`."""
    is_parameter = hasattr(item, "callspec") and "device" in item.callspec.params
    return "device" in item.fixturenames and not is_parameter


@pytest.fixture(autouse=True)
def end_programs() -> Iterator[None]:
    """Kill the programs that a test has started and that still run, for example because the test has failed."""
    from tests.helpers.programs import Program, kill_programs

    already_started = len(Program.started)
    yield
    kill_programs(Program.started[already_started:])
    del Program.started[already_started:]


@pytest.fixture
def python(tmp_path: Path) -> Iterator[str]:
    """Return a program that replaces `python` in shell scripts. It forks the programs that they start."""
    from tests.helpers.python_server import serve_python

    with serve_python(tmp_path) as script:
        yield script


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the device type of `--device`: cpu or cuda."""
    import torch

    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device=cuda needs a GPU, and this machine has none")
    if name == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("--device=cuda needs a GPU with bfloat16: an A100 or a newer one")
    yield name
    if name == "cuda":
        torch.cuda.empty_cache()  # the tests of other workers need the memory, too


@pytest.fixture
def on_device(device: str) -> Iterator[None]:
    """Create tensors on the tested device. Kernels are interpreted on the CPU and compiled on a GPU."""
    import torch

    with torch.device(device):
        yield


@pytest.fixture
def need_ranks(device: str):
    """Return a function that skips the test if it needs more ranks than this machine has GPUs."""
    import torch

    def check(ranks: int) -> None:
        if device == "cuda" and torch.cuda.device_count() < ranks:
            pytest.skip(f"{ranks} ranks need {ranks} GPUs, and this machine has {torch.cuda.device_count()}")

    return check
