"""Casts to fp8 that write both memory layouts and the maximum in one pass, alone and fused with
SwiGLU.

Hopper's fp8 tensor cores read both operands along the summed dimension, so a training step needs
most tensors as they lie and transposed. A tile is read once, scaled, rounded, and stored twice; its
largest magnitude goes to an atomic maximum, from which the next step's scale is made (delayed
scaling). SwiGLU's output exists in fp8 only, and its backward kernel writes the gradient of gate
and up and the recomputed output as the fp8 matrices that the following products read; only the
gradient's transposition is a pass of its own, over single bytes: 15 bytes per element where
separate casts move over 30.

`state` is the scaling state of one tensor: fp32 (3, 4), rows scale, 1 / scale, maximum
(`lsai_core.fp8.scales`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
E5M2_MAX: tl.constexpr = tl.constexpr(57344.0)


@triton.jit
def _rounded(x, scale, E5M2: tl.constexpr):
    """x * scale as the bits of fp8, saturating."""
    x = x * scale
    if E5M2:
        x = tl.where(x > E5M2_MAX, E5M2_MAX, tl.where(x < -E5M2_MAX, -E5M2_MAX, x))
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    x = tl.where(x > E4M3_MAX, E4M3_MAX, tl.where(x < -E4M3_MAX, -E4M3_MAX, x))
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def cast_tiles(
    x_MN,
    state,
    row_MN,
    column_NM,
    M,
    N,
    E5M2: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)[None, :]
    inside = (m < M) & (n < N)
    x = tl.load(x_MN + m * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_max(state + 8, tl.max(tl.max(tl.abs(x), 1), 0), sem="relaxed")
    bits = _rounded(x, tl.load(state), E5M2)
    if ROW:
        tl.store(row_MN + m * N + n, bits, mask=inside)
    if COLUMN:
        tl.store(column_NM + tl.trans(n) * M + tl.trans(m), tl.trans(bits), mask=tl.trans(inside))


@triton.jit
def swiglu_cast_tiles(gate_up, state, h_MF, F, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(gate_up + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    h = gate * tl.sigmoid(gate) * up
    tl.atomic_max(state + 8, tl.max(tl.abs(h), 0), sem="relaxed")
    tl.store(h_MF + row * F + column, _rounded(h, tl.load(state), False), mask=inside)


@triton.jit
def swiglu_backward_cast_tiles(
    grad_h, gate_up, h_state, grad_state, row_M2F, h_FM, M, F, BM: tl.constexpr, BN: tl.constexpr
):
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)[None, :]
    inside = (m < M) & (n < F)
    gate = tl.load(gate_up + m * 2 * F + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + m * 2 * F + F + n, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_h + m * F + n, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    h8 = _rounded(silu * up, tl.load(h_state), False)
    tl.store(h_FM + tl.trans(n) * M + tl.trans(m), tl.trans(h8), mask=tl.trans(inside))
    scale = tl.load(grad_state)
    grad_gate = grad * up * (share + silu * (1.0 - share))
    grad_up = grad * silu
    largest = tl.maximum(
        tl.max(tl.max(tl.abs(grad_gate), 1), 0), tl.max(tl.max(tl.abs(grad_up), 1), 0)
    )
    tl.atomic_max(grad_state + 8, largest, sem="relaxed")
    tl.store(row_M2F + m * 2 * F + n, _rounded(grad_gate, scale, True), mask=inside)
    tl.store(row_M2F + m * 2 * F + F + n, _rounded(grad_up, scale, True), mask=inside)


@triton.jit
def turn_tiles(row_MN, column_NM, M, N, BM: tl.constexpr, BN: tl.constexpr):
    m = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)[None, :]
    inside = (m < M) & (n < N)
    bits = tl.load(row_MN + m * N + n, mask=inside, other=0)
    tl.store(column_NM + tl.trans(n) * M + tl.trans(m), tl.trans(bits), mask=tl.trans(inside))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def cast(
    x_MN: Tensor, state: Tensor, dtype: torch.dtype, *, row: bool, column: bool
) -> tuple[Tensor, Tensor]:
    """x * scale in `dtype` as (M, N) and, transposed in memory, (N, M); what is not asked for is
    empty. Updates `state`."""
    rows, columns = x_MN.shape
    row_MN = torch.empty(rows if row else 0, columns, device=x_MN.device, dtype=dtype)
    column_NM = torch.empty(columns if column else 0, rows, device=x_MN.device, dtype=dtype)
    bm, bn, warps = (128, 64, 4) if column else (32, 256, 8)  # the fastest of nine on an H200
    cast_tiles[(triton.cdiv(rows, bm), triton.cdiv(columns, bn))](
        x_MN,
        state,
        _bits(row_MN),
        _bits(column_NM),
        rows,
        columns,
        E5M2=dtype == torch.float8_e5m2,
        ROW=row,
        COLUMN=column,
        BM=bm,
        BN=bn,
        num_warps=warps,
    )
    return row_MN, column_NM


def turned(x_MN: Tensor) -> Tensor:
    """One byte a value (M, N), transposed in memory: (N, M)."""
    rows, columns = x_MN.shape
    column_NM = torch.empty(columns, rows, device=x_MN.device, dtype=x_MN.dtype)
    turn_tiles[(triton.cdiv(rows, 128), triton.cdiv(columns, 128))](
        _bits(x_MN), _bits(column_NM), rows, columns, BM=128, BN=128, num_warps=8
    )
    return column_NM


def swiglu_cast(gate_up_M2F: Tensor, state: Tensor) -> Tensor:
    """silu(gate) * up * scale in e4m3 (M, F). Updates `state`."""
    rows, width = gate_up_M2F.shape[0], gate_up_M2F.shape[1] // 2
    h_MF = torch.empty(rows, width, device=gate_up_M2F.device, dtype=torch.float8_e4m3fn)
    block = 4096
    swiglu_cast_tiles[(rows, triton.cdiv(width, block))](
        gate_up_M2F, state, _bits(h_MF), width, BLOCK=block, num_warps=8
    )
    return h_MF


def swiglu_backward_cast(
    grad_h_MF: Tensor, gate_up_M2F: Tensor, h_state: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of gate and up in e5m2 (M, 2F), SwiGLU's output in e4m3, transposed (F, M), and the
    gradient transposed (2F, M).

    Updates `grad_state`; `h_state` is read only, so that the output is rounded as in the forward
    pass.
    """
    rows, width = grad_h_MF.shape
    device = grad_h_MF.device
    row_M2F = torch.empty(rows, 2 * width, device=device, dtype=torch.float8_e5m2)
    h_FM = torch.empty(width, rows, device=device, dtype=torch.float8_e4m3fn)
    bm, bn = 64, 64
    swiglu_backward_cast_tiles[(triton.cdiv(rows, bm), triton.cdiv(width, bn))](
        grad_h_MF,
        gate_up_M2F,
        h_state,
        grad_state,
        _bits(row_M2F),
        _bits(h_FM),
        rows,
        width,
        BM=bm,
        BN=bn,
        num_warps=8,
    )
    # In a kernel of its own: written by the one above, the transposed e5m2 matrix came out wrong
    # (Triton 3.6; the e4m3 one, and the e5m2 one of `cast_tiles`, do not).
    return row_M2F, h_FM, turned(row_M2F)
