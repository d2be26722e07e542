"""Optimizers that share their groups and state with other optimizers: sharded optimizers, and Muon with AdamW."""

from collections.abc import Callable
from typing import Any

import torch


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Call `closure`, the argument of an optimizer's `step`, with gradients enabled. Return its loss, or None."""
    with torch.enable_grad():
        return closure() if closure else None


class SharedOptimizer(torch.optim.Optimizer):
    """An optimizer whose parameter groups and state belong to other objects too, such as an inner optimizer."""

    has_all_groups = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.has_all_groups = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group that the other objects would not have.

        Raises:
            ValueError: the optimizer has been created.
        """
        if self.has_all_groups:
            raise ValueError(f"{type(self).__name__} cannot add a parameter group: create it with all groups")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy, which would update parameters of the original.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: create one for the other model, and load its state"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict` into the same parameter groups and the same state."""
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)  # creates other objects
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        state.clear()
        state.update(self.state)
        self.param_groups, self.state = groups, state
