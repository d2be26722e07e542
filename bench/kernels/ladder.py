"""Compare the numbered steps of each kernel, from the simplest to the shipped one, without a GPU.

    python -m bench.kernels.ladder            # print the steps; about two minutes
    python -m bench.kernels.ladder --write    # also write bench/results/kernel-ladder-<hardware>.json

Bytes: every load and store of a step is counted while Triton's interpreter runs it with the tiles of an H100. They are
the bytes that the programs request. Caches may serve some of them, so the memory may move fewer. Instructions,
registers and spills: read from the machine code for an H100. Times need a GPU.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1" if "--count-bytes" in sys.argv else "0"  # read when Triton is imported

import torch
import triton
from torch import Tensor

from bench.kernels.resources import compile_launch, format_launch
from bench.tables.records import write_result
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError
from phase2_triton.kernels import adamw, attention, attention_atomic, core, cross_entropy, embedding, gelu, layernorm
from phase2_triton.kernels.core import Cost, hash_sources, record_launches

COUNT_BYTES = "--count-bytes"  # of the subprocess in which kernels are interpreted
ARCHITECTURE = "sm_90"
ROWS, WIDTH, VOCABULARY = 8192, 768, 50304
GELU_ROWS = 256
TENSORS, ELEMENTS = 148, 4096  # of AdamW: as many tensors as GPT-2 has
EMBEDDED = (8, 256, 2048)  # sequences, tokens per sequence, rows of the token embedding
HEAD = (1, 1, 1024, 64)  # sequences, heads, tokens, channels of a head
ATTENTION_BACKWARDS = {7: attention, 5: attention_atomic}  # by the number of products
NORM_STEPS: dict[str, Callable[..., Any]] = {
    "1": layernorm.run_one_row_step,
    "2": layernorm.run_tile_step,
    "3": layernorm.layer_norm,
}
EMBEDDING_STEPS = {"1": embedding.run_atomic_step, "2": embedding.run_sorted_step, "3": embedding.tokens_op}


@dataclass(frozen=True)
class Step:
    """One numbered step of a kernel's file.

    Attributes:
        kernel: name of the kernel and pass.
        number: of the step, as in the docstring of the file.
        idea: what is new in this step.
        run: run the step on the device that it gets.
        minimum: bytes and FLOPs that any implementation needs.
    """

    kernel: str
    number: str
    idea: str
    run: Callable[[str], Any]
    minimum: Cost


def fill_tensor(device: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor without zeros: in bfloat16, or in float16 on the CPU, where the interpreter is wrong in bfloat16.

    Both types have two bytes per element.
    """
    half = torch.bfloat16 if device == "meta" else torch.float16
    return torch.empty(shape, dtype=dtype or half, device=device).fill_(0.5)


def fill_single(device: str, *shape: int) -> Tensor:
    return fill_tensor(device, *shape, dtype=torch.float32)


def run_norm(device: str, step: Callable[..., Any]) -> None:
    step(fill_tensor(device, ROWS, WIDTH), fill_single(device, WIDTH), fill_single(device, WIDTH))


def run_norm_backward(device: str, stages: int | None) -> None:
    """Run persistent programs with this number of pipeline stages; None: one program per row, with atomics."""
    x, row, statistics = fill_tensor(device, ROWS, WIDTH), fill_single(device, WIDTH), fill_single(device, ROWS)
    options = core.select_config("layernorm_backward", WIDTH)
    programs, rows = options.pop("programs"), options.pop("rows")
    if stages is None:
        programs, rows, options = ROWS, 1, {}
    sums = fill_single(device, *([] if stages is None else [programs]), 2, WIDTH)
    tensors = (x, None, x, row, statistics, statistics, torch.empty_like(x), sums)
    options |= {"HAS_DTOTAL": False, "HAS_BIAS": True, "ATOMIC": stages is None, "ROWS": rows}
    options |= {"BLOCK": core.next_power_of_2(WIDTH), "NUM_STAGES": stages or 1}
    options.pop("num_stages", None)
    core.launch(layernorm.backward_kernel, (programs,), *tensors, ROWS, WIDTH, **options)


def run_loss(device: str, gradient: bool | None) -> None:
    """Run the loss of 8 rows in one pass, with or without its gradient; None: in two passes."""
    logits, targets = fill_tensor(device, 8, VOCABULARY), torch.zeros(8, dtype=torch.int64, device=device)
    if gradient is None:
        cross_entropy.run_two_pass_step(logits, targets)
    else:
        cross_entropy.run_forward(logits, targets, VOCABULARY, -1, 0.0, 0.0, gradient=gradient)


def run_attention(device: str, split: bool | None) -> None:
    """Run attention with a mask on the diagonal blocks, or on all blocks; None: with all keys at once."""
    (B, nh, T, hs), (q, k, v, y) = HEAD, (fill_tensor(device, *HEAD) for _ in range(4))
    if split is None:
        sizes = {"HS": hs, "BLOCK_D": hs, "BLOCK": 64, "KEYS": T}
        core.launch(attention.all_keys_kernel, (T // 64, B * nh), q, k, v, y, T, SCALE=hs**-0.5, **sizes)
        return
    outputs = (y, fill_single(device, B, nh, T))
    name = "attention_forward"
    attention.launch_blocks(attention.forward_kernel, name, (q, k, v), outputs, None, 0.0, hs**-0.5, SPLIT=split)


def run_attention_backward(device: str, module: Any) -> None:
    q, k, v, y, dy = (fill_tensor(device, *HEAD) for _ in range(5))
    module.backward_op(dy, q, k, v, y, fill_single(device, *HEAD[:3]), None, 0.0, HEAD[-1] ** -0.5)


def run_gelu(device: str, is_fused: bool) -> None:
    bias, dtype = fill_single(device, 4 * WIDTH), fill_tensor(device, 1).dtype
    if is_fused:
        x, weight = fill_tensor(device, GELU_ROWS, WIDTH), fill_tensor(device, 4 * WIDTH, WIDTH)
        gelu.linear_op(x, weight, bias, False, dtype, True)
    else:
        gelu.forward_op(fill_tensor(device, GELU_ROWS, 4 * WIDTH), bias, False, dtype)


def run_embedding(device: str, step: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    B, T, V = EMBEDDED
    step(fill_single(device, B, T, WIDTH), (torch.arange(B * T, device=device) % (V // 4)).view(B, T), V)


def run_adamw(device: str, is_multi_tensor: bool) -> None:
    params = [fill_single(device, ELEMENTS) for _ in range(TENSORS)]
    if is_multi_tensor:
        for param in params:
            param.grad = torch.empty_like(param).fill_(0.5)
        adamw.TritonAdamW(params).step()
    else:
        for param in params:
            g, m, v = (torch.ones_like(param) for _ in range(3))
            adamw.run_one_tensor_step(param, g, m, v, (0.5,) * 7)


def list_steps() -> list[Step]:
    """Return all numbered steps that have code. Steps 2 and 3 of the loss share the kernel of step 4."""
    partial, B, T, V = functools.partial, *EMBEDDED
    products = {count: partial(run_attention_backward, module=each) for count, each in ATTENTION_BACKWARDS.items()}
    with record_launches(ARCHITECTURE):  # costs that depend on tile sizes use those of this architecture
        norm, norm_backward = layernorm.cost(ROWS, WIDTH, 2)
        loss, _ = cross_entropy.cost(8, VOCABULARY, 2)
        heads, heads_backward = attention.cost(*HEAD, 2)
        product, _ = gelu.linear_cost(GELU_ROWS, 4 * WIDTH, WIDTH, 2)
        alone, _ = gelu.cost(GELU_ROWS, 4 * WIDTH, 2)
        update = adamw.cost(TENSORS * ELEMENTS, 4, TENSORS)
    in_place = Cost(2 * loss.read, loss.written + 2 * 8 * VOCABULARY, loss.flops)  # one more read, one write
    tokens = Cost(4 * B * T * WIDTH + 8 * B * T, 4 * V * WIDTH, B * T * WIDTH)  # without the position embedding
    embed = {number: partial(run_embedding, step=step) for number, step in EMBEDDING_STEPS.items()}
    return [
        Step("LayerNorm, forward", "1", "one row per program", partial(run_norm, step=NORM_STEPS["1"]), norm),
        Step("LayerNorm, forward", "2", "several rows per program", partial(run_norm, step=NORM_STEPS["2"]), norm),
        Step("LayerNorm, forward", "3", "a row per warp", partial(run_norm, step=NORM_STEPS["3"]), norm),
        Step("LayerNorm, backward", "1", "atomics", partial(run_norm_backward, stages=None), norm_backward),
        Step("LayerNorm, backward", "2", "persistent", partial(run_norm_backward, stages=1), norm_backward),
        Step("LayerNorm, backward", "3", "loads run ahead", partial(run_norm_backward, stages=2), norm_backward),
        Step("cross-entropy", "1", "two passes over a row", partial(run_loss, gradient=None), loss),
        Step("cross-entropy", "2, 4", "online softmax", partial(run_loss, gradient=False), loss),
        Step("cross-entropy", "3, 4", "the gradient in the same program", partial(run_loss, gradient=True), in_place),
        Step("attention, forward", "1", "all keys at once", partial(run_attention, split=None), heads),
        Step("attention, forward", "2", "online softmax", partial(run_attention, split=False), heads),
        Step("attention, forward", "3", "a mask only on the diagonal", partial(run_attention, split=True), heads),
        Step("attention, backward", "1", "seven products, no atomics", products[7], heads_backward),
        Step("attention, backward", "2", "five products, dq with atomics", products[5], heads_backward),
        Step("GELU, forward", "1", "bias and GELU in one pass", partial(run_gelu, is_fused=False), alone),
        Step("GELU, forward", "2", "in the epilogue of the product", partial(run_gelu, is_fused=True), product),
        Step("embedding, backward", "1", "atomics", embed["1"], tokens),
        Step("embedding, backward", "2", "sorted tokens", embed["2"], tokens),
        Step("embedding, backward", "3", "sums of windows", embed["3"], tokens),
        Step("AdamW", "1", "one launch per tensor", partial(run_adamw, is_multi_tensor=False), update),
        Step("AdamW", "2", "one launch for all tensors", partial(run_adamw, is_multi_tensor=True), update),
    ]


@contextmanager
def count_requested_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes that interpreted kernels load and store in this context. An atomic addition counts as both."""
    from triton.runtime.interpreter import InterpreterBuilder

    counts = {"loaded": 0, "stored": 0}

    def patch(name: str, pointer: int, mask: int, kinds: tuple[str, ...]) -> None:
        original = getattr(InterpreterBuilder, name)

        def count(self: Any, *args: Any, **kwargs: Any) -> Any:
            for kind in kinds:
                itemsize = args[pointer].get_element_ty().primitive_bitwidth // 8
                counts[kind] += int(args[mask].data.sum()) * itemsize
            return original(self, *args, **kwargs)

        stack.callback(setattr, InterpreterBuilder, name, original)
        setattr(InterpreterBuilder, name, count)

    with ExitStack() as stack:
        patch("create_masked_load", 0, 1, ("loaded",))
        patch("create_masked_store", 0, 2, ("stored",))
        patch("create_atomic_rmw", 1, 3, ("loaded", "stored"))
        yield counts


def count_bytes() -> list[dict[str, int]]:
    """Return the bytes that each step requests with the tiles of the architecture. Needs interpreted kernels."""
    core.current_architecture = lambda: ARCHITECTURE
    rows = []
    for step in list_steps():
        with count_requested_bytes() as counts:
            step.run("cpu")
        rows.append(counts)
    return rows


def read_machine_code(step: Step) -> dict[str, Any]:
    """Return the launches of a step, and the resources of its different kernels. Needs compiled kernels."""
    with record_launches(ARCHITECTURE) as recorder:
        step.run("meta")
    kernels = {format_launch(*launch): launch for launch in recorder.launches}
    code = [compile_launch(*launch, ARCHITECTURE) for launch in kernels.values()]
    return {
        "launches": len(recorder.launches),
        "kernels": list(kernels),
        "registers": max(each["registers"] for each in code),
        "stack_bytes": max(each["stack_bytes"] for each in code),
        "instructions": sum(each["instructions"] for each in code),
    }


def measure_steps() -> list[dict[str, Any]]:
    """Return the bytes and the machine code of each step."""
    words = [sys.executable, "-m", "bench.kernels.ladder", COUNT_BYTES]
    counted = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    rows = []
    for step, counts in zip(list_steps(), counted, strict=True):
        minimum = step.minimum.read + step.minimum.written
        row = {"kernel": step.kernel, "step": step.number, "idea": step.idea, **counts, "minimum_bytes": minimum}
        rows.append({**row, **read_machine_code(step)})
    return rows


def main(words: list[str]) -> None:
    if unknown := set(words) - {"--write", COUNT_BYTES}:
        raise ConfigError(f"{min(unknown)} is unknown: use --write or no option")
    if COUNT_BYTES in words:
        print(json.dumps(count_bytes()))
        return
    rows = measure_steps()
    for row in rows:
        print(row)
    if "--write" in words:
        settings = {"command": "python -m bench.kernels.ladder --write", "sources": hash_sources()}
        settings |= {"triton": triton.__version__, "architecture": ARCHITECTURE}
        print(f"wrote {write_result('kernel-ladder', torch.device('cpu'), settings, {'rows': rows})}")


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
