"""Measurements, their result files, the tables that the documents show, and the configurations of runs."""

import pytest
import torch

from bench.kernels import tune
from bench.kernels.cases import CASE_BUILDERS, build_cases
from bench.kernels.kernels import Stopwatch, measure
from bench.tables import records, tables
from nanoGPT.checkpoint.manifest import serialize_manifest
from nanoGPT.distributed.environment import describe_hardware, find_peak_flops
from nanoGPT.errors import ConfigError
from nanoGPT.job.parse import parse
from nanoGPT.train_config import TrainConfig
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


def test_a_result_is_written_and_becomes_a_table(tmp_path, monkeypatch, capsys):
    """A result names its hardware. Its stale table is reported or updated; damaged results change no document."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ["a.md"])
    document, stale = tmp_path / "a.md", "<!-- table:kernels -->\nold\n<!-- /table -->\n"
    document.write_text(stale)
    row = {"kernel": "gelu", "shape": "2", "pass": "forward", "contender": "ours", "bytes": 10, "flops": 4}
    rows = [{**row, "samples_ms": [8.0, 1.0, 2.0]}, {**row, "pass": "all", "contender": "liger", "error": "missing"}]
    times = {"limits": {"bytes_per_second": 1e4, "flops_per_second": 1e3}, "rows": rows}
    samples = {"rows": [{"name": "times.gelu", "state": "done", "result": times}]}
    path = records.write_result("gpu", torch.device("cpu"), {"rounds": 3}, samples)
    result = records.read_results("gpu")[0]
    assert result["hardware"] == describe_hardware(torch.device("cpu")) and result["samples"] == samples
    assert result["versions"]["torch"] == torch.__version__ and "git_commit" in result
    assert tables.main(check=True) == 1 and document.read_text() == stale
    assert tables.main() == tables.main(check=True) == 0 and capsys.readouterr().out == "stale: a.md\nupdated: a.md\n"
    assert "| gelu | 2 | forward | 2.000 | 200% | liger failed |" in document.read_text()
    for text in ('{"settings": {}}', "[]", "{"):
        path.write_text(text)
        document.write_text(stale)
        with pytest.raises(ConfigError, match="is not a result file"):
            tables.main()
        assert document.read_text() == stale


def test_mfu_uses_the_peak_flops_of_the_gpu(monkeypatch):
    """MFU uses the peak FLOP/s of the GPU. There is no value for a CPU or for a GPU that the table does not contain."""

    def get_peak_flops(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return find_peak_flops(torch.device("cuda", 0), dtype)

    assert get_peak_flops("NVIDIA A100-SXM4-80GB") == 312e12 and get_peak_flops("NVIDIA H100 PCIe") == 756e12
    assert get_peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and get_peak_flops("NVIDIA H20") == 148e12
    assert get_peak_flops("Tesla V100-SXM2-32GB", torch.float16) == 125e12
    for name in ("NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert get_peak_flops(name) is None
    assert get_peak_flops("NVIDIA H200", torch.float32) is None
    assert find_peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_later_values_override_earlier_ones(tmp_path):
    """Flags override config files, later files override earlier ones, and files override a checkpoint and defaults.

    A config file next to the trainer overrides the file of nanoGPT with the same name.
    """
    (tmp_path / "a.py").write_text("n_layer = 3\nbatch_size = 5\nseed = 9\n")
    (tmp_path / "b.py").write_text("batch_size = 6\nseed = 8\n")
    words = [str(tmp_path / "a.py"), "--seed=7", str(tmp_path / "b.py"), "--device=cpu"]
    config = parse(TrainConfig, words, ROOT / "nanoGPT" / "train.py")
    assert (config.n_layer, config.batch_size, config.seed, config.n_head) == (3, 6, 7, TrainConfig().n_head)
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    saved = {**vars(TrainConfig()), "n_layer": 9, "batch_size": 5, "seed": 4, "out_dir": "moved since"}
    files = [{"name": "ckpt.pt", "size": 1, "sha256": ""}]
    manifest = {"config": saved, "step": 4, "world_size": 1, "versions": {}, "files": files}
    (folder / "manifest.json").write_text(serialize_manifest(manifest))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "train_gpt2.py").write_text("batch_size = 6\nseed = 6\n")
    words = ["config/train_gpt2.py", "--seed=7", "--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--device=cpu"]
    config = parse(TrainConfig, words, tmp_path / "train.py")
    assert (config.n_layer, config.batch_size, config.seed) == (9, 6, 7)
    assert config.out_dir == str(tmp_path / "run") and config.init_from == "resume"


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
