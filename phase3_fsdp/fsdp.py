"""FSDP: every rank stores a shard of each parameter, of its gradient and of its optimizer state.

`shard_model` applies torch's `fully_shard` (FSDP2) to an unmodified `GPT`. The model is divided into units, by default
its blocks. FSDP all-gathers the parameters of a unit before its forward pass and before its backward pass, and frees
them after each (the root unit stays until its backward pass). After the backward pass of a unit it reduce-scatters the
gradients. Just before the update, a rank stores 16P/N bytes of model state for P parameters in fp32 (ZeRO stage 3,
Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023).

    with put_parameters_on_meta():
        model = GPT(model_args)                        # names and shapes only, no memory
    model = shard_model(model, config, run)            # still no memory: parameters become sharded DTensors
    init_shards(model, config, run)                    # each rank allocates and fills its shards
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from nanoGPT.distributed.environment import count_cores
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.distributed.sharding import local_shard, row_range
from nanoGPT.errors import ConfigError, import_optional
from nanoGPT.model import GPT, draw_initial_rows
from nanoGPT.optim import configure_adamw
from nanoGPT.train_config import TrainConfig
from phase3_fsdp.activation_checkpointing import checkpoint_activations, select_checkpointed_blocks

SWITCHES = {"True": "full", "False": "none"}  # short forms of --fsdp_activation_checkpointing

KERNELS = "phase2_triton.apply"  # loaded only if --kernels asks for kernels
MUON = "phase3_fsdp.muon"  # loaded only with --optimizer=muon


@dataclass
class FsdpConfig(TrainConfig):
    """GPT-2 training with FSDP. The defaults are the baseline's, so that the loss curves can be compared."""

    FOREIGN_FLAGS = {
        **TrainConfig.FOREIGN_FLAGS,
        "fsdp_min_num_params": "use --fsdp_wrap with this number instead, such as --fsdp_wrap=1e6",
        "problems start num tokens": "use it with `make evaluate`, which solves problems",
    }

    fsdp_wrap: str = "block"
    """the units: block (every block), or the minimum number of parameters of a unit, a module with submodules: 1e6"""
    fsdp_reshard_after_forward: bool = True
    """False: a unit stays unsharded until the last backward pass of a step; less communication, more memory"""
    fsdp_shard_size: str = "all"
    """ranks that share one copy of the model: all | node (the ranks of one node) | a divisor of the world size"""
    fsdp_cpu_offload: bool = False
    """store parameters, gradients and optimizer state in CPU memory, and update them on the CPU"""
    fsdp_activation_checkpointing: str = "none"
    """none or False | full or True | selective (save the outputs of products and attention) | every_2, every_3, ...:
    blocks to recompute"""
    fsdp_sync_every_micro_batch: bool = False
    """reduce-scatter gradients after every micro-batch: more communication, no unsharded gradients in between"""
    kernels: str = "none"
    """kernels of phase 2: none | triton (all) | auto | some of attention,embedding,gelu,layernorm,loss. On a
    GPU, auto selects loss with --compile=True, else all; on a CPU it selects none"""
    async_save: bool = False
    """write checkpoints from a copy while training continues"""

    def __post_init__(self) -> None:
        mode = self.fsdp_activation_checkpointing
        self.fsdp_activation_checkpointing = SWITCHES.get(mode, mode)

    def check(self, world_size: int) -> None:
        select_checkpointed_blocks(self.fsdp_activation_checkpointing, self.n_layer)
        if self.kernels.lower() != "none":
            import_optional(KERNELS, f"--kernels={self.kernels}").check_kernels(self)
        if self.fsdp_wrap != "block" and not 1 <= self.min_num_params < math.inf:
            raise ConfigError(f"--fsdp_wrap={self.fsdp_wrap} is invalid: use block, or a number of parameters from 1")
        size = self.fsdp_shard_size
        sizes = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        if size not in ("all", "node", *sizes):
            raise ConfigError(
                f"--fsdp_shard_size={size} does not divide {world_size} rank(s): use --fsdp_shard_size=all, node or "
                f"{' or '.join(sizes)} (also if the value comes from a checkpoint)"
            )

    @property
    def min_num_params(self) -> float:
        """The minimum number of parameters of a unit, or NaN with --fsdp_wrap=block."""
        try:
            return float(self.fsdp_wrap)
        except ValueError:
            return math.nan

    @property
    def supports_mps(self) -> bool:
        return False

    @property
    def uses_autocast(self) -> bool:
        return False  # FSDP casts parameters before the all-gather, which halves its bytes in bf16

    def ranks_per_replica(self, world_size: int, local_world_size: int) -> int:
        """Return the number of ranks over which one copy of the model is sharded."""
        return {"all": world_size, "node": local_world_size}.get(self.fsdp_shard_size) or int(self.fsdp_shard_size)


@contextmanager
def put_parameters_on_meta() -> Iterator[None]:
    """Give no memory to parameters that are created inside this context. Buffers get their values as usual.

    Under `torch.device("meta")`, buffers would have no values either. A checkpoint cannot restore buffers that are not
    persistent, such as the tables of rotary position embeddings (RoPE). Tie parameters through the attribute of a
    module, as in `head.weight = embedding.weight`: one nn.Parameter with two names would become two parameters.
    """

    def move_to_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
        return param if param.is_meta else nn.Parameter(param.to("meta"), param.requires_grad)  # meta: a tied parameter

    handle = register_module_parameter_registration_hook(move_to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def shard_model(model: GPT, config: FsdpConfig, run: Runtime) -> GPT:
    """Shard an unmodified model over the ranks. Collective.

    The order matters. Kernels replace the forwards of modules, so they come first. Activation checkpointing wraps the
    forward of a block. Compilation compiles that wrapped forward, so no graph contains a collective. Sharding a block
    comes after these, so that its hooks all-gather the parameters before the compiled code runs.

    Args:
        model: built in `put_parameters_on_meta`; its parameters need no values yet.
        config: all options of `FsdpConfig` apply.
        run: this rank's Runtime.

    Returns:
        The same object. Its parameters are DTensors sharded in dimension 0.

    Raises:
        ConfigError: `fsdp_shard_size=node`, and the nodes have different numbers of ranks.
    """
    if config.kernels.lower() != "none":
        import_optional(KERNELS, f"--kernels={config.kernels}").apply_configured_kernels(model, config, run)
    checkpoint_activations(model, config.fsdp_activation_checkpointing)
    if config.compile:
        model.compile_by_block()
    if config.fsdp_cpu_offload and run.device.type == "cuda":
        # The optimizer runs on this rank's share of the cores. The launcher gives each rank one thread.
        torch.set_num_threads(max(1, count_cores() // run.local_world_size))
    shard_units(model, config, run)
    return model


def shard_units(model: GPT, config: FsdpConfig, run: Runtime) -> None:
    """Call `fully_shard` on every unit, then on the root.

    Inner units come before outer ones, because `fully_shard` takes all parameters that belong to no unit yet. The root
    comes last. It takes the embeddings, the final LayerNorm and the head. The head is tied to the token embedding, so
    the two must be in the same unit.
    """
    shard_options: dict[str, Any] = {
        "mesh": create_mesh(config, run),
        "mp_policy": MixedPrecisionPolicy(param_dtype=run.dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(run.device.type != "cpu") if config.fsdp_cpu_offload else OffloadPolicy(),
    }
    units = find_units(model, config)
    # SOLUTION
    for unit in reversed(units):  # inner units first
        fully_shard(unit, reshard_after_forward=config.fsdp_reshard_after_forward, **shard_options)
    fully_shard(model, **shard_options)  # FSDP keeps the root unsharded: its backward pass is next
    # END SOLUTION


def create_mesh(config: FsdpConfig, run: Runtime) -> DeviceMesh:
    """Return a mesh of (shards,) ranks for one replica of the model, or of (replicas, shards) ranks for several."""
    num_shards = config.ranks_per_replica(run.world_size, run.local_world_size)
    if config.fsdp_shard_size == "node" and len(sizes := sorted(set(run.gather(run.local_world_size)))) > 1:
        raise ConfigError(
            f"--fsdp_shard_size=node needs the same number of ranks on every node, but the nodes have "
            f"{' and '.join(map(str, sizes))}: use --fsdp_shard_size=all"
        )
    replicas = run.world_size // num_shards
    shape = {"replicate": replicas, "shard": num_shards} if replicas > 1 else {"shard": num_shards}
    mesh = init_device_mesh(run.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    if run.timeout:
        for group in mesh.get_all_groups():  # torch creates new groups with its default timeout
            dist.distributed_c10d._set_pg_timeout(run.timeout, group)
    return mesh


def find_units(model: GPT, config: FsdpConfig) -> list[nn.Module]:
    """Return the modules that FSDP all-gathers and frees as units, in execution order, without the root.

    With a minimum size, the search starts at the leaves. A module with submodules becomes a unit if it has at least
    `fsdp_wrap` parameters that belong to no unit inside it (as in torch's `size_based_auto_wrap_policy`). A
    single layer is never a unit, because kernels read the weights of a layer from the module around it. A checkpointed
    block contains no units, because the recomputation would all-gather them once more.
    """
    if config.fsdp_wrap == "block":
        return list(model.blocks)
    checkpointed = select_checkpointed_blocks(config.fsdp_activation_checkpointing, len(model.blocks))
    inside_checkpointed = {module for i in checkpointed for module in model.blocks[i].modules()} - {*model.blocks}
    units: list[nn.Module] = []
    assigned: set[nn.Parameter] = set()
    for module in reversed([*model.modules()]):  # every module comes after the modules inside it
        unassigned = {*module.parameters()} - assigned
        can_be_unit = any(module.children()) and not isinstance(module, nn.ModuleDict | nn.ModuleList | GPT)
        is_large = sum(p.numel() for p in unassigned) >= config.min_num_params
        if can_be_unit and is_large and module not in inside_checkpointed:
            units.insert(0, module)
            assigned |= unassigned
    return units


@torch.no_grad()
def init_shards(model: GPT, config: FsdpConfig, run: Runtime, weights: Mapping[str, Tensor] | None = None) -> None:
    """Allocate this rank's shards of a model from `shard_model`, and initialize them one parameter at a time.

    A rank draws only the chunks of rows that contain its shard. Every chunk has its own generator, so the weights are
    the same for every number of ranks. (If every rank drew its shard from one generator with the same seed, the weights
    would depend on the number of ranks, and the shards of all ranks would be equal.) Peak memory is this rank's shards
    plus one chunk, or plus the largest parameter if `weights` are given.

    Args:
        weights: full parameters by name; None: draw them like the baseline, or leave them empty for a resume.
    """
    if next(model.parameters()).is_meta:
        allocate_shards(model, torch.device("cpu") if config.fsdp_cpu_offload else run.device)
    for buffer in model.buffers():
        buffer.data = buffer.to(run.device)
    if weights is None and config.init_from == "resume":
        return  # load_shards sets every value
    for name, param in model.named_parameters():
        if weights is None:
            begin, _ = own_rows(param)
            draw_initial_rows(local_shard(param), name, param.shape, model.config.initial_std(name), config.seed, begin)
        else:
            copy_own_rows(param, weights[name])


def allocate_shards(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters of a model that are on the meta device, without values. Other tensors stay as they are.

    Raises:
        ConfigError: a buffer is on the meta device, so its values are lost.
    """
    if lost := next((name for name, buffer in model.named_buffers() if buffer.is_meta), None):
        raise ConfigError(f"the buffer {lost} has no values: build the model in `put_parameters_on_meta()`")
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


def own_rows(tensor: Tensor) -> tuple[int, int]:
    """Return the first row that this rank stores, and the row after its last; all rows if the tensor is not sharded."""
    if not isinstance(tensor, DTensor):
        return 0, len(tensor)
    mesh = tensor.device_mesh
    return row_range(len(tensor), mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1))


@torch.no_grad()
def copy_own_rows(target: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of a full tensor to `target`, or all of it if `target` is not sharded."""
    if target.dim():
        begin, end = own_rows(target)
        full = full[begin:end]
    local_shard(target).copy_(full)


def configure_optimizer(model: GPT, config: FsdpConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a model from `shard_model`. Its state is sharded like the parameters."""
    if config.optimizer == "muon":
        return import_optional(MUON, "--optimizer=muon").configure_sharded_muon(model, config)
    return configure_adamw(model, config)


def set_gradient_sync(parallel_model: nn.Module, config: FsdpConfig, last: bool) -> None:
    """Set whether the next backward reduces gradients and frees parameters; call it before each micro-batch.

    By default only the last micro-batch reduces gradients, and before it each rank accumulates full gradients. With
    `fsdp_sync_every_micro_batch` every micro-batch reduces, and a rank accumulates shards. In both cases, the gradient
    shards are all-reduced between the replicas once per step.

    With `fsdp_reshard_after_forward=False`, the parameters stay all-gathered until the last backward. This needs no
    additional memory: at the end of each forward pass all of them are all-gathered.
    """
    assert isinstance(parallel_model, FSDPModule)
    parallel_model.set_reshard_after_backward(last or config.fsdp_reshard_after_forward)
    # SOLUTION
    parallel_model.set_requires_gradient_sync(last or config.fsdp_sync_every_micro_batch)
    parallel_model.set_requires_all_reduce(last)
    # END SOLUTION


def local_grads(parallel_model: nn.Module) -> list[Tensor]:
    """Return this rank's shards of the gradients. The shard of a parameter with few rows may be empty."""
    return [local_shard(p.grad) for p in parallel_model.parameters() if p.grad is not None]


def shard_group(parallel_model: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks whose shards make up the full model, or None if the model is not sharded."""
    param = next(parallel_model.parameters())
    return param.device_mesh.get_group(-1) if isinstance(param, DTensor) else None
