"""The named configurations, each trained as a scaled-down twin, and the search for the largest model."""

import json
from dataclasses import replace
from typing import Any

import pytest

from bench.plan import largest, planner
from bench.plan.largest import count_params, find_largest, format_largest, make_shape
from bench.plan.options import phase_options
from bench.plan.plan import PlanConfig, describe_job, resolve_gpu
from bench.plan.planner import Job
from bench.plan.sizes import SIZES, read_config
from bench.plan.speed import GPUS
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT, GPTConfig
from tests.helpers.training import TINY, train_all
from workshop.imports import ROOT
from workshop.phases import find_package

TWIN = {**TINY, "max_iters": 2, "eval_interval": 2, "eval_iters": 1, "compile": False, "device": "cpu"}
TWIN |= {"warmup_iters": 1, "gradient_accumulation_steps": 2, "fsdp_min_num_params": 1000}


def test_a_scaled_down_twin_of_every_configuration_trains(tmp_path):
    """Every configuration can be read, and trains on two ranks with a small shape and its own options."""
    cells = []
    for i, (phase, name, gpus, _) in enumerate(SIZES):
        config = read_config(phase, name, gpus)
        fields = {name: value for name, value in TWIN.items() if hasattr(config, name)}
        if getattr(config, "fsdp_min_num_params", None) is None:
            fields.pop("fsdp_min_num_params", None)
        if phase == "phase2":
            fields["kernels"] = "gelu"  # the others are slow in the interpreter
        twin = replace(config, **{**fields, "out_dir": str(tmp_path / str(i))})
        assert twin.optimizer == config.optimizer and twin.dtype == config.dtype
        cells.append((find_package(phase), twin))
    assert [len(losses) for losses in train_all(2, cells)] == [2] * len(SIZES)


def count_real_params(config: Any) -> int:
    return GPTConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, config.bias).count_params()


def test_every_configuration_of_a_phase_is_in_the_table():
    """A configuration file for GPT-2's tokenizer that is not in SIZES would have no row in the table."""
    files = {
        (path.parent.parent.name, path.stem)
        for package in ("nanoGPT", "phase1_zero1", "phase2_triton", "phase3_fsdp")
        for path in (ROOT / package / "config").glob("train_*.py")
        if "shakespeare" not in path.stem
    }
    assert files == {(find_package(phase), name) for phase, name, _, _ in SIZES}


def test_the_names_of_the_sizes_hold():
    """A configuration has as many parameters as its name or its first line says, to 5 percent."""
    expected = {"train_mid": 760e6, "train_mid_350m": 350e6, "train_target": 1.3e9, "train_target_1b": 1.0e9}
    expected |= {"train_7b": 6.7e9, "train_gpt2": 124e6, "train_gpt2_large": 774e6, "train_gpt2_xl": 1.56e9}
    for phase, name, gpus, _ in SIZES:
        if name in expected:
            assert count_real_params(read_config(phase, name, gpus)) == pytest.approx(expected[name], rel=0.05), name
    config = read_config("phase3", "train_mid", 2)
    assert phase_options(config) == {"fsdp_min_num_params": 2_000_000, "fsdp_activation_checkpointing": "full"}


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 9), (0.999, 8), (1e-6, 0)])
def test_the_search_finds_the_largest_model(fraction, expected, monkeypatch):
    """The search returns the largest model that fits, and 0 if none does."""
    needed = {k: 16 * make_shape(k, 8).count_params() for k in range(1, largest.LIMIT + 1)}
    monkeypatch.setattr(planner.Planner, "peak_bytes", lambda self, *_: needed[self.shape.n_layer])
    monkeypatch.setattr(planner, "usable_bytes", lambda _: fraction * needed[9])
    job = Job(make_shape(1, 8), GPUS["h100"], 1)
    assert find_largest(("baseline", {}), job, 1, None) == expected  # type: ignore[arg-type]
    monkeypatch.setattr(planner, "HOST_GIB", 8 * needed[5] / 2**30)
    assert find_largest(("phase3", {"fsdp_cpu_offload": True}), job, 1, None) == min(5, expected)  # type: ignore[arg-type]


def test_the_output_of_the_search():
    """The lines name each row's parameters and shape, and a row in which nothing fits."""
    rows = [
        {"phase": "baseline", "options": {}, "k": 27, "parameters": count_params(27, 1024)},
        {"phase": "phase1", "options": {"zero_stage": 2}, "k": 0, "parameters": 0},
    ]
    found = {"gpu": "h100", "gpus": 8, "batch_size": 1, "block_size": 1024, "optimizer": "adamw", "dtype": "bfloat16"}
    lines = format_largest({**found, "usable_bytes": 2**30, "rows": rows}).splitlines()
    assert lines[2].split() == ["baseline", "4.05B", "27", "x", "3456"]
    assert lines[3].endswith("nothing fits")
    assert count_params(2, 16) == sum(p.numel() for p in GPT(make_shape(2, 16)).parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"link": 0.0}, "--link=0 is out of range"),
        ({"network": -1.0}, "--network=-1 is out of range"),
        ({"model": "gpt5"}, "--model=gpt5 is unknown"),
        ({"gpu": "h1000"}, "did you mean"),
    ],
)
def test_wrong_options_of_the_planner(options, words):
    """A link, a model or a GPU that does not exist is refused with one sentence."""
    with pytest.raises(ConfigError, match=words):
        describe_job(PlanConfig(**options))


def test_links_can_be_given():
    """`--link` and `--network` are in GB/s and replace those of the GPU."""
    gpu = resolve_gpu(PlanConfig(gpu="l40s", link=64.0))
    assert (gpu.link, gpu.network) == (64e9, GPUS["l40s"].network)
    assert resolve_gpu(PlanConfig(gpu="l40s", network=50.0)).network == 50e9
    assert json.dumps(vars(gpu))
