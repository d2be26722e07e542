"""Export the weights of a run as a Hugging Face directory or as nanoGPT's ckpt.pt.

    python -m nanoGPT.export --out_dir=out/my-run --to=exported                  # Hugging Face: for AutoModel
    python -m nanoGPT.export --out_dir=out/my-run --to=exported --format=ckpt    # nanoGPT: for its sample.py

The newest complete checkpoint of the run is exported, or the one of `--resume_step`. It may come from any phase and any
number of ranks.
"""

import sys
import tempfile
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from nanoGPT.checkpoint.hashed_files import NewFiles
from nanoGPT.checkpoint.hugging_face import write_hf
from nanoGPT.checkpoint.starting_point import find_checkpoint, tokenizer_rows
from nanoGPT.checkpoint.training_state import read_full_state, save_ckpt
from nanoGPT.errors import ConfigError
from nanoGPT.job.command_line import command_line
from nanoGPT.job.program import report_errors
from nanoGPT.model import GPTConfig
from nanoGPT.tokenizer import load_tokenizer
from nanoGPT.train_config import StepChoice


def check_no_overwrite(folder: Path, format: str) -> None:
    """Check that an export into `folder` overwrites no file.

    Raises:
        ConfigError: a file of this format exists already.
    """
    patterns = {
        "hf": ("config.json", "model*.safetensors*", "tokenizer*", "vocab.json", "merges.txt"),
        "ckpt": ("ckpt.pt",),
    }
    existing = [folder] if folder.is_file() else [path for name in patterns[format] for path in folder.glob(name)]
    if existing:
        raise ConfigError(f"{existing[0]} exists already: remove it, or give another directory as --to")


def main(out_dir: str, to: str, format: Literal["hf", "ckpt"] = "hf", resume_step: StepChoice = None) -> None:
    """Export a checkpoint of a run, from any phase and any number of ranks.

    Args:
        out_dir: directory of the run.
        to: directory to write.
        format: hf for the transformers library; ckpt for nanoGPT, with the optimizer state.
        resume_step: number of updates of the checkpoint, or best (lowest validation loss); None: the newest.

    Raises:
        ConfigError: there is no complete checkpoint, or the files exist already or could not be written.
    """
    checkpoint, folder = find_checkpoint(Path(out_dir), step=resume_step), Path(to)
    check_no_overwrite(folder, format)
    manifest = checkpoint.manifest
    shape = GPTConfig.from_dict(manifest["model_args"])
    folder.mkdir(parents=True, exist_ok=True)
    # Files are moved into place only when all are written. `scratch` is for a state that is larger than the memory.
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as temporary,
        tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as scratch,
    ):
        try:
            if format == "hf":
                weights = read_full_state(checkpoint.path).model
                tokenizer = manifest["data"]["tokenizer"]
                ids = tokenizer["vocab_size"]
                rows = ids if shape.vocab_size == tokenizer_rows(tokenizer) else shape.vocab_size
                if rows > ids:
                    print(f"all {rows:,} rows of the vocabulary are exported; the tokenizer has {ids:,} ids")
                write_hf(Path(temporary), shape, weights, rows)
                load_tokenizer(tokenizer).write_hf(Path(temporary))
            else:
                state = read_full_state(checkpoint.path, Path(scratch))
                save_ckpt(NewFiles(Path(temporary)), state, checkpoint.step, manifest)
        except (RuntimeError, OSError, SafetensorError) as error:  # all can mean a full disk
            raise ConfigError(f"--to={to} could not be written ({error}): free some disk space") from None
        for file in sorted(Path(temporary).iterdir()):
            file.replace(folder / file.name)
    print(f"exported {checkpoint.path.name} of {out_dir} to {folder} ({format})")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
