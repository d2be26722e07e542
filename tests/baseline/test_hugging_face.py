"""Hugging Face directories: what `transformers` computes with one is computed here too, or the directory is refused."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoGPT.checkpoint.state import load_weights
from nanoGPT.checkpoint.weights import read_weights
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT, GPTConfig
from tests.helpers.programs import assert_refused, run_program

transformers = pytest.importorskip("transformers")
SHAPE = {"vocab_size": 75, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
IDX = torch.arange(32).view(2, 16)


def save_model(folder: Path, **changes: Any) -> torch.Tensor:
    """Save a random GPT-2 as `transformers` does; the logits that it computes for IDX."""
    config = transformers.GPT2Config(**SHAPE, bos_token_id=None, eos_token_id=None, **changes)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)  # biases too, and large enough for an activation's form to show
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(IDX).logits


def logits_here(folder: Path) -> torch.Tensor:
    shape, weights = read_weights(str(folder))
    model = GPT(shape)
    load_weights(model, weights)
    with torch.no_grad():
        logits, _ = model.eval()(IDX, IDX)
    assert logits is not None
    return logits


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def change_weights(folder: Path, **changes: torch.Tensor) -> None:
    """Replace tensors, whose names have `__` for a point, in model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value.contiguous() for name, value in changes.items()}
    save_file(tensors, folder / "model.safetensors")


def assert_sentence(folder: Path, *words: str) -> None:
    """Assert that the directory is refused in one sentence that holds words, and soon."""
    begin = time.process_time()
    with pytest.raises(ConfigError) as refused:
        logits_here(folder)
    assert time.process_time() - begin < 5  # a model of 10**8 layers takes hours
    sentence = str(refused.value)
    assert "\n" not in sentence and len(sentence) < 600
    for word in (str(folder), *words):
        assert word in sentence, (word, sentence)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
def test_activations_that_are_known(activation, tmp_path):
    """Both names of the tanh form and the exact GELU give the logits of transformers."""
    theirs = save_model(tmp_path, activation_function=activation)
    torch.testing.assert_close(logits_here(tmp_path), theirs, atol=1e-4, rtol=1e-5)


def test_names_and_masks_as_openai_published_them(tmp_path):
    """Tensors without `transformer.` before their names, and the causal masks among them, are the same model."""
    theirs = save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {f"h.{i}.attn.bias": torch.ones(16, 16).tril().view(1, 1, 16, 16).byte() for i in range(2)}
    save_file(tensors | masks, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_here(tmp_path), theirs, atol=1e-4, rtol=1e-5)


CHANGES = {
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-2,
    "tie_word_embeddings": False,
    "scale_attn_by_inverse_layer_idx": True,
    "scale_attn_weights": False,
    "n_inner": 64,
    "add_cross_attention": True,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_changes_the_model_is_refused(name, tmp_path):
    """Each field of config.json that makes another model of it is refused with its value, never ignored."""
    theirs = save_model(tmp_path, **{name: CHANGES[name]})
    if name not in ("n_inner", "add_cross_attention", "tie_word_embeddings"):  # these have other weights too
        change_config(tmp_path, **{name: transformers.GPT2Config().to_dict()[name]})
        assert (logits_here(tmp_path) - theirs).abs().max() > 0.01  # what ignoring the field would have given
        change_config(tmp_path, **{name: CHANGES[name]})
    assert_sentence(tmp_path, f"config.json has {name}={CHANGES[name]!r}", "give another GPT-2")


def test_fields_that_are_left_out_have_their_defaults(tmp_path):
    """What config.json does not say is what transformers takes for it."""
    theirs = save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **{name: config[name] for name in SHAPE}}))
    torch.testing.assert_close(logits_here(tmp_path), theirs, atol=1e-4, rtol=1e-5)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert_sentence(tmp_path, "its n_layer is 12, and it has the weights of 2 layers")


def test_the_other_name_of_a_field_wins(tmp_path):
    """`num_attention_heads` beside `n_head` is what transformers takes, which no shape of a weight shows."""
    save_model(tmp_path)
    change_config(tmp_path, num_attention_heads=4)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits_here(tmp_path), theirs(IDX).logits, atol=1e-4, rtol=1e-5)


def test_a_head_of_its_own_is_refused(tmp_path):
    """A stored lm_head that equals the embedding is the tied one; one that differs is refused."""
    theirs = save_model(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["transformer.wte.weight"]
    change_weights(tmp_path, lm_head__weight=embedding.clone())
    torch.testing.assert_close(logits_here(tmp_path), theirs, atol=1e-4, rtol=1e-5)
    for head in (embedding + 1e-3, embedding[:50].clone(), embedding.half()):
        change_weights(tmp_path, lm_head__weight=head)
        assert_sentence(tmp_path, "lm_head.weight that differs from transformer.wte.weight")


def test_a_nanogpt_head_of_its_own_is_refused(tmp_path):
    """A ckpt.pt whose lm_head equals its embedding is the tied one; one whose head differs is refused."""
    shape = GPTConfig(1, 2, 16, 16, False, 75)
    state = GPT(shape).state_dict()
    args = {name: value for name, value in vars(shape).items() if name != "gelu"}
    torch.save(
        {"model": {**state, "lm_head.weight": state["lm_head.weight"].clone()}, "model_args": args},
        tmp_path / "ckpt.pt",
    )
    assert read_weights(str(tmp_path))[0] == shape
    torch.save(
        {"model": {**state, "lm_head.weight": state["lm_head.weight"] + 1}, "model_args": args}, tmp_path / "ckpt.pt"
    )
    assert_sentence(tmp_path, "ckpt.pt has an lm_head.weight that differs from transformer.wte.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_weights_that_are_no_floats(dtype, tmp_path):
    """Quantized or other weights, which a copy would take for numbers as they are, are refused with their type."""
    save_model(tmp_path)
    change_weights(tmp_path, transformer__h__0__ln_1__weight=torch.ones(32).to(dtype))
    assert_sentence(tmp_path, "transformer.h.0.ln_1.weight", str(dtype), "give weights of torch.float32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_float(dtype, tmp_path):
    """Half and double precision are taken, and become fp32."""
    theirs = save_model(tmp_path)
    change_weights(tmp_path, **{k: v.to(dtype) for k, v in load_file(tmp_path / "model.safetensors").items()})
    assert (logits_here(tmp_path) - theirs).abs().max() < 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value, tmp_path):
    """NaN or infinity in a weight is named before a step is done with it; in ckpt.pt too."""
    save_model(tmp_path)
    bad = torch.ones(32)
    bad[3] = value
    change_weights(tmp_path, transformer__h__1__ln_2__bias=bad)
    assert_sentence(tmp_path, "values in transformer.h.1.ln_2.bias that are not finite")
    words = ["--dataset=shakespeare_char", "--device=cpu", "--max_iters=1", "--block_size=8", f"--init_from={tmp_path}"]
    refused = run_program("nanoGPT/train.py", f"--out_dir={tmp_path / 'run'}", *words)
    assert_refused(refused, "values in transformer.h.1.ln_2.bias that are not finite")


ABSURD = [
    *({name: 10**8} for name in SHAPE),
    *({name: value} for name in SHAPE for value in (10**30, -1, 0, 1.5, True, "2", None, [], {})),
    {"n_layer": 3},
    {"n_layer": 1},
    {"n_inner": []},
    {"activation_function": None},
    {"activation_function": []},
    {"layer_norm_epsilon": "1e-5"},
    {"tie_word_embeddings": None},
    {"model_type": None},
    {"num_hidden_layers": 10**8},
]


@pytest.mark.parametrize("changes", ABSURD, ids=str)
def test_a_shape_that_cannot_be_is_refused_at_once(changes, tmp_path):
    """Absurd sizes and wrong types in config.json are a sentence at once, before any model is made."""
    save_model(tmp_path)
    change_config(tmp_path, **changes)
    assert_sentence(tmp_path)


@pytest.mark.parametrize("text", ["", "null", "[]", '"gpt2"', "[" * 200_000, '{"model_type": "gpt2"', "\udcff"])
def test_a_config_that_is_no_config(text, tmp_path):
    """A config.json that is no JSON object is one sentence."""
    save_model(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert_sentence(tmp_path, "is no Hugging Face GPT-2")


@pytest.mark.parametrize(
    "changes",
    [{"n_layer": 10**8}, {"n_head": None}, {"n_head": -2}, {"bias": "no"}, {"gelu": "relu"}, {"activation": "relu"}],
    ids=str,
)
def test_a_nanogpt_shape_that_cannot_be_is_refused_at_once(changes, tmp_path):
    """The same for a ckpt.pt's model_args, which must have every size and no field that is unknown here."""
    shape = GPTConfig(1, 2, 16, 16, False, 75)
    args = {k: v for k, v in {**vars(shape), **changes}.items() if v is not None}
    torch.save({"model": GPT(shape).state_dict(), "model_args": args}, tmp_path / "ckpt.pt")
    assert_sentence(tmp_path, "does not describe a GPT-2", next(iter(changes)))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "more.safetensors"]
)
def test_a_fifo_is_no_file(name, tmp_path):
    """A FIFO or a directory in the place of a file is a sentence, and nothing waits for who writes into it."""
    save_model(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert_sentence(tmp_path, "regular file")
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert_sentence(tmp_path, name if name.endswith("safetensors") else "")


def save_in_parts(folder: Path) -> list[Path]:
    """Save a model in several files with an index; the files."""
    config = transformers.GPT2Config(**SHAPE, bos_token_id=None, eos_token_id=None)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size=50_000)
    parts = sorted(folder.glob("model-*.safetensors"))
    assert len(parts) > 2 and logits_here(folder).isfinite().all()
    return parts


def test_a_part_that_is_missing_is_named(tmp_path):
    """A file that the index names and that is not there is named."""
    parts = save_in_parts(tmp_path)
    parts[1].unlink()
    assert_sentence(tmp_path, f"names {parts[1].name}, which is not there: copy all {len(parts)} files")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[" * 200_000])
def test_an_index_that_is_no_index(index, tmp_path):
    """A broken index is one sentence."""
    save_in_parts(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert_sentence(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """Where two files, or two names, give one tensor, nobody knows which is meant."""
    parts = save_in_parts(tmp_path)
    (tmp_path / "old.safetensors").write_bytes(parts[0].read_bytes())
    assert_sentence(tmp_path, "twice, in ", "old.safetensors", "remove the file")
    (tmp_path / "old.safetensors").unlink()
    save_file({"wpe.weight": torch.zeros(16, 32)}, tmp_path / "old.safetensors")
    assert_sentence(tmp_path, "has transformer.wpe.weight twice")


def test_a_damaged_file_of_weights(tmp_path):
    """Files that are cut short, or have headers that cannot be, are one sentence each."""
    save_model(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = {"transformer.wte.weight": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    text = json.dumps(header).encode()
    for content in (b"", whole[:1000], whole[:-7], b"\xff" * 100, len(text).to_bytes(8, "little") + text + bytes(3)):
        path.write_bytes(content)
        assert_sentence(tmp_path)
    path.unlink()
    assert_sentence(tmp_path, "has no safetensors")


def test_a_matrix_of_other_dimensions(tmp_path):
    """A weight with three dimensions where a matrix goes is named with its shape."""
    save_model(tmp_path)
    change_weights(tmp_path, transformer__h__0__attn__c_attn__weight=torch.ones(2, 16, 96))
    assert_sentence(tmp_path, "transformer.h.0.attn.c_attn.weight of shape (2, 16, 96)")
