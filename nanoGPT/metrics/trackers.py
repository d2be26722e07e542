"""Send the metrics of a run to TensorBoard or Weights & Biases."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.train_config import TrainConfig


class Tracker:
    """A connection to TensorBoard or Weights & Biases. After its first failure, the run continues without it."""

    def __init__(self, config: TrainConfig, run: Runtime) -> None:
        self.kind, self.run = config.track, run
        self.writer: Any = None
        self._attempt(lambda: self._open(config))

    def _open(self, config: TrainConfig) -> None:
        if self.kind == "wandb":
            import wandb

            project = os.environ.get("WANDB_PROJECT", "sharded-nanogpt")
            self.writer = wandb.init(project=project, dir=config.out_dir, config=dataclasses.asdict(config))
        else:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(config.out_dir)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # any error of the network, the disk or the service
            self.writer = None
            self.run.print0(
                f"--track={self.kind} failed ({type(error).__name__}: {error}): read the metrics in metrics.jsonl"
            )

    def log(self, line: dict[str, Any]) -> None:
        """Send one line of metrics."""
        if self.writer:
            self._attempt(lambda: self._send({k: v for k, v in line.items() if v is not None}))

    def _send(self, metrics: dict[str, Any]) -> None:
        step = metrics.pop("step")
        if self.kind == "wandb":
            self.writer.log(metrics, step=step)
            return
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Send the remaining metrics and close the connection."""
        if self.writer:
            self._attempt(lambda: self.writer.finish() if self.kind == "wandb" else self.writer.close())
