"""Keep the results of traces in out/traces, so that a plan for another type of GPU or batch size need not trace again.

A trace depends on the code, on the versions of Python and of the packages that compute, and on its arguments. The name
of its file is a hash of all of these. Results of other code are deleted.
"""

import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from bench.phases import ROOT
from nanoGPT.distributed.environment import collect_versions
from nanoGPT.files import write_atomically
from operate.run_description import compute_digest, digest_code

FOLDER = ROOT / "out" / "traces"


@cache
def digest_code_and_versions() -> str:
    """Return a hash of everything that a trace depends on, except its arguments."""
    return compute_digest(f"{collect_versions()} {digest_code(ROOT / 'bench', ROOT / 'measure')}".encode())


def trace_path(arguments: tuple[Any, ...]) -> Path:
    """Return the file for the result of a trace with these arguments, which must have a complete `repr`."""
    return FOLDER / digest_code_and_versions() / f"{compute_digest(repr(arguments).encode())}.pickle"


def read_trace(file: Path) -> Any:
    """Return a result; None if there is none. Only this program writes these files, so unpickling them is safe."""
    with suppress(Exception):  # a file that is absent or damaged can raise many kinds
        return pickle.loads(file.read_bytes())
    return None


def write_trace(file: Path, get_result: Callable[[], Any]) -> None:
    """Write the result of a trace that did not fail, and delete the results of other code."""
    with suppress(Exception):  # the planner reports a failed trace; without space, the next plan traces again
        content = pickle.dumps(get_result())
        if not file.parent.is_dir():
            shutil.rmtree(FOLDER, ignore_errors=True)
            file.parent.mkdir(parents=True)
        write_atomically(file, content)
