"""Import and export of weights: Hugging Face and nanoGPT's ckpt.pt; and sampling from them."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from nanoGPT import export, sample
from nanoGPT.checkpoint import manifest as manifest_module
from nanoGPT.checkpoint import sources as sources_module
from nanoGPT.checkpoint.ckpt import read_ckpt
from nanoGPT.checkpoint.manifest import find_checkpoint, step_directories
from nanoGPT.checkpoint.sources import interpret_ckpt, read_full_state, read_weights
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.prepare.tokenizer import load_tokenizer
from nanoGPT.sample import SampleConfig, choose_run
from nanoGPT.train_config import TrainConfig
from operate import launch
from tests.helpers.checkpoints import compute_logits, make_directory, write_bytes, write_small_dataset
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import gap, tiny, train, train_all
from workshop.ranks import losses, run_on_ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The output directories of two runs by phase: the baseline with 1 rank, and phase 3 with 4 ranks and GPT-2's
    vocabulary."""
    root = tmp_path_factory.mktemp("runs")
    fields = {"gradient_accumulation_steps": 4}
    train("nanoGPT", 1, tiny("nanoGPT", root / "nanoGPT", max_iters=3, bias=True, **fields))
    train("phase3_fsdp", 4, tiny("phase3_fsdp", root / "phase3_fsdp", max_iters=2, dataset="shakespeare", **fields))
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("phase", ["nanoGPT", "phase3_fsdp"])
def test_transformers_opens_an_export(phase, runs, tmp_path):
    """transformers opens an export of the baseline and of phase 3. The logits differ by at most 1e-4, and
    padding rows are dropped."""
    transformers = pytest.importorskip("transformers")
    outcome = run_program("nanoGPT.export", f"--out_dir={runs[phase]}", f"--to={tmp_path}")
    assert outcome.code == 0, outcome
    vocab_size = 75 if phase == "nanoGPT" else 50257
    idx = torch.randint(75, (2, 16))
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).eval()
    assert hf_model.config.vocab_size == vocab_size and hf_model.lm_head.weight is hf_model.transformer.wte.weight
    with torch.no_grad():
        torch.testing.assert_close(
            hf_model(idx).logits, compute_logits(runs[phase], idx)[..., :vocab_size], atol=1e-4, rtol=0
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "Hello, world:\n  it's I."
    ids = tokenizer(text)["input_ids"]
    assert ids == load_tokenizer(find_checkpoint(runs[phase]).manifest["data"]["tokenizer"]).encode(text)
    assert tokenizer.decode(ids) == text
    assert hf_model.config.eos_token_id == (None if phase == "nanoGPT" else 50256)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_training_starts_from_a_hugging_face_model(runs, tmp_path):
    """--init_from=DIR loads exported weights, and each rank of FSDP loads its shards. The first loss is that of the
    trained model."""
    export.main(str(runs["nanoGPT"]), str(tmp_path / "hf"))
    fields = {"max_iters": 1, "block_size": 8, "gradient_accumulation_steps": 2}
    sources = {"run": tmp_path / "hf", "other": runs["nanoGPT"]}
    configs = [tiny("nanoGPT", tmp_path / name, init_from=str(path), **fields) for name, path in sources.items()]
    from_hf, from_run = train_all(1, [("nanoGPT", dataclasses.replace(config, n_layer=9)) for config in configs])
    assert from_hf == from_run
    sharded = tiny("phase3_fsdp", tmp_path / "sharded", init_from=str(tmp_path / "hf"), **fields)
    assert gap(from_hf, train("phase3_fsdp", 2, sharded)) <= 1e-6
    manifest = json.loads((step_directories(tmp_path / "run")[0] / "manifest.json").read_text())
    assert manifest["model_args"]["n_layer"] == manifest["config"]["n_layer"] == 2
    assert manifest["model_args"]["block_size"] == 8


def test_a_finetuned_run_resumes(runs, tmp_path):
    """A run that started from existing weights resumes with their shape, without flags for it."""
    fields = {"init_from": str(runs["nanoGPT"]), "n_layer": 9, "block_size": 8, "lr_decay_iters": 4}
    steps = {"uninterrupted": 4, "resumed": 2}
    configs = [tiny("nanoGPT", tmp_path / name, max_iters=last, **fields) for name, last in steps.items()]
    expected, _ = train_all(1, [("nanoGPT", config) for config in configs])
    words = [f"--out_dir={tmp_path / 'resumed'}", "--init_from=resume", "--max_iters=4"]
    assert run_program("nanoGPT/train.py", *words).code == 0
    assert losses(tmp_path / "resumed") == expected


def test_a_context_longer_than_that_of_the_weights_is_refused(runs, tmp_path):
    """A --block_size above the number of positions in the given weights is refused. The error names a value that
    works."""
    words = [f"--init_from={runs['nanoGPT']}", f"--out_dir={tmp_path}", "--block_size=32"]
    assert_refused(run_program("nanoGPT/train.py", *words), "the 16 positions", "--block_size=16")


def load_ckpt(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def load_as_nanogpt(content: dict) -> tuple[GPT, torch.optim.AdamW]:
    """Load a ckpt.pt as nanoGPT does: with strict names, and AdamW over decaying parameters, then the others."""
    model = GPT(GPTConfig.from_dict(content["model_args"]))
    model.load_state_dict(content["model"])
    params = list(model.parameters())
    groups = [[p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": g, "weight_decay": 0.5} for g in groups], lr=1e-3)
    optimizer.load_state_dict(content["optimizer"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return model, optimizer


@pytest.mark.parametrize("phase", ["nanoGPT", "phase3_fsdp"])
def test_an_exported_ckpt_is_bitwise_identical(phase, runs, tmp_path):
    """A checkpoint that is exported as ckpt.pt has bitwise identical weights and optimizer state.

    It has the keys of nanoGPT and the tokenizer, both names of the tied embedding, and a state that nanoGPT's AdamW
    loads.
    """
    export.main(str(runs[phase]), str(tmp_path), "ckpt")
    before = read_full_state(step_directories(runs[phase])[0])
    after, fields = read_ckpt(tmp_path / "ckpt.pt", interpret_ckpt)
    assert before.model.keys() == after.model.keys() and before.optimizer.keys() == after.optimizer.keys()
    for name, value in before.model.items():
        assert torch.equal(value, after.model[name])
        assert before.optimizer[name].keys() == after.optimizer[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(v, after.optimizer[name][k]) for k, v in before.optimizer[name].items())
    assert fields["iter_num"] == (3 if phase == "nanoGPT" else 2)
    content = load_ckpt(tmp_path / "ckpt.pt")
    assert set(content) == {*("model", "optimizer", "model_args", "iter_num", "best_val_loss", "config", "tokenizer")}
    assert set(content["model_args"]) == {
        *("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    }
    assert torch.equal(content["model"]["lm_head.weight"], content["model"]["transformer.wte.weight"])
    model, optimizer = load_as_nanogpt(content)
    for name, param in model.named_parameters():
        assert torch.equal(optimizer.state[param]["exp_avg"], before.optimizer[name]["exp_avg"]), name


def test_sampling_uses_the_run_that_saved_last(tmp_path, monkeypatch, capsys):
    """Without --out_dir, sampling uses the run under out/ that saved last, whatever its name or step, and names it. A
    copy of an older run is not newer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for name, step in (("a", 1), ("c", 9), ("b", 2)):
        make_directory(tmp_path / "out" / name).save(step, write_bytes(b"x"), {})
    shutil.copytree("out/c", "out/copy")
    os.utime("out/copy/checkpoints/step-00000009", (2e9, 2e9))
    assert choose_run() == "out/b" and "using the newest run, out/b" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_a_nanogpt_checkpoint_of_a_wrapped_model_opens(prefix, runs, tmp_path):
    """A nanoGPT checkpoint of a model in torch.compile or DDP, with a prefix before every name, can be read."""
    content = load_ckpt(step_directories(runs["nanoGPT"])[0] / "ckpt.pt")
    content["model"] = {f"{prefix}{k}": v for k, v in content["model"].items()}
    torch.save(content, tmp_path / "ckpt.pt")
    _, weights, _ = read_weights(str(tmp_path))
    expected = read_full_state(step_directories(runs["nanoGPT"])[0]).model
    assert all(torch.equal(weights[k], v) for k, v in expected.items()) and weights.keys() == expected.keys()


@pytest.mark.parametrize("phase", ["nanoGPT", "phase3_fsdp"])
def test_sampling_streams_text(phase, runs, tmp_path, capsys):
    """sample prints the prompt and as many tokens as requested, from the baseline and from phase 3. The same seed
    prints the same text."""
    (tmp_path / "prompt.txt").write_text("ROMEO:", encoding="utf-8-sig")  # a byte order mark is left out
    config = SampleConfig(str(runs[phase]), "ROMEO:", max_new_tokens=20, device="cpu", top_k=10)
    changes: list[dict] = [{}, {}, {"start": f"FILE:{tmp_path}/prompt.txt"}, {"seed": 2}]
    texts = []
    for fields in changes:
        sample.main(dataclasses.replace(config, **fields))
        texts.append(capsys.readouterr().out)
    first, repeated, from_file, other_seed = texts
    assert first == repeated == from_file and first.startswith("ROMEO:") and first != other_seed
    if phase == "nanoGPT":
        assert len(first.split("\n----")[0]) == len("ROMEO:") + 20


def test_a_text_without_a_newline_can_be_trained_on_and_sampled_from(tmp_path):
    """A run on a text of a single line trains through the launcher, whose sample starts with the first character of the
    vocabulary."""
    write_small_dataset(tmp_path)
    words = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=8", "--max_iters=1", "--eval_iters=1"]
    out, device = f"--out_dir={tmp_path / 'run'}", "--device=cpu"
    outcome = run_program("operate.launch", "nanoGPT/train.py", out, device, f"--dataset={tmp_path}", *words)
    assert outcome.code == 0 and "\nx" in outcome.output.partition("A sample from")[2], outcome


def test_no_sample_is_loaded_that_does_not_fit(runs, monkeypatch, capsys):
    """After a run, the launcher skips the sample of a model that takes minutes to load, and `make sample` refuses a
    model that needs more memory than the machine has. Both say what to do."""
    monkeypatch.setattr(launch, "MAX_SAMPLED_PARAMS", 10)
    monkeypatch.setattr(sample, "main", lambda config: pytest.fail("the model is loaded"))
    launch.show_sample(TrainConfig(out_dir=str(runs["nanoGPT"])))
    assert "parameters; for a sample: make sample RUN=" in capsys.readouterr().out
    sample.check_model_fits(GPTConfig())
    with pytest.raises(ConfigError, match=r"need .* in fp32, but .*: use a machine with more memory"):
        sample.check_model_fits(GPTConfig(n_layer=10_000, n_embd=100_000))


def test_sampling_and_export_refuse_wrong_flags(runs, tmp_path):
    """A missing run, an unknown character and an existing file each print one error."""
    run = f"--out_dir={runs['nanoGPT']}"
    assert_refused(run_program("nanoGPT.sample", f"--out_dir={tmp_path}"), "neither checkpoints/")
    assert_refused(run_program("nanoGPT.sample", run, "--start=é"), "not in this model's vocabulary")
    existing = tmp_path / "there"
    existing.mkdir()
    (existing / "model.safetensors").write_text("precious")
    for to, file in ((existing, "model.safetensors"), (existing / "model.safetensors", "model.safetensors")):
        outcome = run_program("nanoGPT.export", run, f"--to={to}")
        assert_refused(outcome, f"{file} exists already", "give another directory as --to")
    assert (existing / "model.safetensors").read_text() == "precious"


def read_weights_on_two_ranks(out_dir: str) -> tuple[list[float], list[str]]:
    """Read the weights of a run as --init_from does. Rank 1 fails if it lists the checkpoints itself.

    Returns:
        A parameter, and the files that this rank has hashed.
    """
    run, hashed, sha256_of = create_runtime("cpu", "auto"), [], manifest_module.sha256_of
    if run.rank == 1:
        sources_module.read_manifests = lambda folder: sys.exit(f"rank 1 lists {folder}")
    manifest_module.sha256_of = lambda path: hashed.append(f"{path.parent.name}/{path.name}") or sha256_of(path)
    _, weights, _ = read_weights(out_dir, run)
    return weights["transformer.ln_f.weight"].tolist(), hashed


def test_ranks_select_the_same_weights_to_start_from(runs):
    """Only rank 0 lists the checkpoints of --init_from, so all ranks read the same one, even if that run saves
    meanwhile. The ranks divide the files to hash."""
    (first, hashed), (second, others) = run_on_ranks(read_weights_on_two_ranks, 2, str(runs["phase3_fsdp"]), show=False)
    newest = step_directories(runs["phase3_fsdp"])[0]
    assert first == second and len(first) > 1
    files = [f"{newest.name}/{file.name}" for file in newest.iterdir() if file.name != "manifest.json"]
    assert sorted(hashed + others) == sorted(files) and abs(len(hashed) - len(others)) <= 1
