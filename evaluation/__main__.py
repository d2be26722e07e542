"""The command `python -m evaluation`, which `make evaluate` runs."""

import sys

from evaluation.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
