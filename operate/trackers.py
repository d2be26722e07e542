"""Send the metrics of a run to TensorBoard or Weights & Biases.

A resumed run continues its run in Weights & Biases, whose id is in `wandb_run_id` in out_dir. Weights & Biases keeps
the first values of a step. A step that is trained again after a kill and a resume has the same values, up to rounding.
"""

import dataclasses
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.files import write_atomically
from nanoGPT.train_config import TrainConfig


def choose_wandb_run_id(config: TrainConfig, first_step: int) -> str:
    """Return the id of the run in Weights & Biases.

    It is a new id for a new run, an evaluation, and a run that resumes from an older checkpoint (`resume_step`), whose
    steps may get other values. Otherwise, it is the id in out_dir.
    """
    path = Path(config.out_dir) / "wandb_run_id"
    if first_step > 0 and config.resume_step is None and not config.eval_only and path.exists():
        return path.read_text().strip()
    run_id = uuid.uuid4().hex[:8]
    if not config.eval_only:
        write_atomically(path, f"{run_id}\n".encode())
    return run_id


class Tracker:
    """A connection to TensorBoard or Weights & Biases. After its first failure, the run continues without it.

    Args:
        config: this rank's configuration.
        kind: tensorboard or wandb.
        run: this rank's Runtime.
        first_step: the first step of this run; 0 unless it resumes.
        model_args: the shape of the model, which may be that of given weights.
    """

    def __init__(
        self, config: TrainConfig, kind: str, run: Runtime, first_step: int, model_args: dict[str, Any]
    ) -> None:
        self.kind, self.run = kind, run
        self.writer: Any = None
        self._attempt(lambda: self._open(config, first_step, model_args))

    def _open(self, config: TrainConfig, first_step: int, model_args: dict[str, Any]) -> None:
        if self.kind == "wandb":
            import wandb

            self.writer = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "sharded-nanogpt"),
                name=os.environ.get("WANDB_NAME", Path(config.out_dir).resolve().name),
                id=choose_wandb_run_id(config, first_step),
                resume="allow",
                dir=config.out_dir,
                config={**dataclasses.asdict(config), **model_args},
            )
        else:
            from torch.utils.tensorboard import SummaryWriter

            # After a resume, points from first_step on are hidden, as in metrics.jsonl.
            self.writer = SummaryWriter(config.out_dir, purge_step=first_step or None)

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
