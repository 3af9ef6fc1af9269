"""The project's fused fp8 path: delayed scaling, and casts that write what the products read, in
one pass.

The products are those of `tensorwise.py` (e4m3 inputs and weights, e5m2 gradients, all three in
fp8); what differs is the traffic around them. With the scale known beforehand, one kernel reads a
tensor once and writes both layouts (`lsai_core.kernels.fp8_cast`). The feed-forward layer is one
function: SwiGLU's output never exists in bf16, and its backward kernel writes the three fp8
matrices that the next products want.

Kept for the backward pass: each layer's input once, in fp8, transposed, ready for the weight's
gradient (half of what a bf16 layer keeps), and gate and up in bf16. The weights are cast again in
the backward pass, not kept in fp8.

The custom operators update the maxima in their `state` argument without declaring it: nothing else
reads them within a step, and a declared mutation would make torch.compile copy the state around
every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lsai_core import kernels
from lsai_core.fp8 import scales
from lsai_core.fp8.scales import INVERSE, LARGEST, SCALE
from lsai_core.model.feed_forward import swiglu, swiglu_backward

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@torch.library.custom_op("lsai::fp8_cast", mutates_args=())
def fp8_cast(
    x_MN: Tensor, state_34: Tensor, gradient: bool, row: bool, column: bool
) -> tuple[Tensor, Tensor]:
    """x * scale in e4m3 (e5m2 for a gradient), as it lies (M, N) and transposed (N, M); unwanted
    ones are empty."""
    dtype = E5M2 if gradient else E4M3
    x_MN = x_MN.contiguous()
    if scales.calibrating():
        scales.calibrate(state_34, x_MN.abs().amax(), dtype)
    return cast_by_state(x_MN, state_34, dtype, row=row, column=column)


@fp8_cast.register_fake
def _(
    x_MN: Tensor, state_34: Tensor, gradient: bool, row: bool, column: bool
) -> tuple[Tensor, Tensor]:
    (rows, columns), dtype = x_MN.shape, E5M2 if gradient else E4M3
    return (
        x_MN.new_empty((rows, columns) if row else (0, columns), dtype=dtype),
        x_MN.new_empty((columns, rows) if column else (0, rows), dtype=dtype),
    )


def cast_by_state(
    x_MN: Tensor, state_34: Tensor, dtype: torch.dtype, *, row: bool, column: bool
) -> tuple[Tensor, Tensor]:
    """`fp8_cast` with the scale that `state_34` holds."""
    if kernels.available(x_MN.device):
        from lsai_core.kernels.fp8_cast import cast

        return cast(x_MN, state_34, dtype, row=row, column=column)
    rounded_MN = _rounded(x_MN, state_34, dtype)
    empty = rounded_MN.new_empty(0)
    return rounded_MN if row else empty, _turned(rounded_MN) if column else empty


@torch.library.custom_op("lsai::fp8_swiglu", mutates_args=())
def fp8_swiglu(gate_up_M2F: Tensor, state_34: Tensor) -> Tensor:
    """silu(gate) * up, in e4m3 (M, F)."""
    if scales.calibrating():
        scales.calibrate(state_34, swiglu(gate_up_M2F).abs().amax(), E4M3)
    if kernels.available(gate_up_M2F.device):
        from lsai_core.kernels.fp8_cast import swiglu_cast

        return swiglu_cast(gate_up_M2F, state_34)
    return _rounded(swiglu(gate_up_M2F.float()), state_34, E4M3)


@fp8_swiglu.register_fake
def _(gate_up_M2F: Tensor, state_34: Tensor) -> Tensor:
    return gate_up_M2F.new_empty(gate_up_M2F.shape[0], gate_up_M2F.shape[1] // 2, dtype=E4M3)


@torch.library.custom_op("lsai::fp8_swiglu_backward", mutates_args=())
def fp8_swiglu_backward(
    grad_h_MF: Tensor, gate_up_M2F: Tensor, h_state_34: Tensor, grad_state_34: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """In the order in which memory is taken: gradient of gate and up (M, 2F) in e5m2, SwiGLU's
    output transposed (F, M) in e4m3, and the gradient transposed (2F, M)."""
    grad_h_MF = grad_h_MF.contiguous()
    if scales.calibrating():
        scales.calibrate(
            grad_state_34, swiglu_backward(grad_h_MF, gate_up_M2F)[0].abs().amax(), E5M2
        )
    if kernels.available(grad_h_MF.device):
        from lsai_core.kernels.fp8_cast import swiglu_backward_cast

        return swiglu_backward_cast(grad_h_MF, gate_up_M2F, h_state_34, grad_state_34)
    grad_M2F, h_MF = swiglu_backward(grad_h_MF.float(), gate_up_M2F.float())
    grad8_M2F = _rounded(grad_M2F, grad_state_34, E5M2)
    return grad8_M2F, _turned(_rounded(h_MF, h_state_34, E4M3)), _turned(grad8_M2F)


@fp8_swiglu_backward.register_fake
def _(
    grad_h_MF: Tensor, gate_up_M2F: Tensor, h_state_34: Tensor, grad_state_34: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = grad_h_MF.shape
    return (
        grad_h_MF.new_empty((rows, 2 * width), dtype=E5M2),
        grad_h_MF.new_empty((width, rows), dtype=E4M3),
        grad_h_MF.new_empty((2 * width, rows), dtype=E5M2),
    )


def _turned(x_AB: Tensor) -> Tensor:
    # never a view: an operator's results share no memory
    return x_AB.t().clone(memory_format=torch.contiguous_format)


def _rounded(x: Tensor, state_34: Tensor, dtype: torch.dtype) -> Tensor:
    """The plain version of the kernels' cast, with its side effect."""
    torch.maximum(state_34[LARGEST, 0], x.abs().amax().float(), out=state_34[LARGEST, 0])
    limit = torch.finfo(dtype).max
    return (x.float() * state_34[SCALE, 0]).clamp(-limit, limit).to(dtype)


@torch.library.custom_op("lsai::fp8_product", mutates_args=())
def fp8_product(
    a8_AC: Tensor,
    b8_BC: Tensor,
    a_state_34: Tensor,
    b_state_34: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """a @ b^T (A, B) in `dtype`, of row-major operands, with the scales multiplied back. `fast`:
    see `tensorwise.py`."""
    # An operator of its own, because torch.compile cannot lower scales that are slices of a tensor.
    return torch._scaled_mm(
        a8_AC,
        b8_BC.t(),
        scale_a=a_state_34[INVERSE, 0],
        scale_b=b_state_34[INVERSE, 0],
        out_dtype=dtype,
        use_fast_accum=fast,
    )


@fp8_product.register_fake
def _(
    a8_AC: Tensor,
    b8_BC: Tensor,
    a_state_34: Tensor,
    b_state_34: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    return a8_AC.new_empty(a8_AC.shape[0], b8_BC.shape[0], dtype=dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, state: Tensor) -> Tensor:
        x8_MK, x8_KM = fp8_cast(x_MK, state[0], False, True, True)
        weight8_NK, _ = fp8_cast(weight_NK, state[1], False, True, False)
        ctx.save_for_backward(x8_KM, weight_NK, state)
        return fp8_product(x8_MK, weight8_NK, state[0], state[1], x_MK.dtype, True)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x8_KM, weight_NK, state = ctx.saved_tensors
        grad8_MN, grad8_NM = fp8_cast(grad_MN, state[2], True, True, True)
        _, weight8_KN = fp8_cast(weight_NK, state[1], False, False, True)
        dx_MK = fp8_product(grad8_MN, weight8_KN, state[2], state[1], grad_MN.dtype, False)
        dweight_NK = fp8_product(grad8_NM, x8_KM, state[2], state[0], weight_NK.dtype, False)
        return dx_MK, dweight_NK, None


class FusedFp8Linear(nn.Linear):
    """`nn.Linear` without bias, products in fp8. Input (..., K) in bf16; K, N and the rows are
    multiples of 16."""

    state: Tensor
    dtypes = (E4M3, E4M3, E5M2)  # input, weight, gradient of the output

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> FusedFp8Linear:
        """`linear` as a layer in fp8, which shares its parameter."""
        with torch.device("meta"):
            converted = cls(linear.in_features, linear.out_features, bias=False)
        converted.weight = linear.weight
        state = scales.new_state(cls.dtypes).to(linear.weight.device)
        converted.register_buffer("state", state, persistent=False)
        return converted

    def forward(self, x: Tensor) -> Tensor:
        y_MN = _Linear.apply(_as_bf16(x).flatten(0, -2), self.weight, self.state)
        return y_MN.view(*x.shape[:-1], self.out_features)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, gate_up_2FD: Tensor, down_DF: Tensor, state: Tensor
    ) -> Tensor:
        x8_MD, x8_DM = fp8_cast(x_MD, state[0], False, True, True)
        gate_up8_2FD, _ = fp8_cast(gate_up_2FD, state[1], False, True, False)
        hidden_M2F = fp8_product(x8_MD, gate_up8_2FD, state[0], state[1], x_MD.dtype, True)
        h8_MF = fp8_swiglu(hidden_M2F, state[3])
        down8_DF, _ = fp8_cast(down_DF, state[4], False, True, False)
        ctx.save_for_backward(x8_DM, gate_up_2FD, hidden_M2F, down_DF, state)
        return fp8_product(h8_MF, down8_DF, state[3], state[4], x_MD.dtype, True)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        x8_DM, gate_up_2FD, hidden_M2F, down_DF, state = ctx.saved_tensors
        grad8_MD, grad8_DM = fp8_cast(grad_MD, state[5], True, True, True)
        _, down8_FD = fp8_cast(down_DF, state[4], False, False, True)
        dh_MF = fp8_product(grad8_MD, down8_FD, state[5], state[4], grad_MD.dtype, False)
        dhidden8_M2F, h8_FM, dhidden8_2FM = fp8_swiglu_backward(
            dh_MF, hidden_M2F, state[3], state[2]
        )
        ddown_DF = fp8_product(grad8_DM, h8_FM, state[5], state[3], down_DF.dtype, False)
        _, gate_up8_D2F = fp8_cast(gate_up_2FD, state[1], False, False, True)
        dx_MD = fp8_product(dhidden8_M2F, gate_up8_D2F, state[2], state[1], grad_MD.dtype, False)
        dgate_up_2FD = fp8_product(
            dhidden8_2FM, x8_DM, state[2], state[0], gate_up_2FD.dtype, False
        )
        return dx_MD, dgate_up_2FD, ddown_DF, None


class FusedFp8MLP(nn.Module):
    """The feed-forward layer (B, S, D) -> (B, S, D) in fp8, with the parameters of `model.MLP`
    under the same names."""

    state: Tensor
    # x, gate_up, its gradient, h, down, gradient of the output
    dtypes = (E4M3, E4M3, E5M2, E4M3, E4M3, E5M2)

    def __init__(self, gate_up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
        self.register_buffer(
            "state", scales.new_state(self.dtypes).to(gate_up.weight.device), persistent=False
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        out_MD = _FeedForward.apply(
            _as_bf16(x_BSD).flatten(0, -2), self.gate_up.weight, self.down.weight, self.state
        )
        return out_MD.view(x_BSD.shape)


def _as_bf16(x: Tensor) -> Tensor:
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
