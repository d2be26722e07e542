"""Shakespeare's plays as characters: 4.8 million tokens, 75 different ones.

    python nanoGPT/data/shakespeare_char/prepare.py
    python nanoGPT/data/shakespeare_char/prepare.py --input=my.txt    # one's own text, as dataset my_char

The first nine tenths are the train split, the rest is val.
"""

import sys

from nanoGPT.cli.command_line import command_line
from nanoGPT.cli.program import report_errors
from nanoGPT.prepare.text import prepare_text


def main(input: str | None = None) -> None:
    """Prepare Shakespeare, or one's own text.

    Args:
        input: path of a UTF-8 text file; its dataset is named after it, and never overwrites another one.
    """
    prepare_text("shakespeare_char", input, tokenizer="char")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
