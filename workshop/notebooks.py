"""Run the notebook scripts and write the .ipynb beside each: `make notebooks`.

    python -m workshop.notebooks                     # every notebooks/*.py
    python -m workshop.notebooks 01_one_process      # this one

The script, in jupytext's percent format, is what people edit. The .ipynb is made from it: cell ids come from the
cells' text, and times and versions are left out, so that a second run changes nothing but what the cells print.
"""

import hashlib
import os
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

from nanoGPT.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SECONDS_A_CELL = 120
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def scripts() -> list[Path]:
    """Every notebook's script, in the order of their names."""
    return sorted(FOLDER.glob("*.py"))


def notebook_of(script: Path) -> NotebookNode:
    """The notebook that a script describes, without outputs."""
    notebook = jupytext.reads(script.read_text(), fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5  # the first version in which cells have ids
    for cell, name in zip(notebook.cells, cell_ids(notebook), strict=True):
        cell.id, cell.metadata = name, NotebookNode()
    return notebook


def cell_ids(notebook: NotebookNode) -> list[str]:
    """An id for each cell, from its text: an index would change for all cells below one that is put in."""
    seen: Counter[str] = Counter()
    names = []
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] += 1
        names.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return names


def execute(notebook: NotebookNode) -> NotebookNode:
    """Run a notebook's cells in a fresh kernel of this interpreter, and put their outputs into it.

    Raises:
        CellControlSignal: a cell failed or took too long; the text holds the cell, and the traceback.
        DeadKernelError: the kernel died.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        client = NotebookClient(
            notebook,
            km=own_kernel(home),
            timeout=SECONDS_A_CELL,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(FOLDER)}},
        )
        client.execute(cleanup_kc=True, env={**os.environ, **kernel_environment(home)})
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def own_kernel(home: str) -> AsyncKernelManager:
    """ipykernel under this interpreter, whatever kernel the user has installed under the name python3.

    It is spoken to through sockets in `home`: a TCP port could be taken, and others on the machine could connect to it.
    """
    return AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        connection_file=f"{home}/kernel.json",
        transport="ipc",
    )


def kernel_environment(home: str) -> dict[str, str]:
    """What must not depend on who runs a notebook.

    The user's IPython profile and matplotlib style stay out, figures go into the notebook, and one thread computes:
    the digits are then those of any other number of cores, and ranks and programs do not fight over them. What cells
    write for a while goes when `home` goes: a kernel that started ranks is ended before it has tidied up.
    """
    return {
        "TMPDIR": home,
        "IPYTHONDIR": home,
        "MPLCONFIGDIR": home,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "OMP_NUM_THREADS": "1",
    }


def differences(script: Path, ipynb: Path) -> list[str]:
    """How the cells of an .ipynb differ from its script's, one line each; empty where they are the same."""
    if not ipynb.is_file():
        return [f"{ipynb.name} is missing"]
    wanted, found = notebook_of(script).cells, nbformat.read(ipynb, as_version=4).cells
    said = []
    for number, (ours, theirs) in enumerate(zip(wanted, found, strict=False), start=1):
        if ours.cell_type != theirs.cell_type:
            said.append(f"cell {number} is {theirs.cell_type} where the script has {ours.cell_type}")
        elif ours.source != theirs.source:
            said.append(f"cell {number} ({ours.cell_type}) differs, at {first_difference(ours.source, theirs.source)}")
    if len(wanted) != len(found):
        said.append(f"{ipynb.name} has {len(found)} cells where the script has {len(wanted)}")
    return said


def first_difference(ours: str, theirs: str) -> str:
    """The first line of ours that theirs does not have in its place."""
    before, after = ours.splitlines(), theirs.splitlines()
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    return f"line {same + 1}: {before[same]!r}" if same < len(before) else "its end"


def write(notebook: NotebookNode, ipynb: Path) -> None:
    """Write an .ipynb, whole or not at all."""
    temporary = ipynb.with_name(f".tmp-{ipynb.name}")
    temporary.write_text(nbformat.writes(notebook) + "\n")
    os.replace(temporary, ipynb)


def run(script: Path) -> bool:
    """Execute one script and write its .ipynb; a cell that fails is shown and leaves the old .ipynb as it is."""
    begin = time.monotonic()
    try:
        notebook = execute(notebook_of(script))
    except (CellControlSignal, DeadKernelError) as error:
        print(f"{script.name}: {error}\nerror: a cell of {script.name} failed", file=sys.stderr, flush=True)
        return False
    write(notebook, script.with_suffix(".ipynb"))
    print(f"{script.with_suffix('.ipynb').name}: {time.monotonic() - begin:.0f} s", flush=True)
    return True


def chosen(names: list[str]) -> list[Path]:
    """The scripts of these names, or all of them.

    Raises:
        ConfigError: there is none of this name.
    """
    known = {script.stem: script for script in scripts()}
    for name in names:
        if Path(name).stem not in known:
            close = did_you_mean(name, list(known))
            raise ConfigError(f"there is no notebook {name}{close} (known: {', '.join(known)})")
    return [known[Path(name).stem] for name in names] or list(known.values())


def main(names: list[str]) -> int:
    try:
        good = [run(script) for script in chosen(names)]  # all of them, also after one that fails
        return 0 if all(good) else 1
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
