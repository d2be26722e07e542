"""Print what a phase changes in the baseline's train.py, hunk by hunk, and check the diff contract.

    python -m workshop.diff phase3_fsdp            # print the hunks
    python -m workshop.diff phase3_fsdp --write    # also update the blocks in IMPLEMENTATION.md

The diff contract allows at most 60 added lines in at most 8 hunks. Every hunk, also a deletion, has a tag such as
`[fsdp:clip]`. The module docstring and the imports do not count and need no tag. In IMPLEMENTATION.md, the block
between `<!-- diff:clip -->` and `<!-- /diff -->` contains the hunks with that tag. `workshop/steps.py` compares the
versions of an algorithm within a phase.
"""

import ast
import difflib
import re
import sys
from dataclasses import dataclass

from bench.phases import find_package
from nanoGPT.job.command import report_errors
from workshop.imports import ROOT
from workshop.steps import render_steps

BASELINE = ROOT / "nanoGPT" / "train.py"
MAX_ADDED, MAX_HUNKS = 60, 8
TAG = re.compile(r"\[\w+:(\w+)\]")
BLOCK = re.compile(r"(<!-- diff:(\w+) -->\n).*?(<!-- /diff -->)", re.DOTALL)


@dataclass(frozen=True)
class Hunk:
    """Lines of the baseline that a phase removes, and the lines that it adds in their place."""

    line: int  # line number in the phase's train.py, from 1
    removed: list[str]
    added: list[str]

    @property
    def tags(self) -> list[str]:
        return [tag for line in self.added for tag in TAG.findall(line)]

    def text(self) -> str:
        return "\n".join([*(f"-{line}" for line in self.removed), *(f"+{line}" for line in self.added)])


def count_header_lines(source: str) -> int:
    """Return the number of lines before the code, that is, of the module docstring and the imports."""
    body = ast.parse(source).body
    return next(node.lineno for node in body if not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom)) - 1


def find_hunks(phase: str) -> list[Hunk]:
    """Return the differences between the baseline's and a phase's train.py, below the imports."""
    sources = BASELINE.read_text(), (ROOT / phase / "train.py").read_text()
    starts = [count_header_lines(source) for source in sources]
    before, after = (source.splitlines()[start:] for source, start in zip(sources, starts, strict=True))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        Hunk(starts[1] + j1 + 1, before[i1:i2], after[j1:j2])
        for kind, i1, i2, j1, j2 in matcher.get_opcodes()
        if kind != "equal"
    ]


def find_problems(hunks: list[Hunk]) -> list[str]:
    """Return one message for each violation of the diff contract."""
    added = sum(len(hunk.added) for hunk in hunks)
    problems = [f"line {hunk.line}: this change has no tag:\n{hunk.text()}" for hunk in hunks if not hunk.tags]
    if added > MAX_ADDED:
        problems.append(f"{added} added lines: the diff contract allows {MAX_ADDED}")
    if len(hunks) > MAX_HUNKS:
        problems.append(f"{len(hunks)} hunks: the diff contract allows {MAX_HUNKS}")
    return problems


def render_notes(phase: str) -> str:
    """Return the phase's IMPLEMENTATION.md with updated diff blocks and blocks of steps.

    Raises:
        KeyError: a block names a tag that train.py does not have, or a step that one of the versions does not have.
    """
    by_tag: dict[str, list[str]] = {}
    for hunk in find_hunks(phase):
        for tag in dict.fromkeys(hunk.tags):
            by_tag.setdefault(tag, []).append(hunk.text())

    def render_block(match: re.Match[str]) -> str:
        return match[1] + "```diff\n" + "\n...\n".join(by_tag[match[2]]) + "\n```\n" + match[3]

    text = BLOCK.sub(render_block, (ROOT / phase / "IMPLEMENTATION.md").read_text())
    return render_steps(text, ROOT / phase)


def main(phase: str, write: bool) -> int:
    hunks = find_hunks(phase)
    color = {"-": "\033[31m", "+": "\033[32m"} if sys.stdout.isatty() else {}
    for hunk in hunks:
        print(f"{phase}/train.py:{hunk.line}")
        for line in hunk.text().splitlines():
            print(f"{color.get(line[0], '')}{line}" + ("\033[0m" if color else ""))
        print()
    added = sum(len(hunk.added) for hunk in hunks)
    print(f"{len(hunks)} hunks, {added} added lines")
    if write:
        (ROOT / phase / "IMPLEMENTATION.md").write_text(render_notes(phase))
    problems = find_problems(hunks)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(find_package(sys.argv[1] if sys.argv[1:] else ""), "--write" in sys.argv))
