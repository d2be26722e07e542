"""Prepare Shakespeare's plays as GPT-2 tokens.

    python nanoGPT/data/shakespeare/prepare.py
    python nanoGPT/data/shakespeare/prepare.py --input=my.txt    # your own text, as dataset my

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
    prepare_text("shakespeare", input, tokenizer="gpt2")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
