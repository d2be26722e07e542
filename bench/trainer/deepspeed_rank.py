"""Train on one rank with DeepSpeed, as `train_step` of our trainers does. `against_deepspeed.py` starts the ranks."""

import contextlib
import gc
import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from nanoGPT.checkpoint.weights import tokenizer_rows
from nanoGPT.dataset import TRAIN, TokenData, to_device
from nanoGPT.distributed.runtime import reseed
from nanoGPT.metrics.ledger import CollectiveCounter
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.optim import configure_adamw, learning_rate, set_learning_rate
from nanoGPT.train_config import TrainConfig

MEASURED_STEP = 2  # as in the ledger


def import_deepspeed() -> Any:
    """Return the module `deepspeed`, without the extension for shared memory that it would compile on a CPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it can wait for a stale lock forever
    return deepspeed


def train_with_deepspeed(config: TrainConfig, json: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank as `train_step` of the trainers does. Collective.

    Returns:
        losses: of all steps.
        collectives: of the third step, as `CollectiveCounter` counts them.
        live_bytes: bytes of all tensors that this rank has created and that are alive after that step.
    """
    deepspeed = import_deepspeed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if config.device == "cuda" else torch.device("cpu")
    data = TokenData.from_config(config)
    before = set(live_storages())
    model = GPT(GPTConfig.from_dict({**asdict(config), "vocab_size": tokenizer_rows(data.tokenizer)}))
    model.init_weights(config.seed)
    optimizer = configure_adamw(model.to(device), config)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=json)
    losses, collectives, live_bytes = [], [], 0
    for step in range(config.max_iters):
        set_learning_rate(optimizer, learning_rate(step, config))
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        with CollectiveCounter() as counter:
            for micro_batch in range(rank, config.gradient_accumulation_steps, ranks):
                x, y = to_device(data.batch("train", TRAIN, step, micro_batch), device)
                reseed(device, config.seed, step, micro_batch)
                loss = engine(x, y)
                loss_sum += loss.detach()
                engine.backward(loss)
                engine.step()
        del x, y, loss
        if step == MEASURED_STEP:
            collectives = list(counter.rows.values())
            live_bytes = sum(size for key, size in live_storages().items() if key not in before)
        dist.all_reduce(loss_sum)
        losses.append(loss_sum.item() / config.gradient_accumulation_steps)
    return {"losses": losses, "collectives": collectives, "live_bytes": live_bytes}


def live_storages() -> dict[int, int]:
    """Return the bytes of every storage that a tensor uses, by its address. Views of one storage count once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    sizes: dict[int, int] = {}
    for storage in (each.untyped_storage() for each in tensors if each.device.type != "meta"):
        with contextlib.suppress(RuntimeError):  # the storage of a fake tensor has no address
            sizes[storage.data_ptr()] = storage.nbytes()
    return {address: size for address, size in sizes.items() if size}
