"""Measure a run: the ledger of one step, and diagnostics of memory, norms and parameters.

Before the first step, rank 0 also prints how the model is sharded, if the trainer's formulas describe it.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from measure.diagnostics import Diagnostics
from measure.formulas import find_cost_function
from measure.ledger import Ledger
from nanoGPT import observers
from nanoGPT.errors import ConfigError


@dataclass
class Flags(observers.Flags):
    """The flags of this observer."""

    ledger: bool = False
    """measure the collectives and the memory of one step, print them and write ledger.json"""
    diagnostics_interval: int = 0
    """steps between two records of memory and norms in diagnostics/, each with a comparison of the ranks; 0: off"""

    def check(self, world_size: int) -> None:
        if not 0 <= self.diagnostics_interval < 2**31:
            raise ConfigError(f"--diagnostics_interval={self.diagnostics_interval} is out of range: use 0 or more")


class Observer(observers.Observer):
    """Measures what its flags ask for."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.flags = observers.read_flags(config, Flags)
        self.ledger: Ledger | None = None
        self.diagnostics: Diagnostics | None = None
        self.step_contexts = contextlib.ExitStack()

    def build(self, model: nn.Module, optimizer: Optimizer, first_step: int) -> None:
        """Print how the model is sharded, and prepare the measurements."""
        if describe_sharding := find_cost_function(self.config, "describe_sharding"):
            self.run.print0(describe_sharding(model, self.config, self.run))
        if self.flags.ledger:  # the ledger measures the third step of a run
            self.ledger = Ledger(self.config, self.run, first_step + 2, model, optimizer)
        if interval := self.flags.diagnostics_interval:
            self.diagnostics = Diagnostics(self.config, self.run, interval, model, optimizer)

    def begin_step(self, step: int) -> None:
        """Count the collectives and the memory of the step, and read its gradients and activations."""
        if self.ledger:
            self.step_contexts.enter_context(self.ledger.watch(step))
        if self.diagnostics:
            self.step_contexts.enter_context(self.diagnostics.watch(step))

    def end_step(self, step: int, loss_sum: Tensor, grad_norm: Tensor) -> None:
        """Write what was measured in the step, and compare the ranks."""
        self.step_contexts.close()
        if self.diagnostics:
            self.diagnostics.record(step, loss_sum, grad_norm)

    def end(self, error: BaseException | None) -> None:
        """Stop measuring a step that has failed."""
        if error is not None:
            self.step_contexts.__exit__(type(error), error, error.__traceback__)
