"""The command `python -m bench.suite`, which `make suite` runs."""

import sys

from bench.suite.suite import SuiteConfig, main
from nanoGPT.job.command import command_line, report_errors

if __name__ == "__main__":
    try:
        with report_errors():
            sys.exit(main(command_line(SuiteConfig, sys.argv[1:])))
    except KeyboardInterrupt:
        print("\nstopped: run the same command again to continue", file=sys.stderr)
        sys.exit(130)
