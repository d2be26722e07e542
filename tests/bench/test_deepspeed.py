"""The JSON that makes DeepSpeed train as our trainers do."""

import dataclasses
import json

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bench.tables.deepspeed_tables import EXAMPLES, changed_keys
from bench.trainer.deepspeed_config import build_deepspeed_config, count_block_parameters
from bench.trainer.deepspeed_rank import live_storages
from nanoGPT.errors import ConfigError
from nanoGPT.model import Block, GPTConfig
from nanoGPT.train_config import TrainConfig
from phase1_zero1.parallelize import Zero1Config
from phase3_fsdp.fsdp import FsdpConfig

CLASSES = {"phase1": Zero1Config, "phase3": FsdpConfig}


def test_every_flag_of_sharding_has_a_key_or_a_reason():
    """The table has each flag that only phase 1 or 3 has, and a row without a key says what to do instead."""
    for phase, config_class in CLASSES.items():
        names = {each.name for each in dataclasses.fields(config_class)}
        names -= {each.name for each in dataclasses.fields(TrainConfig)}
        assert names <= {name for row_phase, flags, _ in EXAMPLES if row_phase == phase for name in flags}
    assert all(note or changed_keys(phase, flags) for phase, flags, note in EXAMPLES)


def test_values_have_the_units_of_deepspeed():
    """Micro-batches are per rank, buckets and prefetching in elements, and replicas select the stage."""
    zero1 = Zero1Config(dtype="float32", gradient_accumulation_steps=8, zero1_bucket_mb=4.0)
    result = build_deepspeed_config(zero1, 2)
    assert (result["gradient_accumulation_steps"], result["zero_optimization"]["reduce_bucket_size"]) == (4, 1 << 20)
    assert build_deepspeed_config(zero1, 2, defaults=True)["zero_optimization"] == {"stage": 1}
    assert build_deepspeed_config(TrainConfig(dtype="float32"), 2)["zero_optimization"] == {"stage": 0}
    for size, expected in (("all", None), ("node", 2), ("2", 2)):
        fsdp = FsdpConfig(dtype="float32", fsdp_shard_size=size)
        zero = build_deepspeed_config(fsdp, 4, ranks_per_node=2)["zero_optimization"]
        assert (zero["stage"], zero.get("zero_hpz_partition_size")) == (3, expected)
    for bias in (False, True):
        block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, bias=bias, vocab_size=5))
        config = TrainConfig(n_embd=8, bias=bias)
        assert count_block_parameters(config) == sum(p.numel() for p in block.parameters())
    for bad in (Zero1Config(dtype="auto"), Zero1Config(dtype="float32", gradient_accumulation_steps=3)):
        with pytest.raises(ConfigError, match="use"):
            build_deepspeed_config(bad, 2)


def test_live_storages_count_gradients_and_views_once():
    """A view of a tensor adds nothing, a gradient counts, and a fake tensor, which has no memory, does not."""
    with FakeTensorMode():
        fake = torch.zeros(1000)
    before = live_storages()
    weight = torch.zeros(1000, requires_grad=True)
    view = weight.detach()[:10]
    (weight * 2).sum().backward()
    new = [size for key, size in live_storages().items() if key not in before]
    assert view.numel() == 10 and fake.numel() == 1000 and sorted(new) == [4000, 4000]


def test_deepspeed_accepts_every_example():
    """DeepSpeed's own configuration reads each JSON of the table, and has its values."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: see bench/trainer/against_deepspeed.py")
    from deepspeed.runtime.config import DeepSpeedConfig

    for phase, flags, _ in EXAMPLES:
        config = CLASSES[phase](**{"dtype": "float32", **flags})
        ours = json.loads(json.dumps(build_deepspeed_config(config, world_size=8, ranks_per_node=4)))
        theirs = DeepSpeedConfig(ours)
        assert theirs.gradient_clipping == ours["gradient_clipping"]
        assert theirs.gradient_accumulation_steps == ours["gradient_accumulation_steps"]
        assert theirs.torch_autocast_enabled == ("torch_autocast" in ours)
        zero = theirs.zero_config.model_dump(by_alias=True, mode="json")
        for key, value in ours["zero_optimization"].items():
            assert value.items() <= zero[key].items() if isinstance(value, dict) else zero[key] == value, key
