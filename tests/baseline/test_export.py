"""Weights in and out: Hugging Face, nanoGPT's ckpt.pt, and the text that they write."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoGPT.checkpoint import weights as weights_module
from nanoGPT.checkpoint.hugging_face import read_hf, write_hf
from nanoGPT.checkpoint.state import read_ckpt, read_full_state
from nanoGPT.checkpoint.weights import find_newest, read_weights
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.prepare.directory import write_meta, write_tokens
from nanoGPT.prepare.text import char_identity
from nanoGPT.sample import newest_run
from nanoGPT.tokenizer import load_tokenizer
from tests.helpers.checkpoints import FACTS, directory, write_bytes
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import gap, tiny, train
from workshop.ranks import losses, run_on_ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run of each phase, phase 3's with 4 ranks and GPT-2's vocabulary."""
    root = tmp_path_factory.mktemp("runs")
    train("nanoGPT", 1, tiny("nanoGPT", root / "nanoGPT", max_iters=3, eval_iters=1, bias=True))
    train("phase3_fsdp", 4, tiny("phase3_fsdp", root / "phase3_fsdp", max_iters=2, eval_iters=1, dataset="shakespeare"))
    return {path.name: path for path in root.iterdir()}


def newest(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def our_logits(shape: GPTConfig, weights: dict[str, torch.Tensor], idx: torch.Tensor) -> torch.Tensor:
    from nanoGPT.checkpoint.state import load_weights

    model = GPT(shape)
    load_weights(model, weights)
    return model.eval()(idx, idx)[0]


@pytest.mark.parametrize("phase", ["nanoGPT", "phase3_fsdp"])
def test_transformers_opens_an_export(phase, runs, tmp_path):
    """An export of either phase opens in transformers and gives the same logits to 1e-4, with padding rows dropped; as
    one file, and as the several that a larger model is written in."""
    transformers = pytest.importorskip("transformers")
    ended = run_program("nanoGPT.export", f"--out_dir={runs[phase]}", f"--to={tmp_path}")
    assert ended.code == 0, ended
    shape, weights = read_weights(str(runs[phase]))
    rows = 75 if phase == "nanoGPT" else 50257
    idx = torch.randint(75, (2, 16))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).eval()
    assert theirs.config.vocab_size == rows and theirs.lm_head.weight is theirs.transformer.wte.weight
    (tmp_path / "parts").mkdir()
    write_hf(tmp_path / "parts", shape, weights, rows, file_bytes=50_000)
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) > 1
    parts = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parts", local_files_only=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, our_logits(shape, weights, idx)[..., :rows], atol=1e-4, rtol=0)
        assert torch.equal(theirs(idx).logits, parts(idx).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    said = "Hello, world:\n  it's I."
    ids = tokenizer(said)["input_ids"]
    assert ids == load_tokenizer(find_newest(runs[phase]).manifest["data"]["tokenizer"]).encode(said)
    assert tokenizer.decode(ids) == said
    assert theirs.config.eos_token_id == (None if phase == "nanoGPT" else 50256)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def test_a_hugging_face_model_opens_here(tmp_path):
    """A GPT-2 that transformers saved gives its own logits here, tanh GELU and biases included."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=75, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for param in theirs.parameters():
        torch.nn.init.normal_(param, std=0.1)  # biases too
    theirs.save_pretrained(tmp_path)
    shape, weights = read_hf(tmp_path)
    idx = torch.randint(75, (2, 16))
    assert shape.gelu == "tanh" and shape.bias
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, our_logits(shape, weights, idx), atol=1e-4, rtol=0)


@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_hugging_face_there_and_back(gelu, tmp_path):
    """Weights written for Hugging Face and read again are the same to the bit, and so is which GELU they are for."""
    shape = GPTConfig(2, 2, 32, 16, True, 75, gelu=gelu)
    model = GPT(shape)
    model.init_weights(5)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    write_hf(tmp_path, shape, weights, 75)
    again_shape, again = read_hf(tmp_path)
    assert again_shape == shape and again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_training_starts_from_a_hugging_face_model(runs, tmp_path):
    """--init_from=DIR takes the exported weights, FSDP's ranks each their slices: the first loss is that of the trained
    model, not of a new one."""
    run_program("nanoGPT.export", f"--out_dir={runs['nanoGPT']}", f"--to={tmp_path / 'hf'}")
    config = tiny("nanoGPT", tmp_path / "run", init_from=str(tmp_path / "hf"), max_iters=1, block_size=8, n_layer=9)
    from_hf = train("nanoGPT", 1, config)
    config = tiny("nanoGPT", tmp_path / "other", init_from=str(runs["nanoGPT"]), max_iters=1, block_size=8)
    assert from_hf == train("nanoGPT", 1, config)
    sharded = {"init_from": str(tmp_path / "hf"), "max_iters": 1, "block_size": 8}
    assert gap(from_hf, train("phase3_fsdp", 2, tiny("phase3_fsdp", tmp_path / "sharded", **sharded))) <= 1e-6
    manifest = json.loads((newest(tmp_path / "run") / "manifest.json").read_text())
    assert manifest["model_args"]["n_layer"] == manifest["config"]["n_layer"] == 2
    assert manifest["model_args"]["block_size"] == 8


def test_a_finetuned_run_resumes(runs, tmp_path):
    """A run that began from given weights resumes with their shape, without being told it again."""
    shape = {"init_from": str(runs["nanoGPT"]), "n_layer": 9, "block_size": 8}
    whole = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "whole", max_iters=4, **shape))
    train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "cut", max_iters=2, lr_decay_iters=4, **shape))
    words = [f"--out_dir={tmp_path / 'cut'}", "--init_from=resume", "--max_iters=4"]
    assert run_program("nanoGPT/train.py", *words).code == 0
    assert losses(tmp_path / "cut") == whole


def test_a_context_longer_than_the_models(runs, tmp_path):
    """--block_size beyond the positions of the given weights is refused with what works."""
    words = [f"--init_from={runs['nanoGPT']}", f"--out_dir={tmp_path}", "--block_size=32"]
    assert_refused(run_program("nanoGPT/train.py", *words), "the 16 positions", "--block_size=16")


def nanogpt_state(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def nanogpts_optimizer(content: dict) -> tuple[GPT, torch.optim.AdamW]:
    """Load a ckpt.pt as nanoGPT does: strict names, and AdamW over decaying parameters, then the others."""
    model = GPT(GPTConfig.of(content["model_args"]))
    model.load_state_dict(content["model"])
    params = list(model.parameters())
    groups = [[p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": g, "weight_decay": 0.5} for g in groups], lr=1e-3)
    optimizer.load_state_dict(content["optimizer"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return model, optimizer


def test_ckpt_is_nanogpts(runs):
    """ckpt.pt has nanoGPT's keys, both names of the tied head, and an optimizer state that nanoGPT's AdamW loads."""
    content = nanogpt_state(newest(runs["nanoGPT"]) / "ckpt.pt")
    assert set(content) == {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    assert set(content["model_args"]) == {
        *("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    }
    assert torch.equal(content["model"]["lm_head.weight"], content["model"]["transformer.wte.weight"])
    model, optimizer = nanogpts_optimizer(content)
    assert optimizer.state[model.get_parameter("transformer.wpe.weight")]["exp_avg"].shape == (16, 32)


@pytest.mark.parametrize("phase", ["nanoGPT", "phase3_fsdp"])
def test_ckpt_round_trips(phase, runs, tmp_path):
    """A checkpoint exported as ckpt.pt holds the payload's weights and optimizer state, to the bit."""
    ended = run_program("nanoGPT.export", f"--out_dir={runs[phase]}", f"--to={tmp_path}", "--format=ckpt")
    assert ended.code == 0, ended
    before, (after, rest) = read_full_state(newest(runs[phase])), read_ckpt(tmp_path / "ckpt.pt")
    assert before.model.keys() == after.model.keys() and before.optimizer.keys() == after.optimizer.keys()
    for name, value in before.model.items():
        assert torch.equal(value, after.model[name])
        assert before.optimizer[name].keys() == after.optimizer[name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(v, after.optimizer[name][k]) for k, v in before.optimizer[name].items())
    assert rest["iter_num"] == (3 if phase == "nanoGPT" else 2)
    content = nanogpt_state(tmp_path / "ckpt.pt")
    model, optimizer = nanogpts_optimizer(content)
    for name, param in model.named_parameters():
        assert torch.equal(optimizer.state[param]["exp_avg"], before.optimizer[name]["exp_avg"]), name


def test_a_damaged_checkpoint_is_not_exported(tmp_path, capsys):
    """Exporting and sampling pass a damaged checkpoint over, with the reason, and take the one before."""
    box = directory(tmp_path)
    before, last = (box.save(step, write_bytes(b"weights"), FACTS) for step in (1, 2))
    box.drain()
    (last / "payload").write_bytes(b"weighty")
    assert find_newest(tmp_path).path == before
    assert f"skipping {last.name}: the sha256 of payload differs" in capsys.readouterr().err


def test_sampling_finds_the_run_that_saved_last(tmp_path, monkeypatch):
    """Without --out_dir it is the run under out/ with the newest checkpoint, not the first or last by name."""
    monkeypatch.chdir(tmp_path)
    for name, step, time in (("a", 1, 1), ("b", 2, 3), ("c", 9, 2)):
        (tmp_path / "out" / name / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        os.utime(tmp_path / "out" / name / "checkpoints" / f"step-{step:08d}", (time, time))
    assert newest_run() == "out/b"


def test_a_compiled_nanogpt_checkpoint_opens(runs, tmp_path):
    """nanoGPT's checkpoints of compiled models, with `_orig_mod.` before every name, open here."""
    content = nanogpt_state(newest(runs["nanoGPT"]) / "ckpt.pt")
    content["model"] = {f"_orig_mod.{k}": v for k, v in content["model"].items()}
    torch.save(content, tmp_path / "ckpt.pt")
    _, weights = read_weights(str(tmp_path))
    expected = read_full_state(newest(runs["nanoGPT"])).model
    assert all(torch.equal(weights[k], v) for k, v in expected.items()) and weights.keys() == expected.keys()


def test_a_llama_is_refused(tmp_path):
    """Another architecture is named and refused."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="llama"):
        read_weights(str(tmp_path))


@pytest.mark.parametrize("phase", ["nanoGPT", "phase3_fsdp"])
def test_sampling_streams_text(phase, runs, tmp_path):
    """sample writes the prompt and as many tokens as asked, the same for the same seed, from any phase."""
    (tmp_path / "prompt.txt").write_text("ROMEO:")
    words = [f"--out_dir={runs[phase]}", "--max_new_tokens=20", "--device=cpu", "--top_k=10"]
    first, again, from_file, other = (
        run_program("nanoGPT.sample", *words, *more).output
        for more in (["--start=ROMEO:"], ["--start=ROMEO:"], [f"--start=FILE:{tmp_path}/prompt.txt"], ["--seed=2"])
    )
    assert first == again == from_file and first.startswith("ROMEO:") and first != other
    if phase == "nanoGPT":
        assert len(first.split("\n----")[0]) == len("ROMEO:") + 20


def test_a_text_without_a_newline_is_trained_on_and_sampled_from(tmp_path):
    """One's own text on a single line trains through the launcher, whose sample begins with the vocabulary's first
    character; `--start` still refuses a newline."""
    tokens = {split: np.arange(400, dtype=np.uint16) % 3 for split in ("train", "val")}
    splits = {split: [write_tokens(tmp_path, f"{split}.bin", ids)] for split, ids in tokens.items()}
    write_meta(tmp_path, {}, char_identity("xyz"), splits)
    words = ["--n_layer=1", "--n_head=1", "--n_embd=8", "--block_size=8", "--max_iters=1", "--eval_iters=1"]
    out, device = f"--out_dir={tmp_path / 'run'}", "--device=cpu"
    ended = run_program("nanoGPT.launch", "nanoGPT/train.py", out, device, f"--dataset={tmp_path}", *words)
    assert ended.code == 0 and "\nx" in ended.output.partition("A sample from")[2], ended
    sampled = run_program("nanoGPT.sample", out, device, "--max_new_tokens=9")
    assert sampled.code == 0 and set(sampled.output.partition("\n")[0]) <= set("xyz"), sampled
    assert_refused(run_program("nanoGPT.sample", out, device, "--start=\n"), "not in this model's vocabulary")


def test_sampling_begins_with_a_newline_where_there_is_one(runs):
    """Without --start a text begins as with `--start` of a newline, in a vocabulary of characters and in GPT-2's."""
    for run in runs.values():
        words = [f"--out_dir={run}", "--max_new_tokens=20", "--device=cpu"]
        default, newline = (run_program("nanoGPT.sample", *words, *more) for more in ([], ["--start=\n"]))
        assert default == newline and default.output.startswith("\n")


def test_sampling_refuses_what_cannot_be(runs, tmp_path):
    """No run, an unknown character, an empty or missing prompt, a negative temperature: one sentence each."""
    run = f"--out_dir={runs['nanoGPT']}"
    assert_refused(run_program("nanoGPT.sample", f"--out_dir={tmp_path}"), "neither checkpoints/")
    assert_refused(run_program("nanoGPT.sample", run, "--start=é"), "not in this model's vocabulary")
    assert_refused(run_program("nanoGPT.sample", run, "--start="), "--start is empty")
    assert_refused(run_program("nanoGPT.sample", run, "--start=FILE:/nope"), "cannot be read")
    assert_refused(run_program("nanoGPT.sample", run, "--temperature=-1"), "--temperature")
    assert_refused(run_program("nanoGPT.sample", run, "--tempratur=1"), "--tempratur")
    assert_refused(run_program("nanoGPT.export", f"--out_dir={tmp_path}", "--to=x"), "no whole checkpoint")
    there = tmp_path / "there"
    there.mkdir()
    (there / "model.safetensors").write_text("precious")
    for to, named in ((there, "model.safetensors"), (there / "model.safetensors", "model.safetensors")):
        refused = run_program("nanoGPT.export", run, f"--to={to}")
        assert_refused(refused, f"{named} is there already", "give another directory as --to")
    assert (there / "model.safetensors").read_text() == "precious"


def test_an_export_goes_through_files(tmp_path):
    """A checkpoint of 4 sharded ranks becomes one ckpt.pt, optimizer included, in a process that may allocate less than
    half of what it holds; and every number is the one that putting it together in memory gives."""
    shape = {"n_layer": 12, "n_embd": 256, "dataset": "shakespeare", "block_size": 8, "batch_size": 1}
    once = {"max_iters": 1, "eval_iters": 1, "gradient_accumulation_steps": 4, "warmup_iters": 0}
    train("phase1_zero1", 4, tiny("phase1_zero1", tmp_path / "run", **shape, **once))
    payload = newest(tmp_path / "run")
    program = tmp_path / "export.py"
    program.write_text(LIMITED)
    words = (str(tmp_path / "run"), str(tmp_path / "to"), str(payload))
    ended = run_program(str(program), *words)
    assert ended.code == 0 and "in memory it does not fit" in ended.output, ended
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["ckpt.pt"]
    whole, (streamed, rest) = read_full_state(payload), read_ckpt(tmp_path / "to" / "ckpt.pt")
    assert rest["iter_num"] == 1 and streamed.model.keys() == whole.model.keys()
    for name, items in whole.optimizer.items():
        assert torch.equal(whole.model[name], streamed.model[name])
        assert all(torch.equal(value, streamed.optimizer[name][item]) for item, value in items.items())
    assert sum(v.nbytes for items in whole.optimizer.values() for v in items.values()) > 170e6


LIMITED = """
import re, resource, sys
from pathlib import Path
from nanoGPT.export import main
from nanoGPT.checkpoint.state import read_full_state

run, to, payload = sys.argv[1:]
now = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + 130_000_000, resource.RLIM_INFINITY))
main(run, to, "ckpt")
try:
    state = read_full_state(Path(payload))
    held = [dict(items) for items in state.optimizer.values()]
except (RuntimeError, MemoryError):
    print("in memory it does not fit")
"""


def choose_on_two_ranks(out_dir: str) -> list[float]:
    """Read a run's weights as --init_from does, where rank 1 must not look for the newest checkpoint itself."""
    run = create_runtime("cpu", "auto")
    if run.rank == 1:
        weights_module.find_newest = None  # type: ignore[assignment]
    _, weights = read_weights(out_dir, run)
    return weights["transformer.ln_f.weight"].tolist()


def test_rank_0_chooses_the_weights_to_start_from(runs):
    """On several ranks rank 0 alone looks for the newest checkpoint of --init_from, so that a run which saves meanwhile
    cannot give the ranks different weights."""
    first, second = run_on_ranks(choose_on_two_ranks, 2, str(runs["nanoGPT"]), show=False)
    assert first == second and len(first) > 1
