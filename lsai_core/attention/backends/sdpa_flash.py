"""torch's scaled_dot_product_attention, its flash kernels (see `lsai_core.attention.sdpa`)."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lsai_core.attention.registry import (
    AMPERE_ON,
    FLOATING,
    HALF,
    Backend,
    Bound,
    TileKernel,
    repeat_kv,
)
from lsai_core.attention.sdpa import sdpa_attention
from lsai_core.attention.tiles import allowed, flash_window, heads_first, sum_groups

aten = torch.ops.aten


def _cpu_mask(q: Tensor, k: Tensor, left: Bound, right: Bound) -> dict[str, Any]:
    if left is None:
        return {"is_causal": right is not None}
    mask = allowed(q.shape[1], k.shape[1], left, right, q.device)
    assert mask is not None
    return {
        "is_causal": False,
        "attn_mask": torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, float("-inf")),
    }


def _tile_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    """torch's FlashAttention: FA-2 on CUDA, a kernel of its own on CPUs (which takes a window as a
    mask)."""
    if q.device.type == "cuda":
        size, causal = flash_window(left, right)
        out, lse, *_ = aten._flash_attention_forward(
            q,
            k,
            v,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            False,
            window_size_left=size[0],
            window_size_right=size[1],
        )
        return out, lse
    heads, mask = q.shape[2], _cpu_mask(q, k, left, right)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first(q, repeat_kv(k, heads), repeat_kv(v, heads)), 0.0, **mask
    )
    return out.transpose(1, 2), lse


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
    if q.device.type == "cuda":
        size, causal = flash_window(left, right)
        # of the random numbers of a dropout of zero
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        dq, dk, dv = aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            state,
            unused,
            window_size_left=size[0],
            window_size_right=size[1],
        )
        return dq, dk, dv
    heads, n_kv_heads = q.shape[2], k.shape[2]
    mask = _cpu_mask(q, k, left, right)
    causal = mask.pop("is_causal")
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads_first(dout, q, repeat_kv(k, heads), repeat_kv(v, heads), out),
        lse,
        0.0,
        causal,
        **mask,
    )
    dq, dk, dv = heads_first(*gradients)
    return dq, sum_groups(dk, n_kv_heads), sum_groups(dv, n_kv_heads)


BACKEND = Backend(
    "sdpa_flash",
    functools.partial(sdpa_attention, kernel=SDPBackend.FLASH_ATTENTION),
    fused=True,
    dtypes={"cpu": FLOATING, "cuda": HALF},
    window=frozenset({"cpu"}),
    head_dims=(1, 256),
    compute_capability=AMPERE_ON,
    rocm=True,
    speed=2,
    tiles=TileKernel(_tile_forward, _tile_backward),
    about="torch's SDPA, FlashAttention-2; on CPUs a kernel of torch's own",
    color="#56B4E9",
    marker="v",
)
