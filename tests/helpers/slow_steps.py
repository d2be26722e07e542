"""Run a program of the repository whose ranks sleep in each training step.

    Program("tests.helpers.slow_steps", "nanoGPT.launch", "--gpus=2", "nanoGPT/train.py")

A test that waits for a job, for example until a node has joined, then does not pay for hundreds of training steps. The
ranks are forked from the program, so they inherit the changed method.
"""

import runpy
import sys
import time

from nanoGPT.dataset import TRAIN, TokenData

PAUSE_SECONDS = 0.4  # in each step


def sleep_in_each_step() -> None:
    """Change `TokenData.batch`, so that it sleeps before it reads the first batch of a training step."""
    read, steps = TokenData.batch, [-1]

    def batch(self, split, purpose, step, micro_batch):
        if purpose == TRAIN and step != steps[-1]:
            steps[-1] = step
            time.sleep(PAUSE_SECONDS)
        return read(self, split, purpose, step, micro_batch)

    TokenData.batch = batch  # type: ignore[method-assign]


if __name__ == "__main__":
    sleep_in_each_step()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
