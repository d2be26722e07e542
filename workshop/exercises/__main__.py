"""Exercises on the code of this repository, which are checked immediately on real ranks.

make exercise                  # list the exercises
make exercise N=zero1.5        # write the task and a stub into work/zero1_5.py
make check N=zero1.5           # run your code on real ranks, and explain what is wrong
make hint N=zero1.5 LEVEL=1    # a nudge; LEVEL=2: the idea; LEVEL=3: the decisive line
make solution N=zero1.5        # print the repository's own code
make exercises                 # test that all solutions pass, and that wrong answers are explained
"""

import sys

from nanoGPT.errors import ConfigError, did_you_mean
from nanoGPT.files import write_atomically
from nanoGPT.job.command import command_line, report_errors
from workshop.exercises.checking import check_file
from workshop.exercises.document import write_document
from workshop.exercises.proving import prove_all
from workshop.exercises.registry import CORE_TRACK, EXERCISES, find_exercise
from workshop.exercises.stubs import find_hint_line, find_target, render_file
from workshop.imports import ROOT

WORK = ROOT / "work"
LEVELS = (1, 2, 3)


def list_exercises() -> None:
    """Print the name, the title, the minutes and the difficulty of every exercise, and the core track."""
    for each in EXERCISES.values():
        print(f"{each.name:<14} {each.title} ({each.minutes} minutes, {each.difficulty})")
    minutes = sum(EXERCISES[name].minutes for name in CORE_TRACK)
    print(f"\ncore track, in this order, {minutes} minutes: {' '.join(CORE_TRACK)}")


def start_exercise(name: str = "") -> None:
    """Write the task and the stub of an exercise into work/, or list all exercises.

    Args:
        name: of the exercise; empty: list all exercises.
    """
    if not name:
        list_exercises()
        return
    exercise = find_exercise(name)
    path = WORK / exercise.file_name
    if path.exists():
        raise ConfigError(f"work/{path.name} exists: edit it, or delete it to start again")
    WORK.mkdir(exist_ok=True)
    write_atomically(path, render_file(exercise).encode())
    print(f"wrote work/{path.name}: read it, write your code, and check it with `make check N={name}`")


def check_exercise(name: str = "") -> int:
    """Check the learner's file of an exercise. Return 0 if it is right, and 1 if it is wrong.

    Args:
        name: of the exercise.
    """
    exercise = find_exercise(name)
    path = WORK / exercise.file_name
    if not path.is_file():
        raise ConfigError(f"work/{path.name} is missing: create it with `make exercise N={name}`")
    verdict = check_file(exercise, path, show=True)
    if verdict.is_right:
        ranks = "1 rank" if exercise.ranks == 1 else f"{exercise.ranks} ranks"
        print(f"{name} is right, checked on {ranks}. Compare it with `make solution N={name}`.")
        return 0
    print(f"{name} is not right yet:\n{verdict.explanation}")
    return 1


def show_hint(name: str = "", level: int = 1) -> None:
    """Print a hint.

    Args:
        name: of the exercise.
        level: 1 for a nudge, 2 for the idea, 3 for the decisive line of the solution.
    """
    exercise = find_exercise(name)
    if level not in LEVELS:
        raise ConfigError(f"LEVEL={level} is out of range: use 1, 2 or 3")
    hint = (exercise.nudge, exercise.idea, find_hint_line(exercise))[level - 1]
    print(f"{name}, hint {level} of 3: {hint}")


def show_solution(name: str = "") -> None:
    """Print the repository's own code for an exercise, with its place.

    Args:
        name: of the exercise.
    """
    exercise = find_exercise(name)
    for target in map(find_target, exercise.targets):
        print(f"# {target.file.path.relative_to(ROOT)}:{target.line}\n{target.code}")


def prove_exercises(name: str = "") -> int:
    """Prove one exercise or all: solutions pass, stubs fail, and wrong answers are explained.

    Args:
        name: of the exercise, or of a chapter; empty: all exercises.
    """
    selected = [each for each in EXERCISES.values() if name in ("", each.name, each.chapter)]
    return 0 if prove_all(selected or [find_exercise(name)]) else 1


COMMANDS = {
    "exercise": start_exercise,
    "check": check_exercise,
    "hint": show_hint,
    "solution": show_solution,
    "prove": prove_exercises,
    "document": write_document,
}


def main(arguments: list[str]) -> int:
    """Run one of the commands."""
    command = arguments[0] if arguments else ""
    if command not in COMMANDS:
        raise ConfigError(
            f"{command or 'no command'} is unknown{did_you_mean(command, list(COMMANDS)) or ': use exercise'}"
        )
    return command_line(COMMANDS[command], arguments[1:]) or 0


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
