"""The parts of `python -m evaluation`: reading problems, prompts, scores and progress files."""

import itertools
import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evaluation import arc, scores
from evaluation.generation import Sampling, Task
from evaluation.identity import digest_files
from evaluation.problems import ArcProblem, TextProblem, is_match, read_problems
from evaluation.progress import Progress, read_lines
from evaluation.prompts import HARMONY, OwnCodec, Prompter, choose_symbols
from evaluation.settings import SolveConfig
from evaluation.tasks import write_tasks
from nanoGPT.errors import ConfigError
from nanoGPT.prepare.tokenizer import CharTokenizer

TASK = {"train": [{"input": [[0, 1], [2, 3]], "output": [[1, 0], [3, 2]]}], "test": [{"input": [[4, 5]]}]}
LETTERS = "abcdefghij"


class WordCodec:
    """A tokenizer of single characters and Harmony's special tokens."""

    def __init__(self) -> None:
        self.names = [*HARMONY, "<|call|>", *map(chr, range(32, 127)), "\n"]
        self.ids, self.prefix = len(self.names), []
        self.ends = frozenset([self.names.index("<|return|>")])

    def encode(self, text: str) -> list[int]:
        return [self.names.index(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.names[i] for i in ids)

    def find_special(self, names: tuple[str, ...]) -> dict[str, int]:
        return {name: self.names.index(name) for name in names if name in self.names}

    def encode_all(self, *parts: str) -> list[int]:
        """Return the ids of texts and special tokens."""
        return [i for part in parts for i in ([self.names.index(part)] if part in self.names else self.encode(part))]


@pytest.mark.parametrize("size", [44, 500])
def test_generated_tasks_have_the_answer_of_their_rule(size):
    """A generated task is a valid ARC task of the given size, is reproducible, and its answer gets full marks."""
    for index in range(8):
        name, task = arc.generate_task(index, size)
        assert (name, task) == arc.generate_task(index, size)
        pairs, ((test, wanted),) = arc.read_task(json.loads(json.dumps(task)))
        rule = arc.RULES[index % 4]
        assert wanted == rule(test) and all(rule(given) == output for given, output in pairs)
        text = arc.format_task(pairs, test, LETTERS) + arc.format_grid(wanted, LETTERS) + "\n"
        assert len(text) == arc.count_characters(len(test), len(pairs)) <= size
        answer = arc.format_grid(wanted, LETTERS)
        assert ArcProblem("x", pairs, test, wanted).score(answer, LETTERS) == {
            "grid": wanted,
            "is_right": True,
            "cell_accuracy": 1.0,
        }


def test_a_grid_is_found_in_an_answer_with_other_text():
    """The last block of equally long rows counts; a wrong cell lowers the cell accuracy, another shape sets it to 0."""
    assert arc.parse_grid("The rule mirrors rows.\n12\n34\n\nSo:\n2 1\n4 3\n", "0123456789") == [[2, 1], [4, 3]]
    assert arc.parse_grid("12\n3", "0123456789") is None and arc.parse_grid("no grid", "0123456789") is None
    assert arc.count_equal_cells([[1, 2]], [[1, 3]]) == 0.5 and arc.count_equal_cells([[1]], [[1, 3]]) == 0


def test_a_grid_with_rows_of_different_lengths_is_refused():
    """The schema of an ARC task has no such limit."""
    with pytest.raises(ValueError, match="rows of different lengths"):
        arc.read_task({**TASK, "test": [{"input": [[1], [1, 2]]}]})


def test_a_directory_of_problems_is_read_in_order(tmp_path):
    """ARC files, several tasks in one file and JSON lines are read; a malformed problem gives its place."""
    (tmp_path / "a.json").write_text(json.dumps({**TASK, "test": TASK["test"] * 2}))
    (tmp_path / "b.json").write_text(json.dumps({"t1": TASK, "t2": {}}), encoding="utf-8-sig")
    rows = [
        {"prompt": "2 + 2 =", "answer": 4, "match": "numeric"},
        {"prompt": "2 - 7 =", "answer": "-5", "id": "minus"},
        {"prompt": "The sky is", "answer": "blue", "id": "sky"},
        {"prompt": 3, "answer": "x"},
        {"prompt": "half", "answer": "1/2", "match": "numeric"},
        {"prompt": "a", "answer": "b", "match": "fuzzy"},
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\nnot json\n", encoding="utf-8-sig")
    (tmp_path / ".copies").mkdir()
    shutil.copy(tmp_path / "a.json", tmp_path / ".copies")
    shutil.copy(tmp_path / "a.json", tmp_path / ".hidden.json")
    refusals: list[ConfigError] = []
    found = list(read_problems(str(tmp_path), 100, refusals.append))
    assert [each.id for each in found] == ["a-0", "a-1", "t1", "c-0001", "minus", "sky"]
    assert [type(each) for each in found[-4:]] == [ArcProblem, *3 * [TextProblem]]
    assert [found[4].score(text, "")["is_right"] for text in ("-5", "5")] == [True, False]  # a number in a text
    messages = [str(each) for each in refusals]
    assert "b.json, task t2 is not a problem: Object missing required field `train`" in messages[0]
    assert "c.jsonl, line 4 is not a problem: Expected `str`, got `int` - at `$.prompt`" in messages[1]
    assert "answer` is no decimal number" in messages[2]
    assert "c.jsonl, line 6 is not a problem: Invalid enum value 'fuzzy' - at `$.match`" in messages[3]
    assert "c.jsonl, line 7 is not a problem" in messages[4] and "--skip_bad=True" in messages[4]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no file"):
        list(read_problems(str(tmp_path / "empty"), 100, refusals.append))


@pytest.mark.parametrize(
    ("text", "wanted", "match", "is_right"),
    [
        (" Paris\n", "Paris", "exact", True),
        ("paris", "Paris", "exact", False),
        ("The  answer.", "answer", "normalized", True),
        ("so it is 1,024.0", "1024", "numeric", True),
        ("2 or 3", "2", "numeric", False),
        ("0.00001", "1e-05", "numeric", True),
        ("0.5", ".5", "numeric", True),
        ("x = 1,2", "2", "numeric", True),
        ("9007199254740993", "9007199254740992", "numeric", False),  # equal as floats
        ("10-5", "5", "numeric", True),
        ("it is \u22125", "-5", "numeric", True),
        ("3\u20135", "5", "numeric", True),
        ("-$ 23", "-23", "numeric", True),
        ("$9{,}500$", "9500", "numeric", True),
        ("[0.5,100]", "100", "numeric", True),
        ("\u0915\u093e", "\u0915\u0940", "normalized", False),  # Hindi: only the vowel sign differs
        ("1.5 km", "15 km", "normalized", False),
        ("1,024 well-known $", "1024 wellknown", "normalized", True),
        ("x < 3", "x > 3", "normalized", False),
        ("- Paris", "paris", "normalized", True),
        ("-x", "x", "normalized", False),
        ("\u22125 \u00b0C", "-5 \u00b0c", "normalized", True),
        ("cafe\u0301", "caf\u00e9", "normalized", True),
        ("", "A", "normalized", False),
        ("1e99999999999999999999", "1", "numeric", False),  # Decimal cannot represent it
    ],
)
def test_answers_match(text, wanted, match, is_right):
    """Answers are equal exactly, after normalization, or by their last number."""
    assert is_match(text, wanted, match) is is_right


def test_a_tiny_temperature_chooses_the_likeliest_token():
    """A division by it would give infinite logits."""
    assert Sampling(1e-309).choose(torch.tensor([[0.0, 2.0, 1.0]]), []) == [1]


def test_tokens_are_drawn_by_their_probability():
    """4,000 draws have the frequencies of the softmax."""
    logits = torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    draws = [Sampling(1.0).sample(logits, Task(0, 0, [], 1), position) for position in range(4000)]
    frequencies = torch.tensor(draws).bincount(minlength=4) / 4000
    torch.testing.assert_close(frequencies, logits.softmax(0), rtol=0, atol=0.03)


def test_colors_are_digits_or_letters():
    """A vocabulary without digits writes colors as letters; one without both is refused."""
    assert choose_symbols(OwnCodec(CharTokenizer("0123456789\n:"), 12)) == "0123456789"
    assert choose_symbols(OwnCodec(CharTokenizer(LETTERS + "\n:"), 12)) == LETTERS
    with pytest.raises(ConfigError, match="neither the digits nor the letters"):
        choose_symbols(OwnCodec(CharTokenizer("xyz"), 3))


def test_the_final_channel_of_harmony_is_the_answer():
    """Other channels do not count. A text of `--stop` ends the answer, and without the channel it is empty."""
    codec = WordCodec()
    prompter, problem = Prompter("harmony", codec), TextProblem("x", "2+2?", "4", "exact")
    prompt = codec.decode(prompter.write(problem, ""))
    assert prompt.endswith("<|start|>user<|message|>2+2?<|end|><|start|>assistant")
    analysis = codec.encode_all("<|channel|>", "analysis", "<|message|>", "easy", "<|end|>", "<|start|>", "assistant")
    final = codec.encode_all("<|channel|>", "final", "<|message|>", "4")
    generated = [*analysis, *final, *codec.encode_all("<|return|>")]
    assert prompter.describe(generated, problem) == {"answer": "4", "text": codec.decode(generated)}
    stopped = Prompter("harmony", codec, ["END", "STOP"])
    assert stopped.read([*analysis, *final, *codec.encode("STOP END")], problem) == "4"
    model: Any = SimpleNamespace(context=200, codec=codec)
    (task,) = write_tasks(0, problem, stopped, model, SolveConfig(tokens=20))
    thinking = codec.encode_all("<|channel|>", "analysis", "<|message|>", "STOP")
    assert not task.has_ended(thinking) and task.has_ended([*thinking, *final, *codec.encode("STOP")])
    for ids in (analysis, codec.encode_all("<|channel|>", "  ", "<|message|>")):
        assert prompter.read(ids, problem) == ""


def test_pass_at_k_is_the_fraction_of_choices_with_a_right_attempt():
    """The estimate equals a count of all choices of k attempts, for every k.

    The scores have the powers of two and the number of attempts.
    """
    for attempts, right in ((1, 0), (5, 2), (6, 6)):
        marks = [number < right for number in range(attempts)]
        for k in range(1, attempts + 1):
            choices = [any(choice) for choice in itertools.combinations(marks, k)]
            assert scores.estimate_pass_at(attempts, right, k) == pytest.approx(sum(choices) / len(choices))
    lines = [
        {"is_right": True, "attempts": [{"is_right": each} for each in (True, False, False, True, False)]},
        {"is_right": False, "attempts": [{"is_right": False}] * 5},
    ]
    summary = scores.summarize(lines)
    assert summary["pass_at"] == {k: pytest.approx(each) for k, each in zip("1245", (0.2, 0.35, 0.5, 0.5), strict=True)}
    assert summary["accuracy"] == 0.5


def test_progress_survives_a_torn_line_and_refuses_other_settings(tmp_path):
    """A torn last line is dropped; a damaged line, other settings and other weights are refused; a path may differ."""
    Progress(tmp_path, {"model": "b", "prompt": "plain"}).close()  # without answers, other settings are fine
    progress = Progress(tmp_path, {"model": "a", "prompt": "plain"})
    progress.add({"id": "one", "answer": "1"})
    with open(progress.path, "ab") as file:
        file.write(b'{"id": "tw')
    progress.close()
    again = Progress(tmp_path, {"model": "a", "prompt": "plain"})
    again.add({"id": "three", "answer": "3"})
    again.close()
    assert again.path == progress.path and list(read_lines(tmp_path)) == ["one", "three"]
    with pytest.raises(ConfigError, match="has answers with prompt 'plain' instead of 'chat'"):
        Progress(tmp_path, {"model": "a", "prompt": "chat"})
    Progress(tmp_path, {"model": "copy of a", "prompt": "plain"}).close()
    with pytest.raises(ConfigError, match="has answers of a, whose weights differ from those of b"):
        Progress(tmp_path, {"model": "b", "prompt": "plain", "weights": "v"})
    progress.path.write_bytes(b"\xff\n" + progress.path.read_bytes())
    with pytest.raises(ConfigError, match="line 1 of .* is damaged"):
        Progress(tmp_path, {"model": "a", "prompt": "plain"})


def test_a_model_is_identified_by_the_content_of_its_files(tmp_path):
    """A copy has the same hash. One changed number in a large tensor, or another file name, changes the hash."""
    digests = []
    for name, value, file in (("a", 1, "model"), ("b", 1, "model"), ("c", 2, "model"), ("d", 1, "weights")):
        (tmp_path / name).mkdir()
        content = bytearray(4_000_000)
        content[2_000_000:2_100_000] = bytes([value]) * 100_000
        (tmp_path / name / f"{file}.safetensors").write_bytes(content)
        (tmp_path / name / "README.md").write_text(name)
        digests.append(digest_files(str(tmp_path / name)))
    assert digests[0] == digests[1] and len({*digests}) == 3
    assert digest_files("gpt2") == "gpt2"
