"""`pytest --device=cuda` runs the same tests on GPUs with NCCL; what cannot run there says why."""

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # two tests run at a time, many with ranks of their own


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"])


def pytest_configure(config: pytest.Config) -> None:
    """Before a test file imports Triton, on a machine with a GPU too: kernels on a CPU are interpreted."""
    if config.getoption("--device") == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from workshop.ranks import PRELOADED

    PRELOADED.append("pytest")  # which a rank imports with the test file that its function is in


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes, so that nobody has to remember it: `make test-fast` leaves it out."""
    from tests.helpers.marks import functions_of, starts_processes

    for item in items:
        if isinstance(item, pytest.Function) and any(starts_processes(each, set()) for each in functions_of(item)):
            item.add_marker("ranks")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device=cuda on a machine without a GPU")
    return name


@pytest.fixture
def on_device(device: str) -> Iterator[None]:
    """Tensors are made on the device that is tested: kernels are interpreted on the CPU, compiled on a GPU."""
    with torch.device(device):
        yield


@pytest.fixture
def need_ranks(device: str):
    """Skip a test that needs more GPUs than there are."""

    def check(ranks: int) -> None:
        if device == "cuda" and torch.cuda.device_count() < ranks:
            pytest.skip(f"{ranks} ranks on {torch.cuda.device_count()} GPU(s)")

    return check
