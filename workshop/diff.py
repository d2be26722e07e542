"""What a phase changes in the baseline's train.py, hunk by hunk, and whether it keeps the contract.

    python -m workshop.diff phase3_fsdp            # in the terminal
    python -m workshop.diff phase3_fsdp --write    # also renew the blocks in IMPLEMENTATION.md

The contract: at most 60 added lines in at most 8 hunks, each with a tag such as `[fsdp:clip]`, a deletion too. The
module docstring and the imports are not counted and need no tag. In IMPLEMENTATION.md a block between
`<!-- diff:clip -->` and `<!-- /diff -->` holds the hunks of that tag.
"""

import ast
import difflib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "nanoGPT" / "train.py"
MAX_ADDED, MAX_HUNKS = 60, 8
TAG = re.compile(r"\[\w+:(\w+)\]")
BLOCK = re.compile(r"(<!-- diff:(\w+) -->\n).*?(<!-- /diff -->)", re.DOTALL)


@dataclass(frozen=True)
class Hunk:
    """Lines of the baseline that a phase replaces, and what stands there instead."""

    line: int  # of the phase's train.py, from 1
    removed: list[str]
    added: list[str]

    @property
    def tags(self) -> list[str]:
        return [tag for line in self.added for tag in TAG.findall(line)]

    def text(self) -> str:
        return "\n".join([*(f"-{line}" for line in self.removed), *(f"+{line}" for line in self.added)])


def first_line_of_code(source: str) -> int:
    """Return the number of lines up to the end of the module docstring and the imports."""
    body = ast.parse(source).body
    return next(node.lineno for node in body if not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom)) - 1


def hunks(phase: str) -> list[Hunk]:
    """Return the differences between the baseline's and a phase's train.py, below the imports."""
    sources = BASELINE.read_text(), (ROOT / phase / "train.py").read_text()
    starts = [first_line_of_code(source) for source in sources]
    before, after = (source.splitlines()[start:] for source, start in zip(sources, starts, strict=True))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        Hunk(starts[1] + j1 + 1, before[i1:i2], after[j1:j2])
        for kind, i1, i2, j1, j2 in matcher.get_opcodes()
        if kind != "equal"
    ]


def problems(found: list[Hunk]) -> list[str]:
    """What breaks the contract, one line each; empty where it is kept."""
    added = sum(len(hunk.added) for hunk in found)
    said = [f"line {hunk.line}: this change carries no tag:\n{hunk.text()}" for hunk in found if not hunk.tags]
    if added > MAX_ADDED:
        said.append(f"{added} lines are added; the contract allows {MAX_ADDED}")
    if len(found) > MAX_HUNKS:
        said.append(f"{len(found)} hunks; the contract allows {MAX_HUNKS}")
    return said


def rendered(phase: str) -> str:
    """The phase's IMPLEMENTATION.md with its diff blocks made anew.

    Raises:
        KeyError: a block names a tag that train.py does not have.
    """
    by_tag: dict[str, list[str]] = {}
    for hunk in hunks(phase):
        for tag in dict.fromkeys(hunk.tags):
            by_tag.setdefault(tag, []).append(hunk.text())

    def block(match: re.Match[str]) -> str:
        return match[1] + "```diff\n" + "\n...\n".join(by_tag[match[2]]) + "\n```\n" + match[3]

    return BLOCK.sub(block, (ROOT / phase / "IMPLEMENTATION.md").read_text())


def main(phase: str, write: bool) -> int:
    found = hunks(phase)
    color = {"-": "\033[31m", "+": "\033[32m"} if sys.stdout.isatty() else {}
    for hunk in found:
        print(f"{phase}/train.py:{hunk.line}")
        for line in hunk.text().splitlines():
            print(f"{color.get(line[0], '')}{line}" + ("\033[0m" if color else ""))
        print()
    added = sum(len(hunk.added) for hunk in found)
    print(f"{len(found)} hunks of {MAX_HUNKS} allowed, {added} added lines of {MAX_ADDED}")
    if write:
        (ROOT / phase / "IMPLEMENTATION.md").write_text(rendered(phase))
    for problem in problems(found):
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--write" in sys.argv))
