"""Errors of torch and of the system about which the user can do something: each becomes one sentence.

Every other error is an error of the program, and keeps its traceback. Memory that ran out is `out_of_memory.py`'s.
"""

import re

from nanoGPT.errors import error_messages

LONGEST = 300  # characters of an error's own words

# What the message holds (a regular expression), what is wrong, and what to do; the first row that matches counts.
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
        "end the process that `nvidia-smi` lists, or choose other GPUs with CUDA_VISIBLE_DEVICES",
    ),
    (
        r"uncorrectable ECC error",
        "the GPU's memory is defective",
        "choose other GPUs with CUDA_VISIBLE_DEVICES, and reset this one",
    ),
    (
        r"(?s)shared memory.*No space left on device|/dev/shm.*No space left on device",
        "/dev/shm is full",
        "delete what is left over there, or make it larger (`docker run --shm-size=8g`)",
    ),
    (
        r"Too many open files|Failed to init uv loop",
        "this process may not open more files",
        "raise the limit with `ulimit -n 65536`",
    ),
    (
        r"can't start new thread",
        "this process may not start more threads",
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
        "start at most one rank per GPU, each with a LOCAL_RANK of its own",
    ),
    (
        r"unhandled system error|ncclSystemError",
        "NCCL cannot use the network or the shared memory between the ranks",
        "set NCCL_DEBUG=INFO to see which call fails; NCCL_SOCKET_IFNAME names the network interface to use",
    ),
    (
        r"InvalidCxxCompiler|Failed to find C(\+\+)? compiler|fatal error: \S+: No such file"
        r"|Command '\[.*\.c'.*'-shared'.* non-zero exit status",
        "torch.compile and Triton need a C++ compiler that works",
        "install one (`apt-get install g++ python3-dev`), name it in CC and CXX, or use --compile=False",
    ),
    (
        r"Cannot find a working triton installation",
        "torch.compile needs Triton on a GPU",
        "run `.venv/bin/pip install triton`, or use --compile=False",
    ),
    (
        r"too old to be supported by the triton GPU compiler",
        "torch.compile does not support this GPU",
        "use --compile=False",
    ),
    (
        r"out of resource: shared memory",
        "a Triton kernel needs more shared memory than a multiprocessor of this GPU has",
        "leave that kernel out of --kernels, or use --kernels=none",
    ),
)


def explain_known_error(error: BaseException) -> str | None:
    """Return a sentence that says what is wrong and what to do; None for an error that is not in the table."""
    text = error_messages(error)
    for pattern, wrong, remedy in KNOWN_ERRORS:
        if found := re.search(pattern, text):
            begin, end = text.rfind("\n", 0, found.end()) + 1, text.find("\n", found.end())
            said = text[begin : end if end >= 0 else None].strip()
            return f"{wrong} ({said if len(said) <= LONGEST else said[:LONGEST] + '...'}): {remedy}"
    return None
