"""One loss curve: the same losses on any number of ranks, in every phase, and across a resume."""

import functools
import json
import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from nanoGPT import export
from nanoGPT.checkpoint.hugging_face import read_hf
from nanoGPT.checkpoint.sources import read_weights
from nanoGPT.dataset import TokenData
from nanoGPT.files import DATA
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.train_config import TrainConfig
from tests.helpers.marks import mark_slow
from tests.helpers.training import call_train, call_train_all, gap, read_metric, tiny, train, train_all
from workshop.ranks import RankFailed, losses, run_on_ranks

PHASES = ["nanoGPT", "phase1_zero1", "phase3_fsdp"]
STEPS = {"max_iters": 4, "lr_decay_iters": 8, "eval_interval": 8}
Runs = Callable[[int], Path]


def count_steps(ranks: int) -> tuple[int, int]:
    """Return the number of steps of a full run, and of a run that stops early and is continued.

    On 4 ranks both are longer: if a resumed run adds the gradients in another order, its losses differ only after
    three steps.
    """
    return (8, 5) if ranks == 4 else (4, 2)


def list_cells(ranks: int, folder: Path, device: str) -> list[tuple[str, TrainConfig]]:
    """Return the configurations that the tests of this file need on this number of ranks, each with its phase."""
    full_steps, cut_steps = count_steps(ranks)
    fp32 = {**STEPS, "max_iters": full_steps, "device": device, "dtype": "float32", "compile": False}
    bf16 = {"device": device, "dtype": "bfloat16", "max_iters": 4, "gradient_accumulation_steps": 4}
    cells = [(phase, tiny(phase, folder / phase, **fp32)) for phase in PHASES]
    if ranks <= 2:
        cells += [(phase, tiny(phase, folder / f"{phase} bfloat16", **bf16)) for phase in PHASES]
    if ranks in (2, 4):
        cells += [(phase, tiny(phase, folder / f"{phase} cut", **{**fp32, "max_iters": cut_steps})) for phase in PHASES]
    if ranks == 2:
        validated = {
            "eval_iters": 3,
            "device": device,
            "dtype": "float32",
            "compile": False,
            "max_iters": 1,
            "dropout": 0.5,
        }
        cells += [(phase, tiny(phase, folder / f"{phase} validated", **validated)) for phase in PHASES]
    few_rows = {**fp32, "block_size": 3, "max_iters": 3}
    if ranks == 1:
        cells += [("nanoGPT", tiny("nanoGPT", folder / "few rows", **few_rows))]
    if ranks == 8:
        cells += [("phase3_fsdp", tiny("phase3_fsdp", folder / "few rows", **few_rows))]
        cells += [("phase3_fsdp", tiny("phase3_fsdp", folder / "one step", **{**fp32, "max_iters": 1}))]
    return cells


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """Return a function that trains all configurations of `list_cells` on the first call, and returns their directory.

    A test must not write into this directory.
    """
    device = request.config.getoption("--device")

    @functools.cache
    def train_on(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        train_all(ranks, list_cells(ranks, folder, device))
        return folder

    return train_on


@pytest.fixture
def reference(runs: Runs) -> dict[int, float]:
    return losses(runs(1) / "nanoGPT")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_losses_do_not_depend_on_ranks_or_phase(ranks, runs, reference, need_ranks, device):
    """With dropout, clipping and accumulation, each phase has the losses of the baseline on 1, 2, 4 and 8 ranks."""
    need_ranks(ranks)
    for phase in PHASES:
        curve = losses(runs(ranks) / phase)
        assert sorted(curve) == list(range(count_steps(ranks)[0]))
        common_steps = {step: curve[step] for step in range(4)}
        is_exact = phase == "nanoGPT" and device == "cpu"  # NCCL and cuBLAS add in other orders
        assert gap(reference, common_steps) <= (1e-6 if is_exact else 1e-5), phase


def test_the_validation_loss_is_the_mean_without_dropout(runs, need_ranks):
    """The first evaluation is the mean loss of the initial model over 3 batches of the val split, without dropout.

    The test uses 2 ranks, because 3 batches are not divisible by 2.
    """
    need_ranks(2)
    config = tiny("nanoGPT", Path())
    data = TokenData(config)
    model = GPT(GPTConfig(2, 2, 32, 16, False, 75)).eval()
    model.init_weights(config.seed)
    batch_losses = [model(*data.batch("val", 0, index)).item() for index in range(3)]
    for phase in PHASES:
        val_loss = read_metric(runs(2) / f"{phase} validated", "val_loss")[0]
        assert val_loss == pytest.approx(sum(batch_losses) / 3, abs=1e-6), phase


@pytest.mark.parametrize("phase", PHASES)
def test_only_better_models_and_the_last_one_are_saved(phase, tmp_path):
    """With always_save_checkpoint=False, an evaluation saves only if its loss is the lowest so far, also over a resume.

    The last step is always saved. Each checkpoint contains the lowest loss so far.
    """
    fields = {
        "always_save_checkpoint": False,
        "eval_iters": 3,
        "eval_interval": 1,
        "learning_rate": 0.1,
        "warmup_iters": 0,
    }
    fields |= {"keep_checkpoints": 50, "lr_decay_iters": 100, "gradient_accumulation_steps": 2}
    train(phase, 1, tiny(phase, tmp_path, max_iters=6, **fields))
    train(phase, 1, tiny(phase, tmp_path, init_from="resume", max_iters=12, **fields))
    val_loss = read_metric(tmp_path, "val_loss")
    lowest_loss = {step: min(val_loss[s] for s in range(step + 1)) for step in val_loss}
    better_steps = {step for step in range(1, 13) if val_loss[step] < lowest_loss[step - 1]}
    assert better_steps and len(better_steps) < 10, "the test needs a curve that both falls and rises"
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "checkpoints").glob("step-*/manifest.json")]
    assert {manifest["step"] for manifest in manifests} == better_steps | {6, 12}
    assert all(manifest["best_val_loss"] == lowest_loss[manifest["step"]] for manifest in manifests)


def continue_cut_runs(runs: Runs, ranks: int, out: Path, device: str, pairs: list[tuple[str, str]]):
    """Continue copies of the runs that have stopped early. Return the losses for each pair of phases.

    Args:
        pairs: the phase that has started a run, and the phase that continues it.
    """
    options = {**STEPS, "max_iters": count_steps(ranks)[0], "device": device, "dtype": "float32", "compile": False}
    cells = []
    for first, second in pairs:
        copy = shutil.copytree(runs(ranks) / f"{first} cut", out / f"{first} {second}")
        cells.append((second, tiny(second, copy, init_from="resume", **options)))
    return dict(zip(pairs, train_all(ranks, cells), strict=True))


def test_resume_at_the_same_ranks_is_exact(runs, tmp_path, device, need_ranks):
    """A run that stops after 5 of 8 steps and resumes has exactly the losses of an uninterrupted run.

    On 4 ranks the order in which a ring adds the values of the ranks matters; on 2 ranks it does not.
    """
    need_ranks(4)
    resumed = continue_cut_runs(runs, 4, tmp_path, device, [(phase, phase) for phase in PHASES])
    for phase in PHASES:
        assert sorted(losses(runs(4) / f"{phase} cut")) == list(range(5))
        assert resumed[phase, phase] == losses(runs(4) / phase), phase


def test_a_checkpoint_saved_at_8_ranks_opens_on_every_mesh(runs, reference, tmp_path, device, need_ranks):
    """A run saved on 8 ranks continues on other ranks and meshes with the losses of one uninterrupted process.

    One copy of it continues on 2, 4 and 1 ranks. Another one continues with ZeRO-1 on 2 ranks, with hybrid shards of 2
    on 4 ranks, and in the baseline. The state of the optimizer is resharded, too. The export in the Hugging Face format
    contains the final weights.
    """
    need_ranks(8)
    shards, meshes = (shutil.copytree(runs(8) / "one step", tmp_path / name) for name in ("shards", "meshes"))
    options = {**STEPS, "device": device, "dtype": "float32", "compile": False, "init_from": "resume"}
    for steps, ranks, phase, fields in (
        (2, 2, "phase1_zero1", {}),
        (3, 4, "phase3_fsdp", {"fsdp_shard_size": "2", "async_save": True}),
        (4, 1, "nanoGPT", {}),
    ):
        step_options = {**options, "max_iters": steps}
        cells = [("phase3_fsdp", tiny("phase3_fsdp", shards, **step_options))]
        cells += [(phase, tiny(phase, meshes, **step_options, **fields))]
        train_all(ranks, cells)
    for out in (shards, meshes):
        assert gap(reference, losses(out)) <= 1e-5
    export.main(str(meshes), str(tmp_path / "hf"))
    _, trained, _ = read_weights(str(meshes))
    exported = read_hf(tmp_path / "hf")[1]
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    # The Hugging Face format always has biases.
    assert not any(exported[name].any() for name in exported.keys() - trained.keys())


def test_a_checkpoint_opens_in_another_phase(runs, reference, tmp_path, device, need_ranks):
    """A run that starts in one phase continues in any other phase with the same losses."""
    need_ranks(2)
    for pair, curve in continue_cut_runs(runs, 2, tmp_path, device, list(permutations(PHASES, 2))).items():
        assert gap(reference, curve) <= 1e-5, pair


def test_a_mixture_in_epochs_has_one_curve(tmp_path):
    """A mixture that is read in epochs has the same losses on one rank, and on two ranks with a resume in between."""
    shutil.copytree(DATA / "shakespeare_char", tmp_path / "other")
    fields = {"dataset": f"shakespeare_char:3,{tmp_path / 'other'}:1", "sampling": "epoch", "lr_decay_iters": 4}
    one = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", max_iters=4, **fields))
    for steps in ({"max_iters": 2}, {"max_iters": 4, "init_from": "resume"}):
        two = train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "two", **fields, **steps))
    assert gap(one, two) <= 1e-5


def test_empty_shards_do_not_change_the_losses(runs, need_ranks):
    """If a parameter has fewer rows than ranks, some shards are empty. Losses and clipping stay the same."""
    need_ranks(8)
    one, eight = (losses(runs(ranks) / "few rows") for ranks in (1, 8))
    assert gap(one, eight) <= 1e-5


def test_bfloat16_has_one_curve(runs, need_ranks):
    """In bfloat16, the losses on 1 and 2 ranks differ by at most 2e-3."""
    need_ranks(2)
    for phase in PHASES:
        one, two = (losses(runs(ranks) / f"{phase} bfloat16") for ranks in (1, 2))
        assert gap(one, two) <= 2e-3, phase


def train_with_simdlen(simdlen: int | None, cells: list[tuple[str, TrainConfig]]) -> None:
    """Train configurations on this rank.

    Args:
        simdlen: Inductor's setting for the width of vectors in C++ code: 1 for none, None for those of this processor.
        cells: the configurations, each with its phase.
    """
    with torch._inductor.config.patch({"cpp.simdlen": simdlen}):
        call_train_all(cells)


@pytest.mark.parametrize(
    ("phase", "simdlen"), [("nanoGPT", 1), *mark_slow(*((phase, None) for phase in (*PHASES, "phase2_triton")))]
)
def test_compiled_equals_eager(phase, simdlen, tmp_path, device):
    """Without dropout, the losses of the compiled and the eager model on one rank differ by at most 1e-5.

    Slow tests compile with vector instructions, as the trainers do.
    """
    fields = {"n_layer": 1, "dropout": 0.0, "gradient_accumulation_steps": 2, "max_iters": 3}
    fields |= {"device": device, "dtype": "float32"}
    cells = [(phase, tiny(phase, tmp_path / str(value), **fields, compile=value)) for value in (False, True)]
    run_on_ranks(train_with_simdlen, 1, simdlen, cells, show=False, device=device)
    eager, compiled = (losses(config.out_dir) for _, config in cells)
    assert gap(eager, compiled) <= 1e-5


def count_graphs(phase: str, config: TrainConfig) -> tuple[int, int]:
    """Train a configuration on the calling rank. Return the numbers of compiled graphs and of graph breaks."""
    call_train(phase, config)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("phase", ["phase3_fsdp", *mark_slow("phase1_zero1")])
def test_sharded_phases_compile_three_graphs(phase, tmp_path):
    """On 2 ranks, phases 1 and 3 compile the embedding, the blocks, and the head with the loss, each as one graph.

    The evaluation has another graph of each. The losses are those of the eager model.
    """
    fields = {"dropout": 0.0, "gradient_accumulation_steps": 2, "max_iters": 3}
    eager, compiled = (tiny(phase, tmp_path / str(value), **fields, compile=value) for value in (False, True))
    assert run_on_ranks(count_graphs, 2, phase, compiled, show=False) == [(6, 0)] * 2
    assert gap(train(phase, 2, eager), losses(compiled.out_dir)) <= 1e-5


@pytest.mark.parametrize("phase", PHASES)
def test_a_loss_that_is_not_finite_stops_every_rank(phase, tmp_path):
    """If the learning rate is far too large, all ranks raise NonFiniteLoss and save no checkpoint."""
    config = tiny(phase, tmp_path, learning_rate=1e30, grad_clip=0.0, eval_interval=100)
    with pytest.raises(RankFailed, match="NonFiniteLoss: step .* not finite"):
        train(phase, 2, config)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    assert len(losses(tmp_path)) < 12


def test_a_run_learns(tmp_path):
    """Within 120 steps on Shakespeare, the loss falls from that of random guesses to a much lower value."""
    options = {"max_iters": 120, "dropout": 0.0, "learning_rate": 1e-2}
    options |= {"batch_size": 64, "gradient_accumulation_steps": 1, "eval_interval": 1000}
    curve = train("nanoGPT", 1, tiny("nanoGPT", tmp_path, **options))
    assert 4.2 < curve[0] < 4.45  # ln 75 = 4.32
    assert curve[119] < 3.2


def test_clipping_bounds_the_update_and_uses_the_global_norm(runs, need_ranks):
    """The logged norm is the norm of all gradients, and it is the same on 1 rank and on 4 ranks with FSDP."""
    need_ranks(4)
    one, four = read_metric(runs(1) / "nanoGPT", "grad_norm"), read_metric(runs(4) / "phase3_fsdp", "grad_norm")
    assert one == pytest.approx({step: four[step] for step in one}, rel=1e-5) and len(one) == 4
    assert max(one.values()) > 1.0, "the test needs a gradient that is clipped"
