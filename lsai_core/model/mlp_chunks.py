"""The feed-forward layer in chunks of tokens: its hidden activations exist for one chunk at a time,
forward and backward.

Nothing in the layer looks at two tokens at once. So the forward pass computes one chunk after the
other and keeps the layer's input alone, and the backward pass computes gate and up of a chunk
again, then its gradients, those of the weights summed in fp32. Source: TiledMLP of ALST (Bekman et
al. 2025, arXiv:2506.13996).

Inside of a checkpointed block the layer comes last, and recomputing it for the block would be in
vain: the backward pass above recomputes it anyway. Recomputation ends as soon as everything that
was saved is there again. Hence two autograd functions: `_Keep` saves the input *before* anything is
computed and owns the gradients; `_Compute` behind it has the result and hands the result's gradient
through, which `_Keep` takes for what it is.

Both passes are custom operators: torch.compile would unroll the loop, and keep what the forward
pass had.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lsai_core.model import products
from lsai_core.model.swiglu import swiglu, swiglu_backward


def swiglu_mlp(x_BSD: Tensor, gate_up_ED: Tensor, down_DF: Tensor, chunk: int) -> Tensor:
    """(B, S, D) = down(silu(gate(x)) * up(x)), `chunk` tokens at a time; E = 2 F. Keeps x alone for
    the backward pass.

    Under autocast the products run in its dtype, as F.linear would.
    """
    device = x_BSD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_BSD, gate_up_ED, down_DF = x_BSD.to(dtype), gate_up_ED.to(dtype), down_DF.to(dtype)
    x_ND = _Keep.apply(x_BSD.flatten(0, -2), gate_up_ED, down_DF, chunk)
    return _Compute.apply(x_ND, gate_up_ED.detach(), down_DF.detach(), chunk).view(x_BSD.shape)


def parts(tokens: int, chunk: int) -> list[slice]:
    """The chunks of so many tokens, in order; the last one may be shorter."""
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gate_up_ED: Tensor, down_DF: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(x_ND, gate_up_ED, down_DF)
        ctx.chunk = chunk
        return x_ND.view_as(x_ND)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *mlp_backward(grad_ND.contiguous(), *ctx.saved_tensors, ctx.chunk), None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gate_up_ED: Tensor, down_DF: Tensor, chunk: int) -> Tensor:
        return mlp_forward(x_ND, gate_up_ED, down_DF, chunk)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad_ND, None, None, None


@torch.library.custom_op("lsai::chunked_mlp", mutates_args=())
def mlp_forward(x_ND: Tensor, gate_up_ED: Tensor, down_DF: Tensor, chunk: int) -> Tensor:
    """(N, D) in the dtype of x."""
    return forward_in(parts(len(x_ND), chunk), x_ND, gate_up_ED, down_DF)


def forward_in(slices: list[slice], x_ND: Tensor, gate_up_ED: Tensor, down_DF: Tensor) -> Tensor:
    """The forward pass over these chunks, one after the other."""
    out_ND = torch.empty_like(x_ND)
    for part in slices:
        torch.mm(swiglu(x_ND[part] @ gate_up_ED.T), down_DF.T, out=out_ND[part])
    return out_ND


@mlp_forward.register_fake
def _(x_ND: Tensor, gate_up_ED: Tensor, down_DF: Tensor, chunk: int) -> Tensor:
    return x_ND.new_empty(x_ND.shape)


@torch.library.custom_op("lsai::chunked_mlp_backward", mutates_args=())
def mlp_backward(
    grad_ND: Tensor, x_ND: Tensor, gate_up_ED: Tensor, down_DF: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of both weights, in their dtypes."""
    return backward_in(parts(len(x_ND), chunk), grad_ND, x_ND, gate_up_ED, down_DF)


def backward_in(
    slices: list[slice], grad_ND: Tensor, x_ND: Tensor, gate_up_ED: Tensor, down_DF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass over these chunks, one after the other."""
    dx_ND, only = torch.empty_like(x_ND), len(slices) == 1
    dgate_up_ED: Tensor | None = None
    ddown_DF: Tensor | None = None
    for part in slices:
        grad_CD, x_CD = grad_ND[part], x_ND[part]
        dgate_up_CE, h_CF = swiglu_backward(grad_CD @ down_DF, x_CD @ gate_up_ED.T)
        ddown_DF = products.plus_product(ddown_DF, grad_CD.T, h_CF, only)
        del h_CF
        dgate_up_ED = products.plus_product(dgate_up_ED, dgate_up_CE.T, x_CD, only)
        torch.mm(dgate_up_CE, gate_up_ED, out=dx_ND[part])
        del dgate_up_CE  # before the next chunk's are made
    assert dgate_up_ED is not None and ddown_DF is not None
    return dx_ND, dgate_up_ED.to(gate_up_ED.dtype), ddown_DF.to(down_DF.dtype)


@mlp_backward.register_fake
def _(
    grad_ND: Tensor, x_ND: Tensor, gate_up_ED: Tensor, down_DF: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x_ND.new_empty(x_ND.shape), torch.empty_like(gate_up_ED), torch.empty_like(down_DF)
