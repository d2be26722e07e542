"""Prepare Shakespeare's plays as characters: 4.8 million tokens, a vocabulary of 75 characters.

    python nanoGPT/data/shakespeare_char/prepare.py
    python nanoGPT/data/shakespeare_char/prepare.py --input=my.txt    # your own text, as dataset my_char

The first 90% of the text is the train split, the rest is the val split.
"""

import sys

from nanoGPT.job.command_line import command_line
from nanoGPT.job.program import report_errors
from nanoGPT.prepare.text import prepare_text


def main(input: str | None = None) -> None:
    """Prepare Shakespeare, or your own text.

    Args:
        input: path of a UTF-8 text file. Its dataset is named after the file, and never overwrites another dataset.
    """
    prepare_text("shakespeare_char", input, tokenizer="char")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
