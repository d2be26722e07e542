"""Out of memory: a model that cannot fit is refused before a run. Later, one sentence names what is allocated."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from measure.memory_limits import (
    check_parameters_fit,
    check_state_fits,
    control_group_limits,
    format_bytes,
    host_limits,
)
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPTConfig
from nanoGPT.train_config import TrainConfig
from operate.out_of_memory import MemoryReport, is_out_of_memory, list_flags
from phase1_zero1.parallelize import Zero1Config
from phase3_fsdp.evaluate import EvaluateConfig
from phase3_fsdp.fsdp import FsdpConfig
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import tiny

GPU_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.10 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.20 GiB is free."
)


# ---- checks before a run


@pytest.mark.parametrize(
    ("trainer", "flag", "message"),
    [
        ("nanoGPT", "--n_embd=1000000", "TiB in fp32, but "),
        ("phase3_fsdp", "--vocab_size=2147483647", "a vocabulary of 2,147,483,647"),
    ],
)
def test_a_model_that_cannot_fit_is_refused_at_once(trainer, flag, message, tmp_path):
    """A model that is too wide or has a too large vocabulary is refused before a directory is created."""
    outcome = run_program(f"{trainer}/train.py", "--device=cpu", f"--out_dir={tmp_path / 'run'}", flag)
    assert_refused(outcome, message)
    assert not (tmp_path / "run").exists()


def fill_memory(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the width at which the parameters need 60% of this machine's memory."""
    total = next(size for owner, size, _ in host_limits() if owner == "this machine has")
    width = round((0.6 * total / 4 / 12 / config.n_layer) ** 0.5 / 4) * 4
    return dataclasses.replace(config, n_embd=width)


def test_the_parameters_of_all_ranks_of_a_node_must_fit():
    """Two ranks with full replicas on one node need twice the memory of one. Two ranks of FSDP, or on two nodes, do
    not."""
    config = fill_memory(TrainConfig())
    check_parameters_fit(config, 75, 1, 1)
    check_parameters_fit(config, 75, 2, 1)
    check_parameters_fit(fill_memory(FsdpConfig()), 75, 2, 2)
    for config in (TrainConfig(), FsdpConfig(fsdp_shard_size="1")):
        with pytest.raises(ConfigError, match="in fp32 on 2 ranks"):
            check_parameters_fit(fill_memory(config), 75, 2, 2)


def test_the_model_state_must_fit_into_a_gpu():
    """A model with 1.56B parameters (25 GB of state) is refused on two GPUs of 12.6 GB, except if FSDP shards or
    offloads its state. The message has the number of GPUs that FSDP needs."""
    xl = {"n_layer": 48, "n_head": 25, "n_embd": 1600, "block_size": 1024, "bias": False}
    params = GPTConfig(48, 25, 1600, 1024, False, 50304).count_params()
    refused = {16: TrainConfig(**xl), 12: Zero1Config(**xl), 10: Zero1Config(**xl, zero_stage=2)}  # bytes per parameter
    for per_param, config in refused.items():
        with pytest.raises(ConfigError, match="on each of 2 rank.*at least 2 GPUs, or .* --fsdp_cpu_offload=True"):
            check_state_fits(config, 50304, 2, 2, 12_600_000_000)
        check_state_fits(config, 50304, 2, 2, per_param * params)
    for config in (FsdpConfig(**xl), FsdpConfig(**xl, fsdp_shard_size="1", fsdp_cpu_offload=True)):
        check_state_fits(config, 50304, 2, 2, 12_600_000_000)
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
    assert list(control_group_limits(tmp_path)) == [2000]
    assert list(control_group_limits(tmp_path / "none")) == []


# ---- errors during a run


def catch_error(call: Callable[[], Any]) -> BaseException:
    """Return the exception that a call raises."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("the call raised no exception")


@pytest.mark.parametrize(
    "error",
    [
        catch_error(lambda: torch.empty(10**15)),
        catch_error(lambda: bytearray(10**15)),
        catch_error(lambda: np.empty(10**12)),
        torch.OutOfMemoryError(GPU_MESSAGE),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=["torch", "Python", "numpy", "GPU", "Triton", "cuBLAS", "NCCL", "system"],
)
def test_out_of_memory_errors_are_recognized(error):
    """The errors of torch, Python, numpy, CUDA libraries and the system are recognized, also as the cause of another
    error. Any other error is not."""
    outer = RuntimeError("a compiled function failed")
    assert is_out_of_memory(error) and not is_out_of_memory(outer)
    outer.__cause__ = error
    assert is_out_of_memory(outer)


MEMORY_LIMITED_TRAINING = """
import ctypes, importlib, re, resource, sys
from pathlib import Path
from nanoGPT.job import start
from nanoGPT.model import GPT
from nanoGPT.optim import LossScaler

phase, owner, name, number = sys.argv[1:5]
del sys.argv[1:5]
trainer = importlib.import_module(f"{phase}.train")
owner = {"trainer": trainer, "scaler": LossScaler, "model": GPT}[owner]
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
start.main(trainer.train, trainer.Config, trainer.__file__)
"""
SHAPE = GPTConfig(1, 2, 224, 32, False, 10000)  # its embedding, and the logits of a micro-batch, are larger than 8 MiB
PARAMETERS = f"{format_bytes(4 * SHAPE.count_params())} of parameters"
GRADIENTS = f"{format_bytes(4 * SHAPE.count_params())} of gradients"
STATE = f"{format_bytes(8 * SHAPE.count_params())} of optimizer state"


@pytest.mark.parametrize(
    ("phase", "owner", "name", "number", "phrases"),
    [
        ("nanoGPT", "model", "__init__", 3, ["--batch_size=4"]),  # after two on the meta device
        ("nanoGPT", "trainer", "reseed", 4, [PARAMETERS, GRADIENTS, STATE, "--batch_size=4"]),
        ("phase1_zero1", "scaler", "step", 1, [PARAMETERS, GRADIENTS]),
        (
            "phase3_fsdp",
            "scaler",
            "scale_loss",
            4,
            [PARAMETERS, STATE, "--batch_size=4", "--fsdp_activation_checkpointing=full"],
        ),
    ],
    ids=["model", "forward", "update", "backward"],
)
def test_out_of_memory_in_training_is_one_error(phase, owner, name, number, phrases, tmp_path):
    """Under a small `ulimit -v`, a run exits with code 1 and one error with the message of torch, the limit, the memory
    by category, and flags to try."""
    program = tmp_path / "program.py"
    program.write_text(MEMORY_LIMITED_TRAINING)
    flags = ["--device=cpu", "--batch_size=8", "--eval_iters=1", "--gradient_accumulation_steps=2"]
    flags += [f"--{key}={getattr(SHAPE, key)}" for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")]
    outcome = run_program(str(program), phase, owner, name, str(number), f"--out_dir={tmp_path / 'run'}", *flags)
    assert outcome.code == 1 and "Traceback" not in outcome.output, outcome
    (sentence,) = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: out of memory \(.*allocate.*\): ulimit -v allows this process .+B", sentence), sentence
    assert all(phrase in sentence for phrase in phrases), sentence


GPU = torch.device("cuda", 0)
LARGE = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "batch_size": 8}
BATCH, BLOCK, LOSS = "--batch_size=4", "--block_size=512", "--kernels=loss"
OFFLOAD = "--fsdp_cpu_offload=True"
SYNC = "--fsdp_sync_every_micro_batch=True"


@pytest.mark.parametrize(
    ("config", "ranks", "dtype", "state_first", "expected"),
    [
        (TrainConfig(**LARGE), 1, torch.float32, False, [BATCH, "--dtype=bfloat16", BLOCK]),
        (Zero1Config(**LARGE), 4, torch.bfloat16, True, ["--zero_stage=2", BATCH, LOSS, BLOCK]),
        (
            FsdpConfig(fsdp_shard_size="2", **LARGE),
            4,
            torch.bfloat16,
            True,
            ["--fsdp_shard_size=all", SYNC, OFFLOAD, BATCH],
        ),
    ],
)
def test_the_flags_to_try_depend_on_the_trainer_and_on_the_larger_part(config, ranks, dtype, state_first, expected):
    """If the model state is the larger part, flags of sharding come first, else flags for activations. A flag that has
    its value already, or that the trainer does not have, is not named."""
    assert list_flags(config, Runtime(0, 0, ranks, ranks, GPU, dtype), state_first) == expected


def test_a_report_that_fails_still_returns_one_sentence(tmp_path):
    """If the memory cannot be measured, the sentence still has the cause and the flags."""
    report = MemoryReport(tiny("nanoGPT", tmp_path), Runtime(0, 0, 1, 1, torch.device("cpu"), torch.float32))
    report.model = object()  # type: ignore[assignment]
    sentence = report.explain(torch.OutOfMemoryError(GPU_MESSAGE))
    assert sentence and sentence.startswith(f"out of memory ({GPU_MESSAGE})") and "--batch_size=" in sentence
    assert report.explain(KeyError("memory")) is None
