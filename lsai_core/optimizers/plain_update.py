"""AdamW by torch's operations on some values at a time: what the Triton kernels compute.

It serves where there is no Triton, and is what the kernels are tested with: the same operations
in the same order. With both moments in bf16 or fp32, weights and moments are equal to the
kernel's to the last bit; codes of 8 bits differ where a value lies at the edge between two.

On one core it updates some 45 million bf16 weights a second with stochastic rounding and 7 million
with moments in 8 bits; torch's fused AdamW, 860 million.
"""

import dataclasses

import torch
from torch import Tensor

from lsai_core.optimizers.adam8bit import quantized, restored
from lsai_core.optimizers.base import Pieces, coefficients, pieces
from lsai_core.optimizers.rounding import Noise, rounded

AT_ONCE = 2**16  # values that are updated together: what that needs in between stays at some MiB


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
    cut: Pieces = pieces,
) -> None:
    """Update a weight and its moments in place for step number `step` (from 1).

    `moments_and_factor`: the two moments like the weight, or uint8 codes and scales of each
    (`adam8bit.moments_of`), and the factor, an fp32 scalar, that the gradient is multiplied by.
    `noise`: a bf16 weight is rounded stochastically by it, without to nearest. `cut`: into which
    rows that are updated together.
    """
    *whole_moments, factor = moments_and_factor
    numbers = coefficients(step, lr, betas, eps, weight_decay)
    row = weight[0].numel()
    for begin, end in cut(len(weight), max(1, AT_ONCE // row)):
        here = noise and dataclasses.replace(noise, first=noise.first + begin * row)
        moments = [moment[begin:end] for moment in whole_moments]
        g = gradient[begin:end].float() * factor
        _update_piece(weight[begin:end], g, moments, numbers, here)


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
