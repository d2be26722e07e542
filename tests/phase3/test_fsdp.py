"""Phase 3: FSDP with every option prints the baseline's losses, keeps and sends what the formula says, and says no."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bench.matrix.cells import PHASES
from bench.sharding.fsdp_options import (
    LIMIT,
    OPTIONS,
    TINY,
    all_rows,
    cells_of,
    covering_array,
    pairs_in,
    possible,
    run_row,
)
from nanoGPT.checkpoint.state import allocate_state
from nanoGPT.checkpoint.writer import NewFiles
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.errors import ConfigError
from nanoGPT.job.out_dir import DirectoryLock
from nanoGPT.job.parse import parse
from nanoGPT.metrics.ledger import Traffic
from nanoGPT.model import GPT, GPTConfig
from nanoGPT.train_config import TrainConfig
from phase3_fsdp.costs import describe_sharding, own_params, padded
from phase3_fsdp.evaluate import EvaluateConfig, evaluate_weights
from phase3_fsdp.fsdp import FsdpConfig, init_device, init_shards, rank_mesh, shard_model, units
from phase3_fsdp.sharded_checkpoint import ShardWriter, load_shards
from tests.helpers.training import ROOT, call_train, gap, tiny, train
from workshop.ranks import RankFailed, run_on_ranks

MEDIUM = GPTConfig(2, 2, 32, 16, False, 80)


def run_all(cells: list[tuple[str, TrainConfig]]) -> None:
    """One run after another on the ranks that are there."""
    for phase, config in cells:
        call_train(phase, config)


@pytest.mark.parametrize("ranks", OPTIONS["ranks"])
def test_every_option_with_every_other(ranks, tmp_path):
    """In each row of a covering array of all options (`make bench-fsdp` also compiles) the losses are the
    baseline's, the traffic is the formula's to the byte, and the state is 16 bytes for each element a rank keeps."""
    rows = {tmp_path / str(i): row for i, row in enumerate(all_rows(quick=True)) if row["ranks"] == ranks}
    starts: dict[int, dict[str, tuple[str, TrainConfig]]] = {}  # one for all rows, and one for the baseline's runs
    for folder, row in rows.items():
        for phase, size, config in cells_of(row, folder, steps=3, model=TINY):
            starts.setdefault(size, {})[config.out_dir] = (PHASES[phase], config)
    for size, cells in starts.items():
        run_on_ranks(run_all, size, list(cells.values()), timeout=220, show=False)
    for folder, row in rows.items():
        found = run_row(row, folder, steps=3, model=TINY)  # which reads what is there
        assert found["gap"] <= LIMIT[found.get("dtype", "float32")], found
        assert found["traffic"] == found["expected"], found
        assert found["state"] == found["expected_state"], found


def test_the_covering_array_covers():
    """Every possible pair of values of any two options is in some row; a row of defaults alone would not do."""
    seen = set().union(*map(pairs_in, covering_array(OPTIONS)))
    names = list(OPTIONS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for x in OPTIONS[a]:
                for y in OPTIONS[b]:
                    if possible({"ranks": 4, "fsdp_shard_size": "1", a: x, b: y}):
                        assert ((a, x), (b, y)) in seen


def sharded(shape: GPTConfig, seed: int = 1, **options) -> tuple[GPT, FsdpConfig]:
    """A sharded model with its initial weights, inside a rank."""
    fields = {name: value for name, value in dataclasses.asdict(shape).items() if name != "gelu"}
    config = FsdpConfig(seed=seed, **{"device": "cpu", **fields, **options})  # type: ignore[arg-type]
    run = create_runtime(config.device, config.dtype)
    with init_device(config, run):
        model = GPT(shape)
    model = shard_model(model, config, run)
    init_shards(model, config, run)
    return model, config


def rows_of_124m(vocab_size: int) -> tuple[list[int], int, int]:
    config = FsdpConfig(device="cpu", n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=vocab_size)
    run = create_runtime(config.device, config.dtype)
    with init_device(config, run):
        model = GPT(GPTConfig(12, 12, 768, 1024, False, vocab_size))
    model = shard_model(model, config, run)
    held = [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)]
    whole = sum(p.numel() for p in model.parameters())
    fsdp_units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return held, whole, sum(padded(m, dist.get_world_size()) for m in fsdp_units)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_state_of_124m(ranks):
    """GPT-2 124M with 50304 rows: each rank keeps P/N of the P parameters, exactly, and so 16P/N bytes of state."""
    for held, whole, gathered in run_on_ranks(rows_of_124m, ranks, 50304, show=False):
        assert sum(held) * ranks == whole == gathered


def test_the_padding_of_50257_rows():
    """50257 rows do not divide by 8: rank 7 keeps 7 fewer rows than the others, and 7 rows more are gathered."""
    found = run_on_ranks(rows_of_124m, 8, 50257, show=False)
    kept = [sum(held) for held, _, _ in found]
    _, whole, gathered = found[0]
    assert kept[:7] == [kept[0]] * 7 and kept[0] - kept[7] == 7 * 768
    assert sum(kept) == whole and gathered - whole == 7 * 768


def weights_by_name(shape: GPTConfig, options: dict) -> dict[str, torch.Tensor]:
    model, _ = sharded(shape, **options)
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (3, {}), (4, {"fsdp_shard_size": "2"}), (8, {}), (2, {"fsdp_cpu_offload": True})]
)
def test_the_weights_do_not_depend_on_ranks(ranks, options):
    """From the meta device, on 1 to 8 ranks, in hybrid shards and offloaded: the baseline's weights to the bit."""
    plain = GPT(MEDIUM)
    plain.init_weights(1)
    for found in run_on_ranks(weights_by_name, ranks, MEDIUM, options, show=False):
        assert found.keys() == dict(plain.named_parameters()).keys()
        assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())


def drawn_by_each_rank() -> list[float]:
    """The tempting way: to_empty, one seed for all, and every rank draws its own slice."""
    config = FsdpConfig(device="cpu")
    run = create_runtime(config.device, config.dtype)
    with torch.device("meta"):
        model = GPT(MEDIUM)
    model = shard_model(model, config, run)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    weight = model.transformer["wte"].weight
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        weight.to_local().normal_(std=0.02)
    return weight.to_local().flatten()[:100].tolist()


def test_one_seed_for_all_ranks_is_a_trap():
    """Seeding every rank alike and drawing slices makes their slices equal: rows 0 to 19 and 20 to 39 are the same."""
    slices = run_on_ranks(drawn_by_each_rank, 4, show=False)
    assert slices[0] == slices[1] == slices[2] == slices[3]


def rows_of_ranks(per_machine: int) -> list[list[int]]:
    config = FsdpConfig(device="cpu", fsdp_shard_size="node")
    return rank_mesh(
        config, dataclasses.replace(create_runtime(config.device, config.dtype), local_world_size=per_machine)
    ).mesh.tolist()


def test_shards_of_one_machine():
    """--fsdp_shard_size=node gives each machine a copy of the model, cut over its own ranks, or says that machines
    differ."""
    assert run_on_ranks(rows_of_ranks, 4, 2) == [[[0, 1], [2, 3]]] * 4
    assert run_on_ranks(rows_of_ranks, 4, 4) == [[0, 1, 2, 3]] * 4
    with pytest.raises(RankFailed, match="machines of 3 ranks do not make 4: use all"):
        run_on_ranks(rows_of_ranks, 4, 3)


def gathered_ahead(ahead: int) -> tuple[list[int], list[int]]:
    """All-gathers so far when each of 5 blocks begins to run, forward and, from the last one, backward."""
    model, _ = sharded(dataclasses.replace(MEDIUM, n_layer=5), n_layer=5, fsdp_prefetch=ahead)
    counts: tuple[list[int], list[int]] = [], []
    with Traffic() as traffic:

        def count(into: list[int]) -> None:
            into.append(traffic.rows["all-gather", 2]["calls"])

        for block in model.blocks:
            block.attn.register_forward_pre_hook(lambda *_: count(counts[0]))
            block.mlp.register_full_backward_pre_hook(lambda *_: count(counts[1]))
        x = torch.zeros(1, 16, dtype=torch.int64)
        model(x, x)[1].backward()
    return counts


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_units_are_gathered_ahead(ahead):
    """With --fsdp_prefetch=n a block begins when the next n are on their way too, forward and backward; with 0 torch
    looks one ahead in the backward."""
    forward = [min(1 + i + ahead, 1 + 5) for i in range(1, 6)]  # the root's is the first, and not gathered again
    backward = [min(6 + i + max(ahead, 1), 6 + 5) for i in range(1, 6)]
    assert run_on_ranks(gathered_ahead, 2, ahead) == [(forward, backward)] * 2


def inside_a_block() -> set[tuple[torch.dtype, bool]]:
    config = FsdpConfig(device="cpu", dtype="bfloat16", n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=80)
    run = create_runtime(config.device, config.dtype)
    with init_device(config, run):
        model = GPT(MEDIUM)
    model = shard_model(model, config, run)
    init_shards(model, config, run)
    seen = set()
    for block in model.blocks:
        block.ln_1.register_forward_hook(
            lambda module, inputs, output: seen.add((output.dtype, torch.is_autocast_enabled("cpu")))
        )
    x = torch.zeros(1, 16, dtype=torch.int64)
    with run.autocast():
        model(x, x)
    return seen


def test_in_bfloat16_nothing_is_cast_twice():
    """FSDP casts parameters as it gathers them, and autocast stays out of it, which would take some modules back to
    fp32."""
    assert run_on_ranks(inside_a_block, 2) == [{(torch.bfloat16, False)}] * 2


def saved_after_a_copy(folder: str) -> list[float]:
    """A weight as it was copied, copied again, and saved; then as it is when it is saved without a copy."""
    model, _ = sharded(MEDIUM)
    optimizer = torch.optim.AdamW(model.parameters())
    allocate_state(optimizer)
    weight, writer = model.transformer["ln_f"].weight, ShardWriter(model, optimizer)
    found = []
    for step, copies in enumerate((True, True, False)):
        with torch.no_grad():
            weight.fill_(step)
            if copies:
                writer.copy()
                weight.fill_(-1)
        writer.write(NewFiles(Path(folder) / str(step)))
        load_shards(Path(folder) / str(step), model, torch.optim.AdamW(model.parameters()))
        found += weight.full_tensor().unique().tolist()
    return found


def test_a_copy_is_written_once(tmp_path):
    """What is saved is the copy that was taken for it, and without one what the model holds."""
    assert run_on_ranks(saved_after_a_copy, 2, str(tmp_path)) == [[0.0, 1.0, 2.0]] * 2


def test_units_by_size():
    """Modules with submodules become units from the leaves up; blocks that are computed again are units or none."""
    model = GPT(GPTConfig(2, 2, 32, 16, False, 80))
    names = {module: name for name, module in model.named_modules()}

    def found(least: int, **options) -> list[str]:
        config = FsdpConfig(n_layer=2, fsdp_wrap="size", fsdp_min_num_params=least, **options)
        return [names[unit] for unit in units(model, config)]

    both = ["attn", "mlp"]
    assert found(4096) == [f"transformer.h.{i}.{part}" for i in range(2) for part in both]
    assert found(8192) == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    assert found(12288) == ["transformer.h.0", "transformer.h.1"]
    assert found(10**6) == []
    again = found(4096, fsdp_activation_checkpointing="every_2")
    assert again == ["transformer.h.0", "transformer.h.1.attn", "transformer.h.1.mlp"]


def described(options: dict, shape: GPTConfig) -> tuple[str, list[int]]:
    model, config = sharded(shape, **options)
    parts = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return describe_sharding(model, config, create_runtime(config.device, config.dtype)), [
        sum(p.numel() for p in own_params(m)) for m in parts
    ]


def test_it_says_what_it_does():
    """At the start a run prints units, this rank's parameters and bytes, and the traffic to expect."""
    said, sizes = run_on_ranks(described, 4, {"gradient_accumulation_steps": 8}, MEDIUM, show=False)[0]
    whole, root = sum(sizes), sizes[0]
    assert sizes == [80 * 32 + 16 * 32 + 32, 12 * 32 * 32 + 64, 12 * 32 * 32 + 64]
    assert f"units of 2 x {sizes[1]:,} parameters, the root's {root:,}" in said
    assert f"rank 0 keeps {whole // 4:,} of {whole:,}" in said
    wide = dataclasses.replace(MEDIUM, n_embd=256)
    said, sizes = run_on_ranks(described, 4, {"gradient_accumulation_steps": 8}, wide, show=False)[0]
    whole, root = sum(sizes), sizes[0]
    gathered, reduced = 4 * 2 * (2 * whole - root), 4 * whole
    assert f"all-gather {gathered / 1e6:,.1f} MB over 4" in said and f"{16 * whole / 4 / 1e6:,.1f} MB of state" in said
    assert f"a rank sends {(gathered + reduced) * 3 / 4 / 1e6:,.1f} MB" in said
    said, _ = run_on_ranks(described, 1, {"use_fsdp": False}, wide, show=False)[0]
    assert f"each of 1 rank(s) keeps {16 * whole / 1e6:,.1f} MB of state" in said


def classes(kernels: str, device: str) -> list[str]:
    model, _ = sharded(MEDIUM, kernels=kernels, device=device)
    return sorted({type(module).__name__ for module in model.modules()})


def test_kernels_are_in_the_sharded_model(device, need_ranks):
    """--kernels=triton replaces forwards although the model is built on the meta device; none replaces nothing."""
    need_ranks(2)
    found = run_on_ranks(classes, 2, "triton", device, show=False, device=device)[0]
    assert {"FSDPKernelGPT", "FSDPKernelBlock", "KernelAttention", "KernelMLP", "KernelLayerNorm"} <= set(found)
    plain = run_on_ranks(classes, 1, "none", device, show=False, device=device)[0]
    assert not [name for name in plain if "Kernel" in name]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fsdp_shard_size": "3"}, "does not divide 4"),
        ({"fsdp_shard_size": "0"}, "does not divide 4"),
        ({"fsdp_shard_size": "-2"}, "does not divide 4"),
        ({"fsdp_shard_size": "host"}, "give --fsdp_shard_size=all, node or 1 or 2 or 4"),
        ({"fsdp_shard_size": "²"}, "does not divide 4"),
        ({"fsdp_min_num_params": 5}, "add --fsdp_wrap=size"),
        ({"fsdp_activation_checkpointing": "every_5"}, "up to every_4"),
        ({"kernels": "fast"}, "give triton, none, or some of attention,"),
        ({"fsdp_activation_checkpointing": "every_0"}, "use none, full, selective, or every_2"),
        ({"fsdp_activation_checkpointing": "some"}, "use none, full, selective, or every_2"),
        ({"fsdp_prefetch": -1}, "give 0 or more"),
        ({"fsdp_min_num_params": 0}, "give 1 or more"),
        ({"kernels": "adamw"}, "does not update slices"),
        ({"kernels": "losss"}, "there is no kernel"),
        ({"optimizer": "muon"}, "use phase 1, or --use_fsdp=False"),
        ({"use_fsdp": False, "fsdp_cpu_offload": True}, "needs FSDP: give --fsdp_cpu_offload=False, or drop"),
        ({"use_fsdp": False, "fsdp_shard_size": "2"}, "needs FSDP"),
        ({"kernels": "attention", "n_embd": 512, "n_head": 2}, "heads of 256 channels"),
    ],
)
def test_wrong_options_are_one_sentence(options, words):
    """An option that cannot be is refused before any rank starts, with what to use."""
    with pytest.raises(ConfigError, match=words):
        FsdpConfig(**options).check(4)


def test_compiled_recomputation_draws_the_same_dropout(tmp_path):
    """Compiled, with dropout: blocks that are computed again have the losses of those that are not."""
    small = {"compile": True, "max_iters": 2, "n_layer": 1}
    plain, again = (
        train("phase3_fsdp", 1, tiny("phase3_fsdp", tmp_path / mode, **small, fsdp_activation_checkpointing=mode))
        for mode in ("none", "full")
    )
    assert gap(plain, again) <= 1e-5


def test_any_checkpoint_is_evaluated_in_shards(tmp_path, capsys):
    """evaluate.py on 4 ranks finds and prints the loss that the baseline logged with its last checkpoint on 2."""
    train("nanoGPT", 2, tiny("nanoGPT", tmp_path, max_iters=5, dropout=0.0))
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
    fields = dataclasses.asdict(tiny("phase3_fsdp", tmp_path, dropout=0.0))
    config = EvaluateConfig(**{**fields, "init_from": "resume"})
    assert run_on_ranks(evaluate_weights, 4, config) == pytest.approx([logged] * 4, abs=1e-6)
    said = re.search(r"validation loss (.+), perplexity (.+), over 96 tokens", capsys.readouterr().out)  # 3 x 2 x 16
    assert said and [float(said[1]), float(said[2])] == pytest.approx([logged, math.exp(logged)], abs=1e-3)
    with pytest.raises(ConfigError, match="has learned nothing"):
        EvaluateConfig(init_from="scratch").check(1)


def evaluate_beside_a_run(config: EvaluateConfig) -> tuple[float, list[str]]:
    """Evaluate while another run holds the lock of the directory; the loss, and the names in the directory after it."""
    lock = DirectoryLock(Path(config.out_dir)) if dist.get_rank() == 0 else None
    dist.barrier()
    loss = evaluate_weights(config)
    dist.barrier()
    if lock:
        lock.close()
    return loss, sorted(str(path) for path in Path(config.out_dir).rglob("*"))


def test_an_evaluation_reads_only(tmp_path):
    """A run of Muon is evaluated while it trains: evaluate.py takes no lock, writes nothing, and makes no optimizer."""
    train("phase1_zero1", 2, tiny("phase1_zero1", tmp_path, max_iters=5, dropout=0.0, optimizer="muon"))
    logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    config = parse(EvaluateConfig, [f"--out_dir={tmp_path}", "--device=cpu"], ROOT / "phase3_fsdp" / "evaluate.py")
    assert config.optimizer == "muon"
    for loss, names in run_on_ranks(evaluate_beside_a_run, 2, config, show=False):
        assert loss == pytest.approx(logged, abs=1e-6) and names == before
