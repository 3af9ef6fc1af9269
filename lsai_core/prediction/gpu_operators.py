"""PyTorch's operators as a GPU runs them, for CPU tensors that stand for a GPU's.

Some functions of PyTorch ask where a tensor lies and take another way on a GPU: dropout keeps a
mask of one byte per value, attention is one kernel, a recurrent layer is cuDNN's, and autocast
casts by another list. While `GpuOperators` is open, these operators have implementations of their
own for the CPU's dispatch keys (`torch.library`), which call fused operators that exist as fake
implementations only. What they keep is read off PyTorch's source (ATen/native/transformers/cuda,
ATen/native/cudnn/RNN.cpp, ATen/autocast_mode.h), PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lsai_core.kernels import fake_operator
from lsai_core.prediction.dtypes import refuse_dtypes
from lsai_core.prediction.fake_kernels import rms_norm
from lsai_core.prediction.gpu_recurrent import GRU, PLAIN, lstm, of_gates

aten = torch.ops.aten
FLASH, EFFICIENT, MATH = "flash", "efficient", "math"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
# Of the operators that autocast treats on GPUs (ATen/autocast_mode.h): those that take fp32 as the
# result's dtype, and those that become products, which autocast casts, or promote by themselves.
# All others run in fp32.
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
# What autocast treats on CPUs alone, and a GPU leaves as it is, but for those that become products.
_PRODUCTS_ON_CPU = ("_addmm_activation", "conv1d", "conv2d", "conv3d")


class GpuOperators:
    """While open, CPU tensors take a GPU's way through PyTorch's operators."""

    def __enter__(self) -> Self:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Oo]verrid")
            for name, function in _OVERRIDES.items():
                self._library.impl(name, _untraced(function), "AutogradCPU")
            for name in _autocast_on_gpus():
                self._library.impl(name, _untraced(_cast(name)), "AutocastCPU")
            for name in _autocast_on_cpus_alone():
                self._library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        _forget_kernels()
        return self

    def __exit__(self, *error: Any) -> None:
        self._library._destroy()
        _forget_kernels()


def _forget_kernels() -> None:
    """Let what traces compiled code ask again which implementations an operator has."""
    for operator in torch._ops.get_cached_ops():
        operator._dispatch_cache.clear()
    torch._ops.reset_cached_ops()


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, at which torch.compile does not look where it breaks a graph."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def _traced() -> bool:
    """Whether this call becomes part of a graph, where plain operators are fused."""
    return torch._guards.TracingContext.try_get() is not None


def _autocast_on_gpus() -> list[str]:
    """What a GPU runs in fp32, and a CPU not or otherwise."""
    return [
        name
        for name in _operators()
        if _base(name) not in _AS_THEY_ARE
        and _treated(name, "AutocastCUDA")
        and (_base(name) in _RESULT_FP32 or not _treated(name, "AutocastCPU"))
    ]


def _autocast_on_cpus_alone() -> list[str]:
    return [
        name
        for name in _operators()
        if _base(name) not in _PRODUCTS_ON_CPU
        and _treated(name, "AutocastCPU")
        and not _treated(name, "AutocastCUDA")
    ]


@functools.cache
def _operators() -> list[str]:
    """The names of aten's operators, those that the simulation has not changed."""
    names = torch._C._dispatch_get_all_op_names()
    return [name.removeprefix("aten::") for name in names if name.startswith("aten::")]


@functools.cache
def _treated(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _base(name: str) -> str:
    return name.partition(".")[0]


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
    if _traced():
        dims = list(range(-len(shape), 0))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        small = torch.finfo(x.dtype).eps if eps is None else eps
        normed = (wide * (wide.pow(2).mean(dims, keepdim=True) + small).rsqrt()).type_as(x)
        return normed if weight is None else normed * weight
    if weight is None:
        weight = x.new_ones(shape)
    return rms_norm(x, weight)


def sdpa_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, grouped: bool
) -> str:
    """The kernel that `scaled_dot_product_attention` takes on a current GPU: flash attention or
    cuDNN, which keep the same, the memory-efficient one, or plain operations, which 16-bit heads
    go through in fp32. ATen/native/transformers/cuda/sdp_utils.cpp."""
    width = q.shape[-1]
    rows = (q, k, v) if mask is None else (q, k, v, mask)
    if q.dim() != 4 or q.dtype == torch.float64 or any(x.stride(-1) != 1 for x in (q, k, v)):
        return MATH
    # only plain operations take heads, or sequences, that are there once for several
    if q.shape[0] != k.shape[0] or (q.shape[1] != k.shape[1] and not grouped):
        return MATH
    square = not causal or q.shape[2] == k.shape[2]
    if q.dtype != torch.float32 and mask is None and width == v.shape[-1] <= 256 and square:
        return FLASH
    aligned = all(x.shape[-1] * x.element_size() % 16 == 0 for x in (q, v))
    several = grouped and q.shape[1] != k.shape[1]
    if not aligned or several or any(x.stride(-1) != 1 for x in rows):
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
    refuse_dtypes("aten::scaled_dot_product_attention", (q, k, v))
    kernel = sdpa_kernel(q, k, v, attn_mask, is_causal, enable_gqa)
    if _traced() and attn_mask is None and not is_causal:
        kernel = MATH  # as an H200 ran BERT and ViT (PyTorch 2.11)
    if kernel == MATH:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        math = aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, None, **options)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # added to the scores
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(q.dtype)
    width = v.shape[-1]
    if kernel == FLASH and width % 8:  # filled up, in copies
        q, k, v = (torch.nn.functional.pad(x, (0, -width % 8)) for x in (q, k, v))
    return fused_attention(q, k, v, attn_mask, kernel)[0][..., :width]


@fake_operator("lsai::fused_attention")
def fused_attention(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, bias: Tensor | None, kernel: str
) -> tuple[Tensor, Tensor]:
    """Output (B, H, S, D) and log-sum-exp (B, H, S) of a fused kernel."""
    batch, heads, length = q_BHSD.shape[:3]
    width = v_BKTD.shape[-1]
    out_BHSD = torch.empty_like(q_BHSD)
    rows = length
    if kernel == EFFICIENT:
        out_BHSD = q_BHSD.new_empty((batch, length, heads, width)).transpose(1, 2)
        rows = -(-length // 32) * 32
    return out_BHSD, q_BHSD.new_empty((batch, heads, rows), dtype=torch.float32)


@fake_operator("lsai::fused_attention_backward")
def fused_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the bias (empty if it learns nothing)."""
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


def _softmax(log: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """`torch.softmax` or `log_softmax`: one kernel reads fp16 and writes fp32; others have a
        copy in `dtype`. ATen/native/SoftMax.cpp."""
        if dtype == torch.float32 and x.dtype == torch.float16 and not _traced():
            return _HalfSoftmax.apply(x, log)
        operator = aten._log_softmax if log else aten._softmax
        return operator(x if dtype is None else x.to(dtype), dim, False)

    return run


class _HalfSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: bool) -> Tensor:
        out = torch.empty_like(x, dtype=torch.float32)
        ctx.save_for_backward(out)
        ctx.log = log
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        if not ctx.log:
            grad = grad * out
        return torch.empty_like(grad, dtype=torch.float16), None


_OVERRIDES: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    "softmax.int": _softmax(log=False),
    "log_softmax.int": _softmax(log=True),
    "lstm.input": lstm,
    "gru.input": of_gates(GRU),
    "rnn_tanh.input": of_gates(PLAIN),
    "rnn_relu.input": of_gates(PLAIN),
}
