"""Generate a text whose lowest possible loss is known: a random walk over 32 characters.

The next character depends only on the current one. Each character has four possible successors, with probabilities 1/2,
1/4, 1/8 and 1/8. No model can have an expected loss below the entropy of this choice, 1.213 nats per token. All
characters are equally frequent. A model that has learned nothing, or only the character frequencies, therefore has a
loss of ln 32 = 3.466 nats per token.
"""

import hashlib
import itertools
import math
import operator
from typing import Any

import numpy as np

from nanoGPT.files import DATA
from nanoGPT.prepare.text import write_once

CHARACTERS = "abcdefghijklmnopqrstuvwxyz012345"
PROBABILITIES = (0.5, 0.25, 0.125, 0.125)
LENGTH = 1_000_000  # characters
SEED = 1337


def compute_entropy_rate() -> float:
    """Return the entropy of the next character, given the current one, in nats. It is the lowest expected loss."""
    return -sum(p * math.log(p) for p in PROBABILITIES)


def generate_text(length: int = LENGTH, seed: int = SEED) -> str:
    """Return a random walk over `CHARACTERS`.

    Successor k of character c is `successors[k, c]`. Each row of this table is a permutation, so all characters are
    equally frequent, and the four rows differ for every character.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    order = generator.permutation(len(CHARACTERS))  # a cycle through all characters, in a random order
    position = np.argsort(order)
    successors = [order[(position + shift) % len(CHARACTERS)].tolist() for shift in (1, 5, 11, 22)]
    choices = np.searchsorted(np.cumsum(PROBABILITIES), generator.random(length - 1), side="right")
    steps = map(successors.__getitem__, choices.tolist())
    walk = itertools.accumulate(steps, lambda token, step: operator.getitem(step, token), initial=0)
    return "".join(map(CHARACTERS.__getitem__, walk))


def prepare_synthetic() -> None:
    """Prepare the dataset `synthetic`, unless it is already prepared. Its meta.json contains the lowest loss.

    Raises:
        ConfigError: the directory contains a different dataset.
    """
    text = generate_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    source: dict[str, Any] = {"text_sha256": digest, "entropy_rate": compute_entropy_rate()}
    write_once(DATA / "synthetic", lambda: [text], source, "char")
