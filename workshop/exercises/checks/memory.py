"""Checks of the exercises on the planner's formulas: each prediction is compared with a measurement."""

import dataclasses
from collections import Counter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

from nanoGPT.distributed.runtime import create_runtime
from nanoGPT.memory.costs import storage_bytes
from nanoGPT.metrics.ledger import CollectiveCounter
from nanoGPT.model import GPT, GPTConfig, KVCache
from phase1_zero1.zero1 import Zero1Optimizer
from phase1_zero1.zero2 import Zero2Optimizer
from phase3_fsdp import activation_bytes as activations
from phase3_fsdp.solve.costs import SPREADS, ModelSize, measure_gpt, predict
from workshop.exercises.checks.fsdp import SHAPE, build_sharded, make_config, measure_saved_bytes, run_micro_batches
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import collect_traffic, is_close

KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def check_count(answer: ModuleType, _: Any) -> None:
    def count(**fields: Any) -> tuple[int, int]:
        config = GPTConfig(**{"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 31, **fields})
        with torch.device("meta"):
            model = GPT(config)
        return answer.count_params(config), sum(p.numel() for p in model.parameters())

    for fields in ({"bias": False}, {}, {"n_layer": 5, "n_embd": 48}):
        counted, exact = count(**fields)
        C = fields.get("n_embd", 16)
        expect(
            counted - exact != 31 * C,
            f"You count {counted:,} parameters, and the model has {exact:,}: the token embedding and the head are "
            "tied, so they are one parameter.",
        )
        expect(
            exact - counted != 8 * C,
            f"You count {counted:,} parameters, and the model has {exact:,}: the position embedding is missing.",
        )
        kind = "without biases" if "bias" in fields else "with biases"
        expect(
            counted == exact,
            f"You count {counted:,} parameters for a model {kind}, and it has {exact:,}. A block has 12 C^2 weights "
            "in four matrices, 2 LayerNorms, and with biases 3C + C + 4C + C of the matrices and 2C of the "
            "LayerNorms.",
        )


def check_flops(answer: ModuleType, _: Any) -> None:
    config = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=31)
    model = GPT(config)
    flops = answer.flops_per_token(config)
    params = sum(p.numel() for p in model.parameters())
    attention, positions = 12 * 2 * 16 * 8, 8 * 16
    expect(
        flops != 6 * (params - positions),
        "The attention scores are missing: q k^T and p v have 2 * 2 C T FLOPs per token and layer in the forward "
        "pass, and twice as many in the backward pass.",
    )
    expect(
        flops != 6 * params + attention,
        "The position embedding is a table: its rows are looked up, and not multiplied. Do not count it.",
    )
    expect(
        flops not in (2 * (params - positions) + attention // 3, 4 * (params - positions) + attention // 3 * 2),
        "You count only the forward or only the backward pass. The backward pass computes two products per matrix "
        "product.",
    )
    exact = 6 * (params - positions) + attention
    expect(flops == exact, f"You count {flops:,} FLOPs per token instead of {exact:,}: 6 N + 12 L C T.")


def check_ring_bytes(answer: ModuleType, _: Any) -> None:
    for ranks in (4, 2, 8, 1):  # not 2 first: there, twice the right size equals the full tensor
        for kind in ("all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all"):
            size = answer.ring_bytes(kind, 800, ranks)
            expect(
                not (size == 800 and ranks > 1),
                f"You count the full tensor for the {kind}. A rank keeps its own part, and sends the other (N-1)/N.",
            )
            expect(
                is_close(size, 800 * (ranks - 1) / ranks, 1e-9),
                f"A rank sends {800 * (ranks - 1) / ranks:g} bytes in the {kind} of 800 bytes on {ranks} ranks, not "
                f"{size:g}. Only an all-reduce sends twice as much.",
            )
        expect(
            is_close(answer.ring_bytes("all-reduce", 800, ranks), 1600 * (ranks - 1) / ranks, 1e-9),
            "An all-reduce is a reduce-scatter followed by an all-gather, so it sends twice as much as either of them.",
        )


def check_zero_costs(answer: ModuleType, _: Any) -> None:
    for stage, optimizer_class in ((1, Zero1Optimizer), (2, Zero2Optimizer)):
        model = GPT(SHAPE)
        model.init_weights(0)
        params = sum(p.numel() for p in model.parameters())
        optimizer = optimizer_class(model.parameters(), AdamW, bucket_mb=0.02, lr=1e-3)
        for _ in range(2):
            with CollectiveCounter() as counter:
                for i in range(2):
                    optimizer.require_backward_grad_sync = stage == 2 or i == 1
                    x = torch.randint(0, 31, (2, 8))
                    (model(x, x) / 2).backward()
                optimizer.clip_grad_norm_(1.0)
                gradients = storage_bytes(optimizer.gradient_buffers())
                optimizer.step()
                optimizer.zero_grad()
        optimizer.wait_for_params()
        state = [t for items in optimizer.state.values() for t in items.values() if isinstance(t, torch.Tensor)]
        measured = {
            "parameters": storage_bytes(model.parameters()),
            "gradients": gradients,
            "optimizer_state": storage_bytes(state),
        }
        costs = answer.flat_costs(optimizer, params, 2, dist.get_world_size())
        traffic = {kind: size for kind, (_, size) in collect_traffic(counter.rows).items()}
        for kind in KINDS:
            expect(
                costs.traffic[kind, dist.get_world_size()] == traffic.get(kind, 0),
                f"ZeRO-{stage}: you predict {costs.traffic[kind, dist.get_world_size()]:,} bytes for {kind}, and the "
                f"ledger counts {traffic.get(kind, 0):,} in a step with 2 micro-batches. {ADVICE[kind]}",
            )
        for name, size in measured.items():
            expect(
                costs.state[name] == size,
                f"ZeRO-{stage}: you predict {costs.state[name]:,} bytes of {name}, and a rank stores {size:,}. With "
                "ZeRO-1 a rank stores full buckets of parameters and gradients, with padding, and the moments of "
                "its shards. With ZeRO-2 it stores only its slice of the gradients.",
            )


ADVICE = {
    "all-gather": "Each bucket of parameters is all-gathered once per step, 4 bytes per element with padding.",
    "reduce-scatter": "ZeRO-1 reduces each bucket once per step, and ZeRO-2 once per micro-batch.",
    "all-reduce": "There are two: one byte per parameter tensor, which shows whether any rank has a gradient of it, "
    "and 8 bytes for the squared norm.",
}


def check_fsdp_traffic(answer: ModuleType, _: Any) -> None:
    for fields in ({}, {"fsdp_reshard_after_forward": False}, {"fsdp_sync_every_micro_batch": True}):
        config = make_config(**fields)
        run = create_runtime("cpu", "float32")
        model = build_sharded(config)
        run_micro_batches(model, config)
        traffic = run_micro_batches(model, config)
        predicted: Counter[tuple[str, int]] = answer.expected_traffic(model, config, run)
        options = ", ".join(f"{name}={value}" for name, value in fields.items()) or "the default options"
        for kind, advice in (
            ("all-gather", "In each micro-batch, a unit is all-gathered in the forward and in the backward pass, but "
             "the root and every unit that is not resharded are all-gathered only once."),
            ("reduce-scatter", "Gradients are reduced once per step, or after every micro-batch, in fp32."),
        ):  # fmt: skip
            expect(
                predicted[kind, 2] == traffic[kind][1],
                f"With {options} you predict {predicted[kind, 2]:,} bytes for {kind}, and the ledger counts "
                f"{traffic[kind][1]:,}. {advice} Units are padded to a multiple of the number of ranks.",
            )
        expect(predicted["all-reduce", 2] == 8, "The global norm needs an all-reduce of 8 bytes: one fp64 number.")


def check_activations(answer: ModuleType, _: Any) -> None:
    shape = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=31)
    measured = {}
    for mode in ("none", "full", "every_2", "selective"):
        exact = sum(row.bytes for row in activations.saved_activations_outside_blocks(shape, 2, 16))
        for i in range(3):
            block = mode if mode in ("none", "selective") else "full" if mode == "full" or i % 2 == 0 else "none"
            exact += sum(row.bytes for row in activations.saved_activations(shape, 2, 16, mode=block))
        size = answer.activation_bytes(shape, 2, 16, mode=mode)
        measured[mode] = size
        expect(
            size == exact,
            f"With the mode {mode} you predict {size:,} bytes, and a model with 3 blocks saves {exact:,}: add the "
            "tensors of each block in its own mode, and those of the embeddings, the head and the loss once. "
            "every_2 recomputes blocks 0 and 2, and saves everything in block 1.",
        )
    model, x = GPT(shape), torch.randint(0, 31, (2, 16))
    inputs = (*model.parameters(), x)
    _, saved = measure_saved_bytes(lambda: model(x, x), ignored=inputs)
    expect(
        measured["none"] == saved,
        f"You predict {measured['none']:,} bytes, and a forward pass has just saved {saved:,}.",
    )


def measure_state(model: nn.Module, optimizer: AdamW) -> dict[str, int]:
    """Step the optimizer, and return the bytes of the model state on this rank."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    optimizer.step()
    states = [t for items in optimizer.state.values() for t in items.values() if isinstance(t, torch.Tensor)]
    return {
        "parameters": storage_bytes(model.parameters()),
        "gradients": storage_bytes(gradients),
        "optimizer_state": storage_bytes(states),
    }


def check_ddp_costs(answer: ModuleType, _: Any) -> None:
    run, config = create_runtime("cpu", "float32"), make_config(use_fsdp=False)
    model = DDP(GPT(SHAPE), gradient_as_bucket_view=True)
    for _ in range(2):  # before the second step, DDP arranges its buckets in the order of the gradients
        model.zero_grad()
        traffic = run_micro_batches(model, config)
    optimizer = AdamW(model.parameters())
    measured = measure_state(model, optimizer)
    costs = answer.step_costs(model.module, optimizer, config, run)
    advice = {
        "parameters": "DDP shards nothing, and a parameter in fp32 has 4 bytes.",
        "gradients": "Every rank stores all gradients: DDP averages them, and shards nothing.",
        "optimizer_state": "AdamW stores two moments per element, and a step count of 4 bytes per tensor.",
    }
    for name, size in measured.items():
        expect(
            costs.state[name] == size,
            f"You predict {costs.state[name]:,} bytes of {name}, and a rank stores {size:,}. {advice[name]}",
        )
    predicted, counted = costs.traffic["all-reduce", run.world_size], traffic["all-reduce"][1]
    expect(
        predicted == counted,
        f"You predict all-reduces of {predicted:,} bytes, and the ledger counts {counted:,}: the size of all "
        "gradients, before the factors of the ring algorithm, once per step.",
    )
    alone = answer.step_costs(model.module, optimizer, config, dataclasses.replace(run, world_size=1))
    expect(not any(alone.traffic.values()), "A single rank communicates nothing: its traffic is empty.")
    buffers = (costs.has_gradient_buffers, alone.has_gradient_buffers)
    expect(buffers == (True, False), "has_gradient_buffers must be True with several ranks, and False with one.")


def check_fsdp_costs(answer: ModuleType, _: Any) -> None:
    for shards, count in (("2", 2), ("all", 4)):
        config, run = (
            make_config(fsdp_shard_size=shards, gradient_accumulation_steps=8),
            create_runtime("cpu", "float32"),
        )
        model = build_sharded(config)
        run_micro_batches(model, config)
        optimizer = AdamW(model.parameters())
        costs, measured = answer.step_costs(model, optimizer, config, run), measure_state(model, optimizer)
        for name, size in measured.items():
            story = (
                f"With --fsdp_shard_size={shards} on 4 ranks, you predict {costs.state[name]:,} bytes of {name}, and a "
            )
            story += f"rank stores {size:,}."
            expect(costs.state[name] != count * size, f"{story} That is the full model: a rank stores only its shards.")
            expect(
                abs(2 * costs.state[name] / size - 1) > 0.1,
                f"{story} There are two copies of the model, so each one is sharded over only 2 ranks, and not over 4.",
            )
            expect(
                costs.state[name] == size,
                f"{story} The rows of each parameter are padded to a multiple of the number of shards: the "
                f"{SHAPE.vocab_size} rows of the token embedding to 32.",
            )
        padding = 4 * measured["parameters"] * count // 16 - sum(p.numel() for p in model.parameters())
        expect(
            costs.padding == padding,
            f"You count {costs.padding} padding elements, and all shards of a copy have {padding} elements more than "
            "the parameters.",
        )
    run = create_runtime("cpu", "float32")
    plain, config = GPT(SHAPE), make_config(use_fsdp=False)
    expected = 4 * sum(p.numel() for p in plain.parameters())
    costs = answer.step_costs(plain, AdamW(plain.parameters()), config, run)
    expect(costs.state["parameters"] == expected, "With use_fsdp=False the costs are those of DDP: call ddp_costs.")


def check_cache_bytes(answer: ModuleType, _: Any) -> None:
    model, caches, tokens = GPT(SHAPE), [KVCache() for _ in range(SHAPE.n_layer)], SHAPE.block_size
    model(torch.zeros(1, tokens, dtype=torch.long), caches=caches)
    measured = storage_bytes(tensor for cache in caches for tensor in (cache.keys, cache.values) if tensor is not None)
    predicted = answer.cache_bytes(measure_gpt(SHAPE), tokens, 4)
    story = (
        f"You predict {predicted:,} bytes for {tokens} tokens, and a model with {SHAPE.n_layer} layers has just stored "
    )
    story += f"{measured:,}."
    expect(predicted * SHAPE.n_layer != measured or predicted == measured, f"{story} {EVERY_LAYER}")
    expect(predicted == measured, f"{story} A cache contains keys and values.")
    grouped = dataclasses.replace(measure_gpt(dataclasses.replace(SHAPE, n_layer=3)), kv_channels=SHAPE.n_embd // 4)
    predicted, expected = answer.cache_bytes(grouped, tokens, 2), 2 * 3 * tokens * SHAPE.n_embd // 4 * 2
    expect(
        predicted == expected,
        f"You predict {predicted:,} instead of {expected:,} bytes for a model with 3 layers whose heads share keys and "
        "values: it has kv_channels key channels, and as many value channels.",
    )


EVERY_LAYER = "Every layer has its own keys and values."


def check_fitting_slots(answer: ModuleType, _: Any) -> None:
    size = measure_gpt(SHAPE)
    for ranks, heads in ((2, 2), (2, 3), (4, 0)):
        size = dataclasses.replace(size, kv_heads=heads)
        names = [each for each in SPREADS if each != "tp" or (heads and heads % ranks == 0)]

        def needs(name: Any, slots: int, size: ModelSize = size, ranks: int = ranks) -> float:
            return predict(name, size, ranks, slots, 64, 4).memory

        smallest, largest = (sorted(needs(each, 5) for each in names)[i] for i in (0, -1))
        limits = [needs(each, 5) for each in SPREADS]
        for limit in (*limits, smallest - 1, largest, needs(names[0], 1) / 4):
            fitting = answer.find_fitting_slots(size, ranks, 9, 64, 4, limit)
            exact = max((n for n in range(1, 9) if any(needs(each, n) <= limit for each in names)), default=0)
            story = f"{ranks} ranks, {heads} key heads and {limit:,.0f} bytes: you return {fitting}, and {exact} fit."
            all_fit = [n for n in range(1, 9) if all(needs(each, n) <= limit for each in names)]
            expect(
                fitting != 1 or exact <= 1, f"{story} You return the smallest number that fits: begin with the largest."
            )
            expect(
                fitting == exact or fitting != max(all_fit, default=0),
                f"{story} Not every spread must fit: one spread that fits is enough.",
            )
            expect(
                fitting <= exact,
                f"{story} {heads} key heads cannot be divided among {ranks} ranks, so tp is not possible.",
            )
            expect(fitting == exact, story)
