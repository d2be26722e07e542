"""Prepare Shakespeare's plays as characters: 4.8 million tokens, a vocabulary of 75 characters.

    python nanoGPT/data/shakespeare_char/prepare.py

The first 90% of the text is the train split, the rest is the val split.
"""

import sys

from nanoGPT.job.command import command_line, report_errors
from nanoGPT.prepare.text import prepare_shakespeare


def main() -> None:
    """Prepare Shakespeare. `make data INPUT=FILE` prepares your own text."""
    prepare_shakespeare("shakespeare_char", tokenizer="char")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
