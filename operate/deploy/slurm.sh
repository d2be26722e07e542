#!/bin/bash
# Train phase 3, or TRAINER=phase1_zero1/train.py, on several nodes of a Slurm cluster. Arguments after the script are
# passed to the trainer:
#
#   sbatch operate/deploy/slurm.sh config/train_gpt2_xl.py --batch_size=4               # from the repository, after `make setup`
#   sbatch --nodes=4 --time=04:00:00 operate/deploy/slurm.sh config/train_gpt2_xl.py    # options of sbatch override those below
#   MODULES="gcc/13 cuda/12.8" sbatch operate/deploy/slurm.sh                           # load modules of the cluster first
#
# The repository, its data and the run's directory must be on a file system that all nodes share.

#SBATCH --job-name=phase3
##SBATCH --account=my-account           # many clusters need this line and the next: remove one # and edit them
##SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1             # the launcher, which starts the ranks itself
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0                         # all of the node's memory
#SBATCH --time=24:00:00
#SBATCH --signal=HUP@120                # 120 s before the time limit: the ranks finish their step, save and exit 0
#SBATCH --requeue                       # run again with the same job id after a node failure or a preemption
#SBATCH --open-mode=append              # a requeued job appends to its log
#SBATCH --output=slurm-%x-%j.log

set -euo pipefail

if [[ -n ${MODULES:-} ]]; then
    read -ra modules <<< "$MODULES"
    module load "${modules[@]}"
fi

# Ranks meet on the first node. The port depends on the job id, so that two jobs on one node use different ports.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes%%$'\n'*}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# A requeued job keeps its id, and therefore finds its checkpoints. Without a checkpoint it starts from the beginning.
# The batch script looks for checkpoints only once, so that all nodes get the same answer from a shared file system.
export OUT_DIR=${OUT_DIR:-out/phase3-$SLURM_JOB_ID}
words=("$@" "--out_dir=$OUT_DIR")
if compgen -G "$OUT_DIR/checkpoints/step-*" > /dev/null; then
    words+=(--init_from=resume)
fi

# Start one launcher per node. A shell on each node builds the command, because the node's rank is known only there.
# If a launcher fails, srun stops the others, which would wait for its ranks.
# The environment variable GPUS sets the number of ranks per node. The default is one rank per GPU.
#
# Slurm does not requeue a job at its time limit, so node 0 does. Only the time limit sends SIGHUP, or the signal that
# --signal selects instead. After scancel (SIGTERM) the run saves too, but is not requeued; after a preemption (SIGTERM) Slurm requeues the job itself.
# `trap :` keeps the shell alive, because Slurm sends the signal to the shell and to the launcher.
export PY=${PY:-.venv/bin/python} TRAINER=${TRAINER:-phase3_fsdp/train.py}
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit it from sbatch
fi
# shellcheck disable=SC2016
exec srun --kill-on-bad-exit=1 bash -c '
    trap : HUP INT TERM USR1 USR2 XCPU
    "$PY" -m operate.launch --gpus="${GPUS:-${SLURM_GPUS_ON_NODE:-8}}" --nnodes="$SLURM_NNODES" \
        --node_rank="$SLURM_NODEID" --master_addr="$MASTER_ADDR" "$TRAINER" "$@"
    code=$?
    last_line=$(tail -n 1 "$OUT_DIR/log.txt" 2>/dev/null)
    if [[ $code == 0 && $SLURM_NODEID == 0 && $last_line =~ "stopped by SIG"(HUP|USR[12]|XCPU) ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit $code
' launch "${words[@]}"
