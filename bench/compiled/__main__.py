"""Check, without a GPU, the code that torch.compile generates for one: `make check-ptx`.

    python -m bench.compiled                # for A100 and H100
    python -m bench.compiled sm_90          # only for H100
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from bench.compiled.fake_cuda import GPUS
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError

DEFAULT_ARCHITECTURES = ("sm_80", "sm_90")


def run_check(architecture: str) -> subprocess.CompletedProcess[str]:
    """Check one architecture in a process of its own: torch can be told only once which GPU there is."""
    command = [sys.executable, "-m", "bench.compiled.check", architecture]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(words: list[str]) -> int:
    """Check the architectures in `words`, and return the exit code: 0 if there are no problems, else 1."""
    for word in words:
        if word not in GPUS:
            raise ConfigError(f"{word} is unknown: use some of {', '.join(GPUS)}")
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run_check, words or DEFAULT_ARCHITECTURES))
    print(*(result.stdout for result in results), sep="", end="")
    if any(result.returncode for result in results):
        print("problems found: see above")
        return 1
    print("every kernel compiles, without fp64, spilled registers or serialized wgmma instructions")
    return 0


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
