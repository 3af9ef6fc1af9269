"""The gradient of RMSNorm with a residual connection around it, in one pass.

With r = 1 / sqrt(mean(x^2) + eps) per row and y = x * r * w, the gradient is

    dx = r * (dy * w - x * r^2 * mean(dy * w * x)) + d(residual),        dw = sum over rows of dy *
                                                                         x * r

A program walks over many rows and keeps its part of dw in registers; a row is read once (x, dy and
the gradient that comes along the residual connection) and written once. torch.compile's version of
the same takes about twice the time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS_PER_SM = 4


@triton.jit
def rms_norm_backward(
    grad_ND,
    x_ND,
    weight_D,
    scale_N,
    residual_ND,
    out_ND,
    parts_PD,
    rows,
    columns: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    weight = tl.load(weight_D + column, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, rows, programs):
        at = tl.cast(row, tl.int64) * columns + column
        grad = tl.load(grad_ND + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ND + at, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ND + at, mask=inside, other=0.0).to(tl.float32)
        normed = x * tl.load(scale_N + row)
        part += grad * normed
        grad *= weight
        mean = tl.sum(grad * normed, 0) / columns
        out = (grad - normed * mean) * tl.load(scale_N + row) + residual
        tl.store(out_ND + at, out.to(out_ND.dtype.element_ty), mask=inside)
    tl.store(parts_PD + program * columns + column, part, mask=inside)


def backward(
    grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, scale_N: Tensor, residual_ND: Tensor
) -> tuple[Tensor, Tensor]:
    """dx + residual (N, D) in the dtype of x, and dw (D,) in the dtype of the weight; all inputs
    contiguous."""
    rows, columns = x_ND.shape
    processors = torch.cuda.get_device_properties(x_ND.device).multi_processor_count
    programs = min(rows, PROGRAMS_PER_SM * processors)
    out_ND = torch.empty_like(x_ND)
    parts_PD = torch.empty(programs, columns, device=x_ND.device, dtype=torch.float32)
    block = triton.next_power_of_2(columns)
    rms_norm_backward[(programs,)](
        grad_ND,
        x_ND,
        weight_D,
        scale_N,
        residual_ND,
        out_ND,
        parts_PD,
        rows,
        columns=columns,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
    )
    return out_ND, parts_PD.sum(0).to(weight_D.dtype)
