"""Hugging Face directories: the logits equal those of `transformers`, or the directory is refused."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoGPT.checkpoint.ckpt import read_ckpt, write_ckpt
from nanoGPT.checkpoint.hugging_face import read_hf
from nanoGPT.checkpoint.manifest import NewFiles
from nanoGPT.checkpoint.sources import interpret_ckpt
from nanoGPT.checkpoint.starting_point import load_weights
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.errors import ConfigError
from nanoGPT.export import write_hf
from nanoGPT.model import GPT, GPTConfig
from tests.helpers import checkpoints
from tests.helpers.checkpoints import MANIFEST_FIELDS

SHAPE = {"vocab_size": 75, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
IDX = torch.arange(32).view(2, 16)


def compute_logits(folder):
    return checkpoints.compute_logits(folder, IDX)


def import_transformers() -> Any:
    """Return the package, or skip the test. Only the worker that runs such a test pays for its slow import."""
    return pytest.importorskip("transformers")


def save_model(folder: Path, **changes: Any) -> torch.Tensor:
    """Save a random GPT-2 with `transformers`, and return the logits that it computes for IDX."""
    config = import_transformers().GPT2Config(**SHAPE, bos_token_id=None, eos_token_id=None, **changes)
    torch.manual_seed(0)
    model = import_transformers().GPT2LMHeadModel(config).eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)  # biases too; so large that another activation changes the logits
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(IDX).logits


def edit_config(folder: Path, **changes: Any) -> None:
    """Replace fields of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def replace_weights(folder: Path, **changes: torch.Tensor) -> None:
    """Replace tensors in model.safetensors. Their names have `__` instead of a dot."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value.contiguous() for name, value in changes.items()}
    save_file(tensors, folder / "model.safetensors")


def assert_directory_refused(folder: Path, *words: str) -> None:
    """Assert that a directory is refused quickly, with one line that contains `words`."""
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        compute_logits(folder)
    assert time.process_time() - start < 5  # creating a model of 10**8 layers would take hours
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 600
    for word in (str(folder), *words):
        assert word in sentence, (word, sentence)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "gelu"])
def test_known_activations_have_the_logits_of_transformers(activation, tmp_path):
    """Both names of the tanh GELU, and the exact GELU, have the logits of transformers, also after an export."""
    expected = save_model(tmp_path, activation_function=activation)
    torch.testing.assert_close(compute_logits(tmp_path), expected, atol=1e-4, rtol=1e-5)
    (tmp_path / "again").mkdir()
    write_hf(tmp_path / "again", *read_hf(tmp_path)[:2], SHAPE["vocab_size"])
    assert torch.equal(compute_logits(tmp_path / "again"), compute_logits(tmp_path))


def test_openais_names_and_masks_are_accepted(tmp_path):
    """OpenAI's files have names without `transformer.`, and contain the causal masks. They are read as the same
    model."""
    expected = save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {f"h.{i}.attn.bias": torch.ones(16, 16).tril().view(1, 1, 16, 16).byte() for i in range(2)}
    save_file(tensors | masks, tmp_path / "model.safetensors")
    torch.testing.assert_close(compute_logits(tmp_path), expected, atol=1e-4, rtol=1e-5)


UNSUPPORTED_FIELDS = {
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-2,
    "tie_word_embeddings": False,
    "scale_attn_by_inverse_layer_idx": True,
    "scale_attn_weights": False,
    "n_inner": 64,
    "add_cross_attention": True,
}


@pytest.mark.parametrize("name", UNSUPPORTED_FIELDS)
def test_a_field_that_changes_the_model_is_refused(name, tmp_path):
    """Each field of config.json that would change the logits is refused with its value. It is never ignored."""
    expected = save_model(tmp_path, **{name: UNSUPPORTED_FIELDS[name]})
    if name not in ("n_inner", "add_cross_attention", "tie_word_embeddings"):  # these also change the weights
        edit_config(tmp_path, **{name: import_transformers().GPT2Config().to_dict()[name]})
        assert (compute_logits(tmp_path) - expected).abs().max() > 0.01  # the error if the field were ignored
        edit_config(tmp_path, **{name: UNSUPPORTED_FIELDS[name]})
    assert_directory_refused(tmp_path, f"config.json has {name}={UNSUPPORTED_FIELDS[name]!r}", "use another gpt2")


def test_an_untied_head_is_refused(tmp_path):
    """A stored lm_head that equals the embedding is accepted as tied. A different one is refused."""
    expected = save_model(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["transformer.wte.weight"]
    replace_weights(tmp_path, lm_head__weight=embedding.clone())
    torch.testing.assert_close(compute_logits(tmp_path), expected, atol=1e-4, rtol=1e-5)
    for head in (embedding + 1e-3, embedding[:50].clone(), embedding.half()):
        replace_weights(tmp_path, lm_head__weight=head)
        assert_directory_refused(tmp_path, "lm_head.weight that differs from transformer.wte.weight")


class UntiedGPT(GPT):
    """A GPT whose head is a parameter of its own."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__(shape)
        self.lm_head.weight = torch.nn.Parameter(torch.ones_like(self.lm_head.weight))


def test_a_head_of_its_own_is_saved_and_loaded(tmp_path):
    """ckpt.pt never replaces a head that is not tied by the embedding. This project's GPT refuses such a file."""
    shape = GPTConfig(1, 2, 16, 16, False, 75)
    model = UntiedGPT(shape)
    run, optimizer = create_runtime("cpu", "float32"), torch.optim.AdamW(model.parameters())
    write_ckpt(NewFiles(tmp_path), run, model, optimizer, 1, {**MANIFEST_FIELDS, "model_args": vars(shape)})
    loaded = UntiedGPT(shape)
    torch.nn.init.zeros_(loaded.lm_head.weight)
    load_weights(loaded, read_ckpt(tmp_path / "ckpt.pt", interpret_ckpt)[0].model)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert_directory_refused(tmp_path, "differ in 1 parameters, such as lm_head.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_weights_that_are_not_floating_point_are_refused(dtype, tmp_path):
    """Quantized and other weights that are not plain floating-point numbers are refused with their dtype."""
    save_model(tmp_path)
    replace_weights(tmp_path, transformer__h__0__ln_1__weight=torch.ones(32).to(dtype))
    assert_directory_refused(tmp_path, "transformer.h.0.ln_1.weight", str(dtype), "use weights of torch.float32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_dtypes_become_fp32(dtype, tmp_path):
    """Weights in half or double precision are converted to fp32."""
    expected = save_model(tmp_path)
    replace_weights(tmp_path, **{k: v.to(dtype) for k, v in load_file(tmp_path / "model.safetensors").items()})
    assert (compute_logits(tmp_path) - expected).abs().max() < 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, tmp_path):
    """A tensor with NaN or infinity is named when it is read."""
    save_model(tmp_path)
    tensor = torch.ones(32)
    tensor[3] = value
    replace_weights(tmp_path, transformer__h__1__ln_2__bias=tensor)
    assert_directory_refused(tmp_path, "values in transformer.h.1.ln_2.bias that are not finite")


INVALID_FIELDS = [
    *({name: 10**8} for name in SHAPE),
    *({"n_layer": value} for value in (10**30, -1, 0, 1.5, True, "2", None, [], {})),
    {"n_layer": 3},
    {"n_inner": []},
    {"activation_function": []},
    {"layer_norm_epsilon": "1e-5"},
    {"model_type": None},
]


@pytest.mark.parametrize("changes", INVALID_FIELDS, ids=str)
def test_an_invalid_shape_is_refused_at_once(changes, tmp_path):
    """Absurd sizes and wrong types in config.json print one error at once, before a model is created."""
    save_model(tmp_path)
    edit_config(tmp_path, **changes)
    assert_directory_refused(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"n_layer": 10**8}, {"n_head": None}, {"bias": "no"}, {"gelu": "relu"}, {"activation": "relu"}],
    ids=str,
)
def test_invalid_model_args_of_a_ckpt_are_refused_at_once(changes, tmp_path):
    """The model_args of a ckpt.pt must have every size with a valid value, and no unknown field."""
    shape = GPTConfig(1, 2, 16, 16, False, 75)
    args = {k: v for k, v in {**vars(shape), **changes}.items() if v is not None}
    torch.save({"model": GPT(shape).state_dict(), "model_args": args}, tmp_path / "ckpt.pt")
    assert_directory_refused(tmp_path, "describes no model", next(iter(changes)))


def save_in_multiple_files(folder: Path) -> list[Path]:
    """Save a model in multiple files with an index, and return the paths of the files."""
    config = import_transformers().GPT2Config(**SHAPE, bos_token_id=None, eos_token_id=None)
    import_transformers().GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size=50_000)
    parts = sorted(folder.glob("model-*.safetensors"))
    assert len(parts) > 2 and compute_logits(folder).isfinite().all()
    return parts


def test_a_missing_file_is_refused(tmp_path):
    """If one of multiple files is missing, the error names a parameter that it contained."""
    save_in_multiple_files(tmp_path)[1].unlink()
    assert_directory_refused(tmp_path, "its shape is missing in the checkpoint")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """If two files or two names contain the same tensor, the directory is refused, because either could be meant."""
    parts = save_in_multiple_files(tmp_path)
    (tmp_path / "old.safetensors").write_bytes(parts[0].read_bytes())
    assert_directory_refused(tmp_path, "twice: remove the file")
    (tmp_path / "old.safetensors").unlink()
    save_file({"wpe.weight": torch.zeros(16, 32)}, tmp_path / "old.safetensors")
    assert_directory_refused(tmp_path, "has transformer.wpe.weight twice")


def test_a_weight_with_a_wrong_number_of_dimensions_is_refused(tmp_path):
    """A tensor with three dimensions instead of two is refused with its name and shape."""
    save_model(tmp_path)
    replace_weights(tmp_path, transformer__h__0__attn__c_attn__weight=torch.ones(2, 16, 96))
    assert_directory_refused(tmp_path, "transformer.h.0.attn.c_attn.weight: its shape is (2, 16, 96)")
