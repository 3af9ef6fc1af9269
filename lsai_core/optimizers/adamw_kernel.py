"""AdamW over one tensor in a single pass, and the sum of squares that gradient clipping needs.

The update reads weight, gradient and both moments and writes weight and moments: 7 values per
parameter, the fewest there can be (14 bytes in bf16). Clipping costs no pass of its own: the factor
is a number on the device, multiplied in as the gradient is read. Arithmetic is fp32 whatever the
storage. Formula: Loshchilov and Hutter 2019, arXiv:1711.05101.

A bf16 weight has 8 significant bits, and loses an update of less than 1/512 of it. Rounded
stochastically (Gupta et al. 2015, arXiv:1502.02551), up as often as the rest says, it keeps the
update in the mean.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
SUM_BLOCK = 8192


@triton.jit
def as_stored(w, weight, at, step, STOCHASTIC: tl.constexpr):
    """fp32 values in the dtype of `weight`; for bf16, if wanted, with random bits of (step, at)
    added below the last that stays."""
    if STOCHASTIC and weight.dtype.element_ty == tl.bfloat16:
        bits = w.to(tl.uint32, bitcast=True) + (
            tl.randint(step, at, 4).to(tl.uint32, bitcast=True) >> 16
        )
        w = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return w.to(weight.dtype.element_ty)


@triton.jit(do_not_specialize=["step"])
def adamw_update(
    weight,
    gradient,
    mean,
    square,
    factor,
    size,
    step,
    lr,
    decay,
    beta1,
    beta2,
    eps,
    correction1,
    root_correction2,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w = w * (1.0 - lr * decay) - (lr / correction1) * m / (tl.sqrt(v) / root_correction2 + eps)
    tl.store(weight + at, as_stored(w, weight, at.to(tl.uint32), step, STOCHASTIC), mask=inside)
    tl.store(mean + at, m.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + at, v.to(square.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_squares(values, size, sums, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(x * x, 0))


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
    stochastic: bool = False,
) -> None:
    """Update `weight`, `mean` and `square` in place for step number `step` (from 1); all contiguous
    and of one size. `stochastic`: how a bf16 weight is rounded.

    `factor`: fp32 scalar on the device, multiplied into the gradient (clipping). The gradient is
    left as it is.
    """
    size = weight.numel()
    adamw_update[(triton.cdiv(size, BLOCK),)](
        weight,
        gradient,
        mean,
        square,
        factor,
        size,
        step,
        lr,
        weight_decay,
        betas[0],
        betas[1],
        eps,
        1.0 - betas[0] ** step,
        (1.0 - betas[1] ** step) ** 0.5,
        STOCHASTIC=stochastic,
        BLOCK=BLOCK,
        num_warps=8,
    )


def total_of_squares(tensors: list[Tensor]) -> Tensor:
    """Sum of the squares of all elements, an fp32 scalar on the device; the same value for the same
    tensors every time."""
    counts = [triton.cdiv(tensor.numel(), SUM_BLOCK) for tensor in tensors]
    sums = torch.empty(sum(counts), device=tensors[0].device, dtype=torch.float32)
    for tensor, count, part in zip(tensors, counts, sums.split(counts), strict=True):
        sum_of_squares[(count,)](tensor, tensor.numel(), part, BLOCK=SUM_BLOCK, num_warps=8)
    return sums.sum()
