"""The parts of a campaign in order of worth: whoever has only ten minutes gets the most important results.

The estimated times are for one H100. They decide whether a part fits into the time that is left, and when it counts as
hanging. The stages up to the tuning take about 28 minutes.
"""

from dataclasses import replace
from typing import Any

from bench.campaign.folder import Part

KERNELS = (
    "loss",
    "attention",
    "layernorm",
    "adamw",
    "cross_entropy",
    "add_layernorm",
    "gelu",
    "embedding",
)
TUNED = {  # keys of configs.json, and seconds to tune each
    "attention_dkv": 40,
    "attention_dq": 40,
    "attention_forward": 40,
    "layernorm_backward": 30,
    "cross_entropy_forward": 30,
    "cross_entropy_backward": 20,
    "layernorm_forward": 20,
    "gelu_forward": 10,
    "gelu_backward": 10,
    "adamw": 10,
    "embedding_forward": 10,
    "embedding_windows": 10,
    "embedding_tokens": 10,
    "embedding_positions": 10,
}
TRAINERS = (  # phase, kernels
    ("baseline", "none"),
    ("phase1", "none"),
    ("phase2", "loss"),
    ("phase2", "all"),
    ("phase3", "none"),
    ("phase3", "loss"),
    ("phase3", "attention,embedding,gelu,layernorm,loss"),  # the AdamW kernel does not update shards
)
OTHER_TESTS = ("tests/baseline", "tests/phase1", "tests/phase3", "tests/promises", "tests/bench")
CHECKS, TIMINGS, RUNS = "bench.campaign.checks", "bench.campaign.timings", "bench.campaign.trainers"
MEMORY = "bench.campaign.memory"


def list_parts(dry_run: bool = False) -> list[Part]:
    """Return all parts, in the order in which they run. In a dry run, each takes a few seconds."""
    parts = [*list_first_parts(), *list_tuning(), *list_memory(), *list_last_parts()]
    return [replace(part, estimate_seconds=min(part.estimate_seconds, 25)) for part in parts] if dry_run else parts


def name_kernels(kernels: str) -> str:
    """Return a name for a value of `--kernels`."""
    return kernels if "," not in kernels else "all_but_adamw"


def list_first_parts() -> list[Part]:
    """Return the parts that say whether everything is correct and how fast it is, for GPT-2 124M."""
    parts = [
        Part("machine", "versions", f"{CHECKS}:describe_machine", estimate_seconds=10),
        Part("machine", "attention_backends", f"{CHECKS}:compare_attention_backends", estimate_seconds=10),
    ]
    parts += [Part("kernels", kernel, f"{CHECKS}:check_kernel", (kernel,), 12) for kernel in KERNELS]
    parts += [
        Part("compiled", f"{phase}_{name_kernels(kernels)}", f"{RUNS}:compare_compiled", (phase, kernels), 60)
        for phase, kernels in TRAINERS
    ]
    parts += [
        Part("times", kernel, f"{TIMINGS}:time_kernel", (kernel, False), 40 if kernel == "loss" else 25)
        for kernel in KERNELS
    ]
    return parts + list_throughput("gpt2", 30, 30)


def list_throughput(model: str, compiled_seconds: float, eager_seconds: float) -> list[Part]:
    """Return the measurements of every trainer with a model, compiled and eager."""
    return [
        Part(
            "throughput",
            f"{model}_{phase}_{name_kernels(kernels)}_{'compiled' if is_compiled else 'eager'}",
            f"{RUNS}:measure_throughput",
            (model, phase, kernels, is_compiled),
            compiled_seconds if is_compiled else eager_seconds,
        )
        for is_compiled in (True, False)
        for phase, kernels in TRAINERS
    ]


def list_tuning() -> list[Part]:
    """Return the search for tile sizes, and the times of all kernels with them."""
    tuning = [Part("tuning", key, f"{TIMINGS}:tune_key", (key, seconds), seconds + 8) for key, seconds in TUNED.items()]
    return tuning + [Part("tuned_times", kernel, f"{TIMINGS}:time_kernel", (kernel, True), 30) for kernel in KERNELS]


def list_memory() -> list[Part]:
    """Return the options that save memory, the planner's predictions, and the largest model."""
    parts = [
        Part("memory", f"checkpointing_{value}", *measure_option(60, fsdp_activation_checkpointing=value))
        for value in ("none", "selective", "full")
    ]
    offload = measure_option(120, fsdp_activation_checkpointing="full", fsdp_cpu_offload=True)
    parts.append(Part("memory", "cpu_offload", *offload))
    phases = ("baseline", "phase1", "phase2", "phase3")
    parts += [Part("plan", phase, f"{MEMORY}:compare_plan", (phase,), 40) for phase in phases]
    parts += [Part("largest", f"{percent}_percent", f"{MEMORY}:train_largest", (percent,), 90) for percent in (80, 95)]
    return parts


def measure_option(
    seconds: float, phase: str = "phase3", model: str = "gpt2-large", **options: Any
) -> tuple[str, tuple[Any, ...], float]:
    """Return the last fields of a Part that measures a trainer with an option."""
    return f"{RUNS}:measure_option", (phase, model, options), seconds


def list_last_parts() -> list[Part]:
    """Return what remains: comparisons, 1.5B parameters, further options, profiles, the sanitizer and the tests."""
    parts = [Part("fsdp", "against_baseline", f"{RUNS}:compare_fsdp", (), 120)]
    parts += [Part("nanogpt", phase, f"{RUNS}:compare_with_nanogpt", (phase,), 200) for phase in ("phase2", "baseline")]
    parts += list_throughput("gpt2-xl", 150, 60)
    parts += [
        Part("options", "muon_with_fsdp", *measure_option(60, "phase3", "gpt2", optimizer="muon")),
        Part("options", "kernels_auto", *measure_option(60, "phase2", "gpt2", kernels="auto")),
        Part("options", "zero_2", *measure_option(60, "phase1", "gpt2", zero_stage=2)),
        Part("plan", "train_mid", f"{MEMORY}:compare_plan_of_config", ("phase3", "train_mid"), 60),
        Part("evaluation", "phase3", f"{RUNS}:measure_evaluation", (), 45),
    ]
    parts += [
        Part("profile", phase, f"{RUNS}:profile_phase", (phase,), 60) for phase in ("baseline", "phase2", "phase3")
    ]
    parts += [Part("sanitizer", tool, f"{CHECKS}:run_sanitizer", (tool,), 90) for tool in ("memcheck", "racecheck")]
    parts.append(Part("tests", "kernels", f"{CHECKS}:run_tests", ("kernels", "tests/phase2"), 200))
    parts.append(Part("tests", "trainers", f"{CHECKS}:run_tests", ("trainers", *OTHER_TESTS), 200))
    return parts
