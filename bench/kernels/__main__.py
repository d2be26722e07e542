"""Run `python -m bench.kernels`, the command of `make bench NAME=kernels`."""

import sys

from bench.kernels.kernels import Options, main
from nanoGPT.job.command_line import command_line
from nanoGPT.job.program import report_errors

if __name__ == "__main__":
    with report_errors():
        main(command_line(Options, sys.argv[1:]))
