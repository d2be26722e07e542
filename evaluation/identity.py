"""Identify a model by its content, so that an evaluation continues only with the same weights, wherever they are.

A run's checkpoint is identified by its manifest, which has the hash (SHA-256) of every file. Other models have no
manifest, and hashing tens of gigabytes would take minutes at every start. Their hash covers the name and size of each
file that is read, and its content: all of a file of up to 1 MiB, and 256 evenly spaced samples of 4 KiB of a larger
one. A training step changes almost every weight, so the samples differ. They can miss a change of single weights.
"""

import hashlib
from pathlib import Path

from nanoGPT.errors import ConfigError

FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "ckpt.pt",
)
SAMPLES, SAMPLE_BYTES = 256, 4096  # per file


def digest_files(source: str) -> str:
    """Return a hash of a model that is not a run of this project; the source itself if it is not a directory.

    Args:
        source: directory of a Hugging Face model or of nanoGPT's ckpt.pt, or the name of a GPT-2.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder = Path(source)
    if not folder.is_dir():
        return source
    files = sorted({path for pattern in FILES for path in folder.glob(pattern) if path.is_file()})
    digest = hashlib.sha256()
    for path in files:
        try:
            digest.update(f"{path.name}/{path.stat().st_size}/".encode())
            sample_content(path, digest)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): copy the file again") from None
    return digest.hexdigest()


def sample_content(path: Path, digest: "hashlib._Hash") -> None:
    """Add SAMPLES evenly spaced parts of a file to a hash, the first and the last bytes included."""
    last = max(0, path.stat().st_size - SAMPLE_BYTES)
    with open(path, "rb", buffering=0) as file:
        for position in sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            file.seek(position)
            digest.update(file.read(SAMPLE_BYTES))
