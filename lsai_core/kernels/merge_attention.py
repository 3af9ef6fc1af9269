"""Merging a partial output of attention into another one by their log-sum-exp, in one pass and in
place.

With m = max(lse_a, lse_b), w_a = exp(lse_a - m), w_b = exp(lse_b - m):

    out_a <- (w_a out_a + w_b out_b) / (w_a + w_b),        lse_a <- m + log(w_a + w_b)

Each value is read once and written once; as separate operations, `out_a` alone moves three times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit
def merge_attention(
    out,
    lse,
    part,
    part_lse,
    rows,
    columns: tl.constexpr,
    out_b,
    out_s,
    out_h,
    lse_b,
    lse_h,
    lse_s,
    part_b,
    part_s,
    part_h,
    part_lse_b,
    part_lse_h,
    part_lse_s,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    head, batch = tl.program_id(1), tl.cast(tl.program_id(2), tl.int64)
    column = tl.arange(0, BLOCK)
    valid = row < rows
    inside = valid[:, None] & (column < columns)[None, :]
    lse_at = lse + batch * lse_b + head * lse_h + row * lse_s
    old_lse = tl.load(lse_at, mask=valid, other=0.0)
    new_lse = tl.load(
        part_lse + batch * part_lse_b + head * part_lse_h + row * part_lse_s, mask=valid, other=0.0
    )
    top = tl.maximum(old_lse, new_lse)
    old, new = tl.exp(old_lse - top), tl.exp(new_lse - top)
    both = old + new
    out_at = out + batch * out_b + row[:, None] * out_s + head * out_h + column[None, :]
    part_at = part + batch * part_b + row[:, None] * part_s + head * part_h + column[None, :]
    merged = tl.load(out_at, mask=inside, other=0.0) * (old / both)[:, None]
    merged += tl.load(part_at, mask=inside, other=0.0).to(tl.float32) * (new / both)[:, None]
    tl.store(out_at, merged, mask=inside)
    tl.store(lse_at, top + tl.log(both), mask=valid)


def merge(out_BSHD: Tensor, lse_BHS: Tensor, part_BSHD: Tensor, part_lse_BHS: Tensor) -> None:
    """`lsai_core.context.merge.merge` for fp32 `out` and `lse` on CUDA; the head dimension must be
    contiguous."""
    batch, length, heads, columns = out_BSHD.shape
    with torch.cuda.device(out_BSHD.device):
        merge_attention[(triton.cdiv(length, ROWS), heads, batch)](
            out_BSHD,
            lse_BHS,
            part_BSHD,
            part_lse_BHS,
            length,
            columns,
            *out_BSHD.stride()[:3],
            *lse_BHS.stride(),
            *part_BSHD.stride()[:3],
            *part_lse_BHS.stride(),
            ROWS=ROWS,
            BLOCK=triton.next_power_of_2(columns),
        )
