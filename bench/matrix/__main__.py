"""Run `python -m bench.matrix`, the command behind `make matrix`."""

import sys

from bench.matrix.matrix import main
from nanoGPT.job.command import command_line, report_errors

if __name__ == "__main__":
    with report_errors():
        sys.exit("\n".join(command_line(main, sys.argv[1:])) or 0)
