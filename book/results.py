"""Write one page for each committed result file: hardware, commit, command, and all numbers as tables."""

from pathlib import Path
from typing import Any

from bench.tables.records import RESULTS, format_table, read_result
from book.sources import write_page

MAX_VALUES = 8  # of a list in one cell; a longer list is summarized


def write_result_pages(folder: Path, repository: str) -> None:
    """Write `index.md` and one page for each file in bench/results.

    Args:
        folder: a directory to create.
        repository: URL of the repository, or an empty string.

    Raises:
        ConfigError: a result file is damaged.
    """
    rows, names = [], []
    for path in sorted(RESULTS.glob("*.json")):
        result = read_result(path)
        names.append(path.stem)
        rows.append([f"[{path.stem}]({path.stem}.md)", *describe_origin(result, repository)])
        write_page(folder / f"{path.stem}.md", render_result(path.stem, result, repository))
    header = ["result", "hardware", "commit", "date", "command"]
    text = [
        "# Result files",
        "Every number in the documents comes from one of these files. They are in `bench/results/`. A command of this "
        "repository wrote each of them on the hardware that it names.",
        format_table(header, rows),
        "```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n",
    ]
    write_page(folder / "index.md", "\n\n".join(text))


def describe_origin(result: dict[str, Any], repository: str) -> list[str]:
    """Return the hardware, the commit, the date and the command of a result, as cells of a table."""
    commit = (result.get("git_commit") or "")[:10]
    if commit and repository:
        commit = f"[{commit}]({repository}/commit/{commit})"
    command = result["settings"].get("command", "")
    return [result["hardware"], commit or "-", result.get("time", "-")[:10], f"`{command}`" if command else "-"]


def render_result(name: str, result: dict[str, Any], repository: str) -> str:
    """Return the page of one result file, in Markdown."""
    hardware, commit, date, command = describe_origin(result, repository)
    versions = ", ".join(f"{package} {version}" for package, version in result.get("versions", {}).items())
    facts = [["hardware", hardware], ["commit", commit], ["date", date], ["command", command], ["versions", versions]]
    text = f"# {name}\n\n{format_table(['property', 'value'], facts)}\n## Settings\n\n"
    text += render_value({key: value for key, value in result["settings"].items() if key != "command"}, 3)
    return text + "\n## Samples\n\n" + render_value(result["samples"], 3)


def render_value(value: Any, level: int) -> str:
    """Return JSON as Markdown: a table for a list of objects or for plain values, else one section for each key.

    Args:
        value: the JSON value.
        level: level of the headings of sections, from 1.
    """
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        rows = [flatten(item) for item in value]
        header = list(dict.fromkeys(key for row in rows for key in row))
        return format_table(header, [[row.get(key, "") for key in header] for row in rows])
    if not isinstance(value, dict):
        return format_value(value) + "\n"
    plain = {key: item for key, item in value.items() if not isinstance(item, dict | list) or is_short(item)}
    text = format_table(["name", "value"], [[key, format_value(item)] for key, item in plain.items()]) if plain else ""
    for key, item in value.items():
        if key not in plain:
            heading = f"{'#' * level} {key}" if level <= 5 else f"**{key}**"
            text += f"\n{heading}\n\n{render_value(item, level + 1)}"
    return text


def is_short(value: Any) -> bool:
    """Return whether a value fits into one cell: a list without objects, or an empty object."""
    return not value or (isinstance(value, list) and not any(isinstance(item, dict | list) for item in value))


def flatten(item: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the cells of an object. An inner object becomes several columns, with names such as `memory.peak`."""
    cells: dict[str, str] = {}
    for key, value in item.items():
        if isinstance(value, dict) and value:
            cells.update(flatten(value, f"{prefix}{key}."))
        else:
            cells[f"{prefix}{key}"] = format_value(value)
    return cells


def format_value(value: Any) -> str:
    """Return a value as the text of one cell."""
    if isinstance(value, list):
        numbers = [item for item in value if isinstance(item, int | float)]
        if len(value) > MAX_VALUES and len(numbers) == len(value):
            return f"{len(value)} values from {format_value(min(numbers))} to {format_value(max(numbers))}"
        return ", ".join(map(format_value, value)) or "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) or "none"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    text = text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return f"`{text}`" if any(mark in text for mark in "*_") and "`" not in text and "\\|" not in text else text
