"""Numeric precision of a run: which dtype the weights have, which the matmuls use, and whether TF32
may be used.

fp32           weights and matmuls in IEEE fp32 (TF32 off)
tf32           weights fp32; matmuls may use the tensor cores' TF32 mode (10-bit mantissa)
bf16_autocast  weights fp32; matmuls and attention in bf16, reductions in fp32 (torch.autocast)
bf16_residual  the same with bf16 values between blocks, as FSDP computes it: what several GPUs are
               held against
bf16           weights, gradients and optimizer states in bf16
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lsai_core.config.train import Precision, TrainConfig


def weight_dtype(precision: Precision) -> torch.dtype:
    """Dtype in which parameters (and so gradients and optimizer states) are kept."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def compute_dtype(precision: Precision) -> torch.dtype:
    """Dtype that the large matrix products take as input."""
    return torch.float32 if precision in ("fp32", "tf32") else torch.bfloat16


def residual_dtype(config: TrainConfig) -> torch.dtype:
    """Dtype of the values between blocks: that of the weights as the blocks see them, unless
    `bf16_residual` casts."""
    cast = config.parallel.sharded or config.precision == "bf16_residual"
    return compute_dtype(config.precision) if cast else weight_dtype(config.precision)


def set_matmul_mode(precision: Precision) -> None:
    """Allow or forbid TF32 for this process; must be called before the first kernel runs."""
    torch.backends.cuda.matmul.fp32_precision = "ieee" if precision == "fp32" else "tf32"


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context for forward and loss: autocast to bf16 where the precision asks for it, nothing
    otherwise."""
    if weight_dtype(precision) != compute_dtype(precision):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
