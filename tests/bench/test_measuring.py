"""What is measured, how it is written down, and that the documents say the same."""

import copy
import json
import re
import statistics
import time

import pytest
import torch

from bench.kernels import plots as kernel_plots
from bench.kernels import tune as tune_kernels
from bench.kernels.cases import MAKERS, cases
from bench.kernels.kernels import Stopwatch, measure
from bench.sharding import zero1
from bench.tables import records as results
from bench.tables import tables
from bench.trainer import step_overhead, throughput
from nanoGPT.checkpoint.manifest import seal
from nanoGPT.errors import ConfigError
from nanoGPT.metrics.hardware import PEAK_FLOPS, hardware, peak_flops
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig
from phase2_triton.kernels import core
from tests.helpers.training import ROOT


def test_tables_in_the_documents_are_those_of_the_results():
    """Every table of the documents is made from the committed results and is up to date."""
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text()
        assert tables.rendered(text) == text, f"{name}: run `python -m bench.tables`"
    assert "<!-- table:runs -->" in (ROOT / "README.md").read_text()


def test_stale_tables_are_told(tmp_path, monkeypatch, capsys):
    """A check fails and writes nothing; without it the table is made anew, and the next check passes."""
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ["a.md"])
    stale = "<!-- table:published -->\nold\n<!-- /table -->\n"
    (tmp_path / "a.md").write_text(stale)
    assert tables.main(check=True) == 1 and (tmp_path / "a.md").read_text() == stale
    assert tables.main(check=False) == 0 and "planned" in (tmp_path / "a.md").read_text()
    assert tables.main(check=True) == 0 and capsys.readouterr().out == "stale: a.md\nrenewed: a.md\n"


def test_a_result_names_its_hardware(tmp_path, monkeypatch):
    """A result holds versions, hardware, commit, settings and raw samples, in a file named after the hardware."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    path = results.write_result("some-bench", torch.device("cpu"), {"n": 1}, {"seconds": [1.0, 2.0]})
    assert path.name.startswith("some-bench-") and path.parent == tmp_path
    found = json.loads(path.read_text())
    assert found["hardware"] == hardware(torch.device("cpu")) and found["versions"]["torch"] == torch.__version__
    assert found["samples"] == {"seconds": [1.0, 2.0]} and found["settings"] == {"n": 1} and "git_commit" in found
    assert results.read_results("some-bench") == [found]


def test_committed_results_are_raw():
    """Every committed result but that of compiling names hardware, versions and a commit, and holds raw samples."""
    for path in set((ROOT / "bench" / "results").glob("*.json")) - {ROOT / "bench/results/kernel-resources.json"}:
        found = json.loads(path.read_text())
        assert {"name", "hardware", "versions", "git_commit", "settings", "samples"} <= found.keys(), path


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clocks count the processor time of this process: other programs, which a test must not see, take none."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)


@pytest.mark.heavy
def test_the_trainer_adds_little_to_a_step(tmp_path, processor_time):
    """In a short run the trainer's step costs less than 10% over the bare loop's, and data less than 3% of it; the
    committed long one says how much exactly."""
    shape = {"gradient_accumulation_steps": 1, "device": "cpu", "out_dir": str(tmp_path), "learning_rate": 1e-4}
    samples = step_overhead.measure(TrainConfig(**shape), 60)
    bare, trainer, data = (min(samples[name]) for name in ("bare_ms", "trainer_ms", "data_ms"))  # least disturbed
    assert trainer < 1.10 * bare and data < 0.03 * trainer, (bare, trainer, data)


@pytest.mark.heavy
def test_the_ledger_slows_a_step_by_little(tmp_path, processor_time):
    """By less than half in a few steps, whatever else the machine does; the committed measurement has at most 20%."""
    config = TrainConfig(device="cpu", out_dir=str(tmp_path), gradient_accumulation_steps=8)
    samples = step_overhead.measure_ledger(config, 6)
    assert min(samples["watched_ms"]) < 1.5 * min(samples["unwatched_ms"]), samples
    for result in results.read_results("step-overhead"):
        watched, unwatched = (statistics.median(result["samples"][name]) for name in ("watched_ms", "unwatched_ms"))
        assert watched <= 1.2 * unwatched


# Numbers with a unit that the documents state outside of their generated tables, and where each comes from.
SOURCES = {
    "5 percent": "asserted by tests/bench/test_plan.py",
    "16 bytes": "4 of a parameter, 4 of its gradient, 8 of AdamW's moments",
    "25 MB": "the default of zero1_bucket_mb",
    "4 MB": "the setting of the timeline, in its result file",
    "6.6 GB": "65,536 x 50,304 x 2",
    "2 bytes": "of a bfloat16",
    "512 MiB": "CHUNK_BYTES of the fused loss",
    "28 bytes": "AdamW reads four and writes three numbers of 4",
    "4 bytes": "of an fp32",
    "25 GB": "16 x 1,556,840,000",
    "3.1 GB": "an eighth of it",
}


def test_every_number_with_a_unit_has_a_source():
    """Outside of the tables that are made from result files, the documents' numbers are arithmetic, settings, or what a
    test asserts; a measured one would go stale there."""
    unit = r"ms|s|tokens/s|tokens a second|[kMG]i?B|TFLOP/s|%|percent|minutes|seconds|hours|times|bytes"
    for name in tables.DOCUMENTS:
        text = re.sub(r"<!-- (\w+):.*?<!-- /\1 -->|```.*?```|`[^`\n]*`", "", (ROOT / name).read_text(), flags=re.S)
        for number in re.finditer(rf"(?<![\w.,/-])\d[\d,.]*\s?(?:{unit})(?![\w/])", text):
            assert number[0].replace("\n", " ") in SOURCES, (name, number[0])


def test_a_result_of_another_version_is_one_sentence(tmp_path):
    """And so is one that is damaged."""
    path = tmp_path / "runs-here.json"
    for text, said in (
        ('{"format": 2, "settings": {"command": "make runs"}}', "has format 2.*measure again with `make runs`"),
        ('{"format": ', "is no result file"),
        ("[]", "is no result file"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            results.read_result(path)


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("step-overhead", '{"settings": {}}'),
        ("step-overhead", '{"settings": {}, "samples": {"bare_ms": []}}'),
        ("matrix", '{"settings": {}, "samples": []}'),
        ("runs", '{"settings": {}, "samples": {"rows": [{}]}}'),
        ("kernel-resources", '{"kernels": '),
        ("kernel-resources", None),
        ("matrix", None),
        ("matrix", '{"settings": {"steps": 1}, "hardware": "A", "versions": {"torch": "2"}, "samples": {"rows": []}}'),
    ],
)
def test_damaged_results_are_one_sentence(name, damaged, tmp_path, monkeypatch):
    """A table says that its results are damaged, or gone, and no document is written before all are made."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    if damaged:
        (tmp_path / (f"{name}.json" if name == "kernel-resources" else f"{name}-here.json")).write_text(damaged)
    table = {"step-overhead": "overhead", "kernel-resources": "kernel_resources"}.get(name, name)
    with pytest.raises(ConfigError, match=f"^table {table} (cannot be made|has no rows).*measure again"):
        tables.rendered(f"<!-- table:{table} -->\n<!-- /table -->")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "DOCUMENTS", ["a.md", "b.md"])
    for document, of in (("a.md", "activations"), ("b.md", table)):
        (tmp_path / document).write_text(f"<!-- table:{of} -->\nold\n<!-- /table -->\n")
    with pytest.raises(ConfigError):
        tables.main(check=False)
    assert "old" in (tmp_path / "a.md").read_text()


def test_the_peaks_of_devices(monkeypatch):
    """MFU uses the peak of the GPU it runs on, none on a CPU, and none on a GPU that the table does not know."""
    from nanoGPT.distributed.runtime import Runtime

    def peak_of(name: str, dtype: torch.dtype = torch.bfloat16) -> float | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return peak_flops(Runtime(0, 0, 1, 1, torch.device("cuda", 0), dtype))

    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12 and peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA H200") == PEAK_FLOPS["H200"] and peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("Some GPU") is None and peak_of("NVIDIA H200", torch.float32) is None
    assert peak_flops(Runtime(0, 0, 1, 1, torch.device("cpu"), torch.bfloat16)) is None


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/config/*.py")), ids=lambda path: path.name)
def test_named_configurations_are_valid(path):
    """Every named configuration parses and passes validation on 8 ranks."""
    from nanoGPT.job.parse import parse
    from nanoGPT.train_config import validate
    from tests.helpers.training import CONFIGS

    config = parse(CONFIGS[path.parent.parent.name], [str(path), "--device=cpu"], path.parent.parent / "train.py")
    validate(config, 8)
    assert config != CONFIGS[path.parent.parent.name](), "it sets nothing"


def test_later_words_win(tmp_path):
    """Flags win over files, later files over earlier ones, and files over defaults."""
    from nanoGPT.job.parse import parse

    (tmp_path / "a.py").write_text("n_layer = 3\nbatch_size = 5\nseed = 9\n")
    (tmp_path / "b.py").write_text("batch_size = 6\nseed = 8\n")
    words = [str(tmp_path / "a.py"), "--seed=7", str(tmp_path / "b.py"), "--device=cpu"]
    config = parse(TrainConfig, words, ROOT / "nanoGPT" / "train.py")
    assert (config.n_layer, config.batch_size, config.seed, config.n_head) == (3, 6, 7, TrainConfig().n_head)


def test_a_resumed_run_has_the_configuration_that_it_was_saved_with(tmp_path):
    """Flags win over files, and files over what the checkpoint says; a file beside the trainer over nanoGPT's."""
    from nanoGPT.job.parse import parse

    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    config = {**vars(TrainConfig()), "n_layer": 9, "batch_size": 5, "seed": 4, "out_dir": "moved since"}
    files = [{"name": "ckpt.pt", "size": 1, "sha256": ""}]
    manifest = {"config": config, "step": 4, "world_size": 1, "versions": {}, "files": files}
    (folder / "manifest.json").write_text(seal(manifest))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "train_gpt2.py").write_text("batch_size = 6\nseed = 6\n")
    words = ["config/train_gpt2.py", "--seed=7", "--init_from=resume", f"--out_dir={tmp_path / 'run'}", "--device=cpu"]
    config = parse(TrainConfig, words, tmp_path / "train.py")
    assert (config.n_layer, config.batch_size, config.seed) == (9, 6, 7)
    assert config.out_dir == str(tmp_path / "run") and config.init_from == "resume"


def test_what_was_measured_of_zero1_keeps_its_limits():
    """Committed: losses within 5e-6 of the baseline's over 50 steps at every rank count, traffic 2 for flat and 3 for
    the naive version and torch's, a step within 1.05 of what its collectives leave to expect, reductions begun before
    backward ended."""
    for result in results.read_results("zero1-backends"):
        for row in result["samples"]["rows"]:
            assert row["loss_gap"] <= 5e-6, row
            sent = row["ring_bytes"] / (4 * row["parameters"] * max(row["ranks"] - 1, 1) / row["ranks"])
            wanted = {"DDP": 2, "flat": 2, "naive": 3, "torch": 3}[row["backend"]] * (row["ranks"] > 1)
            assert wanted <= sent <= 1.002 * wanted, row
    for result in results.read_results("zero1-overhead"):
        assert [row["ranks"] for row in result["samples"]["rows"]] == [2, 4]
        assert all(row["ratio"] <= 1.05 for row in result["samples"]["rows"])
    for result in results.read_results("zero1-timeline"):
        assert result["samples"]["started_in_backward"] > 1
    for result in results.read_results("zero1-state"):
        assert result["samples"]["parameters"] == 124_373_760
    for name in ("backends", "overhead", "timeline", "state", "step"):
        assert results.read_results(f"zero1-{name}"), name


def test_zero1_is_measured_by_what_runs():
    """On a small model the benchmark times every kind of step, and its profiler sees reductions during backward."""
    shape = GPTConfig(n_layer=4, n_head=2, n_embd=64, block_size=16, bias=False, vocab_size=64)
    rows = zero1.measure_overhead(shape, (2,), 3, "cpu")["rows"]
    assert all(len(samples) == 3 and min(samples) > 0 for samples in rows[0]["samples_ms"].values())
    samples = zero1.measure_timeline(zero1.TEN_MILLION, 2, "cpu")
    names = {name for name, _, _ in samples["events_ms"]}
    assert {"phase: forward", "phase: backward", "phase: step"} < names and samples["started_in_backward"] > 1


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.heavy
def test_every_kernel_is_measured(name, device):
    """On this machine, too, each case runs for every contender, forward and backward, with times above 0."""
    device = torch.device(device)
    for case in cases(device, {name}, ["124M"]):
        rows = measure(case, Stopwatch(device), 1)
        assert {row["contender"] for row in rows} == set(case.contenders) and "ours" in case.contenders
        assert [row.get("error") for row in rows] == [None] * len(rows)
        assert all(row["samples_ms"][0] > 0 and row["bytes"] > 0 for row in rows)


def test_the_kernels_plots_are_drawn(tmp_path):
    """Roofline and ablation are drawn from results, and an interpreted one says so in its title."""
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
    """The tuner walks from the table's row to a faster one and writes a whole table."""
    if not core.interpreting():
        pytest.skip("what is tuned here is the interpreter's row")
    own = copy.deepcopy(core.table())
    monkeypatch.setattr(core, "table", lambda: own)
    monkeypatch.setattr(tune_kernels, "table", core.table)
    core.table()["layernorm_forward"]["interpreter"] = [{"up_to": 64, "rows": 1}]  # 128 programs of one row
    tune_kernels.main(tune_kernels.Options(only="layernorm_forward", write=True, to=str(tmp_path / "table.json")))
    written = json.loads((tmp_path / "table.json").read_text())
    assert written["layernorm_forward"]["interpreter"][0]["rows"] > 1
    assert written["layernorm_forward"]["cuda"] == core.table()["layernorm_forward"]["cuda"]


@pytest.mark.heavy
def test_a_candidate_that_is_wrong_is_out(device):
    """Every kernel's own rows give what torch gives, a loss and the gradients too; another gradient is seen."""
    for kernel in {kernel for kernel, _ in tune_kernels.TIMED.values()} - {"adamw"}:
        case = next(cases(torch.device(device), {kernel}, ["124M"]))
        reference = tune_kernels.expected(case)
        assert tune_kernels.agrees(case, reference), kernel
        assert not tune_kernels.agrees(case, [*reference[:-1], 2 * reference[-1]]), kernel


def test_the_throughput_of_a_phase(tmp_path):
    """A short run: rates of all steps but those that warm up, memory, no MFU on a CPU; a failure is told in its row."""
    words = {"max_iters": throughput.WARMUP + 4, "device": "cpu", "n_layer": 1, "n_embd": 32, "n_head": 2}
    row = throughput.measure(("tiny", "phase1", 2, words), False, tmp_path / "run")
    assert len(row["step_ms"]) == 4 and row["mfu"] is None and row["failed"] is None
    assert row["peak_bytes"] > 10 * row["parameters"] and "phase1" in throughput.line_of(row)
    assert throughput.quartile_spread([1.0, 2.0, 3.0]) == 0.5
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    ledger["ranks"][0]["memory"]["peak"]["other"] += 1000  # the fullest rank counts
    (tmp_path / "run" / "ledger.json").write_text(json.dumps(ledger))
    again = throughput.measure(("tiny", "phase1", 2, words), False, tmp_path / "run")
    assert again["peak_bytes"] == sum(ledger["ranks"][0]["memory"]["peak"].values()) > row["peak_bytes"]
    broken = throughput.measure(("tiny", "phase3", 2, {**words, "dataset": "none"}), False, tmp_path / "broken")
    assert "none" in broken["failed"] and broken["failed"] in throughput.line_of(broken)
    assert {phase for _, phase, _, _ in throughput.cases(8)} == {phase for _, phase, _, _ in throughput.cases(0)}
