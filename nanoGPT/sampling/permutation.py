"""A random permutation of any length that needs no memory, and the hash that it is made of."""

import math

FEISTEL_ROUNDS = 4


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
