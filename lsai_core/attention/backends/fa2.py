"""FlashAttention-2 (arXiv:2307.08691), the package `flash-attn`: see `fa4.py` for what such kernels
keep."""

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lsai_core.attention.registry import AMPERE_ON, HALF, Backend, Bound, TileKernel, first_output
from lsai_core.attention.tiles import flash_window


@functools.cache
def load() -> Any:
    # The submodule, because the bare name `flash_attn` also exists where only FlashAttention-4 is
    # installed.
    return import_module("flash_attn.flash_attn_interface").flash_attn_func


def fa2_attention(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None, causal: bool
) -> Tensor:
    """(B, S, H, D), FlashAttention-2."""
    size = (-1, -1) if window is None else (window - 1, 0)
    return first_output(load()(q_BSHD, k_BSKD, v_BSKD, causal=causal, window_size=size))


def _tile_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    size, causal = flash_window(left, right)
    interface = import_module("flash_attn.flash_attn_interface")
    out, lse, *_ = interface._flash_attn_forward(
        q,
        k,
        v,
        0.0,
        q.shape[3] ** -0.5,
        causal=causal,
        window_size_left=size[0],
        window_size_right=size[1],
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    )
    return out, lse


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
    size, causal = flash_window(left, right)
    interface = import_module("flash_attn.flash_attn_interface")
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    interface._flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        0.0,
        q.shape[3] ** -0.5,
        causal,
        size[0],
        size[1],
        0.0,
        None,
        torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


BACKEND = Backend(
    "fa2",
    fa2_attention,
    fused=True,
    dtypes={"cuda": HALF},
    window=frozenset({"cuda"}),
    head_dims=(8, 256),
    head_dim_multiple=8,
    compute_capability=AMPERE_ON,
    load=load,
    operators=frozenset({"flash_attn"}),
    speed=3,
    tiles=TileKernel(_tile_forward, _tile_backward),
    about="FlashAttention-2, its own package",
    color="#CC79A7",
    marker="D",
    install="flash-attn --no-build-isolation",
)
