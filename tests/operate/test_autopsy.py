"""`make autopsy`: it names the cause of each of ten planted faults, and reads directories that are damaged."""

import os
import re

import pytest

from nanoGPT.errors import ConfigError
from operate.autopsy.causes import find_cause
from operate.autopsy.evidence import Evidence, read_evidence
from operate.run_files import find_newest_run
from tests.helpers.marks import mark_slow
from tests.helpers.programs import Program, assert_refused, run_program
from tests.helpers.training import tiny, train
from workshop.faults import FAULTS

# For each fault, the kind of the cause and words of its report.
REPORTS = {
    "collective": ("mismatch", r"rank 0 called one at workshop/faults.py:\d+.* that the other ranks did not call"),
    "seeds": ("diverged", r"step 0: ranks \[0\] and \[1\] and \[2\] have different values of the same parameters"),
    "nan": ("nan", r"the loss of rank\(s\) \[1\] alone is not finite in step 4"),
    "hang": ("hang", r"rank 1 has made no progress for \d+ s in step 4, .*faults.py:\d+, wait_forever"),
    "device": ("error", r"rank 1: a tensor is on a different device .* at nanoGPT/model.py:\d+, compute_loss"),
    "norm": ("norm", r"step 0: the ranks have different gradient norms \(\[0\]: [\d.]+, \[1\]: [\d.]+\)"),
    "ready_twice": ("error", r"DDP received the gradient of a parameter twice in one backward pass"),
    "checkpoint": ("checkpoint", r"\.bad-step-00000012 is damaged: the hash of \S+ differs"),
    "leak": ("leak", r"the memory of rank \d grows by [12]\.\d+ MB per step"),
    "straggler": ("straggler", r"rank 1 is slower than all others"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", [*(name for name in FAULTS if name != "straggler"), *mark_slow("straggler")])
def test_the_cause_of_each_fault_is_named(name, tmp_path):
    """Each fault is started by its command, and the autopsy names the rank, the cause and how to go on.

    The environment, and the heartbeat and the stacks of each rank are there, also if building the model fails.
    """
    program = Program("workshop.faults", f"--name={name}", cwd=tmp_path)
    output, _ = program.communicate()
    assert program.returncode == 0 and f"make autopsy RUN=out/faults/{name}" in output, output
    folder = tmp_path / "out" / "faults" / name
    kind, pattern = REPORTS[name]
    evidence = read_evidence(folder)
    assert find_cause(evidence).kind == kind
    assert evidence.environment["world_size"] == len(evidence.heartbeats) == len(evidence.stacks) > 1
    report = run_program("operate.autopsy", f"--run={folder}").output
    assert re.search(pattern, " ".join(report.split())), report
    assert "\nremedy    " in report and "\nresume    " in report


def test_a_good_run_has_no_fault(tmp_path):
    """A run that has ended, also with diagnostics, has no fault."""
    train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path, n_layer=1, diagnostics_interval=1))
    cause = find_cause(read_evidence(tmp_path))
    assert (cause.kind, cause.text) == ("none", "no fault: the run has ended")


@pytest.mark.parametrize(
    ("waiting", "beats", "kind"),
    [((2, 6), 8, "none"), ((6, 18), 24, "straggler"), ((60_000, 240_000), 400_000, "straggler")],
)
def test_a_short_run_has_no_straggler(waiting, beats, kind, tmp_path):
    """On a busy machine, one of two equal ranks may wait less in a few heartbeats. Many heartbeats are evidence."""
    heartbeats = {rank: {"waiting_beats": each, "beats": beats, "ended": True} for rank, each in enumerate(waiting)}
    assert find_cause(Evidence(tmp_path, heartbeats=heartbeats)).kind == kind


@pytest.mark.parametrize(("name", "kind"), [("SIGABRT", "mismatch"), ("SIGSEGV", "mismatch"), ("SIGKILL", "killed")])
def test_an_abort_whose_stack_is_incomplete_is_a_mismatch(name, kind, tmp_path):
    """Gloo aborts a rank that receives data of another size. faulthandler may crash while it writes the stacks."""
    stacks = {0: "Fatal Python error: Aborted\n\nThread 0x0 (most recent call first):\n  File Fatal Python", 1: ""}
    log = [f"2026-01-01 00:00:00 launcher: exit code 1: rank 0: it was killed by {name}"]
    assert find_cause(Evidence(tmp_path, log=log, stacks=stacks)).kind == kind


def test_the_stack_of_c_functions_is_not_the_stack_of_the_main_thread(tmp_path):
    """From Python 3.14 on, faulthandler also writes a stack of C functions, after those of all threads."""
    stack = 'Thread 0x0 (most recent call first):\n  File "/my/train.py", line 3 in train\n\n'
    stack += 'Current thread\'s C stack trace (most recent call first):\n  Binary file "libc.so", at raise+0x0 [0x0]\n'
    assert Evidence(tmp_path, stacks={0: stack}).location(0) == "my/train.py:3, train"


def test_a_stopped_process_is_not_compared(tmp_path):
    """A process that SIGSTOP has stopped continues to write its stacks, so its collectives prove nothing."""
    verdict = "rank 1 has made no progress for 5 s in step 3, update (according to its last heartbeat; {})"
    collectives = {"gloo": {rank: [{"pg_id": 0, "collective_seq_id": 7 + rank}] for rank in (0, 1)}}
    found = [
        find_cause(Evidence(tmp_path, verdict=verdict.format(state), collectives=collectives))
        for state in ("the process is stopped", "the process does not respond")
    ]
    assert "SIGSTOP" in found[0].remedy and not found[0].evidence and len(found[1].evidence) == 1


def test_the_node_whose_rank_was_killed_is_named(tmp_path):
    """The launchers of several nodes write into one log. The one that only lost a rank may write last."""
    killed = "2026-01-01 00:00:00 launcher: exit code 137: rank 1: it was killed by SIGKILL"
    lost = "2026-01-01 00:00:01 launcher: exit code 1: rank 0: lost a rank (Connection closed by peer)"
    assert Evidence(tmp_path, log=[killed, lost]).exit_line == killed
    assert Evidence(tmp_path, log=[lost]).exit_line == lost and not Evidence(tmp_path).exit_line


def test_the_newest_run_is_the_one_that_wrote_last(tmp_path, monkeypatch):
    """A run that still trains is newer than a run that was created after it and has ended."""
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("training", 2), ("ended", 1)):
        file = tmp_path / "out" / name / "metrics.jsonl"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (seconds, seconds))
    assert find_newest_run().name == "training"


def test_damaged_files_are_read(tmp_path):
    """Files that were cut off or contain nonsense do not stop the autopsy."""
    train("nanoGPT", 2, tiny("nanoGPT", tmp_path, n_layer=1, diagnostics_interval=4))
    for path in [*tmp_path.glob("heartbeat/*"), *tmp_path.glob("diagnostics/*"), tmp_path / "env.json"]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "stacks" / "rank0.txt").write_bytes(b"\xff\xfe\x00")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('[]\n5\n"text"\n')
    (tmp_path / "stacks" / "collectives-rank0.json").write_text("[]")
    assert find_cause(read_evidence(tmp_path)).kind == "none"


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    """An empty directory, a missing directory and an unknown fault each print one error message."""
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        read_evidence(tmp_path)
    assert_refused(run_program("operate.autopsy", f"--run={tmp_path / 'missing'}"), "is not the directory of a run")
    assert_refused(run_program("workshop.faults", "--name=hangs"), "NAME=hangs is not a fault; did you mean hang?")
