"""A suite's runs as jobs of Slurm: one sbatch script each, for one to many nodes, and one that submits them all."""

import shlex
from pathlib import Path

from bench.plan.speed import Gpu
from bench.suite.execution import DONE, ROOT, Run
from bench.suite.schedule import describe_seconds, seconds_of
from nanoGPT.errors import ConfigError

CPUS = 8  # of a rank
SCRIPT = """#!/bin/bash
# {name}: written by bench/suite/slurm.py; `bash submit-all.sh` submits it.
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
# Submit every run of this suite that has not ended yet; words after the script are sbatch's, such as --partition=gpu.
# When they have ended, this writes the report: {report}
set -euo pipefail
shopt -s nullglob
cd {root}
for script in {scripts}/*.sbatch; do
    directory={directory}/$(basename "$script" .sbatch)
    if grep -qsE '"state": "({ended})"' "$directory/status.json"; then
        echo "ended before: $directory"
    else
        sbatch "$@" "$script"
    fi
done
"""


def check_nodes(runs: list[Run], gpus_per_node: int) -> None:
    """Refuse ranks that do not fill whole nodes."""
    if gpus_per_node < 1:
        raise ConfigError(f"--gpus_per_node={gpus_per_node} cannot be: give 1 or more")
    for run in runs:
        if run.ranks > gpus_per_node and run.ranks % gpus_per_node:
            raise ConfigError(f"{run.ranks} ranks do not fill nodes of {gpus_per_node} GPUs: change ranks in the suite")


def create_scripts(
    runs: list[Run], directory: Path, gpus_per_node: int, gpu: Gpu, price: float | None, retry: bool, again: str
) -> str:
    """Write them into the suite's directory, of runs that `check_nodes` lets pass.

    Args:
        retry: submit what ended as oom, timeout or failed too.
        again: the command that writes the report when all have ended.

    Returns:
        What was written, and how long it will take.
    """
    scripts = directory.resolve() / "slurm"
    scripts.mkdir(parents=True, exist_ok=True)
    for old in scripts.glob("*.sbatch"):
        old.unlink()
    for run in runs:
        run.save()
        (scripts / f"{run.directory.name}.sbatch").write_text(script_of(run, gpus_per_node))
    words = {"root": shlex.quote(str(ROOT)), "scripts": shlex.quote(str(scripts))}
    submit = scripts / "submit-all.sh"
    words |= {"directory": shlex.quote(str(directory.resolve())), "ended": "|".join(sorted(DONE[retry]))}
    words["report"] = again
    submit.write_text(SUBMIT.format(**words))
    seconds = {run: seconds_of(run.config, run.phase, run.ranks, gpu) for run in runs}
    command = f"bash {shlex.quote(str(submit))}"
    said = f"wrote {len(runs)} scripts{describe_seconds(seconds, price)}; submit them with: {command}"
    return f"{said}\nand when they have ended, report with: {again}"


def script_of(run: Run, gpus_per_node: int) -> str:
    """The sbatch script of a run; its limit leaves two minutes to save in. Two jobs for one run take turns."""
    directory = run.directory.resolve()
    return SCRIPT.format(
        name=run.name,
        job=f"{directory.parent.name}-{directory.name}",
        nodes=-(-run.ranks // gpus_per_node),
        gpus=min(run.ranks, gpus_per_node),
        cpus=CPUS * min(run.ranks, gpus_per_node),
        minutes=round(run.minutes) + 3,
        log=str(directory / "slurm.txt").replace("%", "%%"),
        root=shlex.quote(str(ROOT)),
        directory=shlex.quote(str(directory)),
    )
