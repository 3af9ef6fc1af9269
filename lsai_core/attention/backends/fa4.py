"""FlashAttention-4, the package `flash-attn-4` (CuTe DSL).

Like its forerunners it computes attention tile by tile in on-chip memory and keeps only the output
and one log-sum-exp per row for the backward pass, so memory grows with S instead of S^2 (Dao et al.
2022, arXiv:2205.14135).

fa2 and fa3 register their kernels with torch themselves. fa4 does not, and its compile-on-first-use
host code cannot be traced by torch.compile, so its forward and backward kernels are registered here
as custom operators: opaque to the compiler, visible to autograd and to selective checkpointing. The
package is imported when first asked for.
"""

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lsai_core.attention.registry import HALF, Backend, Bound, TileKernel


@functools.cache
def load() -> Any:
    interface = import_module("flash_attn.cute.interface")
    return interface._flash_attn_fwd, interface._flash_attn_bwd


def fa4_attention(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None, causal: bool
) -> Tensor:
    """(B, S, H, D), FlashAttention-4."""
    return _fa4_forward(q_BSHD, k_BSKD, v_BSKD, window, causal)[0]


def _fa4_mask(window: int | None, causal: bool) -> dict[str, int | bool | None]:
    left, right = (None, None) if window is None else (window - 1, 0)
    return {"causal": causal, "window_size_left": left, "window_size_right": right}


@torch.library.custom_op("lsai::fa4_forward", mutates_args=(), device_types="cuda")
def _fa4_forward(
    q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    forward, _ = load()
    out_BSHD, lse_BHS, *_ = forward(
        q_BSHD, k_BSKD, v_BSKD, return_lse=True, **_fa4_mask(window, causal)
    )
    return out_BSHD, lse_BHS


@torch.library.custom_op("lsai::fa4_backward", mutates_args=(), device_types="cuda")
def _fa4_backward(
    dout_BSHD: Tensor,
    q_BSHD: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    out_BSHD: Tensor,
    lse_BHS: Tensor,
    window: int | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _, backward = load()
    dq_BSHD, dk_BSKD, dv_BSKD, *_ = backward(
        q_BSHD,
        k_BSKD,
        v_BSKD,
        out_BSHD,
        dout_BSHD.contiguous(),
        lse_BHS,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_fa4_mask(window, causal),
    )
    return dq_BSHD.contiguous(), dk_BSKD.contiguous(), dv_BSKD.contiguous()


# The shapes of what the two return, for the compiler: torch passes the arguments in order, so the
# rest stays unnamed.
_dense = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


@_fa4_forward.register_fake
def _(q_BSHD: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    batch, seq_len, n_heads, _ = q_BSHD.shape
    return _dense(q_BSHD), q_BSHD.new_empty((batch, n_heads, seq_len), dtype=torch.float32)


@_fa4_backward.register_fake
def _(_dout: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
    q_BSHD, k_BSKD, v_BSKD = saved[:3]
    return _dense(q_BSHD), _dense(k_BSKD), _dense(v_BSKD)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BSHD, k_BSKD, v_BSKD, ctx.window, ctx.causal = inputs
    ctx.save_for_backward(q_BSHD, k_BSKD, v_BSKD, *output)


def _differentiate(ctx: Any, dout_BSHD: Tensor, _dlse_BHS: Tensor) -> tuple[Tensor | None, ...]:
    # The log-sum-exp never leaves `fa4_attention`, so its gradient is always zero.
    return *_fa4_backward(dout_BSHD, *ctx.saved_tensors, ctx.window, ctx.causal), None, None


_fa4_forward.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _fa4_band(left: Bound, right: Bound) -> dict[str, Any]:
    causal = left is None and right is not None
    return {
        "causal": causal,
        "window_size_left": left,
        "window_size_right": None if causal else right,
    }


def _tile_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    forward, _ = load()
    out, lse, *_ = forward(q, k, v, return_lse=True, **_fa4_band(left, right))
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
    _, backward = load()
    deterministic = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv, *_ = backward(
        q, k, v, out, dout, lse, deterministic=deterministic, **_fa4_band(left, right)
    )
    return dq, dk, dv


BACKEND = Backend(
    "fa4",
    fa4_attention,
    fused=True,
    dtypes={"cuda": HALF},
    window=frozenset({"cuda"}),
    head_dims=(8, 128),
    head_dim_multiple=8,
    compute_capability=((9, 0), (99, 0)),
    load=load,
    operators=frozenset({"lsai::fa4_forward"}),
    repeats=False,
    speed=6,
    tiles=TileKernel(_tile_forward, _tile_backward),
    about="FlashAttention-4, CuTe DSL",
    color="#0072B2",
    marker="o",
    install="--pre flash-attn-4",
)
