"""Measurements, and the tables that the documents show."""

import pytest
import torch

from bench.kernels import tune
from bench.kernels.cases import CASE_BUILDERS, build_cases
from bench.kernels.kernels import Stopwatch, measure
from bench.tables import tables
from measure.mfu import find_peak_flops
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig
from operate.observer import Observer
from tests.helpers.marks import mark_slow
from tests.helpers.training import ROOT


def test_tables_in_the_documents_match_the_results():
    """Every table is in a document, and matches the committed results."""
    names = set[str]()
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert tables.render_document(text) == text, f"{name}: run `python -m bench.tables`"
        names |= {block[1] for block in tables.BLOCK.findall(text)}
    assert names == tables.TABLES.keys()


def test_mfu_uses_the_peak_flops_of_the_gpu(monkeypatch):
    """MFU uses the peak FLOP/s of the GPU. There is no value for a CPU or for a GPU that the table does not contain."""

    def get_peak_flops(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return find_peak_flops(torch.device("cuda", 0), dtype)

    assert get_peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and get_peak_flops("NVIDIA H20") == 148e12
    for name in ("NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert get_peak_flops(name) is None
    assert get_peak_flops("NVIDIA H200", torch.float32) is None
    assert find_peak_flops(torch.device("cpu"), torch.bfloat16) is None
    shape, run = GPTConfig(1, 1, 8, 8, False, 16), Runtime(0, 0, 2, 2, torch.device("cuda", 0), torch.bfloat16)
    get_peak_flops("NVIDIA H100 80GB HBM3")
    line = {"tokens_per_second": 989e12 / shape.flops_per_token()}  # of two ranks together
    observer = Observer(TrainConfig())
    observer.flops_per_token, observer.run = shape.flops_per_token(), run
    observer.log(line)
    assert line["mfu"] == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["adamw", *mark_slow(*CASE_BUILDERS)])
@pytest.mark.heavy
def test_every_kernel_is_measured(name, device):
    """Each case runs for every contender, forward and backward. The tuner accepts our kernel, and no wrong result."""
    device = torch.device(device)
    for case in build_cases(device, {name}, ["124M"]):
        rows = measure(case, Stopwatch(device), 1)
        assert {row["contender"] for row in rows} == set(case.contenders) and "ours" in case.contenders
        assert all("error" not in row and row["samples_ms"][0] > 0 and row["bytes"] > 0 for row in rows)
        if (reference := tune.compute_reference(case)) is not None:
            assert tune.is_correct(case, reference)
            for i in (0, -1):  # a result and a gradient
                wrong = [2 * result if i % len(reference) == j else result for j, result in enumerate(reference)]
                assert not tune.is_correct(case, wrong)
