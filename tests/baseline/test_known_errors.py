"""Errors of torch and the system that the user can fix become one line with advice; others keep their traceback."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._inductor.exc import GPUTooOldForTriton, TritonMissing
from triton.runtime.errors import OutOfResources

from nanoGPT.job.known_errors import KNOWN_ERRORS, explain_known_error
from tests.helpers.programs import run_program
from tests.helpers.training import ROOT

FAILING_PROGRAM = """
import os, resource, subprocess, sys, threading, time
from pathlib import Path
import torch
from nanoGPT.job.start import main
from nanoGPT.memory import costs
from nanoGPT.train_config import TrainConfig

def open_no_more_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))

def train(config):
    {body}

main(train, TrainConfig, {trainer!r}, costs)
"""
START_THREADS = """size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**20, resource.RLIM_INFINITY))
    [threading.Thread(target=time.sleep, args=(1,)).start() for _ in range(50)]"""
COMPILE_FUNCTION = """import torch._inductor.config
    torch._inductor.config.cpp.cxx = (None, "/bin/false")
    torch.compile(lambda x: (x.sin() + 1).cos())(torch.ones(1000))"""
TRITON_BUILD = """from triton.runtime.build import compile_module_from_src
    os.environ.update({variables})
    compile_module_from_src("int x;", "nothing")"""


@pytest.mark.parametrize(
    ("body", "advice"),
    [
        ("open_no_more_files(); open('/dev/null')", "ulimit -n"),
        ("open_no_more_files(); torch.zeros(3).share_memory_()", "ulimit -n"),
        (START_THREADS, "ulimit -u"),
        (COMPILE_FUNCTION, "use --compile=False"),
        (TRITON_BUILD.format(variables="CC='/bin/false'"), "use --compile=False"),
        (TRITON_BUILD.format(variables="PATH=''"), "use --compile=False"),
    ],
    ids=["files", "shared memory", "threads", "C++ compiler", "C compiler that fails", "no C compiler"],
)
def test_a_real_system_error_is_reported_in_one_line(body, advice, tmp_path):
    """After an error of the operating system or a compiler, a program exits with code 1 and prints one line that says
    what to do."""
    program = tmp_path / "program.py"
    program.write_text(FAILING_PROGRAM.format(body=body, trainer=str(ROOT / "nanoGPT" / "train.py")))
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    outcome = run_program(str(program), **caches)
    assert outcome.code == 1 and "Traceback" not in outcome.output, outcome
    (error_line,) = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert advice in error_line, error_line


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
NCCL_SYSTEM = (
    NCCL + "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
)
SHM_FULL = (
    "Error while creating shared memory segment /dev/shm/nccl-Xy12 (size 9637888), error: No space left on device (28)"
)
MEMLOCK_LIMIT = "Call to ibv_reg_mr failed with error Cannot allocate memory"
NCCL_INVALID = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
WRONG_ARCHITECTURE = "CUDA error: no kernel image is available for execution on the device"
TORCH_SHM_FULL = "unable to allocate shared memory(shm) for file </torch_7_9_0>: No space left on device (28)"
FILE_LIMIT = "unable to open shared memory object </torch_7_9_0> in read-write mode: Too many open files (24)"
NO_HEADER = "C++ compile error\n\nOutput:\nx.cpp:2:10: fatal error: Python.h: No such file or directory"
SAME_GPU = NCCL_INVALID + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
CUDA_NOTE = "\nCUDA kernel errors might be asynchronously reported at some other API call\n"
ERRORS = [
    (RuntimeError("CUDA driver version is insufficient for CUDA runtime version"), "update the driver"),
    (RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."), "update the driver"),
    (torch.AcceleratorError(WRONG_ARCHITECTURE + CUDA_NOTE), "get_arch_list"),
    (torch.AcceleratorError("CUDA error: device-side assert triggered" + CUDA_NOTE), "CUDA_LAUNCH_BLOCKING=1"),
    (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable" + CUDA_NOTE), "CUDA_VISIBLE_DEVICES"),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered" + CUDA_NOTE), "reset the defective one"),
    (RuntimeError(TORCH_SHM_FULL), "--shm-size"),
    (dist.DistBackendError(NCCL_SYSTEM + "Last error:\n" + SHM_FULL), "--shm-size"),
    (dist.DistBackendError(NCCL_SYSTEM + "Last error:\n" + MEMLOCK_LIMIT), "ulimit -l unlimited"),
    (dist.DistBackendError(NCCL_SYSTEM + "Last error:\nCall to connect failed"), "NCCL_DEBUG=INFO"),
    (dist.DistBackendError(SAME_GPU), "LOCAL_RANK"),
    (RuntimeError(FILE_LIMIT), "ulimit -n"),
    (dist.DistStoreError("Failed to init uv loop"), "ulimit -n"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (RuntimeError(NO_HEADER), "python3-dev"),
    (TritonMissing(None), "pip install triton"),
    (GPUTooOldForTriton(SimpleNamespace(name="Tesla P40", major=6, minor=1), None), "use --compile=False"),
    (OutOfResources(147456, 101376, "shared memory"), "--kernels=none"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "advice"), ERRORS, ids=[str(error)[:40] for error, _ in ERRORS])
def test_each_known_error_is_explained_with_advice(error, advice):
    """The explanation has the problem, the original message and what to do. The same holds if the error is the cause of
    another one."""
    sentence = explain_known_error(error)
    assert sentence and advice in sentence.rpartition("): ")[2] and "\n" not in sentence
    outer = RuntimeError("a compiled function failed")
    outer.__cause__ = error
    assert explain_known_error(outer) == sentence


def test_every_row_of_the_table_is_tested():
    """Each row of the table is the first match of at least one error in ERRORS."""
    patterns = [row[0] for row in KNOWN_ERRORS]
    first_matches = {next(pattern for pattern in patterns if re.search(pattern, str(error))) for error, _ in ERRORS}
    assert first_matches == set(patterns)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
        "C++ compile error\n\nOutput:\nerror: expected ';' before '}' token",
        "Command '['git', 'rev-parse']' returned non-zero exit status 1.",
        "[Errno 28] No space left on device: 'out/metrics.jsonl'",
    ],
)
def test_any_other_error_keeps_its_traceback(text):
    """Bugs of the program, and errors that other modules explain, are not in the table."""
    assert explain_known_error(RuntimeError(text)) is None


def test_a_long_message_is_shortened():
    """The explanation contains only the beginning of a compiler command of several lines."""
    command = "Command '['/usr/bin/gcc', '/tmp/main.c', '-O3', '-shared'" + ", '-I/usr/include'" * 100
    sentence = explain_known_error(RuntimeError(command + "]' returned non-zero exit status 1."))
    assert sentence and "...)" in sentence and len(sentence) < 600
