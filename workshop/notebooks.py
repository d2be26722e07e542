"""Run the notebook scripts and write an .ipynb next to each script: `workshop.notebooks`.

    python -m workshop.notebooks                     # every notebooks/*.py
    python -m workshop.notebooks 01_one_process      # only this notebook

Edit the script, which is in jupytext's percent format, not the .ipynb. The cell ids of the .ipynb depend only on the
text of the cells, and it contains no times or versions. A second run therefore changes only the outputs of the cells.

The command fails if a notebook needs more than 3 minutes, or one of its processes (a kernel or a rank) more than 1 GiB.
So all of them work on a laptop.
"""

import hashlib
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat import NotebookNode

from nanoGPT.errors import did_you_mean
from nanoGPT.files import write_atomically

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SECONDS_PER_CELL = 600
MAX_SECONDS, MAX_BYTES = 180.0, 2**30  # of a notebook
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def list_scripts() -> list[Path]:
    """Return the scripts of all notebooks, sorted by name."""
    return sorted(FOLDER.glob("*.py"))


def read_script(script: Path) -> NotebookNode:
    """Return the notebook of a script, without outputs."""
    cells = jupytext.reads(script.read_text(), fmt="py:percent").cells
    for cell in cells:
        cell.metadata = NotebookNode()
    return make_notebook(cells)


def make_notebook(cells: list[NotebookNode]) -> NotebookNode:
    """Return a notebook with these cells.

    The id of a cell is a hash of its text, so a new cell does not change the ids of the cells below it.
    """
    counts: Counter[str] = Counter()
    for cell in cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        counts[digest] += 1
        cell.id = digest if counts[digest] == 1 else f"{digest}-{counts[digest]}"
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=METADATA)
    notebook.nbformat_minor = 5  # the first version in which cells have ids
    return notebook


def execute(notebook: NotebookNode) -> NotebookNode:
    """Run the cells of a notebook in a new kernel of this interpreter, and store their outputs in the notebook.

    Raises:
        CellControlSignal: a cell failed or took too long; the message contains the cell and the traceback.
        DeadKernelError: the kernel process stopped.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        client = NotebookClient(
            notebook,
            km=make_kernel_manager(home),
            timeout=SECONDS_PER_CELL,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(FOLDER)}},
        )
        client.execute(cleanup_kc=True, env={**os.environ, **make_kernel_environment(home)})
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def make_kernel_manager(home: str) -> AsyncKernelManager:
    """Return a manager that starts ipykernel with this interpreter, even if the user has another kernel named python3.

    The kernel uses sockets in `home` instead of TCP ports. A port could be in use, and other users of the machine could
    connect to it.
    """
    return AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        connection_file=f"{home}/kernel.json",
        transport="ipc",
    )


def make_kernel_environment(home: str) -> dict[str, str]:
    """Return environment variables that make a notebook run the same way for every user.

    The kernel ignores the user's IPython profile and matplotlib style, and figures go into the notebook. It computes
    with one thread, so that numbers do not depend on the number of cores, and ranks do not compete for cores. Temporary
    files of the cells go into `home`, which the caller deletes: a kernel that started ranks is killed before it can
    delete them.
    """
    return {
        "TMPDIR": home,
        "IPYTHONDIR": home,
        "MPLCONFIGDIR": home,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "OMP_NUM_THREADS": "1",
    }


def write_notebook(notebook: NotebookNode, ipynb: Path) -> None:
    """Write an .ipynb atomically."""
    write_atomically(ipynb, (nbformat.writes(notebook) + "\n").encode())


def run_script(script: Path) -> bool:
    """Execute one script and write its .ipynb. Return whether it ran, within its limits.

    If a cell fails, print its error, and leave the old .ipynb unchanged.
    """
    begin = time.monotonic()
    try:
        notebook = execute(read_script(script))
    except (CellControlSignal, DeadKernelError) as error:
        print(f"{script.name}: {error}\nerror: a cell of {script.name} failed", file=sys.stderr, flush=True)
        return False
    write_notebook(notebook, script.with_suffix(".ipynb"))
    seconds, kib = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of all until now
    print(f"{script.stem:32} {seconds:4.0f} s {kib / 2**10:6.0f} MiB", flush=True)
    return seconds <= MAX_SECONDS and 1024 * kib <= MAX_BYTES


def main(names: list[str]) -> int:
    """Run the scripts with these names, or all scripts, and return the exit code."""
    known = {script.stem: script for script in list_scripts()}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, list(known))
            print(f"error: there is no notebook {name}{hint} (known: {', '.join(known)})", file=sys.stderr)
            return 2
    is_right = [run_script(known[name]) for name in names or known]  # also after one fails
    if not all(is_right):
        limits = f"{MAX_SECONDS:g} s and {MAX_BYTES >> 20} MiB per process"
        print(f"error: a notebook failed, or needs more than {limits}: see above", file=sys.stderr)
    return int(not all(is_right))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
