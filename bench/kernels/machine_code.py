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
SERIALIZED_WGMMA = re.compile(r"\(C75\d\d\)")  # the numbers of ptxas's warnings that it serialized wgmma instructions


def count_spilled_bytes(compiled: Any) -> int:
    """Return the bytes of stack per thread, which are 0 if all values stay in registers."""
    return read_usage("STACK", dump_usage(compiled))


def dump_usage(compiled: Any) -> str:
    """Return what cuobjdump prints about the resources of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return run_tool(BINARIES / "cuobjdump", "--dump-resource-usage", file.name)


def inspect_machine_code(compiled: Any) -> dict[str, Any]:
    """Return the resources that a kernel compiled by Triton uses.

    Returns:
        registers: per thread.
        stack_bytes, spill_instructions: both 0 if all values stay in registers.
        shared_bytes: shared memory per program.
        has_dot: whether the kernel contains a tl.dot.
        tensor_cores: the kinds of tensor-core instructions.
        serialized_wgmma: whether its wgmma instructions wait for each other.
        instructions: number of machine instructions.
    """
    usage = dump_usage(compiled)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        assembly = run_tool(BINARIES / "nvdisasm", "-c", "--no-dataflow", file.name)
    return {
        "registers": read_usage("REG", usage),
        "stack_bytes": read_usage("STACK", usage),
        "spill_instructions": len(re.findall(r"\b(?:STL|LDL)\b", assembly)),
        "shared_bytes": compiled.metadata.shared,
        "has_dot": "tt.dot" in compiled.asm["ttir"],
        "tensor_cores": [name for name in TENSOR_CORES if name in compiled.asm["ptx"]],
        "serialized_wgmma": has_serialized_wgmma(compiled),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]+\*/", assembly, flags=re.MULTILINE)),
    }


def uses_fp64(compiled: Any) -> bool:
    """Return whether a compiled kernel computes in double precision, which most GPUs do very slowly."""
    return re.search(r"\.f64\b", compiled.asm["ptx"]) is not None


def has_serialized_wgmma(compiled: Any) -> bool:
    """Return whether ptxas serialized the kernel's wgmma instructions, which then do not overlap with each other.

    ptxas reports this as a warning, which Triton does not show. This runs ptxas once more to read it.
    """
    if "wgmma" not in compiled.asm["ptx"]:
        return False
    arch = compiled.metadata.target.arch
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", file.name]
        log = subprocess.run([*command, "-o", "/dev/null"], check=True, capture_output=True, text=True).stderr
    return SERIALIZED_WGMMA.search(log) is not None


def run_tool(*command: str | Path) -> str:
    """Run a command and return what it prints."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def read_usage(name: str, usage: str) -> int:
    """Return the largest value of a resource in the output of `cuobjdump --dump-resource-usage`."""
    return max(int(value) for value in re.findall(rf"\b{name}:(\d+)", usage))
