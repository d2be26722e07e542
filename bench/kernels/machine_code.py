"""Read the resources of a compiled Triton kernel from its machine code: registers, spills, shared memory, instructions.

The programs that disassemble the code are part of Triton's package, so this needs neither a GPU nor the CUDA toolkit.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TENSOR_CORES = ("mma.sync", "wgmma", "tcgen05")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/", re.MULTILINE)  # of nvdisasm: the address as a comment
SERIALIZED_WGMMA = re.compile(r"\(C75\d\d\)")  # the numbers of ptxas's warnings that it serialized wgmma instructions


def run_on_cubin(compiled: Any, tool: str, *options: str) -> str:
    """Return what a tool of Triton's package prints about the machine code of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        words = [str(BINARIES / tool), *options, file.name]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def inspect_machine_code(compiled: Any) -> dict[str, Any]:
    """Return the resources that a kernel compiled by Triton uses.

    Returns:
        registers: per thread.
        stack_bytes: per thread; 0 if all values stay in registers.
        shared_bytes: shared memory per program.
        has_dot: whether the kernel contains a tl.dot.
        has_fp64: whether it computes in double precision, which most GPUs do very slowly.
        tensor_cores: the kinds of tensor-core instructions.
        serialized_wgmma: whether its wgmma instructions wait for each other.
    """
    usage = run_on_cubin(compiled, "cuobjdump", "--dump-resource-usage")
    ptx = compiled.asm["ptx"]
    return {
        "registers": read_usage("REG", usage),
        "stack_bytes": read_usage("STACK", usage),
        "shared_bytes": compiled.metadata.shared,
        "has_dot": "tt.dot" in compiled.asm["ttir"],
        "has_fp64": re.search(r"\.f64\b", ptx) is not None,
        "tensor_cores": [name for name in TENSOR_CORES if name in ptx],
        "serialized_wgmma": "wgmma" in ptx and has_serialized_wgmma(compiled),
    }


def count_instructions(compiled: Any) -> dict[str, int]:
    """Return how many machine instructions a kernel has, and how many of them store or load spilled registers."""
    assembly = run_on_cubin(compiled, "nvdisasm", "-c", "--no-dataflow")
    return {
        "instructions": len(INSTRUCTION.findall(assembly)),
        "spill_instructions": len(re.findall(r"\b(?:STL|LDL)\b", assembly)),
    }


def has_serialized_wgmma(compiled: Any) -> bool:
    """Return whether ptxas serialized the kernel's wgmma instructions, which then do not overlap with each other.

    ptxas reports this as a warning, which Triton does not show. This runs ptxas once more to read it.
    """
    arch = compiled.metadata.target.arch
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", file.name]
        log = subprocess.run([*command, "-o", "/dev/null"], check=True, capture_output=True, text=True).stderr
    return SERIALIZED_WGMMA.search(log) is not None


def read_usage(name: str, usage: str) -> int:
    """Return the largest value of a resource in the output of `cuobjdump --dump-resource-usage`."""
    return max(int(value) for value in re.findall(rf"\b{name}:(\d+)", usage))
