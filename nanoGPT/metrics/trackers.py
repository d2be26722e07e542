"""TensorBoard and Weights & Biases, which may receive a run's metrics as well."""

import dataclasses
from collections.abc import Callable
from typing import Any

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.train_config import TrainConfig


class Tracker:
    """Sends metrics to TensorBoard or Weights & Biases as well; after its first failure the run goes on without it."""

    def __init__(self, config: TrainConfig, run: Runtime) -> None:
        self.kind, self.run = config.track, run
        self.writer: Any = None
        self._attempt(lambda: self._open(config))

    def _open(self, config: TrainConfig) -> None:
        if self.kind == "wandb":
            import wandb

            self.writer = wandb.init(project="sharded-nanogpt", dir=config.out_dir, config=dataclasses.asdict(config))
        else:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(config.out_dir)

    def _attempt(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:  # whatever a network, a disk or a service makes of it
            self.writer = None
            self.run.print0(
                f"--track={self.kind} failed ({type(error).__name__}: {error}): metrics.jsonl has all metrics"
            )

    def log(self, line: dict[str, Any]) -> None:
        """Send one line of metrics."""
        if self.writer:
            self._attempt(lambda: self._send({k: v for k, v in line.items() if v is not None}))

    def _send(self, numbers: dict[str, Any]) -> None:
        step = numbers.pop("step")
        if self.kind == "wandb":
            self.writer.log(numbers, step=step)
            return
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Send what is left."""
        if self.writer:
            self._attempt(lambda: self.writer.finish() if self.kind == "wandb" else self.writer.close())
