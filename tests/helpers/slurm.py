"""Scripts that replace Slurm's commands `scontrol` and `srun`. They simulate a cluster of two nodes on this machine."""

SCONTROL = """#!/bin/bash
[[ $* == "show hostnames node[1-2]" ]] && printf '127.0.0.1\\nnode2\\n'
[[ $1 == requeue ]] && echo "$2" > "$0.requeued"
true
"""


SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 ]] && shift || exit 64
trap : HUP TERM
[[ -v ONLY_PRINT ]] && exec echo $$ "$SRUN_CPUS_PER_TASK" "$@"
SLURM_NODEID=1 "$@" & other=$!
SLURM_NODEID=0 "$@" && wait $other
"""
