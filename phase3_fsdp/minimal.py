"""FSDP in about 180 lines of torch, for any nn.Module whose forward returns the loss.

    OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc_per_node=2 -m phase3_fsdp.minimal
    OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc_per_node=2 -m phase3_fsdp.minimal --save_to=out/minimal

The functions above `main` need only torch: copy them into your project. `main` uses them to train this repository's GPT
on Shakespeare. It prints the losses of `make baseline DEVICE=cpu ARGS="--decay_lr=False --log_interval=1"`.
IMPLEMENTATION.md lists what `train.py` adds.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.modules.module import register_module_parameter_registration_hook


def join_ranks() -> torch.device:
    """Join the process group of torchrun, and return the device of this rank.

    The ranks use NCCL if each of them has a GPU, else gloo on the CPU.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


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


@torch.no_grad()
def build_sharded_model(
    build: Callable[[], nn.Module],
    find_units: Callable[[Any], Iterable[nn.Module]],
    fill: Callable[[str, Tensor], object],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Build a model whose parameters are sharded over all ranks. Peak memory: the shards and one full parameter.

    Args:
        build: returns the model. Its parameters get no memory here, so `build` cannot read their values.
        find_units: returns the modules that FSDP all-gathers one at a time, usually the blocks.
        fill: writes the initial values of one parameter into a full tensor, given its name, the same on all ranks.
        device: of this rank.
        dtype: of the computation and of the all-gathers. Shards and gradient reductions are fp32. Inputs of the model
            and of each unit in other floating-point dtypes are converted too; integers are not.

    Raises:
        ValueError: a parameter has no elements or is complex, or `fill` has not written all of it; a buffer has no
            values; or two units share a parameter.
    """
    with put_parameters_on_meta():
        model = build()
    if names := [name for name, param in model.named_parameters() if not param.numel()]:
        raise ValueError(f"give {', '.join(names)} a size: FSDP cannot shard parameters without elements, or lazy ones")
    if names := [name for name, param in model.named_parameters() if param.is_complex()]:
        raise ValueError(f"store {', '.join(names)} as real and imaginary parts: FSDP converts complex numbers to real")
    if names := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(f"compute the buffers {', '.join(names)} without parameters, which have no values in `build`")
    for param in model.parameters():
        is_low = param.requires_grad and param.dtype in (torch.bfloat16, torch.float16)
        param.data = (param.float() if is_low else param).contiguous()  # FSDP supports no other memory format
    attributes = [vars(param) for param in model.parameters()]  # they may select the parameter group
    shard_units(model, find_units(model), device, dtype)
    if len(attributes) != len(list(model.parameters())):
        raise ValueError("two units share a parameter, which FSDP would copy: share it only outside of the units")
    init_shards(model, fill, device)
    for param, values in zip(model.parameters(), attributes, strict=True):
        vars(param).update(values)
    return model


def shard_units(model: nn.Module, units: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> None:
    """Call `fully_shard` on every unit, then on the root, which has the parameters that no other unit has."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # also after an evaluation


@torch.no_grad()
def init_shards(model: nn.Module, fill: Callable[[str, Tensor], object], device: torch.device) -> None:
    """Allocate this rank's shards, and fill them one parameter at a time. Copy the buffers from rank 0."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device=device)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        buffer.copy_(buffers[name])
        copy_from_rank_0(buffer)  # `build` may draw random values
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        full = torch.full(param.shape, torch.nan, device=device)
        fill(name, full)
        if full.isnan().any():
            raise ValueError(f"`fill` has not written all values of {name}")
        # With None, every rank takes its shard of its own full tensor, without communication.
        own = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
        param.to_local().copy_(own.to_local())


def copy_from_rank_0(buffer: Tensor) -> None:
    """Replace a buffer of every rank by that of rank 0. Collective."""
    value = buffer.contiguous()
    dist.broadcast(value.view(-1).view(torch.uint8), src=0)  # gloo and NCCL do not support every dtype
    buffer.copy_(value)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[tuple[Tensor, ...]], max_norm: float
) -> tuple[float, float]:
    """Accumulate the gradients of this rank's micro-batches, clip them, and update the shards. Collective.

    Args:
        model: from `build_sharded_model`. To compile it, call `model.compile()`.
        optimizer: over its parameters. torch's support DTensors, except Adafactor.
        micro_batches: the arguments of `model`, for at least one forward pass, and for equally many on every rank.
        max_norm: of the full gradient; 0 turns clipping off.

    Returns:
        The mean loss over the micro-batches of all ranks, and the norm of the full gradient before clipping.

    Raises:
        TypeError: the model is not sharded.
        ValueError: the ranks have other numbers of micro-batches, or other parameters have gradients; or the optimizer
            has a parameter that is not in the model.
    """
    if not isinstance(model, FSDPModule):
        raise TypeError("train_step needs the model that build_sharded_model has returned")
    known = set(model.parameters())
    if any(param not in known for group in optimizer.param_groups for param in group["params"]):
        raise ValueError("the optimizer has a parameter that is not in the model: create it after the model")
    device = next(model.parameters()).device
    check_same_on_all_ranks("numbers of micro-batches", [len(micro_batches)], device)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for i, micro_batch in enumerate(micro_batches):
        model.set_requires_gradient_sync(i == len(micro_batches) - 1)  # reduce gradients in the last backward pass only
        loss = model(*micro_batch)
        loss_sum += loss.detach()
        (loss / len(micro_batches)).backward()
    check_same_on_all_ranks("parameters with a gradient", [int(p.grad is not None) for p in model.parameters()], device)
    # The gradients are DTensors, so this all-reduces the sum of squares.
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    optimizer.step()
    model.zero_grad()  # also parameters that the optimizer does not have
    dist.all_reduce(loss_sum)
    assert isinstance(norm, DTensor)
    return loss_sum.item() / (len(micro_batches) * dist.get_world_size()), norm.full_tensor().item()


def check_same_on_all_ranks(what: str, values: list[int], device: torch.device) -> None:
    """Raise a ValueError if two ranks have different values. FSDP would hang, or add up different gradients."""
    low_and_high = torch.tensor([[-value for value in values], values], device=device)
    dist.all_reduce(low_and_high, dist.ReduceOp.MAX)
    if not torch.equal(-low_and_high[0], low_and_high[1]):
        raise ValueError(f"the ranks have different {what}: use the same modules, equally often, on every rank")


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the name of each parameter, without the prefix that torch's wrapper of activation checkpointing adds."""
    return {param: name.replace("_checkpoint_wrapped_module.", "") for name, param in model.named_parameters()}


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return the shards of all parameters, and the persistent buffers, as `model.<name>`. Tied ones appear once.

    Raises:
        ValueError: a module has other state (`get_extra_state`), which a checkpoint would not have.
    """
    persistent = model.state_dict().keys()
    if names := [name for name in persistent if name.endswith("_extra_state")]:
        raise ValueError(f"{names[0]} would not be saved: store this state in buffers")
    buffers = {name.replace("_checkpoint_wrapped_module.", ""): buffer for name, buffer in model.named_buffers()}
    state = {f"model.{name}": param.detach() for param, name in parameter_names(model).items()}
    return state | {f"model.{name}": buffer for name, buffer in buffers.items() if name in persistent}


def save(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the shards of every rank into a new directory, with the number of updates so far. Collective.

    Buffers are saved from rank 0, which also replaces those of the other ranks.

    Raises:
        FileExistsError: the directory has a checkpoint, which a kill during this save would damage.
    """
    state, options = model_state(model), dict[str, dict[str, Any]]()
    names = {param: f"optimizer.{name}" for param, name in parameter_names(model).items()}
    check_state(names, optimizer)
    for param, items in optimizer.state.items():
        state |= {f"{names[param]}.{item}": value for item, value in items.items()}
    for group in optimizer.param_groups:
        values = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        values = {key: values[key] for key in values.keys() - {"params", "foreach", "fused", "capturable"}}
        options |= {names[param]: values for param in group["params"]}
    check_new(path)
    for buffer in model.buffers():
        copy_from_rank_0(buffer)
    dcp.save(state | {"options": tuple(options.items()), "step": step}, checkpoint_id=path)  # DCP would flatten a dict


def check_new(path: str) -> None:
    """Raise a FileExistsError unless `save` can use this path."""
    if os.path.isfile(path) or os.path.exists(os.path.join(path, ".metadata")):
        raise FileExistsError(f"{path} is a file or has a checkpoint: choose a new directory, such as step-100")


def check_state(names: dict[Tensor, str], optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError if an item of the optimizer's state is a list, a tuple or a dict, or has a dot in its name."""
    for param, items in optimizer.state.items():
        for item, value in items.items():
            if "." in item or isinstance(value, list | tuple | dict):
                raise ValueError(
                    f"{names[param]}.{item} is nested: store a tensor or a number under a name without dots"
                )


@torch.no_grad()
def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read a checkpoint of any number of ranks into the shards of this rank, and return its step. Collective.

    torch unpickles parts of the checkpoint, which can execute code: load only files that you trust.
    """
    stored: dict[str, Any] = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state, places, progress = model_state(model), {}, dict[str, Any](options=None, step=None)
    shapes = {key: value.shape for key, value in state.items()}
    stored_shapes = {key: entry.size for key, entry in stored.items() if key.startswith("model.")}
    if differ := sorted({key.removeprefix("model.") for key, _ in shapes.items() ^ stored_shapes.items()}):
        raise ValueError(f"the model and {path} differ in the names or shapes of {', '.join(differ)}")
    dcp.load(progress, checkpoint_id=path)
    names = {param: f"optimizer.{name}" for param, name in parameter_names(model).items()}
    options = dict(progress["options"])
    for group in optimizer.param_groups:
        params = {names[param]: param for param in group["params"] if names[param] in options}
        load_options(group, [options[name] for name in params])
        optimizer.state.update({param: {} for param in params.values()})  # the checkpoint decides which state exists
        for key, entry in stored.items():
            name, _, item = key.rpartition(".")
            if name in params:
                state[key], places[key] = allocate_state(entry, item, params[name], group), (params[name], item)
    dcp.load(state, checkpoint_id=path)
    for key, (param, item) in places.items():
        optimizer.state[param][item] = state[key]
    return progress["step"]


def load_options(group: dict[str, Any], saved: list[dict[str, Any]]) -> None:
    """Copy the options that were saved for the parameters of a group. Schedulers refer to the group, so it stays."""
    for option, value in saved[0].items() if saved else ():
        if any(other.get(option) != value for other in saved):
            raise ValueError(f"one group has parameters with different saved values of {option}: use the saved groups")
        if isinstance(group.get(option), Tensor):
            group[option].fill_(value)
        else:
            group[option] = value


def allocate_state(stored: Any, item: str, param: Tensor, group: dict[str, Any]) -> Tensor | None:
    """Return memory for an item of saved optimizer state: a shard if it has the shape of its parameter."""
    if not isinstance(stored, TensorStorageMetadata):
        return None  # a Python value
    if stored.size == param.shape:
        return torch.zeros_like(param, dtype=stored.properties.dtype)
    on_cpu = item == "step" and not group.get("fused") and not group.get("capturable")  # where torch expects it
    return torch.zeros(stored.size, dtype=stored.properties.dtype, device="cpu" if on_cpu else param.device)


def main(
    max_iters: int = 20,
    micro_batches: int = 8,
    dtype: Literal["float32", "bfloat16"] = "float32",
    save_to: str = "",
    resume_from: str = "",
) -> None:
    """Train the GPT of this repository on Shakespeare, with the default configuration for a CPU.

    Args:
        max_iters: number of steps.
        micro_batches: per step, in total over all ranks.
        dtype: of the computation.
        save_to: directory for a checkpoint at the end; empty: save nothing.
        resume_from: directory of a checkpoint to resume from; empty: start from new weights.
    """
    from nanoGPT.dataset import TokenData, to_device
    from nanoGPT.errors import ConfigError
    from nanoGPT.job.command import read_launched_ranks
    from nanoGPT.model import GPT, GPTConfig, draw_initial_rows
    from nanoGPT.optim import configure_adamw
    from nanoGPT.train_config import TrainConfig

    rank, ranks = read_launched_ranks(micro_batches)
    if resume_from and not os.path.isfile(os.path.join(resume_from, ".metadata")):
        raise ConfigError(f"--resume_from={resume_from} has no .metadata: give a directory that --save_to has written")
    if save_to:
        check_new(save_to)
    device, config = join_ranks(), TrainConfig()
    data = TokenData(config)
    shape = GPTConfig.from_dict({**vars(config), "vocab_size": data.tokenizer["vocab_size"]})

    def fill(name: str, full: Tensor) -> None:
        draw_initial_rows(full, name, full.shape, shape.initial_std(name), config.seed)

    model = build_sharded_model(lambda: GPT(shape), lambda gpt: gpt.blocks, fill, device, getattr(torch, dtype))
    optimizer = configure_adamw(model, config)
    first_step = load(resume_from, model, optimizer) if resume_from else 0
    for step in range(first_step, max_iters):
        batches = [data.batch("train", step, i) for i in range(rank, micro_batches, ranks)]
        loss, norm = train_step(model, optimizer, [to_device(batch, device) for batch in batches], config.grad_clip)
        if rank == 0:
            print(f"step {step}  loss {loss:.6f}  gradient norm {norm:.4f}", flush=True)
    if save_to:
        save(save_to, model, optimizer, max(first_step, max_iters))
    dist.destroy_process_group()


if __name__ == "__main__":
    from nanoGPT.job.command import command_line, report_errors

    with report_errors():
        command_line(main, sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # a normal exit with gloo sometimes aborts: "terminate called without an active exception"
