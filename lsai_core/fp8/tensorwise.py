"""The project's own fp8 linear layer: current scaling per tensor, all three matrix products in fp8,
nothing but torch.

A tensor is divided by its largest magnitude, stretched over the range of the fp8 type and rounded;
the product multiplies back. Inputs and weights are e4m3, gradients e5m2, as in Micikevicius et al.
2022 (arXiv:2209.05433):

    output  y (M, N) = x (M, K)  @ w (N, K)^T      e4m3 x e4m3
    dgrad  dx (M, K) = g (M, N)  @ w (N, K)        e5m2 x e4m3
    wgrad  dw (N, K) = g^T (N, M) @ x (M, K)       e5m2 x e4m3

Layouts. Hopper's and Ada's fp8 tensor cores read both operands along the summed dimension ("TN"):
the first row-major, the second column-major. y has that for free; dgrad needs w, wgrad both g and x
transposed in memory, which fp8 products in other precisions do not. So a training step casts x, w
and g twice each, once as they lie and once transposed.

These casts are bound by memory bandwidth. They are plain operations, for torch.compile to fuse: a
pass for the maximum, taken once, and one per layout that reads 16 bits and writes 8. Run eagerly
they are correct, and slow.

Memory. An fp8 layer often needs *more* memory than a bf16 one: fp8 copies wait for the backward
pass beside bf16 tensors that are kept anyway. Here nothing fp8 outlives the operation that uses it:
the layer keeps its input and the weight as they are and casts again in the backward pass. Inside a
compiled block it keeps less than bf16, because torch's partitioner recomputes what fuses with its
user, as the input of an fp8 product does with its cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

INPUT_DTYPE = torch.float8_e4m3fn
WEIGHT_DTYPE = torch.float8_e4m3fn
GRAD_DTYPE = torch.float8_e5m2

# Hopper's fp8 tensor cores add up with about 14 bits (arXiv:2412.19437). Fast accumulation leaves
# it at that; the other mode adds partial sums in fp32 now and then, and is slower. Outputs tolerate
# the fast one, gradients get the exact one: the choice of torchao's tensorwise recipe.
FAST_OUTPUT, FAST_DGRAD, FAST_WGRAD = True, False, False

# Below this maximum a tensor counts as zero: its scale would be no finite fp32 number.
_TINY = 1e-30


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 scalar that stretches `x` over the range of `dtype`: cast(x, scale, dtype) has largest
    magnitude finfo.max."""
    amax = x.abs().amax().float()
    # No clamp here or in `cast`: the largest value lands on finfo.max to within a rounding that fp8
    # rounds away, and a NaN- propagating minimum beside a transposed fp8 store is miscompiled
    # (github.com/triton-lang/triton/issues/11111).
    return torch.where(amax > _TINY, torch.finfo(dtype).max / amax, 1.0)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """round(x * scale) in `dtype`, laid out as `x`."""
    return (x.float() * scale).to(dtype)


def cast_transposed(x_AB: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`cast(x)` transposed in memory: (B, A), row-major."""
    return cast(x_AB, scale, dtype).t().contiguous()


def scaled_product(
    a8_AC: Tensor,
    b8_BC: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """(A, B) = (a8 / a_scale) @ (b8 / b_scale)^T for row-major fp8 operands; sums in fp32 (`fast`:
    see above)."""
    return torch._scaled_mm(
        a8_AC,
        b8_BC.t(),
        scale_a=a_scale.reciprocal(),
        scale_b=b_scale.reciprocal(),
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )


def output_product(x_MK: Tensor, w_NK: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """y (M, N) in the dtype of x, casts included."""
    x8_MK, w8_NK = cast(x_MK, x_scale, INPUT_DTYPE), cast(w_NK, w_scale, WEIGHT_DTYPE)
    return scaled_product(x8_MK, w8_NK, x_scale, w_scale, x_MK.dtype, FAST_OUTPUT)


def dgrad_product(g_MN: Tensor, w_NK: Tensor, g_scale: Tensor, w_scale: Tensor) -> Tensor:
    """dx (M, K) in the dtype of g, casts included."""
    g8_MN, w8_KN = cast(g_MN, g_scale, GRAD_DTYPE), cast_transposed(w_NK, w_scale, WEIGHT_DTYPE)
    return scaled_product(g8_MN, w8_KN, g_scale, w_scale, g_MN.dtype, FAST_DGRAD)


def wgrad_product(
    g_MN: Tensor, x_MK: Tensor, g_scale: Tensor, x_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """dw (N, K) in `out_dtype`, casts included."""
    g8_NM, x8_KM = (
        cast_transposed(g_MN, g_scale, GRAD_DTYPE),
        cast_transposed(x_MK, x_scale, INPUT_DTYPE),
    )
    return scaled_product(g8_NM, x8_KM, g_scale, x_scale, out_dtype, FAST_WGRAD)


class _LinearFunction(torch.autograd.Function):
    """y = x @ w^T with all three products in fp8. Keeps x and w as they are, and their scales."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        x_scale, w_scale = scale_of(x_MK, INPUT_DTYPE), scale_of(w_NK, WEIGHT_DTYPE)
        ctx.save_for_backward(x_MK, w_NK, x_scale, w_scale)
        return output_product(x_MK, w_NK, x_scale, w_scale)

    @staticmethod
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x_MK, w_NK, x_scale, w_scale = ctx.saved_tensors
        g_MN = g_MN.contiguous()  # as it nearly always is; the product below insists
        g_scale = scale_of(g_MN, GRAD_DTYPE)
        dx_MK = dgrad_product(g_MN, w_NK, g_scale, w_scale) if ctx.needs_input_grad[0] else None
        dw_NK = (
            wgrad_product(g_MN, x_MK, g_scale, x_scale, w_NK.dtype)
            if ctx.needs_input_grad[1]
            else None
        )
        return dx_MK, dw_NK


class Fp8Linear(nn.Linear):
    """`nn.Linear` without bias whose products run in fp8; parameters, names and results' dtypes are
    those of `nn.Linear`.

    Input (..., K) in bf16, or anything under autocast, output (..., N). K, N and the number of rows
    must be multiples of 16.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Fp8Linear:
        """`linear` as a layer in fp8, which shares its parameter."""
        with torch.device("meta"):
            converted = cls(linear.in_features, linear.out_features, bias=False)
        converted.weight = linear.weight
        return converted

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            # the weight is cast from fp32 directly
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y_MN = _LinearFunction.apply(x.reshape(-1, self.in_features).contiguous(), self.weight)
        return y_MN.view(*x.shape[:-1], self.out_features)
