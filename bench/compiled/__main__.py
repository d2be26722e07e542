"""Check, without a GPU, the code that torch.compile generates for one: `make check-ptx`.

    python -m bench.compiled                            # for A100 and H100, with the installed torch and Triton
    python -m bench.compiled --architectures=sm_90      # only for H100
    python -m bench.compiled --torch=2.11               # with torch 2.11 and its Triton, in a separate environment

`check.py` does the work, in one process for each architecture.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.compiled.check import PROBLEMS_FOUND
from bench.compiled.fake_cuda import GPUS
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from workshop.imports import ROOT


@dataclass
class Options:
    """Compile the code that torch.compile generates for a GPU, without a GPU."""

    architectures: str = "sm_80,sm_90"
    """GPU architectures: some of sm_80 (A100), sm_90 (H100), sm_100 (B200)"""
    torch: str = "installed"
    """version of torch, such as 2.11; it is installed into .venv/torch-VERSION, with CUDA (5 GB)"""


def find_python(version: str) -> Path:
    """Return the Python of an environment with this version of torch. Create the environment if it does not exist.

    Raises:
        ConfigError: this is no version, or it could not be installed.
    """
    if version == "installed":
        return Path(sys.executable)
    if not re.fullmatch(r"\d+(\.\d+)*", version):
        raise ConfigError(f"--torch={version} is not a version: use a number such as 2.11")
    folder = ROOT / ".venv" / f"torch-{version}"
    python, stamp = folder / "bin" / "python", folder / ".complete"
    if not stamp.exists():
        print(f"Installing torch {version} and its Triton into .venv/{folder.name}, once: about 5 GB.", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)]).returncode:
            raise ConfigError(f"--torch={version}: Python could not create {folder}: see its message above")
        packages = [f"torch=={version}.*", "numpy", "tyro"]
        if subprocess.run([str(python), "-m", "pip", "install", "-qq", *packages]).returncode:
            raise ConfigError(f"--torch={version} could not be installed: see pip's message above")
        stamp.touch()
    return python


def run_check(python: Path, architecture: str) -> subprocess.CompletedProcess[str]:
    """Check one architecture in a separate process, because torch looks for GPUs only once."""
    command = [str(python), "-m", "bench.compiled.check", architecture]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def main(options: Options) -> int:
    """Check all architectures, print the results, and return the exit code: 0 if there are no problems, else 1.

    Raises:
        ConfigError: an architecture is unknown, or a check could not start.
    """
    architectures = options.architectures.split(",")
    for name in architectures:
        if name not in GPUS:
            raise ConfigError(f"--architectures={options.architectures}: {name} is unknown: use {', '.join(GPUS)}")
    python = find_python(options.torch)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda name: run_check(python, name), architectures))
    for result in results:
        print(result.stdout, end="")
        if result.returncode not in (0, PROBLEMS_FOUND):
            raise ConfigError(f"the check could not run: {(result.stderr.splitlines() or ['no message'])[-1]}")
    if any(result.returncode for result in results):
        print("problems found: see above")
        return 1
    print("every kernel compiles, without fp64, spilled registers or serialized wgmma instructions")
    return 0


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(command_line(Options, sys.argv[1:])))
