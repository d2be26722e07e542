"""`--diagnostics_interval`: records of memory and norms, and a run that stops when its ranks diverge."""

import json
import math
from pathlib import Path

import pytest
import torch

from measure.diagnostics import compare_records, hash_tensor
from nanoGPT.errors import DivergedRanks
from operate.run_files import read_json_lines
from tests.helpers.training import gap, read_metric, tiny, train_all
from workshop.ranks import RankFailed, losses, run_on_ranks


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1", "phase3_fsdp"])
def test_records_have_the_norms_of_every_parameter(phase, tmp_path):
    """Each rank writes a record every two steps. The parts of the gradient norms add up to the logged norm.

    The losses are those of a run without diagnostics.
    """
    fields = {"grad_clip": 0, "max_iters": 5, "gradient_accumulation_steps": 4}
    recorded = tiny(phase, tmp_path / "run", diagnostics_interval=2, **fields)
    curves = train_all(2, [(phase, tiny(phase, tmp_path / "plain", **fields)), (phase, recorded)])
    assert gap(*curves) == 0
    records = [read_json_lines(tmp_path / "run" / "diagnostics" / f"rank{rank}.jsonl") for rank in range(2)]
    assert [record["step"] for record in records[0]] == [0, 2, 4]
    norms = read_metric(tmp_path / "run", "grad_norm")
    for record, other in zip(*records, strict=True):
        squares = [sum(n**2 for n in each["gradient_norms"].values()) for each in (record, other)]
        total = squares[0] if phase == "nanoGPT" else sum(squares)
        assert total**0.5 == pytest.approx(norms[record["step"]], rel=1e-6)
        assert set(record["activation_rms"]) == {"blocks.0", "blocks.1"}
        assert record["memory"]["allocated"] > 0
    audit = json.loads((tmp_path / "run" / "diagnostics" / "rank1.json").read_text())
    assert all("float32 on cpu" in name for name in audit["parameters"])
    assert not (tmp_path / "plain" / "diagnostics").exists() and losses(tmp_path / "plain")


def test_a_digest_depends_on_every_bit_and_position():
    """Flipping a bit of an element, or swapping two elements, changes the hash."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    reference = hash_tensor(values)
    for index in (0, 1, 499, 999):
        changed = values.clone()
        changed.view(torch.int32)[index] ^= 1
        assert hash_tensor(changed) != reference
    swapped = values[[1, 0, *range(2, 1000)]]
    assert hash_tensor(swapped) != reference and hash_tensor(values.clone()) == reference


@pytest.mark.parametrize("norms", [(1.0, 1.1), (1.0, math.nan), (math.inf, 1.0)])
def test_ranks_with_different_norms_stop_the_run(norms):
    """Ranks whose gradient norms differ are an error, also if only some of them are finite."""
    common = {"local_loss": 1.0, "parameters": 0}
    records = [{**common, "grad_norm": norm, "replica": [rank]} for rank, norm in enumerate(norms)]
    with pytest.raises(DivergedRanks, match="step 3: the ranks have different gradient norms"):
        compare_records(3, records)


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
