"""Sharded checkpoints: every rank writes its shards, and any number of ranks can read them.

The keys contain parameter names, and the values are DTensors. torch's Distributed Checkpoint (DCP) asks a DTensor which
part of the full tensor it stores. `nanoGPT.checkpoint.shards` writes and reads the files.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nanoGPT.checkpoint import shards
from nanoGPT.checkpoint.directory import CheckpointDirectory
from nanoGPT.checkpoint.manifest import Checkpoint, Manifest, NewFiles
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.distributed.sharding import local_shard
from nanoGPT.errors import DivergedRanks, NonFiniteLoss, SaveError
from nanoGPT.observers import Observer
from nanoGPT.optim import allocate_state
from phase3_fsdp.fsdp import copy_own_rows


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a training state as `model.<param>` and `optimizer.<param>.<item>`.

    A tied parameter appears under one name. After a forward without a backward, as in an evaluation, the root's
    parameters are still unsharded, and the optimizer has no state for these tensors. So all units are resharded first.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    state = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        if param in optimizer.state:
            state |= {f"optimizer.{name}.{item}": value for item, value in optimizer.state[param].items()}
    return state


def make_dtensor_like(value: Tensor, shard: Tensor) -> Tensor:
    """Return `shard` as a DTensor with the layout of `value`, or unchanged if `value` is no DTensor.

    The shard may be on another device than the mesh.
    """
    return DTensor(shard, value._spec, requires_grad=False) if isinstance(value, DTensor) else shard


def save_shards(files: NewFiles, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write this rank's shards into a new checkpoint; rank 0 also writes the index. Collective."""
    shards.write_shards(files, training_state(model, optimizer))


def make_saver(
    checkpoints: CheckpointDirectory, model: nn.Module, optimizer: torch.optim.Optimizer, run: Runtime, is_async: bool
) -> Callable[[int, Manifest], Path]:
    """Return a function of (step, fields) that saves a checkpoint after `step` updates, and returns its path.

    `fields` are those of the manifest.
    """
    if is_async:
        saver = AsyncSaver(checkpoints, model, optimizer, run)
        run.observers.members.append(saver)  # it waits for the last save at the end of the run
        return saver.begin_save
    return lambda step, fields: checkpoints.save(step, lambda files: save_shards(files, model, optimizer), fields)


class AsyncSaver(Observer):
    """Saves checkpoints in another thread, while training continues.

    A save copies this rank's shards to CPU memory, and then writes the copy. Training waits only for the copy, and for
    the save before it if that is not complete, because all saves use the same CPU memory. The memory is pinned if the
    shards are on a GPU. At the end of a run, the saver waits for its last save.
    """

    def __init__(
        self, checkpoints: CheckpointDirectory, model: nn.Module, optimizer: torch.optim.Optimizer, run: Runtime
    ) -> None:
        super().__init__(None)
        self.checkpoints, self.model, self.optimizer, self.run = checkpoints, model, optimizer, run
        self.buffers: dict[str, Tensor] = {}
        self.cpu_state: dict[str, Tensor] = {}
        self.executor = ThreadPoolExecutor(1)
        self.pending_save: Future[None] | None = None

    def begin_save(self, step: int, fields: Manifest) -> Path:
        """Begin to save a checkpoint, and return its path, which will exist later. Collective.

        Raises:
            SaveError: as `CheckpointDirectory.save`, also for the save before this one.
        """
        self.wait_for_save()
        final, is_saved = self.checkpoints.prepare_save(step, fields)
        if not is_saved:
            with self.checkpoints.raise_save_error(final):
                self.checkpoints.run.call_on_all(self.copy_to_cpu)
            self.pending_save = self.executor.submit(self._write, final, step, fields)
        return final

    def _write(self, final: Path, step: int, fields: Manifest) -> None:
        if self.run.device.type == "cuda":
            torch.cuda.set_device(self.run.device)  # another thread would use GPU 0, and create a context on it
        try:
            self.checkpoints.write_checkpoint(
                final, step, lambda files: shards.write_shards(files, self.cpu_state), fields
            )
        except Exception:
            self.run.request_save()  # so that `begin_save` raises this error soon, before more work is lost
            raise

    def wait_for_save(self) -> None:
        """Wait until the save in progress is complete. Collective.

        Raises:
            SaveError: the save failed.
        """
        pending_save, self.pending_save = self.pending_save, None
        if pending_save:
            pending_save.result()

    def end(self, error: BaseException | None) -> None:
        """Wait for the last save, also if all ranks have raised the same error at a later step.

        After other errors it does not wait, because another rank may be dead.
        """
        if error is None:
            self.wait_for_save()
        elif isinstance(error, DivergedRanks | NonFiniteLoss):
            with contextlib.suppress(SaveError):
                self.wait_for_save()

    def copy_to_cpu(self) -> None:
        """Copy this rank's shards to CPU memory."""
        cpu_state, devices = {}, set()
        for key, value in training_state(self.model, self.optimizer).items():
            shard = local_shard(value)
            devices.add(shard.device.type)
            if key not in self.buffers:
                self.buffers[key] = torch.empty_like(shard, device="cpu", pin_memory=shard.device.type != "cpu")
            self.buffers[key].copy_(shard, non_blocking=True)
            cpu_state[key] = make_dtensor_like(value, self.buffers[key])
        if devices - {"cpu"}:  # copies from a GPU are asynchronous
            torch.accelerator.synchronize()
        self.cpu_state = cpu_state


def load_shards(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint of any phase and any number of ranks into a sharded model and its optimizer. Collective.

    Raises:
        ConfigError: the parameters in the checkpoint are not those of the model.
    """
    allocate_state(optimizer)
    state = training_state(model, optimizer)
    loaded = shards.load_shards(checkpoint, "fsdp", state, copy_own_rows)
    for name, param in model.named_parameters():
        if not any(key.startswith(f"optimizer.{name}.") for key in loaded):
            optimizer.state[param].clear()  # a float16 run that has skipped all its steps saves no optimizer state
