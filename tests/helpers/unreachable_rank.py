"""An observer of a job on which rank 1 dies in step 2, while rank 0 waits in a call that no signal interrupts.

A rank that waits for its GPU is in such a call: Python's signal handlers run only after it. With gloo, a rank would
notice at once that its peer has died.
"""

import os
import signal
import time
from typing import Any

from nanoGPT import observers


class Observer(observers.Observer):
    """FAULT, in the environment, says how rank 1 dies: it is killed, or it raises an error. It dies only once."""

    def begin_step(self, step: int) -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            return
        if step == 2 and self.run.rank == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # other threads receive the signals
            os.read(os.pipe()[0], 1)
        if step == 2 and self.run.rank == 1:
            time.sleep(1)
            if os.environ["FAULT"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a planted error")

    def explain(self, error: BaseException) -> Any:
        return str(error) if "planted" in str(error) else None
