"""Read this rank's part of every parameter from the safetensors files of a Hugging Face model."""

from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from evaluation.hf_tensor_parallel import Part
from nanoGPT.checkpoint.hugging_face import list_hf_files
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.errors import ConfigError
from phase3_fsdp import fsdp

MXFP4_GROUP = 32  # numbers with one scale
Rows = EllipsisType | int | tuple[int, slice]  # an index into a parameter


@torch.no_grad()
def fill_parts(model: nn.Module, folder: Path, device: torch.device, parts: dict[str, Part]) -> None:
    """Allocate the parameters, and read this rank's part of each from the safetensors files of a directory.

    Besides the parameters, at most one tensor is in memory at a time: a rank's part of one parameter, or one expert's.

    Args:
        model: on the meta device, spread over the ranks.
        folder: with the files.
        device: of the parameters.
        parts: with tensor parallelism, this rank's part of each parameter that is divided.

    Raises:
        ConfigError: a parameter has no tensor in the files, or another shape.
    """
    fsdp.allocate_shards(model, device)
    model.tie_weights()  # type: ignore[operator]  # one parameter again
    files = {key: file for file in list_hf_files(folder) for key in sorted(safe_open(file, "pt").keys())}
    for name, param in model.named_parameters():
        begin, end = fsdp.own_rows(param) if param.dim() else (0, 1)
        target = local_shard(param)
        for rows, content in read_rows(files, name, begin, end, folder, parts.get(name)):
            if content.shape != target[rows].shape:
                raise ConfigError(
                    f"{folder} has {name} of another shape than its config.json: copy the files again", on_one_rank=True
                )
            target[rows] = content
            del content  # before the next one is read
    for name, buffer in model.named_buffers():
        if name in files:
            buffer.copy_(read_slice(files[name], name, 0, len(buffer)))


def read_rows(
    files: dict[str, Path], name: str, begin: int, end: int, folder: Path, part: Part | None = None
) -> Iterator[tuple[Rows, Tensor]]:
    """Yield rows [begin, end) of a parameter: which of these rows, and their content.

    A mixture of experts has one parameter for all experts of a layer, with one row per expert. A file may have one
    tensor per matrix of an expert instead, or the 4-bit numbers of gpt-oss (MXFP4), which become bfloat16 here, one
    expert after the other.

    Args:
        files: the file of each tensor.
        name: of the parameter.
        begin, end: the rows.
        folder: of the files.
        part: with tensor parallelism, this rank's part of each row, or of the parameter.

    Raises:
        ConfigError: the files have the parameter in no form that this program knows.
    """
    if name in files:
        yield ..., read_slice(files[name], name, begin, end) if part is None else read_part(files[name], name, part)
        return
    is_packed = f"{name}_blocks" in files and f"{name}_scales" in files
    layer, _, kind = name.rpartition(".")
    matrices = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
    for expert in range(begin, end):
        keys = [f"{layer}.{expert}.{matrix}.weight" for matrix in matrices]
        if is_packed:
            yield expert - begin, read_packed_expert(files, name, expert, part)
        elif keys and all(key in files for key in keys):
            yield from read_expert([files[key] for key in keys], keys, expert - begin, part)
        else:
            raise ConfigError(
                f"{folder} has no tensor for {name}: this program cannot read the files of this architecture, or one "
                "is missing; copy the files again, or use another model",
                on_one_rank=True,
            )


def read_expert(paths: list[Path], keys: list[str], row: int, part: Part | None) -> Iterator[tuple[Rows, Tensor]]:
    """Yield one matrix of an expert after the other: where it is in the parameter of all experts, and its content."""
    length = 0
    for number, (path, key) in enumerate(zip(paths, keys, strict=True)):
        content = read_slice(path, key, 0, None) if part is None else read_part(path, key, part.select_matrix(number))
        yield (row, slice(length, length + len(content))), content
        length += len(content)


def read_packed_expert(files: dict[str, Path], name: str, expert: int, part: Part | None) -> Tensor:
    """Return a matrix of an expert in 4 bits (MXFP4), or a rank's part of it, (inputs, outputs), in bfloat16.

    The files have (experts, outputs, inputs / 32, 16) bytes: two numbers per byte, and 32 numbers with one scale. If a
    part of the inputs does not begin or end with a group of 32, the full group is read.
    """
    outputs, groups, inputs = slice(None), slice(None), slice(None)
    if part is not None:
        if len(part.ranges) > 1:
            raise ConfigError(
                f"{name} has 4-bit experts in parts that tensor parallelism cannot read: use --spread=fsdp"
            )
        begin, end = part.ranges[0]  # gates and other outputs of gpt-oss alternate, so one range has both
        if part.dim == 2:
            outputs = slice(begin, end)
        else:
            groups = slice(begin // MXFP4_GROUP, -(-end // MXFP4_GROUP))
            inputs = slice(begin % MXFP4_GROUP, begin % MXFP4_GROUP + end - begin)
    packed = []
    for key in (f"{name}_blocks", f"{name}_scales"):
        with safe_open(files[key], "pt") as opened:
            packed.append(opened.get_slice(key)[expert : expert + 1, outputs, groups])
    matrix: Tensor = convert_moe_packed_tensors(*packed)[0, inputs]
    return matrix


def read_slice(file: Path, key: str, begin: int, end: int | None) -> Tensor:
    """Return rows [begin, end) of a tensor in a safetensors file."""
    with safe_open(file, "pt") as opened:
        part = opened.get_slice(key)
        tensor: Tensor = part[begin:end] if part.get_shape() else opened.get_tensor(key)
        return tensor


def read_part(file: Path, name: str, part: Part) -> Tensor:
    """Return a part of a tensor in a safetensors file. Only this part is read from the disk."""
    with safe_open(file, "pt") as opened:
        source: Any = opened.get_slice(name)
        return part.take(source, source.get_shape())
