"""Measure everything that needs a GPU: `make gpu`.

    python -m bench.gpu --to=DIR                        # run what is not done, in order of worth; also after a kill
    python -m bench.gpu --to=DIR --minutes=9            # and start nothing that may take longer than that
    python -m bench.gpu --to=DIR --only=check,times.loss --retry     # also what has failed or was skipped
    python -m bench.gpu --to=DIR --dry_run              # without a GPU: small versions of everything on a CPU
    python -m bench.gpu --to=DIR --report               # write the results into bench/results and the documents

Each task is a process with a time limit. It leaves DIR/NAME.json (state, seconds, result) and DIR/NAME.log. The checks
and times of the kernels need only torch, triton and numpy. A task whose packages are missing is skipped.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.tasks import FUNCTIONS, Place, Skipped
from bench.kernels.cases import CASE_BUILDERS
from bench.tables.records import RESULTS, read_results, write_result_of
from nanoGPT.errors import ConfigError
from nanoGPT.files import PACKAGE, write_atomically
from nanoGPT.job.command import report_errors

SKIPPED = 5  # exit code of a task that cannot run here
STATES: dict[int | None, str] = {0: "done", SKIPPED: "skipped"}  # by exit code
ALL_BUT_ADAMW = "attention,embedding,gelu,layernorm,loss"  # AdamW's kernel does not update shards
TRAINERS = (
    ("baseline", "none"),
    ("phase1", "none"),
    ("phase2", "loss"),
    ("phase2", "all"),
    ("phase3", "none"),
    ("phase3", "loss"),
    ("phase3", ALL_BUT_ADAMW),
)
TESTS = tuple(f"tests/{name}" for name in ("baseline", "phase1", "phase3", "promises", "bench"))


@dataclass(frozen=True)
class Task:
    """One process: a function of this module, called with `arguments`, or the command `words`.

    Attributes:
        name: the group and the rest, such as times.loss. The group selects the function.
        seconds: time limit.
    """

    name: str
    seconds: int
    arguments: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()


def list_tasks(is_dry: bool) -> list[Task]:
    """Return all tasks, in order of worth."""
    checked = [kernel for kernel in CASE_BUILDERS if kernel != "adamw"]  # the curves of phase 2 check AdamW
    tasks = [Task(f"check.{kernel}", 60, (kernel,)) for kernel in checked]
    tasks += [Task(f"curve.{name_trainer(*each)}", 240, each) for each in TRAINERS]
    saves: tuple[tuple[str, dict[str, Any]], ...] = (
        ("baseline", {}),
        ("phase1", {}),
        ("phase3", {}),
        ("phase3", {"async_save": True}),
    )
    tasks += [Task("_".join([f"resume.{phase}", *options]), 240, (phase, options)) for phase, options in saves]
    tasks += list_throughput("gpt2", 150)
    tasks += [Task(f"times.{kernel}", 120, (kernel,)) for kernel in CASE_BUILDERS]
    tasks.append(Task("tuning", 900))
    for value in ("none", "selective", "full"):
        options = {"fsdp_activation_checkpointing": value}
        tasks.append(Task(f"options.{value}_checkpointing", 180, ("phase3", "gpt2-large", options)))
    offload = {"fsdp_activation_checkpointing": "full", "fsdp_cpu_offload": True}
    tasks.append(Task("options.cpu_offload", 240, ("phase3", "gpt2-large", offload)))
    tasks.append(Task("options.muon", 150, ("phase3", "gpt2", {"optimizer": "muon"})))
    tasks.append(Task("options.zero_2", 150, ("phase1", "gpt2", {"zero_stage": 2})))
    tasks += list_throughput("gpt2-xl", 330)
    if is_dry:
        tasks = [replace(task, seconds=60) for task in tasks]
    else:
        profiler = ("-m", "bench.profile_step")
        trainers = {"baseline": "nanoGPT/train.py", "phase3": "phase3_fsdp/train.py"}
        tasks += [Task(f"profile.{phase}", 300, words=(*profiler, trainer)) for phase, trainer in trainers.items()]
        tasks += [Task(f"sanitizer.{tool}", 300, (tool,)) for tool in ("memcheck", "racecheck")]
        tests = ("-m", "pytest", "--device=cuda", "-m", "gpu and not slow", "--timeout=300")
        tasks.append(Task("tests.kernels", 1800, words=(*tests, "tests/phase2")))
        tasks.append(Task("tests.trainers", 1800, words=(*tests, *TESTS)))
    return tasks


def list_throughput(model: str, seconds: int) -> list[Task]:
    return [Task(f"throughput.{model}_{name_trainer(*each)}", seconds, (model, *each)) for each in TRAINERS]


def name_trainer(phase: str, kernels: str) -> str:
    return f"{phase}_{'all_but_adamw' if kernels == ALL_BUT_ADAMW else kernels}"


def end_with_parent() -> None:
    """Kill this process and its children when standard input is closed: then the process that started it has ended."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def run_here(task: Task, place: Place) -> int:
    """Run a task's function in this process, write its result, and return the exit code."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    code = SKIPPED
    try:
        result = FUNCTIONS[task.name.partition(".")[0]](place, *task.arguments)
        code = 1 if result.get("problems") else 0
    except Skipped as reason:
        result = {"summary": str(reason)}
    except ModuleNotFoundError as error:
        result = {"summary": f"the package {error.name} is missing"}
    (place.folder / f"{task.name}.result").write_text(json.dumps(result))
    return code


def run_process(task: Task, place: Place) -> dict[str, Any]:
    """Run a task in a process group of its own until it ends or its time is over. Write and return its record."""
    flags = [f"--to={place.folder}", *(["--dry_run"] if place.is_dry else [])]
    words = task.words or ("-u", "-m", "bench.gpu", f"--task={json.dumps(asdict(task))}", *flags)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    if place.is_dry:  # no GPU, and interpreted kernels
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    log, path = (place.folder / f"{task.name}.{suffix}" for suffix in ("log", "result"))
    start, code = time.monotonic(), None
    with open(log, "w") as file:
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": file, "stderr": subprocess.STDOUT}
        command = [sys.executable, *words]
        process = subprocess.Popen(command, cwd=PACKAGE.parent, env=environment, start_new_session=True, **streams)
        try:
            code = process.wait(task.seconds)
        except subprocess.TimeoutExpired:
            print(f"did not end within {task.seconds} s", file=file)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "no output")
    record = {"name": task.name, "state": STATES.get(code, "failed"), "result": result}
    record["seconds"] = round(time.monotonic() - start, 1)
    record["summary"] = "; ".join(result.get("problems", [])) or result.get("summary") or last[:300]
    write_atomically(place.folder / f"{task.name}.json", json.dumps(record, indent=1).encode())
    return record


def read_record(place: Place, task: Task) -> dict[str, Any] | None:
    """Return the record of a task that has ended, or None."""
    path = place.folder / f"{task.name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def check_machine(place: Place) -> None:
    """Describe this machine, and compare it with the machine, the versions and the kernels of earlier results.

    Raises:
        ConfigError: there is no GPU, or something is not the same.
    """
    task = Task("machine", 60)
    before = read_record(place, task)
    record = run_process(task, place)
    if before and before["result"].get("identity") != record["result"].get("identity"):
        write_atomically(place.folder / "machine.json", json.dumps(before, indent=1).encode())
        raise ConfigError(f"{place.folder} has results of another GPU, version or kernel: use another --to")
    if record["state"] != "done":
        raise ConfigError(record["summary"])


def run_tasks(tasks: list[Task], place: Place, minutes: float, is_retried: bool) -> int:
    """Run the tasks that are not done, and print what is left. Return the exit code: 1 if a task has failed."""
    deadline = time.monotonic() + 60 * minutes
    states: dict[str, list[str]] = {}
    for task in tasks:
        record = read_record(place, task)
        if record is None or (is_retried and record["state"] != "done"):
            if time.monotonic() + task.seconds > deadline:
                states.setdefault("left", []).append(task.name)
                continue
            record = run_process(task, place)
            print(f"{record['state']:8}{record['seconds']:7.1f} s  {task.name}: {record['summary']}", flush=True)
        states.setdefault(record["state"], []).append(task.name)
    for state, names in states.items():
        print(f"{len(names)} {state}{'' if state == 'done' else ': ' + ', '.join(names)}")
    if "left" not in states:
        print("nothing is left")
    return 1 if "failed" in states else 0


def write_report(tasks: list[Task], place: Place) -> None:
    """Write the results into bench/results, and then the tables of the documents.

    Earlier results of the same GPU, versions and kernels are kept, unless their task has run again.

    Raises:
        ConfigError: the directory has no results of a GPU.
    """
    machine = read_record(place, Task("machine", 60))
    if machine is None or machine["result"]["is_dry"]:
        raise ConfigError(f"--to={place.folder} has no results of a GPU: run python -m bench.gpu --to=DIR there first")
    settings = {"command": "python -m bench.gpu", "identity": machine["result"]["identity"]}
    earlier = [
        row for result in read_results("gpu") if result["settings"] == settings for row in result["samples"]["rows"]
    ]
    records = {row["name"]: row for row in earlier}
    records |= {task.name: record for task in tasks if (record := read_record(place, task))}
    samples = {"rows": [records[task.name] for task in list_tasks(False) if task.name in records]}
    print(f"wrote {write_result_of(machine['result']['origin'], RESULTS, 'gpu', settings, samples)}")
    from bench.tables import tables

    tables.main()


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line, without tyro, which may be missing on a machine with a GPU."""
    parser = argparse.ArgumentParser("python -m bench.gpu", allow_abbrev=False)
    parser.add_argument(
        "--to", type=lambda word: Path(word).expanduser(), required=True, help="directory of the results"
    )
    parser.add_argument("--minutes", type=float, default=10**6, help="start nothing that may take longer than this")
    parser.add_argument("--only", default="", help="only tasks whose names begin with these words: check,times.loss")
    parser.add_argument("--retry", action="store_true", help="repeat what has failed or was skipped")
    parser.add_argument("--dry_run", action="store_true", help="run small versions on the CPU")
    parser.add_argument("--report", action="store_true", help="write the results into bench/results and the documents")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)  # the process of one task
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    options = parse_arguments(words)
    place = Place(options.to.absolute(), options.dry_run)
    if options.task:
        return run_here(Task(**options.task), place)
    prefixes = tuple(filter(None, options.only.split(","))) or ("",)
    tasks = [task for task in list_tasks(options.dry_run) if task.name.startswith(prefixes)]
    if not tasks:
        raise ConfigError(f"--only={options.only} names no task: use beginnings of names, such as check,times.loss")
    if options.report:
        write_report(tasks, place)
        return 0
    place.folder.mkdir(parents=True, exist_ok=True)
    check_machine(place)
    return run_tasks(tasks, place, options.minutes, options.retry)


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
