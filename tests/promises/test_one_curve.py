"""One loss curve: the same losses on any number of ranks, in every phase, and across a resume."""

import json
from itertools import permutations

import pytest
import torch

from nanoGPT import export
from nanoGPT.checkpoint.hugging_face import read_hf
from nanoGPT.checkpoint.weights import read_weights
from nanoGPT.dataset import EVALUATE, TokenData
from nanoGPT.model import GPT, GPTConfig
from tests.helpers.training import gap, logged, tiny, train
from workshop.ranks import RankFailed, losses

PHASES = ["nanoGPT", "phase1_zero1", "phase3_fsdp"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, float]:
    device = request.config.getoption("--device")
    config = tiny("nanoGPT", tmp_path_factory.mktemp("reference"), device=device, dtype="float32", compile=False)
    return train("nanoGPT", 1, config)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_losses_do_not_depend_on_ranks_or_phase(phase, ranks, reference, tmp_path, device, need_ranks):
    """With dropout, clipping and accumulation, 1, 2, 4 and 8 ranks of each phase print the baseline's losses."""
    need_ranks(ranks)
    config = tiny(phase, tmp_path, device=device, dtype="float32", compile=False)
    assert gap(reference, train(phase, ranks, config)) <= (1e-6 if phase == "nanoGPT" else 1e-5)


@pytest.mark.parametrize("phase", PHASES)
def test_the_validation_loss_is_the_mean_without_dropout(phase, tmp_path):
    """On 2 ranks, which 3 batches do not divide among, the first evaluation is the mean loss of the new model over
    these batches of the val split, without dropout."""
    config = tiny(phase, tmp_path, max_iters=1, dropout=0.5)
    train(phase, 2, config)
    data = TokenData(config.dataset, config.block_size, config.batch_size, config.seed)
    model = GPT(GPTConfig(2, 2, 32, 16, False, 75)).eval()
    model.init_weights(config.seed)
    each = [model(*data.batch("val", EVALUATE, 0, index))[1].item() for index in range(3)]
    assert logged(tmp_path, "val_loss")[0] == pytest.approx(sum(each) / 3, abs=1e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_only_what_is_better_is_saved_and_the_end(phase, tmp_path):
    """With always_save_checkpoint=False an evaluation is followed by a save where its loss is the lowest so far, also
    lower than before a resume, and at the end; each checkpoint tells the lowest loss."""
    more = {"always_save_checkpoint": False, "eval_interval": 1, "learning_rate": 0.1, "warmup_iters": 0}
    more |= {"keep_checkpoints": 50, "lr_decay_iters": 100}
    train(phase, 1, tiny(phase, tmp_path, max_iters=6, **more))
    train(phase, 1, tiny(phase, tmp_path, init_from="resume", max_iters=12, **more))
    found = logged(tmp_path, "val_loss")
    lowest = {step: min(found[s] for s in range(step + 1)) for step in found}
    better = {step for step in range(1, 13) if found[step] < lowest[step - 1]}
    assert better and len(better) < 10, "a curve that only falls, or only rises, shows nothing"
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "checkpoints").glob("step-*/manifest.json")]
    assert {manifest["step"] for manifest in manifests} == better | {6, 12}
    assert all(manifest["best_val_loss"] == lowest[manifest["step"]] for manifest in manifests)


@pytest.mark.parametrize("phase", PHASES)
def test_resume_at_the_same_ranks_is_exact(phase, tmp_path, device, need_ranks):
    """A run stopped after 7 of 12 steps and resumed prints the uninterrupted run's losses to the last digit."""
    need_ranks(2)
    whole = train(phase, 2, tiny(phase, tmp_path / "whole", device=device))
    cut = tmp_path / "cut"
    train(phase, 2, tiny(phase, cut, device=device, max_iters=7, lr_decay_iters=12))
    resumed = train(phase, 2, tiny(phase, cut, device=device, init_from="resume", lr_decay_iters=12))
    assert resumed == whole
    assert sorted(resumed) == list(range(12))


def test_saved_at_8_it_opens_on_every_mesh(reference, tmp_path, device, need_ranks):
    """A run goes on from 8 ranks to 4, 2, 1, hybrid shards of 2 on 4, without FSDP and in the baseline, optimizer
    included, with the losses of one uninterrupted process; Hugging Face's format then holds what it ends with."""
    need_ranks(8)
    meshes: list[tuple[str, int, dict]] = [("phase3_fsdp", ranks, {}) for ranks in (8, 4, 2, 1)]
    meshes += [
        ("phase3_fsdp", 4, {"fsdp_shard_size": "2", "async_save": True}),
        ("phase3_fsdp", 2, {"use_fsdp": False}),
    ]
    meshes += [("nanoGPT", 1, {})]
    for i, (phase, ranks, options) in enumerate(meshes):
        ends = {"max_iters": 12 if phase == "nanoGPT" else i + 2, "lr_decay_iters": 12}
        config = tiny(phase, tmp_path, device=device, init_from="resume" if i else "scratch", **ends, **options)
        train(phase, ranks, config)
    assert gap(reference, losses(tmp_path)) <= 1e-5
    export.main(str(tmp_path), str(tmp_path / "hf"))
    _, trained = read_weights(str(tmp_path))
    _, exported = read_hf(tmp_path / "hf")
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    assert not any(exported[name].any() for name in exported.keys() - trained.keys())  # biases, which it always has


@pytest.mark.parametrize(("first", "then"), permutations(PHASES, 2))
def test_a_checkpoint_opens_in_another_phase(first, then, reference, tmp_path, device, need_ranks):
    """A run begun in one phase goes on in any other with the same losses."""
    need_ranks(2)
    train(first, 2, tiny(first, tmp_path, device=device, max_iters=7, lr_decay_iters=12))
    assert gap(reference, train(then, 2, tiny(then, tmp_path, device=device, init_from="resume"))) <= 1e-5


def test_an_empty_shard_is_no_trouble(tmp_path):
    """Parameters with fewer rows than ranks leave some ranks with nothing; losses and the clipped norm still agree."""
    shape = {"block_size": 3, "max_iters": 4}
    one = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", **shape))
    assert gap(one, train("phase3_fsdp", 8, tiny("phase3_fsdp", tmp_path / "eight", **shape))) <= 1e-5


@pytest.mark.parametrize("phase", PHASES)
def test_bfloat16_follows_itself(phase, tmp_path, device, need_ranks):
    """In bfloat16, 2 ranks print what one rank prints, to 2e-3."""
    need_ranks(2)
    one, two = (
        train(phase, n, tiny(phase, tmp_path / str(n), device=device, dtype="bfloat16", max_iters=6)) for n in (1, 2)
    )
    assert gap(one, two) <= 2e-3


@pytest.mark.parametrize("phase", PHASES)
def test_compiled_equals_eager(phase, tmp_path, device):
    """Without dropout, the compiled model prints the eager one's losses to 1e-5."""
    small = {"n_layer": 1, "dropout": 0.0, "gradient_accumulation_steps": 2, "max_iters": 3, "eval_iters": 1}
    eager, compiled = (
        train(phase, 1, tiny(phase, tmp_path / str(on), device=device, **small, compile=on), 220)
        for on in (False, True)
    )
    assert gap(eager, compiled) <= 1e-5


@pytest.mark.parametrize("phase", PHASES)
def test_a_loss_that_is_not_finite_stops_every_rank(phase, tmp_path):
    """A learning rate that blows up ends the run with NonFiniteLoss, and no checkpoint holds the damage."""
    config = tiny(phase, tmp_path, learning_rate=1e30, grad_clip=0.0, eval_interval=100)
    with pytest.raises(RankFailed, match="NonFiniteLoss: step .* not finite"):
        train(phase, 2, config)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    assert len(losses(tmp_path)) < 12


def test_a_run_learns(tmp_path):
    """120 steps on Shakespeare take the loss from that of guessing to well below it."""
    curve = train("nanoGPT", 1, tiny("nanoGPT", tmp_path, max_iters=120, dropout=0.0, learning_rate=1e-2))
    assert 4.2 < curve[0] < 4.45  # ln 75 = 4.32
    assert curve[119] < 3.2


def test_clipping_bounds_the_update_and_uses_the_global_norm(tmp_path):
    """The logged norm is that of all gradients together, the same on 1 rank and on 4 sharded ones."""
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", max_iters=4))
    train("phase3_fsdp", 4, tiny("phase3_fsdp", tmp_path / "four", max_iters=4))
    one, four = (logged(tmp_path / name, "grad_norm") for name in ("one", "four"))
    assert one == pytest.approx(four, rel=1e-5)
