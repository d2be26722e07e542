"""The command `python -m bench.plan`, which `make plan` runs."""

import multiprocessing
import multiprocessing.forkserver
import sys

if __name__ == "__main__":  # start the fork server first: it imports torch while this process does the same
    multiprocessing.set_forkserver_preload(["bench.plan.planner"])
    multiprocessing.forkserver.ensure_running()

from bench.plan import largest, plan
from bench.plan.plan import PlanConfig
from nanoGPT.command_line import command_line
from nanoGPT.program import report_errors

if __name__ == "__main__":
    with report_errors():
        config = command_line(PlanConfig, sys.argv[1:])
        if config.largest:
            largest.print_largest(config)
        else:
            plan.main(config)
