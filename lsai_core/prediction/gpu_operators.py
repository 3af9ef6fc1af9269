"""PyTorch's operators as a GPU runs them, for CPU tensors that stand for a GPU's.

Some functions of PyTorch ask where a tensor lies and take another way on a GPU: dropout keeps a
mask of one byte per value, attention is one kernel, a recurrent layer is cuDNN's, and autocast
casts by another list. While `GpuOperators` is open, these operators have implementations of their
own for the CPU's dispatch keys (`torch.library`), which call fused operators that exist as fake
implementations only. What they keep is read off PyTorch's source (ATen/native/transformers/cuda,
ATen/native/cudnn/RNN.cpp, ATen/autocast_mode.h), PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lsai_core.prediction.fake_kernels import rms_norm

aten = torch.ops.aten
FLASH, EFFICIENT, MATH = "flash", "efficient", "math"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
# Of the operators that autocast treats on GPUs alone: those that take fp32 as the result's dtype,
# and those that become products, which autocast casts, or promote by themselves. All others run in
# fp32.
_RESULT_FP32 = (
    *("cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "prod"),
    *("softmax", "sum"),
)
_AS_THEY_ARE = (
    *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum"),
    *("_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
    *("addcdiv", "addcmul", "addmv", "addr", "atan2", "bilinear", "chain_matmul", "cross", "dot"),
    *("gru_cell", "index_put", "linalg_multi_dot", "lstm_cell", "mv", "rnn_relu_cell"),
    *("rnn_tanh_cell", "scatter_add", "tensordot", "vdot"),
)


class GpuOperators:
    """While open, CPU tensors take a GPU's way through PyTorch's operators."""

    def __enter__(self) -> Self:
        self._library = torch.library.Library("aten", "IMPL")
        for name, function in _OVERRIDES.items():
            self._library.impl(name, function, "AutogradCPU")
        for name in _autocast_on_gpus_alone():
            self._library.impl(name, _cast(name), "AutocastCPU")
        return self

    def __exit__(self, *error: Any) -> None:
        self._library._destroy()


def _autocast_on_gpus_alone() -> list[str]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [
        name.removeprefix("aten::")
        for name in names
        if has(name, "AutocastCUDA")
        and not has(name, "AutocastCPU")
        and name.removeprefix("aten::").partition(".")[0] not in _AS_THEY_ARE
    ]


def _cast(name: str) -> Callable[..., Any]:
    """What autocast does with the operator `name` on a GPU."""
    base, _, overload = name.partition(".")
    operator = getattr(getattr(aten, base), overload or "default")

    def result_fp32(first: Any, *others: Any, **options: Any) -> Any:
        if _is_low(first) and options.get("dtype") is None and not _has_dtype(others):
            options["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(first, *others, **options)

    def in_fp32(*arguments: Any, **options: Any) -> Any:
        wide = tree_map(lambda x: x.float() if _is_low(x) else x, (arguments, options))
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return operator(*wide[0], **wide[1])

    return result_fp32 if base in _RESULT_FP32 else in_fp32


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _has_dtype(arguments: Any) -> bool:
    return any(isinstance(value, torch.dtype) for value in arguments)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0] if p < 1 else x * 0


def _rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is None:
        weight = x.new_ones(shape)
    return rms_norm(x, weight)


def sdpa_kernel(
    q: Tensor, k: Tensor, mask: Tensor | None, grouped: bool, v: Tensor | None = None
) -> str:
    """The kernel that `scaled_dot_product_attention` takes on a current GPU: flash attention or
    cuDNN, which keep the same, the memory-efficient one, or plain operations."""
    width = q.shape[-1]
    if q.dim() != 4 or q.dtype == torch.float64 or (v is not None and v.shape[-1] != width):
        return MATH
    if q.dtype != torch.float32 and mask is None and width <= 256:
        return FLASH
    aligned = width * q.element_size() % 16 == 0
    if not aligned or (grouped and q.shape[1] != k.shape[1]):
        return MATH
    return EFFICIENT


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    kernel = sdpa_kernel(q, k, attn_mask, enable_gqa, v)
    if kernel == MATH:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        math = aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, None, **options)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # added to the scores
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(q.dtype)
    width = q.shape[-1]
    if kernel == FLASH and width % 8:  # filled up, in copies
        q, k, v = (torch.nn.functional.pad(x, (0, -width % 8)) for x in (q, k, v))
    return fused_attention(q, k, v, attn_mask, kernel)[0][..., :width]


@torch.library.custom_op("lsai::fused_attention", mutates_args=())
def fused_attention(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, bias: Tensor | None, kernel: str
) -> tuple[Tensor, Tensor]:
    """Output (B, H, S, D) and log-sum-exp (B, H, S) of a fused kernel; for fake tensors only."""
    raise NotImplementedError("exists for fake tensors only")


@fused_attention.register_fake
def _(
    q_BHSD: Tensor, _k: Tensor, _v: Tensor, bias: Tensor | None, kernel: str
) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q_BHSD.shape
    out_BHSD = torch.empty_like(q_BHSD)
    rows = length
    if kernel == EFFICIENT:
        out_BHSD = q_BHSD.new_empty((batch, length, heads, width)).transpose(1, 2)
        rows = -(-length // 32) * 32
    return out_BHSD, q_BHSD.new_empty((batch, heads, rows), dtype=torch.float32)


@torch.library.custom_op("lsai::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias (empty if it learns nothing); for fake tensors only."""
    raise NotImplementedError("exists for fake tensors only")


@fused_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if bias is None:
        return *gradients, q.new_empty(0)
    return *gradients, q.new_empty((*q.shape[:3], k.shape[2]))


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, _ = inputs
    ctx.learns = bias is not None and bias.requires_grad
    ctx.shape = None if bias is None else bias.shape
    ctx.save_for_backward(q, k, v, *output, *([] if bias is None else [bias]))


def _attention_gradients(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *bias = ctx.saved_tensors
    learned = bias[0] if ctx.learns else None
    dq, dk, dv, dbias = fused_attention_backward(dout, q, k, v, out, lse, learned)
    return dq, dk, dv, dbias.sum_to_size(ctx.shape) if ctx.learns else None, None


fused_attention.register_autograd(_attention_gradients, setup_context=_keep_attention)


def _lstm(
    x: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if batch_first:
        x = x.transpose(0, 1)
    out, last, cell, _ = recurrent(x.contiguous(), hx[0], hx[1], params, 4, num_layers)
    return out.transpose(0, 1) if batch_first else out, last, cell


def _simple(gates: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(
        x: Tensor,
        hx: Tensor,
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        if batch_first:
            x = x.transpose(0, 1)
        out, last, _, _ = recurrent(x.contiguous(), hx, hx, params, gates, num_layers)
        return out.transpose(0, 1) if batch_first else out, last

    return run


@torch.library.custom_op("lsai::recurrent", mutates_args=())
def recurrent(
    x_TBD: Tensor, hx: Tensor, cx: Tensor, weights: list[Tensor], gates: int, layers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """cuDNN's recurrent layers: output, last hidden and cell states, and what it reserves for the
    backward pass; for fake tensors only."""
    raise NotImplementedError("exists for fake tensors only")


@recurrent.register_fake
def _(
    x_TBD: Tensor, hx: Tensor, cx: Tensor, weights: list[Tensor], gates: int, layers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length, batch = x_TBD.shape[:2]
    directions, width = hx.shape[0] // layers, hx.shape[2]
    out = x_TBD.new_empty((length, batch, directions * width))
    # Of every layer and step: its gates, its cell, and what the next layer reads.
    reserved = length * batch * hx.shape[0] * width * (gates + (2 if gates == 4 else 1))
    return out, torch.empty_like(hx), torch.empty_like(cx), x_TBD.new_empty(reserved)


@torch.library.custom_op("lsai::recurrent_backward", mutates_args=())
def recurrent_backward(dout: Tensor, x: Tensor, hx: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Gradients of the input, both states and all weights; for fake tensors only."""
    raise NotImplementedError("exists for fake tensors only")


@recurrent_backward.register_fake
def _(dout: Tensor, x: Tensor, hx: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in (x, hx, hx, *weights)]


def _keep_recurrent(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, hx, cx, weights, _, _ = inputs
    ctx.save_for_backward(x, hx, cx, *output, *weights)


def _recurrent_gradients(ctx: Any, dout: Tensor, *_others: Tensor) -> tuple[Any, ...]:
    x, hx, _, _, _, _, _, *weights = ctx.saved_tensors
    dx, dhx, dcx, *dweights = recurrent_backward(dout, x, hx, weights)
    return dx, dhx, dcx, dweights, None, None


recurrent.register_autograd(_recurrent_gradients, setup_context=_keep_recurrent)

_OVERRIDES: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    "lstm.input": _lstm,
    "gru.input": _simple(3),
    "rnn_tanh.input": _simple(1),
    "rnn_relu.input": _simple(1),
}
