"""Start a run with one of ten typical faults of distributed training, to practice `make autopsy`.

    make fault NAME=hang                  # trains on a few ranks into out/faults/hang
    make autopsy RUN=out/faults/hang
    make fault                            # list the faults

A fault changes a few lines of the trainer at run time. The run uses the same launcher, watchdog and
diagnostics as every other run.
"""

import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.phases import load_config_class
from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.job.start import main as run_trainer_program
from nanoGPT.model import Block
from nanoGPT.optim import grad_norm
from nanoGPT.train_config import TrainConfig
from operate.launch import run_job
from operate.nodes import NodeConfig, Rendezvous
from workshop.imports import ROOT

FAULT_STEP = 4  # the step in which a fault begins
SMALL_CONFIG: dict[str, Any] = {
    "dataset": "shakespeare_char",
    "device": "cpu",
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 16,
    "batch_size": 2,
    "gradient_accumulation_steps": 6,
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "warmup_iters": 2,
    "max_iters": 12,
    "eval_interval": 12,
    "eval_iters": 2,
    "log_interval": 1,
    "stall_seconds": 5.0,
    "diagnostics_interval": 1,
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        description: what is wrong, in one sentence.
        package: the package of the trainer.
        plant: changes the trainer, given its module and this rank.
        ranks: number of ranks.
        fields: of the configuration that differ from SMALL_CONFIG.
        prepare: called with the run's directory and its configuration before the ranks start.
    """

    description: str
    package: str
    plant: Callable[[ModuleType, int], None]
    ranks: int = 2
    fields: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Path, TrainConfig], None] | None = None


def call_before_step(trainer: ModuleType, action: Callable[[torch.nn.Module, int], None]) -> None:
    """Call `action(model, step)` before every training step."""
    original = trainer.train_step

    def train_step(model: Any, optimizer: Any, scaler: Any, data: Any, step: int, config: Any, run: Any) -> Any:
        run.enter_stage("micro-batch 0", step)
        action(model, step)
        return original(model, optimizer, scaler, data, step, config, run)

    trainer.train_step = train_step  # type: ignore[attr-defined]


def plant_mismatched_collective(trainer: ModuleType, rank: int) -> None:
    def gather_weights(model: torch.nn.Module, step: int) -> None:
        if rank == 1 and step == FAULT_STEP:
            time.sleep(1)  # rank 0 waits when it is aborted: faulthandler may crash on the stack of a thread that runs
        if rank == 0 and step == FAULT_STEP:
            sum(param.full_tensor().sum() for param in model.parameters())  # type: ignore[attr-defined]

    call_before_step(trainer, gather_weights)


def plant_diverging_seeds(trainer: ModuleType, rank: int) -> None:
    def reinitialize(model: torch.nn.Module, step: int) -> None:
        if step == 0:
            torch.manual_seed(1337 + rank)
            torch.nn.init.normal_(next(model.parameters()), std=0.02)

    call_before_step(trainer, reinitialize)


def plant_nan(trainer: ModuleType, rank: int) -> None:
    def break_weight(model: torch.nn.Module, step: int) -> None:
        if rank == 1 and step == FAULT_STEP:
            with torch.no_grad():
                next(model.parameters())[0, 0] = float("nan")

    call_before_step(trainer, break_weight)


def plant_hang(trainer: ModuleType, rank: int) -> None:
    def wait_forever(_model: torch.nn.Module, step: int) -> None:
        while rank == 1 and step == FAULT_STEP:
            time.sleep(1)

    call_before_step(trainer, wait_forever)


def plant_wrong_device(trainer: ModuleType, rank: int) -> None:
    to_device = trainer.to_device

    def to_another_device(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        other = torch.device("meta" if device.type == "cpu" else "cpu")
        return to_device(batch, other if rank == 1 else device)

    trainer.to_device = to_another_device  # type: ignore[attr-defined]


def plant_local_norm(trainer: ModuleType, rank: int) -> None:
    trainer.grad_norm = lambda grads, _group=None: grad_norm(grads)  # type: ignore[attr-defined]


def plant_ready_twice(trainer: ModuleType, rank: int) -> None:
    forward = Block.forward

    def forward_twice(block: Block, x: Tensor, _cache: Any = None) -> Tensor:
        x = checkpoint(partial(forward, block), x, use_reentrant=True)
        return checkpoint(partial(forward, block), x, use_reentrant=True)

    Block.forward = forward_twice  # type: ignore[method-assign, assignment]


def plant_nothing(trainer: ModuleType, rank: int) -> None:
    """Leave the trainer unchanged: `corrupt_newest_checkpoint` damages the newest checkpoint before the run resumes."""


def plant_leak(trainer: ModuleType, rank: int) -> None:
    kept: list[Tensor] = []

    def keep_tensors(_model: torch.nn.Module, step: int) -> None:
        kept.append(torch.ones(500_000))  # 2 MB per step

    call_before_step(trainer, keep_tensors)


def plant_straggler(trainer: ModuleType, rank: int) -> None:
    last_end = None

    def compute_slowly(_model: torch.nn.Module, step: int) -> None:
        nonlocal last_end
        if rank == 1:
            begin = time.perf_counter()
            seconds = begin - last_end if last_end else 0.0  # of the last step, which is long on a busy machine
            while time.perf_counter() < begin + min(max(1.0, 4 * seconds), 10.0):
                time.sleep(0.05)
            last_end = time.perf_counter()

    call_before_step(trainer, compute_slowly)


def corrupt_newest_checkpoint(out_dir: Path, config: TrainConfig) -> None:
    """Train until two checkpoints exist, and flip a byte of the newer one."""
    start_ranks("plant_nothing", 2, config)
    newest = step_directories(out_dir)[0]
    path = max(newest.glob("*.distcp"), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


FAULTS = {
    "collective": Fault("only rank 0 all-gathers the weights", "phase3_fsdp", plant_mismatched_collective),
    "seeds": Fault("each rank initializes a parameter with its own seed", "nanoGPT", plant_diverging_seeds, 3),
    "nan": Fault("a weight of rank 1 becomes NaN", "nanoGPT", plant_nan, 3),
    "hang": Fault("rank 1 waits forever", "nanoGPT", plant_hang, 3),
    "device": Fault("rank 1 moves its batch to another device than the model", "nanoGPT", plant_wrong_device),
    "norm": Fault("each rank clips by the norm of its own shards", "phase3_fsdp", plant_local_norm),
    "ready_twice": Fault(
        "DDP with reentrant checkpointing of a block that is used twice", "nanoGPT", plant_ready_twice
    ),
    "checkpoint": Fault(
        "a byte of the newest checkpoint is flipped",
        "phase3_fsdp",
        plant_nothing,
        fields={"eval_interval": 6, "always_save_checkpoint": True},
        prepare=corrupt_newest_checkpoint,
    ),
    "leak": Fault(
        "tensors of every step are kept in a list", "nanoGPT", plant_leak, fields={"max_iters": 40, "eval_interval": 40}
    ),
    "straggler": Fault(
        "rank 1 computes slowly", "phase3_fsdp", plant_straggler, 3, {"stall_seconds": 30.0, "max_iters": 20}
    ),
}


def start_ranks(name: str, ranks: int, config: TrainConfig) -> int:
    """Start the ranks of a faulty run with the launcher's functions, and return the exit code."""
    return run_job(Rendezvous(NodeConfig(gpus=ranks)), ["-m", "workshop.faults", f"--as_rank_of={name}"], config)


def run_rank(name: str) -> None:
    """Plant the fault and train. This is the program of each rank."""
    fault = FAULTS.get(name) or next(each for each in FAULTS.values() if each.plant.__name__ == name)
    trainer = importlib.import_module(f"{fault.package}.train")
    fault.plant(trainer, int(os.environ["RANK"]))
    run_trainer_program(trainer.train, trainer.Config, str(ROOT / fault.package / "train.py"))


def main(name: str = "", as_rank_of: str = "") -> None:
    """Start a faulty run, or list the faults.

    Args:
        name: of the fault; empty: list all faults.
        as_rank_of: run as a rank of this fault; used by the launcher.
    """
    if as_rank_of:
        run_rank(as_rank_of)
    if not name:
        width = max(map(len, FAULTS))
        print("\n".join(f"{each:<{width}}  {fault.description}" for each, fault in FAULTS.items()))
        return
    if name not in FAULTS:
        raise ConfigError(
            f"NAME={name} is not a fault{did_you_mean(name, list(FAULTS)) or ': `make fault` lists all faults'}"
        )
    fault = FAULTS[name]
    out_dir = Path("out") / "faults" / name
    shutil.rmtree(out_dir, ignore_errors=True)
    out_dir.mkdir(parents=True)
    config_class = load_config_class(fault.package)
    config = config_class(**{**SMALL_CONFIG, **fault.fields, "out_dir": str(out_dir)})
    print(f"{name}: {fault.description}; training on {fault.ranks} ranks", flush=True)
    if fault.prepare:
        fault.prepare(out_dir, config)
        config.init_from = "resume"
    code = start_ranks(name, fault.ranks, config)
    print(f"the run ended with exit code {code}: find the cause with `make autopsy RUN={out_dir}`")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
