"""AdamW by torch's operations on some values at a time: what the Triton kernels compute.

It serves where there is no Triton, and is what the kernels are tested with: the same operations
in the same order. With both moments in bf16 or fp32, weights and moments are equal to the
kernel's to the last bit; codes of 8 bits differ where a value lies at the edge between two.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lsai_core.optimizers.adam8bit import quantized, restored
from lsai_core.optimizers.base import coefficients
from lsai_core.optimizers.rounding import Noise, rounded

_AT_ONCE = 2**16  # values that are updated together: what that needs in between stays at some MiB


def plain_adamw_(
    weight: Tensor,
    gradient: Tensor,
    *moments_and_factor: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    noise: Noise | None = None,
) -> None:
    """Update a weight and its moments in place for step number `step` (from 1).

    `moments_and_factor`: the two moments like the weight, or uint8 codes and scales of each
    (`adam8bit.moments_of`), and the factor, an fp32 scalar, that the gradient is multiplied by.
    `noise`: a bf16 weight is rounded stochastically by it, without to nearest.
    """
    *whole_moments, factor = moments_and_factor
    numbers = coefficients(step, lr, betas, eps, weight_decay)
    row = weight[0].numel()
    tensors = (weight, gradient, *whole_moments)
    first = noise.first if noise is not None else 0
    for piece, gradient_, *moments in zip(
        *(tensor.split(max(1, _AT_ONCE // row)) for tensor in tensors), strict=True
    ):
        here = dataclasses.replace(noise, first=first) if noise is not None else None
        _update_piece(piece, gradient_.float() * factor, moments, numbers, here)
        first += piece.numel()


def _update_piece(
    weight: Tensor,
    g: Tensor,
    moments: list[Tensor],
    numbers: tuple[float, ...],
    noise: Noise | None,
) -> None:
    keep, rate, new1, beta2, new2, inverse_root, eps = numbers
    eight_bit = len(moments) == 4
    if eight_bit:
        m, v = restored(moments[0], moments[1], True), restored(moments[2], moments[3], False)
    else:
        m, v = moments[0].float(), moments[1].float()
    m = m + new1 * (g - m)
    v = beta2 * v + new2 * g * g
    w = weight.float() * keep - rate * m / (v.sqrt() * inverse_root + eps)
    weight.copy_(rounded(w, noise) if weight.dtype == torch.bfloat16 else w)
    new = (*quantized(m, True), *quantized(v, False)) if eight_bit else (m, v)
    for moment, value in zip(moments, new, strict=True):
        moment.copy_(value)
