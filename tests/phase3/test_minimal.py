"""`phase3_fsdp/minimal.py`, the FSDP recipe in torch alone: on a Llama, and as a program."""

import itertools
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from nanoGPT.errors import ConfigError
from nanoGPT.options.llama import Llama, LlamaConfig
from phase3_fsdp import minimal
from tests.helpers.programs import Program
from tests.helpers.training import TINY, gap, tiny, train
from workshop.ranks import run_on_ranks

V, C, T, HEADS = 61, 24, 10, 3  # sizes that 2 ranks cannot divide evenly: vocabulary, channels, tokens, heads


class OddLlama(Llama):
    """A Llama with a tied head, a parameter that is not contiguous, and two buffers, one of them not persistent."""

    def __init__(self) -> None:
        super().__init__(LlamaConfig(3, HEADS, C, T, V, tie_embeddings=True))
        self.register_buffer("shift", torch.linspace(0, 1, V))
        self.register_buffer("scale", torch.linspace(0.5, 2, C), persistent=False)
        self.model["norm"].weight = nn.Parameter(torch.ones(2 * C)[::2])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.compute_features(tokens)
        logits = self.compute_logits(x * self.scale.to(x.dtype)) + self.shift
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def fill(name: str, full: Tensor) -> None:
    """Draw a parameter from a generator that depends on its name only."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    full.copy_(
        1 + 0.1 * torch.randn(full.shape, generator=generator)
        if "norm" in name
        else torch.randn(full.shape, generator=generator) / math.sqrt(C)
    )


def batches_of(step: int, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's part of the 4 micro-batches of a step, each with 3 sequences."""
    starts = torch.randint(V, (4, 3, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + 7 * torch.arange(T + 1)) % V  # each token follows from the one before
    return [(each[:, :-1], each[:, 1:]) for each in tokens[rank::ranks]]


def build(dtype: torch.dtype = torch.float32) -> tuple[minimal.FSDPModule, torch.optim.Optimizer]:
    model = minimal.build_sharded_model(OddLlama, lambda llama: llama.blocks, fill, minimal.join_ranks(), dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_llama(first: int, last: int, model, optimizer) -> list[tuple[float, float]]:
    steps = range(first, last)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [minimal.train_step(model, optimizer, batches_of(step, rank, ranks), 0.5) for step in steps]


def exercise_recipe(folder: str) -> dict:
    """Train 3 + 3 steps, save in the middle, and train the last 3 steps again after a resume. Runs on every rank."""
    model, optimizer = build()
    shards = {name: (p.shape, p.to_local().numel(), p.dtype) for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    history = train_llama(0, 3, model, optimizer)
    minimal.save(folder, model, optimizer, 3)
    history += train_llama(3, 6, model, optimizer)
    resumed, resumed_optimizer = build()
    step = minimal.load(folder, resumed, resumed_optimizer)
    again = train_llama(step, 6, resumed, resumed_optimizer)
    in_bf16 = train_llama(0, 1, *build(torch.bfloat16))
    return {"shards": shards, "buffers": buffers, "history": history, "again": again, "bf16": in_bf16, "step": step}


def train_unsharded() -> list[tuple[float, float]]:
    """Train the same model in one process, without FSDP."""
    model = OddLlama()
    with torch.no_grad():
        for name, param in model.named_parameters():
            fill(name, param)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for step in range(6):
        losses = [model(*batch) for batch in batches_of(step, 0, 1)]
        sum(loss / 4 for loss in losses).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        optimizer.zero_grad()
        history.append((sum(loss.item() for loss in losses) / 4, norm))
    return history


def max_difference(history: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    return max(
        abs(a - b) for row, other_row in zip(history, other, strict=True) for a, b in zip(row, other_row, strict=True)
    )


def test_any_module_trains_sharded_and_resumes_exactly(tmp_path):
    """A Llama on 2 ranks has the losses and norms of an unsharded run, and resumes exactly.

    Each rank stores half of the rows of each parameter. All buffers, also non-persistent ones, have their values.
    """
    results = run_on_ranks(exercise_recipe, 2, str(tmp_path / "checkpoint"))
    expected = train_unsharded()
    for rank, result in enumerate(results):
        assert max_difference(result["history"], expected) < 2e-6
        assert result["again"] == result["history"][3:] and result["step"] == 3
        assert 0 < max_difference(result["bf16"], expected[:1]) < 0.05
        for name, (shape, elements, dtype) in result["shards"].items():
            rows = min(-(-shape[0] // 2) * (rank + 1), shape[0]) - -(-shape[0] // 2) * rank
            assert elements == rows * shape.numel() // shape[0] and dtype == torch.float32, name
        true_buffers = dict(OddLlama().named_buffers())
        assert result["buffers"].keys() == true_buffers.keys()
        assert all(torch.equal(buffer, true_buffers[name]) for name, buffer in result["buffers"].items())
    assert expected[-1][0] < expected[0][0] - 0.3, "the model does not learn"


class Branches(nn.Module):
    """A model whose parameters get gradients at different times: `late` only with a flag, `unused` never."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.late, self.unused = (nn.Linear(5, 5) for _ in range(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor, uses_late: bool) -> Tensor:
        y = self.frozen(torch.tanh(self.used(x)))
        return (self.late(y) if uses_late else y).square().mean()


def create_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return a torch optimizer with two parameter groups. `Muon` has the matrices only."""
    name, _, options = kind.partition(" ")
    groups = [{"params": [p for n, p in model.named_parameters() if n.endswith(end)]} for end in ("weight", "bias")]
    groups = groups[: 1 if name == "Muon" else 2]
    groups[-1]["weight_decay"] = 0.3
    return getattr(torch.optim, name)(groups, **({"lr": 0.1} | eval(f"dict({options})")))


OPTIMIZERS = ["AdamW fused=True", "Adam lr=torch.tensor(0.1)", "SGD momentum=0.9", "NAdam", "Adagrad", "ASGD", "Muon"]


class Branched:
    """A model with its optimizer, which trains one step per call."""

    def __init__(self, kind: str) -> None:
        self.model = minimal.build_sharded_model(Branches, lambda _: [], fill, minimal.join_ranks())
        self.optimizer = create_optimizer(kind, self.model)

    def train(self, first: int, last: int = 3) -> dict[str, Tensor]:
        """Train some steps, and return the parameters. `late` has gradients from step 1, `frozen` from step 2."""
        for step in range(first, last):
            self.model.frozen.requires_grad_(step >= 2)
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))  # the same on every rank
            minimal.train_step(self.model, self.optimizer, [(x, step >= 1)], 1.0)
            self.model.zero_grad()  # also of the biases, which Muon does not have
        return {name: param.full_tensor() for name, param in self.model.named_parameters()}


def save_before_each_step(folder: str) -> dict[str, dict[str, Tensor]]:
    """Train and save with each optimizer, and check that a save changes no parameter. Runs on every rank."""
    results = {}
    for kind in OPTIMIZERS:
        saved = Branched(kind)
        for step in range(3):
            minimal.save(f"{folder}/{kind}-{step}", saved.model, saved.optimizer, step)
            results[kind] = saved.train(step, step + 1)
        for name, param in Branched(kind).train(0).items():
            assert torch.equal(param, results[kind][name]), (kind, name, "a save has changed the training")
    return results


def resume_from_each_step(kinds: list[str], folder: str, expected: dict, tolerance: float) -> None:
    """Load each checkpoint into an optimizer that has state, and train the remaining steps. Runs on every rank."""
    for kind in kinds:
        resumed = Branched(kind)
        resumed.train(2)
        groups = [*resumed.optimizer.param_groups]
        for step in (2, 0, 1):
            groups[0]["weight_decay"] = 0.2
            assert minimal.load(f"{folder}/{kind}-{step}", resumed.model, resumed.optimizer) == step
            for name, param in resumed.train(step).items():
                assert (param - expected[kind][name]).abs().max() <= tolerance, (kind, step, name)
        assert all(a is b for a, b in zip(groups, resumed.optimizer.param_groups, strict=True))


def test_every_optimizer_resumes_at_every_step(tmp_path):
    """A save changes nothing, and a load restores exactly the state that existed, on any number of ranks."""
    expected = run_on_ranks(save_before_each_step, 2, str(tmp_path))[0]
    run_on_ranks(resume_from_each_step, 2, OPTIMIZERS, str(tmp_path), expected, 0.0)
    run_on_ranks(resume_from_each_step, 3, OPTIMIZERS[:2], str(tmp_path), expected, 1e-5)


def halve_rate(optimizer: torch.optim.Optimizer, epoch: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch, last_epoch=epoch - 1)


def resume_schedulers(folder: str) -> None:
    """Save with and without a scheduler, and create the scheduler before or after the load. Runs on one rank."""
    kinds = ("AdamW lr=0.1", "AdamW lr=torch.tensor(0.1)")
    for kind, is_saved, is_created_first in itertools.product(kinds, (True, False), (True, False)):
        case, epoch = (kind, is_saved, is_created_first), 2 * is_saved
        saved, resumed = Branched(kind), Branched(kind)
        if is_saved:
            halve_rate(saved.optimizer, 0)
            halve_rate(saved.optimizer, epoch)
        minimal.save(f"{folder}/{case}", saved.model, saved.optimizer, epoch)
        early = halve_rate(resumed.optimizer, 0) if is_created_first else None
        minimal.load(f"{folder}/{case}", resumed.model, resumed.optimizer)
        scheduler = early or halve_rate(resumed.optimizer, epoch)
        scheduler.last_epoch = epoch
        scheduler.step()
        for group in resumed.optimizer.param_groups:
            assert isinstance(group["lr"], Tensor) == ("tensor" in kind), case
            assert (float(group["lr"]), float(group["initial_lr"])) == pytest.approx((0.1 * 0.5 ** (epoch + 1), 0.1)), (
                case
            )


class Untied(OddLlama):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = nn.Parameter(torch.zeros(V, C))


class Wider(OddLlama):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].mlp.up_proj = nn.Linear(C, 65, bias=False)
        self.register_buffer("shift", torch.zeros(V, 1))


def refuse_other_models(folder: str) -> None:
    """Load a checkpoint into models and parameter groups that differ. Runs on one rank."""
    minimal.save(folder, *build(), 0)
    for other, differ in ((Untied, "lm_head.weight"), (Wider, "model.layers.1.mlp.up_proj.weight, shift")):
        model = minimal.build_sharded_model(other, lambda llama: llama.blocks, fill, minimal.join_ranks())
        with pytest.raises(ValueError, match=f"differ in the names or shapes of {differ}$"):
            minimal.load(folder, model, torch.optim.AdamW(model.parameters()))
    saved, other = Branched("SGD"), Branched("SGD")
    minimal.save(f"{folder}-groups", saved.model, saved.optimizer, 0)
    with pytest.raises(ValueError, match="different saved values of weight_decay: use the saved groups"):
        minimal.load(f"{folder}-groups", saved.model, torch.optim.SGD(saved.model.parameters()))
    split = torch.optim.SGD([{"params": [param]} for param in other.model.parameters()], lr=0.2)
    minimal.load(f"{folder}-groups", other.model, split)
    assert [(group["lr"], group["weight_decay"]) for group in split.param_groups] == [(0.1, 0), (0.1, 0.3)] * 4


class WithoutElements(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty, self.lazy = nn.Linear(0, 3, bias=False), nn.LazyLinear(2)


class DerivedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("copy", self.linear.weight.detach().clone())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (WithoutElements, "give empty.weight, lazy.weight, lazy.bias a size"),
        (DerivedBuffer, "compute the buffers copy without parameters"),
        (lambda: nn.Linear(3, 3, dtype=torch.complex64), "store weight, bias as real and imaginary parts"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_by_name(build, words):
    """Parameters without elements, lazy and complex ones, and buffers that are computed from parameters are refused."""
    with pytest.raises(ValueError, match=words):
        minimal.build_sharded_model(build, lambda _: [], fill, torch.device("cpu"))


def build_with_attributes() -> list[Any]:
    """Return the attribute `group` of each parameter of a sharded model."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        model[0].weight.group = model[1].bias.group = "small"
        return model

    model = minimal.build_sharded_model(build, lambda _: [], fill, torch.device("cpu"))
    return [getattr(param, "group", None) for param in model.parameters()]


def test_parameters_keep_their_attributes():
    """The shards of a model have the attributes that its parameters had."""
    assert run_on_ranks(build_with_attributes, 2, show=False) == [["small", None, None, "small"]] * 2


def test_schedulers_resume_and_other_models_are_refused(tmp_path):
    """A scheduler resumes with the saved rates, whenever it is created. Other parameters are refused by name."""
    run_on_ranks(resume_schedulers, 1, str(tmp_path / "schedulers"))
    run_on_ranks(refuse_other_models, 1, str(tmp_path / "other"))


def read_losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)  loss (\S+)", output, re.MULTILINE)}


def test_the_programs_print_the_losses_of_the_baseline(tmp_path):
    """torchrun starts `minimal.py` and `naive.py` on 2 ranks, and both print the losses of the baseline on one rank.

    `minimal.py` also saves and resumes.
    """
    fields = {"decay_lr": False, "dropout": 0.0, "max_iters": 3, "eval_interval": 3}
    fields |= {"gradient_accumulation_steps": 4}
    default = {"block_size": 64, "batch_size": 4, "n_layer": 4, "n_head": 4, "n_embd": 128, "learning_rate": 4e-3}
    baseline = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "run", **{**TINY, **fields, **default}))
    torchrun = partial(Program, "torch.distributed.run", "--standalone", "--nproc_per_node=2", OMP_NUM_THREADS="1")
    outputs = []
    for words in (
        ["-m", "phase3_fsdp.minimal", "--max_iters=2", f"--save_to={tmp_path / 'saved'}"],
        ["-m", "phase3_fsdp.minimal", "--max_iters=3", f"--resume_from={tmp_path / 'saved'}"],
        ["-m", "phase1_zero1.naive", "--max_iters=3"],
        ["-m", "phase3_fsdp.by_hand", "--max_iters=3"],
    ):
        program = torchrun(*words, "--micro_batches=4")
        program.wait()
        outputs.append(program.output())
    first, resumed, *others = outputs
    assert gap(read_losses(first) | read_losses(resumed), baseline) < 1e-5, outputs
    assert list(read_losses(resumed)) == [2], outputs
    assert all(gap(read_losses(output), baseline) < 1e-5 for output in others), outputs
    owned = [int(text.replace(",", "")) for text in re.findall(r"owns ([\d,]+) of 805,376", others[0])]
    assert len(owned) == 2 and sum(owned) == 805_376 and max(owned) < 0.51 * 805_376


def test_wrong_starts_are_refused(monkeypatch):
    """A start without torchrun, and micro-batches that the ranks cannot share, are one error."""
    monkeypatch.delenv("RANK", raising=False)
    for value in ("", "2"):
        monkeypatch.setenv("WORLD_SIZE", value)
        with pytest.raises(ConfigError, match="start it with torchrun"):
            minimal.main()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="micro_batches=3 cannot be divided by 2 ranks: use a multiple of 2"):
        minimal.main(micro_batches=3)
    with pytest.raises(ConfigError, match="--resume_from=nowhere has no .metadata"):
        minimal.main(resume_from="nowhere")
    with pytest.raises(FileExistsError, match="is a file or has a checkpoint: choose a new directory"):
        minimal.main(save_to=__file__)


def save_checkpointed_blocks(folder: str) -> list[float]:
    """Save a model with wrapped blocks, and load it without them. Return the weights, and norms of repeated steps."""

    def build(value: float, is_wrapped: bool) -> nn.Module:
        def make() -> nn.Module:
            block = nn.Linear(2, 2, bias=False)
            return nn.Sequential(
                checkpoint_wrapper(block) if is_wrapped else block, nn.Linear(2, 1), nn.Flatten(0), Mean()
            )

        units = lambda model: [model[0]]  # noqa: E731
        return minimal.build_sharded_model(make, units, lambda _, full: full.fill_(value), torch.device("cpu"))

    minimal.join_ranks()
    saved, loaded = build(1.0, True), build(7.0, False)
    optimizer = torch.optim.SGD(saved[1].parameters(), lr=0.0)
    batch = [(torch.ones(1, 2),)]
    norms = [minimal.train_step(saved, optimizer, batch, 1e9)[1] for _ in range(2)]
    minimal.save(folder, saved, optimizer, 0)
    minimal.load(folder, loaded, torch.optim.SGD(loaded[1].parameters(), lr=0.0))
    optimizer.state[saved[1].weight]["nested"] = [1]
    with pytest.raises(ValueError, match="optimizer.1.weight.nested is nested"):
        minimal.save(folder, saved, optimizer, 0)
    return [loaded[0].weight.full_tensor().mean().item(), *norms]


class NoisyLayers(nn.Module):
    """Two layers, of which each forward pass uses one, and a buffer with random values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))
        self.register_buffer("noise", torch.randn(2))
        self.register_buffer("transposed", torch.randn(2, 3).t())
        self.register_buffer("counts", torch.tensor([-1, 2], dtype=torch.int16))  # gloo does not support this dtype

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return (self.layers[branch](x) + self.noise).mean()


def build_tied_layers() -> nn.Module:
    """Return two layers that share a parameter."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


class LayerWithScale(nn.Linear):
    """A layer with state that is not a tensor, such as the scales of a layer in fp8."""

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 1.0}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def use_ranks_differently(folder: str) -> None:
    """Let the ranks differ, or leave something out, in each way that would train or save wrong values."""
    rank, device = dist.get_rank(), minimal.join_ranks()
    torch.manual_seed(rank)

    def make(fill=lambda _, full: full.fill_(1.0), build=NoisyLayers) -> nn.Module:
        return minimal.build_sharded_model(build, lambda _: [], fill, device)

    def batches(branch: int, count: int = 1) -> list[tuple[Tensor, ...]]:
        return [(torch.ones(3, 2), torch.tensor(branch))] * count

    with pytest.raises(ValueError, match="`fill` has not written all values of layers.0.bias"):
        make(lambda name, full: full.fill_(1.0) if "weight" in name else None)
    with pytest.raises(ValueError, match="two units share a parameter"):
        minimal.build_sharded_model(build_tied_layers, list, lambda _, full: full.fill_(1.0), device)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noises = [torch.empty(2) for _ in range(2)]
    dist.all_gather(noises, model.noise)
    assert torch.equal(*noises)
    first, second = (minimal.train_step(model, optimizer, batches(0), 0)[0] for _ in range(2))
    assert first > second
    model.noise += rank
    minimal.save(folder, model, optimizer, 2)
    assert torch.equal(model.noise, noises[0])
    with pytest.raises(FileExistsError, match="has a checkpoint: choose a new directory"):
        minimal.save(folder, model, optimizer, 3)
    with pytest.raises(TypeError, match="the model that build_sharded_model has returned"):
        minimal.train_step(torch.compile(model), optimizer, batches(0), 0)
    with pytest.raises(ValueError, match="the optimizer has a parameter that is not in the model"):
        minimal.train_step(model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), batches(0), 0)
    with torch.no_grad():
        before = model(*batches(0)[0])
        for param in model.parameters():
            param.zero_()  # of the shards, after an evaluation
        assert model(*batches(0)[0]) == model.noise.mean() != before
    scaled = make(build=lambda: LayerWithScale(2, 2))
    with pytest.raises(ValueError, match="_extra_state would not be saved: store this state in buffers"):
        minimal.save(f"{folder}-scaled", scaled, torch.optim.SGD(scaled.parameters(), lr=0.1), 0)
    low = make(build=lambda: NoisyLayers().bfloat16())
    assert {param.dtype for param in low.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="different numbers of micro-batches"):
        minimal.train_step(model, optimizer, batches(0, count=1 + rank), 0)
    with pytest.raises(ValueError, match="different parameters with a gradient"):
        minimal.train_step(model, optimizer, batches(rank), 0)


def test_ranks_that_differ_are_refused(tmp_path):
    """Ranks with other micro-batches or other gradients, values that are left out, a shared parameter, state that
    is not saved, and a second save into a directory are one error. Random buffers are equal on all ranks, and
    `max_norm=0` does not clip."""
    run_on_ranks(use_ranks_differently, 2, str(tmp_path / "saved"))


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def test_checkpointed_blocks_are_saved(tmp_path):
    """A block with activation checkpointing is saved under the name that it has without. Gradients that the optimizer
    does not have are cleared in each step, and a state that cannot be saved is refused."""
    for weight, first, second in run_on_ranks(save_checkpointed_blocks, 2, str(tmp_path / "saved")):
        assert weight == 1.0 and first == second
