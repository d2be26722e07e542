"""Helpers for tests of attention kernels: inputs, torch's attention, and the mask of dropout in plain torch."""

import torch
from torch.nn import functional as F

from tests.helpers.kernels import draw_normal


def make_projection(B, nh, T, hs, dtype=torch.float32):
    """Return a random projection (B, T, 3, nh, hs). As in the model, the heads are views of it."""
    return draw_normal((B, T, 3, nh, hs), 1).to(dtype).requires_grad_()


def split_heads(qkv):
    """Return q, k and v of shape (B, nh, T, hs) without a copy."""
    return qkv.permute(2, 0, 3, 1, 4).unbind()


def run_sdpa(qkv):
    return F.scaled_dot_product_attention(*split_heads(qkv), is_causal=True)


def compute_philox(seed, *counters):
    """Return the first word of Philox4x32-7, computed in the low 32 bits of int64 (Salmon et al. 2011)."""
    low = 2**32 - 1
    k0, k1 = seed & low, seed >> 32
    c0, c1, c2, c3 = counters
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((b >> 32) & low) ^ c1 ^ k0, b & low, ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0


def compute_dropout_mask(seed, B, nh, T, p):
    """Return the elements that the kernels must keep, (B, nh, T, T), computed in plain torch."""
    head_index = torch.arange(B * nh).view(B, nh, 1, 1)
    bits = compute_philox(seed, torch.arange(T), torch.arange(T)[:, None], head_index, torch.tensor(0))
    folded = torch.where(bits < 2**31, bits, 2**32 - 1 - bits)  # Triton computes a number in [0, 1) from 31 bits
    return folded.float() * 4.6566127342e-10 >= p
