"""Write text with a trained model, as it is drawn.

    python -m nanoGPT.sample                                        # the newest run under out/
    python -m nanoGPT.sample --out_dir=out/my-run --start="ROMEO:" --temperature=0.8 --top_k=50
    python -m nanoGPT.sample --out_dir=gpt2 --start=FILE:prompt.txt  # OpenAI's weights; a prompt from a file

The text that fits into the model's context is drawn with a cache of keys and values.
"""

import codecs
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoGPT.checkpoint.hugging_face import GPT2_VOCAB
from nanoGPT.checkpoint.manifest import step_directories
from nanoGPT.checkpoint.state import load_weights, read_full_state
from nanoGPT.checkpoint.weights import find_newest, read_weights
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.distributed.runtime import pick_device
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.tokenizer import CharTokenizer, Gpt2Tokenizer, Tokenizer, load_tokenizer


@dataclass
class SampleConfig:
    """What to write with."""

    out_dir: str | None = None
    """a run, a Hugging Face or nanoGPT directory, or gpt2 by name; None: the newest run under out/"""
    start: str | None = None
    """the text to continue; FILE:name reads it from a file; None: a newline, or the first character if there is none"""
    num_samples: int = 1
    """texts to write"""
    max_new_tokens: int = 500
    """tokens per text"""
    temperature: float = 0.8
    """0 always takes the likeliest token; higher is wilder"""
    top_k: int = 200
    """draw among the k likeliest tokens"""
    seed: int = 1337
    """decides what is drawn"""
    device: str = "auto"
    """auto | cpu | cuda | mps"""


def newest_run() -> str:
    """Return the run under out/ whose checkpoint is the newest; runs that are training may delete theirs meanwhile."""
    saved: dict[Path, float] = {}
    for run in (Path("out"), *Path("out").glob("*")):
        with contextlib.suppress(FileNotFoundError, IndexError):
            saved[run] = step_directories(run)[0].stat().st_mtime
    if not saved:
        raise ConfigError("there is no run with a checkpoint under out/: train one with `make baseline`")
    return str(max(saved, key=lambda run: saved[run]))


def load(source: str) -> tuple[GPT, Tokenizer, int]:
    """A model, its tokenizer, and how many ids the tokenizer has."""
    if (Path(source) / "checkpoints").is_dir():
        checkpoint = find_newest(Path(source))
        shape = GPTConfig.of(checkpoint.manifest["model_args"])
        weights = read_full_state(checkpoint.path).model
        identity = checkpoint.manifest["data"]["tokenizer"]
        tokenizer, ids = load_tokenizer(identity), identity["vocab_size"]
    else:
        shape, weights = read_weights(source)
        if shape.vocab_size < GPT2_VOCAB:
            raise ConfigError(
                f"{source} does not say which characters its {shape.vocab_size} ids are: sample from a run"
            )
        tokenizer, ids = Gpt2Tokenizer(), GPT2_VOCAB
    model = GPT(shape)
    load_weights(model, weights)
    return model.eval(), tokenizer, ids


def read_start(start: str | None, tokenizer: Tokenizer) -> str:
    """Return the text to continue.

    Raises:
        ConfigError: its file cannot be read.
    """
    if start is None:
        if isinstance(tokenizer, CharTokenizer) and "\n" not in tokenizer.ids:
            return tokenizer.characters[:1]
        return "\n"
    if not start.startswith("FILE:"):
        return start
    try:
        return Path(start[5:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--start={start} cannot be read ({error}): name a UTF-8 text file") from None


def stream(tokenizer: Tokenizer, ids: list[int], decoder: codecs.IncrementalDecoder) -> str:
    """Text of the next ids; a character whose bytes are spread over tokens waits for its last one."""
    if isinstance(tokenizer, CharTokenizer):
        return tokenizer.decode(ids)
    assert isinstance(tokenizer, Gpt2Tokenizer)
    return decoder.decode(b"".join(tokenizer.bpe.decode_single_token_bytes(i) for i in ids))


def validate(config: SampleConfig) -> None:
    if not 0 <= config.temperature < 1e9 or not 0 <= config.seed < 2**63:
        raise ConfigError("--temperature and --seed are at least 0, and finite")
    if config.top_k < 1 or config.max_new_tokens < 1 or config.num_samples < 1:
        raise ConfigError("--top_k, --max_new_tokens and --num_samples are at least 1")


def main(config: SampleConfig) -> None:
    """Print samples as they are drawn.

    Raises:
        ConfigError: nothing to sample from, or a prompt that the tokenizer cannot encode.
    """
    validate(config)
    device, _ = pick_device(config.device, 0, 1, 1)
    model, tokenizer, ids = load(config.out_dir or newest_run())
    model.to(device)
    prompt = tokenizer.encode(read_start(config.start, tokenizer))
    if not prompt:
        raise ConfigError("--start is empty: give at least one character")
    torch.manual_seed(config.seed)
    for _ in range(config.num_samples):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        print(stream(tokenizer, prompt, decoder), end="", flush=True)
        tokens = model.generate(
            torch.tensor([prompt], device=device), config.max_new_tokens, config.temperature, config.top_k, ids
        )
        for token in tokens:
            print(stream(tokenizer, [int(token)], decoder), end="", flush=True)
        print("\n" + "-" * 20, flush=True)


if __name__ == "__main__":
    with report_errors(output_is_optional=False), contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main(command_line(SampleConfig, sys.argv[1:]))
