"""Mixtures of datasets (`--dataset=a:3,b:1`) and epochs (`--sampling=epoch`). Only these flags load this module.

In an epoch, each sequence is used once. Which sequences a batch contains depends only on the seed and on the position
in the run. Nothing is stored between two calls, so a resumed run reads the same sequences, on any number of ranks.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from nanoGPT.errors import ConfigError

WEIGHT = re.compile(r"\d{1,6}(\.\d{1,6})?")
FEISTEL_ROUNDS = 4


def parse_mixture(text: str) -> list[tuple[str, int]]:
    """Return the names and the weights of a mixture such as `shakespeare:3,fineweb_edu:1`.

    Returns:
        The weights are integers without a common divisor, so `a:0.6,b:0.2` and `a:3,b:1` are equal.

    Raises:
        ConfigError: a name is empty, or a weight is missing or out of range.
    """
    names, weights = [], []
    for part in text.split(","):
        name, colon, weight = part.rpartition(":")
        name, weight = (name, weight) if colon else (part, "")
        if not name:
            raise ConfigError(f"--dataset={text} contains an empty name: write name:weight,name:weight")
        if not weight:
            raise ConfigError(f"--dataset={text} has no weight for {name}: write {name}:1, for example")
        if not WEIGHT.fullmatch(weight) or not float(weight):
            raise ConfigError(
                f"--dataset={text} has the weight {weight} for {name}: use a number from 0.000001 to 999999"
            )
        names.append(name)
        weights.append(Fraction(weight))
    scale = math.lcm(*(weight.denominator for weight in weights))
    integers = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*integers)
    return [(name, weight // divisor) for name, weight in zip(names, integers, strict=True)]


@lru_cache(maxsize=256)  # each choice is needed twice: to read ahead, and a step later to read
def draw_in_epochs(
    seed: int, first: int, batch_size: int, window_counts: tuple[int, ...], weights: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Return the choices for sequences `first` to `first + batch_size - 1` of a run.

    Each dataset has its own epochs: an epoch visits each of its windows once, in a random order.

    Args:
        seed: of the run.
        first: number of the first sequence, counted from the start of the run.
        batch_size, window_counts, weights: as for `nanoGPT.dataset.draw_random`; so is the result.
    """
    choices = []
    for sequence in range(first, first + batch_size):
        dataset, occurrence = take_turns(sequence, weights)
        epoch, index = divmod(occurrence, window_counts[dataset])
        choices.append((dataset, permute(index, window_counts[dataset], hash64(seed, dataset, epoch))))
    return choices


def take_turns(sequence: int, weights: Sequence[int]) -> tuple[int, int]:
    """Return the dataset of a sequence, and how many earlier sequences are from this dataset.

    The datasets take turns as evenly as their weights allow. Of the first n sequences, the first dataset has
    n * weight / total, rounded down; the other datasets divide the rest in the same way. Nothing needs to be counted.
    """
    total = sum(weights)
    for dataset, weight in enumerate(weights):
        earlier = sequence * weight // total
        if (sequence + 1) * weight // total > earlier:
            return dataset, earlier
        sequence, total = sequence - earlier, total - weight
    raise AssertionError("the last dataset takes every sequence that is left")


def permute(index: int, size: int, key: int) -> int:
    """Return the place of `index` in a random permutation of the numbers 0 to size - 1. It takes constant memory.

    The permutation is a Feistel network. It splits a number into two digits, and each round adds a hash of one digit to
    the other, which is reversible. The digits can express slightly more than `size` numbers. A result that is too large
    is therefore permuted again until it is below `size` (cycle walking).
    """
    base = math.isqrt(size - 1) + 1
    bases = [-(-size // base), base]  # their product is at least size
    while True:
        digits = [*divmod(index, base)]
        for round_number in range(FEISTEL_ROUNDS):
            side = round_number % 2
            digits[side] = (digits[side] + hash64(key + round_number, digits[1 - side])) % bases[side]
        index = digits[0] * base + digits[1]
        if index < size:
            return index


def hash64(*values: int) -> int:
    """Return a random integer of 64 bits that depends on all values, by the hash function of SplitMix64."""
    state = 0
    for value in values:
        state = ((state ^ value) + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state
