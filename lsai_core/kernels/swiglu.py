"""SwiGLU, h = silu(gate) * up, forward and backward in one pass each.

gate and up are the two halves of the rows of one matrix (N, 2F). The backward pass needs h again
(for the gradient of the weight that h is multiplied with) and computes it beside the gradients,
from what it reads anyway: 12 bytes per element of h in bf16, and h need not be kept from the
forward pass. torch.compile's own version reads the halves twice, because it writes the two
gradients by one masked concatenation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def swiglu_forward(gate_up, h, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        h + row * width + column, (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty), mask=inside
    )


@triton.jit
def swiglu_backward(grad_h, gate_up, grad_gate_up, h, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_h + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    grad_gate = grad * up * (share + silu * (1.0 - share))
    out = grad_gate_up + row * 2 * width + column
    tl.store(out, grad_gate.to(h.dtype.element_ty), mask=inside)
    tl.store(out + width, (grad * silu).to(h.dtype.element_ty), mask=inside)
    tl.store(h + row * width + column, (silu * up).to(h.dtype.element_ty), mask=inside)


def forward(gate_up_N2F: Tensor) -> Tensor:
    """h (N, F) in the dtype of `gate_up_N2F`, which is contiguous; arithmetic in fp32."""
    rows, width = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
    h_NF = gate_up_N2F.new_empty(rows, width)
    swiglu_forward[(rows, triton.cdiv(width, BLOCK))](
        gate_up_N2F, h_NF, width, BLOCK=BLOCK, num_warps=8
    )
    return h_NF


def backward(grad_h_NF: Tensor, gate_up_N2F: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient (N, 2F) of the halves, and h (N, F) again; inputs contiguous."""
    rows, width = grad_h_NF.shape
    grad_N2F, h_NF = torch.empty_like(gate_up_N2F), torch.empty_like(grad_h_NF)
    grid = (rows, triton.cdiv(width, BLOCK))
    swiglu_backward[grid](grad_h_NF, gate_up_N2F, grad_N2F, h_NF, width, BLOCK=BLOCK, num_warps=8)
    return grad_N2F, h_NF
