"""Errors of torch and the system that the user can fix become one line with advice; others keep their traceback."""

import pytest

from operate.known_errors import explain_known_error
from tests.helpers.programs import run_program
from tests.helpers.training import ROOT

FAILING_PROGRAM = """
import resource
import torch
from nanoGPT.job.start import main, start
from nanoGPT.train_config import TrainConfig

def train(config):
    with start(config):
        {body}

main(train, TrainConfig, {trainer!r})
"""
OPEN_TOO_MANY_FILES = "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); torch.zeros(3).share_memory_()"
COMPILE_FUNCTION = """import torch._inductor.config
        torch._inductor.config.cpp.cxx = (None, "/bin/false")
        torch.compile(lambda x: (x.sin() + 1).cos())(torch.ones(1000))"""


@pytest.mark.parametrize(
    ("body", "advice"),
    [(OPEN_TOO_MANY_FILES, "ulimit -n"), (COMPILE_FUNCTION, "use --compile=False")],
    ids=["files", "C++ compiler"],
)
def test_a_real_system_error_is_reported_in_one_line(body, advice, tmp_path):
    """After an error of the operating system or a compiler, a program exits with code 1 and prints one line that says
    what to do."""
    program = tmp_path / "program.py"
    program.write_text(FAILING_PROGRAM.format(body=body, trainer=str(ROOT / "nanoGPT" / "train.py")))
    flags = ["--device=cpu", f"--out_dir={tmp_path / 'run'}"]
    outcome = run_program(str(program), *flags, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    assert outcome.code == 1 and "Traceback" not in outcome.output, outcome
    (error_line,) = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert advice in error_line, error_line


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
ERRORS = [
    ("CUDA error: no kernel image is available for execution on the device\n", "get_arch_list"),
    ("CUDA error: device-side assert triggered\nCUDA kernel errors might be", "CUDA_LAUNCH_BLOCKING=1"),
    ("unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)", "--shm-size"),
    (NCCL + "Last error:\nCall to ibv_reg_mr failed with error Cannot allocate memory", "ulimit -l unlimited"),
    (NCCL + "Last error:\nCall to connect failed", "NCCL_DEBUG=INFO"),
    ("ncclInvalidUsage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", "LOCAL_RANK"),
    ("out of resource: shared memory, Required: 147456, Hardware limit: 101376.", "--kernels=none"),
    ("[Errno 28] No space left on device: 'out/metrics.jsonl'", "free some space"),
]


@pytest.mark.parametrize(("text", "advice"), ERRORS, ids=[advice for _, advice in ERRORS])
def test_each_known_error_is_explained_with_advice(text, advice):
    """The explanation has the problem, the original message and what to do. The same holds if the error is the cause of
    another one."""
    outer = RuntimeError("a compiled function failed")
    outer.__cause__ = RuntimeError(text)
    sentence = explain_known_error(outer)
    assert sentence and text.splitlines()[0] in sentence and advice in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    "text",
    ["CUDA error: an illegal memory access was encountered", "C++ compile error\n\nOutput:\nerror: expected ';'"],
)
def test_any_other_error_keeps_its_traceback(text):
    """Bugs of the program are not in the table."""
    assert explain_known_error(RuntimeError(text)) is None
