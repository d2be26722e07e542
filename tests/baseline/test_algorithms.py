"""The choice of attention's backend, deterministic algorithms, the mode of torch.compile, and compiled evaluation."""

import contextlib
import json
import os
import sys
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, current_flash_attention_impl

from nanoGPT.distributed.algorithms import (
    BACKENDS,
    NOT_INSTALLED,
    Attention,
    choose_attention,
    choose_fastest_attention,
    find_package_problem,
    use_algorithms,
)
from nanoGPT.errors import ConfigError
from nanoGPT.train_config import TrainConfig
from tests.helpers.training import call_train, gap, read_metric, tiny, train, train_all
from workshop.ranks import run_on_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1", "phase2_triton", "phase3_fsdp"])
def test_backends_of_attention_have_one_loss_curve(phase, tmp_path):
    """The plain (math) and the flash backend of attention have the same losses, and env.json names the backend."""
    options = {"dropout": 0.0, "max_iters": 4} | ({"kernels": "none"} if phase == "phase2_triton" else {})
    configs = [tiny(phase, tmp_path / name, attention=name, **options) for name in ("math", "flash")]
    assert gap(*train_all(1, [(phase, config) for config in configs])) <= 1e-6
    env = json.loads((tmp_path / "math" / "env.json").read_text())
    assert env["chosen"]["attention"] == "math (requested)"


def test_a_backend_is_used_only_inside_of_the_context():
    """Inside of the context attention runs the given backend; after it, also after an error, torch chooses again."""
    q = torch.randn(1, 2, 8, 16)

    def list_operators() -> set[str]:
        with torch.profiler.profile() as profiler:
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return {event.name for event in profiler.events()}

    flash, math = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"
    assert flash in list_operators()
    with contextlib.suppress(RuntimeError), use_algorithms(Attention([SDPBackend.MATH], ""), is_deterministic=True):
        assert math in list_operators() and flash not in list_operators()
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"]
        raise RuntimeError
    assert flash in list_operators() and not torch.are_deterministic_algorithms_enabled()


def test_the_choice_of_attention(monkeypatch):
    """A requested backend is used. A backend that the device, the dtype or determinism excludes is refused."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_attention("auto", False, GPU, torch.bfloat16, 0.0) == Attention([], "torch's choice")
    efficient = Attention([SDPBackend.EFFICIENT_ATTENTION], "efficient (requested)")
    assert choose_attention("efficient", True, GPU, torch.float32, 0.0) == efficient
    for name in ("cudnn", "efficient"):
        with pytest.raises(ConfigError, match=f"--attention={name} needs a GPU"):
            choose_attention(name, False, CPU, torch.float32, 0.0)
    for name in ("cudnn", "flash"):
        with pytest.raises(ConfigError, match=f"--attention={name} needs 16 bits on a GPU"):
            choose_attention(name, False, GPU, torch.float32, 0.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="--attention=flash needs an Ampere or newer GPU"):
        choose_attention("flash", False, GPU, torch.float16, 0.0)
    assert choose_attention("flash", False, CPU, torch.float32, 0.0).backends == [SDPBackend.FLASH_ATTENTION]
    with pytest.raises(ConfigError, match="is not deterministic"):
        choose_attention("cudnn", True, GPU, torch.bfloat16, 0.0)


def test_the_fastest_attention():
    """auto tries cuDNN first on Hopper and newer. FlashAttention 3 needs Hopper, its package, 16 bits, no dropout."""
    hopper, blackwell, half = (9, 0), (10, 0), torch.bfloat16
    chosen = choose_fastest_attention(hopper, False, half, 0.0, None)
    assert chosen.is_flash_3 and chosen.reason.startswith("FlashAttention 3")
    assert chosen.backends[:2] == [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    assert sorted(map(str, chosen.backends)) == sorted(map(str, BACKENDS.values()))
    cudnn = Attention(list(BACKENDS.values()), "cudnn (the GPU is a Hopper or newer)")
    for facts in (
        (hopper, False, half, 0.0, NOT_INSTALLED),
        (hopper, False, torch.float32, 0.0, None),
        (blackwell, False, half, 0.0, None),
    ):
        assert choose_fastest_attention(*facts) == cudnn
    assert "no dropout" in choose_fastest_attention(hopper, False, half, 0.1, None).reason
    assert "cannot be imported" in choose_fastest_attention(hopper, False, half, 0.0, "it cannot be imported").reason
    for capability in ((0, 0), (8, 9)):
        assert choose_fastest_attention(capability, False, half, 0.0, None) == Attention([], "torch's choice")
    assert choose_fastest_attention(hopper, True, half, 0.0, None) == Attention([], "torch's choice")


def test_flash_attention_3_is_active_only_inside_of_the_context(tmp_path, monkeypatch):
    """The package is usable if it registers both operators. torch calls them only inside of the context."""
    assert find_package_problem() == NOT_INSTALLED
    module = tmp_path / "flash_attn_interface.py"
    module.write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_package_problem() == "flash_attn_interface cannot be imported: undefined symbol"
    module.write_text("")
    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        library.define("fwd(Tensor q) -> Tensor")
        assert find_package_problem() == "flash_attn_interface has no operator bwd"
        library.define("bwd(Tensor q) -> Tensor")
        assert find_package_problem() is None
        with use_algorithms(Attention([SDPBackend.FLASH_ATTENTION], "", is_flash_3=True), is_deterministic=False):
            assert current_flash_attention_impl() == "FA3"
        assert current_flash_attention_impl() is None
    monkeypatch.delitem(sys.modules, "flash_attn_interface")


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1", "phase2_triton", "phase3_fsdp"])
def test_deterministic_runs_are_equal(phase, tmp_path, device):
    """Every phase runs with --deterministic, and two such runs have equal losses and norms to the last digit."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    options = {"device": device, "dtype": dtype, "deterministic": True, "max_iters": 3, "n_layer": 1}
    options |= {"gradient_accumulation_steps": 2, "eval_interval": 3, "eval_iters": 1}
    first, second = (tiny(phase, tmp_path / name, **options) for name in "ab")
    assert train(phase, 1, first) == train(phase, 1, second)
    assert read_metric(tmp_path / "a", "grad_norm") == read_metric(tmp_path / "b", "grad_norm")


def record_compiled_calls(phase: str, config: TrainConfig) -> tuple[set[str], set[bool]]:
    """Train with --compile. Return the modes of torch.compile, and whether compiled graphs ran with gradients."""
    modes, with_gradients = set(), set()
    compile_model = torch.compile

    def record(model, **options):
        modes.add(options.pop("mode"))
        return compile_model(model, backend=count_calls, **options)

    def count_calls(graph, inputs):
        def call(*values):
            with_gradients.add(torch.is_grad_enabled())
            return graph(*values)

        return call

    with mock.patch.object(torch, "compile", record):
        call_train(phase, config)
    return modes, with_gradients


@pytest.mark.parametrize(
    ("phase", "ranks"), [("nanoGPT", 1), ("nanoGPT", 2), ("phase1_zero1", 2), ("phase2_triton", 1), ("phase3_fsdp", 2)]
)
def test_the_compiled_model_is_evaluated(phase, ranks, tmp_path):
    """With --compile, training and evaluation call the compiled model, in the given mode of torch.compile."""
    options = {"n_layer": 1, "gradient_accumulation_steps": ranks, "eval_iters": ranks}
    options |= {"kernels": "none"} if phase == "phase2_triton" else {}
    mode = "max-autotune-no-cudagraphs"
    config = tiny(phase, tmp_path, compile=True, compile_mode=mode, max_iters=1, **options)
    for modes, with_gradients in run_on_ranks(record_compiled_calls, ranks, phase, config, show=False):
        assert modes == {mode} and with_gradients == {True, False}
