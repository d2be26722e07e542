"""Run a program of the repository whose ranks train slowly after a few steps.

    Program("tests.helpers.slow_steps", "operate.launch", "--gpus=2", "nanoGPT/train.py")

A test that waits for a job, for example until a node has joined, then does not pay for hundreds of training steps. The
ranks are forked from the program, so they inherit the changed method.
"""

import runpy
import sys
import time

from nanoGPT.dataset import TokenData

QUICK_STEPS = 4  # of a rank, before it becomes slow
PAUSE_SECONDS = 2.0  # in each later step


def sleep_in_later_steps() -> None:
    """Change `TokenData.batch`, so that it sleeps before it reads the first batch of a later training step."""
    read, steps = TokenData.batch, set[int]()

    def batch(self, split, step, micro_batch):
        if split == "train" and step not in steps:
            steps.add(step)
            time.sleep(PAUSE_SECONDS if len(steps) > QUICK_STEPS else 0.0)
        return read(self, split, step, micro_batch)

    TokenData.batch = batch  # type: ignore[method-assign]


if __name__ == "__main__":
    sleep_in_later_steps()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
