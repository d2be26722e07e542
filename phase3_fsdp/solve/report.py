"""A report of an evaluation for people: Markdown and HTML, with the failures first and the grids drawn."""

import html
from typing import Any

from phase3_fsdp.solve.arc import Grid

# The ten colors of ARC, in a palette whose colors differ in lightness as well; the number stands in each cell.
PALETTE = ("#111111", "#3b78c2", "#c23b3b", "#4f9f4f", "#d9b800", "#8f8f8f", "#b04fa8", "#e0862d", "#7cc4d8", "#7a4a2b")
DARK = frozenset({0, 1, 2, 6, 9})  # colors on which the number is white
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table.grid { border-collapse: collapse; display: inline-table; margin: 0 1.5rem 0.5rem 0; vertical-align: top; }
table.grid td { width: 1.5rem; height: 1.5rem; text-align: center; border: 1px solid #bbb; font-size: 0.8rem; }
table.facts td, table.facts th { text-align: left; padding: 0.1rem 1rem 0.1rem 0; font-weight: normal; }
caption { text-align: left; font-size: 0.85rem; white-space: nowrap; }
pre { background: #f4f4f4; padding: 0.5rem; overflow-x: auto; }
section { border-top: 1px solid #ccc; padding-top: 0.5rem; }
"""


def sort_failures_first(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the problems: wrong answers, then problems without a known answer, then right answers."""
    return sorted(lines, key=lambda line: {False: 0, None: 1, True: 2}[line.get("is_right")])


def describe_outcome(line: dict[str, Any]) -> str:
    """Return one word for the outcome of a problem."""
    return {True: "right", False: "wrong", None: "not graded"}[line.get("is_right")]


def list_facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines at the top of a report: scores, times and settings."""
    scores = result["scores"]
    facts = [("model", result["settings"]["model"]), ("problems", str(scores["problems"]))]
    if "accuracy" in scores:
        facts.append(("right", f"{scores['right']} ({100 * scores['accuracy']:.1f}%)"))
    facts += [(f"pass@{k}", f"{100 * value:.1f}%") for k, value in scores.get("pass_at", {}).items()]
    if "cell_accuracy" in scores:
        facts.append(("equal cells", f"{100 * scores['cell_accuracy']:.1f}%"))
    if "perplexity" in scores:
        facts.append(("perplexity", f"{scores['perplexity']:.3f}"))
    facts.append(("generated tokens", f"{result['tokens']:,}"))
    if seconds := result["seconds_of_last_start"]:
        facts.append(("time since the last start", f"{seconds:,.1f} s"))
        facts.append(("tokens per second", f"{result['tokens_of_last_start'] / seconds:,.1f}"))
    memory = ", ".join(f"{size / 1e6:,.0f}" for size in result["peak_memory_bytes"])
    facts.append(("peak memory per rank (MB)", memory))
    facts.append(("ranks", ", ".join(filter(None, (str(result["ranks"]), result["spread"], result["hardware"])))))
    return facts


def describe_channels(line: dict[str, Any]) -> str:
    """Return in which channels of Harmony an answer was written; empty for other prompts."""
    if "channel_tokens" not in line:
        return ""
    begin = line["final_position"]
    final = f"never within {line['tokens']} tokens" if begin is None else f"at token {begin}"
    tokens = [f"{name} {count}" for name, count in line["channel_tokens"].items()]
    parts = [f"final began {final}", f"channel switches: {line['channel_switches']}"]
    return "; ".join([*parts, f"tokens: {', '.join(tokens)}"] if tokens else parts)


def draw_grid(grid: Grid | None, title: str) -> str:
    """Return a grid as an HTML table with a color and a number in each cell."""
    if grid is None:
        return f"<table class='grid'><caption>{title}</caption><tr><td>no grid</td></tr></table>"
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td style='background:{PALETTE[cell]};color:{'#fff' if cell in DARK else '#000'}'>{cell}</td>"
            for cell in row
        )
        + "</tr>"
        for row in grid
    )
    return f"<table class='grid'><caption>{title}</caption>{rows}</table>"


def format_html(result: dict[str, Any]) -> str:
    """Return the report as one HTML page without scripts and without files from elsewhere."""
    facts = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in list_facts(result))
    sections = []
    for line in sort_failures_first(result["problems"]):
        body = ""
        if "test" in line:
            body += draw_grid(line["test"], "test input")
            if (wanted := line.get("wanted")) is not None:
                body += draw_grid(wanted, "expected")
            body += draw_grid(line.get("grid"), "answered")
        elif line.get("wanted") is not None:
            body += f"<p>expected</p><pre>{html.escape(str(line['wanted']))}</pre>"
        body += f"<details><summary>answer as text</summary><pre>{html.escape(line['answer'])}</pre></details>"
        detail = f"{describe_outcome(line)}, {line['tokens']} tokens, {line['seconds']:.1f} s"
        if channels := describe_channels(line):
            detail += f"; {html.escape(channels)}"
        sections.append(f"<section><h2>{html.escape(line['id'])}</h2><p>{detail}</p>{body}</section>")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Evaluation report</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style></head><body><h1>Evaluation report</h1><table class='facts'>{facts}</table>"
        f"{''.join(sections)}</body></html>\n"
    )


def format_markdown(result: dict[str, Any]) -> str:
    """Return the report as Markdown: the scores, and one row per problem."""
    lines = ["# Evaluation report", ""]
    lines += [f"- {name}: {value}" for name, value in list_facts(result)]
    names = ["problem", "outcome", "equal cells", "tokens", "time (s)"]
    names += ["channels"] if any("channel_tokens" in line for line in result["problems"]) else []
    lines += ["", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for line in sort_failures_first(result["problems"]):
        cells = f"{100 * line['cell_accuracy']:.0f}%" if "cell_accuracy" in line else "-"
        row = [line["id"], describe_outcome(line), cells, line["tokens"], f"{line['seconds']:.1f}"]
        row += [describe_channels(line)][: len(names) - len(row)]
        lines.append("| " + " | ".join(str(value).replace("|", "\\|") for value in row) + " |")
    for line in sort_failures_first(result["problems"]):
        if line.get("is_right") is False:
            lines += ["", f"## {line['id']}", ""]
            for name, key in (("expected", "wanted"), ("answered", "answer")):
                lines += [f"{name}:", "", "```", *_list_lines(line, key), "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _list_lines(line: dict[str, Any], key: str) -> list[str]:
    """Return the lines of an answer; a grid has one line per row."""
    value = line.get("grid") if key == "answer" and line.get("grid") else line.get(key)
    if isinstance(value, list):
        return ["".join(map(str, row)) for row in value]
    return str(value).replace("```", "'''").splitlines() or [""]
