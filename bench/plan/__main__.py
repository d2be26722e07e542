"""The command `python -m bench.plan`, which `make plan` runs."""

import multiprocessing
import multiprocessing.forkserver
import os
import sys

if __name__ == "__main__":  # start the fork server first: it imports torch while this process does the same
    multiprocessing.set_forkserver_preload(["bench.plan.planner"])
    multiprocessing.forkserver.ensure_running()

from bench.plan.plan import PlanConfig, main
from nanoGPT.job.command import command_line, report_errors

if __name__ == "__main__":
    with report_errors():
        main(command_line(PlanConfig, sys.argv[1:]))
    os._exit(0)  # a normal exit would spend 0.6 s on the cleanup of torch's modules
