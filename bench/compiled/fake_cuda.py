"""A CUDA device that exists only by name: torch traces and generates code for it on a machine without a GPU.

    install_fake_gpu("sm_90")       # before torch is imported; torch then reports one H100

Without a GPU, torch refuses every tensor on a CUDA device, fake tensors too: its CPU build has not registered the two
interfaces of `fake_cuda.cpp`, and its CUDA build asks a driver. This module compiles and loads that file. Nothing can
run on the device: only the traced graph and the code that Inductor generates for it are of use.
"""

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")

# name, streaming multiprocessors, shared memory per program and per multiprocessor (KiB), L2 cache and memory (MiB)
GPUS = {
    "sm_80": ("NVIDIA A100", 108, 163, 164, 40, 81920),
    "sm_90": ("NVIDIA H100", 132, 227, 228, 50, 81920),
    "sm_100": ("NVIDIA B200", 148, 227, 228, 126, 184320),
}


def load_fake_cuda() -> ctypes.CDLL:
    """Compile fake_cuda.cpp for the installed torch, load it, and return the library.

    Raises:
        RuntimeError: torch was imported before, or the compiler failed.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already, and has looked for a GPU: call install_fake_gpu first")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    torch_folder = Path(next(iter(spec.submodule_search_locations)))
    headers = torch_folder / "include"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake_cuda.so"
        command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{headers}"]
        command += [f"-I{headers / 'torch/csrc/api/include'}", str(SOURCE), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise RuntimeError("g++ is missing: install it, for example with apt install g++") from None
        if done.returncode:
            raise RuntimeError(f"g++ could not compile {SOURCE.name}:\n{done.stderr[-2000:]}")
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(torch_folder / "lib" / name), ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))


def build_properties(architecture: str) -> SimpleNamespace:
    """Return what `torch.cuda.get_device_properties` returns for a GPU of this architecture."""
    name, multiprocessors, shared_per_block, shared_per_multiprocessor, l2, memory = GPUS[architecture]
    number = int(architecture.removeprefix("sm_"))
    return SimpleNamespace(
        name=name,
        type="cuda",
        major=number // 10,
        minor=number % 10,
        multi_processor_count=multiprocessors,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=shared_per_block << 10,
        shared_memory_per_multiprocessor=shared_per_multiprocessor << 10,
        L2_cache_size=l2 << 20,
        total_memory=memory << 20,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        gcnArchName="",
        uuid="",
    )


class FakeDriver:
    """Triton's driver of a GPU that only reports its type."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self.architecture.removeprefix("sm_")), 32)

    def get_current_device(self) -> int:
        return 0


def install_fake_gpu(architecture: str) -> None:
    """Let torch and Triton report one GPU of this architecture, until the process ends.

    Call it before torch is imported: torch looks for a GPU only once, and Inductor keeps references to the functions
    of torch.cuda that are replaced here.

    Raises:
        RuntimeError: torch was imported before, or the compiler failed.
    """
    library = load_fake_cuda()
    import torch
    import triton
    from torch._subclasses import fake_tensor

    library.register_fake_guard()

    class FakeGenerator(torch.Generator):
        """The GPU's generator of random numbers; the code of a recomputed attention refers to it."""

        device = torch.device("cuda", 0)

        def clone_state(self) -> "FakeGenerator":
            return self

    properties = build_properties(architecture)
    # Dynamo identifies these functions by their objects, so each name needs its own function.
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda state, device="cuda": None,
        "default_generators": (FakeGenerator(),),
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = "13.0"
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]  # it would use the GPU
    triton.runtime.driver.set_active(FakeDriver(architecture))
