"""`python -m evaluation` on real ranks: the same answers in every way, its costs, kills, and what bad input gets."""

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evaluation import command, costs, gpt, units
from evaluation.generation import Generator, Sampling, Task
from evaluation.progress import Progress, wait_for_lock
from measure.ledger import CollectiveCounter
from measure.tracker import MemoryTracker
from nanoGPT.costs import storage_bytes
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.model import GPT, GPTConfig, ModelConfig
from nanoGPT.options.llama import LlamaConfig
from nanoGPT.sample import generate
from tests.helpers.marks import mark_slow
from tests.helpers.programs import DEADLINE, Program
from tests.helpers.solving import solve_each, solve_quietly
from tests.helpers.training import tiny, train
from workshop.ranks import run_on_ranks

SHAPE = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=64, vocab_size=65, bias=True)
LLAMA = LlamaConfig(n_layer=2, n_head=8, n_embd=32, block_size=64, vocab_size=65, n_kv_head=4)
TASKS = [Task(number, 0, [(7 * number + i) % 65 for i in range(3 + number)], 6 - number % 3) for number in range(6)]


def create_gpt(shape: ModelConfig = SHAPE) -> GPT:
    """Return a model with random weights that make its greedy text vary."""
    model = shape.create_model()
    model.init_weights(1)
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param += 0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(i))
    return model


def generate_each_way(
    cells: list[tuple[str, int]], sampling: Sampling, shape: ModelConfig = SHAPE
) -> list[dict[int, list[int]]]:
    """Return the generated tokens, for each way of spreading and number of slots."""
    run, weights, found = create_runtime("cpu", "float32"), dict(create_gpt(shape).named_parameters()), []
    for spread, slots in cells:
        units.MIN_PARAMS = 4000 if spread == "offload" else 10**6
        model = gpt.GptModel(gpt.spread_gpt(shape, weights, spread, run), 60, run.device)
        generator = Generator(model, run, slots, 64, sampling, spread == "tp")
        found.append({result.problem: result.ids for each in generator.run(TASKS) for result in each})
    return found


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["gpt2", "llama"])
def test_tokens_do_not_depend_on_ranks_batch_or_the_way_of_spreading(shape):
    """Greedy tokens are those of `GPT.generate`, sampled ones those of one rank: fsdp, offload, tp on 1, 2, 4 ranks."""
    cells = [("fsdp", 3), ("offload", 2), ("tp", 1), ("tp", 4)]
    cells = cells if shape == SHAPE else cells[2:]
    model = create_gpt(shape).eval()
    reference = {
        task.problem: [int(column) for column in generate(model, torch.tensor([task.ids]), task.max_new, 0.0, None, 60)]
        for task in TASKS
    }
    assert len({tuple(ids) for ids in reference.values()}) > 3  # the texts differ
    sampled = []
    for ranks in (1, 2, 4) if shape == SHAPE else (2, 4):
        assert all(
            ids == reference for ids in run_on_ranks(generate_each_way, ranks, cells, Sampling(), shape, show=False)[-1]
        )
    for ranks, ways in ((1, cells[:1]), (2, cells[1:3])) if shape == SHAPE else ((1, cells[:1]), (2, cells[:1])):
        sampled += run_on_ranks(generate_each_way, ranks, ways, Sampling(0.8, seed=3), shape, show=False)[0]
    assert all(ids == sampled[0] for ids in sampled) and sampled[0] != reference


def test_a_long_answer_reads_few_sizes_of_window():
    """Greedy tokens are those of `generate` past the first window, and 140 tokens are read in windows of 3 sizes."""
    model = create_gpt(replace(SHAPE, block_size=160)).eval()
    tasks = [Task(0, 0, [1, 2, 3], 140), Task(1, 0, [5] * 40, 70)]
    slots = gpt.GptModel(model, 60, torch.device("cpu"))
    run = create_runtime("cpu", "float32")
    found = {
        result.problem: result.ids
        for each in Generator(slots, run, 2, 160, Sampling(), False).run(tasks)
        for result in each
    }
    for task in tasks:
        columns = generate(model, torch.tensor([task.ids]), task.max_new, 0.0, None, 60)
        assert found[task.problem] == [int(column) for column in columns]


def measure_costs(
    base: ModelConfig, slots: int, min_params: list[int]
) -> list[tuple[float, dict[str, float], costs.SpreadCosts, int]]:
    """Return for each way and size of the FSDP units: the largest layer, what was measured, and the prediction."""
    run, found = create_runtime("cpu", "float32"), []
    for spread, units.MIN_PARAMS in itertools.product(costs.SPREADS, min_params):
        # Without padding: fully_shard pads the rows of a vocabulary to a multiple of the ranks, which no formula has.
        shape = base if spread == "tp" else replace(base, vocab_size=64, n_layer=3)
        full = shape.create_model()
        model = gpt.spread_gpt(shape, dict(full.named_parameters()), spread, run)
        wrapped, counter = gpt.GptModel(model, shape.vocab_size, run.device), CollectiveCounter()
        cache = wrapped.new_cache(slots, 64)
        cache.lengths = [0] * slots
        ids = torch.zeros(slots, 1, dtype=torch.int64)
        with torch.no_grad():
            wrapped.next_logits(ids, cache, None)
            with counter:
                wrapped.next_logits(ids, cache, None)
            peaks = []
            for _ in range(3):  # a gloo thread may free a buffer late, so the minimum is the memory that a pass needs
                with MemoryTracker(model) as memory:
                    wrapped.next_logits(ids, cache, None)
                peaks.append(max(totals["gathered"] for _, totals in memory.timeline))
        measured = {
            "weights": storage_bytes(model.parameters()),
            "network": sum(row["ring_bytes"] for row in counter.rows.values()),
            "all_gathered": min(peaks),
        }
        size = costs.measure_gpt(shape)
        predicted = costs.predict(spread, size, run.world_size, slots, shape.block_size, 4)
        found.append((4 * max(size.layers), measured, predicted, len(size.units[0])))
    return found


@pytest.mark.parametrize(("shape", "ranks"), [(SHAPE, 1), (SHAPE, 2), (LLAMA, 2), *mark_slow((SHAPE, 4), (LLAMA, 4))])
def test_memory_and_communication_match_the_formulas(shape, ranks):
    """Weights, all-gathered bytes and communication match the formulas; offload has at most two layers at a time."""
    found = run_on_ranks(measure_costs, ranks, shape, 3, [3000, 10**6], show=False)[0]
    assert [len(costs.SPREADS) * [3, 1], 6] == [[parts for *_, parts in found], len(found)]
    for number, (layer, measured, predicted, _) in enumerate(found):
        is_offloaded = number in (2, 3)
        wanted = {name: getattr(predicted, name) for name in measured}
        wanted["weights"] += predicted.host
        if is_offloaded:
            assert 0.3 * layer < measured["all_gathered"] <= 2 * layer
        if is_offloaded and ranks == 1:  # on a CPU nothing is copied; on a GPU, one parameter is there twice
            assert measured.pop("all_gathered") <= wanted.pop("all_gathered")
        assert measured == wanted, (number, measured, wanted)


def test_a_way_is_chosen_by_memory_and_heads():
    """tp comes first, then fsdp, then offload; if nothing fits, the message says what would."""
    size = costs.measure_gpt(SHAPE)
    held = {way: costs.predict(way, size, 4, 8, 64, 4).memory / costs.RESERVE for way in costs.SPREADS}
    assert held["tp"] < held["offload"] < held["fsdp"]
    choices = {
        (1, 8, None): ("fsdp", "the full model fits on one rank"),
        (4, 8, None): ("tp", "weights stay where they are"),
        (4, 8, held["tp"] * 0.99): (None, "a smaller --batch_size"),
        (3, 8, None): ("fsdp", "a number of ranks that divides 4 heads"),
        (3, 8, costs.predict("offload", size, 3, 8, 64, 4).memory / costs.RESERVE): ("offload", "does not fit"),
    }
    for (ranks, slots, memory), (way, words) in choices.items():
        chosen, reason = costs.choose_spread(size, ranks, slots, 64, 4, memory)
        assert chosen == way and words in reason, (ranks, slots, memory, chosen, reason)


# ---- the command


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return the directory of a run of two steps, with a context of 64 characters."""
    folder = tmp_path_factory.mktemp("solve") / "run"
    fields = {"max_iters": 2, "gradient_accumulation_steps": 2}
    train("nanoGPT", 1, tiny("nanoGPT", folder, block_size=64, n_head=4, dropout=0.0, **fields))
    return folder


def read_result(folder: Path) -> dict:
    return json.loads(max(folder.glob("result_*.json")).read_text())


def read_answers(folder: Path) -> list[tuple[str, str]]:
    return [(line["id"], line["answer"]) for line in read_result(folder)["problems"]]


def test_answers_of_a_run_do_not_depend_on_ranks(trained, tmp_path):
    """On 1 and 2 ranks, in two ways: the same answers; the result has scores, times and memory."""
    base = [f"--out_dir={trained}", "--num=5", "--tokens=20"]
    folders = [tmp_path / name for name in ("one", "two")]
    one, two = ([*base, f"--to={folder}"] for folder in folders)
    assert run_on_ranks(solve_quietly, 1, [*one, "--batch_size=1"], show=False) == [0]
    assert run_on_ranks(solve_quietly, 2, [*two, "--spread=fsdp", "--batch_size=3"], show=False) == [0, 0]
    assert read_answers(folders[0]) == read_answers(folders[1])
    result = read_result(folders[1])
    assert [line["number"] for line in result["problems"]] == list(range(5)) and result["ranks"] == 2
    assert all(line["tokens"] > 0 and line["seconds"] > 0 for line in result["problems"])
    assert {"accuracy", "cell_accuracy"} <= result["scores"].keys() and len(result["peak_memory_bytes"]) == 2


def test_every_kind_of_problem_is_scored(trained, tmp_path):
    """Text and ARC problems in one sampled run on 2 ranks; problems that the model cannot read are skipped."""
    rows = [
        {"prompt": "What", "answer": "x", "match": "exact", "id": "text"},
        {"prompt": "no such character: \u00e9", "answer": "x"},
        {"prompt": "x" * 70, "answer": "too long"},
    ]
    folder = tmp_path / "problems"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"train": [{"input": [[0]], "output": [[1]]}], "test": [{"input": [[2]], "output": [[3]]}, {"input": [[2]]}]}
    (folder / "b.json").write_text(json.dumps(task))
    command = [f"--out_dir={trained}", f"--problems={folder}", "--tokens=8", "--attempts=3", "--temperature=0.9"]
    command.append(f"--to={tmp_path / 'to'}")
    for refusal, code in run_on_ranks(solve_each, 2, [command, [*command, "--skip_bad=True"]], show=False):
        assert re.search("the prompt of a-.*: the character 'é' is not in this model's vocab.*--skip_bad", str(refusal))
        assert code == 0
    result = read_result(tmp_path / "to")
    lines = {line["id"]: line for line in result["problems"]}
    assert list(lines) == ["text", "b-0", "b-1"]
    assert len(lines["b-0"]["attempts"]) == 3 and "is_right" not in lines["b-1"]
    assert result["scores"]["pass_at"].keys() == {"1", "2", "3"}
    assert (lines["text"]["tokens"], lines["text"]["cut_off"]) == (24, 3)  # nothing ends an answer in characters
    assert result["scores"]["cut_off"] == sum(line["cut_off"] for line in result["problems"])


def test_bad_input_gets_one_sentence(trained, tmp_path):
    """Wrong values, a missing model, too many tokens and files of another model: a sentence with a remedy."""
    model, to = f"--out_dir={trained}", f"--to={tmp_path / 'to'}"
    cases = {
        ("--num=0",): "--num=0 is out of range: use 1 or more",
        (f"--problems={tmp_path}",): "is inside of --problems=",
        ("--attempts=2",): "gives the same answer every time: use --temperature=0.7",
        (r"--stop=\n",): r"contains a backslash, and no line end: in a shell, write --stop=$'\n'",
        ("--tokens=60",): "tokens and the answer 60, but the model's context has 64: use --tokens=27 or less",
        ("--tokens=5", to): "has answers with tokens 4 instead of 5: use another directory as --to",
        (f"--problems={tmp_path / 'one.jsonl'}", "--start=3"): "has no problem number 3: use a smaller --start",
    }
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "answer": "b"}')
    commands = [[model, f"--to={tmp_path / 'new'}", *arguments] for arguments in cases]
    ((code, *answers),) = run_on_ranks(solve_each, 1, [[model, to, "--num=1", "--tokens=4"], *commands], show=False)
    assert code == 0
    for (arguments, sentence), answer in zip(cases.items(), answers, strict=True):
        assert sentence in str(answer), (arguments, answer)


def open_output_and_pause(output: str) -> int:
    """Open a program's output. Let its rank 0 wait for a signal or for the end of its launcher after three problems."""
    add, problems, signals, launcher = Progress.add, itertools.count(1), [], os.getpid()

    def add_and_pause(self: Progress, line: dict) -> None:
        number = next(problems)
        if number == 1:
            handle = signal.getsignal(signal.SIGUSR1)
            assert callable(handle)
            signal.signal(signal.SIGUSR1, lambda *arguments: (signals.append(arguments[0]), handle(*arguments)))
        add(self, line)
        while number == 3 and not signals and launcher in (os.getpid(), os.getppid()):
            time.sleep(0.01)
        time.sleep(0.8 if number == 3 and not signals else 0.0)  # a rank notices the end of its launcher after 0.5 s

    Progress.add = add_and_pause  # type: ignore[method-assign]
    return os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_continues_with_the_next_problem(trained, tmp_path, ranks):
    """SIGKILL after some problems, then SIGUSR1, then the same command: no problem is lost, none is solved twice."""
    words = ["--problems=arc-generated", f"--out_dir={trained}", "--num=40", "--batch_size=1", "--tokens=24"]
    words += [f"--gpus={ranks}", f"--to={tmp_path / 'to'}", "--device=cpu"]
    open_output = functools.partial(open_output_and_pause, str(tmp_path / "output"))
    for number in (signal.SIGKILL, signal.SIGUSR1):
        begin = count_lines(tmp_path / "to")
        program = Program("evaluation", *words, open_output=open_output)
        while count_lines(tmp_path / "to") < begin + 3:
            assert program.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.01)
        os.kill(program.pid, number)
        code = program.wait()
        wait_for_lock(tmp_path / "to").close()  # the ranks of a killed launcher have exited
        assert count_lines(tmp_path / "to") < 40 and code == (0 if number == signal.SIGUSR1 else -number)
    finished = Program("evaluation", *words)
    assert finished.wait() == 0, finished.output()
    lines = [json.loads(line) for line in next(tmp_path.glob("to/progress_*")).read_text().splitlines()]
    assert sorted(line["number"] for line in lines) == list(range(40))
    assert len(read_answers(tmp_path / "to")) == 40


def test_ranks_that_cannot_handle_a_signal_are_killed(monkeypatch):
    """A rank waits in a collective for another one that is stopped. After a signal, both are killed in the end."""
    with subprocess.Popen(["sleep", "600"]) as rank:
        rank.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(command, "STOP_SECONDS", 0.0)
        monkeypatch.setattr(command, "list_rank_processes", lambda: [rank.pid])
        command.kill_hung_ranks([signal.SIGQUIT, signal.SIGTERM])
        assert rank.wait(DEADLINE) == -signal.SIGKILL


def count_lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("progress_*"))
