"""Dtypes that PyTorch refuses on a GPU, and fake tensors take without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Operators whose tensors at these places have one dtype.
_EQUAL: Mapping[str, Sequence[int]] = {
    "aten::mm": (0, 1),
    "aten::addmm": (0, 1, 2),
    "aten::mv": (0, 1),
    "aten::addmv": (0, 1, 2),
    "aten::convolution": (0, 1, 2),
    "aten::scaled_dot_product_attention": (0, 1, 2),
    "aten::binary_cross_entropy": (0, 1),
    "aten::index_add": (0, 3),
    "aten::index_add_": (0, 3),
    "aten::index_put": (0, 2),
    "aten::index_put_": (0, 2),
}
# Norms, and where their weight stands: fp32 weights take all inputs, and fp32 inputs only these.
_NORMS = {
    "aten::native_layer_norm": 2,
    "aten::native_group_norm": 1,
    "aten::native_batch_norm": 1,
    "aten::cudnn_batch_norm": 1,
    "aten::_batch_norm_with_update": 1,
}
_OF_FLOATS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_softmax", "aten::_log_softmax")
_CLASSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")


def refuse_dtypes(name: str, arguments: Sequence[Any], has_fp8: bool = True) -> None:
    """RuntimeError, as PyTorch's, for tensors that operator `name` (`aten::mm`) does not take
    together, or not on a GPU that does not multiply in fp8."""
    if name == "aten::_scaled_mm" and not has_fp8:
        raise RuntimeError(_said("is only supported with compute capability >= 9.0 or 8.9", name))
    if name in _EQUAL:
        found = [arguments[at] for at in _EQUAL[name] if at < len(arguments)]
        dtypes = [value.dtype for value in found if isinstance(value, Tensor)]
        if len(set(dtypes)) > 1:
            listed = " and ".join(_short(dtype) for dtype in dict.fromkeys(dtypes))
            raise RuntimeError(_said(f"expected tensors of the same dtype, but got {listed}", name))
    if name in _OF_FLOATS:
        dtype = next(value.dtype for value in arguments if isinstance(value, Tensor))
        is_wide = dtype.is_floating_point and dtype.itemsize > 1  # no fp8
        if not (is_wide or dtype.is_complex):
            raise RuntimeError(_said(f"not implemented for {_short(dtype)}", name))
    elif name in _NORMS:
        at = _NORMS[name]
        weight = arguments[at] if at < len(arguments) else None
        narrow = isinstance(weight, Tensor) and weight.dtype != torch.float32
        if narrow and arguments[0].dtype == torch.float32:
            said = "expected a weight of float32, as the input is, but got another"
            raise RuntimeError(_said(said, name))
    elif name in _CLASSES and arguments[1].dtype not in (torch.int64, torch.uint8):
        got = f"expected targets of int64 or uint8, but got {_short(arguments[1].dtype)}"
        raise RuntimeError(_said(got, name))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _said(what: str, name: str) -> str:
    return f"{what} ({name}, in simulated_gpu)"
