"""Out of memory: one error line with the memory by category and the flags that save most.

The tests of a CPU provoke real errors. The tests of a GPU raise errors with torch's messages.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

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
    check_state_fits,
    control_group_limits,
    format_bytes,
    gpu_memory,
    host_limits,
    is_pinned_memory,
    requested_bytes,
)
from nanoGPT.memory.out_of_memory import CostsModule, FailedRun, MemoryReport, advise, describe
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
GPU_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.10 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.20 GiB is "
    "free. Process 71 has 1.50 GiB memory in use. Including non-PyTorch memory, this process has 76.45 GiB memory in "
    "use. Of the allocated memory 75.00 GiB is allocated by PyTorch, with 12.00 MiB allocated in private pools (e.g., "
    "CUDA Graphs), and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


# ---- checks before a run


@pytest.mark.parametrize("bias", [False, True])
def test_count_params_matches_the_model(bias):
    """GPTConfig.count_params computes the number of parameters of the model without creating it."""
    for numbers in ((1, 2, 16, 8), (3, 4, 64, 32)):
        shape = GPTConfig(*numbers, bias=bias, vocab_size=75)
        with torch.device("meta"):
            assert shape.count_params() == sum(p.numel() for p in GPT(shape).parameters())


@pytest.mark.parametrize("trainer", CONFIGS)
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--n_embd=1000000", ["--n_embd=1000000", "parameters, which need", "TiB in fp32", "this machine has"]),
        ("--n_layer=100000000", ["--n_layer=100000000", "from 1 to 10000"]),
        ("--vocab_size=2147483647", ["a vocabulary of 2,147,483,647", "smaller --n_layer, --n_embd or --vocab_size"]),
    ],
)
def test_a_model_that_cannot_fit_is_refused_at_once(trainer, flag, message, tmp_path):
    """A model that is too wide, too deep or has a too large vocabulary is refused with one error, within seconds and
    before a directory is created."""
    words = [f"{trainer}/train.py", "--device=cpu", f"--out_dir={tmp_path / 'run'}", flag]
    words += ["--kernels=none"] if trainer == "phase2_triton" else []
    outcome = run_program(*words, processor_seconds=20)
    assert_refused(outcome, *message)
    assert not (tmp_path / "run").exists()


def set_width_for_memory_share(share: float, config: TrainConfig) -> TrainConfig:
    """Return the configuration with the width at which the parameters need `share` of this machine's memory."""
    total = next(size for owner, size, _ in host_limits() if owner == "this machine has")
    width = round((share * total / 4 / 12 / config.n_layer) ** 0.5 / 4) * 4
    return dataclasses.replace(config, n_embd=width)


def test_the_parameters_of_all_ranks_of_a_node_must_fit():
    """Two ranks with full replicas on one node need twice the memory of one. Two ranks of FSDP, or on two nodes, do
    not."""
    for config in (TrainConfig(), Zero1Config(), TritonConfig(), FsdpConfig(use_fsdp=False)):
        check_parameters_fit(set_width_for_memory_share(0.6, config), 75, 1, 1)
        check_parameters_fit(set_width_for_memory_share(0.6, config), 75, 2, 1)
        with pytest.raises(ConfigError, match="in fp32 on 2 ranks"):
            check_parameters_fit(set_width_for_memory_share(0.6, config), 75, 2, 2)
    check_parameters_fit(set_width_for_memory_share(0.6, FsdpConfig()), 75, 2, 2)
    with pytest.raises(ConfigError, match="in fp32 on 2 ranks"):
        check_parameters_fit(set_width_for_memory_share(0.6, FsdpConfig(fsdp_shard_size="1")), 75, 2, 2)
    with pytest.raises(ConfigError, match="in fp32, but this machine has"):
        check_parameters_fit(set_width_for_memory_share(1.2, TrainConfig()), 75, 1, 1)


def test_the_model_state_must_fit_into_a_gpu():
    """A model with 1.56B parameters (25 GB of state) is refused on two GPUs of 12.6 GB, except if FSDP shards or
    offloads its state. The message has the number of GPUs that FSDP needs."""
    xl = {"n_layer": 48, "n_head": 25, "n_embd": 1600, "block_size": 1024, "bias": False}
    refused = [TrainConfig(**xl), Zero1Config(**xl), Zero1Config(**xl, zero_stage=2), FsdpConfig(**xl, use_fsdp=False)]
    for config in [*refused, FsdpConfig(**xl, fsdp_shard_size="1")]:
        with pytest.raises(ConfigError, match="on each of 2 rank.*at least 2 GPUs, or .* --fsdp_cpu_offload=True"):
            check_state_fits(config, 50304, 2, 2, 12_600_000_000)
    for config in (FsdpConfig(**xl), FsdpConfig(**xl, fsdp_shard_size="1", fsdp_cpu_offload=True)):
        check_state_fits(config, 50304, 2, 2, 12_600_000_000)
    params = GPTConfig(48, 25, 1600, 1024, False, 50304).count_params()
    for config, per_param in zip(refused, (16, 12, 10, 16), strict=True):  # 16P, 8P + 8P/N, 4P + 12P/N
        assert config.min_gpu_state(2, 2) == per_param
        check_state_fits(config, 50304, 2, 2, per_param * params)
    check_state_fits(EvaluateConfig(**xl), 50304, 2, 2, 2 * params)  # an evaluation stores only shards of parameters


def test_control_group_limits_are_read(tmp_path):
    """The memory limits of a container or a batch job are read at every level, for both versions of control groups."""
    group = tmp_path / "sys/fs/cgroup/job/step"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("9:name=systemd:/\n0::/job/step\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("1000\n")
    assert list(control_group_limits(tmp_path)) == [1000]
    (tmp_path / "proc/self/cgroup").write_text("3:cpu,memory:/pods/a\n2:cpuset:/\n")
    v1_group = tmp_path / "sys/fs/cgroup/memory/pods"
    v1_group.mkdir(parents=True)
    (v1_group / "memory.limit_in_bytes").write_text("2000\n")
    (v1_group.parent / "memory.limit_in_bytes").write_text("9000\n")
    assert list(control_group_limits(tmp_path)) == [2000, 9000]
    assert list(control_group_limits(tmp_path / "none")) == []


# ---- recognized errors


def catch_error(call: Callable[[], Any]) -> BaseException:
    """Return the exception that a call raises."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("the call raised no exception")


@pytest.mark.parametrize(
    ("call", "size"),
    [
        (lambda: torch.empty(10**15), 4 * 10**15),
        (lambda: bytearray(10**15), None),
        (lambda: np.empty(10**12), round(7.28 * 2**40)),
    ],
    ids=["torch", "Python", "numpy"],
)
def test_real_cpu_errors_are_recognized(call, size):
    """torch, Python and numpy each raise a different error. Those of torch and numpy contain the requested size."""
    error = catch_error(call)
    assert is_out_of_memory(error)
    assert requested_bytes(str(error)) == size


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(GPU_MESSAGE),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
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
def test_cuda_and_system_errors_are_recognized(error):
    """The out-of-memory errors of CUDA, cuBLAS, cuDNN, NCCL and the system are recognized, also as the cause of another
    error."""
    assert is_out_of_memory(error)
    outer = RuntimeError("a compiled function failed")
    outer.__cause__ = error
    assert is_out_of_memory(outer)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("memory")])
def test_other_errors_are_not_out_of_memory(error):
    """Any other error of the program is not explained as out of memory."""
    assert not is_out_of_memory(error) and MemoryReport(costs).explain(error) is None


def test_torchs_message_about_a_gpu_is_parsed():
    """The requested size, the total memory, the allocated tensors, other processes and fragmentation are read from
    torch's message."""
    memory = gpu_memory(GPU_MESSAGE, None)
    assert requested_bytes(GPU_MESSAGE) == round(2.1 * GIB)
    assert (memory.owner, memory.is_gpu, memory.is_shared) == ("GPU 1 has", True, False)
    assert (memory.total, memory.in_use) == (round(79.15 * GIB), 75 * GIB)
    assert (memory.others, memory.fragmented) == (round(1.5 * GIB), 512 * 2**20)
    container = GPU_MESSAGE.replace("Including non-PyTorch memory, this process", "Process 1")
    assert gpu_memory(container, None).others == 0  # the message does not tell which of the two is this process
    unknown = gpu_memory("CUBLAS_STATUS_ALLOC_FAILED", torch.device("cuda", 3))
    assert (unknown.owner, unknown.in_use) == ("GPU 3 has", None)


def test_pinned_memory_is_not_memory_of_the_gpu(monkeypatch):
    """CUDA reports exhausted pinned CPU memory as "CUDA error: out of memory", while the GPU has free memory."""
    device, message = torch.device("cuda", 0), "CUDA error: out of memory"
    for free_bytes, is_pinned in ((40 << 30, True), (100 << 20, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, size=free_bytes: (size, 80 << 30))
        assert is_pinned_memory(message, device) == is_pinned
        assert not is_pinned_memory(GPU_MESSAGE, device) and not is_pinned_memory("CUBLAS_STATUS_ALLOC_FAILED", device)
        sentence = MemoryReport(costs).explain(torch.AcceleratorError(message))
        assert ("GPU" not in sentence) == is_pinned, sentence


# ---- real errors during training

MEMORY_LIMITED_TRAINING = """
import ctypes, importlib, re, resource, sys
from pathlib import Path
import torch
from nanoGPT.job import start
from nanoGPT.optim import LossScaler

phase, owner, name, number = sys.argv[1:5]
del sys.argv[1:5]
trainer = importlib.import_module(f"{phase}.train")
owner = {"trainer": trainer, "scaler": LossScaler}[owner]
call, calls = getattr(owner, name), []

def limit_memory_and_call(*args, **kwargs):
    calls.append(0)
    if len(calls) == int(number):
        size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        while libc.malloc((1 << 20) - 64):
            pass  # use up the space that the allocator has reserved
        resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), resource.RLIM_INFINITY))
    return call(*args, **kwargs)

M_MMAP_THRESHOLD = -3  # the allocator cannot reuse freed memory for larger tensors
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
setattr(owner, name, limit_memory_and_call)
start.main(trainer.train, trainer.Config, trainer.__file__, trainer.costs)
"""
SHAPE = GPTConfig(1, 2, 224, 32, False, 10000)  # its embedding, and the logits of a micro-batch, are larger than 8 MiB
PARAMETERS = f"{format_bytes(4 * SHAPE.count_params())} of parameters"
GRADIENTS = f"{format_bytes(4 * SHAPE.count_params())} of gradients"
STATE = f"{format_bytes(8 * SHAPE.count_params())} of optimizer state"
FAILURE_POINTS = {  # forward and backward: in the second micro-batch of the second step
    "model": ("trainer", "GPT", 1, []),
    "evaluation": ("trainer", "evaluate", 1, [PARAMETERS]),
    "forward": ("trainer", "reseed", 4, [PARAMETERS, GRADIENTS, STATE]),
    "backward": ("scaler", "scale_loss", 4, [PARAMETERS, GRADIENTS, STATE]),
    "update": ("scaler", "step", 1, [PARAMETERS, GRADIENTS]),
}
CASES = [(phase, stage) for phase in ("nanoGPT", "phase3_fsdp") for stage in ("forward", "backward", "update")]
CASES += [("phase1_zero1", "update"), ("phase2_triton", "update")]  # their other stages run the baseline's code


@pytest.mark.parametrize(("phase", "stage"), [("nanoGPT", "model"), ("nanoGPT", "evaluation"), *CASES])
def test_out_of_memory_in_training_is_one_error(phase, stage, tmp_path):
    """Under a small `ulimit -v`, every phase exits with code 1 and one error, wherever it runs out of memory. The error
    has the requested size, the memory by category, and the flags that save most."""
    owner, name, number, categories = FAILURE_POINTS[stage]
    program = tmp_path / "program.py"
    program.write_text(MEMORY_LIMITED_TRAINING)
    flags = ["--device=cpu", "--batch_size=8", "--eval_iters=1", "--gradient_accumulation_steps=2"]
    flags += [
        f"--{name}={getattr(SHAPE, name)}" for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    ]
    flags += ["--kernels=none"] if phase == "phase2_triton" else []
    outcome = run_program(str(program), phase, owner, name, str(number), f"--out_dir={tmp_path / 'run'}", *flags)
    assert outcome.code == 1 and "Traceback" not in outcome.output, outcome
    (sentence,) = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert re.match(
        r"error: out of memory: ulimit -v allows this process .+B, and this rank tried to allocate", sentence
    )
    if phase == "phase3_fsdp":  # until the last micro-batch, unsharded gradients are not in param.grad
        categories = [category for category in categories if category != GRADIENTS or stage == "update"]
        savings = ["--batch_size=4", "--block_size=16", "--fsdp_activation_checkpointing=full"]
    else:
        savings = ["`make phase3` on 2 ranks"]
    for phrase in categories + savings:
        assert phrase in sentence, (phrase, sentence)
    assert ("of activations and other memory" in sentence) == (stage != "model")
    assert sentence.count("(about ") == (2 if stage == "model" else 3)


# ---- simulated errors of a GPU


def explain_each_error(configs: dict[str, TrainConfig]) -> dict[str, str | None]:
    return {phase: explain_error_of_a_gpu(phase, config) for phase, config in configs.items()}


def explain_error_of_a_gpu(phase: str, config: TrainConfig) -> str | None:
    """Train until the update of the second step, which raises a GPU's error. Return the message of this rank."""
    calls, real_step = [], LossScaler.step
    trainer = importlib.import_module(f"{phase}.train")

    def fail_in_second_step(*args: Any) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise torch.OutOfMemoryError(GPU_MESSAGE)
        real_step(*args)

    report = MemoryReport(trainer.costs)
    with mock.patch.object(LossScaler, "step", fail_in_second_step):
        try:
            trainer.train(config)
        except torch.OutOfMemoryError as error:
            return report.explain(error)
    return None


def test_each_rank_reports_its_memory_on_a_gpu(tmp_path):
    """From torch's GPU error, every rank reports the total memory, other processes, its model state by the formula, and
    the rest of the memory that torch has allocated."""
    fractions = {"nanoGPT": (1, 1, 2), "phase1_zero1": (1, 1, 1), "phase3_fsdp": (0.5, 0.5, 1)}
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 16, "bias": False, "vocab_size": 20000}
    fields = {**shape, "batch_size": 2, "eval_iters": 1, "gradient_accumulation_steps": 2}
    size = 4 * GPTConfig.from_dict(shape).count_params()
    configs = {phase: tiny(phase, tmp_path / phase, **fields) for phase in fractions}
    results = run_on_ranks(explain_each_error, 2, configs, show=False)
    for phase, sentence in [each for result in results for each in result.items()]:
        parameters, gradients, moments = (format_bytes(fraction * size) for fraction in fractions[phase])
        assert sentence.startswith(
            "out of memory: GPU 1 has 79.2 GiB, of which other processes use 1.5 GiB, and this rank tried to allocate "
            f"2.1 GiB in addition to {parameters} of parameters, {gradients} of gradients, {moments} of optimizer "
            "state and 75 GiB of activations and other tensors; to save memory, use "
        ), sentence
        assert "--batch_size=1 (about 38.5 GiB)" in sentence, sentence


def gpu_runtime(ranks: int, dtype: torch.dtype = torch.bfloat16) -> Runtime:
    return Runtime(0, 0, ranks, ranks, torch.device("cuda", 0), dtype)


def estimate_needs(
    config: TrainConfig, state_gib: tuple[float, float, float], activations: float, gpu: bool = True
) -> Needs:
    """Return the needs of a failed run with a given size of its state and activations, in GiB."""
    shape = GPTConfig.from_dict({**dataclasses.asdict(config), "vocab_size": 50304})
    names = ("parameters", "gradients", "optimizer_state")
    state = {name: round(size * GIB) for name, size in zip(names, state_gib, strict=True)}
    return Needs(shape, state, activations * GIB, is_gpu=gpu, is_shared=not gpu)


def list_advice(config: TrainConfig, run: Runtime, needs: Needs) -> list[str]:
    """Return the flags and commands that the advice names, in its order and without the numbers."""
    return re.findall(
        r"(?:use|,|or) ((?:--|`)[^(]+) \(about", advise(FailedRun(config, run), COSTS[type(config)], needs)
    )


COSTS: dict[type[TrainConfig], CostsModule] = {
    TrainConfig: costs,
    Zero1Config: phase1_zero1.costs,
    TritonConfig: phase2_triton.costs,
    FsdpConfig: phase3_fsdp.costs,
    EvaluateConfig: EvaluationCosts(),
}
LARGE_MODEL: dict[str, Any] = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 8}
SMALLEST_BATCH: dict[str, Any] = {"batch_size": 1, "block_size": 1}
BATCH, BLOCK, FP32 = "--batch_size=4", "--block_size=512", torch.float32
PHASE1, PHASE3 = "`make phase1` on 2 ranks", "`make phase3` on 2 ranks"
ON_4 = ["`make phase3` on 4 ranks", "`make phase1` on 4 ranks"]
LOSS = "--kernels=loss"
SYNC = "--fsdp_sync_every_micro_batch=True"


@pytest.mark.parametrize(
    ("config", "run", "state", "activations", "expected"),
    [
        (TrainConfig(**LARGE_MODEL), gpu_runtime(4), (4, 4, 8), 2, [*ON_4, BATCH]),
        (TrainConfig(**LARGE_MODEL), gpu_runtime(1), (1, 1, 2), 9, [BATCH, BLOCK, PHASE3]),
        (TrainConfig(**LARGE_MODEL), gpu_runtime(4, FP32), (1, 1, 2), 9, [BATCH, BLOCK, "--dtype=bfloat16"]),
        (TrainConfig(**SMALLEST_BATCH), gpu_runtime(4), (1, 1, 2), 9, ON_4),
        (Zero1Config(**LARGE_MODEL), gpu_runtime(4), (4, 4, 2), 2, ["--zero_stage=2", LOSS, BATCH]),
        (
            Zero1Config(zero_stage=2, kernels="loss", **LARGE_MODEL),
            gpu_runtime(4),
            (4, 1, 2),
            2,
            [ON_4[0], "`make phase1` on 8 ranks", BATCH],
        ),
        (Zero1Config(**LARGE_MODEL), gpu_runtime(1), (1, 1, 8), 1, [LOSS, BATCH, BLOCK]),
        (Zero1Config(use_zero1=False, **LARGE_MODEL), gpu_runtime(4), (1, 1, 2), 1, ["--use_zero1=True", LOSS, BATCH]),
        (
            TritonConfig(kernels="gelu", **LARGE_MODEL),
            gpu_runtime(1),
            (1, 1, 2),
            4,
            ["--kernels=gelu,loss", BATCH, BLOCK],
        ),
        (TritonConfig(**LARGE_MODEL), gpu_runtime(1), (1, 1, 2), 5, [BATCH, BLOCK, PHASE3]),
        (FsdpConfig(**LARGE_MODEL), gpu_runtime(2), (4, 4, 8), 5, ["--fsdp_cpu_offload=True", BATCH, BLOCK]),
        (FsdpConfig(**LARGE_MODEL), gpu_runtime(2), (1, 1, 2), 12, [BATCH, BLOCK, "--fsdp_cpu_offload=True"]),
        (FsdpConfig(use_fsdp=False, **LARGE_MODEL), gpu_runtime(4), (2, 2, 4), 5, ["--use_fsdp=True", BATCH, BLOCK]),
        (FsdpConfig(fsdp_cpu_offload=True, **LARGE_MODEL), gpu_runtime(4), (4, 4, 8), 0, [SYNC]),
        (
            FsdpConfig(fsdp_shard_size="2", **LARGE_MODEL),
            gpu_runtime(4),
            (4, 4, 8),
            0,
            ["--fsdp_cpu_offload=True", "--fsdp_shard_size=all", SYNC],
        ),
    ],
)
def test_the_advice_names_the_flags_that_save_most(config, run, state, activations, expected):
    """Each phase names its flags that are not set yet, in the order of what they save in this run. With fewer than
    three such flags, it also names other phases and more ranks."""
    assert list_advice(config, run, estimate_needs(config, state, activations)) == expected


def test_flags_that_are_already_set_are_not_named():
    """The advice names no flag that already has its value. The savings of each flag match the formula."""
    config, run = FsdpConfig(**LARGE_MODEL), gpu_runtime(2)
    needs = estimate_needs(config, (1, 1, 2), 20)
    savings = COSTS[FsdpConfig].memory_savings(config, needs, run)
    shape, sizes = needs.shape, (8, 1024, torch.bfloat16)
    saved = activation_bytes(shape, *sizes) - activation_bytes(shape, *sizes, mode="full")
    assert savings["--fsdp_activation_checkpointing=full"] == saved
    assert savings["--kernels=loss"] == 8 * 1024 * 50304 * (2 + 4)
    assert savings["--fsdp_sync_every_micro_batch=True"] == 4 * shape.count_params() / 2
    assert savings["--fsdp_cpu_offload=True"] == 4 * GIB and savings["`make phase3` on 4 ranks"] == 2 * GIB
    all_savings = {"fsdp_activation_checkpointing": "full", "kernels": "loss", "fsdp_sync_every_micro_batch": True}
    config_with_savings = FsdpConfig(
        **LARGE_MODEL, **all_savings, fsdp_cpu_offload=True, fsdp_reshard_after_forward=False, fsdp_prefetch=2
    )
    savings_left = {
        flag: size
        for flag, size in COSTS[FsdpConfig].memory_savings(config_with_savings, needs, run).items()
        if size >= 1
    }
    assert savings_left.keys() == {
        "--batch_size=4",
        "--block_size=512",
        "--fsdp_reshard_after_forward=True",
        "--fsdp_prefetch=0",
    }
    assert savings_left["--fsdp_prefetch=0"] == 2 * 12 * 768**2 * 2


def test_the_advice_for_an_evaluation_ignores_gradients():
    """An evaluation stores no gradients, no optimizer state, and no activations for a backward pass. No flag is named
    for them."""
    config = EvaluateConfig(**LARGE_MODEL)
    needs = estimate_needs(config, (4, 4, 8), 12)
    assert list_advice(config, gpu_runtime(2), needs) == [BATCH, BLOCK, "--fsdp_cpu_offload=True"]
    assert COSTS[EvaluateConfig].memory_savings(config, needs, gpu_runtime(2))["--fsdp_cpu_offload=True"] == 4 * GIB


def test_the_advice_for_cpu_memory_with_gpus():
    """If CPU memory runs out in a run on GPUs, the advice is to turn off CPU offloading and the copy of an asynchronous
    save."""
    config = FsdpConfig(**LARGE_MODEL, fsdp_cpu_offload=True, async_save=True)
    advice = list_advice(config, gpu_runtime(2), estimate_needs(config, (4, 4, 8), 0, gpu=False))
    assert advice == ["--fsdp_cpu_offload=False", "--async_save=False", "`make phase3` on 4 ranks, on more nodes"]


def test_parameters_that_do_not_fit_are_reported():
    """If the parameters alone need more than the total memory, the error says so. For FSDP, only this rank's shard
    counts."""
    memory = DeviceMemory("GPU 0 has", GIB, None, is_gpu=True)
    config = TrainConfig(n_layer=24, n_embd=1024, n_head=16, vocab_size=50304)
    sentence = describe(None, memory, FailedRun(config, gpu_runtime(2)), COSTS[type(config)])
    assert sentence == (
        "out of memory: the parameters alone need 1.32 GiB in fp32, but GPU 0 has 1 GiB: use a smaller --n_layer, "
        "--n_embd or --vocab_size, or `make phase3` on more ranks"
    )
    sharded = FsdpConfig(n_layer=24, n_embd=1024, n_head=16, vocab_size=50304)
    assert "alone" not in describe(None, memory, FailedRun(sharded, gpu_runtime(2)), COSTS[type(sharded)])


def test_fragmented_memory_is_reported():
    """If torch has reserved much more memory than it has allocated, the error names the setting against
    fragmentation."""
    fragmented_message = GPU_MESSAGE.replace("512.00 MiB is reserved", "9.35 GiB is reserved")
    for message, is_reported in ((GPU_MESSAGE, False), (fragmented_message, True)):
        config = TrainConfig()
        sentence = describe(
            requested_bytes(message), gpu_memory(message, None), FailedRun(config, gpu_runtime(1)), COSTS[type(config)]
        )
        assert ("9.35 GiB more is reserved by torch" in sentence) == is_reported
        assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in sentence) == is_reported


def test_a_failing_report_still_returns_one_error():
    """If the report itself fails, or no trainer was running, it returns a short error and raises nothing."""
    report = MemoryReport(costs)

    def train() -> None:
        config = run = model = object()
        raise MemoryError(config, run, model)

    for call in (train, lambda: bytearray(10**15)):
        sentence = report.explain(catch_error(call))
        assert sentence and sentence.startswith("out of memory: ") and "use a smaller --batch_size" in sentence
