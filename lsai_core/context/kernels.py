"""The local kernels: attention of one tile that also returns its log-sum-exp, and its gradient
given the whole softmax's.

Attention over all keys is put together from attention over some of them if each part comes with lse
= log sum exp(scores), one fp32 number per query and head. In the backward pass a part gets `out`
and `lse` of the *whole* attention: exp(score - lse) is then the true probability, and the gradients
of the parts add up (Dao et al. 2022, arXiv:2205.14135, section 3.1; Liu et al. 2023,
arXiv:2310.01889).

The kernels are those of `lsai_core.attention`, by the same names, called beneath autograd, as far
as they return lse; `auto` takes the fastest of them that was measured for such a shape. Masks are
bands (`lsai_core.context.layout.Tile`); kernels that know no window raise `UserError` for one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lsai_core.attention.backends.fa4 import load as _load_fa4
from lsai_core.attention.choice import available_backends, choose, get_backend
from lsai_core.attention.measured import rankings_for
from lsai_core.attention.registry import Case, repeat_kv
from lsai_core.base.errors import Unavailable, UserError

aten = torch.ops.aten
Bound = int | None


@dataclass(frozen=True, eq=False)
class LocalKernel:
    """`forward(q_BSHD, k_BTKD, v_BTKD, left, right) -> (out_BSHD, lse_BHS)` and
    `backward(dout_BSHD, q, k, v, out_BSHD, lse_BHS, left, right) -> (dq, dk, dv)`, gradients in the
    shapes of their inputs.

    out in the dtype of q, lse in fp32 (fp64 for fp64 inputs), natural logarithm of scores scaled by
    1/sqrt(D).
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Bound, Bound], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


# Asked in every layer of every step, hence cached.
@functools.cache
def local_kernel(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    window: int | None = None,
    grouped: bool = False,
    length: int = 8192,
) -> LocalKernel:
    """The kernel called `name`, or for `auto` the fastest; UserError or Unavailable if it cannot
    serve such inputs.

    `length`: queries of a tile, for `auto`.
    """
    case = Case(device.type, dtype, head_dim, window, False, True, grouped, length)
    if name == "auto":
        own = {
            other: reason if other in KERNELS else "returns no log-sum-exp"
            for other, reason in available_backends(device).items()
        }
        name = choose(case, own, rankings_for(device, own))
    if name not in KERNELS:
        get_backend(name)
        raise UserError(
            f"attention backend {name} returns no log-sum-exp; for context parallelism: "
            f"{', '.join(KERNELS)}"
        )
    if (reason := get_backend(name).missing(device)) is not None:
        raise Unavailable(f"attention backend {name} {reason}")
    if (reason := get_backend(name).unsupported(case)) is not None:
        raise UserError(f"attention backend {name} {reason}; use another backend, or auto")
    return KERNELS[name]


def allowed(
    n_queries: int, n_keys: int, left: Bound, right: Bound, device: torch.device
) -> Tensor | None:
    """bool (queries, keys), True where i - left <= j <= i + right; None where nothing is
    excluded."""
    if left is None and right is None:
        return None
    ahead_ST = (
        torch.arange(n_keys, device=device)[None, :]
        - torch.arange(n_queries, device=device)[:, None]
    )
    mask_ST = torch.ones_like(ahead_ST, dtype=torch.bool)
    if left is not None:
        mask_ST &= ahead_ST >= -left
    if right is not None:
        mask_ST &= ahead_ST <= right
    return mask_ST


def sum_groups(grad_BTHD: Tensor, n_kv_heads: int) -> Tensor:
    """The gradient of `repeat_kv`: (B, T, H, D) -> (B, T, K, D)."""
    return (
        grad_BTHD
        if grad_BTHD.shape[2] == n_kv_heads
        else grad_BTHD.unflatten(2, (n_kv_heads, -1)).sum(3)
    )


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


def _eager_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    """Plain operations in fp32 (fp64), all scores in memory: the reference."""
    _, _, scores_BHST = _scores(q, k, left, right)
    lse_BHS = scores_BHST.logsumexp(-1)
    weights_BHST = (scores_BHST - lse_BHS[..., None]).exp()
    v_BHTD = repeat_kv(v.to(weights_BHST.dtype), q.shape[2]).transpose(1, 2)
    return (weights_BHST @ v_BHTD).transpose(1, 2).to(q.dtype), lse_BHS


def _eager_backward(
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


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def _cpu_mask(q: Tensor, k: Tensor, left: Bound, right: Bound) -> dict[str, Any]:
    if left is None:
        return {"is_causal": right is not None}
    mask = allowed(q.shape[1], k.shape[1], left, right, q.device)
    assert mask is not None
    return {
        "is_causal": False,
        "attn_mask": torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, float("-inf")),
    }


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    """torch's FlashAttention: FA-2 on CUDA, a kernel of its own on CPUs (which takes a window as a
    mask)."""
    if q.device.type == "cuda":
        size, causal = _fa_window(left, right)
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
    heads = q.shape[2]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(q, repeat_kv(k, heads), repeat_kv(v, heads)),
        0.0,
        **_cpu_mask(q, k, left, right),
    )
    return out.transpose(1, 2), lse


def _flash_backward(
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
        size, causal = _fa_window(left, right)
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
        *_heads_first(dout, q, repeat_kv(k, heads), repeat_kv(v, heads), out),
        lse,
        0.0,
        causal,
        **mask,
    )
    dq, dk, dv = _heads_first(*gradients)
    return dq, sum_groups(dk, n_kv_heads), sum_groups(dv, n_kv_heads)


def _fa_window(left: Bound, right: Bound) -> tuple[tuple[int, int], bool]:
    """FlashAttention's arguments: (window_size, causal); -1 is no bound."""
    if left is None:
        return (-1, -1), right is not None
    return (left, -1 if right is None else right), False


def _fa2_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    size, causal = _fa_window(left, right)
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


def _fa2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    left: Bound,
    right: Bound,
) -> tuple[Tensor, Tensor, Tensor]:
    size, causal = _fa_window(left, right)
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


def _fa4_band(left: Bound, right: Bound) -> dict[str, Any]:
    causal = left is None and right is not None
    return {
        "causal": causal,
        "window_size_left": left,
        "window_size_right": None if causal else right,
    }


def _fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    forward, _ = _load_fa4()
    out, lse, *_ = forward(q, k, v, return_lse=True, **_fa4_band(left, right))
    return out, lse


def _fa4_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    left: Bound,
    right: Bound,
) -> tuple[Tensor, Tensor, Tensor]:
    _, backward = _load_fa4()
    deterministic = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv, *_ = backward(
        q, k, v, out, dout, lse, deterministic=deterministic, **_fa4_band(left, right)
    )
    return dq, dk, dv


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    assert left is None, "cuDNN through torch has no window; `local_kernel` refuses it"
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *_heads_first(q, k, v), None, True, 0.0, right is not None
    )
    return out.transpose(1, 2), lse.squeeze(-1)


def _cudnn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    left: Bound,
    right: Bound,
) -> tuple[Tensor, Tensor, Tensor]:
    assert left is None
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout of zero
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        *_heads_first(dout, q, k, v, out),
        lse[..., None],
        seed,
        seed,
        None,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        right is not None,
    )
    dq, dk, dv = _heads_first(*gradients)
    return dq, dk, dv


KERNELS: dict[str, LocalKernel] = {
    kernel.name: kernel
    for kernel in (
        LocalKernel("eager", _eager_forward, _eager_backward),
        LocalKernel("sdpa_flash", _flash_forward, _flash_backward),
        LocalKernel("sdpa_cudnn", _cudnn_forward, _cudnn_backward),
        LocalKernel("fa2", _fa2_forward, _fa2_backward),
        LocalKernel("fa4", _fa4_forward, _fa4_backward),
    )
}
