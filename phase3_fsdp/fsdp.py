"""FSDP: every rank holds a slice of each parameter, its gradient and its optimizer state.

`shard_model` changes an untouched `GPT` from outside (torch's `fully_shard`, FSDP2). The model is cut into units, by
default its blocks. Before a unit's forward and its backward its parameters are all-gathered, after each they are
freed again; after its backward its gradients are reduce-scattered. What a rank keeps between steps is 1/N of 16 bytes
a parameter (ZeRO stage 3, Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023).

    with birthplace(config, run):
        model = GPT(model_args)                        # names and shapes, no memory
    model = shard_model(model, config, run)            # still no memory: every parameter knows its slice
    init_shards(model, config, run)                    # each rank fills its own
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT, initial_value
from nanoGPT.train_config import TrainConfig
from phase3_fsdp.activation_checkpointing import checkpoint_activations, checkpointed


@dataclass
class FsdpConfig(TrainConfig):
    """GPT-2 training with FSDP. The defaults are the baseline's, so that their loss curves can be laid together."""

    use_fsdp: bool = True
    """False: the baseline's DDP, nothing sharded"""
    fsdp_wrap: Literal["block", "size"] = "block"
    """what is gathered and freed as one: every block, or every module of fsdp_min_num_params"""
    fsdp_min_num_params: int = 1_000_000
    """with fsdp_wrap=size: parameters that make a module with submodules a unit of its own"""
    fsdp_reshard_after_forward: bool = True
    """False: a unit stays gathered from its forward to its backward; less traffic, more memory"""
    fsdp_shard_size: str = "all"
    """ranks that share one copy of the model: all | node (those of a machine) | a number that divides the ranks"""
    fsdp_cpu_offload: bool = False
    """keep shards, gradients and optimizer state in the CPU's memory, and update there"""
    fsdp_activation_checkpointing: str = "none"
    """none | full | selective | every_2, every_3, ...: which blocks are computed again in the backward"""
    fsdp_sync_every_micro_batch: bool = False
    """reduce gradients after every micro-batch: more traffic, no whole gradients kept between them"""
    fsdp_prefetch: int = 0
    """units that are gathered ahead of the one that computes; 0: what torch does by itself"""
    kernels: str = "none"
    """none | triton | some of attention,embedding,gelu,layernorm,loss, those of phase 2"""
    async_save: bool = False
    """write checkpoints from a copy while training goes on"""

    def check(self, world_size: int) -> None:
        for name, least in (("fsdp_min_num_params", 1), ("fsdp_prefetch", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name}={getattr(self, name)} cannot be: give {least} or more")
        checkpointed(self.fsdp_activation_checkpointing, self.n_layer)
        kernels_of(self)
        if not self.use_fsdp:
            self._check_ddp()
            return
        if self.optimizer != "adamw":
            raise ConfigError(
                f"--optimizer={self.optimizer} needs whole matrices, which FSDP cuts: use phase 1, or --use_fsdp=False"
            )
        size = self.fsdp_shard_size
        sizes = [str(n) for n in range(1, world_size + 1) if world_size % n == 0]
        if size not in ("all", "node", *sizes):
            raise ConfigError(
                f"--fsdp_shard_size={size} does not divide {world_size} rank(s): give --fsdp_shard_size=all, node or "
                f"{' or '.join(sizes)}, also where a checkpoint brought it"
            )
        if self.fsdp_wrap == "block" and self.fsdp_min_num_params != FsdpConfig.fsdp_min_num_params:
            raise ConfigError(
                f"--fsdp_min_num_params={self.fsdp_min_num_params} says nothing of blocks: add --fsdp_wrap=size"
            )

    def shards(self, world_size: int, local_world_size: int) -> int:
        """Return how many ranks share one copy of the model."""
        return {"all": world_size, "node": local_world_size}.get(self.fsdp_shard_size) or int(self.fsdp_shard_size)

    def share_of_parameters(self, world_size: int, local_world_size: int, on_gpu: bool) -> float:
        if not self.use_fsdp:
            return 1.0
        return 0.0 if on_gpu and self.fsdp_cpu_offload else 1 / self.shards(world_size, local_world_size)

    def _check_ddp(self) -> None:
        plain = FsdpConfig()
        names = ("fsdp_wrap", "fsdp_min_num_params", "fsdp_reshard_after_forward", "fsdp_shard_size")
        for name in (*names, "fsdp_cpu_offload", "fsdp_sync_every_micro_batch", "fsdp_prefetch"):
            if getattr(self, name) != getattr(plain, name):
                raise ConfigError(
                    f"--{name}={getattr(self, name)} needs FSDP: give --{name}={getattr(plain, name)}, or drop "
                    "--use_fsdp=False"
                )


def kernels_of(config: FsdpConfig) -> str:
    """The kernels that the model is to use, as `phase2_triton.apply` names them.

    Raises:
        ConfigError: a name that is none of them, or AdamW's, which updates whole tensors and not slices.
    """
    if config.kernels.lower() == "none":
        return "none"
    from phase2_triton.apply import KERNELS, TritonConfig, parse_kernels

    everything = ",".join(name for name in KERNELS if name != "adamw")
    names = everything if config.kernels.lower() == "triton" else config.kernels
    if "adamw" in parse_kernels(names, f"triton, none, or some of {everything}"):
        raise ConfigError(
            f"--kernels={config.kernels}: AdamW's kernel does not update slices: use --kernels={everything}"
        )
    TritonConfig(n_embd=config.n_embd, n_head=config.n_head, kernels=names).check(1)
    return names


def init_device(config: FsdpConfig, run: Runtime) -> torch.device:
    """Where to build the model: on the meta device, which has shapes and no memory, where it will be sharded."""
    return torch.device("meta") if config.use_fsdp else run.device


def shard_model(model: GPT, config: FsdpConfig, run: Runtime) -> GPT:
    """Turn an untouched model into this rank's share of it. Collective.

    The order matters. Kernels replace the forwards of modules, so they come first. Activation checkpointing wraps a
    block's forward, and what is compiled is that wrapped forward: no graph holds a collective. Only then is a block
    sharded, whose hooks gather its parameters before all of this runs. Inner units are sharded before outer ones,
    since `fully_shard` takes what is left; the root comes last and takes the embeddings, the final LayerNorm, and the
    head, which is the token embedding under another name and must be in the same unit.

    Args:
        model: as `init_device` says; its parameters need no values yet.
        config: every option of `FsdpConfig`.
        run: this rank's Runtime.

    Returns:
        The same object. Its parameters are DTensors, cut in their first dimension; with `use_fsdp=False` plain tensors.

    Raises:
        ConfigError: shards of one machine where machines differ.
    """
    if (kernels := kernels_of(config)) != "none":
        from phase2_triton.apply import apply_kernels

        for line in apply_kernels(model, kernels, run.device.type):
            run.print0(line)
    checkpoint_activations(model, config.fsdp_activation_checkpointing)
    if not config.use_fsdp:
        return model
    if config.compile:
        for block in model.blocks:
            block.compile()
    run.autocasts = False  # parameters are cast when they are gathered: half the bytes on the wire
    how: dict[str, Any] = {
        "mesh": rank_mesh(config, run),
        "mp_policy": MixedPrecisionPolicy(param_dtype=run.dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(run.device.type != "cpu") if config.fsdp_cpu_offload else OffloadPolicy(),
    }
    parts = units(model, config)
    for part in reversed(parts):  # inner ones first
        fully_shard(part, reshard_after_forward=config.fsdp_reshard_after_forward, **how)
    fully_shard(model, **how)  # not freed after its forward, since its backward is what comes next
    prefetch([model, *parts], config.fsdp_prefetch)
    return model


def rank_mesh(config: FsdpConfig, run: Runtime) -> DeviceMesh:
    """The ranks as a line that shares one model, or as rows that each do: (replicas, shards)."""
    shards = config.shards(run.world_size, run.local_world_size)
    if run.world_size % shards:
        raise ConfigError(f"--fsdp_shard_size=node: machines of {shards} ranks do not make {run.world_size}: use all")
    if shards == run.world_size:
        return init_device_mesh(run.device.type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(run.device.type, (run.world_size // shards, shards), mesh_dim_names=("replicate", "shard"))


def units(model: GPT, config: FsdpConfig) -> list[nn.Module]:
    """The modules that are gathered and freed as one, in the order in which they begin to run; the root has the rest.

    By size: going up from the leaves, a module with submodules is a unit as soon as so many parameters are in it that
    no unit inside it has (as torch's `size_based_auto_wrap_policy`). A single layer never is one, because kernels read
    the weights of layers from the module around them; and a block that is computed again in the backward is one or
    none, because a unit inside it would be gathered once more for that.
    """
    if config.fsdp_wrap == "block":
        return list(model.blocks)
    found: list[nn.Module] = []
    again = [model.blocks[i] for i in checkpointed(config.fsdp_activation_checkpointing, len(model.blocks))]

    def left_over(module: nn.Module) -> int:
        inner = [] if module in again else list(module.children())
        left = sum(p.numel() for p in module.parameters(recurse=not inner)) + sum(map(left_over, inner))
        callable_alone = not isinstance(module, nn.ModuleDict | nn.ModuleList | GPT) and any(module.children())
        if callable_alone and left >= config.fsdp_min_num_params:
            found.append(module)
            return 0
        return left

    left_over(model)
    return [module for module in model.modules() if module in found]


def prefetch(parts: list[nn.Module], ahead: int) -> None:
    """Tell each unit which ones to gather while it computes: the next ones, and in the backward those before it."""
    for i, part in enumerate(parts if ahead else []):
        assert isinstance(part, FSDPModule)
        part.set_modules_to_forward_prefetch(parts[i + 1 : i + 1 + ahead])  # type: ignore[arg-type]
        part.set_modules_to_backward_prefetch(parts[max(0, i - ahead) : i][::-1])  # type: ignore[arg-type]


@torch.no_grad()
def init_shards(model: GPT, config: FsdpConfig, run: Runtime, weights: Mapping[str, Tensor] | None = None) -> None:
    """Give a model from `shard_model` memory for this rank's slices, and fill them one parameter at a time.

    Each parameter is drawn, or read, whole, and the slice is kept: the same weights at every number of ranks. (To seed
    a generator and let every rank draw its own slice gives other weights at every number of ranks, and ranks with the
    same numbers.) The most a rank holds is its share and the largest parameter.

    Args:
        weights: by parameter name; None draws them as the baseline does.
    """
    if next(model.parameters()).is_meta:
        model.to_empty(device="cpu" if config.fsdp_cpu_offload else run.device)
    if config.init_from == "resume":
        return  # every value comes from the checkpoint
    for name, param in model.named_parameters():
        if weights is None:
            copy_slice(param, initial_value(name, param.shape, model.config.n_layer, config.seed))
        else:
            copy_slice(param, weights[name])


@torch.no_grad()
def copy_slice(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's rows of a whole tensor; all of it where nothing is sharded."""
    if isinstance(target, DTensor) and target.dim():
        local = target.to_local()
        mesh = target.device_mesh
        shards, index = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
        begin = min(index * -(-len(whole) // shards), len(whole))  # all but the last have ceil(rows / shards)
        local.copy_(whole[begin : begin + len(local)])
    else:
        (target.to_local() if isinstance(target, DTensor) else target).copy_(whole)


def data_parallel(model: GPT, config: FsdpConfig, run: Runtime) -> nn.Module:
    """The module to call: the sharded model itself, or what the baseline makes of a whole one."""
    if config.use_fsdp:
        return model
    replica: nn.Module = torch.compile(model) if config.compile else model  # type: ignore[assignment]
    return DDP(replica, gradient_as_bucket_view=True) if run.world_size > 1 else replica


def set_gradient_sync(replica: nn.Module, config: FsdpConfig, last: bool) -> None:
    """Before each micro-batch: reduce gradients after its backward, or let each rank add up whole ones until the last.

    With `fsdp_sync_every_micro_batch` slices are added up instead; replicas are still averaged once a step.
    """
    if isinstance(replica, FSDPModule):
        replica.set_requires_gradient_sync(last or config.fsdp_sync_every_micro_batch)
        replica.set_requires_all_reduce(last)
    elif isinstance(replica, DDP):
        replica.require_backward_grad_sync = last


def local_grads(replica: nn.Module) -> list[Tensor]:
    """This rank's slices of the gradients. A rank may hold nothing of a small parameter: an empty slice."""
    return [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in replica.parameters() if p.grad is not None
    ]


def shard_group(replica: nn.Module) -> dist.ProcessGroup | None:
    """The ranks whose slices together are the model; None where every rank has all of it."""
    param = next(replica.parameters())
    return param.device_mesh.get_group(-1) if isinstance(param, DTensor) else None
