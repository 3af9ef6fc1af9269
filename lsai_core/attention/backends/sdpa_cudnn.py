"""torch's scaled_dot_product_attention, NVIDIA's kernel (see `lsai_core.attention.sdpa`)."""

import functools

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lsai_core.attention.registry import AMPERE_ON, HALF, Backend, Bound, TileKernel
from lsai_core.attention.sdpa import sdpa_attention
from lsai_core.attention.tiles import heads_first

aten = torch.ops.aten


def _tile_forward(
    q: Tensor, k: Tensor, v: Tensor, left: Bound, right: Bound
) -> tuple[Tensor, Tensor]:
    assert left is None, "cuDNN through torch has no window; `tile_backend` refuses it"
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *heads_first(q, k, v), None, True, 0.0, right is not None
    )
    return out.transpose(1, 2), lse.squeeze(-1)


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
    assert left is None
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout of zero
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first(dout, q, k, v, out),
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
    dq, dk, dv = heads_first(*gradients)
    return dq, dk, dv


BACKEND = Backend(
    "sdpa_cudnn",
    functools.partial(sdpa_attention, kernel=SDPBackend.CUDNN_ATTENTION),
    fused=True,
    dtypes={"cuda": HALF},
    head_dims=(8, 128),
    head_dim_multiple=8,
    single_token=False,
    compute_capability=AMPERE_ON,
    speed=5,
    tiles=TileKernel(_tile_forward, _tile_backward),
    about="torch's SDPA, NVIDIA cuDNN",
    color="#D55E00",
    marker="s",
)
