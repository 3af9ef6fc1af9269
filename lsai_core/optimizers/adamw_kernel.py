"""AdamW over one tensor in a single pass, and the sum of squares that gradient clipping needs.

The update reads weight, gradient and both moments and writes weight and moments: 7 values per
parameter, the fewest there can be (14 bytes in bf16). Clipping costs no pass of its own: the factor
is a number on the device, multiplied in as the gradient is read. Arithmetic is fp32 whatever the
storage, each operation rounded by IEEE, in the order of `lsai_core.optimizers.plain_update`,
so that weights and moments are equal to those of the plain update to the last bit. Formula:
Loshchilov and Hutter 2019, arXiv:1711.05101.

How a bf16 weight is rounded: `lsai_core.optimizers.rounding`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lsai_core.optimizers.base import coefficients
from lsai_core.optimizers.rounding import TOGETHER, Noise
from lsai_core.optimizers.rounding_kernel import random_bits, rounded

BLOCK = 4096
SUM_BLOCK = 8192


@triton.jit
def updated(w, g, m, v, keep, rate, new1, beta2, new2, inverse_root, eps):
    """One step of AdamW on fp32 values: the new weight and moments. The numbers:
    `lsai_core.optimizers.base.coefficients`."""
    m = m + new1 * (g - m)
    v = beta2 * v + new2 * g * g
    w = w * keep - tl.div_rn(rate * m, tl.sqrt_rn(v) * inverse_root + eps)
    return w, m, v


@triton.jit(do_not_specialize=["seed", "step", "parameter"])
def adamw_update(
    weight,
    gradient,
    mean,
    square,
    factor,
    size,
    keep,
    rate,
    new1,
    beta2,
    new2,
    inverse_root,
    eps,
    seed,
    step,
    parameter,
    first,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    w, m, v = updated(w, g, m, v, keep, rate, new1, beta2, new2, inverse_root, eps)
    if STOCHASTIC:
        begin_11 = tl.full((1, 1), 0, tl.int64) + (begin + first)
        bits = random_bits(begin_11, seed, step, parameter, BLOCK, ALIGNED)
        tl.store(weight + at, rounded(w, tl.reshape(bits, (BLOCK,))), mask=inside)
    else:
        tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)
    tl.store(mean + at, m.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + at, v.to(square.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_squares(values, size, sums, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(x * x, 0))


def rounding_arguments(weight: Tensor, noise: Noise | None, columns: int = 1) -> dict[str, Any]:
    """The kernels' arguments that say how the weight is rounded; `columns`: tiles may begin at any
    multiple of it."""
    stochastic = noise is not None and weight.dtype == torch.bfloat16
    noise = noise if noise is not None else Noise(0, 0, 0)
    aligned = noise.first % TOGETHER == 0 and columns % TOGETHER == 0
    return {
        "seed": noise.seed,
        "step": noise.step,
        "parameter": noise.parameter,
        "first": noise.first,
        "STOCHASTIC": stochastic,
        "ALIGNED": aligned,
    }


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    factor: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    noise: Noise | None = None,
) -> None:
    """Update `weight`, `mean` and `square` in place for step number `step` (from 1); all contiguous
    and of one size.

    `factor`: fp32 scalar on the device, multiplied into the gradient (clipping). The gradient is
    left as it is. `noise`: a bf16 weight is rounded stochastically by it, without to nearest.
    """
    size = weight.numel()
    numbers = coefficients(step, lr, betas, eps, weight_decay)
    adamw_update[(triton.cdiv(size, BLOCK),)](
        weight,
        gradient,
        mean,
        square,
        factor,
        size,
        *numbers,
        **rounding_arguments(weight, noise, BLOCK),
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )


def total_of_squares(tensors: list[Tensor]) -> Tensor:
    """Sum of the squares of all elements, an fp32 scalar on the device; the same value for the same
    tensors every time."""
    counts = [triton.cdiv(tensor.numel(), SUM_BLOCK) for tensor in tensors]
    sums = torch.empty(sum(counts), device=tensors[0].device, dtype=torch.float32)
    for tensor, count, part in zip(tensors, counts, sums.split(counts), strict=True):
        sum_of_squares[(count,)](tensor, tensor.numel(), part, BLOCK=SUM_BLOCK, num_warps=8)
    return sums.sum()
