"""What a step with kernels costs by the formula, and what flags would free where memory is short.

Kernels change neither the model state nor the communication, so `step_costs` is the baseline's.
"""

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.memory import costs
from nanoGPT.memory.costs import step_costs
from nanoGPT.memory.savings import Needs, logits_bytes
from phase2_triton.apply import TritonConfig, parse_kernels

__all__ = ["memory_savings", "step_costs"]


def memory_savings(config: TritonConfig, needs: Needs, run: Runtime) -> dict[str, float]:
    """Return the bytes that flags, the loss's kernel among them, or another `make` command, free on this rank."""
    savings, names = costs.memory_savings(config, needs, run), parse_kernels(config.kernels)
    if needs.is_gpu and "loss" not in names:
        savings[f"--kernels={','.join(sorted({*names, 'loss'}))}"] = logits_bytes(config, needs, run)
    return savings
