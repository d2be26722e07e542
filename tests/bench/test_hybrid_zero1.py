"""ZeRO-1 across the replicas of hybrid FSDP, as the benchmark implements it."""

from typing import Any

from bench.sharding.replicated_shards import train_hybrid
from nanoGPT.model import GPTConfig
from workshop.ranks import run_on_ranks

SHAPE = GPTConfig(n_layer=1, n_head=1, n_embd=15, block_size=8, bias=False, vocab_size=21)


def train_both() -> list[dict[str, Any]]:
    return [train_hybrid(uses_zero1, SHAPE, steps=3) for uses_zero1 in (False, True)]


def test_zero1_across_replicas_has_the_losses_of_hybrid_fsdp():
    """With ZeRO-1 across two replicas, the losses are exactly the same, and a rank has about half of the moments.

    The all-gather across the replicas sends one half of a shard. Odd sizes are padded.
    """
    results = run_on_ranks(train_both, 4, show=False)
    for plain, zero1 in results:
        assert plain["losses"] == zero1["losses"] and len(set(plain["losses"])) == 3
        extra = zero1["sent_bytes"] - plain["sent_bytes"]
        assert 0 <= extra - plain["state_bytes"] / 4 < 4 * 20, "at most one element of padding for each parameter"
    assert sum(zero1["state_bytes"] for _, zero1 in results) == sum(plain["state_bytes"] for plain, _ in results) / 2
