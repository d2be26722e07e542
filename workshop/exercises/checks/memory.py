"""Checks of the exercises on the planner's formulas."""

from types import ModuleType
from typing import Any

from nanoGPT.model import GPT, GPTConfig
from workshop.exercises.exercise import expect
from workshop.exercises.measuring import is_close


def check_count(answer: ModuleType, _: Any) -> None:
    def count(**fields: Any) -> tuple[int, int]:
        config = GPTConfig(**{"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 31, **fields})
        return answer.count_gpt2_params(config), config.count_params()

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
            "LayerNorms. One more LayerNorm follows the blocks.",
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


def check_tokens_to_hide(answer: ModuleType, _: Any) -> None:
    for flops, bandwidth in ((400e12, 50e9), (400e12, 400e9), (100e12, 50e9)):
        for moved, computed in ((2, 2), (6, 4), (4, 2)):
            tokens = answer.tokens_to_hide(flops, bandwidth, moved, computed)
            seconds_to_move, seconds_to_compute = moved / bandwidth, computed * tokens / flops  # of one parameter
            expect(
                is_close(seconds_to_compute / seconds_to_move, 1.0, 1e-9),
                f"With {flops:.0e} FLOP/s and {bandwidth:.0e} bytes/s, your {tokens:,.0f} tokens need "
                f"{1e12 * seconds_to_compute:.3g} ps of computation per parameter, but its {moved} bytes need "
                f"{1e12 * seconds_to_move:.3g} ps on the link. Both must take equally long: a parameter has {computed} "
                "FLOPs for each token.",
            )


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
