"""`--diagnostics_interval`: records of memory and norms, and a run that stops when its ranks diverge."""

import json
from pathlib import Path

import pytest
import torch

from measure import diagnostics
from measure.diagnostics import Diagnostics, compute_digest
from measure.observer import Observer
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.model import GPT, GPTConfig
from operate.autopsy.__main__ import KERNEL_CLASSES, describe_kernels
from operate.autopsy.evidence import Evidence
from phase2_triton.apply import REPLACEMENTS, apply_kernels
from tests.helpers.training import CONFIGS, gap, tiny, train_all
from workshop.ranks import RankFailed, losses, run_on_ranks


def read_records(out: Path, rank: int) -> list[dict]:
    """Return the records of a rank."""
    return [json.loads(line) for line in (out / "diagnostics" / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1", "phase3_fsdp"])
def test_records_have_the_norms_of_every_parameter(phase, tmp_path):
    """Each rank writes a record every two steps. The parts of the gradient norms add up to the logged norm.

    The losses are those of a run without diagnostics.
    """
    fields = {"grad_clip": 0, "max_iters": 5, "eval_iters": 1, "gradient_accumulation_steps": 4}
    recorded = tiny(phase, tmp_path / "run", diagnostics_interval=2, **fields)
    curves = train_all(2, [(phase, tiny(phase, tmp_path / "plain", **fields)), (phase, recorded)])
    assert gap(*curves) == 0
    records = [read_records(tmp_path / "run", rank) for rank in range(2)]
    assert [record["step"] for record in records[0]] == [0, 2, 4]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    norms = {line["step"]: line["grad_norm"] for line in lines}
    for record, other in zip(*records, strict=True):
        squares = [sum(n**2 for n in each["gradient_norms"].values()) for each in (record, other)]
        total = squares[0] if phase == "nanoGPT" else sum(squares)
        assert total**0.5 == pytest.approx(norms[record["step"]], rel=1e-6)
        assert set(record["activation_rms"]) == {"blocks.0", "blocks.1"}
        assert record["memory"]["allocated"] > 0
    audit = json.loads((tmp_path / "run" / "diagnostics" / "rank1.json").read_text())
    assert all("float32 on cpu" in name for name in audit["parameters"])
    last = json.loads((tmp_path / "run" / "heartbeat" / "rank1.json").read_text())
    assert {"step", "stage", "waits", "beats"} < set(last)
    assert (last["trainer"], last["backend"], last["device"]) == (phase, "gloo", "cpu")
    assert not (tmp_path / "plain" / "diagnostics").exists() and losses(tmp_path / "plain")


def test_a_digest_depends_on_every_bit_and_position():
    """Flipping a bit of an element, or swapping two elements, changes the hash. That of an empty tensor is 0."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    reference = compute_digest(values)
    for index in (0, 1, 499, 999):
        changed = values.clone()
        changed.view(torch.int32)[index] ^= 1
        assert compute_digest(changed) != reference
    swapped = values[[1, 0, *range(2, 1000)]]
    assert compute_digest(swapped) != reference and compute_digest(values.clone()) == reference
    assert compute_digest(values[:0]) == 0 and compute_digest(values.bfloat16()) != compute_digest(values.half())


def change_one_weight(out: str, phase: str) -> None:
    """Train on this rank; on rank 3, one weight of the second block gets another value after the first step."""
    import importlib

    import torch.distributed as dist

    from nanoGPT.distributed.sharding import local_shard

    trainer = importlib.import_module(f"{phase}.train")
    original = trainer.train_step

    def train_step(model, *args):
        result = original(model, *args)
        if dist.get_rank() == 3 and args[3] == 1:
            with torch.no_grad():
                local_shard(list(model.parameters())[8]).view(-1)[0] += 1e-6
        return result

    trainer.train_step = train_step
    options = {"fsdp_shard_size": "2"} if phase == "phase3_fsdp" else {}
    Path(out).mkdir(exist_ok=True)
    trainer.train(tiny(phase, Path(out), diagnostics_interval=1, **options))


@pytest.mark.parametrize("phase", ["nanoGPT", "phase3_fsdp"])
def test_a_rank_with_another_weight_stops_the_run(phase, tmp_path):
    """If one weight of one rank changes by 1e-6, the run stops in that step. With FSDP, replicas are compared."""
    groups = r"\[1\] and \[3\]" if phase == "phase3_fsdp" else r"\[0, 1, 2\] and \[3\]"
    with pytest.raises(RankFailed, match=rf"step 1: ranks {groups} have different values of the same parameters"):
        run_on_ranks(change_one_weight, 4, str(tmp_path), phase, show=False)


def test_the_summary_counts_the_modules_with_kernels(tmp_path):
    """The summary has the number of modules of each class. The autopsy prints how many use each kernel of phase 2."""
    model = GPT(GPTConfig(2, 2, 32, 8, False, 16))
    apply_kernels(model, "gelu", "cpu")
    config = CONFIGS["phase2_triton"](out_dir=str(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = Diagnostics(config, create_runtime("cpu", "float32"), 1, model, optimizer)
    recorder.record(0, torch.zeros(()), torch.zeros(()))
    summary = json.loads((tmp_path / "diagnostics" / "rank0.json").read_text())
    assert summary["modules"]["KernelMLP"] == summary["modules"]["CausalSelfAttention"] == 2
    assert "MLP" not in summary["modules"] and summary["optimizer"] == "AdamW"
    evidence = Evidence(tmp_path, summaries={0: summary}, environment={"config": {"kernels": "gelu"}})
    counts = "attention: 0 of 2 CausalSelfAttention or LlamaAttention, gelu: 2 of 2 MLP, layernorm: 0 of 5 LayerNorm"
    counts += ", layernorm: 0 of 2 Block"
    assert describe_kernels(evidence) == f"--kernels=gelu; modules with a kernel: {counts}; AdamW updates"
    classes = [(name, kernel.__name__, (plain.__name__,)) for name, plain, kernel, _ in REPLACEMENTS]
    assert list(KERNEL_CLASSES[1:]) == classes


def test_without_the_flag_nothing_is_measured(tmp_path, monkeypatch):
    """By default a step is not watched, and no tensor is read."""
    monkeypatch.setattr(diagnostics, "compute_digest", None)
    model = GPT(GPTConfig(1, 1, 8, 8, False, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    off = Observer(CONFIGS["nanoGPT"](out_dir=str(tmp_path)))
    off.start(create_runtime("cpu", "float32"))
    off.build(model, optimizer, 0)
    off.begin_step(0)
    assert not optimizer._optimizer_step_pre_hooks and not model.blocks[0]._forward_hooks
    off.end_step(0, torch.zeros(()), torch.zeros(()))
    assert list(tmp_path.iterdir()) == []
