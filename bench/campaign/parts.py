"""The parts of a campaign in order of worth: whoever has only ten minutes gets the most important results.

The estimated times are for one H100. They decide only whether a part fits into the time that is left.
"""

from dataclasses import replace

from bench.campaign.folder import Part

KERNELS = (
    "loss",
    "attention",
    "layernorm",
    "adamw",
    "cross_entropy",
    "add_layernorm",
    "gelu",
    "linear_gelu",
    "embedding",
)
TUNED = {  # keys of configs.json, and seconds to tune each
    "attention_dkv": 60,
    "attention_dq": 60,
    "attention_forward": 60,
    "layernorm_backward": 40,
    "cross_entropy_forward": 40,
    "cross_entropy_backward": 30,
    "layernorm_forward": 30,
    "linear_gelu": 30,
    "gelu_forward": 20,
    "gelu_backward": 20,
    "adamw": 20,
    "embedding_forward": 20,
    "embedding_windows": 20,
    "embedding_tokens": 20,
    "embedding_positions": 20,
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
TESTS = ("tests/phase2", "tests/baseline", "tests/phase1", "tests/phase3", "tests/promises")
CHECKS, TIMINGS, RUNS = "bench.campaign.checks", "bench.campaign.timings", "bench.campaign.trainers"


def list_parts(dry_run: bool = False) -> list[Part]:
    """Return all parts, in the order in which they run. In a dry run, each takes a few seconds."""
    parts = list_gpu_parts()
    return [replace(part, estimate_seconds=min(part.estimate_seconds, 10)) for part in parts] if dry_run else parts


def name_kernels(kernels: str) -> str:
    """Return a name for a value of `--kernels`."""
    return kernels if "," not in kernels else "all_but_adamw"


def list_gpu_parts() -> list[Part]:
    """Return all parts with their times on a GPU."""
    parts = [
        Part("machine", "versions", f"{CHECKS}:describe_machine", estimate_seconds=15),
        Part("machine", "attention_backends", f"{CHECKS}:compare_attention_backends", estimate_seconds=15),
    ]
    parts += [Part("kernels", kernel, f"{CHECKS}:check_kernel", (kernel,), 20) for kernel in KERNELS]
    parts += [
        Part("compiled", f"{phase}_{name_kernels(kernels)}", f"{RUNS}:compare_compiled", (phase, kernels), 120)
        for phase, kernels in TRAINERS
    ]
    parts += [Part("sanitizer", tool, f"{CHECKS}:run_sanitizer", (tool,), 90) for tool in ("memcheck", "racecheck")]
    parts += [Part("tests", path.replace("/", "-"), f"{CHECKS}:run_tests", (path,), 200) for path in TESTS]
    parts += [Part("times", kernel, f"{TIMINGS}:time_kernel", (kernel, False), 30) for kernel in KERNELS]
    parts += [
        Part("tuning", key, f"{TIMINGS}:tune_key", (key, seconds), seconds + 15) for key, seconds in TUNED.items()
    ]
    parts += [Part("tuned_times", kernel, f"{TIMINGS}:time_kernel", (kernel, True), 40) for kernel in KERNELS]
    for model, seconds in (("gpt2", 60), ("gpt2-xl", 120)):
        for is_compiled in (True, False):
            mode = "compiled" if is_compiled else "eager"
            for phase, kernels in TRAINERS:
                arguments = (model, phase, kernels, is_compiled)
                name = f"{model}_{phase}_{name_kernels(kernels)}_{mode}"
                parts.append(Part("throughput", name, f"{RUNS}:measure_throughput", arguments, seconds))
    parts += [Part("nanogpt", phase, f"{RUNS}:compare_with_nanogpt", (phase,), 240) for phase in ("phase2", "baseline")]
    parts.append(Part("fsdp", "against_baseline", f"{RUNS}:compare_fsdp", (), 240))
    parts += [
        Part("plan", phase, f"{RUNS}:compare_plan", (phase,), 60)
        for phase in ("baseline", "phase1", "phase2", "phase3")
    ]
    parts += [
        Part("memory", f"checkpointing_{value}", f"{RUNS}:measure_activation_checkpointing", (value,), 90)
        for value in ("none", "selective", "full")
    ]
    parts.append(Part("memory", "cpu_offload", f"{RUNS}:measure_cpu_offload", (), 150))
    parts += [Part("largest", model, f"{RUNS}:train_large_model", (model,), 180) for model in ("2.7b", "6.7b", "13b")]
    parts += [
        Part("profile", phase, f"{RUNS}:profile_phase", (phase,), 60) for phase in ("baseline", "phase2", "phase3")
    ]
    return parts
