"""Generate text with a trained model, and print each token at once.

    python -m nanoGPT.sample                                        # the newest run under out/
    python -m nanoGPT.sample --out_dir=out/my-run --start="ROMEO:" --temperature=0.8 --top_k=50
    python -m nanoGPT.sample --out_dir=gpt2 --start=FILE:prompt.txt  # OpenAI's weights; a prompt from a file

While the text fits into the model's context, the keys and values of earlier tokens are cached.
"""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoGPT.checkpoint.manifest import Checkpoint, find_checkpoint, find_newest_run
from nanoGPT.checkpoint.sources import is_run, read_full_state, read_weights
from nanoGPT.checkpoint.starting_point import load_weights
from nanoGPT.distributed.runtime import Runtime, pick_device
from nanoGPT.errors import ConfigError
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.model import GPT, ModelConfig, make_shape
from nanoGPT.prepare.meta import TokenizerIdentity
from nanoGPT.prepare.tokenizer import CharTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from nanoGPT.train_config import StepChoice


@dataclass
class SampleConfig:
    """Generate text with a trained model."""

    out_dir: str | None = None
    """directory of a run, a Hugging Face model or a nanoGPT checkpoint, or gpt2; None: the newest run under out/"""
    start: str | None = None
    """prompt; FILE:name reads it from a file; None: a newline, or the vocabulary's first character if it has none"""
    num_samples: int = 1
    """number of texts to generate"""
    max_new_tokens: int = 500
    """number of tokens per text"""
    temperature: float = 0.8
    """sampling temperature; 0 always takes the most likely token, higher values give more varied text"""
    top_k: int = 200
    """sample only from the k most likely tokens"""
    seed: int = 1337
    """random seed of the sampling"""
    resume_step: StepChoice = None
    """the checkpoint of the run: its number of updates, or best (lowest validation loss); None: the newest"""
    device: str = "auto"
    """auto | cpu | cuda | mps"""


def choose_run() -> str:
    """Return out/ or the directory under out/ that has the newest checkpoint.

    Raises:
        ConfigError: there is no checkpoint under out/.
    """
    newest = find_newest_run((Path("out"), *Path("out").glob("*")))
    if newest is None:
        raise ConfigError("there is no run with a checkpoint under out/: train one with `make baseline`")
    print(f"using the newest run, {newest}", file=sys.stderr)
    return str(newest)


def load_model(source: str, device: torch.device | None = None, step: StepChoice = None) -> tuple[GPT, Tokenizer, int]:
    """Return a model on the CPU, its tokenizer, and the number of ids that the tokenizer has.

    Args:
        source: as `SampleConfig.out_dir`.
        device: where the model will run; None: on the CPU.
        step: as `SampleConfig.resume_step`.

    Raises:
        ConfigError: there is no model, its tokenizer is unknown, or it does not fit into memory.
    """
    shape, weights, tokenizer, ids = read_model(source, step=step)
    check_model_fits(shape, device)
    model = shape.create_model()
    load_weights(model, weights)
    return model.eval(), tokenizer, ids


def check_model_fits(shape: ModelConfig, device: torch.device | None = None) -> None:
    """Check that the weights fit into the memory of this machine, before they are read.

    Args:
        shape: of the model.
        device: where it will run; None: on the CPU.

    Raises:
        ConfigError: they do not fit.
    """
    params = shape.count_params()
    needed = 4 * params
    limits = [("this machine has", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    if device is not None and device.type == "cuda":
        limits.append(("the free memory of the GPU is", torch.cuda.mem_get_info(device)[0]))
    for owner, total in limits:
        if needed > total:
            raise ConfigError(
                f"the model has {params:,} parameters, which need {needed / 2**30:,.1f} GiB in fp32, but "
                f"{owner} {total / 2**30:,.1f} GiB: use a machine with more memory, "
                "or evaluate the model on several ranks with `make evaluate`"
            )


def read_model(
    source: str, run: Runtime | None = None, step: StepChoice = None
) -> tuple[ModelConfig, Mapping[str, Tensor], Tokenizer, int]:
    """Return the shape of a model, its weights, its tokenizer, and the number of ids that the tokenizer has.

    Args:
        source: as `SampleConfig.out_dir`.
        run: this rank's Runtime; all ranks then use the same checkpoint. None: a single process.
        step: as `SampleConfig.resume_step`.

    Returns:
        The weights are full tensors by parameter name, each of which is read when it is accessed.

    Raises:
        ConfigError: there is no model, or its tokenizer is unknown.
    """
    if is_run(Path(source)):
        return read_checkpoint(find_checkpoint(Path(source), run, step))
    shape, weights, identity = read_weights(source, run, step)
    if identity is None:
        raise ConfigError(
            f"{source} has {shape.vocab_size} token ids but does not contain their characters: give the directory "
            "of a run as --out_dir"
        )
    return shape, weights, load_tokenizer(identity), identity["vocab_size"]


def read_checkpoint(checkpoint: Checkpoint) -> tuple[ModelConfig, Mapping[str, Tensor], Tokenizer, int]:
    """Return what `read_model` returns, for a checkpoint of a run."""
    identity: TokenizerIdentity = checkpoint.manifest["data"]["tokenizer"]
    shape = make_shape(checkpoint.manifest["model_args"])
    return shape, read_full_state(checkpoint.path).model, load_tokenizer(identity), identity["vocab_size"]


def read_start(start: str | None, tokenizer: Tokenizer) -> str:
    """Return the text to continue.

    Raises:
        ConfigError: the file cannot be read.
    """
    if start is None:
        if isinstance(tokenizer, CharTokenizer) and "\n" not in tokenizer.ids:
            return tokenizer.characters[:1]
        return "\n"
    if not start.startswith("FILE:"):
        return start
    try:
        return Path(start[5:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--start={start} cannot be read ({error}): give a UTF-8 text file") from None


def validate(config: SampleConfig) -> None:
    """Check the values of a configuration.

    Raises:
        ConfigError: a value is out of range.
    """
    if not 0 <= config.temperature < 1e9:
        raise ConfigError(f"--temperature={config.temperature} is out of range: use a value in [0, 1e9)")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"--seed={config.seed} is out of range: use a value in [0, 2**63)")
    for name in ("top_k", "max_new_tokens", "num_samples"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name}={getattr(config, name)} is out of range: use 1 or more")


class KVCache:
    """Keys and values of all tokens so far, for one layer: two (B, nh, block_size, hs) tensors.

    Attributes:
        length: number of tokens so far.
        first_position: the position of the next token: `length`, or (B, 1) positions if sequences differ in length.
        mask: bool, (B, 1, T, T so far), True where a token may attend; None if all sequences have the same length.
    """

    mask: Tensor | None = None

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.length = 0

    @property
    def first_position(self) -> "int | Tensor":
        return self.length

    def extend(self, k: Tensor, v: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Append (B, nh, T, hs) keys and values, and return those of all tokens so far."""
        if self.keys is None or self.values is None:
            shape = (k.size(0), k.size(1), block_size, k.size(3))
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        end = self.length + k.size(2)
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = k, v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@torch.no_grad()
def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Continue each sequence: yield one (B, 1) column of token ids at a time.

    While the text fits into block_size, keys and values are cached, and each step runs only the new token. When
    the text is longer, the positions of all tokens shift, so each step runs the last block_size tokens.

    Args:
        model: in evaluation mode.
        idx: the text so far, (B, T), T at least 1.
        max_new_tokens: number of columns to yield.
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample only from the k most likely tokens; None: from all.
        vocab_size: ids from this number on are padding and are never sampled; None: there is no padding.
        use_cache: False runs the full context in each step; the text is the same.
    """
    caches = [KVCache() for _ in model.blocks] if use_cache else None
    for _ in range(max_new_tokens):
        if caches and idx.size(1) > model.config.block_size:
            caches = None
        context = idx[:, caches[0].length :] if caches else idx[:, -model.config.block_size :]
        logits = model(context, caches=caches)[:, -1, :vocab_size].float()  # (B, V)
        column = sample_tokens(logits, temperature, top_k)
        idx = torch.cat((idx, column), dim=1)
        yield column


def sample_tokens(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Sample one token per row of (B, V) logits; return their ids, (B, 1)."""
    if temperature < 1e-5:  # dividing by it could overflow, and only the most likely token is left
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        top = logits.topk(min(top_k, logits.size(-1)))
        logits = torch.full_like(logits, -math.inf).scatter_(1, top.indices, top.values)
    return torch.multinomial(logits.softmax(dim=-1), num_samples=1)


def main(config: SampleConfig) -> None:
    """Print samples, token by token.

    Raises:
        ConfigError: there is no model, or the tokenizer cannot encode the prompt.
    """
    validate(config)
    device, _ = pick_device(config.device, 0, 1, 1)
    source = config.out_dir or choose_run()
    model, tokenizer, vocab_size = load_model(source, device, config.resume_step)
    model.to(device)
    start = read_start(config.start, tokenizer)
    if isinstance(tokenizer, HuggingFaceTokenizer) and not is_run(Path(source)):
        prompt = tokenizer.encode(start, is_input=True)  # as in transformers; our own runs train without such tokens
    else:
        prompt = tokenizer.encode(start)
    if lost := "".join(sorted({*start} - {*tokenizer.decode(prompt)})):
        print(f"the tokenizer changes or drops these characters of --start: {lost!r}", file=sys.stderr)
    if not prompt:
        raise ConfigError("--start has no token: give at least one character that the tokenizer knows")
    if len(prompt) > (context := model.config.block_size):
        print(f"--start has {len(prompt):,} tokens, and the model reads only the last {context:,}", file=sys.stderr)
    torch.manual_seed(config.seed)
    for _ in range(config.num_samples):
        decode = tokenizer.start_decoding()
        print(decode(prompt), end="", flush=True)
        idx = torch.tensor([prompt], device=device)
        tokens = generate(model, idx, config.max_new_tokens, config.temperature, config.top_k, vocab_size)
        for token in tokens:
            print(decode([int(token)]), end="", flush=True)
        print("\n" + "-" * 20, flush=True)


if __name__ == "__main__":
    with report_errors(output_is_optional=False):
        try:
            main(command_line(SampleConfig, sys.argv[1:]))
        except BrokenPipeError:  # `| head` has read enough; Python must not write the rest at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
