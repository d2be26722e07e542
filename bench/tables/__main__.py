"""The command `python -m bench.tables`."""

import sys

from bench.tables.tables import main
from nanoGPT.job.command import command_line, report_errors

if __name__ == "__main__":
    with report_errors():
        sys.exit(command_line(main, sys.argv[1:]))
