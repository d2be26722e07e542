"""Scripts that replace Slurm's commands `scontrol` and `srun`. They simulate one or two nodes on this machine."""

SCONTROL = """#!/bin/bash
[[ $1 == show ]] && printf '127.0.0.1\\nnode2\\n' | head -n "$SLURM_NNODES"
[[ $1 == requeue ]] && echo "$2" > "$0.requeued"
true
"""


SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 ]] && shift || exit 64
trap : HUP TERM USR1
[[ -v ONLY_PRINT ]] && exec echo $$ "$SRUN_CPUS_PER_TASK" "$@"
export SLURM_NODEID=0
((SLURM_NNODES == 1)) && exec "$@"
SLURM_NODEID=1 "$@" & other=$!
"$@" && wait $other
"""
