"""AdamW with both moments in 8 bits, in one pass: read codes, update in fp32, write codes.

A block is 256 neighbouring values of a row (fewer at a row's end) with one fp32 scale, its largest
magnitude. 7 bytes of traffic per parameter become 4 to 12 with the weight and the gradient; what
this is for is memory: 2.03 bytes a parameter for the moments instead of 4 (bf16) or 8 (fp32).
Values and codes are those of `lsai_core.optimizers.adam8bit`, found by arithmetic instead of a
table.
"""

import triton
import triton.language as tl
from torch import Tensor

from lsai_core.optimizers.adamw_kernel import rounding_arguments, updated
from lsai_core.optimizers.base import coefficients
from lsai_core.optimizers.rounding import Noise
from lsai_core.optimizers.rounding_kernel import random_bits, rounded

VALUES: tl.constexpr = tl.constexpr(256)
BLOCKS = 8  # blocks of one program


@triton.jit
def _power(level):
    """10^(level - 6), level 0..6."""
    high = tl.where(level == 6, 1.0, tl.where(level == 5, 1e-1, 1e-2))
    low = tl.where(level == 3, 1e-3, tl.where(level == 2, 1e-4, tl.where(level == 1, 1e-5, 1e-6)))
    return tl.where(level >= 4, high, low)


@triton.jit
def _value(index, EXTRA: tl.constexpr):
    """Magnitude of an index: 2^(level + EXTRA) steps in the decade below 10^(level - 6). EXTRA: 0
    signed, 1 unsigned."""
    t = index + EXTRA
    level = (
        (t >= (2 << EXTRA)).to(tl.int32)
        + (t >= (4 << EXTRA)).to(tl.int32)
        + (t >= (8 << EXTRA)).to(tl.int32)
    )
    level += (
        (t >= (16 << EXTRA)).to(tl.int32)
        + (t >= (32 << EXTRA)).to(tl.int32)
        + (t >= (64 << EXTRA)).to(tl.int32)
    )
    steps = (level * 0 + 1) << (level + EXTRA)
    of_a_step = ((127 - level - EXTRA) << 23).to(tl.float32, bitcast=True)  # 1 / steps
    fraction = ((t - steps).to(tl.float32) + 0.5) * of_a_step
    return tl.where(index == 0, 0.0, _power(level) * (0.1 + 0.9 * fraction))


@triton.jit
def _signed(code, scale):
    """The values of signed codes: 128 stands for the scale itself, the rest from there on is
    negative."""
    value = _value(code & 127, 0) * tl.where(code >= 128, -scale, scale)
    return tl.where(code == 128, scale, value)


@triton.jit
def _unsigned(code, scale):
    """The values of unsigned codes: 255 stands for the scale itself."""
    return tl.where(code == 255, 1.0, _value(code, 1)) * scale


@triton.jit
def _index(a, EXTRA: tl.constexpr):
    """Index of the value that stands for a magnitude in 0..1, without the largest, which stands for
    1."""
    level = (a > 1e-6).to(tl.int32) + (a > 1e-5).to(tl.int32) + (a > 1e-4).to(tl.int32)
    level += (a > 1e-3).to(tl.int32) + (a > 1e-2).to(tl.int32) + (a > 1e-1).to(tl.int32)
    steps = (level * 0 + 1) << (level + EXTRA)
    step = ((a / _power(level) - 0.1) * (steps.to(tl.float32) / 0.9)).to(tl.int32)
    return steps + tl.minimum(tl.maximum(step, 0), steps - 1) - EXTRA


@triton.jit(do_not_specialize=["seed", "step", "parameter"])
def adamw8_update(
    weight,
    gradient,
    mean8,
    mean_scale,
    square8,
    square_scale,
    factor,
    columns,
    blocks_of_row,
    blocks,
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
    BLOCKS: tl.constexpr,
):
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
    exists = block < blocks
    row = block // blocks_of_row
    column = (block - row * blocks_of_row)[:, None] * VALUES + tl.arange(0, VALUES)[None, :]
    at = row[:, None] * columns + column
    inside = (column < columns) & exists[:, None]

    code = tl.load(mean8 + at, mask=inside, other=0).to(tl.int32)
    m = _signed(code, tl.load(mean_scale + block, mask=exists, other=0.0)[:, None])
    code = tl.load(square8 + at, mask=inside, other=0).to(tl.int32)
    v = _unsigned(code, tl.load(square_scale + block, mask=exists, other=0.0)[:, None])
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    w, m, v = updated(w, g, m, v, keep, rate, new1, beta2, new2, inverse_root, eps)
    if STOCHASTIC:
        begin = first + row * columns + (block - row * blocks_of_row) * VALUES
        bits = random_bits(begin[:, None], seed, step, parameter, VALUES, ALIGNED)
        tl.store(weight + at, rounded(w, bits), mask=inside)
    else:
        tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)

    largest = tl.max(tl.abs(m), 1)
    tl.store(mean_scale + block, largest, mask=exists)
    a = tl.abs(m) / tl.where(largest > 0, largest, 1.0)[:, None]
    code = tl.where(a < 2.75e-7, 0, _index(a, 0)) + tl.where(m < 0, 128, 0)
    code = tl.where((a >= 1.0 - 0.9 / 256) & (m > 0), 128, code)
    tl.store(mean8 + at, tl.where((a < 2.75e-7), 0, code).to(tl.uint8), mask=inside)
    largest = tl.max(v, 1)
    tl.store(square_scale + block, largest, mask=exists)
    a = v / tl.where(largest > 0, largest, 1.0)[:, None]
    code = tl.where(a >= 1.0 - 0.9 / 512, 255, _index(a, 1))
    tl.store(square8 + at, tl.where(v > 0, code, 0).to(tl.uint8), mask=inside)


def adamw8_(
    weight: Tensor,
    gradient: Tensor,
    mean8: Tensor,
    mean_scale: Tensor,
    square8: Tensor,
    square_scale: Tensor,
    factor: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    noise: Noise | None = None,
) -> None:
    """Update a matrix and its moments in place for step number `step` (from 1).

    weight, gradient (N, K) fp32 or bf16; mean8, square8 (N, K) uint8; their scales (N, K / 256,
    rounded up) fp32; all contiguous. `factor`: fp32 scalar on the device, multiplied into the
    gradient (clipping). The gradient is left as it is. `noise`: a bf16 weight is rounded
    stochastically by it, without to nearest.
    """
    columns, blocks_of_row = weight.shape[1], mean_scale.shape[1]
    assert blocks_of_row == triton.cdiv(columns, VALUES.value)
    blocks, numbers = mean_scale.numel(), coefficients(step, lr, betas, eps, weight_decay)
    adamw8_update[(triton.cdiv(blocks, BLOCKS),)](
        weight,
        gradient,
        mean8,
        mean_scale,
        square8,
        square_scale,
        factor,
        columns,
        blocks_of_row,
        blocks,
        *numbers,
        **rounding_arguments(weight, noise, columns),
        BLOCKS=BLOCKS,
        num_warps=8,
        enable_fp_fusion=False,
    )
