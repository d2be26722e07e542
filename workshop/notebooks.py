"""Run the notebook scripts and write an .ipynb next to each script: `make notebooks`.

    python -m workshop.notebooks                     # every notebooks/*.py
    python -m workshop.notebooks 01_one_process      # only this notebook

Edit the script, which is in jupytext's percent format, not the .ipynb. The cell ids of the .ipynb depend only on the
text of the cells, and it contains no times or versions. A second run therefore changes only the outputs of the cells.

At the end, a table lists the time and the peak memory of each notebook: of its kernel and all ranks. The command fails
if a notebook needs more than 3 minutes or 1 GiB, so that all of them work on a laptop.
"""

import hashlib
import os
import sys
import tempfile
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat import NotebookNode

from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import write_atomically
from workshop.usage import Usage, measure_usage

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


def find_differences(script: Path, ipynb: Path) -> list[str]:
    """Return one line for each difference between the cells of an .ipynb and the cells of its script."""
    if not ipynb.is_file():
        return [f"{ipynb.name} is missing"]
    notebooks = read_script(script), nbformat.read(ipynb, as_version=4)
    pairs = zip_longest(*([(cell.cell_type, cell.source) for cell in each.cells] for each in notebooks))
    return [f"cell {number} differs" for number, (expected, actual) in enumerate(pairs, start=1) if expected != actual]


def write_notebook(notebook: NotebookNode, ipynb: Path) -> None:
    """Write an .ipynb atomically."""
    write_atomically(ipynb, (nbformat.writes(notebook) + "\n").encode())


def run_script(script: Path) -> Usage | None:
    """Execute one script, write its .ipynb, and return the time and the memory that it needed.

    If a cell fails, print its error, leave the old .ipynb unchanged and return None.
    """
    try:
        with measure_usage() as usage:
            notebook = execute(read_script(script))
    except (CellControlSignal, DeadKernelError) as error:
        print(f"{script.name}: {error}\nerror: a cell of {script.name} failed", file=sys.stderr, flush=True)
        return None
    write_notebook(notebook, script.with_suffix(".ipynb"))
    print(f"{script.stem:32} {usage.seconds:4.0f} s {usage.peak_bytes / 2**20:6.0f} MiB", flush=True)
    return usage


def find_excess(name: str, usage: Usage) -> list[str]:
    """Return one line for each limit that a notebook exceeds."""
    limits = (("s", usage.seconds, MAX_SECONDS, 1), ("MiB", usage.peak_bytes, MAX_BYTES, 2**20))
    return [
        f"{name} needs {value / unit:.0f} {label}, but the limit is {limit / unit:.0f} {label}: shorten it, or use "
        "an idle machine"
        for label, value, limit, unit in limits
        if value > limit
    ]


def select_scripts(names: list[str]) -> list[Path]:
    """Return the scripts with these names, or all scripts if `names` is empty.

    Raises:
        ConfigError: a name is unknown.
    """
    known = {script.stem: script for script in list_scripts()}
    for name in names:
        if Path(name).stem not in known:
            hint = did_you_mean(name, list(known))
            raise ConfigError(f"there is no notebook {name}{hint} (known: {', '.join(known)})")
    return [known[Path(name).stem] for name in names] or list(known.values())


def main(names: list[str]) -> int:
    try:
        usages = {script.stem: run_script(script) for script in select_scripts(names)}  # also after one fails
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    excess = [line for name, usage in usages.items() if usage for line in find_excess(name, usage)]
    for line in excess:
        print(f"error: {line}", file=sys.stderr)
    return 1 if excess or None in usages.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
