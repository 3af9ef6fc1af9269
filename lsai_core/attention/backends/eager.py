"""Attention as written on the board: all S x S scores in memory, softmax, weighted sum. Slow, and
the reference.

Three things follow from materialising the scores: memory grows with S^2 (B * H * S^2 values for the
scores and as many for the probabilities, both kept for the backward pass), every dtype works, and
the result is easy to check. The fused kernels exist to avoid exactly this (FlashAttention, Dao et
al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lsai_core.attention.registry import FLOATING, Backend, band_mask, repeat_kv


def eager_attention(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None, causal: bool
) -> Tensor:
    """(B, S, H, D) in the dtype of q. The softmax runs in float32 (float64 stays float64)."""
    seq_len, n_heads, head_dim = q_BSHD.shape[1:]
    q_BHSD = q_BSHD.transpose(1, 2)
    k_BHSD = repeat_kv(k_BSKD, n_heads).transpose(1, 2)
    v_BHSD = repeat_kv(v_BSKD, n_heads).transpose(1, 2)
    scores_BHSS = (q_BHSD @ k_BHSD.transpose(-2, -1)) * head_dim**-0.5
    if causal:
        scores_BHSS = scores_BHSS.masked_fill(
            ~band_mask(seq_len, window, q_BSHD.device), float("-inf")
        )
    statistics = torch.promote_types(q_BSHD.dtype, torch.float32)
    weights_BHSS = torch.softmax(scores_BHSS, dim=-1, dtype=statistics).to(q_BSHD.dtype)
    return (weights_BHSS @ v_BHSD).transpose(1, 2)


BACKEND = Backend(
    "eager",
    eager_attention,
    dtypes={"cpu": FLOATING, "cuda": FLOATING, "meta": FLOATING},
    window=frozenset({"cpu", "cuda", "meta"}),
    about="all scores in memory: the definition, and the reference for errors",
    color="black",
    marker="x",
)
