#!/bin/bash
# Train phase 3, or TRAINER=phase1_zero1/train.py, on several nodes of a Slurm cluster; words after the script are its:
#
#   sbatch phase3_fsdp/slurm.sh config/train_gpt2_xl.py --batch_size=4               # from the repository, after `make setup`
#   sbatch --nodes=4 --time=04:00:00 phase3_fsdp/slurm.sh config/train_gpt2_xl.py    # sbatch's own words win over those below
#   scontrol requeue JOBID                                                           # one that its time limit stopped goes on
#
# The repository, its data and the run's directory must be on a file system that all nodes see.

#SBATCH --job-name=phase3
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1             # the launcher, which starts the ranks itself
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0                         # all of the node's memory
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120               # seconds before the limit: the ranks end their step, save and exit 0
#SBATCH --requeue                       # after a node failed or another job was preferred: the same job id again
#SBATCH --open-mode=append              # a job that runs again goes on writing its log
#SBATCH --output=slurm-%x-%j.log

set -euo pipefail

# The first node is where ranks meet. The port follows the job, so that two jobs that share a node do not share it.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes%%$'\n'*}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# A job that is requeued keeps its id, and so finds its checkpoints. Without one it has lost nothing but time.
OUT_DIR=${OUT_DIR:-out/phase3-$SLURM_JOB_ID}
words=("$@" "--out_dir=$OUT_DIR")
if compgen -G "$OUT_DIR/checkpoints/step-*" > /dev/null; then
    words+=(--init_from=resume)
fi

# One launcher a node. What differs between nodes is known only there, so a shell on each puts the command together.
# A node whose launcher fails ends the others: they would wait for its ranks.
# With GPUS in its environment each node has that many ranks, else one for each of its GPUs.
export PY=${PY:-.venv/bin/python} TRAINER=${TRAINER:-phase3_fsdp/train.py}
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun no longer takes over by itself
fi
# shellcheck disable=SC2016
exec srun --kill-on-bad-exit=1 bash -c '
    exec "$PY" -m nanoGPT.launch --gpus="${GPUS:-${SLURM_GPUS_ON_NODE:-8}}" --nnodes="$SLURM_NNODES" \
        --node_rank="$SLURM_NODEID" --master_addr="$MASTER_ADDR" "$TRAINER" "$@"
' launch "${words[@]}"
