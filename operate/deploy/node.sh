#!/bin/bash
# Train on this node of a job, and resume if the run has a checkpoint. Containers and cloud machines start this script on
# every node, as often as they like. Arguments are passed to the trainer:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GPUS=8 OUT_DIR=/shared/run operate/deploy/node.sh config/train_gpt2_xl.py
#
# OUT_DIR must be on a file system that all nodes share. TRAINER=phase1_zero1/train.py selects another trainer.
#
# Exit code: that of the launcher; 75 if a signal stopped the run before its last step. A scheduler then starts the node
# again. With the launcher's 0, it would count the run as finished.

set -euo pipefail
cd "$(dirname "$0")/../.."

OUT_DIR=${OUT_DIR:?"is not set: use a directory that all nodes share"}
words=("$@" "--out_dir=$OUT_DIR")
if compgen -G "$OUT_DIR/checkpoints/step-*" > /dev/null; then
    words+=(--init_from=resume)
fi

# The first process of a container receives a signal when the container must stop, and passes it on to the launcher.
"${PY:-.venv/bin/python}" -m operate.launch --gpus="${GPUS:-1}" --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    "${TRAINER:-phase3_fsdp/train.py}" "${words[@]}" &
launcher=$!
trap 'has_signal=yes; kill -TERM $launcher' HUP INT TERM USR1 USR2 XCPU
has_signal=yes
while [[ $has_signal ]]; do # a signal ends `wait`, but not the launcher
    has_signal=
    code=0
    wait $launcher || code=$?
done

if ((code == 0)) && [[ $(tail -n 1 "$OUT_DIR/log.txt") == *"stopped by"* ]]; then
    exit 75
fi
exit "$code"
