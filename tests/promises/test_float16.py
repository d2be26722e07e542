"""float16 in every phase: from the global gradient norm, all ranks decide alike whether to skip a step."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from nanoGPT.errors import NonFiniteLoss, check_finite
from nanoGPT.optim import LossScaler
from nanoGPT.train_config import TrainConfig
from operate.run_files import read_json_lines
from tests.helpers.marks import mark_slow
from tests.helpers.training import gap, read_metric, tiny, train, train_all
from workshop.ranks import run_on_ranks

# Phases and options that distribute the gradients over the ranks in different ways.
KINDS = {
    "baseline": ("nanoGPT", {}),
    "flat": ("phase1_zero1", {}),
    "naive": ("phase1_zero1", {"zero1_backend": "naive"}),
    "torch": ("phase1_zero1", {"zero1_backend": "torch"}),
    "muon": ("phase1_zero1", {"optimizer": "muon"}),
    "triton": ("phase2_triton", {"kernels": "gelu", "n_layer": 1}),
    "fsdp": ("phase3_fsdp", {}),
    "hsdp": ("phase3_fsdp", {"fsdp_shard_size": "1"}),
}


@pytest.mark.parametrize("kind", ["baseline", "flat", "muon", "triton", "fsdp", *mark_slow("naive", "torch", "hsdp")])
def test_float16_trains_and_resumes(kind, tmp_path, device, need_ranks):
    """On 2 ranks, float16 follows fp32: losses differ by at most 2e-2, norms of the unscaled gradients by at most 5%.

    A resumed run restores the loss scale from its checkpoint and has the losses of the uninterrupted run.
    """
    need_ranks(2)
    phase, options = KINDS[kind]
    shape = {"device": device, "max_iters": 4, "lr_decay_iters": 4, "eval_interval": 100, **options}
    shape |= {"gradient_accumulation_steps": 4, "batch_size": 1}
    configs = [tiny(phase, tmp_path / dtype, dtype=dtype, **shape) for dtype in ("float16", "float32")]
    configs += [tiny(phase, tmp_path / "cut", dtype="float16", **{**shape, "max_iters": 2})]
    float16, float32, _ = train_all(2, [(phase, config) for config in configs])
    assert 0 < gap(float16, float32) <= 2e-2
    norms = [read_metric(tmp_path / dtype, "grad_norm") for dtype in ("float16", "float32")]
    assert norms[0] == pytest.approx(norms[1], rel=5e-2)
    manifest = json.loads((tmp_path / "cut/checkpoints/step-00000002/manifest.json").read_text())
    assert manifest["grad_scaler"] == {"scale": 2.0**16, "_growth_tracker": 2}
    resumed = tiny(phase, tmp_path / "cut", dtype="float16", init_from="resume", **shape)
    assert train(phase, 2, resumed) == float16


def test_float16_has_one_curve(tmp_path, device, need_ranks):
    """In float16, the losses on 1, 2 and 4 ranks differ by at most 2e-3."""
    need_ranks(4)
    options = {"device": device, "dtype": "float16", "max_iters": 3, "eval_interval": 3}
    options |= {"gradient_accumulation_steps": 4}
    phases = ["nanoGPT", "phase1_zero1", "phase3_fsdp"]
    curves_by_ranks = [
        train_all(ranks, [(phase, tiny(phase, tmp_path / f"{phase} {ranks}", **options)) for phase in phases])
        for ranks in (1, 2, 4)
    ]
    for phase, *curves in zip(phases, *curves_by_ranks, strict=True):
        assert max(gap(curves[0], curve) for curve in curves[1:]) <= 2e-3, phase


def copy_local_params(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of the parameters of this rank, or of its shards."""
    if hasattr(optimizer, "wait_for_params"):
        optimizer.wait_for_params()
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().clone() for p in local]


def overflow_on_rank_1(phase: str, config: TrainConfig) -> list[tuple[bool, float]]:
    """Train with an infinite loss on rank 1 in one micro-batch of step 1.

    Returns:
        For each step, whether the parameters changed, and the loss scale after the step.
    """
    trainer = importlib.import_module(f"{phase}.train")
    train_step, steps = trainer.train_step, []

    def train_step_with_overflow(parallel_model, optimizer, scaler, data, step, config, run):
        before = copy_local_params(parallel_model, optimizer)
        scale_loss, overflows = scaler.scale_loss, [step == 1 and run.rank == 1]
        scaler.scale_loss = lambda loss: scale_loss(loss) * (float("inf") if overflows[0] else 1.0)
        result = train_step(parallel_model, optimizer, scaler, data, step, config, run)
        del scaler.scale_loss
        changed = any(
            not torch.equal(a, b) for a, b in zip(before, copy_local_params(parallel_model, optimizer), strict=True)
        )
        steps.append((changed, scaler.scale))
        return result

    trainer.train_step = train_step_with_overflow
    Path(config.out_dir).mkdir(parents=True, exist_ok=True)
    trainer.train(config)
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_an_infinity_on_one_rank_skips_the_step_on_all(kind, tmp_path, device, need_ranks):
    """If a gradient of one rank overflows, all ranks skip the step and halve the scale, and training continues."""
    need_ranks(2)
    phase, options = KINDS[kind]
    fields = {"device": device, "dtype": "float16", "max_iters": 3, "eval_interval": 3, **options}
    config = tiny(phase, tmp_path, gradient_accumulation_steps=4, batch_size=1, **fields)
    steps = run_on_ranks(overflow_on_rank_1, 2, phase, config, show=False, device=device)
    full, half = 2.0**16, 2.0**15
    assert steps == [[(True, full), (False, half), (True, half)]] * 2
    norms = [line["grad_norm"] for line in read_json_lines(tmp_path / "metrics.jsonl")]
    assert [norm is None for norm in norms] == [False, True, False, True]  # the last line is of the evaluation


def takes_step(scaler: LossScaler, norm: float) -> bool:
    """Return whether the scaler takes a step whose gradients have this norm."""
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    scaler.step(torch.optim.SGD([param], lr=1.0), torch.tensor(norm))
    return param.item() != 1.0


def test_the_scale_adapts_like_torchs_grad_scaler():
    """The scale is halved after an overflow and doubled after 2,000 steps without one, like torch's GradScaler.

    Its state has the keys of GradScaler. A disabled scaler changes nothing.
    """
    scaler, loss = LossScaler(is_enabled=True), torch.tensor(3.0)
    torch_scaler = torch.amp.GradScaler("cpu")
    for norm in (1.0, float("inf"), float("nan"), *[1.0] * 2_000):
        assert takes_step(scaler, norm) == (norm == 1.0)
        param = torch.nn.Parameter(torch.ones(1))
        param.grad = torch.full((1,), norm) * torch_scaler.scale(torch.tensor(1.0))
        optimizer = torch.optim.SGD([param], lr=1.0)
        torch_scaler.step(optimizer)
        torch_scaler.update()
    assert (scaler.scale, scaler.steps_since_change) == (2.0**15, 0)
    assert scaler.state_dict().items() <= torch_scaler.state_dict().items()
    loaded_scaler = LossScaler(is_enabled=True)
    loaded_scaler.load_state_dict(torch_scaler.state_dict())
    assert loaded_scaler.state_dict() == scaler.state_dict() and loaded_scaler.scale_loss(loss).item() == 3.0 * 2**15
    disabled_scaler, grads = LossScaler(is_enabled=False), [torch.ones(2)]
    disabled_scaler.load_state_dict(torch_scaler.state_dict())
    disabled_scaler.unscale_grads(grads)
    assert disabled_scaler.scale_loss(loss) is loss and grads[0].tolist() == [1, 1]
    assert disabled_scaler.scale == 1 and disabled_scaler.state_dict() == {}
    assert takes_step(disabled_scaler, float("inf"))


def test_gradients_that_always_overflow_end_the_run():
    """If every scale overflows, the run stops with a suggestion. It does not skip steps forever."""
    scaler = LossScaler(is_enabled=True)
    with pytest.raises(NonFiniteLoss, match="use --dtype=bfloat16 or float32"):
        for _ in range(100):
            scaler.step(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), torch.tensor(float("inf")))
    assert scaler.scale < 1


def test_a_loss_or_a_norm_that_is_not_finite_ends_a_run():
    """A loss or a gradient norm that is not finite stops training. In float16, the scaler checks the norm instead."""
    check_finite(3, 2.0, 1.0)
    check_finite(3, 2.0)
    for loss, norm in ((float("nan"), 1.0), (2.0, float("inf"))):
        with pytest.raises(NonFiniteLoss, match="step 3: "):
            check_finite(3, loss, norm)
