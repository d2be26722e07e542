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


def format_report(evidence: Evidence, cause: Cause) -> str:
    """Return the report: one labeled paragraph per subject."""
    config = evidence.environment.get("config", {})
    ranks = evidence.environment.get("world_size") or len(evidence.heartbeats)
    last = max((beat.get("step", 0) for beat in evidence.heartbeats.values()), default=0)
    rows = [("run", f"{evidence.folder}, {ranks} rank(s), step {last} of {config.get('max_iters', '?')}")]
    if evidence.log:
        rows.append(("log", evidence.log[-1][:300]))
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
