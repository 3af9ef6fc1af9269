"""FlashAttention-2 (arXiv:2307.08691), the package `flash-attn`: see `fa4.py` for what such kernels
keep."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from torch import Tensor

from lsai_core.attention.registry import AMPERE_ON, HALF, Backend, first_output


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
    about="FlashAttention-2, its own package",
    color="#CC79A7",
    marker="D",
    install="flash-attn --no-build-isolation",
)
