"""Draw bars, lines, spans and grids as SVG inside a page. Each has a title, and its numbers as a text alternative.

The drawings need no script. Their colors come from `book/static/charts.css`, for light and dark pages.
"""

import html
import math
from dataclasses import dataclass

WIDTH = 360  # of a drawing, in its own units; a phone shows it without scrolling
BAR, LABEL, GAP = 13, 16, 8  # heights of a bar and of the label above the bars, and the space between rows
LEFT, LINES_HEIGHT, BOTTOM = 40, 170, 34  # of a drawing with lines
CELL = 18  # height of a cell of a grid


@dataclass
class Chart:
    """Numbers to draw.

    Attributes:
        title: what the numbers are, with their unit.
        rows: labels with the numbers of each series by name; for lines, the labels are the values of x.
        x: for lines, what the labels are; empty: bars.
    """

    title: str
    rows: dict[str, dict[str, float]]
    x: str = ""


@dataclass
class Timeline:
    """Spans to draw on one axis.

    Attributes:
        title: what the spans are, with the unit of the axis.
        rows: labels with the spans of each kind by name: pairs of begin and end.
        unit: of the axis.
    """

    title: str
    rows: dict[str, dict[str, list[tuple[float, float]]]]
    unit: str = "ms"


@dataclass
class Grid:
    """Cells to draw, with a short text in each.

    Attributes:
        title: what the cells are.
        columns: headers.
        rows: labels with the cells of each row: a kind, which decides the color, and a text. "": no color.
    """

    title: str
    columns: list[str]
    rows: dict[str, list[tuple[str, str]]]


def draw_chart(chart: Chart | Timeline | Grid, name: str) -> str:
    """Return a figure in HTML, on lines without blank ones between them, as Markdown needs it.

    Args:
        chart: at least one row; missing numbers of a series are left out.
        name: a name that is unique on the page.
    """
    if isinstance(chart, Grid):
        series = sorted({kind for cells in chart.rows.values() for kind, _ in cells if kind})
        (height, shapes), numbers = draw_grid(chart, series), describe_grid(chart)
    else:
        series = list(dict.fromkeys(key for values in chart.rows.values() for key in values))
        if isinstance(chart, Timeline):
            (height, shapes), numbers = draw_spans(chart, series), describe_spans(chart)
        else:
            height, shapes = draw_lines(chart, series) if chart.x else draw_bars(chart, series)
            numbers = describe_numbers(chart, series)
    keys = "".join(
        f'<span class="name"><span class="key chart-{i % 8}"></span>{html.escape(key)}</span> '
        for i, key in enumerate(series)
        if key
    )
    label = f'aria-labelledby="{name}-title {name}-numbers"'
    return "\n".join(
        [
            f'<figure class="chart"><figcaption>{html.escape(chart.title)} {keys}</figcaption>',
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" {label}>',
            f'<title id="{name}-title">{html.escape(chart.title)}</title>',
            f'<desc id="{name}-numbers">{html.escape(numbers)}</desc>',
            *shapes,
            "</svg></figure>",
        ]
    )


def describe_numbers(chart: Chart, series: list[str]) -> str:
    """Return the numbers of a chart as text: all of bars, and the first and the last ones of lines."""
    if chart.x:
        texts = []
        for key in series:
            points = [(label, values[key]) for label, values in chart.rows.items() if key in values]
            (first, begin), (last, end) = points[0], points[-1]
            texts.append(f"{key}: {format_number(begin)} at {chart.x} {first}, {format_number(end)} at {last}")
        return "; ".join(texts)
    rows = (
        f"{label}: {', '.join(f'{key} {format_number(value)}'.strip() for key, value in values.items())}"
        for label, values in chart.rows.items()
    )
    return "; ".join(rows)


def draw_bars(chart: Chart, series: list[str]) -> tuple[int, list[str]]:
    """Return the height of a drawing and its elements: a label for each row, with a bar for each series below it."""
    largest = max(value for values in chart.rows.values() for value in values.values()) or 1.0
    y, shapes = 0, []
    for label, values in chart.rows.items():
        shapes.append(f'<text x="0" y="{y + LABEL - 4}">{html.escape(label)}</text>')
        y += LABEL
        for key, value in values.items():
            width = (WIDTH - 70) * value / largest
            shapes.append(
                f'<rect class="chart-{series.index(key) % 8}" x="0" y="{y}" width="{width:.1f}" height="{BAR - 2}"/>'
            )
            shapes.append(f'<text x="{width + 4:.1f}" y="{y + BAR - 3}">{format_number(value)}</text>')
            y += BAR
        y += GAP
    return y, shapes


def draw_lines(chart: Chart, series: list[str]) -> tuple[int, list[str]]:
    """Return the height of a drawing and its elements: two axes with their limits, and a line for each series.

    Of two lines, the second one is dashed, so that both are visible where they are equal.
    """
    xs, labels = [float(label) for label in chart.rows], list(chart.rows)
    ys = [value for values in chart.rows.values() for value in values.values()]
    (x0, x1), (y0, y1) = (min(xs), max(xs)), (min(ys), max(ys))
    base = LINES_HEIGHT - BOTTOM

    def place(x: float, y: float) -> str:
        across = LEFT + (x - x0) / (x1 - x0 or 1) * (WIDTH - LEFT - 6)
        return f"{across:.1f},{base - (y - y0) / (y1 - y0 or 1) * (base - 8):.1f}"

    shapes = [
        f'<path class="axis" fill="none" d="M{LEFT},8V{base}H{WIDTH - 6}"/>',
        f'<text x="{LEFT - 4}" y="16" text-anchor="end">{format_number(y1)}</text>',
        f'<text x="{LEFT - 4}" y="{base}" text-anchor="end">{format_number(y0)}</text>',
        f'<text x="{LEFT}" y="{base + 15}">{labels[0]}</text>',
        f'<text x="{WIDTH - 6}" y="{base + 15}" text-anchor="end">{labels[-1]}</text>',
        f'<text x="{(LEFT + WIDTH) // 2}" y="{base + 30}" text-anchor="middle">{html.escape(chart.x)}</text>',
    ]
    for number, key in enumerate(series):
        rows = zip(xs, chart.rows.values(), strict=True)
        points = " ".join(place(x, values[key]) for x, values in rows if key in values)
        dashes = ' stroke-dasharray="7 7"' if len(series) == 2 and number == 1 else ""
        shapes.append(f'<polyline class="chart-{number % 8}" fill="none"{dashes} points="{points}"/>')
    return LINES_HEIGHT, shapes


def draw_spans(chart: Timeline, series: list[str]) -> tuple[int, list[str]]:
    """Return the height of a drawing and its elements: a label for each row, its spans, and the limits of the axis."""
    ends = [end for kinds in chart.rows.values() for spans in kinds.values() for _, end in spans]
    scale, y, shapes = WIDTH / (max(ends) or 1.0), 0, []
    for label, kinds in chart.rows.items():
        shapes.append(f'<text x="0" y="{y + LABEL - 4}">{html.escape(label)}</text>')
        y += LABEL
        for kind, spans in kinds.items():
            path = "".join(
                f"M{begin * scale:.1f},{y}h{max((end - begin) * scale, 0.5):.1f}v{BAR - 2}H{begin * scale:.1f}z"
                for begin, end in spans
            )
            shapes.append(f'<path class="chart-{series.index(kind) % 8}" d="{path}"/>')
            y += BAR
        y += GAP
    shapes.append(f'<path class="axis" fill="none" d="M0,{y}H{WIDTH}"/><text x="0" y="{y + 14}">0</text>')
    shapes.append(f'<text x="{WIDTH}" y="{y + 14}" text-anchor="end">{format_number(max(ends))} {chart.unit}</text>')
    return y + 20, shapes


def describe_spans(chart: Timeline) -> str:
    """Return the spans of a timeline as text: for each row and kind, their number, their sum, and the last end."""
    texts = [
        f"{label}: {len(spans)} of {kind}, {format_number(sum(end - begin for begin, end in spans))} {chart.unit} in "
        f"total, until {format_number(max(end for _, end in spans))} {chart.unit}"
        for label, kinds in chart.rows.items()
        for kind, spans in kinds.items()
        if spans
    ]
    return "; ".join(texts)


def draw_grid(chart: Grid, series: list[str]) -> tuple[int, list[str]]:
    """Return the height of a drawing and its elements: a header, and a row of cells for each label."""
    left = min(WIDTH // 3, 7 * max(map(len, chart.rows)))
    width = (WIDTH - left) / len(chart.columns)

    def write(x: float, y: float, text: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.1f}" y="{y + CELL - 5}" text-anchor="{anchor}">{html.escape(text)}</text>'

    shapes = [write(left + (i + 0.5) * width, 0, column) for i, column in enumerate(chart.columns)]
    for number, (label, cells) in enumerate(chart.rows.items(), start=1):
        y = number * CELL
        shapes.append(write(0, y, label, "start"))
        for i, (kind, text) in enumerate(cells):
            color = f"cell chart-{series.index(kind) % 8}" if kind else "cell"
            x = f"{left + i * width:.1f}"
            shapes.append(f'<rect class="{color}" x="{x}" y="{y}" width="{width - 1:.1f}" height="{CELL - 1}"/>')
            shapes += [write(left + (i + 0.5) * width, y, text)] if text else []
    return (len(chart.rows) + 1) * CELL, shapes


def describe_grid(chart: Grid) -> str:
    """Return the cells of a grid as text. Equal neighbors are named once."""
    texts = []
    for label, cells in chart.rows.items():
        parts = [
            f"{column}: {' '.join(filter(None, cell)) or 'empty'}"
            for i, (column, cell) in enumerate(zip(chart.columns, cells, strict=True))
            if i == 0 or cell != cells[i - 1]
        ]
        texts.append(f"{label}: {', '.join(parts)}")
    return "; ".join(texts)


def format_number(value: float) -> str:
    """Return an integer with all digits, another number with at least 3, and with all digits before the point."""
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if digits <= 6 else f"{value:.2e}"
