"""FSDP for generation: which modules are all-gathered together, and when their full parameters are freed.

Memory decides the units. A layer with large parts (its attention, its MLP, its experts) is never all-gathered at
once: each part with at least 1M parameters is a unit, and the layer is a unit of the rest (norms, a router). The
embedding and the head are units as well. If they share one parameter (tied weights), they stay in the root unit, and
with offload the root is freed while the layers run.

FSDP all-gathers a unit into a flat buffer, copies it into the parameters, and frees the buffer when the next unit has
been copied. So a rank has a unit twice, and the flat buffer of the unit before. With offload, FSDP frees a buffer as
soon as it is copied: a rank has at most twice the largest layer, where the embedding and the head count as layers.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from nanoGPT.distributed.runtime import Runtime

MIN_PARAMS = 1_000_000  # of a unit that is a part of a layer


def find_units(layer: nn.Module) -> dict[nn.Module, int]:
    """Return the units of a layer in execution order, and the number of parameters of each without those inside it.

    The first unit is the layer itself. Another module is a unit if it has at least MIN_PARAMS parameters that belong
    to no unit inside it. A linear layer is no unit, because others around it are small. What is in a list of
    modules is no unit either: a layer may run only some of them, such as the experts of its tokens, and the ranks must
    all-gather the same units.
    """
    units: dict[nn.Module, int] = {}

    def count_unassigned(module: nn.Module, may_be_unit: bool) -> int:
        parts_may_be_units = not isinstance(module, nn.ModuleList | nn.ModuleDict) and (may_be_unit or module is layer)
        unassigned = sum(p.numel() for p in module.parameters(recurse=False))
        unassigned += sum(count_unassigned(child, parts_may_be_units) for child in module.children())
        is_stack = any(p.dim() > 2 for p in module.parameters(recurse=False))  # of experts
        if may_be_unit and parts_may_be_units and unassigned >= MIN_PARAMS and (any(module.children()) or is_stack):
            units[module] = unassigned
            return 0
        return unassigned

    rest = count_unassigned(layer, False)
    return {layer: rest} | {module: units[module] for module in layer.modules() if module in units}


def find_ends(model: nn.Module) -> list[nn.Module]:
    """Return the embedding and the head of a model; nothing if they share their weight, or if the model lacks one."""
    find = [getattr(model, f"get_{name}_embeddings", lambda: None) for name in ("input", "output")]
    ends = [module for module in (each() for each in find) if module is not None]
    weights = {getattr(module, "weight", None) for module in ends}
    return ends if len(ends) == len(weights) == 2 else []


def shard_for_generation(model: nn.Module, layers: Sequence[nn.Module], is_offloaded: bool, run: Runtime) -> None:
    """Apply `fully_shard` to the units of a model, in place. Every unit is freed after its forward pass. Collective.

    Args:
        model: on the meta device.
        layers: of the model, in execution order.
        is_offloaded: store the shards in CPU memory, and free a tied embedding and head while the layers run.
        run: this rank's Runtime.
    """
    options: dict[str, Any] = {
        "mesh": init_device_mesh(run.device.type, (run.world_size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=run.dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(run.device.type != "cpu") if is_offloaded else OffloadPolicy(),
    }
    units = [unit for layer in layers for unit in reversed(find_units(layer))]  # inner units first
    for unit in (*find_ends(model), *units):
        fully_shard(unit, reshard_after_forward=True, **options)
    fully_shard(model, **options)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(True, recurse=False)  # without a backward pass, nothing needs the root afterwards
    if is_offloaded:
        # FSDP then copies on the stream that computes, and frees a flat buffer as soon as it is copied.
        model._set_unshard_async_op(True)
        free_root_between(model, layers[0], layers[-1])


def free_root_between(model: FSDPModule, first: nn.Module, last: nn.Module) -> None:
    """Free the root unit before the first layer runs, and all-gather it again after the last one."""

    def free(*_: Any) -> None:
        model.reshard()

    def all_gather(*_: Any) -> None:
        model.unshard()

    first.register_forward_pre_hook(free, prepend=True)  # before FSDP all-gathers the layer
    last.register_forward_hook(all_gather)
