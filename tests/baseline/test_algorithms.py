"""The choice of attention's backend, deterministic algorithms, and compiled evaluation."""

import contextlib
import itertools
import json
import os

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from nanoGPT.distributed.algorithms import (
    BACKENDS,
    AttentionChoice,
    choose_attention,
    choose_fastest_attention,
    use_algorithms,
)
from nanoGPT.errors import ConfigError
from nanoGPT.job import start as job
from tests.helpers.training import CONFIGS, gap, read_metric, tiny, train_all
from workshop.ranks import run_on_ranks

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_backends_of_attention_have_one_loss_curve(tmp_path):
    """In every phase, the plain (math) and the flash backend of attention have the same losses, and env.json names the
    backend."""
    cells = {}
    for phase, name in itertools.product(CONFIGS, ("math", "flash")):
        options = {"dropout": 0.0, "max_iters": 4, "gradient_accumulation_steps": 2}
        options |= {"kernels": "none"} if phase == "phase2_triton" else {}
        cells[phase, name] = (phase, tiny(phase, tmp_path / phase / name, attention=name, **options))
    losses = dict(zip(cells, train_all(1, list(cells.values())), strict=True))
    for phase, name in cells:
        assert gap(losses[phase, "math"], losses[phase, "flash"]) <= 1e-6
        env = json.loads((tmp_path / phase / name / "env.json").read_text())
        assert env["chosen"]["attention"] == f"{name} (requested)"


def test_a_backend_is_used_only_inside_of_the_context():
    """Inside of the context attention runs the given backend; after it, also after an error, torch chooses again."""
    q = torch.randn(1, 2, 8, 16)

    def list_operators() -> set[str]:
        with torch.profiler.profile() as profiler:
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return {event.name for event in profiler.events()}

    flash, math = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"
    assert flash in list_operators()
    choice = AttentionChoice([SDPBackend.MATH], "")
    with contextlib.suppress(RuntimeError), use_algorithms(choice, is_deterministic=True):
        assert math in list_operators() and flash not in list_operators()
        assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"]
        raise RuntimeError
    assert flash in list_operators() and not torch.are_deterministic_algorithms_enabled()


def test_algorithms_are_chosen_before_the_ranks_join(tmp_path, monkeypatch):
    """NCCL reads its algorithms when its group is created. With NVLS, sums of DDP would not repeat."""
    chosen = []

    def record(_run: object) -> None:
        chosen.append((torch.are_deterministic_algorithms_enabled(), os.environ["NCCL_ALGO"]))
        raise ConfigError("the ranks do not join")

    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("NCCL_ALGO")  # removed again after the test
    monkeypatch.setattr(job, "join_process_group", record)
    with pytest.raises(ConfigError, match="do not join"), job.start(tiny("nanoGPT", tmp_path, deterministic=True)):
        pass
    assert chosen == [(True, "^NVLS,NVLSTree")]


def count_cached_graphs(choices: list[list[str]], cache: str) -> list[int]:
    """Compile attention with each choice of backends, and return how many graphs came from torch.compile's cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    q, counts = torch.randn(1, 1, 8, 8), []
    for names in choices:
        torch.compiler.reset()
        counters.clear()
        with use_algorithms(AttentionChoice([BACKENDS[name] for name in names], ""), is_deterministic=False):
            torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))(q)
        counts.append(counters["aot_autograd"]["autograd_cache_hit"])
    return counts


def test_a_compiled_graph_of_other_backends_is_not_used(tmp_path):
    """torch.compile stores graphs on disk. Another process uses them only with the same backends of attention.

    On a CPU the choices here run the same operator, which needs no C++ compiler.
    """
    choices = [["flash"], ["efficient", "flash"]]
    assert run_on_ranks(count_cached_graphs, 1, choices[:1], str(tmp_path)) == [[0]]
    assert run_on_ranks(count_cached_graphs, 1, choices, str(tmp_path)) == [[1, 0]]


def test_the_choice_of_attention(monkeypatch):
    """A requested backend is used. A backend that the device, the dtype or determinism excludes is refused."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_attention("auto", False, GPU, torch.bfloat16, 0.0) == AttentionChoice([], "torch's choice")
    efficient = AttentionChoice([SDPBackend.EFFICIENT_ATTENTION], "efficient (requested)")
    assert choose_attention("efficient", True, GPU, torch.float32, 0.0) == efficient
    with pytest.raises(ConfigError, match="--attention=efficient needs a GPU"):
        choose_attention("efficient", False, CPU, torch.float32, 0.0)
    with pytest.raises(ConfigError, match="--attention=cudnn needs 16 bits on a GPU"):
        choose_attention("cudnn", False, GPU, torch.float32, 0.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="--attention=flash needs an Ampere or newer GPU"):
        choose_attention("flash", False, GPU, torch.float16, 0.0)
    assert choose_attention("flash", False, CPU, torch.float32, 0.0).backends == [SDPBackend.FLASH_ATTENTION]
    with pytest.raises(ConfigError, match="is not deterministic"):
        choose_attention("cudnn", True, GPU, torch.bfloat16, 0.0)
    with pytest.raises(ConfigError, match="--dropout=0.2 to a multiple of 0.0625: .* or --dropout=0.1875$"):
        choose_attention("cudnn", False, GPU, torch.bfloat16, 0.2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for dropout in (0.0, 0.0625, 0.5):
        assert choose_attention("cudnn", False, GPU, torch.bfloat16, dropout).backends == [BACKENDS["cudnn"]]


@pytest.mark.parametrize(
    ("facts", "first", "reason"),
    [
        (((9, 0), False, torch.bfloat16, 0.25), "cudnn", "the GPU is a Hopper or newer"),
        (((10, 0), False, torch.bfloat16, 0.1), "flash", "its dropout is a multiple of 0.0625"),
        (((8, 9), False, torch.bfloat16, 0.0), None, "torch's choice"),
    ],
)
def test_the_fastest_attention(facts, first, reason):
    """auto tries cuDNN first on Hopper and newer, except if cuDNN would round the dropout."""
    chosen = choose_fastest_attention(*facts)
    assert chosen.backends[:1] == ([BACKENDS[first]] if first else []) and reason in chosen.reason


@pytest.mark.slow
def test_deterministic_runs_are_equal(tmp_path, device):
    """With --deterministic, two runs of a phase have equal losses and norms to the last digit."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    options = {"device": device, "dtype": dtype, "deterministic": True, "max_iters": 3, "n_layer": 1, "n_head": 1}
    options |= {"gradient_accumulation_steps": 2, "eval_interval": 3}
    first, second = (  # each in a new process
        train_all(1, [(phase, tiny(phase, tmp_path / phase / name, **options)) for phase in CONFIGS]) for name in "ab"
    )
    assert first == second and all(first)
    for phase in CONFIGS:
        norms = [read_metric(tmp_path / phase / name, "grad_norm") for name in "ab"]
        assert norms[0] == norms[1] and norms[0]
