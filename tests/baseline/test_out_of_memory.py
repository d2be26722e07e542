"""Memory that runs out is one sentence: what was held, and which flags free most. On a CPU the errors are real ones."""

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phase1_zero1.costs
import phase2_triton.costs
import phase3_fsdp.costs
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError, is_out_of_memory
from nanoGPT.memory import costs
from nanoGPT.memory.device import (
    DeviceMemory,
    check_parameters_fit,
    control_group_limits,
    format_bytes,
    gpu_memory,
    host_limits,
    requested_bytes,
)
from nanoGPT.memory.out_of_memory import CostsModule, Job, MemoryReport, advise, describe
from nanoGPT.memory.savings import Needs
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import LossScaler
from nanoGPT.train_config import TrainConfig
from phase1_zero1.parallelize import Zero1Config
from phase2_triton.apply import TritonConfig
from phase3_fsdp.activation_bytes import activation_bytes
from phase3_fsdp.evaluate import EvaluateConfig, EvaluationCosts
from phase3_fsdp.fsdp import FsdpConfig
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import CONFIGS, tiny
from workshop.ranks import run_on_ranks

GIB = 2**30
ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.10 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.20 GiB is "
    "free. Process 71 has 1.50 GiB memory in use. Including non-PyTorch memory, this process has 76.45 GiB memory in "
    "use. Of the allocated memory 75.00 GiB is allocated by PyTorch, with 12.00 MiB allocated in private pools (e.g., "
    "CUDA Graphs), and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


# ---- before a run


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_counted_by_arithmetic(bias):
    """A shape has as many parameters by arithmetic as the model that is made of it."""
    for numbers in ((1, 2, 16, 8), (3, 4, 64, 32)):
        shape = GPTConfig(*numbers, bias=bias, vocab_size=75)
        with torch.device("meta"):
            assert shape.count_params() == sum(p.numel() for p in GPT(shape).parameters())


@pytest.mark.parametrize("trainer", CONFIGS)
@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--n_embd=1000000", ["--n_embd=1000000", "parameters, which alone take", "TiB in fp32", "this machine has"]),
        ("--n_layer=100000000", ["--n_layer=100000000", "up to 10000"]),
        ("--vocab_size=2147483647", ["a vocabulary of 2,147,483,647", "smaller --n_layer, --n_embd or --vocab_size"]),
    ],
)
def test_a_model_that_cannot_fit_is_refused_at_once(trainer, flag, said, tmp_path):
    """A model that is wider, deeper or has more words than any machine holds is one sentence, before a directory is
    made and within seconds of processor time."""
    words = [f"{trainer}/train.py", "--device=cpu", f"--out_dir={tmp_path / 'run'}", flag]
    words += ["--kernels=none"] if trainer == "phase2_triton" else []
    ended = run_program(*words, processor_seconds=20)
    assert_refused(ended, *said)
    assert not (tmp_path / "run").exists()


def of_machine(share: float, config: TrainConfig) -> TrainConfig:
    """The configuration with a width at which the parameters take that share of this machine's memory."""
    total = next(size for owner, size, _ in host_limits() if owner == "this machine has")
    width = round((share * total / 4 / 12 / config.n_layer) ** 0.5 / 4) * 4
    return dataclasses.replace(config, n_embd=width)


def test_what_ranks_keep_together_must_fit():
    """Two ranks that each keep the whole model need twice its memory; two ranks of FSDP, or of two machines, do not."""
    for config in (TrainConfig(), Zero1Config(), TritonConfig(), FsdpConfig(use_fsdp=False)):
        check_parameters_fit(of_machine(0.6, config), 75, 1, 1)
        check_parameters_fit(of_machine(0.6, config), 75, 2, 1)
        with pytest.raises(ConfigError, match="in fp32 on 2 ranks"):
            check_parameters_fit(of_machine(0.6, config), 75, 2, 2)
    check_parameters_fit(of_machine(0.6, FsdpConfig()), 75, 2, 2)
    with pytest.raises(ConfigError, match="in fp32 on 2 ranks"):
        check_parameters_fit(of_machine(0.6, FsdpConfig(fsdp_shard_size="1")), 75, 2, 2)
    with pytest.raises(ConfigError, match="in fp32, and this machine has"):
        check_parameters_fit(of_machine(1.2, TrainConfig()), 75, 1, 1)


def test_the_limits_of_control_groups_count(tmp_path):
    """The limits of a container or a batch job are read, of both versions of control groups and at every level."""
    group = tmp_path / "sys/fs/cgroup/job/step"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("9:name=systemd:/\n0::/job/step\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("1000\n")
    assert list(control_group_limits(tmp_path)) == [1000]
    (tmp_path / "proc/self/cgroup").write_text("3:cpu,memory:/pods/a\n2:cpuset:/\n")
    below = tmp_path / "sys/fs/cgroup/memory/pods"
    below.mkdir(parents=True)
    (below / "memory.limit_in_bytes").write_text("2000\n")
    (below.parent / "memory.limit_in_bytes").write_text("9000\n")
    assert list(control_group_limits(tmp_path)) == [2000, 9000]
    assert list(control_group_limits(tmp_path / "none")) == []


# ---- which errors mean it


def raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("call", "size"),
    [
        (lambda: torch.empty(10**15), 4 * 10**15),
        (lambda: bytearray(10**15), None),
        (lambda: np.empty(10**12), round(7.28 * 2**40)),
    ],
    ids=["torch", "Python", "numpy"],
)
def test_real_errors_of_a_cpu_are_recognised(call, size):
    """torch, Python and numpy each raise an error of their own, and those that know tell the size."""
    error = raised(call)
    assert is_out_of_memory(error)
    assert requested_bytes(str(error)) == size


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(ON_GPU),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
        RuntimeError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_errors_of_cuda_and_the_system_are_recognised(error):
    """CUDA's, cuBLAS's, cuDNN's, NCCL's and the system's words for it are known, also as the cause of another error."""
    assert is_out_of_memory(error)
    outer = RuntimeError("a compiled function failed")
    outer.__cause__ = error
    assert is_out_of_memory(outer)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("memory")])
def test_other_errors_are_not_taken_for_it(error):
    """An error of the program is none of memory."""
    assert not is_out_of_memory(error) and MemoryReport(costs).explain(error) is None


def test_what_torch_says_of_a_gpu():
    """Size, total, own tensors, other processes and pieces are read off torch's message."""
    memory = gpu_memory(ON_GPU, None)
    assert requested_bytes(ON_GPU) == round(2.1 * GIB)
    assert (memory.owner, memory.is_gpu, memory.is_shared) == ("GPU 1 has", True, False)
    assert (memory.total, memory.in_use) == (round(79.15 * GIB), 75 * GIB)
    assert (memory.others, memory.fragmented) == (round(1.5 * GIB), 512 * 2**20)
    container = ON_GPU.replace("Including non-PyTorch memory, this process", "Process 1")
    assert gpu_memory(container, None).others == 0  # which of the two is this process is not said
    unknown = gpu_memory("CUBLAS_STATUS_ALLOC_FAILED", torch.device("cuda", 3))
    assert (unknown.owner, unknown.in_use) == ("GPU 3 has", None)


# ---- real errors in the middle of training

PROGRAM = """
import importlib, re, resource, sys
from pathlib import Path
import torch
from nanoGPT.job import start
from nanoGPT.optim import LossScaler

phase, owner, name, number = sys.argv[1:5]
del sys.argv[1:5]
trainer = importlib.import_module(f"{phase}.train")
owner = {"trainer": trainer, "scaler": LossScaler}[owner]
call, calls = getattr(owner, name), []

def limited(*args, **named):
    calls.append(0)
    if len(calls) == int(number):
        size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size + (16 << 20), resource.RLIM_INFINITY))
    return call(*args, **named)

setattr(owner, name, limited)
start.main(trainer.train, trainer.Config, trainer.__file__, trainer.costs)
"""
SHAPE = GPTConfig(1, 2, 192, 32, False, 50304)  # its largest tensors are never pieces that the allocator has kept
PARAMETERS = f"{format_bytes(4 * SHAPE.count_params())} of parameters"
GRADIENTS = f"{format_bytes(4 * SHAPE.count_params())} of gradients"
STATE = f"{format_bytes(8 * SHAPE.count_params())} of optimizer state"
TIMES = {  # in the second step's second micro-batch
    "model": ("trainer", "read_starting_point", 1, []),
    "evaluation": ("trainer", "evaluate", 1, [PARAMETERS]),
    "forward": ("trainer", "reseed", 4, [PARAMETERS, GRADIENTS, STATE]),
    "backward": ("scaler", "scale_loss", 4, [PARAMETERS, GRADIENTS, STATE]),
    "update": ("scaler", "step", 1, [PARAMETERS, GRADIENTS]),
}
CASES = [(phase, when) for phase in CONFIGS for when in ("forward", "backward", "update")]


@pytest.mark.parametrize(("phase", "when"), [("nanoGPT", "model"), ("nanoGPT", "evaluation"), *CASES])
def test_memory_that_runs_out_in_training_is_one_sentence(phase, when, tmp_path):
    """Under a small `ulimit -v` every phase ends with code 1 and one sentence, wherever its memory runs out: what it
    tried to allocate, what it held, and what frees most."""
    owner, name, number, held = TIMES[when]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = ["--device=cpu", "--batch_size=8", "--eval_iters=1", "--gradient_accumulation_steps=2"]
    words += [
        f"--{name}={getattr(SHAPE, name)}" for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    ]
    words += ["--kernels=none"] if phase == "phase2_triton" else []
    ended = run_program(str(program), phase, owner, name, str(number), f"--out_dir={tmp_path / 'run'}", *words)
    assert ended.code == 1 and "Traceback" not in ended.output, ended
    (sentence,) = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert re.match(
        r"error: out of memory: ulimit -v allows this process .+B, and this rank tried to allocate", sentence
    )
    if phase == "phase3_fsdp":  # until the last micro-batch whole gradients are FSDP's own
        held = [words for words in held if words != GRADIENTS or when == "update"]
        flags = ["--batch_size=4", "--block_size=16", "--fsdp_activation_checkpointing=full"]
    else:
        flags = ["`make phase3` on 2 ranks"]
    for words in held + flags:
        assert words in sentence, (words, sentence)
    assert ("of activations and other memory" in sentence) == (when != "model")
    assert sentence.count("(about ") == (2 if when == "model" else 3)


# ---- a GPU's error, by hand


def explain_error_of_a_gpu(phase: str, config: TrainConfig) -> str | None:
    """Train until the update of the second step, which fails as on a GPU; the sentence of this rank."""
    calls, step = [], LossScaler.step
    trainer = importlib.import_module(f"{phase}.train")

    def fail_later(*words: Any) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise torch.OutOfMemoryError(ON_GPU)
        step(*words)

    LossScaler.step = fail_later  # type: ignore[method-assign]
    report = MemoryReport(trainer.costs)
    try:
        trainer.train(config)
    except torch.OutOfMemoryError as error:
        return report.explain(error)
    return None


@pytest.mark.parametrize(
    ("phase", "parts"), [("nanoGPT", (1, 1, 2)), ("phase1_zero1", (1, 1, 1)), ("phase3_fsdp", (0.5, 0.5, 1))]
)
def test_what_each_rank_held_on_a_gpu(phase, parts, tmp_path):
    """From torch's own error of a GPU every rank makes its sentence: total, other processes, its state by the formula,
    and the rest of what torch's allocator had."""
    config = tiny(phase, tmp_path, vocab_size=50304, n_embd=64, n_layer=1, batch_size=2, eval_iters=1)
    size = 4 * GPTConfig(1, 2, 64, 16, False, 50304).count_params()
    parameters, gradients, moments = (format_bytes(part * size) for part in parts)
    for sentence in run_on_ranks(explain_error_of_a_gpu, 2, phase, config, show=False):
        assert sentence.startswith(
            "out of memory: GPU 1 has 79.2 GiB, of which other processes use 1.5 GiB, and this rank tried to allocate "
            f"2.1 GiB while it held {parameters} of parameters, {gradients} of gradients, {moments} of optimizer state "
            "and 75 GiB of activations and other tensors; free most with "
        ), sentence
        assert "--batch_size=1 (about 38.5 GiB)" in sentence, sentence


def on_gpus(ranks: int, dtype: torch.dtype = torch.bfloat16) -> Runtime:
    return Runtime(0, 0, ranks, ranks, torch.device("cuda", 0), dtype)


def needs_of(config: TrainConfig, state_gib: tuple[float, float, float], activations: float, gpu: bool = True) -> Needs:
    shape = GPTConfig.of({**dataclasses.asdict(config), "vocab_size": 50304})
    names = ("parameters", "gradients", "optimizer_state")
    state = {name: round(size * GIB) for name, size in zip(names, state_gib, strict=True)}
    return Needs(shape, state, activations * GIB, is_gpu=gpu, is_shared=not gpu)


def best(config: TrainConfig, run: Runtime, needs: Needs) -> list[str]:
    """What the sentence names, in its order, without the numbers."""
    return re.findall(r"(?:with|,|or) ((?:--|`)[^(]+) \(about", advise(Job(config, run), COSTS[type(config)], needs))


COSTS: dict[type[TrainConfig], CostsModule] = {
    TrainConfig: costs,
    Zero1Config: phase1_zero1.costs,
    TritonConfig: phase2_triton.costs,
    FsdpConfig: phase3_fsdp.costs,
    EvaluateConfig: EvaluationCosts(),
}
LARGE: dict[str, Any] = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 8}
ONE: dict[str, Any] = {"batch_size": 1, "block_size": 1}
BATCH, BLOCK, FP32 = "--batch_size=4", "--block_size=512", torch.float32
PHASE1, PHASE3 = "`make phase1` on 2 ranks", "`make phase3` on 2 ranks"
ON_4 = ["`make phase3` on 4 ranks", "`make phase1` on 4 ranks"]
SYNC = "--fsdp_sync_every_micro_batch=True"


@pytest.mark.parametrize(
    ("config", "run", "state", "activations", "named"),
    [
        (TrainConfig(**LARGE), on_gpus(4), (4, 4, 8), 2, [*ON_4, BATCH]),
        (TrainConfig(**LARGE), on_gpus(1), (1, 1, 2), 9, [BATCH, BLOCK, PHASE3]),
        (TrainConfig(**LARGE), on_gpus(4, FP32), (1, 1, 2), 9, [BATCH, BLOCK, "--dtype=bfloat16"]),
        (TrainConfig(**ONE), on_gpus(4), (1, 1, 2), 9, ON_4),
        (Zero1Config(**LARGE), on_gpus(4), (4, 4, 2), 2, [ON_4[0], BATCH, BLOCK]),
        (Zero1Config(**LARGE), on_gpus(1), (1, 1, 8), 1, [PHASE3, PHASE1, BATCH]),
        (Zero1Config(use_zero1=False, **LARGE), on_gpus(4), (1, 1, 2), 1, ["--use_zero1=True", BATCH, BLOCK]),
        (TritonConfig(kernels="gelu", **LARGE), on_gpus(1), (1, 1, 2), 4, ["--kernels=gelu,loss", BATCH, BLOCK]),
        (TritonConfig(**LARGE), on_gpus(1), (1, 1, 2), 5, [BATCH, BLOCK, PHASE3]),
        (FsdpConfig(**LARGE), on_gpus(2), (4, 4, 8), 5, ["--fsdp_cpu_offload=True", BATCH, BLOCK]),
        (FsdpConfig(**LARGE), on_gpus(2), (1, 1, 2), 12, [BATCH, BLOCK, "--fsdp_cpu_offload=True"]),
        (FsdpConfig(use_fsdp=False, **LARGE), on_gpus(4), (2, 2, 4), 5, ["--use_fsdp=True", BATCH, BLOCK]),
        (FsdpConfig(fsdp_cpu_offload=True, **LARGE), on_gpus(4), (4, 4, 8), 0, [SYNC]),
        (
            FsdpConfig(fsdp_shard_size="2", **LARGE),
            on_gpus(4),
            (4, 4, 8),
            0,
            ["--fsdp_cpu_offload=True", "--fsdp_shard_size=all", SYNC],
        ),
    ],
)
def test_flags_that_free_most(config, run, state, activations, named):
    """Every phase names flags of its own that are not set yet, in the order of what they free in this run; other
    commands and more ranks where it has fewer than three."""
    assert best(config, run, needs_of(config, state, activations)) == named


def test_flags_of_fsdp_that_are_set_are_not_named():
    """No flag is named that has its value already; each frees what the arithmetic says."""
    config, run = FsdpConfig(**LARGE), on_gpus(2)
    needs = needs_of(config, (1, 1, 2), 20)
    savings = COSTS[FsdpConfig].memory_savings(config, needs, run)
    shape, sizes = needs.shape, (8, 1024, torch.bfloat16)
    saved = activation_bytes(shape, *sizes) - activation_bytes(shape, *sizes, mode="full")
    assert savings["--fsdp_activation_checkpointing=full"] == saved
    assert savings["--kernels=loss"] == 8 * 1024 * 50304 * (2 + 4)
    assert savings["--fsdp_sync_every_micro_batch=True"] == 4 * shape.count_params() / 2
    assert savings["--fsdp_cpu_offload=True"] == 4 * GIB and savings["`make phase3` on 4 ranks"] == 2 * GIB
    everything = {"fsdp_activation_checkpointing": "full", "kernels": "loss", "fsdp_sync_every_micro_batch": True}
    changed = FsdpConfig(
        **LARGE, **everything, fsdp_cpu_offload=True, fsdp_reshard_after_forward=False, fsdp_prefetch=2
    )
    freed = {words: size for words, size in COSTS[FsdpConfig].memory_savings(changed, needs, run).items() if size >= 1}
    assert freed.keys() == {
        "--batch_size=4",
        "--block_size=512",
        "--fsdp_reshard_after_forward=True",
        "--fsdp_prefetch=0",
    }
    assert freed["--fsdp_prefetch=0"] == 2 * 12 * 768**2 * 2


def test_what_frees_memory_in_an_evaluation():
    """An evaluation keeps neither gradients nor moments nor activations for a backward pass, and no flag frees them."""
    config = EvaluateConfig(**LARGE)
    needs = needs_of(config, (4, 4, 8), 12)
    assert best(config, on_gpus(2), needs) == [BATCH, BLOCK, "--fsdp_cpu_offload=True"]
    assert COSTS[EvaluateConfig].memory_savings(config, needs, on_gpus(2))["--fsdp_cpu_offload=True"] == 4 * GIB


def test_what_frees_the_cpus_memory_beside_gpus():
    """Where the CPU's memory is short beside GPUs, offloading and the copy of a background save are what takes it."""
    config = FsdpConfig(**LARGE, fsdp_cpu_offload=True, async_save=True)
    found = best(config, on_gpus(2), needs_of(config, (4, 4, 8), 0, gpu=False))
    assert found == ["--fsdp_cpu_offload=False", "--async_save=False", "`make phase3` on 4 ranks, on more machines"]


def test_parameters_that_alone_do_not_fit():
    """Where the parameters alone need more than there is, the sentence says that; of FSDP this rank's share counts."""
    memory = DeviceMemory("GPU 0 has", GIB, None, is_gpu=True)
    config = TrainConfig(n_layer=24, n_embd=1024, n_head=16, vocab_size=50304)
    sentence = describe(None, memory, Job(config, on_gpus(2)), COSTS[type(config)])
    assert sentence == (
        "out of memory: the parameters alone take 1.32 GiB in fp32, and GPU 0 has 1 GiB: use a smaller --n_layer, "
        "--n_embd or --vocab_size, or `make phase3` on more ranks"
    )
    sharded = FsdpConfig(n_layer=24, n_embd=1024, n_head=16, vocab_size=50304)
    assert "alone" not in describe(None, memory, Job(sharded, on_gpus(2)), COSTS[type(sharded)])


def test_memory_in_pieces_is_named():
    """Where torch has reserved more than was asked for, the sentence names the setting that joins the pieces."""
    text = ON_GPU.replace("512.00 MiB is reserved", "9.35 GiB is reserved")
    for message, named in ((ON_GPU, False), (text, True)):
        config = TrainConfig()
        sentence = describe(
            requested_bytes(message), gpu_memory(message, None), Job(config, on_gpus(1)), COSTS[type(config)]
        )
        assert ("9.35 GiB more is reserved by torch" in sentence) == named
        assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in sentence) == named


def test_a_report_that_fails_is_still_a_sentence():
    """Where even the report fails, or no trainer was running, there is one sentence and no second error."""
    report = MemoryReport(costs)

    def train() -> None:
        config = run = model = object()
        raise MemoryError(config, run, model)

    for call in (train, lambda: bytearray(10**15)):
        sentence = report.explain(raised(call))
        assert sentence and sentence.startswith("out of memory: ") and "use a smaller --batch_size" in sentence
