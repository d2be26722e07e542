"""Solve a list of problems on all ranks, and write the answers on rank 0."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from evaluation import costs
from evaluation.generation import Generator, Result, Sampling, Task
from evaluation.models import OpenedModel
from evaluation.problems import ArcProblem, Problem
from evaluation.progress import Progress
from evaluation.prompts import Prompter, choose_symbols
from evaluation.scores import summarize
from evaluation.settings import SolveConfig
from evaluation.tasks import digest_problem
from measure.memory_limits import host_limits
from nanoGPT.distributed.environment import collect_versions, describe_hardware, read_git_commit, read_peak_memory
from nanoGPT.distributed.runtime import Runtime
from nanoGPT.errors import ConfigError
from nanoGPT.files import write_atomically

CONTINUE = "run the same command again; it continues with the problems that are not finished"


class Evaluation:
    """One run over a list of problems, on every rank. Rank 0 writes the files.

    Args:
        config: of the run.
        run: this rank's Runtime.
        model: the model, not read yet.
        prompter: writes prompts and reads answers.
        work: the problems and their tasks, in order.
    """

    def __init__(
        self,
        config: SolveConfig,
        run: Runtime,
        model: OpenedModel,
        prompter: Prompter,
        work: list[tuple[Problem, list[Task]]],
    ) -> None:
        self.config, self.run, self.model, self.prompter = config, run, model, prompter
        self.work = {tasks[0].problem: (problem, tasks) for problem, tasks in work}
        self.results: dict[int, list[Result]] = {number: [] for number in self.work}
        self.symbols = (
            choose_symbols(model.codec) if any(isinstance(problem, ArcProblem) for problem, _ in work) else ""
        )
        self.progress: Progress | None = None
        self.spread: str | None = None  # stays None if all problems are finished already
        self.folder = Path(config.to or "")

    def finish(self) -> int:
        """Solve what is left, and write the result. Return the exit code."""
        done = self.run.call_on_rank0(self._open_progress)
        tasks = [task for problem, each in self.work.values() if problem.id not in done for task in each]
        if done:
            self.run.print0(
                f"{len(done)} of {len(self.work)} problems are finished already; continuing in {self.folder}"
            )
        seconds, tokens = 0.0, 0
        if tasks:
            generator = self._load(tasks)
            begin = time.perf_counter()
            with tqdm(
                total=len(self.work), initial=len(done), unit="problem", disable=None if self.run.is_main else True
            ) as bar:
                for results in generator.run(tasks):
                    for result in results:
                        tokens += len(result.ids)
                        self.results[result.problem].append(result)
                        if len(self.results[result.problem]) == len(self.work[result.problem][1]):
                            self._finish_problem(result.problem)
                            bar.update()
                    bar.set_postfix_str(f"{tokens / (time.perf_counter() - begin):.1f} tokens/s", refresh=bool(results))
            seconds = time.perf_counter() - begin
            if generator.should_stop:
                self.run.print0(f"stopped by a signal: {CONTINUE}")
                return 0
        memory = self.run.gather(read_peak_memory(self.run.device))
        if self.run.is_main:
            self._write_result(tokens, seconds, memory)
        return 0

    def _open_progress(self) -> set[str]:
        """Open the progress files, on rank 0, and return the ids of the problems that are finished."""
        self.progress = Progress(self.folder, self._settings())
        done = set()
        for problem, _ in self.work.values():
            if line := self.progress.lines.get(problem.id):
                if line.get("problem") != digest_problem(problem):
                    raise ConfigError(
                        f"{self.folder} has an answer to another problem with the id {problem.id!r}: use another "
                        "directory as --to"
                    )
                done.add(problem.id)
        return done

    def _settings(self) -> dict[str, Any]:
        """Return what the answers depend on."""
        config = self.config
        names = ("tokens", "prompt", "attempts", "temperature", "seed")
        values = {name: getattr(config, name) for name in names} | {"stop": list(config.stop) or None}
        names_of_model = {"model": self.model.name, "weights": self.model.weights}
        return {**names_of_model, "dtype": str(self.run.dtype).removeprefix("torch."), **values}

    def _load(self, tasks: list[Task]) -> Generator:
        """Choose how to spread the model, print why, and read it."""
        config, run, size = self.config, self.run, self.model.size
        longest = max(len(task.ids) + task.max_new for task in tasks)
        slots, itemsize = min(config.batch_size, len(tasks)), run.dtype.itemsize
        device_bytes = min(run.gather(read_device_bytes(run)))  # all ranks must choose the same way
        spread, reason = costs.choose_spread(size, run.world_size, slots, longest, itemsize, device_bytes)
        if config.spread != "auto":
            spread, reason = config.spread, "--spread"
        if spread is None:
            raise ConfigError(f"the model does not fit: {reason}")
        run.print0(f"{size.params:,} parameters on {run.world_size} rank(s), {run.dtype}; {spread} ({reason})")
        for each in costs.SPREADS:
            if run.world_size > 1 and (each != "tp" or (size.kv_heads and size.kv_heads % run.world_size == 0)):
                predicted = costs.predict(each, size, run.world_size, slots, longest, itemsize)
                run.print0(("-> " if each == spread else "   ") + costs.describe(each, predicted))
        model = self.model.load(spread, run)
        self.spread = spread
        sampling = Sampling(config.temperature, config.seed)
        return Generator(model, run, slots, longest, sampling, is_replicated=spread == "tp")

    def _finish_problem(self, number: int) -> None:
        """Score a problem, and write its line on rank 0."""
        problem, _ = self.work[number]
        results = sorted(self.results.pop(number), key=lambda result: result.attempt)
        if self.progress is None:
            return
        line: dict[str, Any] = {"id": problem.id, "number": number, "problem": digest_problem(problem)}
        line |= self._score_attempts(problem, results)
        line["tokens"] = sum(len(result.ids) for result in results)
        line["cut_off"] = sum(result.is_cut_off for result in results)
        line["seconds"] = round(sum(result.seconds for result in results), 3)
        self.progress.add(line)

    def _score_attempts(self, problem: Problem, results: list[Result]) -> dict[str, Any]:
        answers = [self.prompter.describe(result.ids, problem) for result in results]
        attempts = [{**answer, **problem.score(answer["answer"], self.symbols)} for answer in answers]
        fields: dict[str, Any] = dict(attempts[0])
        if len(attempts) > 1:
            fields["attempts"] = attempts
        return {**fields, "wanted": problem.wanted}

    def _write_result(self, tokens: int, seconds: float, memory: list[int]) -> None:
        """Write the result, and print the scores."""
        assert self.progress is not None
        lines = [self.progress.lines[problem.id] for problem, _ in self.work.values()]
        result: dict[str, Any] = {
            "scores": summarize(lines),
            "problems": lines,
            "settings": self._settings(),
            "configuration": dataclasses.asdict(self.config),
            "ranks": self.run.world_size,
            "spread": self.spread,
            "tokens": sum(line["tokens"] for line in lines),
            "tokens_of_last_start": tokens,
            "seconds_of_last_start": round(seconds, 3),
            "peak_memory_bytes": memory,
            "hardware": describe_hardware(self.run.device),
            "versions": collect_versions(),
            "commit": read_git_commit(),
        }
        path = self.folder / f"result_{self.progress.new_suffix()}.json"
        write_atomically(path, (json.dumps(result, indent=1) + "\n").encode())
        shown = {name: value for name, value in result["scores"].items() if name != "pass_at"}
        shown |= {f"pass@{k}": value for k, value in result["scores"].get("pass_at", {}).items()}
        print(", ".join(f"{name} {value:.4g}" for name, value in shown.items()), flush=True)
        print(f"result: {path}", flush=True)
        self.progress.close()


def read_device_bytes(run: Runtime) -> float:
    """Return the memory of this rank's device; on a CPU, its share of the machine's."""
    if run.device.type == "cuda":
        return float(torch.cuda.get_device_properties(run.device).total_memory)
    return min(size for _, size, _ in host_limits()) / run.local_world_size
