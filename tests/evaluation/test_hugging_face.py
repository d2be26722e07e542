"""`python -m evaluation` with models of Hugging Face: random ones of four architectures, without a download."""

import ctypes
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evaluation import costs, units
from evaluation.generation import Generator, Sampling, Task
from measure.memory_limits import process_bytes
from measure.tracker import MemoryTracker
from nanoGPT.costs import storage_bytes
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.export import write_hf_tokenizer
from nanoGPT.prepare.tokenizer import make_char_identity
from tests.helpers.forking import fork_ranks_from_this_process
from tests.helpers.marks import mark_slow
from tests.helpers.solving import solve_each
from workshop.ranks import run_on_ranks

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # 96
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": 96,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 3, "moe_intermediate_size": 16}
LARGE = {**EXPERTS, "num_hidden_layers": 4, "hidden_size": 256, "num_experts": 8, "moe_intermediate_size": 128}
TEXT = torch.arange(20)[None]
TASKS = [Task(number, 0, [(7 * number + i) % 96 for i in range(3 + 4 * number)], 7 - number) for number in range(4)]
Expected = tuple[dict[int, list[int]], torch.Tensor]
WAYS: dict[str, tuple[costs.Spread, ...]] = {
    "gpt2": ("fsdp",),
    "llama": ("fsdp", "offload", "tp"),
    "qwen3": ("tp",),
    "mistral": ("fsdp", "tp"),  # a sliding window in every layer
    "gemma3": ("fsdp", "offload"),  # the embedding and the head are tied
    "qwen3_moe": ("fsdp", "offload", "tp"),
    "gpt_oss": ("fsdp", "offload", "tp"),
}
QUICK = ("llama", "gpt_oss")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Path]:
    """Save a random model of each architecture with a tokenizer of characters."""
    transformers = pytest.importorskip("transformers", reason="the extra `web` is not installed")
    folder = tmp_path_factory.mktemp("models")
    configs = {
        "gpt2": transformers.GPT2Config(**{**SMALL, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 128}),
        "llama": transformers.LlamaConfig(**SMALL),
        "qwen3": transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
        "mistral": transformers.MistralConfig(**SMALL, sliding_window=8),
        "gemma3": transformers.Gemma3TextConfig(
            **SMALL, sliding_window=8, query_pre_attn_scalar=8, final_logit_softcapping=2.0
        ),
        "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS),
        "loading": transformers.Qwen3MoeConfig(**{**SMALL, **LARGE}),
        "gpt_oss": transformers.GptOssConfig(**SMALL, num_experts_per_tok=2, num_local_experts=4, sliding_window=8),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for param in model.parameters():
            param.data += 0.05 * torch.randn(param.shape)
        model.save_pretrained(folder / name)
        write_hf_tokenizer(folder / name, make_char_identity(CHARACTERS))
    settings = json.loads((folder / "llama" / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (folder / "llama" / "tokenizer_config.json").write_text(json.dumps(settings))
    yield folder


@torch.no_grad()
def compute_with_transformers(folder: Path) -> Expected:
    """Return the greedy tokens of each task, and the last logits of TEXT, from transformers."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted: dict[int, list[int]] = {}
    for task in TASKS:
        ids = list(task.ids)
        for _ in range(task.max_new):
            ids.append(int(theirs(torch.tensor([ids])).logits[0, -1, :96].argmax()))
        wanted[task.problem] = ids[len(task.ids) :]
    return wanted, theirs(TEXT).logits[:, -1, :96]


def compare_with_transformers(folder: Path, expected: Expected) -> list[tuple[str, bool, float, float]]:
    """Return for each way: whether greedy tokens equal those of transformers, a difference, and bytes of weights."""
    from evaluation.hugging_face import OpenedHf

    run, found = create_runtime("cpu", "float32"), []
    wanted, logits = expected
    units.MIN_PARAMS = 1000  # attention, MLP and experts are units of FSDP
    opened = OpenedHf(folder)
    for way in WAYS[folder.name]:
        model = opened.load(way, run)
        is_equal = True
        for slots in (1, 3):
            generator = Generator(model, run, slots, 40, Sampling(), way == "tp")
            is_equal &= wanted == {r.problem: r.ids for each in generator.run(TASKS) for r in each}
        with torch.no_grad(), MemoryTracker(model.model) as memory:
            difference = float((model.next_logits(TEXT, None, None) - logits).abs().max())
        predicted = costs.predict(way, opened.size, run.world_size, 1, 8, 4)
        held = storage_bytes(model.model.parameters()) / (predicted.weights + predicted.host)
        gathered = max(totals["gathered"] for _, totals in memory.timeline)
        is_equal &= gathered == 0 if way == "tp" else 1 <= gathered / predicted.all_gathered <= 4 / 3  # 4 experts for 3
        found.append((way, is_equal, difference, held))
    return found


KEEP_NOTHING = (-3, 2**16)  # M_MMAP_THRESHOLD: glibc returns larger blocks to the system as soon as they are freed


def measure_loading(load: Callable[[], Any]) -> tuple[int, int]:
    """Load a model. Return the bytes of this rank's part, and the most memory that the process had more than before.

    The memory is that of `process_bytes`, which does not count the page cache. The model is loaded twice, because the
    first time also imports libraries.
    """
    ctypes.CDLL(None).mallopt(*KEEP_NOTHING)
    load()
    begin, samples, is_loaded = process_bytes() or 0, [0], threading.Event()

    def sample() -> None:
        while not is_loaded.is_set():
            samples.append(process_bytes() or 0)
            time.sleep(0.0005)

    thread = threading.Thread(target=sample)
    thread.start()
    model = load()
    is_loaded.set()
    thread.join()
    module: torch.nn.Module = model.model  # type: ignore[attr-defined]
    return storage_bytes(module.parameters()), max(samples) - begin


def measure_loading_each_way(folder: Path, ways: tuple[costs.Spread, ...]) -> list[tuple[int, int]]:
    """Return the bytes of this rank's part of a model, and the memory that loading it needs, in each way."""
    from evaluation.hugging_face import OpenedHf

    run, opened = create_runtime("cpu", "float32"), OpenedHf(folder)
    return [measure_loading(lambda way=way: opened.load(way, run)) for way in ways]  # type: ignore[misc]


def compare_all(
    models: Path, expected: dict[str, Expected]
) -> tuple[list[tuple[int, int]], dict[str, list[tuple[str, bool, float, float]]]]:
    """Compare the models of `expected` in every way."""
    loading = measure_loading_each_way(models / "loading", ("fsdp", "tp"))
    return loading, {name: compare_with_transformers(models / name, expected[name]) for name in expected}


def run_with_transformers(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call `run_on_ranks`, but fork the ranks from this process, if possible.

    This process has imported transformers. Otherwise each rank imports it, which takes two seconds of processor time.
    """
    with fork_ranks_from_this_process():
        return run_on_ranks(function, ranks, *args, show=False)


@pytest.mark.parametrize("names", [QUICK, *mark_slow((tuple(name for name in WAYS if name not in QUICK),))])
def test_models_compute_what_transformers_computes(names, models):
    """Greedy tokens and logits to 1e-4, in each way; a rank holds and reads its share of the model."""
    expected = {name: compute_with_transformers(models / name) for name in names}
    for loading, found in run_on_ranks(compare_all, 2, models, expected, show=False):
        check_loading(loading, 2)
        for name, results in found.items():
            for way, is_equal, difference, held in results:
                assert is_equal and difference < 1e-4, (name, way, difference)
                assert held == pytest.approx(1, abs=0.2), (name, way, held)  # one rank has two of three experts


def check_loading(loading: list[tuple[int, int]], ranks: int) -> None:
    """Check that a rank needs its share of the model, and less than one tensor of all experts of a layer."""
    for share, peak in loading:
        assert share < 17e6 / ranks + 0.1e6 and peak < share + 4 * 8 * 256 * 256, (ranks, share, peak)


def test_packed_experts_are_unpacked(models, monkeypatch):
    """Rows of 4-bit experts are those that `transformers` unpacks. With tensor parallelism, a rank reads only the bytes
    of its part of each expert, rounded up to 32 numbers."""
    from evaluation import hf_files
    from evaluation.hf_tensor_parallel import Part

    name, folder = "model.layers.0.mlp.experts.down_proj", models
    blocks = torch.randint(0, 256, (4, 6, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.randint(120, 132, (4, 6, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, folder / "packed.safetensors")
    files = {f"{name}_{kind}": folder / "packed.safetensors" for kind in ("blocks", "scales")}
    convert, sizes = hf_files.convert_moe_packed_tensors, []
    wanted = convert(blocks, scales).float()  # (experts, C, 2 I)
    monkeypatch.setattr(
        hf_files, "convert_moe_packed_tensors", lambda *args: sizes.append([x.numel() for x in args]) or convert(*args)
    )
    parts = {None: 6 * 2, Part(2, ((2, 4),)): 2 * 2, Part(1, ((40, 64),)): 6, Part(1, ((30, 34),)): 6 * 2}
    for part, scales_of_part in parts.items():
        rows = torch.stack([row for _, row in hf_files.read_rows(files, name, 1, 3, folder, part)]).float()
        assert torch.equal(rows, part.take(wanted[1:3]) if part else wanted[1:3])
        assert sizes[-2:] == [[16 * scales_of_part, scales_of_part]] * 2


def test_ids_with_holes_and_longrope_are_supported(tmp_path):
    """The largest id of a tokenizer can be generated. With longrope, the context is that of the first training."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"a": 0, "b": 1, "end": 500}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    from evaluation.hf_codec import HfCodec
    from evaluation.hugging_face import find_context

    assert HfCodec(tmp_path, None).ids == 501
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    configs = [SimpleNamespace(max_position_embeddings=128, rope_parameters=each) for each in (rope, None)]
    assert [find_context(config) for config in configs] == [40, 128]


def test_the_command_solves_with_a_hugging_face_model(models, tmp_path):
    """Chat prompts, on 1 and 2 ranks: the same answers. Each bad model gets a sentence."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    base = [f"--problems={tmp_path / 'a.jsonl'}", f"--out_dir={models / 'llama'}", "--prompt=chat", "--tokens=12"]
    ways = [[*base, f"--to={tmp_path / way}", f"--spread={way}"] for way in ("auto", "tp", "offload")]
    assert run_on_ranks(solve_each, 1, ways[:1], show=False) == [[0]]
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (models / "llama").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    quantized = shutil.copytree(broken, tmp_path / "quantized")
    config = json.loads((broken / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    cases = {
        (f"--out_dir={models / 'qwen3'}",): "--prompt=chat needs a tokenizer with a chat template",
        ("--prompt=harmony",): "--prompt=harmony needs the token <|start|>",
        (f"--out_dir={broken}",): "has no tensor for model.norm.weight",
        (f"--out_dir={quantized}",): "has fp8 weights, which this program does not support",
        (f"--out_dir={models / 'gemma3'}", "--prompt=plain", "--spread=tp"): "no tensor-parallel plan",
    }
    commands = [[*base, f"--to={tmp_path / str(i)}", *arguments] for i, arguments in enumerate(cases)]
    for outcomes in run_on_ranks(solve_each, 2, [*ways[1:], *commands], show=False):
        assert outcomes[:2] == [0, 0]
        for (arguments, sentence), answer in zip(cases.items(), outcomes[2:], strict=True):
            assert sentence in str(answer), (arguments, answer)
    results = [
        json.loads(next((tmp_path / way).glob("result_*.json")).read_text()) for way in ("auto", "tp", "offload")
    ]
    answers = {result["problems"][0]["answer"] for result in results}
    assert len(answers) == 1 and answers != {""}
