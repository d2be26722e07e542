"""Llama has one loss curve in every phase, its files work with `transformers`, and a custom model is one module."""

import importlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoGPT import export, sample
from nanoGPT.checkpoint.sources import check_model, find_tied_names, read_weights
from nanoGPT.errors import ConfigError
from nanoGPT.job.parse import parse
from nanoGPT.model import GPT, GPTConfig, make_shape
from nanoGPT.observers import add_flags
from nanoGPT.options.llama import LlamaConfig
from nanoGPT.train_config import TrainConfig, validate
from phase2_triton.apply import apply_kernels
from tests.helpers.programs import assert_refused, make_flags, run_program
from tests.helpers.training import ROOT, TINY, gap, read_ledger, tiny, train, train_all
from workshop.ranks import losses, run_on_ranks

LLAMA: dict[str, Any] = {"model": "llama", "n_head": 4, "n_kv_head": 2, "max_iters": 4, "eval_interval": 2}
LLAMA |= {"gradient_accumulation_steps": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "dropout": {},
    "no dropout": {"dropout": 0.0},
    "tied": {"tie_embeddings": True},
    "muon": {"optimizer": "muon"},
}
# For each number of ranks: a phase, the variant of the model that it trains, and further options.
CELLS: dict[int, list[tuple[str, str, dict[str, Any]]]] = {
    1: [("phase2_triton", "no dropout", {"kernels": "loss,attention"}), ("phase3_fsdp", "dropout", {})],
    2: [
        ("nanoGPT", "dropout", {}),
        ("phase1_zero1", "dropout", {"zero_stage": 2}),
        ("phase1_zero1", "no dropout", {"kernels": "loss"}),
        ("phase3_fsdp", "dropout", {"fsdp_activation_checkpointing": "selective", "async_save": True}),
        ("phase3_fsdp", "tied", {}),
        ("phase3_fsdp", "muon", {}),
    ],
    4: [
        ("phase1_zero1", "muon", {}),
        ("phase1_zero1", "tied", {}),
        ("phase3_fsdp", "dropout", {"fsdp_shard_size": "2", "fsdp_wrap": "1000", "fsdp_cpu_offload": True}),
    ],
}
IDX = torch.arange(20).view(2, 10) % 16


@pytest.mark.slow
def test_a_compiled_llama_has_the_same_losses(tmp_path):
    """torch.compile does not change the losses of a Llama that FSDP shards."""
    fields = {**LLAMA, "dropout": 0.0}
    curves = [
        train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / str(compiled), **fields, compile=compiled))
        for compiled in (False, True)
    ]
    assert gap(*curves) <= 1e-6


@pytest.mark.long
def test_llama_has_one_loss_curve(tmp_path):
    """In every phase, on 1, 2 and 4 ranks, the losses are those of one process, and the ledger measures the bytes of
    the formulas. A checkpoint of 2 ranks continues in other phases and on other ranks."""
    options = {variant: {**LLAMA, **fields} for variant, fields in VARIANTS.items()}
    train_all(1, [("nanoGPT", tiny("nanoGPT", tmp_path / variant, **options[variant])) for variant in VARIANTS])
    for ranks, cells in CELLS.items():
        names = [f"{ranks} {i}" for i in range(len(cells))]
        configs = [
            (phase, tiny(phase, tmp_path / name, **{**options[variant], **fields}, ledger=True))
            for name, (phase, variant, fields) in zip(names, cells, strict=True)
        ]
        for curve, (_, config), cell in zip(train_all(ranks, configs), configs, cells, strict=True):
            difference = gap(losses(tmp_path / cell[1]), curve)
            assert difference <= (1e-4 if cell[1] == "muon" else 1e-6), (ranks, cell, difference)
            read_ledger(Path(config.out_dir))
    for ranks, phase in ((1, "nanoGPT"), (2, "phase1_zero1"), (4, "phase3_fsdp")):
        copy = shutil.copytree(tmp_path / "2 3", tmp_path / f"{phase} resumed")  # saved by phase 3 on 2 ranks
        shutil.rmtree(copy / "checkpoints/step-00000004")
        config = tiny(phase, copy, init_from="resume", **options["dropout"])
        assert gap(losses(tmp_path / "dropout"), train(phase, ranks, config)) <= 1e-6, phase


def make_llama(**changes: Any) -> torch.nn.Module:
    """Return a small Llama whose weights are so large that positions and heads matter."""
    fields = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 16, "n_kv_head": 2, **changes}
    model = LlamaConfig(**fields).create_model().eval()
    model.init_weights(1)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(10 if param.dim() > 1 else 1)
    return model


@torch.no_grad()
def test_a_cache_gives_the_same_logits():
    """Token by token with a cache, and for sequences of different lengths, the logits are those of full sequences."""
    model = make_llama()
    expected = model.compute_logits(model.compute_features(IDX))
    caches = [sample.KVCache() for _ in model.blocks]
    parts = [model(IDX[:, :4], caches=caches)] + [model(IDX[:, [i]], caches=caches) for i in range(4, 10)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected[:, 3:])


@pytest.mark.heavy
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_same_logits(tied, tmp_path):
    """A Llama of `transformers` opens here, and an export opens there, both with the same logits."""
    transformers = pytest.importorskip("transformers")
    fields = {"rope_theta": 500.0, "norm_eps": 1e-3, "tie_embeddings": tied}
    ours = make_llama(**fields)
    export.write_hf(tmp_path, ours.config, dict(ours.named_parameters()), 16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    theirs.save_pretrained(tmp_path / "again")
    shape, weights, _ = read_weights(str(tmp_path / "again"))
    assert shape == ours.config
    again = sample.load_weights(model := shape.create_model(), weights) or model
    with torch.no_grad():
        expected = theirs(IDX).logits
        for net in (ours, again):
            torch.testing.assert_close(net.compute_logits(net.compute_features(IDX)), expected, atol=1e-4, rtol=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    scaled = {"rope_scaling": {"type": "linear", "factor": 2.0}}  # in addition to rope_parameters
    for field in ({"attention_bias": True}, {"rope_parameters": {"rope_type": "llama3"}}, {"head_dim": 4}, scaled):
        (tmp_path / "config.json").write_text(json.dumps({**config, **field}))
        with pytest.raises(ConfigError, match="supports only"):
            read_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--model=llama", "--n_kv_head=3"], "--n_kv_head=3 does not divide --n_head=4"),
        (["--model=llama", "--n_embd=4"], "heads of 1 channels"),
        (["--model=llama", "--bias=True"], "--bias=True has no effect"),
        (["--model=llama", "--rope_theta=-1"], "--rope_theta=-1.0 is out of range"),
        (["--n_kv_head=2"], "--n_kv_head is not a flag of this trainer: add --model=llama"),
        (["--model=lama"], "cannot be imported .*did you mean llama"),
        (["--model=json"], "has no class Shape"),
    ],
)
def test_a_wrong_shape_is_refused(flags, problem):
    """A flag that the model does not have, or a value that it cannot have, is one sentence."""
    with pytest.raises(ConfigError, match=problem):
        validate(parse(TrainConfig, ["--device=cpu", *flags], ROOT / "nanoGPT/train.py"), 1)


def test_the_model_of_a_source_is_found_and_compared(tmp_path):
    """A run that resumes, or starts from weights, has the model of its source. A flag that differs is refused."""
    fields = {**LLAMA, "max_iters": 1}
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path, **fields))
    trainer = ROOT / "nanoGPT/train.py"
    for source in ([f"--init_from={tmp_path}"], ["--init_from=resume", f"--out_dir={tmp_path}"]):
        assert parse(TrainConfig, source, trainer).model == "llama"
    resumed = parse(TrainConfig, ["--init_from=resume", f"--out_dir={tmp_path}"], trainer)
    assert resumed.n_kv_head == 2
    with pytest.raises(ConfigError, match="--model=gpt2, but .* has model=llama"):
        parse(TrainConfig, [f"--init_from={tmp_path}", "--model=gpt2"], trainer)


def test_the_model_of_the_guide_works(tmp_path, monkeypatch):
    """The model of docs/models.md is one file. Its losses on two ranks with FSDP are those of one process. It
    samples, and an export for `transformers` is refused."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)
    (tmp_path / "my_llama.py").write_text(code)
    one, two = tmp_path / "one", tmp_path / "two"
    environment = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    flags = make_flags(**{**TINY, **LLAMA, "model": "my_llama"})
    for words in (
        ["nanoGPT/train.py", *flags, f"--out_dir={one}"],
        ["operate.launch", "--gpus=2", "phase3_fsdp/train.py", *flags, f"--out_dir={two}"],
        ["nanoGPT.sample", f"--out_dir={two}", "--max_new_tokens=3"],
    ):
        outcome = run_program(*words, **environment)
        assert outcome.code == 0, outcome.output
    assert gap(losses(one), losses(two)) <= 1e-6
    exported = run_program("nanoGPT.export", f"--out_dir={two}", f"--to={tmp_path / 'hf'}", **environment)
    assert_refused(exported, "--model=my_llama has no format of Hugging Face: export it with --format=ckpt")
    assert not (tmp_path / "hf").exists()
    monkeypatch.syspath_prepend(tmp_path)
    shape = read_weights(str(two)).shape
    assert shape.model == "my_llama"


LAYER_DROP = """from dataclasses import dataclass
from typing import Literal

import torch

from nanoGPT.options.llama import Flags, Llama, LlamaConfig


@dataclass
class Shape(LlamaConfig):
    model: Literal["layer_drop"] = "layer_drop"

    def create_model(self):
        return LayerDrop(self)


class LayerDrop(Llama):
    def compute_features(self, idx, caches=None):
        x = self.embed(idx, 0)
        skipped = torch.randint(len(self.blocks), ()).item() if self.training else -1
        for i, block in enumerate(self.blocks):
            x = x if i == skipped else block(x, None)
        return x
"""


def test_fsdp_refuses_ranks_that_use_different_blocks(tmp_path):
    """A model that skips one random block per micro-batch ends with one sentence, and saves nothing."""
    (tmp_path / "layer_drop.py").write_text(LAYER_DROP)
    fields = {"model": "layer_drop", "n_layer": 4, "gradient_accumulation_steps": 2, "out_dir": tmp_path / "run"}
    flags = make_flags(**{**TINY, **LLAMA, **fields, "max_iters": 40, "eval_interval": 40, "log_interval": 10})
    outcome = run_program("operate.launch", "--gpus=2", "phase3_fsdp/train.py", *flags, PYTHONPATH=str(tmp_path))
    assert outcome.code == 1 and "gradients of different parameters" in outcome.output, outcome.output
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


INIT = "super().__init__(shape)\n"
# A part of the guide's model, what is added or replaces it, and the words of the error.
MISTAKES = {
    "no create_model": ("def create_model(self)", "def other(self)", "its class Shape has no method create_model"),
    "another name": ('model: Literal["my_llama"] = "my_llama"', "", "the class Shape has another name"),
    "buffer": (
        INIT,
        f"{INIT}        self.register_buffer('x', ONES)\n",
        "a checkpoint would not have x",
    ),
    "blocks": ("    def create", '    BLOCKS = "model.blocks"\n\n    def create', "model.blocks, its BLOCKS, is no"),
    "tied blocks": (
        INIT,
        f"{INIT}        layers = self.model['layers']\n        layers[-1].self_attn = layers[0].self_attn\n",
        "is another name of a parameter of a block",
    ),
    "scalar": (INIT, f"{INIT}        self.a = nn.Parameter(ONES[0])\n", "a has no dimension"),
    "no annotation": ('model: Literal["my_llama"]', "model", "a field of its class Shape has a value of another type"),
    "no dataclass": ("@dataclass\n", "", "its class Shape is no dataclass"),
    "attribute": (
        "    def create",
        "    def __post_init__(self):\n        self.a = 1\n\n    def create",
        "sets a, which",
    ),
    "foreign flags": ("\n\nclass Squared", "\n\nclass Flags:\n    pass\n\nclass Squared", "does not extend Flags"),
    "syntax": ("class MyLlama(Llama):", "class MyLlama(Llama)", "cannot be imported .SyntaxError"),
    "import": (
        "from torch import nn",
        "import missing_package",
        "No module named 'missing_package'.*install what it needs",
    ),
}
SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 9}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_model_is_refused(name, tmp_path, monkeypatch):
    """A model that checkpoints could not store, or whose shape does not describe it, is refused before it trains."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)
    line, replacement, words = MISTAKES[name]
    assert line in code
    module = f"my_{name.replace(' ', '_')}"
    code = code.replace(line, replacement).replace("my_llama", module)
    code = code.replace("        for block in self.blocks:", "        for block in self.model['layers']:")
    (tmp_path / f"{module}.py").write_text("import torch\nONES = torch.ones(3)\n" + code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=words):
        add_flags(TrainConfig, "", module)
        check_model(make_shape({**SHAPE, "model": module}))


def train_with_a_buffer(phase: str, out: str) -> str:
    """Train a GPT whose class has been edited: it counts its calls in a buffer. Return the error."""
    create = GPT.__init__

    def create_with_a_buffer(self: GPT, shape: GPTConfig) -> None:
        create(self, shape)
        self.register_buffer("count", torch.zeros(()))

    GPT.__init__ = create_with_a_buffer  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as failure:
        importlib.import_module(f"{phase}.train").train(tiny(phase, Path(out)))
    return str(failure.value)


@pytest.mark.parametrize("phase", ["nanoGPT", "phase1_zero1", "phase3_fsdp"])
def test_a_buffer_that_a_checkpoint_would_lose_is_refused(phase, tmp_path):
    """Also if our own model has been edited, as in a copy: a resumed run would begin with another buffer."""
    for error in run_on_ranks(train_with_a_buffer, 2, phase, str(tmp_path), show=False):
        assert "count" in error and ("persistent=False" in error or "has no values" in error)


def test_tied_parameters_are_found_and_counted_once(tmp_path, monkeypatch):
    """A custom model ties parameters and does not list them."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)
    code = code.replace(INIT, f"{INIT}        self.lm_head.weight = self.model['embed_tokens'].weight\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_tied.py").write_text(code.replace("my_llama", "my_tied"))
    check_model(shape := make_shape({**SHAPE, "model": "my_tied"}))
    assert find_tied_names(shape) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert shape.count_params() == sum(p.numel() for p in shape.create_model().parameters())


def test_kernels_that_do_not_apply_are_named():
    """Kernels of other modules than Llama's are refused in a list, and left out of `all`; the others run."""
    model = make_llama()
    with pytest.raises(ConfigError, match="gelu: the model has no MLP.*use --kernels=loss"):
        apply_kernels(model, "gelu,loss")
    lines = "\n".join(apply_kernels(model, "all"))
    assert "attention: 2 x" in lines and "kernels: loss" in lines
    for name in ("embedding", "gelu", "layernorm"):
        assert f"all leaves out {name}, because" in lines
