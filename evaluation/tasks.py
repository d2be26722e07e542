"""Turn problems into the sequences that a model computes."""

import dataclasses
import itertools
import json
from collections.abc import Iterator

from evaluation.generation import Task
from evaluation.models import OpenedModel
from evaluation.problems import ArcProblem, Problem, Report, read_problems
from evaluation.prompts import Prompter, choose_symbols
from evaluation.settings import DEFAULT_TOKENS, SolveConfig
from nanoGPT.errors import ConfigError
from operate.run_description import compute_digest


def select_problems(config: SolveConfig, context: int, report: Report) -> Iterator[tuple[int, Problem]]:
    """Yield the problems of the configuration with their numbers.

    Raises:
        ConfigError: two problems have the same id, or there are none.
    """
    most = context if config.tokens is None else max(1, context - config.tokens + 1)
    found = itertools.islice(read_problems(config.problems, most, report), config.start, config.start + config.num)
    ids: set[str] = set()
    for number, problem in enumerate(found, start=config.start):
        if problem.id in ids:
            raise ConfigError(f"--problems={config.problems} has two problems with the id {problem.id!r}: rename one")
        ids.add(problem.id)
        yield number, problem
    if not ids:
        remedy = "use a smaller --start" if config.start else "use another file"
        raise ConfigError(f"--problems={config.problems} has no problem number {config.start}: {remedy}")


def write_tasks(
    number: int, problem: Problem, prompter: Prompter, model: OpenedModel, config: SolveConfig
) -> list[Task]:
    """Return the sequences that a problem needs: one per attempt.

    Raises:
        ConfigError: the prompt has unknown characters, or does not fit into the context with the tokens to generate.
    """
    symbols = choose_symbols(model.codec) if isinstance(problem, ArcProblem) else ""
    try:
        ids = prompter.write(problem, symbols)
    except ConfigError as error:
        raise ConfigError(f"the prompt of {problem.id}: {error}, or --skip_bad=True") from None
    max_new = model.context + 1 - len(ids)
    if max_new < 1 or (config.tokens or 0) > max_new:
        remedy = f"--tokens={max_new} or less" if max_new > 0 else "a model with a longer context, or --skip_bad=True"
        raise ConfigError(
            f"the prompt of {problem.id} has {len(ids)} tokens and the answer {config.tokens or 'at least 1'}, but the "
            f"model's context has {model.context}: use {remedy}"
        )
    ends, stops = prompter.ends, prompter.find_stops(problem)
    longest = max(map(len, stops), default=0)

    def has_ended(generated: list[int]) -> bool:
        if generated[-1] in ends:
            return True
        if not stops:
            return False
        text = prompter.codec.decode(prompter.select_answer(generated)[-4 * longest - 4 :])
        return any(stop in text for stop in stops)

    max_new = min(max_new, config.tokens or DEFAULT_TOKENS)
    return [Task(number, attempt, ids, max_new, has_ended=has_ended) for attempt in range(config.attempts)]


def digest_problem(problem: Problem) -> str:
    """Return what identifies the content of a problem."""
    return compute_digest(json.dumps(dataclasses.asdict(problem), sort_keys=True).encode())
