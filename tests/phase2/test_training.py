"""Tests of phase 2 in the trainer: with kernels in the interpreter, it prints the baseline's losses."""

import copy
import functools
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT, Attention, Block, CausalSelfAttention, GPTConfig
from nanoGPT.sample import generate
from nanoGPT.train_config import TrainConfig
from phase2_triton.apply import (
    KERNELS,
    TritonConfig,
    apply_kernels,
    choose_kernels,
    kernel_optimizer,
)
from phase2_triton.changes import find_change
from phase2_triton.kernels.core import KernelError
from tests.helpers.kernels import compile_full_graph, draw_integers
from tests.helpers.programs import DEADLINE, assert_refused, run_program
from tests.helpers.training import ROOT, gap, tiny, train

pytestmark = pytest.mark.usefixtures("on_device")
SMALL = {
    "n_layer": 1,
    "dropout": 0.0,
    "gradient_accumulation_steps": 2,
    "max_iters": 2,
    "lr_decay_iters": 2,
    "eval_iters": 1,
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
}


def make_model(**changes) -> GPT:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 75}
    model = GPT(GPTConfig(**{**shape, **changes}))
    model.init_weights(1)
    return model


def make_batch():
    return draw_integers(75, (2, 3, 16), 1)


def train_small_model(phase, ranks, out, device, **changes):
    """Train a small model in fp32 without compilation, and return its losses. `changes` replace these settings."""
    defaults = {**SMALL, "device": device, "dtype": "float32", "compile": False}
    return train(phase, ranks, tiny(phase, out, **{**defaults, **changes}))


def run_step(net, x, y):
    """Run a forward and a backward pass. Return the loss and the gradient of every parameter."""
    for p in net.parameters():
        p.grad = None
    loss = net(x, y)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in net.named_parameters()}


def compute_max_gap(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernels", [*KERNELS[1:], "all"])
def test_a_model_with_kernels_matches_the_plain_model(kernels, bias):
    """The loss and every gradient match, with each kernel alone and with all kernels, with and without biases.

    Targets of -1 are ignored.
    """
    plain = make_model(bias=bias, gelu="tanh" if bias else "none")
    x, y = make_batch()
    y[:, ::5] = -1
    ours = copy.deepcopy(plain)
    lines = apply_kernels(ours, kernels)
    assert all(name in "\n".join(lines) for name in choose_kernels(kernels, "cpu", False, 8) - {"adamw"})
    (loss, grads), (expected, expected_grads) = (run_step(net, x, y) for net in (ours, plain))
    assert abs(loss - expected) <= 2e-6
    assert compute_max_gap(grads, expected_grads) <= 2e-6


def test_dropout_matches_the_plain_model():
    """Evaluation has no dropout. In training without attention dropout, masks, loss and gradients match."""
    plain, ours = make_model(dropout=0.3), make_model(dropout=0.3)
    apply_kernels(ours)
    for training in (False, True):
        results = []
        for net in (ours, plain):
            for block in net.blocks:
                block.attn.dropout = 0.0 if training else 0.3
            torch.manual_seed(3)
            results.append(run_step(net.train(training), *make_batch()))
        assert abs(results[0][0] - results[1][0]) <= 2e-6
        assert compute_max_gap(results[0][1], results[1][1]) <= 2e-6


def test_generation_matches_the_plain_model():
    """The generated text matches with and without the cache. The weights are so large that the context matters."""
    plain = make_model()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(20)
    ours = copy.deepcopy(plain)
    apply_kernels(ours)
    lengths = []
    ours.blocks[-1].register_forward_hook(lambda module, inputs, output: lengths.append(output.size(1)))
    for use_cache in (True, False):
        texts = [
            torch.cat(list(generate(net.eval(), torch.tensor([[5, 7]]), 8, temperature=0.0, use_cache=use_cache)), 1)
            for net in (plain, ours)
        ]
        assert torch.equal(*texts) and len(texts[0].unique()) > 3, texts
    assert lengths == [2, *[1] * 7, *range(2, 10)]  # with the cache, each step computes one token


@pytest.mark.parametrize(
    ("device_type", "is_compiled", "head_size", "expected"),
    [
        ("cuda", True, 64, {"loss"}),
        ("cuda", False, 64, set(KERNELS) - {"adamw"}),
        ("cuda", False, 256, set(KERNELS) - {"adamw", "attention"}),
        ("cpu", True, 64, set()),
        ("mps", False, 64, set()),
    ],
)
def test_auto_selects_by_device_and_compilation(device_type, is_compiled, head_size, expected):
    """auto selects loss for a compiled model on a GPU, all but adamw that support the model in eager mode, else none.

    It is the default on a GPU. Phases 1 and 3 get the same kernels. The line that is printed names them.
    """
    assert TritonConfig.GPU_DEFAULTS["kernels"] == "auto" and "kernels" not in TrainConfig.GPU_DEFAULTS
    assert choose_kernels(" Auto ", device_type, is_compiled, head_size) == expected
    assert choose_kernels("auto", device_type, is_compiled, head_size, KERNELS[1:]) == expected
    net = make_model(n_embd=2 * head_size, n_layer=1)
    line, *_ = apply_kernels(net, "auto", device_type, is_compiled)
    assert line.startswith(f"kernels: auto selects {','.join(sorted(expected)) or 'none'}: ")


def test_auto_leaves_out_attention_on_an_old_gpu(monkeypatch):
    """The attention kernel needs more shared memory than a GPU older than Ampere has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert choose_kernels("auto", "cuda", False, 64) == set(KERNELS) - {"adamw", "attention"}


@pytest.mark.slow
def test_a_hundred_steps_match_the_baseline(tmp_path, device):
    """In 100 training steps with all kernels, every loss is within 1e-4 of the baseline's."""
    small = {"max_iters": 100, "lr_decay_iters": 100, "gradient_accumulation_steps": 1, "eval_interval": 1000}
    base, ours = (
        train_small_model(phase, 1, tmp_path / phase, device, **small) for phase in ("nanoGPT", "phase2_triton")
    )
    assert len(ours) == 100 and base[99] < base[0] - 0.5
    assert gap(base, ours) <= 1e-4


def test_attentions_masks_do_not_depend_on_ranks(tmp_path, device, need_ranks):
    """Dropout in the attention kernel gives losses other than the baseline's, but equal ones on 1 and 2 ranks."""
    need_ranks(2)
    small = {"dropout": 0.2}
    one, two = (train_small_model("phase2_triton", n, tmp_path / str(n), device, **small) for n in (1, 2))
    assert gap(one, two) <= 1e-6
    assert gap(one, train_small_model("nanoGPT", 1, tmp_path / "base", device, **small)) > 1e-3


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_run(tmp_path, device):
    """A run resumed after 1 of 3 steps has identical losses, or nearly identical ones if the baseline resumes it.

    The last loss depends on the optimizer state of the checkpoint.
    """
    small = {"max_iters": 3, "lr_decay_iters": 3}
    uninterrupted = train_small_model("phase2_triton", 1, tmp_path / "uninterrupted", device, **small)
    train_small_model("phase2_triton", 1, tmp_path / "cut", device, **{**small, "max_iters": 1})
    for phase, is_identical in (("phase2_triton", True), ("nanoGPT", False)):
        out = shutil.copytree(tmp_path / "cut", tmp_path / phase)
        resumed = train_small_model(phase, 1, out, device, init_from="resume", **small)
        assert resumed == uninterrupted if is_identical else gap(resumed, uninterrupted) <= 1e-5


@pytest.mark.slow
def test_the_full_model_is_one_graph():
    """torch.compile(fullgraph=True) compiles the model with all kernels. Gradients match eager mode's, also in
    autocast."""
    net = make_model(n_layer=1)
    apply_kernels(net)
    compiled = compile_full_graph(net)
    for use_autocast, limit in ((False, 2e-6), (True, 2e-3)):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=use_autocast):
            (loss, grads), (expected, expected_grads) = (run_step(n, *make_batch()) for n in (compiled, net))
        assert abs(loss - expected) <= limit
        assert compute_max_gap({k.removeprefix("_orig_mod."): v for k, v in grads.items()}, expected_grads) <= limit


def test_bfloat16_losses_are_near_the_baseline(tmp_path, device):
    """Kernels in the interpreter round bfloat16 as torch does: losses are near the baseline's in bfloat16."""
    base, ours = (
        train_small_model(phase, 1, tmp_path / phase, device, dtype="bfloat16")
        for phase in ("nanoGPT", "phase2_triton")
    )
    assert gap(base, ours) <= 4e-3


def test_activation_checkpointing_gives_the_same_gradients():
    """Blocks that are recomputed in the backward pass draw the same attention masks and give the same gradients."""
    net = make_model(dropout=0.3)
    apply_kernels(net)
    torch.manual_seed(3)
    loss, grads = run_step(net, *make_batch())
    for block in net.blocks:
        block.forward = lambda *args, f=block.forward: checkpoint(f, *args, use_reentrant=False)
    torch.manual_seed(3)
    recomputed_loss, recomputed_grads = run_step(net, *make_batch())
    assert recomputed_loss == loss and compute_max_gap(grads, recomputed_grads) <= 1e-7


def test_muon_uses_no_optimizer_kernel():
    """The adamw kernel is only for AdamW. With --optimizer=muon, the optimizer is the baseline's."""
    config = TritonConfig(optimizer="muon", n_embd=32)
    assert type(kernel_optimizer(make_model(), config)).__name__ == "MuonWithAdamW"
    assert type(kernel_optimizer(make_model(), TritonConfig())).__name__ == "TritonAdamW"
    for kernels in ("auto", "loss"):
        assert type(kernel_optimizer(make_model(), TritonConfig(kernels=kernels))) is torch.optim.AdamW


class CustomHeadGPT(GPT):
    def compute_loss(self, x, targets):
        return 2 * super().compute_loss(x, targets)


def test_a_changed_model_is_refused():
    """A model with another loss, no GPT, and one that has kernels are refused with one sentence. They do not change."""
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=75)
    biased, with_kernels = GPT(shape), GPT(shape)
    biased.lm_head.bias = nn.Parameter(torch.zeros(75))
    apply_kernels(with_kernels, "layernorm")
    for net, words in (
        (CustomHeadGPT(shape), "loss: a CustomHeadGPT has its own compute_loss"),
        (nn.Linear(1, 1), "the model is a Linear"),
        (biased, "lm_head has a bias"),
        (with_kernels, "already has kernels: name all kernels in one call"),
    ):
        before = repr(net)
        with pytest.raises(KernelError, match=words):
            apply_kernels(net, "loss,gelu,embedding")
        assert repr(net) == before


class QkNormAttention(CausalSelfAttention):
    def forward(self, x, cache=None):
        return super().forward(nn.functional.normalize(x), cache)


class SigmoidAttention(CausalSelfAttention):
    def attend(self, q, k, v, cache):
        return (q @ k.transpose(-2, -1)).sigmoid().tril() @ v


def wrap_method(cls, name):
    """Return a wrapper of a method that claims to be the original."""

    @functools.wraps(getattr(cls, name))
    def method(self, *args):
        return 2 * getattr(cls, name)(self, *args)

    return method


def wrap(cls, name="forward"):
    return lambda net, patch: patch.setattr(cls, name, wrap_method(cls, name))


# What a user changed, by the kernel and the words of its error.
CHANGES = {
    ("attention", "Attention.attend was changed: .* instead of"): wrap(Attention, "attend"),
    ("layernorm", "Block.forward was changed"): wrap(Block),
    ("loss", "GPT.compute_logits was changed"): wrap(GPT, "compute_logits"),
    ("embedding", "GPT.embed was changed"): wrap(GPT, "embed"),
    ("embedding", "wte.forward is not that of torch's Embedding"): wrap(nn.Embedding),
    ("attention", "a SigmoidAttention has its own attend"): lambda net, _: setattr(
        net.blocks[0].attn, "__class__", SigmoidAttention
    ),
    ("gelu", "a MLP has its own forward"): lambda net, _: setattr(net.blocks[1].mlp, "forward", nn.Identity().forward),
    ("gelu", "h.0.mlp.gelu is a SiLU, and not a GELU"): lambda net, _: setattr(net.blocks[0].mlp, "gelu", nn.SiLU()),
}


@pytest.mark.parametrize(("kernel", "words"), CHANGES)
def test_a_kernel_never_replaces_changed_code(kernel, words, monkeypatch):
    """Only the kernels whose code was changed are refused, by name. auto leaves them out."""
    everything = ",".join(KERNELS)
    others = ",".join(sorted({*KERNELS} - {kernel}))
    net = make_model()
    CHANGES[kernel, words](net, monkeypatch)
    before = repr(net)
    with pytest.raises(KernelError, match=f"{kernel}: .*{words}.*: use --kernels={others}$"):
        apply_kernels(net, everything)
    assert repr(net) == before
    assert find_change(net, "loss" if kernel != "loss" else "gelu") is None
    lines = apply_kernels(net, "auto", "cuda")
    assert [line for line in lines if line.startswith(f"kernels: auto leaves out {kernel}, because")], lines


def test_the_attention_kernel_keeps_other_code_of_attention():
    """The kernel replaces only the attention of queries to keys. What else a user's class computes stays."""
    plain = make_model()
    for block in plain.blocks:
        block.attn.__class__ = QkNormAttention
    ours, x, y = copy.deepcopy(plain), *make_batch()
    apply_kernels(ours, "attention")
    (loss, grads), (expected, expected_grads) = (run_step(net, x, y) for net in (ours, plain))
    assert abs(loss - expected) <= 2e-6 and abs(loss - run_step(make_model(), x, y)[0]) > 1e-4
    assert compute_max_gap(grads, expected_grads) <= 2e-6


def test_an_unknown_kernel_is_refused(tmp_path):
    """A misspelled kernel is refused with one sentence that suggests the nearest name, before training starts."""
    outcome = run_program("phase2_triton/train.py", "--kernels=layernom,loss", f"--out_dir={tmp_path}")
    assert_refused(outcome, "'layernom'", "did you mean layernorm?")
    with pytest.raises(ConfigError, match="'all'"):
        choose_kernels("all,loss", "cpu", False, 8)
    assert choose_kernels("Loss , gelu", "cpu", False, 8) == {"loss", "gelu"}
    assert not choose_kernels("None", "cpu", False, 8)


def test_all_kernels_have_one_meaning_in_every_phase():
    """A run of phase 2 with all kernels resumes in phases 1 and 3, whose value is triton, and the other way round.

    There, AdamW's kernel is left out, because it does not update shards.
    """
    for kernels in (" All", "triton"):
        assert choose_kernels(kernels, "cpu", False, 8, KERNELS[1:]) == set(KERNELS) - {"adamw"}
    models = [make_model(), make_model()]
    lines = [apply_kernels(model, kernels) for model, kernels in zip(models, ("all", "Triton"), strict=True)]
    assert lines[0] == lines[1] and repr(models[0]) == repr(models[1])


# For each way in which Triton cannot run: code that creates it, and the reason that is printed.
UNUSABLE_TRITON = {
    "import sys; sys.modules['triton'] = None": "Triton is not installed",
    "import os; os.environ['TRITON_INTERPRET'] = '0'": "compiled kernels run on cuda and not on cpu",
    "import triton.language": "Triton was imported before phase2_triton",
    "import os, numpy; os.environ['TRITON_INTERPRET'] = '1'; import triton\n"
    "triton.__version__, numpy.__version__ = '3.6.0', '2.4.0'": "Triton 3.6 cannot interpret with numpy 2.4",
}
UNUSABLE_TRITON_PROGRAM = """
import os, sys
import torch
import sympy, torch.fx.experimental.symbolic_shapes  # what optimizers import without Triton: once for all cases
from nanoGPT.model import GPT, MLP, Block, CausalSelfAttention, GPTConfig
assert "triton" not in sys.modules
for setup in sys.argv[1:]:
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0, setup
        continue
    exec(setup)
    from phase2_triton.apply import TritonConfig, apply_kernels, kernel_optimizer
    net = GPT(GPTConfig(1, 1, 8, 8, vocab_size=9))
    lines = apply_kernels(net)
    optimizer = kernel_optimizer(net, TritonConfig())
    net(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)).backward()
    optimizer.step()
    print(lines, type(net).__name__, type(optimizer).__name__, flush=True)
    os._exit(0)
"""


def test_torch_runs_where_triton_cannot():
    """If Triton is missing or cannot run, the model does not change, one line states the reason, and training works.

    One program imports torch, and a forked process of it runs each case.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    arguments = [sys.executable, "-c", UNUSABLE_TRITON_PROGRAM, *UNUSABLE_TRITON]
    process = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert process.returncode == 0, process.stderr
    for reason, line in zip(UNUSABLE_TRITON.values(), process.stdout.splitlines(), strict=True):
        assert reason in line and line.count("kernels:") == 1 and line.endswith("] GPT AdamW"), line
