"""Check everything that a run needs, in less than a minute, before it starts.

    make preflight PHASE=phase3 GPUS=2
    make preflight PHASE=phase3 GPUS=8 CONFIG=config/train_mid.py ARGS=--out_dir=/shared/run
    make preflight PHASE=phase3 GPUS=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1      # on each node

The command takes the flags of the training command. On this node, it checks the configuration, the credentials of the
tracker, the data, the GPUs, the disk, the settings and the plan. Then it starts the ranks, which check collectives,
their bandwidth, slow ranks, the shared directory and the speed of the disk. On several nodes, each node prints its own
checks, and node 0 also prints those of the ranks. The command leaves no files behind.

The exit code is 2 if a check fails. Otherwise it is 0, even if there are warnings.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.checks import Check, has_failed, report, summarize
from bench.phases import find_phase
from bench.plan.run import estimate_checkpoint_bytes, vocabulary_size
from bench.preflight import node
from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.job.start import check_out_dir
from nanoGPT.model import make_shape
from nanoGPT.train_config import TrainConfig
from operate.launch import read_checked_config, run_job, split_arguments
from operate.nodes import NodeConfig, Rendezvous, check_node_config

SUBJECT_WIDTH = 16


def check_node(config: TrainConfig, place: NodeConfig, phase: str, params: int) -> Iterator[Check]:
    """Yield the checks of this node."""
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    yield Check("configuration", "pass", f"valid for {place.world_size} rank(s); {params:,} parameters")
    if on_gpu:
        yield from node.check_gpus(place.gpus)
    yield from node.check_settings(on_gpu, place.nnodes > 1)
    yield node.check_disk(config, params)
    yield node.check_plan(config, phase, place.world_size, place.gpus)


def check_ranks(config: TrainConfig, rendezvous: Rendezvous, phase: str, params: int) -> list[Check]:
    """Start all ranks and return their checks; on nodes other than node 0, an empty list."""
    with tempfile.TemporaryDirectory(prefix="preflight-") as folder:
        results = Path(folder) / "checks.json"
        size = str(estimate_checkpoint_bytes(params, config))
        command = ["-m", "bench.preflight.ranks", phase, str(results), size, config.out_dir]
        config = dataclasses.replace(config, out_dir=folder)  # the launcher's log does not belong to a run
        if code := run_job(rendezvous, command, config):
            return [Check("ranks", "fail", f"exit code {code}", "read the error message above")]
        return [Check(**values) for values in json.loads(results.read_text())] if results.exists() else []


def main(arguments: list[str]) -> None:
    """Run all checks, and print them.

    Raises:
        ConfigError: a check failed.
    """
    arguments, trainer, trainer_arguments = split_arguments(arguments)
    place = command_line(NodeConfig, arguments)
    check_node_config(place)
    phase = find_phase(trainer)
    rendezvous = Rendezvous(place)
    with rendezvous.share_errors():
        config = read_checked_config(trainer, trainer_arguments, rendezvous)
        resumes = config.init_from == "resume"  # without --out_dir, a new run creates a directory of its own
        if resumes or (config.out_dir != TrainConfig.out_dir and Path(config.out_dir).exists()):
            check_out_dir(Path(config.out_dir), resumes)
    shape = make_shape({**vars(config), "vocab_size": vocabulary_size(config)})
    checks = report(check_node(config, place, phase, shape.count_params()), SUBJECT_WIDTH)
    checks += report(check_ranks(config, rendezvous, phase, shape.count_params()), SUBJECT_WIDTH)
    print(f"\n{phase} on {place.world_size} rank(s): {summarize(checks)}")
    if has_failed(checks):
        raise ConfigError("a check failed: follow the remedies above before you start the run")


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
