"""What the server process of the tests does before it forks programs and ranks, so that none of them has to do it.

`workshop.ranks.PRELOADED` lists what is imported for ranks in notebooks, too. This module adds what only tests need.
"""

import sys

import pytest  # noqa: F401  a rank imports the test file that defines its function, and so pytest
import rich.live  # noqa: F401
import torch.distributed.launcher.api  # noqa: F401
import tyro  # noqa: F401
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import bench.suite.execution  # noqa: F401
import phase3_fsdp.solve.command  # noqa: F401
from nanoGPT.job.parse import parse
from phase3_fsdp.fsdp import FsdpConfig
from workshop.imports import ROOT


def get_method_name(depth: int = 2) -> str:
    """Return the name of a calling function, for torch's log of a rendezvous.

    The original searches all imported modules for the source of each frame. That takes half a second of processor time
    in each launcher.
    """
    return sys._getframe(depth).f_code.co_name


dynamic_rendezvous.get_method_name = get_method_name
parse(FsdpConfig, ["--device=cpu"], ROOT / "phase3_fsdp" / "train.py")  # imports and compiles what tyro needs only then
