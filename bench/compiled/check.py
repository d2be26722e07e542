"""Check the code that torch.compile generates for one GPU architecture.

    python -m bench.compiled.check sm_90                            # all graphs
    python -m bench.compiled.check sm_90 "phase 3: block"           # only this graph

Each compiled graph of each phase is generated as on the GPU, and all of its Triton kernels are compiled to machine
code: the custom kernels and those that Inductor writes. A kernel fails the check if it does not compile, computes in
fp64, has no configuration without spilled registers, or if ptxas had to serialize its wgmma instructions. A graph fails
if Inductor copies a tensor only because it could not let a kernel write into it.
"""

import functools
import logging
import os
import sys
from typing import Any

from bench.compiled.fake_cuda import install_fake_gpu
from bench.error_messages import split_message

# Inductor uses a configuration of its own kernels only if it has at most 16 spill instructions, of 4 bytes each.
MAX_INDUCTOR_SPILL = 64
PROBLEMS_FOUND = 3  # exit code; Python itself exits with 1, for example if an import fails


@functools.cache
def find_problems(name: str, source: str) -> tuple[str, ...]:
    """Compile one kernel of a generated graph, and return what is wrong with it. Many graphs have the same kernels."""
    from bench.compiled.generate import compile_kernel
    from bench.kernels.machine_code import count_spilled_bytes, has_serialized_wgmma, uses_fp64

    try:
        compiled = compile_kernel(name, source)
    except Exception as error:  # any error of Triton or ptxas is a result of this check
        return (f"does not compile: {type(error).__name__}: {split_message(error)[-1]}",)
    problems = []
    if any(map(uses_fp64, compiled)):
        problems.append("computes in fp64")
    spilled_bytes = min(map(count_spilled_bytes, compiled))
    if spilled_bytes > (MAX_INDUCTOR_SPILL if is_from_inductor(name) else 0):
        problems.append(f"spills {spilled_bytes} bytes of registers")
    if any(map(has_serialized_wgmma, compiled)):
        problems.append("ptxas serializes its wgmma instructions")
    return tuple(problems)


def is_from_inductor(name: str) -> bool:
    """Return whether Inductor wrote a kernel. All others are custom kernels."""
    return name.startswith("triton_")


def check_graph(graph: Any) -> tuple[int, int, list[str]]:
    """Return the numbers of kernels and of custom kernels in a graph, and its problems."""
    try:
        generated = graph.generate()
    except Exception as error:  # any error of torch.compile is a result of this check
        return 0, 0, [f"torch.compile fails: {type(error).__name__}: {split_message(error)[0]}"]
    kernels = generated.find_kernels()
    problems = [f"{name} {problem}" for name, source in kernels for problem in find_problems(name, source)]
    if not kernels:
        problems.append("there is no Triton kernel in the generated code")
    if generated.copied_bytes:
        problems.append(f"{generated.copied_bytes:,} bytes are copied that a kernel could write in place")
    return len(kernels), sum(not is_from_inductor(name) for name, _ in kernels), problems


def check_architecture(architecture: str, names: list[str]) -> int:
    """Check graphs for one architecture in this process. Print the results, and return the number of problems.

    Args:
        architecture: a key of `fake_cuda.GPUS`.
        names: the names of the graphs; all graphs if this is empty.
    """
    os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels cannot be compiled; Triton reads it at its import
    install_fake_gpu(architecture)
    logging.disable()  # Inductor prints the sources of kernels that fail
    import torch
    import triton

    from bench.compiled.graphs import GRAPHS

    print(f"{architecture} with torch {torch.__version__} and Triton {triton.__version__}", flush=True)
    total = 0
    for graph in [graph for graph in GRAPHS if graph.name in names or not names]:
        kernels, custom, problems = check_graph(graph)
        total += len(problems)
        print(f"  {graph.name}: {kernels} kernels, {custom} of them custom: {len(problems)} problems", flush=True)
        for problem in problems:
            print(f"    {problem}", flush=True)
    return total


if __name__ == "__main__":
    try:
        problems = check_architecture(sys.argv[1], sys.argv[2:])
    except Exception as error:  # the check itself failed
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(PROBLEMS_FOUND if problems else 0)
