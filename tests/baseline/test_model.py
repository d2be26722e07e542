"""The model, its initialization, the optimizer, and text generation."""

import math

import pytest
import torch
from torch import nn

from nanoGPT.checkpoint.starting_point import load_weights, read_starting_point
from nanoGPT.dataset import TokenData
from nanoGPT.distributed.runtime import create_runtime, reseed
from nanoGPT.model import GPT, GPTConfig, draw_initial_rows
from nanoGPT.optim import clip_grads, configure_adamw, grad_norm, param_groups
from nanoGPT.sample import generate, sample_tokens
from nanoGPT.train import learning_rate
from nanoGPT.train_config import TrainConfig

SMALL_SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=True, vocab_size=75)


def create_small_model(**changes) -> GPT:
    """Return an initialized model of SMALL_SHAPE. `changes` replace fields of the shape."""
    model = GPT(GPTConfig(**{**SMALL_SHAPE.__dict__, **changes}))
    model.init_weights(1)
    return model


@pytest.mark.parametrize(
    ("shape", "millions"),
    [
        ((12, 12, 768), 124.44),
        ((48, 25, 1600), 1557.61),
    ],
)
def test_parameter_counts_match_gpt2(shape, millions):
    """The smallest and the largest GPT-2 have the published numbers of parameters."""
    assert GPTConfig(*shape, vocab_size=50257).count_params() / 1e6 == pytest.approx(millions, abs=0.01)


def test_initial_values_depend_only_on_seed_and_name():
    """The initial value of a parameter depends on the seed and its name, and not on other parameters."""
    shallow, deep = create_small_model(), create_small_model(n_layer=2, vocab_size=80)
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(shallow.get_parameter(name), deep.get_parameter(name))
    assert not torch.equal(shallow.get_parameter(name), shallow.get_parameter(name.replace("h.1", "h.0")))
    one, two = torch.empty(8, 8), torch.empty(8, 8)
    draw_initial_rows(one, "a.weight", one.shape, 0.02, 1)
    draw_initial_rows(two, "a.weight", two.shape, 0.02, 2)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("shape", [(10, 7), (7, 100), (3, 2, 5), (9,)])
def test_some_rows_are_drawn_like_all_rows(shape, monkeypatch):
    """Any range of rows has the values of the full parameter, although only the chunks of rows in it are drawn."""
    monkeypatch.setattr("nanoGPT.model.MAX_CHUNK_ELEMENTS", 30)
    full = torch.empty(shape)
    draw_initial_rows(full, "a.weight", full.shape, 0.02, 1)
    assert full.unique().numel() == full.numel() or len(shape) == 1
    for begin in range(len(full)):
        for end in range(begin, len(full) + 1):
            part = torch.empty(end - begin, *shape[1:])
            draw_initial_rows(part, "a.weight", full.shape, 0.02, 1, begin)
            assert torch.equal(part, full[begin:end])


def test_initial_values_have_the_std_of_gpt2():
    """Matrices have std 0.02, residual projections 0.02 / sqrt(2 n_layer). Biases are 0, and LayerNorm weights are
    1."""
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=256, vocab_size=512))
    model.init_weights(3)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            assert param.abs().max() == 0
        elif param.dim() == 1:
            assert (param == 1).all()
        else:
            assert param.std().item() == pytest.approx(0.005 if "c_proj" in name else 0.02, rel=0.05)


def test_the_loss_ignores_targets_of_minus_one():
    """The loss is the mean cross-entropy over all targets except those of -1."""
    model = create_small_model().eval()
    idx = torch.randint(75, (2, 16))
    targets = torch.randint(75, (2, 16))
    targets[0, :9] = -1
    loss, logits = model(idx, targets), model.compute_logits(model.compute_features(idx))
    assert torch.equal(model(idx, targets.T.contiguous().T), loss), "targets can have any strides"
    log_probs = logits.double().log_softmax(-1)
    picked = log_probs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert loss.item() == pytest.approx(-picked[targets != -1].mean().item(), abs=1e-5)


def test_attention_is_causal():
    """A changed token does not change the logits at earlier positions."""
    model = create_small_model().eval()
    idx = torch.randint(75, (1, 16))
    changed = idx.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 75
    a, b = (model.compute_logits(model.compute_features(i))[0] for i in (idx, changed))
    assert torch.equal(a[:10], b[:10]) and not torch.equal(a[10:], b[10:])


@pytest.mark.parametrize("prompt", [1, 5, 16, 20])
def test_the_cache_does_not_change_the_text(prompt):
    """Generation with and without the key-value cache returns the same tokens, within the context and beyond it."""
    model, idx = create_small_model().eval(), torch.randint(75, (2, prompt))
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        texts.append(torch.cat(list(generate(model, idx, 30, 0.9, 20, use_cache=use_cache)), dim=1))
    assert torch.equal(*texts) and texts[0].shape == (2, 30)


def test_padding_tokens_are_never_sampled():
    """Ids from the limit on are padding. They are never sampled, although the untrained model assigns them
    probability."""
    model = create_small_model(vocab_size=128).eval()
    text = torch.cat(list(generate(model, torch.zeros(4, 1, dtype=torch.long), 60, 5.0, None, 3)), dim=1)
    assert text.max() < 3


def test_sampling_follows_temperature_and_top_k():
    """The k most likely tokens are sampled with softmax(logits / temperature), and others never. Temperature 0 always
    selects the most likely token."""
    logits = torch.tensor([0.3, 0.1, 0.4, 0.2]).log().expand(20_000, 4)
    torch.manual_seed(0)
    frequencies = sample_tokens(logits, 0.5, 2).flatten().bincount(minlength=4) / 20_000
    assert frequencies.tolist() == pytest.approx([0.09 / 0.25, 0, 0.16 / 0.25, 0], abs=0.02)
    assert (sample_tokens(logits, 0.0, None) == 2).all() and (sample_tokens(logits, 5.0, 1) == 2).all()
    assert len(sample_tokens(torch.ones(1000, 4), 1.0, 2).unique()) == 2  # also of tokens that are equally likely


def test_dropout_follows_the_micro_batch():
    """Random numbers are the same for the same seed, step and micro-batch, and different for any other key."""

    def draw(*key: int) -> tuple[float, ...]:
        reseed(torch.device("cpu"), *key)
        return tuple(torch.rand(4).tolist())

    keys = [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3)]
    assert len({draw(*key) for key in keys}) == 4 and draw(*keys[0]) == draw(*keys[0])


def test_a_shorter_context_keeps_the_logits(tmp_path):
    """Weights that are loaded with a smaller block_size return the same logits within it."""
    model, idx = create_small_model().eval(), torch.randint(75, (1, 8))
    torch.save({"model": model.state_dict(), "model_args": vars(model.config)}, tmp_path / "ckpt.pt")
    config = TrainConfig(init_from=str(tmp_path), block_size=8)
    data = TokenData(config)
    shape, weights = read_starting_point(config, data, None, create_runtime("cpu", "float32"))
    shorter = GPT(shape).eval()
    load_weights(shorter, weights)
    assert torch.equal(shorter(idx), model(idx)) and shorter.config.block_size == 8


def test_flops_match_the_formula():
    """A model has 6N + 12 L C T FLOPs per token, with N without position embeddings. For GPT-2 124M at T = 1024,
    this is 855.1 MFLOPs."""
    assert GPTConfig(vocab_size=50257).flops_per_token() == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024


def test_weight_decay_applies_only_to_matrices():
    """Weight decay applies to embeddings and matrices, not to biases and LayerNorm weights. Every parameter is in one
    group."""
    groups = param_groups(create_small_model(), 0.1)
    assert all(p.dim() >= 2 for p in groups[0]["params"]) and all(p.dim() < 2 for p in groups[1]["params"])
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert sum(len(g["params"]) for g in groups) == len(list(create_small_model().parameters()))


def test_the_learning_rate_warms_up_and_decays():
    """The learning rate warms up linearly, follows half a cosine, and stays at min_lr."""
    config = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=9, max_iters=109)
    assert learning_rate(0, config) == pytest.approx(0.1) and learning_rate(8, config) == pytest.approx(0.9)
    assert learning_rate(9, config) == 1.0 and learning_rate(59, config) == pytest.approx(0.55)
    assert learning_rate(109, config) == learning_rate(10**6, config) == 0.1
    assert learning_rate(3, TrainConfig(warmup_iters=0, lr_decay_iters=3)) == TrainConfig().min_lr


def test_the_norm_does_not_depend_on_the_sharding():
    """In fp64, the norm of a 50304 x 128 gradient is the same for the full tensor and for 8 shards. In fp32, it has an
    error of 1e-4."""
    grad = torch.randn(50304, 128, generator=torch.Generator().manual_seed(0))
    exact = grad.double().norm().item()
    assert grad_norm([grad]).item() == pytest.approx(exact, rel=1e-12)
    assert grad_norm(list(grad.chunk(8))).item() == pytest.approx(exact, rel=1e-12)
    assert grad_norm([]).item() == 0.0


def test_clipping_matches_torch():
    """Clipped gradients equal those of torch.nn.utils.clip_grad_norm_. A norm below the limit, or the limit 0, changes
    nothing."""
    for limit in (0.5, 100.0):
        grads, params = [torch.randn(5, 5), torch.randn(7)], []
        for grad in grads:
            param = nn.Parameter(torch.zeros_like(grad))
            param.grad = grad.clone()
            params.append(param)
        nn.utils.clip_grad_norm_(params, limit)
        clip_grads(grads, grad_norm(grads), limit)
        for a, b in zip(grads, params, strict=True):
            torch.testing.assert_close(a, b.grad)
    unclipped = torch.randn(4)
    original = unclipped.clone()
    clip_grads([unclipped], grad_norm([unclipped]), 0.0)
    assert torch.equal(unclipped, original)


def test_an_update_matches_the_formula_of_adamw():
    """One step of the configured optimizer matches the formula of AdamW with weight decay."""
    model, config = create_small_model(), TrainConfig(learning_rate=0.1, weight_decay=0.5)
    name = "transformer.h.0.mlp.c_fc.weight"
    param = model.get_parameter(name)
    start = param.detach().clone()
    model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()
    grad = param.grad.clone()
    configure_adamw(model, config).step()
    expected = start * (1 - 0.1 * 0.5) - 0.1 * grad / (grad.abs() + 1e-8 * math.sqrt(1))
    torch.testing.assert_close(param.detach(), expected, atol=1e-6, rtol=1e-4)
