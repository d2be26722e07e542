"""Check that all calls of a campaign use the same GPU, versions and measured code, so that no result mixes two of them.

The code of the campaign itself may change between two calls: a fix there must not discard the results so far.
"""

import hashlib
import importlib.metadata
import subprocess
import sys
from typing import Any

from nanoGPT.errors import ConfigError
from nanoGPT.files import PACKAGE

MEASURED_CODE = (
    "nanoGPT/**/*.py",
    "phase*_*/**/*.py",
    "phase2_triton/kernels/*.json",
    "bench/kernels/*.py",
    "bench/plan/*.py",
    "bench/trainer/*.py",
    "bench/matrix/cells.py",
    "workshop/ranks.py",
)


def describe_campaign(dry_run: bool) -> dict[str, Any]:
    """Return the GPU, the versions of torch and Triton, and a hash of the measured code.

    Raises:
        ConfigError: there is no GPU, and this is no dry run.
    """
    gpu = None if dry_run else read_gpu_name()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    return {"dry_run": dry_run, "gpu": gpu, **versions, "sources": hash_sources()}


def read_gpu_name() -> str:
    """Return the name of the GPU. A separate process reads it, so that no CUDA context stays in GPU memory.

    Raises:
        ConfigError: torch finds no GPU.
    """
    program = "import torch; print(torch.cuda.get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError("torch finds no GPU: use --dry_run to run every part on the CPU with tiny shapes")
    return done.stdout.strip()


def hash_sources() -> str:
    """Return a hash of the trainers, the kernels and their benchmarks. It does not include the campaign itself."""
    root, digest = PACKAGE.parent, hashlib.sha256()
    for path in sorted({path for pattern in MEASURED_CODE for path in root.glob(pattern)}):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
