"""float16 in every phase: the global gradient norm decides, on every rank alike, whether a step is taken."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from nanoGPT.errors import NonFiniteLoss, check_finite
from nanoGPT.optim import LossScaler
from nanoGPT.train_config import TrainConfig
from tests.helpers.training import gap, logged, tiny, train
from workshop.ranks import run_on_ranks

# Phases and options whose gradients lie differently on the ranks.
KINDS = {
    "baseline": ("nanoGPT", {}),
    "flat": ("phase1_zero1", {}),
    "naive": ("phase1_zero1", {"zero1_backend": "naive"}),
    "torch": ("phase1_zero1", {"zero1_backend": "torch"}),
    "muon": ("phase1_zero1", {"optimizer": "muon"}),
    "triton": ("phase2_triton", {"kernels": "gelu"}),
    "fsdp": ("phase3_fsdp", {}),
    "hsdp": ("phase3_fsdp", {"fsdp_shard_size": "1"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_float16_trains_and_resumes(kind, tmp_path, device, need_ranks):
    """On 2 ranks the losses and the norms of the unscaled gradients stay within 2e-2 of fp32's, and a run that is cut
    and resumed, with the loss scale of its checkpoint, prints the losses of the whole run."""
    need_ranks(2)
    phase, options = KINDS[kind]
    shape = {"device": device, "max_iters": 6, "eval_interval": 3, **options}
    curves = {
        dtype: train(phase, 2, tiny(phase, tmp_path / dtype, dtype=dtype, **shape)) for dtype in ("float16", "float32")
    }
    assert 0 < gap(*curves.values()) <= 2e-2
    norms = [logged(tmp_path / dtype, "grad_norm") for dtype in ("float16", "float32")]
    assert norms[0] == pytest.approx(norms[1], rel=5e-2)
    cut = {**shape, "dtype": "float16", "lr_decay_iters": 6}
    train(phase, 2, tiny(phase, tmp_path / "cut", **{**cut, "max_iters": 3}))
    manifest = json.loads((tmp_path / "cut/checkpoints/step-00000003/manifest.json").read_text())
    assert manifest["grad_scaler"] == {"scale": 2.0**16, "_growth_tracker": 3}
    assert train(phase, 2, tiny(phase, tmp_path / "cut", init_from="resume", **cut)) == curves["float16"]


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1", "phase3_fsdp"])
def test_float16_has_one_curve(phase, tmp_path, device, need_ranks):
    """In float16, 1, 2 and 4 ranks print the same losses to 2e-3."""
    need_ranks(4)
    config = {"device": device, "dtype": "float16", "max_iters": 6, "eval_interval": 6}
    curves = [train(phase, n, tiny(phase, tmp_path / str(n), **config)) for n in (1, 2, 4)]
    assert max(gap(curves[0], curve) for curve in curves[1:]) <= 2e-3


def values_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of this rank's parameters, or of its shards of them."""
    if hasattr(optimizer, "wait_for_params"):
        optimizer.wait_for_params()
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().clone() for p in local]


def overflow_on_rank_1(phase: str, config: TrainConfig) -> list[tuple[bool, float]]:
    """Train with an infinite loss on rank 1 in one micro-batch of step 2: of each step whether parameters changed, and
    the scale after it."""
    trainer = importlib.import_module(f"{phase}.train")
    train_step, steps = trainer.train_step, []

    def watched(replica, optimizer, scaler, data, step, config, run):
        before = values_of(replica, optimizer)
        scale_loss, overflows = scaler.scale_loss, [step == 2 and run.rank == 1]
        scaler.scale_loss = lambda loss: scale_loss(loss) * (float("inf") if overflows[0] else 1.0)
        result = train_step(replica, optimizer, scaler, data, step, config, run)
        del scaler.scale_loss
        changed = any(not torch.equal(a, b) for a, b in zip(before, values_of(replica, optimizer), strict=True))
        steps.append((changed, scaler.scale))
        return result

    trainer.train_step = watched
    Path(config.out_dir).mkdir(parents=True, exist_ok=True)
    trainer.train(config)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinity_on_one_rank_skips_the_step_on_all(kind, tmp_path, device, need_ranks):
    """Where one rank's gradient overflows, no rank takes the step, all ranks halve the scale, and training goes on."""
    need_ranks(2)
    phase, options = KINDS[kind]
    config = tiny(phase, tmp_path, device=device, dtype="float16", max_iters=4, eval_interval=4, **options)
    found = run_on_ranks(overflow_on_rank_1, 2, phase, config, show=False, device=device)
    full, half = 2.0**16, 2.0**15
    assert found == [[(True, full), (True, full), (False, half), (True, half)]] * 2
    norms = [json.loads(line)["grad_norm"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [norm is None for norm in norms] == [False, False, True, False, True]  # the last line is the evaluation's


def stepped(scaler: LossScaler, norm: float) -> bool:
    """Whether the scaler takes a step whose gradients have this norm."""
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    scaler.step(torch.optim.SGD([param], lr=1.0), torch.tensor(norm))
    return param.item() != 1.0


def test_the_scale_adapts_as_torchs_does():
    """The scale is halved at every overflow and doubled after 2,000 steps without one, as torch's GradScaler does by
    default; it keeps torch's names in a checkpoint, and scaling that is off changes nothing."""
    scaler, loss = LossScaler(is_enabled=True), torch.tensor(3.0)
    theirs = torch.amp.GradScaler("cpu")
    for norm in (1.0, float("inf"), float("nan"), *[1.0] * 2_000):
        assert stepped(scaler, norm) == (norm == 1.0)
        param = torch.nn.Parameter(torch.ones(1))
        param.grad = torch.full((1,), norm) * theirs.scale(torch.tensor(1.0))
        optimizer = torch.optim.SGD([param], lr=1.0)
        theirs.step(optimizer)
        theirs.update()
    assert (scaler.scale, scaler.steps_since_change) == (2.0**15, 0)
    assert scaler.state_dict().items() <= theirs.state_dict().items()
    again = LossScaler(is_enabled=True)
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == scaler.state_dict() and again.scale_loss(loss).item() == 3.0 * 2**15
    off, grads = LossScaler(is_enabled=False), [torch.ones(2)]
    off.load_state_dict(theirs.state_dict())
    off.unscale_grads(grads)
    assert off.scale_loss(loss) is loss and grads[0].tolist() == [1, 1] and off.scale == 1 and off.state_dict() == {}
    assert stepped(off, float("inf"))


def test_gradients_that_always_overflow_end_the_run():
    """When no scale is small enough, the run ends with what to do, and does not go on without a step."""
    scaler = LossScaler(is_enabled=True)
    with pytest.raises(NonFiniteLoss, match="use --dtype=bfloat16 or float32"):
        for _ in range(100):
            scaler.step(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), torch.tensor(float("inf")))
    assert scaler.scale < 1


def test_a_loss_or_a_norm_that_is_not_finite_ends_a_run():
    """Both stop training at their step; in float16 the trainer leaves the norm to the scaler."""
    check_finite(3, 2.0, 1.0)
    check_finite(3, 2.0)
    for loss, norm in ((float("nan"), 1.0), (2.0, float("inf"))):
        with pytest.raises(NonFiniteLoss, match="step 3: "):
            check_finite(3, loss, norm)
