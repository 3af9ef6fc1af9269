"""Output layer and cross-entropy in one: the loss of a language model without all its logits.

Written plainly, the last layer is the largest tensor of a step: 8192 tokens times 131072 words are
2 GiB of bf16 logits, as many again in fp32 for the softmax, and both once more as gradients. Here
the hidden states go through in chunks. The logits of a chunk are overwritten by their own gradient,
which is multiplied at once into the gradients of the hidden states and of the weight; when the
forward pass ends, no logits exist, and the backward pass only scales what is ready. Sources:
Wijmans et al. 2024, arXiv:2411.09009; Hsu et al. 2024 (Liger), arXiv:2410.10989.

The price: the gradients are computed also if nobody asks for the backward pass while gradients are
enabled.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from lsai_core import kernels
from lsai_core.model import products

Reduction = Literal["mean", "sum"]

# Logits of one chunk, if nobody says how many tokens. Large enough that a chunk's matrix products
# fill a GPU, small beside a model whose logits matter.
CHUNK_BYTES = 2 << 30


def linear_cross_entropy(
    hidden_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    reduction: Reduction = "mean",
    chunk: int | None = None,
    cross_entropy_: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Cross-entropy (nats, fp32 scalar) of logits `hidden @ weight.T` against integer targets; mean
    or sum over tokens. `chunk`: tokens at a time; as many as have `CHUNK_BYTES` of logits if not
    given.

    Under autocast the products run in its dtype, as F.linear would. `cross_entropy_` stands for the
    one below where the logits are a process's part of all.
    """
    device = hidden_BSD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_BSD, weight_VD = hidden_BSD.to(dtype), weight_VD.to(dtype)
    hidden_ND, targets_N = hidden_BSD.flatten(0, -2), targets_BS.flatten()
    usual = max(1, CHUNK_BYTES // (weight_VD.shape[0] * hidden_ND.element_size()))
    rows = usual if chunk is None else chunk
    scale = 1.0 / len(targets_N) if reduction == "mean" else 1.0
    # Asked here, because inside of the function gradients are always off.
    learning = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    losses_of = cross_entropy_ or _cross_entropy_
    return _LinearCrossEntropy.apply(
        hidden_ND, weight_VD, targets_N, scale, rows, learning, losses_of
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        scale: float,
        rows: int,
        learning: bool,
        losses_of: Callable[..., Tensor],
    ) -> Tensor:
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
        total = torch.zeros((), device=hidden_ND.device, dtype=torch.float32)
        grad_hidden_ND = torch.empty_like(hidden_ND) if learning else None
        grad_weight_VD = None
        for start in range(0, len(targets_N), rows):
            part = slice(start, start + rows)
            logits_CV = hidden_ND[part] @ weight_VD.T
            total += losses_of(logits_CV, targets_N[part], scale, gradient=learning).sum()
            if grad_hidden_ND is not None:
                torch.mm(logits_CV, weight_VD, out=grad_hidden_ND[part])
                grad_weight_VD = products.plus_product(
                    grad_weight_VD, logits_CV.T, hidden_ND[part], len(targets_N) <= rows
                )
            del logits_CV  # before the next chunk's are made
        if grad_weight_VD is not None:
            ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        # The multi-tensor kernel, because a plain product with a scalar on the device is not
        # vectorized.
        torch._foreach_mul_((grad_hidden_ND, grad_weight_VD), grad_loss.to(grad_hidden_ND.dtype))
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None


def _cross_entropy_(
    logits_NV: Tensor, targets_N: Tensor, scale: float, *, gradient: bool
) -> Tensor:
    """Losses (N,) fp32; with `gradient`, the logits are overwritten by `scale` times their
    gradient."""
    if kernels.serves(logits_NV):
        return _kernel(logits_NV, targets_N, scale, gradient)
    float_NV = logits_NV.float()
    log_sum_N1 = float_NV.logsumexp(-1, keepdim=True)
    at_N1 = targets_N[:, None]
    losses_N = (log_sum_N1 - float_NV.gather(-1, at_N1)).squeeze(-1)
    if gradient:
        torch.exp(float_NV - log_sum_N1, out=float_NV)
        float_NV.scatter_add_(-1, at_N1, torch.full_like(log_sum_N1, -1.0))
        logits_NV.copy_(float_NV.mul_(scale))
    return losses_N


@torch.library.custom_op("lsai::cross_entropy_", mutates_args=("logits_NV",))
def _kernel(logits_NV: Tensor, targets_N: Tensor, scale: float, gradient: bool) -> Tensor:
    from lsai_core.kernels.cross_entropy import cross_entropy_

    return cross_entropy_(logits_NV, targets_N, scale, gradient=gradient)


@_kernel.register_fake
def _(logits_NV: Tensor, targets_N: Tensor, scale: float, gradient: bool) -> Tensor:
    return logits_NV.new_empty(len(targets_N), dtype=torch.float32)
