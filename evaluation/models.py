"""Open a model to evaluate: what it is, its tokenizer, and how to spread it over the ranks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from evaluation.costs import ModelSize, Spread, measure_gpt
from evaluation.generation import LanguageModel
from evaluation.gpt import GptModel, spread_gpt
from evaluation.identity import digest_files
from evaluation.prompts import OwnCodec, TextCodec
from nanoGPT.checkpoint.manifest import find_checkpoint
from nanoGPT.checkpoint.sources import is_run
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.files import is_present, read_document
from nanoGPT.model import ModelConfig
from nanoGPT.prepare.meta import GPT2_VOCAB
from nanoGPT.prepare.tokenizer import Tokenizer
from nanoGPT.sample import read_checkpoint, read_model
from nanoGPT.train_config import StepChoice


class OpenedModel(Protocol):
    """A model whose weights have not been read yet.

    Attributes:
        name: path or name of the model, for messages.
        weights: identifies its weights and tokenizer, wherever they are.
        size: its sizes.
        context: largest number of tokens of a sequence.
        codec: its tokenizer.
    """

    name: str
    weights: str
    size: ModelSize
    context: int
    codec: TextCodec

    def load(self, spread: Spread, run: Runtime) -> LanguageModel:
        """Read this rank's part of the weights. Collective."""
        ...


class OpenedGpt:
    """A model of this project: a run, nanoGPT's ckpt.pt, or a GPT-2 of Hugging Face.

    Args:
        name, weights: as in `OpenedModel`.
        content: what `read_model` returns.
    """

    def __init__(self, name: str, weights: str, content: tuple[ModelConfig, Mapping[str, Tensor], Tokenizer, int]):
        self.name, self.weights = name, weights
        self.shape, self.tensors, tokenizer, ids = content
        self.size, self.context = measure_gpt(self.shape), self.shape.block_size
        self.codec: TextCodec = OwnCodec(tokenizer, ids)

    def load(self, spread: Spread, run: Runtime) -> LanguageModel:
        """Read this rank's part of the weights. Collective."""
        return GptModel(spread_gpt(self.shape, self.tensors, spread, run), self.codec.ids, run.device)


def open_model(source: str, run: Runtime, step: StepChoice) -> OpenedModel:
    """Return a model that is not read yet. Collective.

    Args:
        source: directory of a run, of a nanoGPT checkpoint or of a Hugging Face model; or the name of a GPT-2.
        run: this rank's Runtime.
        step: of the checkpoint, if the source is a run.

    Raises:
        ConfigError: there is no model that this project can run.
    """
    if is_hugging_face_model(Path(source)):
        from evaluation.hugging_face import OpenedHf  # needs the extra `web`

        return OpenedHf(Path(source))
    if is_run(Path(source)):
        checkpoint = find_checkpoint(Path(source), run, step)
        name, weights = f"{source} ({checkpoint.path.name})", checkpoint.manifest["sha256"]
        return OpenedGpt(name, weights, read_checkpoint(checkpoint))
    return OpenedGpt(source, digest_files(source), read_model(source, run, step))


def is_hugging_face_model(folder: Path) -> bool:
    """Return whether a directory has a Hugging Face model that is not a GPT-2 with GPT-2's vocabulary."""
    if not is_present(folder / "config.json") or is_present(folder / "checkpoints"):
        return False
    try:
        fields: Any = json.loads(read_document(folder / "config.json"))
        return fields.get("model_type") != "gpt2" or fields.get("vocab_size", GPT2_VOCAB) < GPT2_VOCAB
    except (OSError, ValueError, AttributeError, TypeError):
        return False  # read_model explains what is wrong with it
