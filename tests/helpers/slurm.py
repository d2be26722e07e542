"""A stand-in for Slurm's commands: `scontrol` and `srun` of a cluster of two nodes, both of them this machine."""

SCONTROL = """#!/bin/bash
[[ $* == "show hostnames node[1-2]" ]] && printf '127.0.0.1\\nnode2\\n'
"""


SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 ]] && shift || exit 64
[[ -v ONLY_SAY ]] && exec echo $$ "$SRUN_CPUS_PER_TASK" "$@"
SLURM_NODEID=1 "$@" & other=$!
SLURM_NODEID=0 "$@" && wait $other
"""
