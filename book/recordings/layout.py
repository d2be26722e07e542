"""Record where every parameter of GPT-2 is stored: in the buckets of ZeRO-1, the shards of FSDP, and a checkpoint.

The buckets and the shards are those of the phases' own code, on tensors without data. The positions in the files are
read from real checkpoints that 2, 4 and 8 processes have written.
"""

import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.plan.plan import MODELS
from bench.plan.trace import CPU, fake_process_group, suppress_output
from nanoGPT.checkpoint.shards import SafeReader
from nanoGPT.checkpoint.state import allocate_state
from nanoGPT.checkpoint.weights import PADDED_VOCAB
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.distributed.sharding import local_shard, row_range
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_optimizer
from phase1_zero1.parallelize import Zero1Config, shard_optimizer
from phase1_zero1.zero1 import Zero1Optimizer
from phase3_fsdp.fsdp import FsdpConfig, init_context, shard_model
from phase3_fsdp.sharded_checkpoint import ShardWriter
from workshop.ranks import run_on_ranks

WORLD_SIZES = (2, 4, 8)
GPT2 = GPTConfig(*MODELS["gpt2"], 1024, False, PADDED_VOCAB)


def shorten(name: str) -> str:
    """Return a parameter's name without the prefix that all of them have."""
    return name.removeprefix("transformer.")


def list_parameters(shape: GPTConfig) -> list[list[Any]]:
    """Return the name and the shape of every parameter."""
    with torch.device("meta"):
        model = GPT(shape)
    return [[shorten(name), list(param.shape)] for name, param in model.named_parameters()]


def list_buckets(shape: GPTConfig, ranks: int) -> list[dict[str, Any]]:
    """Return the buckets of ZeRO-1.

    Returns:
        For each bucket: params: their names in order, and slice: the number of elements of each rank's slice.
    """
    run = Runtime(0, 0, ranks, ranks, CPU, torch.float32)
    with suppress_output(), fake_process_group(ranks), FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(shape)
        names = {id(param): shorten(name) for name, param in model.named_parameters()}
        optimizer = shard_optimizer(model, Zero1Config(device="cpu", dtype="float32"), run)
        assert isinstance(optimizer, Zero1Optimizer)
        return [
            {"params": [names[id(param)] for param in bucket.params], "slice": bucket.flat_params.numel() // ranks}
            for bucket in optimizer.buckets
        ]


def save_state(folder: str, shape: GPTConfig) -> None:
    """Shard a model and its optimizer with FSDP, and write a checkpoint. Collective.

    Each element of a parameter contains its position in the flattened parameter, so that a reader can verify where it
    is. fp32 is exact for positions up to 2^24. The optimizer state contains zeros.
    """
    run = Runtime(dist.get_rank(), dist.get_rank(), dist.get_world_size(), dist.get_world_size(), CPU, torch.float32)
    config = FsdpConfig(device="cpu", dtype="float32")
    with init_context(config, run):
        model = GPT(shape)
    model = shard_model(model, config, run)
    model.to_empty(device="cpu")
    optimizer = configure_optimizer(model, config)
    allocate_state(optimizer)
    with torch.no_grad():
        for param in model.parameters():
            (begin, _), shard = row_range(len(param), run.world_size, run.rank), local_shard(param)
            first = begin * (param.numel() // len(param))
            shard.copy_(torch.arange(first, first + shard.numel()).view(shard.shape))
    ShardWriter(model, optimizer).write(NewFiles(Path(folder)))


def find_data(path: Path, offset: int, length: int) -> int:
    """Return the position of the first element of a shard in a file, in bytes.

    Each shard is an archive of `torch.save`, which is a ZIP file. It starts at `offset` and has `length` bytes.
    """
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(length)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entry = next(each for each in archive.infolist() if each.filename.endswith("data/0"))
    name_and_extra = content[entry.header_offset + 26 : entry.header_offset + 30]
    sizes = int.from_bytes(name_and_extra[:2], "little") + int.from_bytes(name_and_extra[2:], "little")
    return offset + entry.header_offset + 30 + sizes


def read_positions(folder: Path) -> dict[str, list[list[int]]]:
    """Return where a checkpoint stores each parameter and its moments.

    Returns:
        For each tensor, such as `model.wte.weight` or `optimizer.wte.weight.exp_avg`, its shards in the order of their
        rows: first row, number of the file, and position of the first element in bytes. File n is `__n_0.distcp`.
    """
    shards: dict[str, list[list[int]]] = {}
    for index, info in SafeReader(folder).read_metadata().storage_data.items():
        if index.fqn.endswith(".step"):
            continue
        row, number = (index.offset[0] if index.offset else 0), int(info.relative_path.split("_")[2])
        data = find_data(folder / info.relative_path, info.offset, info.length)
        shards.setdefault(index.fqn.replace("transformer.", ""), []).append([row, number, data])
    return {name: sorted(found) for name, found in sorted(shards.items())}


def record_layout(shape: GPTConfig, ranks: int) -> dict[str, Any]:
    """Return the layout on a number of ranks.

    Returns:
        ranks; buckets: of ZeRO-1 (`list_buckets`); rows: of one shard of each parameter, in FSDP; and files: the
        positions in the checkpoint (`read_positions`).
    """
    rows = {name: row_range(size[0], ranks, 0)[1] for name, size in list_parameters(shape)}
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(save_state, ranks, folder, shape, show=False, timeout=600)  # writes 1.5 GB
        files = read_positions(Path(folder))
    return {"ranks": ranks, "buckets": list_buckets(shape, ranks), "rows": rows, "files": files}


def record() -> dict[str, Any]:
    """Return the recording: the parameters of GPT-2 and their layout on 2, 4 and 8 ranks."""
    return {"parameters": list_parameters(GPT2), "layouts": [record_layout(GPT2, ranks) for ranks in WORLD_SIZES]}
