"""The command `python -m bench.matrix`, which `make matrix` runs."""

import sys

from bench.matrix.matrix import main
from nanoGPT.cli.command_line import command_line
from nanoGPT.errors import one_sentence

if __name__ == "__main__":
    with one_sentence():
        sys.exit("\n".join(command_line(main, sys.argv[1:])) or 0)
