"""The scores of all problems (fractions of right answers, pass@k, cell accuracy), and a report, failures first."""

import math
from collections.abc import Sequence
from typing import Any


def list_pass_at(attempts: int) -> list[int]:
    """Return each k of pass@k: the powers of two up to the number of attempts, and this number."""
    return [*(2**i for i in range(attempts.bit_length()) if 2**i < attempts), attempts]


def estimate_pass_at(attempts: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, the probability that one of k attempts is right (Chen et al. 2021).

    It is the fraction of all choices of k of the `attempts`, of which `right` are right, that contain a right one.
    """
    return 1.0 - math.comb(attempts - right, k) / math.comb(attempts, k)


def summarize(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the scores over the lines of finished problems. Omit a score if no problem has it.

    Returns:
        accuracy: the fraction of problems whose first attempt is right.
        pass_at: for each k of `list_pass_at`, the mean probability that one of k attempts is right.
        cell_accuracy: the mean fraction of equal cells of ARC grids, first attempts.
    """
    scores: dict[str, Any] = {"problems": len(lines)}
    graded = [line for line in lines if "is_right" in line]
    if graded:
        scores["right"] = sum(line["is_right"] for line in graded)
        scores["accuracy"] = scores["right"] / len(graded)
    sampled = [line["attempts"] for line in graded if "attempts" in line]
    if sampled:
        n = min(map(len, sampled))
        right = [sum(attempt["is_right"] for attempt in attempts) for attempts in sampled]
        scores["pass_at"] = {
            str(k): sum(estimate_pass_at(len(a), r, k) for a, r in zip(sampled, right, strict=True)) / len(sampled)
            for k in list_pass_at(n)
        }
    if cells := [line["cell_accuracy"] for line in lines if "cell_accuracy" in line]:
        scores["cell_accuracy"] = sum(cells) / len(cells)
    return scores


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
