"""Copy what the ranks print into the run's directory, as `torchrun --tee=3 --log-dir=DIR` does."""

import dataclasses

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig


def copy_output(config: LaunchConfig, logs: str) -> LaunchConfig:
    """Return the settings of an elastic agent that copies the output of its ranks.

    The first rank of the node prints to the console only: its progress bar needs a terminal. torch writes the output of
    the others, of libraries such as NCCL too, into {logs}/{run id}/attempt_{n}/{local rank}/stdout.log and stderr.log,
    and shows it on the console after the number of the rank. The reason why a rank failed is in error.json.

    Args:
        config: the settings without a copy.
        logs: a directory.
    """
    specs = DefaultLogsSpecs(logs, tee=dict.fromkeys(range(1, config.nproc_per_node), Std.ALL))
    return dataclasses.replace(config, logs_specs=specs, log_line_prefix_template="[rank${rank}] ")
