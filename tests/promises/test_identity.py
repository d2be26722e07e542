"""Weights, tokenizer, data, steps and flags are compared wherever they meet; what contradicts is refused."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from nanoGPT import export, sample
from nanoGPT.checkpoint import hugging_face
from nanoGPT.checkpoint.hugging_face import read_hf, read_hf_tokenizer
from nanoGPT.checkpoint.manifest import NO_LOSS, Checkpoint, choose_step, read_manifest, serialize_manifest
from nanoGPT.checkpoint.sources import read_weights
from nanoGPT.checkpoint.starting_point import find_best, read_starting_point
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.errors import ConfigError
from nanoGPT.export import write_hf, write_hf_tokenizer
from nanoGPT.job.parse import find_run_to_resume, parse
from nanoGPT.job.start import check_run
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.observers import add_flags
from nanoGPT.prepare import download
from nanoGPT.prepare.meta import make_gpt2_identity
from nanoGPT.prepare.tokenizer import Gpt2Tokenizer, make_char_identity, make_json_identity
from nanoGPT.train import learning_rate
from nanoGPT.train_config import TrainConfig
from operate.schedule import describe_changes, describe_schedule
from phase3_fsdp.evaluate import EvaluateConfig
from phase3_fsdp.fsdp import FsdpConfig
from tests.helpers.checkpoints import write_small_dataset
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import ROOT, read_metric, tiny, train

TRAINER = ROOT / "nanoGPT/train.py"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories with the same weights: a run whose best checkpoint is not its newest, and two exports of it; and a
    dataset of other characters."""
    root = tmp_path_factory.mktemp("sources")
    fields = {
        "max_iters": 6,
        "eval_iters": 3,
        "eval_interval": 2,
        "n_layer": 1,
        "learning_rate": 0.05,
        "gradient_accumulation_steps": 2,
    }
    train("nanoGPT", 1, tiny("nanoGPT", root / "run", **fields))
    for format in ("hf", "ckpt"):
        export.main(str(root / "run"), str(root / format), format)
    shutil.copytree(root / "run/checkpoints/step-00000006", root / "one checkpoint")
    shutil.copytree(root / "hf", root / "hf without tokenizer")
    for file in (root / "hf without tokenizer").glob("tokenizer*"):
        file.unlink()
    (root / "zoo").mkdir()
    write_small_dataset(root / "zoo")
    return root


KNOWN = ("run", "one checkpoint", "hf", "ckpt")


def start_from(config: TrainConfig) -> GPTConfig:
    """Read what a run starts from, and return the shape of its model."""
    run = create_runtime("cpu", "float32")
    return read_starting_point(config, TokenData(config), None, run)[0]


@pytest.mark.parametrize("name", KNOWN)
def test_weights_with_another_tokenizer_are_refused(name, sources):
    """A new run from weights whose source names its tokenizer needs a dataset with the same tokenizer."""
    config = tiny("nanoGPT", sources, init_from=str(sources / name))
    assert start_from(config).vocab_size == 75
    for dataset in (str(sources / "zoo"), "shakespeare"):
        with pytest.raises(ConfigError, match=r"has a different tokenizer .* than .* \(75 characters\)"):
            start_from(dataclasses.replace(config, dataset=dataset))


def test_an_assumed_tokenizer_is_printed(sources, capsys, monkeypatch):
    """If a source does not name its tokenizer, one line says which one is assumed: GPT-2's for GPT-2's vocabulary, else
    that of the dataset. OpenAI's models are known by their names."""
    config = tiny("nanoGPT", sources, init_from=str(sources / "hf without tokenizer"))
    start_from(config)
    assert "does not name its tokenizer: assuming that of --dataset=shakespeare_char" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="75 token ids but does not contain their characters"):
        sample.read_model(config.init_from)
    shape = GPTConfig(1, 1, 4, 16, True, 50258)
    (sources / "gpt2").mkdir(exist_ok=True)
    write_hf(sources / "gpt2", shape, dict(GPT(shape).named_parameters()), 50258)
    with pytest.raises(ConfigError, match="shakespeare_char has a different tokenizer"):
        start_from(dataclasses.replace(config, init_from=str(sources / "gpt2")))
    assert "does not name its tokenizer: assuming GPT-2's" in capsys.readouterr().err
    monkeypatch.setattr(hugging_face, "download_gpt2", lambda name: sources / "gpt2")
    with pytest.raises(ConfigError, match="shakespeare_char has a different tokenizer .* than gpt2 "):
        start_from(dataclasses.replace(config, init_from="gpt2"))
    assert start_from(dataclasses.replace(config, init_from="gpt2", dataset="shakespeare")).vocab_size == 50258
    assert capsys.readouterr().err == ""


def test_tokenizers_of_hugging_face_directories_are_recognized(tmp_path):
    """The files that transformers reads identify GPT-2's tokenizer, also with added tokens, and a tokenizer of
    characters. Another tokenizer.json is its own identity, and another vocab.json is refused."""
    for identity in (make_gpt2_identity(), make_char_identity('\n "aé书')):
        folder = tmp_path / identity["name"]
        folder.mkdir()
        write_hf_tokenizer(folder, identity)
        assert read_hf_tokenizer(folder) == identity
    vocab = json.loads((tmp_path / "gpt2/vocab.json").read_text())
    merges = (tmp_path / "gpt2/merges.txt").read_text().splitlines()[1:]
    for name, tokens, expected in (
        ("added", {**vocab, "<|user|>": 50257}, make_gpt2_identity()),
        ("swapped", {**vocab, "!": vocab["a"], "a": vocab["!"]}, None),
    ):
        (tmp_path / name).mkdir()
        content = {"model": {"type": "BPE", "vocab": tokens, "merges": merges}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
        assert read_hf_tokenizer(tmp_path / name) == (expected or make_json_identity(json.dumps(content)))
    (tmp_path / "swapped" / "tokenizer.json").unlink()
    (tmp_path / "swapped" / "vocab.json").write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match="has a vocab.json that is not GPT-2's"):
        read_hf_tokenizer(tmp_path / "swapped")
    assert read_hf_tokenizer(tmp_path) is None


def test_sampling_uses_the_tokenizer_of_the_source(sources, capsys):
    """A run, one of its checkpoints and its exports print the same sample."""
    texts = set()
    for name in KNOWN:
        sample.main(sample.SampleConfig(str(sources / name), "A", max_new_tokens=20, device="cpu"))
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_a_checkpoint_is_chosen_in_one_way(sources, tmp_path):
    """--resume_step=2 and --resume_step=best choose the same checkpoint in evaluations, samples and exports.

    A step that does not exist, and a step of weights that are no run, are refused.
    """
    run = sources / "run"
    val_losses = read_metric(run, "val_loss")
    best = min(val_losses, key=val_losses.__getitem__)
    assert 0 < best < 6, val_losses
    expected = read_weights(str(run / f"checkpoints/step-{best:08d}")).tensors["transformer.wte.weight"]
    newest = read_weights(str(run)).tensors["transformer.wte.weight"]
    assert not torch.equal(expected, newest)
    for step in (best, "best"):
        outcome = run_program("phase3_fsdp/evaluate.py", "--device=cpu", f"--out_dir={run}", f"--resume_step={step}")
        assert outcome.code == 0 and f"step-{best:08d}: validation loss" in outcome.output, outcome
        export.main(str(run), str(tmp_path / str(step)), resume_step=step)
        assert torch.equal(read_hf(tmp_path / str(step))[1]["transformer.wte.weight"], expected)
        model, _, _ = sample.load_model(str(run), step=step)
        assert torch.equal(model.transformer["wte"].weight, expected)
    for source, words in (
        (run, "there is no checkpoint with --resume_step=5"),
        (sources / "hf", "needs the directory of a run"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_weights(str(source), step=5)
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / f"checkpoints/step-{best:08d}")  # a later one is not the best, although it has the same loss
    with pytest.raises(ConfigError, match=f"--resume_step=best, which is step {best}, under"):
        read_weights(str(copy), step="best")
    manifest = {"config": vars(TrainConfig()), "best_val_loss": NO_LOSS, "best_step": best}
    config = TrainConfig(eval_iters=1)  # other evaluations
    assert find_best(config, Checkpoint(copy, manifest), create_runtime("cpu", "float32")) == (float("inf"), best)


def test_a_missing_vocabulary_of_gpt2_is_downloaded(tmp_path, monkeypatch):
    """On a machine where `make data` has not run, the vocabulary is downloaded, or the error is about that."""
    monkeypatch.setattr(download, "DOWNLOADS", tmp_path)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="network"):
        write_hf_tokenizer(tmp_path, make_gpt2_identity())
    with pytest.raises(ConfigError, match="network"):
        Gpt2Tokenizer()


def test_another_decay_of_the_learning_rate_is_printed(sources, tmp_path):
    """A resume with more steps says that the learning rate changes at once. The flag that it names keeps the decay.

    A resume lists the changed values.
    """
    rates = {}
    for flags in ("--max_iters=12", "--max_iters=12 --lr_decay_iters=6"):
        shutil.copytree(sources / "run", tmp_path / flags)
        words = ["--init_from=resume", f"--out_dir={tmp_path / flags}", *flags.split()]
        outcome = run_program("nanoGPT/train.py", *words)
        rates[flags] = read_metric(tmp_path / flags, "lr")
        assert ("--lr_decay_iters=6 keeps the decay" in outcome.output) == (flags == "--max_iters=12"), outcome
        assert "changed since the checkpoint: max_iters 6 to 12" in outcome.output
    moved, kept = rates.values()
    assert moved[6] > moved[5] == kept[5] > kept[6] == TrainConfig.min_lr


@pytest.mark.parametrize(("warmup", "end", "is_printed"), [(40, None, True), (20, 20, True), (39, None, False)])
def test_a_warm_up_as_long_as_the_run_is_printed(warmup, end, is_printed):
    """The learning rate then never reaches its value, or falls at once. With the printed advice it does neither."""
    config = TrainConfig(max_iters=40, warmup_iters=warmup, lr_decay_iters=end)
    sentences = " ".join(describe_schedule(config, vars(config)))
    assert (f"such as --warmup_iters={(end or 40) // 10}" in sentences) == is_printed
    config.warmup_iters = (end or 40) // 10
    assert [*describe_schedule(config, vars(config)), *describe_changes(config, vars(config))] == []
    assert max(learning_rate(step, config) for step in range(40)) == config.learning_rate


def test_the_best_loss_is_that_of_a_checkpoint(tmp_path):
    """A run that never reaches the loss of its start, as in fine-tuning, still keeps its own best checkpoint."""
    fields = {"max_iters": 12, "eval_interval": 2, "eval_iters": 2, "warmup_iters": 0, "n_layer": 1}
    fields |= {"learning_rate": 2.0, "min_lr": 0.01, "gradient_accumulation_steps": 2}
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "run", **fields))
    losses = read_metric(tmp_path / "run", "val_loss")
    start, best = losses.pop(0), min(losses, key=losses.__getitem__)
    assert start < losses[best] < losses[min(losses)]  # the first one is not the best one
    newest = read_manifest(tmp_path / "run/checkpoints/step-00000012")
    assert newest["best_val_loss"] == pytest.approx(losses[best])
    assert choose_step(tmp_path / "run", "best").name == f"step-{best:08d}"


def test_the_directory_of_the_weights_is_not_the_output(sources, tmp_path):
    """A model of Hugging Face that is both is refused, and nothing is written into it. A name is no directory."""
    check_run(tiny("nanoGPT", Path("scratch")), 1, 1)
    shutil.copytree(sources / "hf", tmp_path / "hf")
    before = sorted(path.name for path in (tmp_path / "hf").iterdir())
    words = [f"--init_from={tmp_path / 'hf'}", f"--out_dir={tmp_path / 'hf'}/", "--device=cpu"]
    assert_refused(run_program("nanoGPT/train.py", *words), "is the directory of --out_dir too")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == before


def test_the_best_loss_begins_anew_with_other_evaluations(sources, tmp_path):
    """Validation losses over other batches cannot be compared: the best one is then found among the new ones."""
    shutil.copytree(sources / "run", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000006"
    lucky = {**read_manifest(newest), "best_val_loss": 0.1}  # as on a few easy batches
    (newest / "manifest.json").write_text(serialize_manifest(lucky))
    flags = ["--max_iters=10", "--lr_decay_iters=6", "--eval_iters=1", "--batch_size=1"]
    outcome = run_program("nanoGPT/train.py", "--init_from=resume", f"--out_dir={tmp_path / 'run'}", *flags)
    assert "the best validation loss so far no longer counts" in outcome.output, outcome
    new = [loss for step, loss in read_metric(tmp_path / "run", "val_loss").items() if step >= 6]
    assert read_manifest(tmp_path / "run/checkpoints/step-00000010")["best_val_loss"] == pytest.approx(min(new))


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(sources, tmp_path):
    """A damaged checkpoint is skipped only if another one may be used."""
    shutil.copytree(sources / "run", tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-00000006"
    content = bytearray((checkpoint / "ckpt.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "ckpt.pt").write_bytes(content)
    read_weights(str(tmp_path / "run"))
    for source, step in ((tmp_path / "run", 6), (checkpoint, None)):
        with pytest.raises(ConfigError, match="step-00000006 is damaged .*: choose another checkpoint"):
            read_weights(str(source), step=step)


@pytest.mark.parametrize("flag", ["--n_layer=2", "--n_head=4", "--n_embd=64", "--bias=True", "--vocab_size=128"])
def test_a_flag_that_contradicts_the_weights_is_refused(flag, sources):
    """A flag for the shape of the model must agree with the weights that a run starts from."""
    name = flag[2:].split("=")[0]
    for source in KNOWN[: 2 if name == "bias" else 4]:  # a model of Hugging Face always has biases
        with pytest.raises(ConfigError, match=rf"{flag}, but .* has {name}=.*: remove this setting"):
            parse(TrainConfig, [f"--init_from={sources / source}", "--device=cpu", flag], TRAINER)
    agreeing = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--bias=False", "--vocab_size=75", "--block_size=8"]
    config = parse(TrainConfig, [f"--init_from={sources / 'run'}", "--device=cpu", *agreeing], TRAINER)
    assert start_from(config).block_size == 8


def test_export_keeps_added_rows(tmp_path, capsys):
    """An export drops only the rows that pad GPT-2's vocabulary. It keeps the rows of added tokens, and says so."""
    for rows, exported in ((50304, 50257), (50258, 50258)):
        shape = GPTConfig(1, 1, 4, 16, True, rows)
        (tmp_path / str(rows)).mkdir()
        write_hf(tmp_path / str(rows), shape, dict(GPT(shape).named_parameters()), rows)
        fields = {"init_from": str(tmp_path / str(rows)), "dataset": "shakespeare", "max_iters": 1}
        train("nanoGPT", 1, tiny("nanoGPT", tmp_path / f"run{rows}", gradient_accumulation_steps=1, **fields))
        export.main(str(tmp_path / f"run{rows}"), str(tmp_path / f"to{rows}"))
        config = json.loads((tmp_path / f"to{rows}" / "config.json").read_text())
        assert (config["vocab_size"], config["eos_token_id"]) == (exported, 50256)
        assert ("all 50,258 rows" in capsys.readouterr().out) == (rows == 50258)


def test_export_refuses_another_architecture(tmp_path):
    """Parameters that GPT-2 does not have are never written as a GPT-2."""
    shape = GPTConfig(1, 1, 4, 8, False, 16)
    weights = dict(GPT(shape).named_parameters())
    norm = torch.ones(4)
    for change in ({"transformer.h.0.attn.q_norm.weight": norm}, {"lm_head.weight": torch.ones(16, 4)}):
        with pytest.raises(ConfigError, match="this model is not the gpt2 of transformers: .* is only in it"):
            write_hf(tmp_path, shape, {**weights, **change}, 16)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_resume_finds_the_newest_run_in_a_directory_of_any_name(sources, tmp_path, monkeypatch):
    """In a copy of a phase, whose directory has another name, a resume takes the newest run of this phase."""
    monkeypatch.chdir(tmp_path)
    for age, (out, phase) in enumerate([("out", "fsdp"), ("out/nanoGPT-1", "baseline"), ("out/phase3_fsdp-1", "fsdp")]):
        checkpoint = Path(out) / "checkpoints/step-00000006"
        shutil.copytree(sources / "run/checkpoints/step-00000006", checkpoint)
        manifest = {**read_manifest(checkpoint), "phase": phase}
        (checkpoint / "manifest.json").write_text(serialize_manifest(manifest))
        os.utime(checkpoint, (1e9 + age, 1e9 + age))
    for config_class in (FsdpConfig, add_flags(FsdpConfig, "operate,measure")):  # the flags belong to phase 3 too
        assert find_run_to_resume(config_class, "out") == "out/phase3_fsdp-1"
    assert (
        find_run_to_resume(type("Config", (EvaluateConfig,), {"__module__": "__main__"}), "out") == "out/phase3_fsdp-1"
    )
    assert find_run_to_resume(TrainConfig, "out") == "out/nanoGPT-1"
    assert find_run_to_resume(FsdpConfig, "mine") == "mine"


def test_the_learning_rate_never_rises_after_the_warm_up(tmp_path):
    """If only learning_rate is given, min_lr changes in proportion, also from a config file. A
    min_lr above learning_rate is refused."""
    (tmp_path / "fine.py").write_text("learning_rate = 3e-5\n")
    for words in (["--learning_rate=3e-5"], [str(tmp_path / "fine.py")]):
        config = parse(TrainConfig, ["--device=cpu", *words], TRAINER)
        rates = [learning_rate(step, config) for step in range(config.max_iters + 1)]
        assert max(rates) == pytest.approx(3e-5) and rates[-1] == pytest.approx(3e-5 / 20)
    assert parse(TrainConfig, ["--device=cpu"], TRAINER).min_lr == 2e-4
    assert parse(TrainConfig, ["--device=cpu", "--learning_rate=1e-3", "--min_lr=5e-4"], TRAINER).min_lr == 5e-4
    words = ("--min_lr=0.002 is above --learning_rate=0.001", "--decay_lr=False")
    flags = ["--device=cpu", f"--out_dir={tmp_path / 'run'}", "--learning_rate=1e-3", "--min_lr=2e-3"]
    assert_refused(run_program("nanoGPT/train.py", *flags), *words)
    assert not (tmp_path / "run").exists()


NANOGPT_CONFIG = """\
import time

out_dir = 'out-shakespeare'
eval_interval = 5
eval_iters = 40
wandb_log = False # feel free to turn on
wandb_project = 'shakespeare'
wandb_run_name = 'ft-' + str(time.time())
max_iters = 1e1
warmup_iters = max_iters / 10


def helper():
    return 1
"""


def test_config_files_of_nanogpt_work(tmp_path):
    """A config file may import modules and define functions, and a whole number may be a float. `wandb_log = False` is
    accepted, because it asks for what is done anyway."""
    file = tmp_path / "c.py"
    file.write_text(NANOGPT_CONFIG)
    config = parse(TrainConfig, [str(file), "--device=cpu"], TRAINER)
    assert (config.max_iters, config.warmup_iters, config.out_dir) == (10, 1, "out-shakespeare")
    for text, words in (
        ("wandb_log = True", "wandb_log.*--track=wandb"),
        ("gpus = 2", "--gpus.*; names of helpers begin with _"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            parse(TrainConfig, [str(file), "--device=cpu"], TRAINER)
