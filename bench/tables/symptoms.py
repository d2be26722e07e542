"""The symptoms that all phases share: symptom, command, meaning, remedy. All three IMPLEMENTATION.md contain the table.

The rows about NCCL follow the documentation of NCCL and PyTorch. No GPU has run them yet.
"""

from collections.abc import Callable

from bench.tables.records import format_table

HEAD = ["symptom", "command", "what it means", "remedy"]
ROWS = [
    [
        "the run hangs, without an error",
        "`make autopsy`; while it hangs, `kill -QUIT PID`, then `stacks/rank*.txt`",
        "one rank waits in its own code, or has called another collective than the others",
        "call every collective on all ranks, in the same order; never inside `if rank == 0`",
    ],
    [
        "it ends with exit code 4, or NCCL prints `Watchdog caught collective operation timeout`",
        "`stacks/collectives-rank*.json`, torch's flight recorder",
        "no rank made progress for `--stall_seconds`, or a collective took longer than `--timeout_minutes`. The rank "
        "with the fewest collectives is at fault",
        "fix this rank; raise the two limits only for work that is really slow, such as a first compilation",
    ],
    [
        "a script without a watchdog, such as `minimal.py`, hangs on GPUs",
        "`TORCH_NCCL_BLOCKING_WAIT=1`, and a short `timeout` in `init_process_group`",
        "the collective then raises its error in the line of Python that waits for it",
        "remove it afterwards: it stops the overlap of communication and computation",
    ],
    [
        "NCCL stops with `unhandled system error` or `Call to connect failed`",
        "`NCCL_DEBUG=INFO make phase3 GPUS=8`",
        "the log names the network interface and the transport (P2P, SHM, NET) of each connection",
        "`NCCL_SOCKET_IFNAME=eth0` selects the interface; in a container, give it more shared memory (`--shm-size`)",
    ],
    [
        "NCCL hangs or is very slow between the GPUs of one node",
        "`nvidia-smi topo -m`, then once `NCCL_P2P_DISABLE=1 make phase3 GPUS=8`",
        "if it works without P2P, direct copies between GPUs are broken, often by the settings of a virtual machine",
        "fix these settings; do not train with `NCCL_P2P_DISABLE=1`, which is slow and which `make preflight` reports",
    ],
    [
        "`busy or unavailable`, or a GPU has no memory before the first step",
        "`nvidia-smi`",
        "another process uses the GPU",
        "stop it, or select other GPUs: `CUDA_VISIBLE_DEVICES=4,5,6,7 make phase3 GPUS=4`",
    ],
    [
        "`Duplicate GPU detected`, or more ranks than GPUs",
        "`nvidia-smi -L`, and `echo $CUDA_VISIBLE_DEVICES`",
        "two ranks would use the same GPU",
        "at most as many ranks as visible GPUs; `DEVICE=cpu` starts gloo ranks on the CPU instead",
    ],
    [
        "two nodes do not find each other",
        "`make preflight` on each node",
        "a firewall, a wrong `MASTER_ADDR`, or a wrong network interface",
        "open `MASTER_PORT`; set `GLOO_SOCKET_IFNAME` on CPUs, and `NCCL_SOCKET_IFNAME` on GPUs",
    ],
    [
        "out of memory",
        "`--ledger=True`, and `make plan` with your model and GPUs",
        "both list memory by category: model state, activations, all-gathered units",
        "reduce the largest category: the error message names the flags to try",
    ],
    [
        "the loss depends on the number of ranks",
        "`make gate PHASE=phase3 GPUS=2`, and `--diagnostics_interval=1`",
        "the first record in which ranks differ: their gradient norms, or their parameters",
        "a norm over all shards; seeds that depend on the micro-batch and not on the rank",
    ],
    [
        "a loss that is not finite (exit code 3)",
        "`--diagnostics_interval=1`, then `make autopsy`",
        "the rank, the step, and the first weight or block that is not finite",
        "a smaller learning rate, a longer warm-up, or bf16 instead of fp16",
    ],
    [
        "slower than expected",
        "`make profile PHASE=phase3 GPUS=8`, and `make autopsy` for a slow rank",
        "how much communication overlaps with computation, and how long each rank waits for the others",
        "more tokens per micro-batch; exclude the slow node; on CPUs, no more ranks than cores",
    ],
]


def symptoms_table() -> str:
    """Return the table of symptoms of runs on several ranks."""
    return format_table(HEAD, ROWS) + "\nThe rows about NCCL follow its documentation. No GPU has run them yet.\n"


SYMPTOM_TABLES: dict[str, Callable[[], str]] = {"symptoms": symptoms_table}
