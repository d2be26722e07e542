"""Phase 2: the trainer with kernels, interpreted, prints the baseline's losses."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from nanoGPT.errors import ConfigError
from nanoGPT.model import GPT, GPTConfig
from phase2_triton.apply import KERNELS, TritonConfig, apply_kernels, kernel_optimizer, parse_kernels
from phase2_triton.kernels.core import KernelError, interpreting
from tests.helpers.kernels import compile_whole, fixed_integers
from tests.helpers.programs import assert_refused, run_program
from tests.helpers.training import ROOT, gap, tiny, train
from workshop.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("on_device")
SMALL = {
    "n_layer": 1,
    "dropout": 0.0,
    "gradient_accumulation_steps": 2,
    "max_iters": 6,
    "eval_iters": 1,
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
}
OWN_MASKS = "adamw,embedding,gelu,layernorm,loss"  # all but attention, whose dropout draws masks of its own


def model(**changes) -> GPT:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 75}
    built = GPT(GPTConfig(**{**shape, **changes}))
    built.init_weights(1)
    return built


def batch(seed=1, B=3, T=16):
    return fixed_integers(75, (2, B, T), seed)


def losses_of(phase, ranks, out, device, **changes):
    """The losses of a small run in fp32, not compiled; `changes` win."""
    plain = {**SMALL, "device": device, "dtype": "float32", "compile": False}
    return train(phase, ranks, tiny(phase, out, **{**plain, **changes}), timeout=220)


def step(net, x, y):
    """A forward and backward: the loss and every parameter's gradient."""
    for p in net.parameters():
        p.grad = None
    _, loss = net(x, y)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in net.named_parameters()}


def largest_gap(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernels", [*(name for name in KERNELS if name != "adamw"), "all"])
def test_a_model_with_kernels_computes_the_same(kernels, bias):
    """Loss and every gradient are the plain model's, with each kernel alone and with all, with biases and without, and
    targets of -1 do not count."""
    plain = model(bias=bias, gelu="tanh" if bias else "none")
    x, y = batch()
    y[:, ::5] = -1
    ours = copy.deepcopy(plain)
    lines = apply_kernels(ours, kernels)
    assert all(name in "\n".join(lines) for name in parse_kernels(kernels) - {"adamw"})
    (loss, grads), (expected, expected_grads) = (step(net, x, y) for net in (ours, plain))
    assert abs(loss - expected) <= 2e-6
    assert largest_gap(grads, expected_grads) <= 2e-6


def test_dropout_is_where_the_plain_model_has_it():
    """An evaluation drops nothing; and in training, with attention's own dropout off, the masks and so the loss and the
    gradients are the plain model's."""
    plain, ours = model(dropout=0.3), model(dropout=0.3)
    apply_kernels(ours)
    for training in (False, True):
        results = []
        for net in (ours, plain):
            for block in net.blocks:
                block.attn.dropout = 0.0 if training else 0.3
            torch.manual_seed(3)
            results.append(step(net.train(training), *batch()))
        assert abs(results[0][0] - results[1][0]) <= 2e-6
        assert largest_gap(results[0][1], results[1][1]) <= 2e-6


def test_names_and_state_dict_stay():
    """A state dict made without kernels opens with them, and the other way; lm_head stays wte; a copy works."""
    plain, ours = model(), model()
    apply_kernels(ours)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    ours.load_state_dict(plain.state_dict())
    plain.load_state_dict(ours.state_dict())
    assert ours.lm_head.weight is ours.transformer["wte"].weight
    assert abs(step(copy.deepcopy(ours), *batch())[0] - step(plain, *batch())[0]) <= 2e-6


def test_what_was_changed_is_said_and_shown():
    """One line a change, and the model's own print names the classes."""
    net = model()
    assert apply_kernels(net, "none") == ["kernels: none, everything is torch's own"]
    lines = apply_kernels(net, "layernorm,attention")
    assert lines[0].startswith("kernels: attention: 2 x") and lines[1].startswith("kernels: layernorm: 5 x")
    assert ("interpreted" in lines[-1]) is interpreting()
    assert "KernelAttention" in repr(net) and "KernelLayerNorm" in repr(net) and "KernelMLP" not in repr(net)


def test_generation_is_the_same():
    """The text of a model with kernels is the plain one's, with and without its cache; the weights are large enough for
    what comes before a token to matter."""
    plain = model()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(20)
    ours = copy.deepcopy(plain)
    apply_kernels(ours)
    lengths = []
    ours.transformer["ln_f"].register_forward_hook(lambda module, inputs, output: lengths.append(output.size(1)))
    for cached in (True, False):
        texts = [
            torch.cat(list(net.eval().generate(torch.tensor([[5, 7]]), 8, temperature=0.0, use_cache=cached)), 1)
            for net in (plain, ours)
        ]
        assert torch.equal(*texts) and len(texts[0].unique()) > 3, texts
    assert lengths == [2, *[1] * 7, *range(2, 10)]  # with the cache a step runs one token


def test_a_hundred_steps_follow_the_baseline(tmp_path, device):
    """100 training steps with all kernels: every loss is within 1e-4 of the baseline's."""
    small = {"max_iters": 100, "gradient_accumulation_steps": 1, "eval_interval": 1000}
    base, ours = (losses_of(phase, 1, tmp_path / phase, device, **small) for phase in ("nanoGPT", "phase2_triton"))
    assert len(ours) == 100 and base[99] < base[0] - 0.5
    assert gap(base, ours) <= 1e-4


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_do_not_depend_on_ranks(ranks, tmp_path, device, need_ranks):
    """With dropout, whose masks are the baseline's but in the attention kernel, n ranks print the baseline's losses."""
    need_ranks(ranks)
    small = {"dropout": 0.2, "gradient_accumulation_steps": 4, "max_iters": 3}
    base = losses_of("nanoGPT", 1, tmp_path / "base", device, **small)
    ours = losses_of("phase2_triton", ranks, tmp_path / "ours", device, kernels=OWN_MASKS, **small)
    assert gap(base, ours) <= 1e-5


def test_attentions_masks_do_not_depend_on_ranks(tmp_path, device, need_ranks):
    """With dropout in the attention kernel the curve is its own, and the same at 1 and 2 ranks."""
    need_ranks(2)
    small = {"dropout": 0.2, "max_iters": 3}
    one, two = (losses_of("phase2_triton", n, tmp_path / str(n), device, **small) for n in (1, 2))
    assert gap(one, two) <= 1e-6
    assert gap(one, losses_of("nanoGPT", 1, tmp_path / "base", device, **small)) > 1e-3


def test_a_resumed_run_is_the_same_run(tmp_path, device):
    """Cut after 3 of 6 steps and resumed, the losses are the whole run's to the last digit; the baseline's nearly."""
    whole = losses_of("phase2_triton", 1, tmp_path / "whole", device)
    for out, phase, exact in (("same", "phase2_triton", True), ("other", "nanoGPT", False)):
        losses_of("phase2_triton", 1, tmp_path / out, device, max_iters=3, lr_decay_iters=6)
        resumed = losses_of(phase, 1, tmp_path / out, device, init_from="resume", lr_decay_iters=6)
        assert resumed == whole if exact else gap(resumed, whole) <= 1e-5


def test_compiled_equals_eager(tmp_path, device):
    """--compile=True prints eager's losses: every kernel is inside the graph."""
    eager, compiled = (
        losses_of("phase2_triton", 1, tmp_path / str(on), device, max_iters=3, compile=on) for on in (False, True)
    )
    assert gap(eager, compiled) <= 1e-5


@pytest.mark.heavy
def test_the_whole_model_is_one_graph():
    """torch.compile(fullgraph=True) takes the model with all kernels, under autocast too: eager's gradients."""
    net = model(n_layer=1)
    apply_kernels(net)
    compiled = compile_whole(net)
    for narrow, limit in ((False, 2e-6), (True, 2e-3)):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=narrow):
            (loss, grads), (expected, expected_grads) = (step(n, *batch()) for n in (compiled, net))
        assert abs(loss - expected) <= limit
        assert largest_gap({k.removeprefix("_orig_mod."): v for k, v in grads.items()}, expected_grads) <= limit


def test_bfloat16_is_near_the_baseline(tmp_path, device):
    """Interpreted bfloat16 is rounded as torch rounds: the losses are near the baseline's in bfloat16."""
    base, ours = (
        losses_of(phase, 1, tmp_path / phase, device, dtype="bfloat16", max_iters=3)
        for phase in ("nanoGPT", "phase2_triton")
    )
    assert gap(base, ours) <= 4e-3


def sharded_step(how: str, device: str) -> tuple[float, float]:
    """This rank's loss and the largest difference of its gradients from the plain model's mean over the ranks."""
    rank = torch.distributed.get_rank()
    torch.set_default_device(torch.device(device, rank) if device == "cuda" else device)
    plain, net = model(), model()
    apply_kernels(net)
    if how == "ddp":
        replica: nn.Module = DDP(net)
    else:
        for block in net.blocks:
            fully_shard(block)
        replica = fully_shard(net)
    loss, grads = step(replica, *batch(rank))
    expected = [step(plain, *batch(r)) for r in range(2)]
    off = 0.0
    for name, g in grads.items():
        whole = g.full_tensor() if how == "fsdp" else g
        mean = sum(grads[name.removeprefix("module.")] for _, grads in expected) / 2
        off = max(off, (whole - mean).abs().max().item())
    return abs(loss - expected[rank][0]), off


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_under_data_parallelism(how, device, need_ranks):
    """Replicated by DDP or sharded by FSDP2 over 2 ranks, the averaged gradients are the plain model's."""
    need_ranks(2)
    for loss_off, off in run_on_ranks(sharded_step, 2, how, device, show=False, device=device):
        assert loss_off <= 2e-6 and off <= 2e-6


def test_under_activation_checkpointing():
    """Blocks that are recomputed in the backward draw the same attention masks and give the same gradients."""
    net = model(dropout=0.3)
    apply_kernels(net)
    torch.manual_seed(3)
    loss, grads = step(net, *batch())
    for block in net.blocks:
        block.forward = lambda *args, f=block.forward: checkpoint(f, *args, use_reentrant=False)
    torch.manual_seed(3)
    again, recomputed = step(net, *batch())
    assert again == loss and largest_gap(grads, recomputed) <= 1e-7


def test_muon_stays_torchs():
    """The adamw kernel is for AdamW: with --optimizer=muon the optimizer is the baseline's."""
    config = TritonConfig(optimizer="muon", n_embd=32)
    assert type(kernel_optimizer(model(), config)).__name__ == "MuonWithAdamW"
    assert type(kernel_optimizer(model(), TritonConfig())).__name__ == "TritonAdamW"
    assert type(kernel_optimizer(model(), TritonConfig(kernels="loss"))) is torch.optim.AdamW


class OwnHead(GPT):
    def head(self, x, targets):
        logits, loss = super().head(x, targets)
        return logits, 2 * loss


def test_code_of_ones_own_is_not_lost():
    """A model that is no plain GPT, or has kernels already, is refused in one sentence and left as it is."""
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=75)
    adapted, biased, twice = GPT(shape), GPT(shape), GPT(shape)
    adapted.blocks[0].mlp.c_fc = nn.Sequential(adapted.blocks[0].mlp.c_fc)
    biased.lm_head.bias = nn.Parameter(torch.zeros(75))
    apply_kernels(twice, "layernorm")
    for net, said in (
        (OwnHead(shape), "the model is a OwnHead"),
        (torch.compile(GPT(shape)), "the model is a OptimizedModule"),
        (adapted, "mlp.c_fc is a Sequential"),
        (biased, "lm_head has a bias"),
        (twice, "has a kernel already: name all that are wanted in one call"),
    ):
        before = repr(net)
        with pytest.raises(KernelError, match=said):
            apply_kernels(net, "loss,gelu,embedding")
        assert repr(net) == before


def test_an_unknown_kernel_is_refused(tmp_path):
    """A misspelt kernel is one sentence with the nearest name, before anything starts."""
    ended = run_program("phase2_triton/train.py", "--kernels=layernom,loss", f"--out_dir={tmp_path}")
    assert_refused(ended, "'layernom'", "did you mean layernorm?")
    wide = {"n_embd": 512, "n_head": 2}
    with pytest.raises(ConfigError, match="heads of 256 channels"):
        TritonConfig(**wide).check(1)
    TritonConfig(**wide, kernels="loss").check(1)
    TritonConfig(n_embd=256, n_head=2).check(1)  # 128 channels, the widest
    for wrong, said in (("loss,", "'': give all, none, or some of"), ("all,loss", "'all'"), ("", "''")):
        with pytest.raises(ConfigError, match=said):
            parse_kernels(wrong)
    assert (
        parse_kernels(" ALL ") == frozenset(KERNELS)
        and parse_kernels("Loss , gelu") == {"loss", "gelu"}
        and not parse_kernels("None")
    )


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("import sys; sys.modules['triton'] = None", "Triton is not installed"),
        ("import os; os.environ['TRITON_INTERPRET'] = '0'", "compiled kernels run on cuda and not on cpu"),
        ("import triton.language", "Triton was imported before phase2_triton"),
        (
            "import os, numpy; os.environ['TRITON_INTERPRET'] = '1'; import triton\n"
            "triton.__version__, numpy.__version__ = '3.6.0', '2.4.0'",
            "Triton 3.6 cannot interpret with numpy 2.4",
        ),
    ],
)
def test_where_triton_cannot_run_torchs_own_does(before, reason):
    """Without Triton, or where it cannot run, the model stays as it is, one line says why, and it trains."""
    program = f"""
{before}
import torch
from nanoGPT.model import GPT, GPTConfig
from phase2_triton.apply import TritonConfig, apply_kernels, kernel_optimizer
net = GPT(GPTConfig(1, 1, 8, 8, vocab_size=9))
print(apply_kernels(net))
optimizer = kernel_optimizer(net, TritonConfig())
net(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64))[1].backward()
optimizer.step()
print(type(net).__name__, type(optimizer).__name__)
"""
    unset = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    unset["CUDA_VISIBLE_DEVICES"] = ""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, env=unset, capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert reason in lines[0] and lines[0].count("kernels:") == 1 and lines[1] == "GPT AdamW"


def test_the_launcher_runs_it(tmp_path, device, need_ranks):
    """Through the launcher on 2 ranks, what was changed is said once, and the run ends with a sample."""
    need_ranks(2)
    flags = {"n_layer": 1, "n_head": 1, "n_embd": 16, "block_size": 16, "batch_size": 2, "max_iters": 2}
    flags |= {"gradient_accumulation_steps": 2, "eval_iters": 2, "device": device, "out_dir": tmp_path}
    flags |= {"kernels": "loss,adamw"}
    words = [f"--{key}={value}" for key, value in flags.items()]
    ended = run_program("nanoGPT.launch", "--gpus=2", "phase2_triton/train.py", *words)
    assert ended.code == 0, ended.output
    assert ended.output.count("kernels: loss") == 1 and "the optimizer is TritonAdamW" in ended.output
    assert "A sample from" in ended.output


def test_the_script_in_the_notes_runs(tmp_path):
    """The script in IMPLEMENTATION.md runs as it stands and prints torch's loss."""
    text = (ROOT / "phase2_triton/IMPLEMENTATION.md").read_text()
    script = text.split("```python\n")[1].split("```")[0]
    check = "\nexact = torch.nn.functional.layer_norm(x, (96,)) @ head.t()\n"
    check += (
        "print(abs(torch.nn.functional.cross_entropy(exact, torch.arange(33, device=device)) - loss).item() < 1e-4)\n"
    )
    (tmp_path / "mine.py").write_text(script + check)
    done = subprocess.run([sys.executable, tmp_path / "mine.py"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.startswith("loss ") and done.stdout.endswith("True\n"), done.stderr
