"""Read everything that a run has left in its directory."""

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoGPT.checkpoint.manifest import DamagedCheckpoint, read_manifest, step_directories, verify_files
from nanoGPT.errors import ConfigError, blames_peer
from operate.run_files import read_by_rank, read_heartbeats, read_json_lines, read_json_object

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>\S+)')


@dataclass
class Evidence:
    """What a run has left.

    Attributes:
        folder: the run's directory.
        log: the lines of log.txt since the run last started.
        heartbeats: the last heartbeat of each rank.
        verdict: the message of the watchdog; empty if the run did not hang.
        records: the lines of diagnostics/rank{r}.jsonl of each rank.
        collectives: for each backend, the last collectives of each rank, oldest first.
        stacks: the end of stacks/rank{r}.txt of each rank: its last crash or hang.
        metrics: the lines of metrics.jsonl.
        environment: env.json.
        checkpoint: the newest complete checkpoint, from which a resume would continue.
        damaged: for each damaged checkpoint that is newer, the reason.
    """

    folder: Path
    log: list[str] = field(default_factory=list)
    heartbeats: dict[int, dict[str, Any]] = field(default_factory=dict)
    verdict: str = ""
    records: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    collectives: dict[str, dict[int, list[dict[str, Any]]]] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    damaged: dict[str, str] = field(default_factory=dict)

    @property
    def exit_line(self) -> str:
        """The launcher's line about the exit; empty if the run did not fail, or was not started by the launcher.

        With several nodes, the line of the node whose rank failed by itself is preferred.
        """
        lines = [line for line in reversed(self.log) if " launcher: " in line]
        return next((line for line in lines if not blames_peer(line)), next(iter(lines), ""))

    @property
    def failures(self) -> dict[int, str]:
        """The error of each rank that failed, in the order in which they failed."""
        found: dict[int, str] = {}
        for line in self.log:
            if match := re.match(r"\S+ \S+ rank (\d+): failed in (.*)", line):
                found.setdefault(int(match[1]), match[2])
        return found

    @property
    def root_failure(self) -> tuple[int, str] | None:
        """The first rank that failed by itself, and its error. Ranks that only lost their peer do not count."""
        return next(((rank, text) for rank, text in self.failures.items() if not blames_peer(text)), None)

    def location(self, rank: int) -> str:
        """Return the innermost line of this repository in the rank's last stack; "" if there is none.

        A traceback of Python has its innermost frame last, and a stack of faulthandler has it first.
        """
        # From Python 3.14 on, the stack of C functions follows that of the main thread.
        text = self.stacks.get(rank, "").replace("C stack trace (most recent call first)", "")
        main = text.rpartition("(most recent call first):")[2]
        is_traceback = "Traceback (most recent call last)" in main
        matches = list(
            FRAME.finditer(main.rpartition("Traceback (most recent call last)")[2] if is_traceback else main)
        )
        for match in reversed(matches) if is_traceback else matches:
            if "-packages/" not in match["file"] and "/lib/python" not in match["file"]:
                return f"{'/'.join(Path(match['file']).parts[-2:])}:{match['line']}, {match['function']}"
        return ""


def read_evidence(folder: Path) -> Evidence:
    """Read the directory of a run, and verify its checkpoints.

    Raises:
        ConfigError: it is not the directory of a run.
    """
    evidence = Evidence(folder)
    with contextlib.suppress(OSError):
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()
        starts = [i for i, line in enumerate(lines) if ": started at step" in line]
        evidence.log = lines[starts[-1] :] if starts else lines
    evidence.heartbeats = read_heartbeats(folder)
    if not evidence.log and not evidence.heartbeats and not (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder} is not the directory of a run: give RUN=out/... with a metrics.jsonl or a log.txt")
    token = next((each.get("run", "") for each in evidence.heartbeats.values()), "")
    with contextlib.suppress(OSError):
        evidence.verdict = (folder / "stacks" / f"stalled-{token}.txt").read_text().strip()
    for rank, path in read_by_rank(folder / "diagnostics", "rank*.jsonl").items():
        of_newest_start = [each for each in read_json_lines(path) if each.get("run", token) == token]
        if of_newest_start:
            evidence.records[rank] = of_newest_start
    for rank, path in read_by_rank(folder / "stacks", "collectives-rank*.json").items():
        for backend, dump in read_json_object(path).items():
            if isinstance(dump, dict) and "entries" in dump:
                evidence.collectives.setdefault(backend, {})[rank] = dump["entries"]
    for rank, path in read_by_rank(folder / "stacks", "rank*.txt").items():
        evidence.stacks[rank] = path.read_text(errors="replace")[-20_000:]
    evidence.metrics = read_json_lines(folder / "metrics.jsonl")
    evidence.environment = read_json_object(folder / "env.json")
    read_checkpoints(evidence)
    return evidence


def read_checkpoints(evidence: Evidence) -> None:
    """Find the checkpoint that a resume would use, newer damaged ones, and damaged ones that a resume has renamed."""
    for path in step_directories(evidence.folder):
        try:
            verify_files(path, read_manifest(path))
            evidence.checkpoint = path
            break
        except DamagedCheckpoint as reason:
            evidence.damaged[path.name] = str(reason)
    for path in sorted((evidence.folder / "checkpoints").glob(".bad-step-*")):
        reason_text = "an earlier resume has renamed it"
        with contextlib.suppress(DamagedCheckpoint, OSError):
            try:
                verify_files(path, read_manifest(path))
            except DamagedCheckpoint as reason:
                reason_text = f"{reason}; an earlier resume has renamed it"
        evidence.damaged[path.name] = reason_text
