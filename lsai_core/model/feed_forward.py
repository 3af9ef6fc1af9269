"""The feed-forward layer, SwiGLU, in three ways that compute the same and keep different things.

Plain, the backward pass keeps three tensors of the hidden width F per token: gate and up,
silu(gate), and the product h.

Fused, SwiGLU and the projection behind it are one differentiable step, which keeps gate and up
alone; h is computed again, in the same pass over memory that computes the gradients
(`lsai_core.kernels.swiglu`). On the 8-billion-parameter course model that is 7 GiB less at 8192
tokens, and faster.

In chunks, the hidden activations exist for some tokens at a time, forward and backward. Nothing in
the layer looks at two tokens at once. So the forward pass computes one chunk after the other and
keeps the layer's input alone, and the backward pass computes gate and up of a chunk again, then its
gradients, those of the weights summed in fp32. Source: TiledMLP of ALST (Bekman et al. 2025,
arXiv:2506.13996).

Inside of a checkpointed block the layer comes last, and recomputing it for the block would be in
vain: its backward pass recomputes what it needs anyway. Recomputation ends as soon as everything
that was saved is there again. Hence two autograd functions in each way: one (`_Keep...`) saves what
the gradient needs *before* anything is computed and owns the gradients; one behind it
(`_Compute...`) has the result and hands the result's gradient through, which the first takes for
what it is.

The chunked passes are custom operators: torch.compile would unroll the loop, and keep what the
forward pass had.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsai_core import kernels
from lsai_core.config.model import ModelConfig
from lsai_core.model import products


@torch.library.custom_op("lsai::swiglu", mutates_args=())
def swiglu(gate_up_N2F: Tensor) -> Tensor:
    """silu(gate) * up for the two halves of each row: (N, 2F) -> (N, F)."""
    if kernels.available(gate_up_N2F.device):
        from lsai_core.kernels.swiglu import forward

        return forward(gate_up_N2F)
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
    return F.silu(gate_NF) * up_NF


@swiglu.register_fake
def _(gate_up_N2F: Tensor) -> Tensor:
    return gate_up_N2F.new_empty(gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2)


@torch.library.custom_op("lsai::swiglu_backward", mutates_args=())
def swiglu_backward(grad_h_NF: Tensor, gate_up_N2F: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `swiglu` (N, 2F), and its output h (N, F) once more."""
    if kernels.available(grad_h_NF.device):
        from lsai_core.kernels.swiglu import backward

        return backward(grad_h_NF.contiguous(), gate_up_N2F)
    gate_NF, up_NF = gate_up_N2F.float().chunk(2, dim=-1)
    share_NF = torch.sigmoid(gate_NF)
    silu_NF = gate_NF * share_NF
    grad_NF = grad_h_NF.float()
    grad_gate_NF = grad_NF * up_NF * (share_NF + silu_NF * (1 - share_NF))
    grad_N2F = torch.cat((grad_gate_NF, grad_NF * silu_NF), dim=-1)
    return grad_N2F.to(grad_h_NF.dtype), (silu_NF * up_NF).to(grad_h_NF.dtype)


@swiglu_backward.register_fake
def _(grad_h_NF: Tensor, gate_up_N2F: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up_N2F), grad_h_NF.new_empty(grad_h_NF.shape)


class _SwiGLUDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_N2F: Tensor, weight_DF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_N2F, weight_DF)
        return swiglu(gate_up_N2F) @ weight_DF.T

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate_up_N2F, weight_DF = ctx.saved_tensors
        grad_gate_up_N2F, h_NF = swiglu_backward(grad_ND @ weight_DF, gate_up_N2F)
        return grad_gate_up_N2F, grad_ND.T @ h_NF


class _KeepGateUp(_SwiGLUDown):
    """Saves what the gradient needs before anything is computed, and owns the gradient; the result
    is a stand-in of no size."""

    @staticmethod
    def forward(ctx: Any, gate_up_N2F: Tensor, weight_DF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_N2F, weight_DF)
        return gate_up_N2F.new_zeros(()).expand(gate_up_N2F.shape[0], weight_DF.shape[0])


class _ComputeDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in_ND: Tensor, gate_up_N2F: Tensor, weight_DF: Tensor) -> Tensor:
        return swiglu(gate_up_N2F) @ weight_DF.T

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad_ND, None, None


def swiglu_down(gate_up_BS2F: Tensor, weight_DF: Tensor) -> Tensor:
    """(B, S, D) = (silu(gate) * up) @ weight.T, keeping only `gate_up_BS2F` for the backward pass.

    Under autocast the weight is cast to its dtype, as F.linear would.
    """
    if torch.is_autocast_enabled(gate_up_BS2F.device.type):
        weight_DF = weight_DF.to(gate_up_BS2F.dtype)
    gate_up_N2F = gate_up_BS2F.flatten(0, -2)
    if torch.compiler.is_compiling():  # the compiler drops by itself what nobody reads
        out_ND = _SwiGLUDown.apply(gate_up_N2F, weight_DF)
    # recomputation for gradient checkpointing ends when all that was saved is there again: before
    # this product
    else:
        stand_in_ND = _KeepGateUp.apply(gate_up_N2F, weight_DF)
        out_ND = _ComputeDown.apply(stand_in_ND, gate_up_N2F.detach(), weight_DF.detach())
    return out_ND.view(*gate_up_BS2F.shape[:-1], weight_DF.shape[0])


def swiglu_mlp(x_BSD: Tensor, gate_up_ED: Tensor, down_DF: Tensor, chunk: int) -> Tensor:
    """(B, S, D) = down(silu(gate(x)) * up(x)), `chunk` tokens at a time; E = 2 F. Keeps x alone for
    the backward pass.

    Under autocast the products run in its dtype, as F.linear would.
    """
    device = x_BSD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_BSD, gate_up_ED, down_DF = x_BSD.to(dtype), gate_up_ED.to(dtype), down_DF.to(dtype)
    x_ND = _KeepInput.apply(x_BSD.flatten(0, -2), gate_up_ED, down_DF, chunk)
    return _ComputeLayer.apply(x_ND, gate_up_ED.detach(), down_DF.detach(), chunk).view(x_BSD.shape)


def parts(tokens: int, chunk: int) -> list[slice]:
    """The chunks of so many tokens, in order; the last one may be shorter."""
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


class _KeepInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gate_up_ED: Tensor, down_DF: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(x_ND, gate_up_ED, down_DF)
        ctx.chunk = chunk
        return x_ND.view_as(x_ND)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *mlp_backward(grad_ND.contiguous(), *ctx.saved_tensors, ctx.chunk), None


class _ComputeLayer(torch.autograd.Function):
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


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202), plain, `fused`, or
    `chunk` tokens at a time."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fused = False
        self.chunk: int | None = None
        self.swiglu_down = swiglu_down  # processes that share the matrices add their results
        self.gate_up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.chunk is not None:
            return swiglu_mlp(x_BSD, self.gate_up.weight, self.down.weight, self.chunk)
        if self.fused:
            return self.swiglu_down(self.gate_up(x_BSD), self.down.weight)
        gate_BSF, up_BSF = self.gate_up(x_BSD).chunk(2, dim=-1)
        return self.down(F.silu(gate_BSF) * up_BSF)
