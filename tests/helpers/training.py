"""What several test files share: tiny configurations, training on real ranks, and programs run from the forkserver."""

import importlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoGPT.train_config import PACKAGE, TrainConfig
from phase1_zero1.parallelize import Zero1Config
from phase2_triton.apply import TritonConfig
from phase3_fsdp.fsdp import FsdpConfig
from workshop.ranks import PRELOADED, losses, run_on_ranks, without_main_module

ROOT = PACKAGE.parent
CONFIGS: dict[str, type[TrainConfig]] = {
    "nanoGPT": TrainConfig,
    "phase1_zero1": Zero1Config,
    "phase2_triton": TritonConfig,
    "phase3_fsdp": FsdpConfig,
}
TINY: dict[str, Any] = {
    "dataset": "shakespeare_char",
    "device": "cpu",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 16,
    "batch_size": 2,
    "gradient_accumulation_steps": 8,
    "dropout": 0.2,
    "max_iters": 12,
    "warmup_iters": 2,
    "eval_interval": 5,
    "eval_iters": 3,
    "log_interval": 1,
    "always_save_checkpoint": True,
}


def tiny(phase: str, out_dir: Path, **changes: Any) -> TrainConfig:
    """A configuration that trains in about a second; `changes` win."""
    return CONFIGS[phase](**{**TINY, "out_dir": str(out_dir), **changes})


def call_train(phase: str, config: TrainConfig) -> None:
    Path(config.out_dir).mkdir(parents=True, exist_ok=True)
    importlib.import_module(f"{phase}.train").train(config)


def train(phase: str, ranks: int, config: TrainConfig, timeout: float = 120) -> dict[int, float]:
    """Train on real ranks; the losses by step."""
    device = "cuda" if config.device == "cuda" else "cpu"
    run_on_ranks(call_train, ranks, phase, config, timeout=timeout, show=False, device=device)
    return losses(config.out_dir)


def gap(a: dict[int, float], b: dict[int, float]) -> float:
    """The largest difference of two loss curves, which must have the same steps."""
    assert a.keys() == b.keys() and a, (sorted(a), sorted(b))
    return max(abs(a[step] - b[step]) for step in a)


@dataclass
class Ended:
    """How a program ended, and what it wrote to standard output and standard error."""

    code: int
    output: str


def run_program(*words: str, timeout: float = 100, **environment: str) -> Ended:
    """Run a script of the repository as `python script words...` does, from a process that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.NamedTemporaryFile("r", errors="replace") as file, without_main_module():
        process = context.Process(target=be_program, args=(words, file.name, {**os.environ, **environment}))
        process.start()
        process.join(timeout)
        alive = process.is_alive()
        process.kill()
        process.join()
        output = file.read()
    assert not alive, f"{words} had not ended after {timeout} s:\n{output}"
    assert process.exitcode is not None
    return Ended(process.exitcode, output)


def be_program(words: tuple[str, ...], output: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.argv = list(words)
    code = 0
    try:
        if words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def assert_refused(ended: Ended, *words: str) -> str:
    """Assert that a program ended with code 2, one sentence that holds `words`, and no traceback."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.output, ended.output
    sentences = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1, ended.output
    for word in words:
        assert word in sentences[0], (word, sentences[0])
    return sentences[0]
