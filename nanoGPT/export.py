"""Export a run's weights, as a Hugging Face directory or as nanoGPT's ckpt.pt.

    python -m nanoGPT.export --out_dir=out/my-run --to=exported                  # Hugging Face: AutoModel opens it
    python -m nanoGPT.export --out_dir=out/my-run --to=exported --format=ckpt    # nanoGPT's sample.py opens it

The newest whole checkpoint of the run is taken, whatever phase and number of ranks wrote it.
"""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors import SafetensorError

from nanoGPT.checkpoint.hugging_face import write_hf
from nanoGPT.checkpoint.state import read_full_state, save_ckpt
from nanoGPT.checkpoint.weights import find_newest
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPTConfig
from nanoGPT.tokenizer import load_tokenizer

if TYPE_CHECKING:
    pass


def check_free(folder: Path, format: str) -> None:
    """Refuse to write over what is there."""
    own = {"hf": ("config.json", "model*.safetensors*", "tokenizer*", "vocab.json", "merges.txt"), "ckpt": ("ckpt.pt",)}
    there = [folder] if folder.is_file() else [path for name in own[format] for path in folder.glob(name)]
    if there:
        raise ConfigError(f"{there[0]} is there already: remove it, or give another directory as --to")


def main(out_dir: str, to: str, format: Literal["hf", "ckpt"] = "hf") -> None:
    """Export a run's newest checkpoint, whatever phase and number of ranks wrote it.

    Args:
        out_dir: the run.
        to: directory to write.
        format: hf, for transformers; ckpt, for nanoGPT, with the optimizer.
    """
    checkpoint, folder = find_newest(Path(out_dir)), Path(to)
    check_free(folder, format)
    manifest = checkpoint.manifest
    shape = GPTConfig.of(manifest["model_args"])
    folder.mkdir(parents=True, exist_ok=True)
    # Nothing is there before all is; a state larger than the memory goes through files.
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as temporary,
        tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as scratch,
    ):
        try:
            if format == "hf":
                weights = read_full_state(checkpoint.path).model
                tokenizer = manifest["data"]["tokenizer"]
                write_hf(Path(temporary), shape, weights, tokenizer["vocab_size"])
                load_tokenizer(tokenizer).write_hf(Path(temporary))
            else:
                state = read_full_state(checkpoint.path, Path(scratch))
                save_ckpt(NewFiles(Path(temporary)), state, checkpoint.step, manifest)
        except (RuntimeError, OSError, SafetensorError) as error:  # what torch and safetensors make of a full disk
            raise ConfigError(f"--to={to} could not be written ({error}): free some space") from None
        for file in sorted(Path(temporary).iterdir()):
            file.replace(folder / file.name)
    print(f"{checkpoint.path.name} of {out_dir} is in {folder} as {format}")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
