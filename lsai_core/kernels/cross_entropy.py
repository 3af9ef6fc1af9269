"""Cross-entropy over rows of logits, and its gradient in place of the logits.

One program per row, two passes over it: the first finds the log-sum-exp with a running maximum
(Milakov and Gimelshein 2018, arXiv:1805.02867), the second writes (softmax - one-hot) * scale over
the logits. A row of 128K bf16 values is 256 KB, and the rows in flight fit the second-level cache,
so device memory is read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def cross_entropy_rows(
    logits_NV,
    row_stride,
    targets_N,
    losses_N,
    scale,
    columns: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_NV + row * row_stride
    target = tl.load(targets_N + row)
    highest = float("-inf")
    total = 0.0
    chosen = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits_V + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(x - new_highest), 0)
        chosen += tl.sum(tl.where(column == target, x, 0.0), 0)
        highest = new_highest
    log_sum = highest + tl.log(total)
    tl.store(losses_N + row, log_sum - chosen)
    if GRADIENT:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits_V + column, mask=column < columns, other=float("-inf")).to(
                tl.float32
            )
            gradient = (tl.exp(x - log_sum) - tl.where(column == target, 1.0, 0.0)) * scale
            tl.store(
                logits_V + column, gradient.to(logits_NV.dtype.element_ty), mask=column < columns
            )


def cross_entropy_(logits_NV: Tensor, targets_N: Tensor, scale: float, *, gradient: bool) -> Tensor:
    """Losses (N,) fp32 in nats; with `gradient`, `logits_NV` is overwritten by `scale` times their
    gradient.

    logits_NV: fp32 or 16-bit, rows contiguous; targets_N: int64 in [0, V).
    """
    rows, columns = logits_NV.shape
    losses_N = torch.empty(rows, device=logits_NV.device, dtype=torch.float32)
    block = min(8192, triton.next_power_of_2(columns))
    cross_entropy_rows[(rows,)](
        logits_NV,
        logits_NV.stride(0),
        targets_N,
        losses_N,
        scale,
        columns=columns,
        GRADIENT=gradient,
        BLOCK=block,
        num_warps=16 if block >= 4096 else 4,
    )
    return losses_N
