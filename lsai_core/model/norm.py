"""RMSNorm in front of a sublayer whose result is added back: one function gives both the normed
input and the residual.

Handing the input through lets the backward pass see both of its gradients at once, add them in the
pass that computes the norm's (`lsai_core.kernels.rms_norm`), and save a trip over memory. The
forward pass is plain operations, which torch.compile fuses with the addition before it. Zhang and
Sennrich 2019, arXiv:1910.07467.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lsai_core import kernels


class Norm(torch.nn.RMSNorm):
    """RMSNorm in the dtype of its input, also where its weight is kept in fp32.

    `summed`: where processes share sequences, how their gradients of the weight, a DTensor that is
    whole on each, become one; None elsewhere.
    """

    summed: tuple[Any, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, whole_weight(self).to(x.dtype), self.eps)


def whole_weight(norm: torch.nn.RMSNorm) -> Tensor:
    """The weight of a norm as a plain tensor; `Norm.summed` says how its gradient is summed."""
    summed = getattr(norm, "summed", None)
    if summed is None:
        return norm.weight
    return norm.weight.to_local(grad_placements=summed)  # type: ignore[attr-defined, no-any-return]


@torch.library.custom_op("lsai::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, scale_N: Tensor, residual_ND: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient of x (N, D), with `residual_ND` added, and of the weight (D,)."""
    grad_ND, x_ND, residual_ND = grad_ND.contiguous(), x_ND.contiguous(), residual_ND.contiguous()
    if kernels.available(x_ND.device):
        from lsai_core.kernels.rms_norm import backward

        return backward(grad_ND, x_ND, weight_D, scale_N, residual_ND)
    precise = torch.promote_types(x_ND.dtype, torch.float32)
    scale_N1 = scale_N[:, None].to(precise)
    normed_ND, grad_ND = x_ND.to(precise) * scale_N1, grad_ND.to(precise)
    dweight_D = (grad_ND * normed_ND).sum(0)
    grad_ND = grad_ND * weight_D.to(precise)
    dx_ND = (
        grad_ND - normed_ND * (grad_ND * normed_ND).mean(-1, keepdim=True)
    ) * scale_N1 + residual_ND.to(precise)
    return dx_ND.to(x_ND.dtype), dweight_D.to(weight_D.dtype)


@rms_norm_backward.register_fake
def _(
    grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, scale_N: Tensor, residual_ND: Tensor
) -> tuple[Tensor, Tensor]:
    return x_ND.new_empty(x_ND.shape), torch.empty_like(weight_D)


class _NormAndResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(x_BSD.dtype, torch.float32)
        x_precise = x_BSD.to(precise)
        scale_BS1 = torch.rsqrt(x_precise.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_BSD, weight_D, scale_BS1)
        normed_BSD = x_precise * scale_BS1 * weight_D.to(precise)
        # Not always: compiled by PyTorch 2.11, the result of a `.to` that changes nothing loses its
        # gradient.
        if normed_BSD.dtype != x_BSD.dtype:
            normed_BSD = normed_BSD.to(x_BSD.dtype)
        return normed_BSD, x_BSD.view_as(x_BSD)

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor, residual_BSD: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x_BSD, weight_D, scale_BS1 = ctx.saved_tensors
        dx_ND, dweight_D = rms_norm_backward(
            grad_BSD.flatten(0, -2),
            x_BSD.flatten(0, -2),
            weight_D,
            scale_BS1.flatten(),
            residual_BSD.flatten(0, -2),
        )
        return dx_ND.view(x_BSD.shape), dweight_D, None


def norm_and_residual(x_BSD: Tensor, norm: torch.nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """(norm(x), x), both (B, S, D) in the dtype of x, with one gradient kernel for the two;
    statistics in fp32."""
    assert norm.eps is not None
    return _NormAndResidual.apply(x_BSD, whole_weight(norm), norm.eps)
