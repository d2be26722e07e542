"""Explain errors of torch and of the operating system that the user can fix, in one sentence each.

`make autopsy` uses the same table. `operate/out_of_memory.py` explains errors that mean that memory ran out.
Every other error is an error of the program and is printed with its traceback.
"""

import re

from nanoGPT.errors import list_causes, quote_cause

# A regular expression for the error's message, what is wrong, and what to do. The first row that matches is used.
KNOWN_ERRORS: tuple[tuple[str, str, str], ...] = (
    (
        r"driver version is insufficient|driver on your system is too old",
        "the NVIDIA driver is older than the CUDA that torch was built for",
        "update the driver, or install a torch for the CUDA version that `nvidia-smi` shows",
    ),
    (
        r"no kernel image is available",
        "this torch was not built for this GPU",
        "install one whose `torch.cuda.get_arch_list()` has the GPU's compute capability, or use --device=cpu",
    ),
    (
        r"device-side assert",
        "a check inside a GPU kernel failed, in most cases an index that is out of range",
        "set CUDA_LAUNCH_BLOCKING=1, or use --device=cpu, to see which operation fails",
    ),
    (
        r"devices are busy or unavailable|device\(s\) is/are busy or unavailable",
        "another process uses this GPU exclusively",
        "stop the process that `nvidia-smi` lists, or choose other GPUs with CUDA_VISIBLE_DEVICES",
    ),
    (
        r"(?s)shared memory.*No space left on device|/dev/shm.*No space left on device",
        "/dev/shm is full",
        "delete the files that old processes left there, or make it larger (`docker run --shm-size=8g`)",
    ),
    (
        r"No space left on device|disk is full",
        "the disk is full",
        "free some space, and resume",
    ),
    (
        r"Too many open files|Failed to init uv loop",
        "this process has reached its limit of open files",
        "raise the limit with `ulimit -n 65536`",
    ),
    (
        r"can't start new thread",
        "this process has reached its limit of threads",
        "raise the limit with `ulimit -u`; each thread also needs address space (`ulimit -v`)",
    ),
    (
        r"(?s)ibv_\w+.*Cannot allocate memory",
        "InfiniBand cannot lock enough memory",
        "raise the limit with `ulimit -l unlimited`",
    ),
    (
        r"Duplicate GPU detected",
        "two ranks use the same GPU",
        "start at most one rank per GPU, each with a different LOCAL_RANK",
    ),
    (
        r"unhandled system error|ncclSystemError",
        "NCCL cannot use the network or the shared memory between the ranks",
        "set NCCL_DEBUG=INFO to see which call fails, and NCCL_SOCKET_IFNAME to choose the network interface",
    ),
    (
        r"Unable to find address for",
        "GLOO_SOCKET_IFNAME names a network interface that this machine does not have",
        "unset it, or use a name that `ip link` lists",
    ),
    (
        r"InvalidCxxCompiler|Failed to find C(\+\+)? compiler|fatal error: \S+: No such file"
        r"|Command '\[.*\.c'.*'-shared'.* non-zero exit status",
        "torch.compile and Triton need a working C++ compiler",
        "install one (`apt-get install g++ python3-dev`), set CC and CXX to its path, or use --compile=False",
    ),
    (
        r"Expected to have finished reduction in the prior iteration",
        "DDP has waited for the gradient of a parameter that a rank has not used",
        "let every rank use all parameters in each step (docs/models.md), or use phase 1, which skips unused ones",
    ),
    (
        r"(Permission denied|Read-only file system): '[^']*\.triton",
        "Triton cannot write its compiled kernels",
        "set TRITON_CACHE_DIR to a directory that you can write to",
    ),
    (
        r"out of resource: shared memory",
        "a Triton kernel needs more shared memory than a multiprocessor of this GPU has",
        "remove that kernel from --kernels, or use --kernels=none",
    ),
)


def error_messages(error: BaseException) -> str:
    """Return the messages of an error and of its causes, one per line."""
    return "\n".join(map(str, list_causes(error)))


def explain_known_error(error: BaseException) -> str | None:
    """Return what is wrong and what to do, in one sentence; None for an error that is not in the table."""
    text = error_messages(error)
    rows = (row for row in KNOWN_ERRORS if re.search(row[0], text))
    return next((f"{problem} ({quote_cause(error)}): {remedy}" for _, problem, remedy in rows), None)
