"""FlashAttention-3 (arXiv:2407.08608), the module `flash_attn_interface`, for Hopper."""

import functools
from importlib import import_module
from typing import Any

from torch import Tensor

from lsai_core.attention.registry import HALF, Backend, first_output


@functools.cache
def load() -> Any:
    return import_module("flash_attn_interface").flash_attn_func


def fa3_attention(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None, causal: bool
) -> Tensor:
    """(B, S, H, D), FlashAttention-3."""
    size = (-1, -1) if window is None else (window - 1, 0)
    return first_output(load()(q_BSHD, k_BSKD, v_BSKD, causal=causal, window_size=size))


BACKEND = Backend(
    "fa3",
    fa3_attention,
    fused=True,
    dtypes={"cuda": HALF},
    window=frozenset({"cuda"}),
    head_dims=(8, 256),
    head_dim_multiple=8,
    compute_capability=((9, 0), (9, 0)),
    load=load,
    operators=frozenset({"flash_attn_3"}),
    repeats=False,
    speed=4,
    about="FlashAttention-3, for Hopper",
    color="#009E73",
    marker="^",
    install="'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'",
)
