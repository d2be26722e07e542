"""ARC tasks: a few pairs of grids show a rule, and the answer is the grid that the rule makes of a test grid.

    {"train": [{"input": [[0, 1], [2, 3]], "output": [[1, 0], [3, 2]]}, ...], "test": [{"input": ..., "output": ...}]}

This is the public JSON format (Chollet 2019, https://github.com/fchollet/ARC-AGI). A grid has 1 to 30 rows and columns
of colors 0 to 9. `generate_task` makes small tasks in the same format, whose answers are known.
"""

import itertools
import random
from collections.abc import Callable
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict

import msgspec
from msgspec import Meta

Grid: TypeAlias = list[list[int]]
Pair: TypeAlias = tuple[Grid, Grid]

COLORS = 10
MAX_SIDE = 30  # rows and columns of a grid
ARROW = ":"  # between an input grid and its output grid


Row = Annotated[list[Annotated[int, Meta(ge=0, lt=COLORS)]], Meta(min_length=1, max_length=MAX_SIDE)]
Rows = Annotated[list[Row], Meta(min_length=1, max_length=MAX_SIDE)]


class TrainPair(TypedDict):
    """A pair of grids that shows the rule."""

    input: Rows
    output: Rows


class TestPair(TypedDict):
    """A grid to complete, and its answer if it is known."""

    input: Rows
    output: NotRequired[Rows]


class ArcTask(TypedDict):
    """A task in the public format."""

    train: Annotated[list[TrainPair], Meta(min_length=1)]
    test: Annotated[list[TestPair], Meta(min_length=1)]


def read_task(task: Any) -> tuple[list[Pair], list[tuple[Grid, Grid | None]]]:
    """Return the training pairs and the tests of a task. A test without an output has None.

    Raises:
        ValueError, msgspec.ValidationError: the task has another format.
    """
    msgspec.convert(task, ArcTask)
    pairs = [(pair["input"], pair["output"]) for pair in task["train"]]
    tests = [(pair["input"], pair.get("output")) for pair in task["test"]]
    for grid in filter(None, itertools.chain(*pairs, *tests)):
        if len({len(row) for row in grid}) > 1:
            raise ValueError("a grid has rows of different lengths")
    return pairs, tests


def format_grid(grid: Grid, symbols: str) -> str:
    """Return a grid as text: one line per row, one symbol per cell."""
    return "\n".join("".join(symbols[cell] for cell in row) for row in grid)


def format_task(pairs: list[Pair], test: Grid, symbols: str) -> str:
    """Return the text of a task, up to the place where the answer begins."""
    shown = [f"{format_grid(given, symbols)}\n{ARROW}\n{format_grid(wanted, symbols)}\n\n" for given, wanted in pairs]
    return "".join(shown) + f"{format_grid(test, symbols)}\n{ARROW}\n"


def parse_grid(text: str, symbols: str) -> Grid | None:
    """Return the last grid in a text: consecutive lines of equally many symbols. Spaces between symbols are ignored.

    A model that explains its answer writes other lines before the grid. None if there is no such line, or if the last
    grid has rows of different lengths.
    """
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        cells = line.replace(" ", "")
        if cells and set(cells) <= set(symbols):
            blocks[-1].append(cells)
        elif blocks[-1]:
            blocks.append([])
    rows = next((block for block in reversed(blocks) if block), [])
    if not rows or len({len(row) for row in rows}) != 1:
        return None
    return [[symbols.index(cell) for cell in row] for row in rows]


def count_equal_cells(grid: Grid | None, wanted: Grid) -> float:
    """Return the fraction of the cells of `wanted` that a grid has right; 0 if the grid has another shape."""
    if grid is None or (len(grid), len(grid[0])) != (len(wanted), len(wanted[0])):
        return 0.0
    cells = [a == b for row, wanted_row in zip(grid, wanted, strict=True) for a, b in zip(row, wanted_row, strict=True)]
    return sum(cells) / len(cells)


def flip_rows(grid: Grid) -> Grid:
    """Mirror a grid from left to right."""
    return [row[::-1] for row in grid]


def flip_columns(grid: Grid) -> Grid:
    """Mirror a grid from top to bottom."""
    return grid[::-1]


def transpose(grid: Grid) -> Grid:
    """Exchange rows and columns."""
    return [list(column) for column in zip(*grid, strict=True)]


def shift_colors(grid: Grid) -> Grid:
    """Replace each color by the next one."""
    return [[(cell + 1) % COLORS for cell in row] for row in grid]


RULES: tuple[Callable[[Grid], Grid], ...] = (flip_rows, flip_columns, transpose, shift_colors)


def generate_task(index: int, max_characters: int) -> tuple[str, dict[str, Any]]:
    """Generate a task in the public format. The same arguments always give the same task.

    Args:
        index: number of the task. The rules take turns.
        max_characters: size of the task and its answer as text (`format_task`). The grids have 2 to 6 rows and columns,
            as far as this allows; the smallest task has two pairs of 2 by 2 grids and needs 43 characters.

    Returns:
        The name of the task and the task.
    """
    rule, draw = RULES[index % len(RULES)], random.Random(f"arc-generated/{index}")
    side, pairs = 2, 2
    while side < 6 and count_characters(side + 1, 3) <= max_characters:
        side, pairs = side + 1, 3
    side = draw.randint(2, side)
    given = [[[draw.randrange(COLORS) for _ in range(side)] for _ in range(side)] for _ in range(pairs + 1)]
    shown = [{"input": grid, "output": rule(grid)} for grid in given]
    return f"generated-{index:04d}-{rule.__name__}", {"train": shown[:-1], "test": shown[-1:]}


def count_characters(side: int, pairs: int) -> int:
    """Return the characters of a task with square grids, and of its answer, as text."""
    grid = side * (side + 1)  # each row ends with a line break
    return pairs * (2 * grid + len(ARROW) + 2) + 2 * grid + len(ARROW) + 1
