"""The predicted costs of a training step with kernels, and the memory that other flags would free.

Kernels change neither the model state nor the communication. `step_costs` is therefore the baseline's function.
"""

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.memory import costs
from nanoGPT.memory.costs import step_costs
from nanoGPT.memory.savings import Needs, logits_bytes
from phase2_triton.apply import TritonConfig, parse_kernels

__all__ = ["memory_savings", "step_costs"]


def memory_savings(config: TritonConfig, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return how many bytes each flag or `make` command would free on this rank, including the loss kernel's flag."""
    savings = costs.memory_savings(config, needs, run)
    kernels = parse_kernels(config.select_kernels(run.device.type))
    if needs.is_gpu and "loss" not in kernels:
        savings[f"--kernels={','.join(sorted({*kernels, 'loss'}))}"] = logits_bytes(config, needs, run)
    return savings
