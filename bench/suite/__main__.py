"""The command `python -m bench.suite`, which `make suite` runs."""

import sys

from bench.suite.suite import SuiteConfig, main
from nanoGPT.cli.command_line import command_line
from nanoGPT.errors import one_sentence

if __name__ == "__main__":
    try:
        with one_sentence():
            sys.exit(main(command_line(SuiteConfig, sys.argv[1:])))
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
