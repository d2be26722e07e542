"""The configuration of an evaluation with problems."""

from dataclasses import dataclass
from typing import Literal

import tyro

from evaluation.problems import GENERATED
from evaluation.prompts import PromptForm
from nanoGPT.errors import ConfigError
from nanoGPT.train_config import StepChoice

DEFAULT_TOKENS = 30_000


@dataclass
class SolveConfig:
    """Solve problems with a model that is spread over the ranks, and write the answers and the scores."""

    problems: str = GENERATED
    """file or directory of problems (.json of ARC, .jsonl), or arc-generated: ARC tasks with known answers"""
    out_dir: str | None = None
    """the model: directory of a run, of nanoGPT's ckpt.pt or of a Hugging Face model, or gpt2; None: the newest run"""
    resume_step: StepChoice = None
    """the checkpoint of the run: its number of updates, or best (lowest validation loss); None: the newest"""
    to: str | None = None
    """directory of the answers; the same command continues there after a kill; None: out/answers-<model>-<problems>"""
    start: int = 0
    """number of the first problem"""
    num: int = 10
    """number of problems"""
    tokens: int | None = None
    """maximum number of tokens per answer, within the context of the model; None: 30,000, or as many as fit"""
    prompt: PromptForm = "plain"
    """plain | chat (the tokenizer's template) | harmony (the format of gpt-oss)"""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """text that ends an answer; repeat it for several texts; none: a blank line for ARC tasks with plain prompts"""
    attempts: int = 1
    """answers per problem, for pass@k: k is a power of two, 10, 100 or this number; above 1 they need a temperature"""
    temperature: float = 0.0
    """sampling temperature; 0 always takes the most likely token"""
    seed: int = 1337
    """random seed of the sampling"""
    spread: Literal["auto", "fsdp", "offload", "tp"] = "auto"
    """auto | fsdp (all-gather each layer) | offload (fsdp with weights in CPU memory) | tp (tensor parallelism)"""
    batch_size: int = 8
    """sequences at a time: per rank with fsdp and offload, in total with tp"""
    skip_bad: bool = False
    """skip malformed problems instead of stopping"""
    gpus: int = 0
    """ranks to start; 0: one per GPU, or one on the CPU. torchrun starts ranks itself."""
    device: str = "auto"
    """auto | cpu | cuda | mps"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of weights and cache; auto: bfloat16 on a GPU that supports it, float16 on other GPUs, float32 elsewhere"""


def validate(config: SolveConfig) -> None:
    """Check the values of a configuration.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """
    for name, minimum in (("start", 0), ("num", 1), ("tokens", 1), ("attempts", 1), ("batch_size", 1), ("gpus", 0)):
        if (value := getattr(config, name)) is not None and value < minimum:
            raise ConfigError(f"--{name}={value} is out of range: use {minimum} or more")
    if not 0 <= config.temperature < 1e9:
        raise ConfigError(f"--temperature={config.temperature} is out of range: use a value in [0, 1e9)")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"--seed={config.seed} is out of range: use a value in [0, 2**63)")
    if config.attempts > 1 and config.temperature == 0:
        raise ConfigError(
            f"--attempts={config.attempts} with --temperature=0 gives the same answer every time: use --temperature=0.7"
        )
    if escaped := [text for text in config.stop if "\\n" in text]:
        raise ConfigError(
            f"--stop={escaped[0]} contains a backslash, and no line end: in a shell, write --stop=$'{escaped[0]}'"
        )
    if "" in config.stop:
        raise ConfigError("--stop is empty, so every answer would be empty: remove it, or give a text")
