"""Attention as written on the board: all S x S scores in memory, softmax, weighted sum. Slow, and
the reference.

Three things follow from materialising the scores: memory grows with S^2 (B * H * S^2 values for the
scores and as many for the probabilities, both kept for the backward pass), every dtype works, and
the result is easy to check. The fused kernels exist to avoid exactly this (FlashAttention, Dao et
al. 2022, arXiv:2205.14135).
"""

import torch
from torch import Tensor

from lsai_core.attention.registry import FLOATING, Backend, Bound, TileKernel, band_mask, repeat_kv
from lsai_core.attention.tiles import allowed, sum_groups


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


def _scores(q: Tensor, k: Tensor, left: Bound, right: Bound) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    q_BHSD = q.to(wide).transpose(1, 2)
    k_BHTD = repeat_kv(k.to(wide), q.shape[2]).transpose(1, 2)
    scores_BHST = (q_BHSD @ k_BHTD.mT) * q.shape[3] ** -0.5
    mask_ST = allowed(q.shape[1], k.shape[1], left, right, q.device)
    return (
        q_BHSD,
        k_BHTD,
        scores_BHST if mask_ST is None else scores_BHST.masked_fill(~mask_ST, float("-inf")),
    )


def _tile_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    """Plain operations in fp32 (fp64), all scores in memory: the reference."""
    _, _, scores_BHST = _scores(q, k, left, right)
    lse_BHS = scores_BHST.logsumexp(-1)
    weights_BHST = (scores_BHST - lse_BHS[..., None]).exp()
    v_BHTD = repeat_kv(v.to(weights_BHST.dtype), q.shape[2]).transpose(1, 2)
    return (weights_BHST @ v_BHTD).transpose(1, 2).to(q.dtype), lse_BHS


def _tile_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    left: Bound,
    right: Bound,
) -> tuple[Tensor, Tensor, Tensor]:
    q_BHSD, k_BHTD, scores_BHST = _scores(q, k, left, right)
    wide, scale = scores_BHST.dtype, q.shape[3] ** -0.5
    weights_BHST = (scores_BHST - lse[..., None]).exp()
    dout_BHSD, out_BHSD = dout.to(wide).transpose(1, 2), out.to(wide).transpose(1, 2)
    v_BHTD = repeat_kv(v.to(wide), q.shape[2]).transpose(1, 2)
    delta_BHS1 = (dout_BHSD * out_BHSD).sum(-1, keepdim=True)
    dscores_BHST = weights_BHST * (dout_BHSD @ v_BHTD.mT - delta_BHS1) * scale
    dq, dk, dv = dscores_BHST @ k_BHTD, dscores_BHST.mT @ q_BHSD, weights_BHST.mT @ dout_BHSD
    heads = k.shape[2]
    return (
        dq.transpose(1, 2).to(q.dtype),
        sum_groups(dk.transpose(1, 2), heads).to(k.dtype),
        sum_groups(dv.transpose(1, 2), heads).to(v.dtype),
    )


BACKEND = Backend(
    "eager",
    eager_attention,
    dtypes={"cpu": FLOATING, "cuda": FLOATING, "meta": FLOATING},
    window=frozenset({"cpu", "cuda", "meta"}),
    tiles=TileKernel(_tile_forward, _tile_backward),
    about="all scores in memory: the definition, and the reference for errors",
    color="black",
    marker="x",
)
