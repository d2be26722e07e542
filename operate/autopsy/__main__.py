"""Find out why a run failed or is slow, from the files in its directory.

    make autopsy RUN=out/phase3_fsdp-20261123-120000
    make autopsy                                        # the newest run under out/

It reads the log, the heartbeats, the stacks, torch's flight recorder, the diagnostics, the metrics and the checkpoints,
and prints the rank at fault, the cause, the evidence, the remedy, and how to resume. It writes nothing. Train with
`--diagnostics_interval` to give it more to read.
"""

import sys
import textwrap
from pathlib import Path
from shlex import quote

from nanoGPT.job.command import command_line, report_errors
from operate.autopsy.causes import Cause, find_cause
from operate.autopsy.evidence import Evidence, read_evidence
from operate.run_files import find_newest_run

WIDTH, LABEL_WIDTH = 120, 10
# For each kernel of phase 2: the class of the modules that use it, and the classes of those that do not.
KERNEL_CLASSES = (
    ("attention", "KernelAttention", ("CausalSelfAttention", "LlamaAttention")),
    ("gelu", "KernelMLP", ("MLP",)),
    ("layernorm", "KernelLayerNorm", ("LayerNorm",)),
    ("layernorm", "KernelBlock", ("Block",)),
)


def describe_resume(evidence: Evidence) -> str:
    """Return how to continue, and how many steps are lost."""
    if evidence.checkpoint is None:
        return "there is no complete checkpoint: start again"
    newest = int(evidence.checkpoint.name.removeprefix("step-"))
    done = [line["step"] + 1 for line in evidence.metrics if line.get("loss") is not None]
    done += [beat.get("step", 0) for beat in evidence.heartbeats.values()]  # not every step is logged
    lost = max(0, max(done, default=newest) - newest)
    flags = f"--init_from=resume --out_dir={quote(str(evidence.folder))}"
    return f"{flags} continues after {newest} updates; {lost} step(s) are lost"


def describe_kernels(evidence: Evidence) -> str:
    """Return how many modules use each Triton kernel, and how many there are; "" if no kernel was chosen."""
    kernels = evidence.environment.get("config", {}).get("kernels", "none")
    if kernels == "none" or not evidence.summaries:
        return ""
    first = evidence.summaries[min(evidence.summaries)]
    counts: dict[str, int] = {}
    for name, count in first.get("modules", {}).items():
        plain = name.removeprefix("FSDP")  # fully_shard gives its modules a new class
        counts[plain] = counts.get(plain, 0) + count
    parts = []
    for kernel, used_class, plain_classes in KERNEL_CLASSES:
        used, plain = counts.get(used_class, 0), sum(counts.get(name, 0) for name in plain_classes)
        parts += [f"{kernel}: {used} of {used + plain} {' or '.join(plain_classes)}"] if used + plain else []
    return f"--kernels={kernels}; modules with a kernel: {', '.join(parts)}; {first.get('optimizer')} updates"


def format_report(evidence: Evidence, cause: Cause) -> str:
    """Return the report: one labeled paragraph per subject."""
    config = evidence.environment.get("config", {})
    ranks = evidence.environment.get("world_size") or len(evidence.heartbeats)
    last = max((beat.get("step", 0) for beat in evidence.heartbeats.values()), default=0)
    rows = [("run", f"{evidence.folder}, {ranks} rank(s), step {last} of {config.get('max_iters', '?')}")]
    if evidence.log:
        rows.append(("log", evidence.log[-1][:300]))
    rows += [("kernels", kernels)] if (kernels := describe_kernels(evidence)) else []
    rows.append(("cause", cause.text))
    rows += [("evidence", line) for line in cause.evidence]
    rows += [("remedy", cause.remedy)] if cause.remedy else []
    rows.append(("resume", describe_resume(evidence)))
    lines = []
    for label, text in rows:
        wrapped = textwrap.wrap(text, WIDTH - LABEL_WIDTH)
        lines += [f"{label if i == 0 else '':<{LABEL_WIDTH}}{line}" for i, line in enumerate(wrapped)]
    return "\n".join(lines)


def main(run: Path | None = None) -> None:
    """Find out why a run failed or is slow.

    Args:
        run: the run's directory; None: the newest one under out/.
    """
    evidence = read_evidence(run or find_newest_run())
    print(format_report(evidence, find_cause(evidence)))


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
