"""Record what each phase changes in train.py, and for each change its lesson, its cost and its tests.

`workshop.diff` finds the changes, and the notes of the phase explain them. The costs are the results of the phases' own
cost functions for GPT-2, on tensors without data. LINKS names, for each tag, what it saves or sends, and its tests.
"""

import ast
import html
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.matrix.cells import make_config
from bench.plan.trace import CPU, fake_process_group, select_step_costs, set_up_training, suppress_output
from bench.tables.records import TRAINERS
from book.recordings.layout import GPT2
from book.sources import name_lesson
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.memory.costs import Costs, ring_bytes
from nanoGPT.memory.savings import Needs, logits_bytes
from phase2_triton.kernels import linear_cross_entropy
from workshop.diff import BASELINE, ROOT, Hunk, find_hunks
from workshop.diff_page import read_explanations
from workshop.phases import PHASES

RANKS, MICRO_BATCHES = 4, 2  # micro-batches of each rank in a step
LOSS_TOKENS = 16  # sequences of 1,024 tokens in bfloat16, as in the table of kernel costs
Quantity = tuple[str, float, float]  # name, bytes without the change, bytes with it
CURVE = "tests/promises/test_one_curve.py"
RESUME = f"{CURVE}::test_resume_at_the_same_ranks_is_exact"
OTHER_PHASE = f"{CURVE}::test_a_checkpoint_opens_in_another_phase"
SAME_LOSSES = f"{CURVE}::test_losses_do_not_depend_on_ranks_or_phase"


class PredictedCosts:
    """The costs of a step of GPT-2 by phase and options, from the phases' cost functions. Each is computed once."""

    def __init__(self) -> None:
        self.computed: dict[str, Costs] = {}

    def of(self, phase: str, **options: Any) -> Costs:
        """Return the costs on rank 0 of RANKS ranks."""
        key = f"{phase} {options}"
        if key not in self.computed:
            fields = {"device": "cpu", "dtype": "float32", "gradient_accumulation_steps": RANKS * MICRO_BATCHES}
            config = make_config(phase, Path("out"), **fields, **options)
            run = Runtime(0, 0, RANKS, RANKS, CPU, torch.float32)
            with suppress_output(), fake_process_group(RANKS), FakeTensorMode(allow_non_fake_inputs=True):
                setup = set_up_training(config, GPT2, run)
                self.computed[key] = select_step_costs(config)(setup.model, setup.optimizer, config, run)
        return self.computed[key]

    def sent(self, kind: str, phase: str, **options: Any) -> float:
        """Return the bytes that a rank sends in a step for one kind of collective, with the ring algorithm."""
        return ring_bytes(kind, self.of(phase, **options).traffic[kind, RANKS], RANKS)

    def compare_state(self, phase: str) -> list[Quantity]:
        """Return the model state per rank by category."""
        without, sharded = self.of("baseline").state, self.of(phase).state
        return [(f"{name.replace('_', ' ')} per rank", without[name], sharded[name]) for name in without]

    def compare_collectives(self, phase: str) -> list[Quantity]:
        """Return the bytes that a rank sends in a step by kind of collective, without those for the norm."""
        kinds = ("all-reduce", "reduce-scatter", "all-gather")
        sent = [(kind, self.sent(kind, "baseline"), self.sent(kind, phase)) for kind in kinds]
        return [(f"{kind}, sent per rank", a, 0.0 if kind == "all-reduce" else b) for kind, a, b in sent]

    def compare_saved(self, phase: str, verb: str) -> list[Quantity]:
        """Return the bytes of weights and moments that rank 0 reads or writes."""
        names = ("parameters", "optimizer_state") if phase == "phase3" else ("optimizer_state",)
        sizes = [sum(self.of(each).state[name] for name in names) for each in ("baseline", phase)]
        return [(f"{'weights and moments' if len(names) > 1 else 'moments'} that rank 0 {verb}", sizes[0], sizes[1])]

    def compare_sync(self, phase: str, **every_micro_batch: Any) -> list[Quantity]:
        """Return the bytes of the reduce-scatters if every micro-batch communicates, and as the phase does it."""
        kind = "reduce-scatter"
        sent = self.sent(kind, phase, **every_micro_batch), self.sent(kind, phase)
        return [(f"{kind}, sent per rank: after every micro-batch, after the last one", *sent)]

    def compare_norm(self, phase: str) -> list[Quantity]:
        """Return the bytes that a rank sends for the norm of sharded gradients."""
        flags = " and one byte per parameter tensor" if phase == "phase1" else ""
        return [(f"squared norm{flags}, sent per rank", 0.0, self.sent("all-reduce", phase))]

    def compare_loss_memory(self, _: str) -> list[Quantity]:
        """Return the memory of the logits without the loss kernel, and the workspace of the kernel."""
        tokens = LOSS_TOKENS * GPT2.block_size
        config = make_config("phase2", Path("out"), batch_size=LOSS_TOKENS, block_size=GPT2.block_size)
        needs = Needs(GPT2, {}, activations=math.inf, is_gpu=True, is_shared=False)
        without = logits_bytes(config, needs, Runtime(0, 0, 1, 1, CPU, torch.bfloat16))
        workspace = linear_cross_entropy.cost(tokens, GPT2.n_embd, GPT2.vocab_size, 2).workspace
        return [(f"memory of the loss for {tokens:,} tokens in bfloat16", without, workspace)]

    def compare_nothing(self, _: str) -> list[Quantity]:
        """Return no quantity: the change only names the phase."""
        return []


# For each phase and tag: the quantities of the cost functions that it changes, and the tests that check it.
Link = tuple[Callable[[PredictedCosts, str], list[Quantity]], tuple[str, ...]]
ZERO1_TESTS, FSDP_TESTS = "tests/phase1/test_training.py", "tests/phase3/test_fsdp.py"
LINKS: dict[tuple[str, str], Link] = {
    ("phase1", "phase"): (PredictedCosts.compare_nothing, (OTHER_PHASE,)),
    ("phase1", "shard"): (PredictedCosts.compare_state, (f"{ZERO1_TESTS}::test_the_optimizer_state_of_124m",)),
    ("phase1", "load"): (
        lambda costs, phase: costs.compare_saved(phase, "reads"),
        (f"{ZERO1_TESTS}::test_a_run_saved_at_8_ranks_resumes_at_2_then_4_then_in_the_baseline", RESUME),
    ),
    ("phase1", "parallel"): (
        PredictedCosts.compare_collectives,
        (f"{ZERO1_TESTS}::test_flat_communicates_as_much_as_ddp", SAME_LOSSES),
    ),
    ("phase1", "save"): (lambda costs, phase: costs.compare_saved(phase, "writes"), (RESUME, OTHER_PHASE)),
    ("phase1", "sync"): (
        lambda costs, phase: costs.compare_sync(phase, zero_stage=2),
        (f"{ZERO1_TESTS}::test_flat_communicates_as_much_as_ddp",),
    ),
    ("phase1", "clip"): (
        PredictedCosts.compare_norm,
        (
            f"{ZERO1_TESTS}::test_the_norm_is_that_of_the_full_gradient",
            f"{ZERO1_TESTS}::test_a_local_norm_would_be_wrong",
        ),
    ),
    ("phase2", "phase"): (PredictedCosts.compare_nothing, (OTHER_PHASE,)),
    ("phase2", "apply"): (
        PredictedCosts.compare_loss_memory,
        (
            "tests/phase2/test_training.py::test_a_hundred_steps_match_the_baseline",
            "tests/phase2/test_training.py::test_parameter_names_and_state_dicts_do_not_change",
        ),
    ),
    ("phase3", "phase"): (PredictedCosts.compare_nothing, (OTHER_PHASE,)),
    ("phase3", "shard"): (
        PredictedCosts.compare_state,
        (f"{FSDP_TESTS}::test_the_state_of_124m", f"{FSDP_TESTS}::test_the_weights_do_not_depend_on_ranks"),
    ),
    ("phase3", "parallel"): (
        PredictedCosts.compare_collectives,
        (f"{FSDP_TESTS}::test_every_option_with_every_other", SAME_LOSSES),
    ),
    ("phase3", "load"): (lambda costs, phase: costs.compare_saved(phase, "reads"), (RESUME, OTHER_PHASE)),
    ("phase3", "save"): (
        lambda costs, phase: costs.compare_saved(phase, "writes"),
        (f"{CURVE}::test_a_checkpoint_saved_at_8_ranks_opens_on_every_mesh", OTHER_PHASE),
    ),
    ("phase3", "sync"): (
        lambda costs, phase: costs.compare_sync(phase, fsdp_sync_every_micro_batch=True),
        (f"{FSDP_TESTS}::test_every_option_with_every_other",),
    ),
    ("phase3", "clip"): (
        PredictedCosts.compare_norm,
        (f"{CURVE}::test_clipping_bounds_the_update_and_uses_the_global_norm", SAME_LOSSES),
    ),
}


def read_claim(test: str) -> str:
    """Return the docstring of a test as one line.

    Args:
        test: file and name of the test, such as `tests/phase3/test_fsdp.py::test_units_by_size`.

    Raises:
        ConfigError: the test does not exist.
    """
    file, _, name = test.partition("::")
    path = ROOT / file
    functions = ast.parse(path.read_text()).body if path.is_file() else []
    for node in functions:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return " ".join((ast.get_docstring(node) or "").split())
    raise ConfigError(f"{test} does not exist: name another test in book/recordings/train_diffs.py")


def list_tags(phase: str) -> set[str]:
    """Return the tags of a phase's changes."""
    return {tag for hunk in find_hunks(PHASES[phase]) for tag in hunk.tags}


def describe_lesson(phase: str, tag: str, hunk: Hunk) -> dict[str, Any]:
    """Return the tag, the anchor and the text of a lesson.

    Raises:
        ConfigError: the change has no lesson, no cost or no test.
    """
    explanations = read_explanations(PHASES[phase])
    comment = next(line.partition("]")[2].strip() for line in hunk.added if f":{tag}]" in line)
    explanation = html.unescape(re.sub(r"<[^>]+>", "", explanations.get(tag, "")))
    text = explanation.strip() or f"{comment.capitalize()}."
    if (phase, tag) not in LINKS or not LINKS[phase, tag][1] or not text:
        raise ConfigError(f"the change [{tag}] of {phase} has no lesson, cost or test: add it to LINKS in {__name__}")
    return {"tag": tag, "anchor": name_lesson(PHASES[phase], tag), "text": " ".join(text.split())}


def describe_hunk(phase: str, hunk: Hunk, costs: PredictedCosts) -> dict[str, Any]:
    """Return the place of a change in both files, its lessons, its quantities and its tests."""
    lessons = [describe_lesson(phase, tag, hunk) for tag in dict.fromkeys(hunk.tags)]
    links = [LINKS[phase, lesson["tag"]] for lesson in lessons]
    tests = dict.fromkeys(test for _, names in links for test in names)
    return {
        "baseline_line": hunk.baseline_line,
        "line": hunk.line,
        "removed": len(hunk.removed),
        "added": len(hunk.added),
        "lessons": lessons,
        "quantities": [list(quantity) for compare, _ in links for quantity in compare(costs, phase)],
        "tests": [{"name": name, "claim": read_claim(name)} for name in tests],
    }


def record() -> dict[str, Any]:
    """Return the sources of all trainers and what each phase changes.

    Returns:
        ranks, micro_batches (of each rank), baseline: the lines of its train.py, and phases: name, title, lines of
        train.py, and hunks (`describe_hunk`).
    """
    costs, phases = PredictedCosts(), []
    for phase, package in PHASES.items():
        if phase == "baseline":
            continue
        hunks = [describe_hunk(phase, hunk, costs) for hunk in find_hunks(package)]
        lines = (ROOT / package / "train.py").read_text().splitlines()
        phases.append({"name": package, "title": TRAINERS[phase], "lines": lines, "hunks": hunks})
    baseline = BASELINE.read_text().splitlines()
    return {"ranks": RANKS, "micro_batches": MICRO_BATCHES, "baseline": baseline, "phases": phases}
