"""Prepare a random walk over 32 characters: 1.0 million tokens, and a lowest possible loss of 1.213.

    python nanoGPT/data/synthetic/prepare.py

`make gate` trains on it. Nothing is downloaded.
"""

import sys

from nanoGPT.job.command import command_line, report_errors
from nanoGPT.prepare.synthetic import prepare_synthetic

if __name__ == "__main__":
    with report_errors():
        command_line(prepare_synthetic, sys.argv[1:])
