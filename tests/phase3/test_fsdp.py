"""Phase 3: with every option, FSDP prints the baseline's losses. Communication and state match the formula."""

import dataclasses
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bench.matrix.cells import matches_formula, run_cell
from nanoGPT.checkpoint.manifest import Checkpoint, NewFiles
from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.errors import ConfigError
from nanoGPT.files import lock_directory
from nanoGPT.job.parse import parse
from nanoGPT.model import GPT, GPTConfig
from phase3_fsdp.evaluate import EvaluateConfig, evaluate_weights
from phase3_fsdp.fsdp import (
    FsdpConfig,
    allocate_shards,
    create_mesh,
    find_units,
)
from phase3_fsdp.sharded_checkpoint import load_shards, save_shards
from tests.helpers.fsdp_options import MAX_LOSS_DIFFERENCE, make_cells, make_covering_array, make_sharded_model
from tests.helpers.marks import mark_slow
from tests.helpers.training import ROOT, gap, read_metric, tiny, train
from workshop.ranks import RankFailed, run_on_ranks

MEDIUM = GPTConfig(2, 2, 32, 16, False, 80)


@pytest.mark.parametrize("ranks", [4, *mark_slow(1, 2, 8)])
def test_every_option_with_every_other(ranks, tmp_path):
    """In each row of a covering array of all options, losses match the baseline's.

    Communication matches the formula exactly. The state is 16 bytes for each element that a rank stores.
    """
    rows = {tmp_path / str(i): row for i, row in enumerate(make_covering_array()) if row["ranks"] == ranks}
    for folder, row in rows.items():
        reference, result = (run_cell(*cell) for cell in make_cells(row, folder))  # reads the results of these runs
        assert result.max_loss_difference(reference) <= MAX_LOSS_DIFFERENCE[row["dtype"]], row
        assert matches_formula(result.ledger), row


def gather_weights_by_name(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, _ = make_sharded_model(MEDIUM, **options)
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (3, {}), (4, {"fsdp_shard_size": "2"}), (8, {}), (2, {"fsdp_cpu_offload": True})],
)
def test_the_weights_do_not_depend_on_ranks(ranks, options):
    """Weights from the meta device are identical to the baseline's: on 1 to 8 ranks, in hybrid shards, and
    offloaded."""
    plain = GPT(MEDIUM)
    plain.init_weights(FsdpConfig.seed)
    for weights in run_on_ranks(gather_weights_by_name, ranks, options, show=False):
        assert weights.keys() == dict(plain.named_parameters()).keys()
        assert all(torch.equal(weights[name], param) for name, param in plain.named_parameters())


def create_node_mesh(*ranks_on_node: int) -> list[list[int]] | str:
    """Return the ranks of the mesh, or the error message.

    Args:
        ranks_on_node: for each rank, the number of ranks on its node.
    """
    config = FsdpConfig(device="cpu", fsdp_shard_size="node")
    run = create_runtime(config.device, config.dtype)
    run = dataclasses.replace(run, local_world_size=ranks_on_node[run.rank])
    try:
        return create_mesh(config, run).mesh.tolist()
    except ConfigError as error:
        return str(error)


def test_shards_within_one_node():
    """--fsdp_shard_size=node stores a copy of the model on each node, sharded over its ranks.

    If nodes have different numbers of ranks, an error states it.
    """
    assert run_on_ranks(create_node_mesh, 4, 2, 2, 2, 2, show=False) == [[[0, 1], [2, 3]]] * 4
    assert run_on_ranks(create_node_mesh, 4, 4, 4, 4, 4, show=False) == [[0, 1, 2, 3]] * 4
    for message in run_on_ranks(create_node_mesh, 4, 2, 2, 1, 1, show=False):
        assert "the nodes have 1 and 2: use --fsdp_shard_size=all" in message


def record_types_in_blocks() -> set[tuple[torch.dtype, bool]]:
    """Return the type of a block's activations, and whether autocast is enabled, for each block."""
    model, config = make_sharded_model(MEDIUM, dtype="bfloat16")
    types = set()
    for block in model.blocks:
        block.ln_1.register_forward_hook(
            lambda module, inputs, output: types.add((output.dtype, torch.is_autocast_enabled("cpu")))
        )
    x = torch.zeros(1, 16, dtype=torch.int64)
    run = create_runtime(config.device, config.dtype)
    with dataclasses.replace(run, uses_autocast=config.uses_autocast).autocast():
        model(x, x)
    return types


def test_fsdp_alone_casts_to_bfloat16():
    """FSDP casts parameters when it all-gathers them. Autocast is off, because it would cast some results to fp32."""
    assert run_on_ranks(record_types_in_blocks, 2, show=False) == [{(torch.bfloat16, False)}] * 2


class ScaledGPT(GPT):
    """A GPT that multiplies its features by a table, which is in no checkpoint, as rotary embeddings have it."""

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__(shape)
        self.register_buffer("table", 0.5 + torch.arange(shape.n_embd) / 16, persistent=False)

    def compute_features(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().compute_features(*args, **kwargs) * self.table


def compute_loss_with_buffer() -> list[float]:
    """Return the loss of a model with a buffer: sharded, and not sharded."""
    sharded, config = make_sharded_model(MEDIUM, ScaledGPT)
    plain, tokens = ScaledGPT(MEDIUM), torch.arange(16)[None]
    plain.init_weights(config.seed)
    return [model(tokens, tokens).item() for model in (sharded, plain)]


def test_buffers_have_their_values():
    """A sharded model has the buffers of the model that is not sharded. A buffer without values is refused."""
    for sharded, plain in run_on_ranks(compute_loss_with_buffer, 2, show=False):
        assert sharded == pytest.approx(plain, abs=1e-6)
    with torch.device("meta"):
        model = ScaledGPT(MEDIUM)
    with pytest.raises(ConfigError, match="the buffer table has no values"):
        allocate_shards(model, torch.device("cpu"))


def load_other_models() -> list[str]:
    """Save the shards of a model, and load them into other models. Return the errors."""
    errors = []
    with tempfile.TemporaryDirectory() as own_folder:
        folder = Path(create_runtime("cpu", "float32").gather(own_folder)[0])
        model, _ = make_sharded_model(dataclasses.replace(MEDIUM, bias=True))
        save_shards(NewFiles(folder), model, torch.optim.AdamW(model.parameters()))
        for changes in ({"vocab_size": 64}, {"bias": False}, {"n_layer": 3}):
            other, _ = make_sharded_model(dataclasses.replace(MEDIUM, **{"bias": True, **changes}))
            with pytest.raises(ConfigError) as failure:
                load_shards(Checkpoint(folder, {"phase": "fsdp"}), other, torch.optim.AdamW(other.parameters()))
            errors.append(str(failure.value))
        dist.barrier()  # the directory is deleted now
    return errors


def test_shards_of_another_model_are_refused():
    """If a parameter of the checkpoint or of the model is missing or has another shape, no part of it is loaded."""
    for fewer, no_bias, deeper in run_on_ranks(load_other_models, 2, show=False):
        assert "such as transformer.wte.weight: its shape is (80, 32) in the checkpoint, and (64, 32)" in fewer
        assert "differ in 13 parameters" in no_bias and "and missing in the model" in no_bias
        assert "differ in 12 parameters" in deeper and "is missing in the checkpoint" in deeper


def test_units_by_size():
    """With --fsdp_wrap=NUMBER, modules with submodules become units from the leaves up; a recomputed block is whole."""
    model = GPT(GPTConfig(2, 2, 32, 16, False, 80))
    names = {module: name for name, module in model.named_modules()}

    def find_names(min_num_params: float, **options) -> list[str]:
        config = FsdpConfig(n_layer=2, fsdp_wrap=str(min_num_params), **options)
        return [names[unit] for unit in find_units(model, config)]

    parts = ["attn", "mlp"]
    assert find_names(4096) == [f"transformer.h.{i}.{part}" for i in range(2) for part in parts]
    assert find_names(8192) == ["transformer.h.0.mlp", "transformer.h.1.mlp"]
    assert find_names(12288) == ["transformer.h.0", "transformer.h.1"]
    assert find_names(1e6) == []
    with_checkpointing = find_names(4096, fsdp_activation_checkpointing="every_2")
    assert with_checkpointing == ["transformer.h.0", "transformer.h.1.attn", "transformer.h.1.mlp"]


def list_module_classes(device: str) -> list[set[str]]:
    """Return the names of the classes of all modules, with kernels and without."""
    models = [make_sharded_model(MEDIUM, kernels=kernels, device=device)[0] for kernels in ("triton", "none")]
    return [{type(module).__name__ for module in model.modules()} for model in models]


def test_kernels_are_in_the_sharded_model(device, need_ranks):
    """--kernels=triton replaces modules, although the model is created on the meta device. --kernels=none does not."""
    need_ranks(2)
    class_names, plain_class_names = run_on_ranks(list_module_classes, 2, device, show=False, device=device)[0]
    assert {"FSDPKernelGPT", "FSDPKernelBlock", "KernelAttention", "KernelMLP", "KernelLayerNorm"} <= class_names
    assert not [name for name in plain_class_names if "Kernel" in name]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fsdp_shard_size": "3"}, "does not divide 4"),
        ({"fsdp_wrap": "0"}, "use block, or a number of parameters"),
        ({"fsdp_activation_checkpointing": "every_5"}, "up to every_4"),
        ({"kernels": "adamw"}, "does not update shards"),
        ({"kernels": "attention", "n_embd": 512, "n_head": 2}, "heads of 256 channels"),
    ],
)
def test_wrong_options_are_one_sentence(options, words):
    """An invalid option is refused before any rank starts, with one sentence that states what to use."""
    with pytest.raises(ConfigError, match=words):
        FsdpConfig(**options).check(4)


@pytest.mark.slow
def test_compiled_recomputation_draws_the_same_dropout(tmp_path, device):
    """With compilation and dropout, recomputed blocks give the losses of blocks that are not recomputed."""
    small = {"compile": True, "max_iters": 2, "n_layer": 1, "device": device}
    plain, recomputed = (
        train("phase3_fsdp", 1, tiny("phase3_fsdp", tmp_path / mode, **small, fsdp_activation_checkpointing=mode))
        for mode in ("none", "full")
    )
    assert gap(plain, recomputed) <= 1e-5


def evaluate_each(configs: list[EvaluateConfig]) -> list[float]:
    return [evaluate_weights(config) for config in configs]


def test_evaluate_reads_checkpoints_of_other_phases(tmp_path, capsys):
    """evaluate.py on 3 ranks, which cannot share the 4 micro-batches, prints the loss that phase 1 logged on 2 ranks.

    While another run has locked the directory, it takes no lock, writes nothing, and creates no optimizer.
    """
    fields = {"max_iters": 2, "eval_iters": 3, "gradient_accumulation_steps": 4, "dropout": 0.0, "optimizer": "muon"}
    train("phase1_zero1", 2, tiny("phase1_zero1", tmp_path, **fields))
    logged = read_metric(tmp_path, "val_loss")[2]
    config = parse(EvaluateConfig, [f"--out_dir={tmp_path}", "--device=cpu"], ROOT / "phase3_fsdp" / "evaluate.py")
    assert config.optimizer == "muon"
    lock, before = lock_directory(tmp_path), {*tmp_path.rglob("*")}
    assert run_on_ranks(evaluate_weights, 3, config) == pytest.approx([logged] * 3, abs=1e-6)
    assert {*tmp_path.rglob("*")} == before
    lock.close()
    pattern = r"validation loss (.+), perplexity (.+), over 96 tokens"  # 3 x 2 x 16
    match = re.search(pattern, capsys.readouterr().out)
    assert match and [float(match[1]), float(match[2])] == pytest.approx([logged, math.exp(logged)], abs=1e-3)
    with pytest.raises(RankFailed, match="--block_size=32, but step-00000002 was trained with block_size=16: remove"):
        run_on_ranks(evaluate_each, 1, [dataclasses.replace(config, block_size=size) for size in (8, 32)])
    assert "over 48 tokens" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="has no trained weights"):
        EvaluateConfig(init_from="scratch").check(1)
