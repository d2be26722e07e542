"""Find the cost functions of a trainer: those of its module `costs`, else those of the baseline."""

import importlib
import importlib.util
from typing import Any

import nanoGPT.costs
from nanoGPT.job.parse import package_of


def find_cost_function(config: Any, name: str) -> Any:
    """Return a function of the module `costs` of a trainer's package, else the baseline's; None if neither has it.

    Args:
        config: a configuration of the trainer.
        name: of the function, such as step_costs.
    """
    module = f"{package_of(type(config))}.costs"
    trainer_costs = importlib.import_module(module) if importlib.util.find_spec(module) else nanoGPT.costs
    return getattr(trainer_costs, name, getattr(nanoGPT.costs, name, None))
