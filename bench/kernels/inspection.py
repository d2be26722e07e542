"""Compile a Triton kernel in another process, and return facts about its machine code and the compiler stages.

Notebook 4b uses it: its own process has imported Triton with the interpreter on, so it cannot compile. The other
process needs no GPU either, because the target architecture is an argument of the compiler.
"""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEAD = """import json
import triton
import triton.language as tl
from bench.kernels.inspection import inspect_launch"""


def call_in_compiling_process(folder: str, function: Callable[[], list], *dependencies: Any) -> list:
    """Return function(), called in a process in which Triton compiles.

    The source texts of the function and its dependencies are written into a file, which the process runs.

    Args:
        folder: for the file and the compiled kernels.
        function: returns a list that JSON can express. It can call `inspect_launch`.
        dependencies: the functions and kernels of the caller's page that `function` uses.
    """
    sources = [inspect.getsource(getattr(each, "fn", each)) for each in (*dependencies, function)]
    script = Path(folder) / f"{function.__name__}.py"
    script.write_text("\n\n\n".join([HEAD, *sources, f"print(json.dumps({function.__name__}()))"]))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
    done = subprocess.run([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def inspect_launch(kernel: Any, args: tuple, options: dict[str, Any], architecture: str = "sm_90") -> dict[str, Any]:
    """Return what can be read from the machine code of a launch, and the `texts` of the compiler stages.

    Args:
        kernel: a Triton kernel.
        args: its arguments; tensors can be on the meta device, with a shape but no memory.
        options: its constants, and `num_warps` and `num_stages`.
        architecture: the GPU to compile for.
    """
    from bench.kernels.machine_code import count_instructions, inspect_machine_code
    from bench.kernels.resources import COMPILE_OPTIONS, compile_for

    compiled = compile_for(architecture, kernel, args, options)
    constants = {name: value for name, value in options.items() if name not in COMPILE_OPTIONS}
    texts = {name: text for name, text in compiled.asm.items() if isinstance(text, str)}
    facts = {**inspect_machine_code(compiled), **count_instructions(compiled)}
    return {"constants": constants, "num_warps": options.get("num_warps"), **facts, "texts": texts}
