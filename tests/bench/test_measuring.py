"""Measurements, their result files, and the tables that the documents show."""

import copy
import importlib.util
import json
import re
import shlex
import time

import pytest
import torch

from bench.kernels import plots as kernel_plots
from bench.kernels import tune as tune_kernels
from bench.kernels.cases import CASE_BUILDERS, build_cases
from bench.kernels.kernels import Stopwatch, measure
from bench.sharding import zero1
from bench.tables import records as results
from bench.tables import tables
from bench.trainer import throughput
from nanoGPT.checkpoint.manifest import serialize_manifest
from nanoGPT.errors import ConfigError
from nanoGPT.metrics.hardware import PEAK_FLOPS, describe_hardware, find_peak_flops
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig
from phase2_triton.kernels import core
from tests.helpers.marks import mark_slow
from tests.helpers.training import ROOT
from workshop.imports import find_modules


def test_tables_in_the_documents_match_the_results():
    """Every generated table is in a document, and matches the committed results."""
    names = set[str]()
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert tables.render_document(text) == text, f"{name}: run `python -m bench.tables`"
        names |= {block[1] for block in tables.BLOCK.findall(text)}
    assert names == tables.TABLES.keys()


def test_stale_tables_are_reported(tmp_path, monkeypatch, capsys):
    """With check=True, a stale table fails and stays. With check=False, it is updated, and the next check passes."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ["a.md"])
    stale = "<!-- table:published -->\nold\n<!-- /table -->\n"
    (tmp_path / "a.md").write_text(stale)
    assert tables.main(check=True) == 1 and (tmp_path / "a.md").read_text() == stale
    assert tables.main(check=False) == 0 and "predicted" in (tmp_path / "a.md").read_text()
    assert tables.main(check=True) == 0 and capsys.readouterr().out == "stale: a.md\nupdated: a.md\n"


def test_a_result_names_its_hardware(tmp_path, monkeypatch):
    """A result file is named after the hardware. It contains versions, hardware, commit, settings and raw samples."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    path = results.write_result("some-bench", torch.device("cpu"), {"n": 1}, {"seconds": [1.0, 2.0]})
    assert path.name.startswith("some-bench-") and path.parent == tmp_path
    result = json.loads(path.read_text())
    assert result["hardware"] == describe_hardware(torch.device("cpu"))
    assert result["versions"]["torch"] == torch.__version__ and "git_commit" in result
    assert result["samples"] == {"seconds": [1.0, 2.0]} and result["settings"] == {"n": 1}
    assert results.read_results("some-bench") == [result]


def test_committed_results_are_complete():
    """Every committed result names hardware, versions, a commit and a command that exists, and contains raw samples.

    The exceptions are the commands of results that were measured once, which only the commit that they name has.
    """
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in (ROOT / "bench" / "results").glob("*.json"):
        result = json.loads(path.read_text())
        assert {"name", "hardware", "versions", "git_commit", "settings", "samples"} <= result.keys(), path
        if result["name"] in ("runs", "phase2-runs", "scale", "wire"):
            continue
        program, *words = shlex.split(result["settings"]["command"])
        assert words[0] in targets if program == "make" else importlib.util.find_spec(words[1]), path


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make time.perf_counter return the processor time of this process, because other programs would disturb a test."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)


def test_a_result_of_another_version_is_refused(tmp_path):
    """A result of another format, or a damaged result, raises a ConfigError with one sentence."""
    path = tmp_path / "runs-here.json"
    for text, message in (
        ('{"format": 2, "settings": {"command": "make runs"}}', "has format 2.*measure again with `make runs`"),
        ('{"format": ', "is not a result file"),
        ("[]", "is not a result file"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            results.read_result(path)


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("throughput", '{"settings": {}}'),
        ("matrix", '{"settings": {}, "samples": []}'),
        ("runs", '{"settings": {}, "samples": {"rows": [{}]}}'),
        ("matrix", None),
        ("matrix", '{"settings": {"steps": 1}, "hardware": "A", "versions": {"torch": "2"}, "samples": {"rows": []}}'),
    ],
)
def test_damaged_results_are_reported_with_one_sentence(name, damaged, tmp_path, monkeypatch):
    """If results are damaged or missing, the table reports it, and no document is written."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    if damaged:
        (tmp_path / f"{name}-here.json").write_text(damaged)
    with pytest.raises(ConfigError, match=f"^table {name} (cannot be generated|has no rows).*measure again"):
        tables.render_document(f"<!-- table:{name} -->\n<!-- /table -->")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ["a.md", "b.md"])
    for document, table in (("a.md", "activations"), ("b.md", name)):
        (tmp_path / document).write_text(f"<!-- table:{table} -->\nold\n<!-- /table -->\n")
    with pytest.raises(ConfigError):
        tables.main(check=False)
    assert "old" in (tmp_path / "a.md").read_text()


def test_mfu_uses_the_peak_flops_of_the_gpu(monkeypatch):
    """MFU uses the peak FLOP/s of the GPU. There is no value for a CPU or for a GPU that the table does not contain."""
    from nanoGPT.distributed.runtime import Runtime

    def get_peak_flops(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return find_peak_flops(Runtime(0, 0, 1, 1, torch.device("cuda", 0), dtype))

    assert get_peak_flops("NVIDIA A100-SXM4-80GB") == 312e12 and get_peak_flops("NVIDIA H100 PCIe") == 756e12
    assert get_peak_flops("NVIDIA H200") == PEAK_FLOPS["H200"] and get_peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert get_peak_flops("NVIDIA H100 NVL") == 835e12 and get_peak_flops("NVIDIA H20") == 148e12
    assert get_peak_flops("NVIDIA L4") == 121e12 and get_peak_flops("NVIDIA L40S") == 362e12
    assert get_peak_flops("NVIDIA A10") == 125e12 and get_peak_flops("NVIDIA A10G") is None
    assert get_peak_flops("Tesla V100-PCIE-16GB", torch.float16) == 112e12
    assert get_peak_flops("Tesla V100-SXM2-32GB", torch.float16) == 125e12
    assert get_peak_flops("NVIDIA GH200 480GB") is None and get_peak_flops("NVIDIA GeForce RTX 4090 D") is None
    assert get_peak_flops("NVIDIA GeForce RTX 5090 Laptop GPU") is None
    assert get_peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert get_peak_flops("Some GPU") is None and get_peak_flops("NVIDIA H200", torch.float32) is None
    assert find_peak_flops(Runtime(0, 0, 1, 1, torch.device("cpu"), torch.bfloat16)) is None


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/config/*.py")), ids=lambda path: path.name)
def test_named_configurations_are_valid(path):
    """Every named configuration parses and passes validation on 8 ranks."""
    from nanoGPT.job.parse import parse
    from nanoGPT.train_config import validate
    from tests.helpers.training import CONFIGS

    config = parse(CONFIGS[path.parent.parent.name], [str(path), "--device=cpu"], path.parent.parent / "train.py")
    validate(config, 8)
    assert config != CONFIGS[path.parent.parent.name](), "the file sets no value"


def test_later_values_override_earlier_ones(tmp_path):
    """Flags override config files, later files override earlier ones, and files override defaults."""
    from nanoGPT.job.parse import parse

    (tmp_path / "a.py").write_text("n_layer = 3\nbatch_size = 5\nseed = 9\n")
    (tmp_path / "b.py").write_text("batch_size = 6\nseed = 8\n")
    words = [str(tmp_path / "a.py"), "--seed=7", str(tmp_path / "b.py"), "--device=cpu"]
    config = parse(TrainConfig, words, ROOT / "nanoGPT" / "train.py")
    assert (config.n_layer, config.batch_size, config.seed, config.n_head) == (3, 6, 7, TrainConfig().n_head)


def test_a_resumed_run_has_the_configuration_that_it_was_saved_with(tmp_path):
    """Flags override config files, and config files override the checkpoint.

    A config file next to the trainer overrides the file of nanoGPT with the same name.
    """
    from nanoGPT.job.parse import parse

    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    config = {**vars(TrainConfig()), "n_layer": 9, "batch_size": 5, "seed": 4, "out_dir": "moved since"}
    files = [{"name": "ckpt.pt", "size": 1, "sha256": ""}]
    manifest = {"config": config, "step": 4, "world_size": 1, "versions": {}, "files": files}
    (folder / "manifest.json").write_text(serialize_manifest(manifest))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "train_gpt2.py").write_text("batch_size = 6\nseed = 6\n")
    words = ["config/train_gpt2.py", "--seed=7", "--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--device=cpu"]
    config = parse(TrainConfig, words, tmp_path / "train.py")
    assert (config.n_layer, config.batch_size, config.seed) == (9, 6, 7)
    assert config.out_dir == str(tmp_path / "run") and config.init_from == "resume"


def test_committed_results_of_zero1_keep_their_limits():
    """The committed results of ZeRO-1 keep the limits that the notes state.

    Losses differ from the baseline by at most 5e-6. The communication volume, in multiples of the parameters, is 2 for
    flat and 3 for naive and torch. A step takes at most 1.05 times the expected time. Reductions start during backward.
    """
    for result in results.read_results("zero1-backends"):
        for row in result["samples"]["rows"]:
            assert row["loss_gap"] <= 5e-6, row
            volume = row["ring_bytes"] / (4 * row["parameters"] * max(row["ranks"] - 1, 1) / row["ranks"])
            expected = {"DDP": 2, "flat": 2, "naive": 3, "torch": 3}[row["backend"]] * (row["ranks"] > 1)
            assert expected <= volume <= 1.002 * expected, row
    for result in results.read_results("zero1-overhead"):
        assert [row["ranks"] for row in result["samples"]["rows"]] == [2, 4]
        assert all(row["ratio"] <= 1.05 for row in result["samples"]["rows"])
    for result in results.read_results("zero1-timeline"):
        assert result["samples"]["started_in_backward"] > 1
    for result in results.read_results("zero1-state"):
        assert result["samples"]["parameters"] == 124_373_760
    for name in ("backends", "overhead", "timeline", "state"):
        assert results.read_results(f"zero1-{name}"), name


def test_the_zero1_benchmark_runs():
    """On a small model, the benchmark times every kind of step, and its profile shows reductions during backward."""
    shape = GPTConfig(n_layer=4, n_head=2, n_embd=64, block_size=16, bias=False, vocab_size=64)
    rows = zero1.measure_overhead(shape, (2,), 3, "cpu")["rows"]
    assert all(len(samples) == 3 and min(samples) > 0 for samples in rows[0]["samples_ms"].values())
    samples = zero1.measure_timeline(zero1.TEN_MILLION, 2, "cpu")
    names = {name for name, _, _ in samples["events_ms"]}
    assert {"phase: forward", "phase: backward", "phase: step"} < names and samples["started_in_backward"] > 1


QUICK_KERNELS = ("cross_entropy", "adamw")


@pytest.mark.parametrize(
    "name",
    [*QUICK_KERNELS, *mark_slow(*(name for name in CASE_BUILDERS if name not in QUICK_KERNELS))],
)
@pytest.mark.heavy
def test_every_kernel_is_measured(name, device):
    """Each case runs for every contender, forward and backward, and every time is above 0."""
    device = torch.device(device)
    for case in build_cases(device, {name}, ["124M"]):
        rows = measure(case, Stopwatch(device), 1)
        assert {row["contender"] for row in rows} == set(case.contenders) and "ours" in case.contenders
        assert [row.get("error") for row in rows] == [None] * len(rows)
        assert all(row["samples_ms"][0] > 0 and row["bytes"] > 0 for row in rows)


def test_the_plots_of_the_kernels_are_drawn(tmp_path):
    """The roofline and the ablation are drawn from results of the interpreter."""
    kernels = {"limits": {"bytes_per_second": 1e9, "flops_per_second": 1e12}, "rows": []}
    for contender, ms in (("ours", 2.0), ("eager", 3.0)):
        facts = {"kernel": "loss", "shape": "1 x 2", "pass": "step", "bytes": 10**6, "flops": 10**9}
        kernels["rows"].append({**facts, "contender": contender, "samples_ms": [ms]})
    facts = {"size": "small", "compile": False, "peak_memory_bytes": 2**20, "loss": 1.0}
    rows = [{**facts, "kernels": name, "tokens_per_second": [rate]} for name, rate in (("none", 10.0), ("loss", 12.0))]
    for name, samples in (("kernels", kernels), ("kernel-ablation", {"rows": rows})):
        path = tmp_path / f"{name}.json"
        result = {"name": name, "hardware": "one", "settings": {"interpreted": True}, "samples": samples}
        path.write_text(json.dumps(result))
        kernel_plots.main([path])
        assert path.with_suffix(".png").stat().st_size > 5000


@pytest.mark.heavy
def test_tuning_finds_a_row_that_is_no_slower(tmp_path, monkeypatch, processor_time):
    """The tuner starts from a slow row of the table, finds a faster one and writes the complete table."""
    if not core.is_interpreted():
        pytest.skip("this test tunes the row of the interpreter")
    table = copy.deepcopy(core.load_config_table())
    monkeypatch.setattr(core, "load_config_table", lambda: table)
    monkeypatch.setattr(tune_kernels, "load_config_table", core.load_config_table)
    core.load_config_table()["layernorm_forward"]["interpreter"] = [
        {"up_to": 64, "rows": 8, "block": 64}
    ]  # 16 programs of 8 rows
    tune_kernels.main(tune_kernels.Options(only="layernorm_forward", write=True, to=str(tmp_path / "table.json")))
    written = json.loads((tmp_path / "table.json").read_text())
    assert written["layernorm_forward"]["interpreter"][0]["rows"] > 8
    assert written["layernorm_forward"]["cuda"] == core.load_config_table()["layernorm_forward"]["cuda"]


def test_programs_report_errors_in_one_sentence():
    """A program that parses flags prints one sentence for a wrong flag, instead of a traceback."""
    sources = {name: path.read_text() for name, path in find_modules().items() if not name.startswith("tests")}
    programs = [name for name, text in sources.items() if "    command_line(main, sys.argv[1:])" in text]
    assert len(programs) > 10 and [name for name in programs if "with report_errors" not in sources[name]] == []


@pytest.mark.heavy
def test_a_wrong_candidate_is_rejected(device):
    """The rows of every kernel compute the results and gradients of torch. A wrong gradient is detected."""
    for kernel in {kernel for kernel, _ in tune_kernels.TIMED.values()} - {"adamw"}:
        case = next(build_cases(torch.device(device), {kernel}, ["124M"]))
        reference = tune_kernels.compute_reference(case)
        assert tune_kernels.is_correct(case, reference), kernel
        assert kernel not in ("loss", "cross_entropy") or reference[0].dim() == 0  # the loss
        for i in (0, -1):  # a result and a gradient
            wrong = list(reference)
            wrong[i] = 2 * wrong[i]
            assert not tune_kernels.is_correct(case, wrong), kernel


def test_the_throughput_of_a_phase_is_measured(tmp_path):
    """A row contains the times of all steps after the warmup, the peak memory, and the error of a failed run.

    The peak memory is the maximum over all ranks. On a CPU, there is no MFU.
    """
    fields = {"max_iters": throughput.WARMUP + 4, "device": "cpu", "n_layer": 1, "n_embd": 32, "n_head": 2}
    row = throughput.measure(("tiny", "phase1", 2, fields), False, tmp_path / "run")
    assert len(row["step_ms"]) == 4 and row["mfu"] is None and row["failed"] is None
    assert row["peak_bytes"] > 10 * row["parameters"] and "phase1" in throughput.format_row(row)
    assert throughput.quartile_spread([1.0, 2.0, 3.0]) == 0.5
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    ledger["ranks"][0]["memory"]["peak"]["other"] += 1000  # the peak is the maximum over all ranks
    (tmp_path / "run" / "ledger.json").write_text(json.dumps(ledger))
    second_row = throughput.measure(("tiny", "phase1", 2, fields), False, tmp_path / "run")
    assert second_row["peak_bytes"] == sum(ledger["ranks"][0]["memory"]["peak"].values()) > row["peak_bytes"]
    failed_row = throughput.measure(("tiny", "phase3", 2, {**fields, "dataset": "none"}), False, tmp_path / "broken")
    assert "none" in failed_row["failed"] and failed_row["failed"] in throughput.format_row(failed_row)
    on_cpu, on_gpus = ({phase for _, phase, _, _ in throughput.list_cases(gpus)} for gpus in (0, 8))
    assert on_cpu == on_gpus
