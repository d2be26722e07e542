"""The roofline model and the model of communication: their seconds are those computed by hand."""

import pytest
import torch

from bench.plan.speed import (
    ATTENTION_EFFICIENCY,
    GPUS,
    MEMORY_EFFICIENCY,
    PCIE_BANDWIDTH,
    Communication,
    Gpu,
    Roofline,
    apply_launch_bound,
    estimate_collective_seconds,
    estimate_communication,
    estimate_gpu_seconds,
    step_seconds,
)
from phase2_triton.kernels import attention

H100 = GPUS["h100"]


def test_a_roofline_counts_bytes_and_flops():
    """An embedding reads only the rows that it uses, and an expanded tensor only its real elements.

    In a compiled pass, intermediate results cost nothing. Attention has more FLOPs in its backward pass than in its
    forward pass. Expected values are computed by hand.
    """
    slow_gpu = Gpu(1.0, 1e12, 1 / MEMORY_EFFICIENCY, 1.0, 1.0, 1e12)  # one byte takes one second
    table, ids, column, x = torch.ones(1000, 8), torch.arange(3), torch.ones(10, 1), torch.ones(50)
    with torch.no_grad():
        with Roofline() as roofline:
            torch.nn.functional.embedding(ids, table)
        times = [estimate_gpu_seconds(works, slow_gpu)["forward"] for works in (roofline.eager, roofline.compiled)]
        assert times == pytest.approx([2 * 4 * 3 * 8] * 2)
        with Roofline() as roofline:
            column.expand(10, 7).neg()
        assert estimate_gpu_seconds(roofline.eager, slow_gpu)["forward"] == pytest.approx(4 * 10 + 4 * 70)
        with Roofline() as roofline:
            result = x.neg().neg()
    times = [estimate_gpu_seconds(works, slow_gpu)["forward"] for works in (roofline.eager, roofline.compiled)]
    assert times == pytest.approx([4 * x.nbytes, x.nbytes + result.nbytes]) and len(roofline.eager) == 2
    q = torch.ones(1, 2, 16, 8, requires_grad=True)
    with Roofline() as roofline:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    forward, backward = (each.flops for each in attention.cost(1, 2, 16, 8, 2))
    one_flop_per_second = Gpu(1.0, 1 / ATTENTION_EFFICIENCY, 1e30, 1.0, 1.0, 1.0)
    seconds = estimate_gpu_seconds(roofline.eager, one_flop_per_second)
    assert (seconds["forward"], seconds["backward"]) == pytest.approx((forward, backward))
    assert backward > 2 * forward


def test_a_step_waits_for_exposed_communication():
    """A step waits for communication that takes longer than the computation, otherwise only for the last collective."""
    parts = {"forward": 1.0, "backward": 2.0, "update": 0.5}
    assert step_seconds(parts, {}, {}, micro_batches=3) == 9.5
    assert step_seconds(parts, {}, {"backward": Communication(1.5, 0.1)}) == pytest.approx(3.6)
    every, once = {"forward": Communication(4.0, 0.1)}, {"backward": Communication(5.0, 0.1)}
    assert step_seconds(parts, every, once, 2) == pytest.approx(2 * 4.0 + 2.0 + 5.0 + 0.5)
    traffic = {("all-gather", 8): 8e9, ("reduce-scatter", 8): 8e9, ("all-reduce", 8): 8}

    def estimate(phase, compiled=True, **options):
        return estimate_communication((phase, options), traffic, 2 * 10**9, 10, 1, H100, compiled)

    every, once = estimate("phase3")
    offloaded = estimate("phase3", fsdp_cpu_offload=True)
    added = offloaded[0]["forward"].seconds - every["forward"].seconds
    assert added == pytest.approx(4 * 2e9 / 8 / PCIE_BANDWIDTH)
    assert offloaded[1]["backward"].seconds > once["backward"].seconds > every["forward"].seconds > 0
    assert once["forward"].seconds == 0 and once["backward"].min_exposed < once["backward"].seconds / 5
    # Python needs 7 microseconds per kernel of an eager step.
    short_parts, kernels = dict.fromkeys(parts, 0.001), {"forward": 0, "backward": 1000, "update": 10}
    assert apply_launch_bound(short_parts, kernels) == {**short_parts, "backward": pytest.approx(1000 * 7e-6)}


def test_the_time_of_a_collective_depends_on_its_links():
    """A ring has a latency per hop. Several rings, and an all-to-all, share the network of a node."""
    assert estimate_collective_seconds(H100, "all-gather", 0, 1024) == pytest.approx(896 * 3e-6 + 128 * 12e-6)
    assert estimate_collective_seconds(H100, "all-reduce", 0, 8) == pytest.approx(2 * 7 * 3e-6)
    rings = [estimate_collective_seconds(H100, "all-reduce", 1e9, 16, one_per_node=one) for one in (False, True)]
    assert 7 < rings[1] / rings[0] < 9
    hybrid = estimate_communication(("phase3", {"fsdp_shard_size": "8"}), {("all-reduce", 2): 1e9}, 1, 1, 1, H100, True)
    assert hybrid[1]["backward"].seconds == estimate_collective_seconds(H100, "all-reduce", 1e9, 2, one_per_node=True)
    within, between = (estimate_collective_seconds(H100, "all-to-all", 1e12, ranks) for ranks in (8, 16))
    assert between == pytest.approx(within * (15 / 16) / (7 / 8) * H100.link / (H100.network / 8), rel=1e-3)
