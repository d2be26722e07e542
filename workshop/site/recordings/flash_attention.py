"""Record every tile of causal flash attention: its scores, and the running maximum, sum and output of each query.

The run is real: Triton's interpreter executes the forward kernel of `phase2_triton/kernels/attention.py` as Python, and
a trace function of Python reads the kernel's variables after each tile. Only the tiles are smaller than on a GPU.

The kernel computes with powers of two, so a score is q k^T * scale * log2(e), and its weight is 2^(score - maximum).
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from nanoGPT.errors import ConfigError
from phase2_triton.kernels import attention
from phase2_triton.kernels.core import is_interpreted

TOKENS, CHANNELS, TILE, SEED = 10, 4, 4, 6  # 10 is not a multiple of the tile, so the last tiles have empty rows
DIGITS = 6


class TileRecorder:
    """Records the variables of the forward kernel after each tile, while Triton's interpreter runs it.

    Attributes:
        steps: for each tile: query and key (numbers of the first ones), scores, old_max, maximum, correction, sum and
            output by query. A score is None where the mask hides the key. The output is not divided by the sum yet.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale * math.log2(math.e)
        self.steps: list[dict[str, Any]] = []
        self.newest: Any = None  # row_max of the kernel: a new object after each tile

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Trace the kernel inside this context."""
        before = sys.gettrace()
        sys.settrace(self.enter_function)
        try:
            yield
        finally:
            sys.settrace(before)

    def enter_function(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace the lines of the kernel, and of no other function."""
        return self.see_line if frame.f_code.co_name == "forward_kernel" else None

    def see_line(self, frame: FrameType, event: str, _: Any) -> Any:
        """Record a tile when the kernel has replaced its running maximum, which is the last statement of the loop."""
        variables = frame.f_locals
        maximum = variables.get("row_max")
        if "new_max" in variables and maximum is variables["new_max"] and maximum is not self.newest:
            self.newest = maximum
            self.steps.append(self.read_tile(variables))
        return self.see_line

    def read_tile(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the kernel's variables after a tile."""
        values = {name: variables[name].handle.data for name in ("scores", "row_max", "row_sum", "correction", "acc")}
        query = int(np.asarray(variables["first"].handle.data).item())
        return {
            "query": query,
            "key": variables["start"],
            "scores": [[to_number(value) for value in row] for row in values["scores"] * self.scale],
            "maximum": [to_number(value) for value in values["row_max"][:, 0]],
            "correction": [to_number(value) for value in values["correction"][:, 0]],
            "sum": [to_number(value) for value in values["row_sum"][:, 0]],
            "output": [[to_number(value) for value in row[:CHANNELS]] for row in values["acc"]],
        }


def to_number(value: float) -> float | None:
    """Return a value of the kernel as a JSON number; None for minus infinity."""
    return None if math.isinf(value) else round(float(value), DIGITS)


def draw_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries, keys and values, each (1, 1, TOKENS, CHANNELS)."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = torch.randn(3, 1, 1, TOKENS, CHANNELS, generator=generator).unbind()
    return 2 * q, k, v


def record() -> dict[str, Any]:
    """Run the kernel, and return the recording.

    Returns:
        tokens, channels, tile; steps: see `TileRecorder`; output: the kernel's result, and expected: that of plain
        softmax in fp64, both (tokens, channels).

    Raises:
        ConfigError: the kernel would be compiled for a GPU.
    """
    if not is_interpreted():
        raise ConfigError("a compiled kernel does not show its variables: set TRITON_INTERPRET=1")
    q, k, v = draw_inputs()
    recorder = TileRecorder(CHANNELS**-0.5)
    options = {"block": TILE, "step": TILE}
    with mock.patch.object(attention, "select_config", lambda *_: dict(options)), recorder.watch():
        output = attention.causal_attention(q, k, v)
    expected = attention.reference(q.double(), k.double(), v.double())
    return {
        "tokens": TOKENS,
        "channels": CHANNELS,
        "tile": TILE,
        "steps": recorder.steps,
        "output": [[to_number(value) for value in row] for row in output[0, 0].tolist()],
        "expected": [[to_number(value) for value in row] for row in expected[0, 0].tolist()],
    }
