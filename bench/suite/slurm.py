"""Write a suite's runs as Slurm jobs: one sbatch script per run, on one or more nodes, and a script to submit them."""

import shlex
from pathlib import Path

from bench.suite.execution import FINISHED_STATES, ROOT, Run
from nanoGPT.errors import ConfigError

CPUS_PER_RANK = 8
SCRIPT = """#!/bin/bash
# {name}: written by bench/suite/slurm.py. `bash submit-all.sh` submits it.
#SBATCH --job-name={job}
#SBATCH --dependency=singleton
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={cpus}
#SBATCH --mem=0
#SBATCH --time={minutes}
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="{log}"

set -euo pipefail
cd {root}
exec "${{PY:-.venv/bin/python}}" -m bench.suite.execution {directory} slurm
"""
SUBMIT = """#!/bin/bash
# Submit every run of this suite that is not finished. Arguments are passed to sbatch, such as --partition=gpu.
# When all runs are finished, write the report with: {report}
set -euo pipefail
shopt -s nullglob
cd {root}
for script in {scripts}/*.sbatch; do
    directory={directory}/$(basename "$script" .sbatch)
    if grep -qsE '"state": "({finished})"' "$directory/status.json"; then
        echo "already finished: $directory"
    else
        sbatch "$@" "$script"
    fi
done
"""


def check_nodes(runs: list[Run], gpus_per_node: int) -> None:
    """Check that runs with more ranks than a node has GPUs use full nodes.

    Raises:
        ConfigError: they do not, or gpus_per_node is below 1.
    """
    if gpus_per_node < 1:
        raise ConfigError(f"--gpus_per_node={gpus_per_node} is out of range: use 1 or more")
    for run in runs:
        if run.ranks > gpus_per_node and run.ranks % gpus_per_node:
            raise ConfigError(f"{run.ranks} ranks do not fill nodes of {gpus_per_node} GPUs: change ranks in the suite")


def create_scripts(runs: list[Run], directory: Path, gpus_per_node: int, retry: bool, report: str) -> str:
    """Write the sbatch scripts and submit-all.sh into the suite's directory.

    Args:
        retry: also submit runs that ended as oom, timeout or failed.
        report: command that writes the report when all runs are finished.

    Returns:
        A message with the number of scripts, and the next commands.
    """
    scripts = directory.resolve() / "slurm"
    scripts.mkdir(parents=True, exist_ok=True)
    for old in scripts.glob("*.sbatch"):
        old.unlink()
    for run in runs:
        run.save()
        (scripts / f"{run.directory.name}.sbatch").write_text(format_script(run, gpus_per_node))
    submit = scripts / "submit-all.sh"
    fields = {"root": shlex.quote(str(ROOT)), "scripts": shlex.quote(str(scripts))}
    fields |= {"directory": shlex.quote(str(directory.resolve())), "report": report}
    fields["finished"] = "|".join(sorted(FINISHED_STATES[retry]))
    submit.write_text(SUBMIT.format(**fields))
    command = f"bash {shlex.quote(str(submit))}"
    message = f"wrote {len(runs)} script(s); submit them with: {command}"
    return f"{message}\nwhen all runs are finished, write the report with: {report}"


def format_script(run: Run, gpus_per_node: int) -> str:
    """Return the sbatch script of a run.

    Slurm's time limit is 3 minutes more than the run's, to start and to save. Slurm sends SIGTERM 2 minutes before it.
    Two jobs of the same run execute one after the other.
    """
    directory = run.directory.resolve()
    return SCRIPT.format(
        name=run.name,
        job=f"{directory.parent.name}-{directory.name}",
        nodes=-(-run.ranks // gpus_per_node),
        gpus=min(run.ranks, gpus_per_node),
        cpus=CPUS_PER_RANK * min(run.ranks, gpus_per_node),
        minutes=round(run.minutes) + 3,
        log=str(directory / "slurm.txt").replace("%", "%%"),
        root=shlex.quote(str(ROOT)),
        directory=shlex.quote(str(directory)),
    )
