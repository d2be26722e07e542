"""Shakespeare's plays as GPT-2 tokens.

    python nanoGPT/data/shakespeare/prepare.py
    python nanoGPT/data/shakespeare/prepare.py --input=my.txt    # one's own text, as dataset my

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
    prepare_text("shakespeare", input, tokenizer="gpt2")


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
