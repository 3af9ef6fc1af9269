"""How much work a token is, and how much work a GPU can do: the two halves of model FLOPs
utilization (MFU).

A token takes 6 N + 12 L d T FLOPs (PaLM, arXiv:2204.02311, appendix B): N parameters that it is
multiplied with, L layers of width d over T positions. A window shorter than the sequence leaves
fewer positions, and only these count. An output projection counts, also a shared one; recomputation
is no model work.

The table of GPUs (`gpus.py`) holds dense figures of data sheets. Another device is rated against
its own measured product, labelled so. MFU is stated against bf16 whatever the run's precision (on a
CPU against fp32), so that speed-ups show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from lsai_core.base.errors import UserError, hint
from lsai_core.config.model import ModelConfig
from lsai_core.config.train import Precision
from lsai_core.model.transformer import matmul_parameters
from lsai_core.profiling.gpus import ALL_GPUS


@dataclass(frozen=True)
class Flops:
    """Training FLOPs of one token: `convention` is what MFU uses. `causal_discounted` counts half
    of its attention, or, as both do, what a window shorter than the sequence leaves."""

    convention: float
    causal_discounted: float
    counted_parameters: int


def flops_per_token(model: ModelConfig, seq_len: int, window: int | None = None) -> Flops:
    """FLOPs per trained token; `window` as in `AttentionConfig`. UserError if a length is not
    positive."""
    if seq_len < 1 or (window is not None and window < 1):
        raise UserError(
            f"seq_len and window must be positive, got seq_len={seq_len}, window={window}"
        )
    counted = matmul_parameters(model)
    dense = 6.0 * counted
    attention = 12.0 * model.n_layers * (model.n_heads * model.head_dim) * seq_len
    if window is not None and window < seq_len:
        # Position i sees min(i, W) positions; the mean over the sequence is W - W^2 / 2T.
        left = dense + attention * (window - window**2 / (2 * seq_len)) / seq_len
        return Flops(left, left, counted)
    return Flops(dense + attention, dense + attention / 2, counted)


@dataclass(frozen=True)
class Peak:
    """TFLOP/s that MFU is stated against, and where the figure comes from."""

    tflops: float
    source: str
    measured: bool


# The dtype in which a run of each precision does its matrix products.
MATMUL_DTYPE = {precision: precision.split("_")[0] for precision in (*get_args(Precision), "fp8")}


def theoretical_peak(device_name: str, dtype: str) -> Peak | None:
    """Dense peak of exactly this dtype from the data sheet, or None if the table does not know
    it."""
    for gpu in ALL_GPUS:
        if gpu.peak(dtype) and gpu.is_called(device_name):
            return Peak(gpu.peak(dtype), f"{gpu.sheet}, dense {dtype}", measured=False)
    return None


def peak_for(
    device_name: str, dtype: str, measured: Mapping[str, float | str] | None = None
) -> Peak | None:
    """What MFU of a run in `dtype` (a key of `MATMUL_DTYPE`) is stated against, or None if there is
    no honest peak.

    `device_name` is the driver's, or `"cpu"`; `measured`: ceilings of the same machine. UserError
    for an unknown one.
    """
    if dtype not in MATMUL_DTYPE:
        raise UserError(f"unknown precision {dtype!r}{hint(dtype, MATMUL_DTYPE)}")
    on_cpu = device_name == "cpu"
    basis = "fp32" if on_cpu else "bf16"
    note = (
        ""
        if MATMUL_DTYPE[dtype] == basis
        else f"; the {MATMUL_DTYPE[dtype]} run is stated against {basis}"
    )
    if (peak := theoretical_peak(device_name, basis)) is not None:
        return Peak(peak.tflops, peak.source + note, measured=False)
    tflops = (measured or {}).get(f"matmul_{basis}_tflops")
    if not isinstance(tflops, int | float) or tflops <= 0:
        return None
    return Peak(float(tflops), f"own measured {basis} matmul ceiling{note}", measured=True)


def mfu(tokens_per_s_per_gpu: float, flops_per_token: float, peak: Peak) -> float:
    """Model FLOPs utilization as a fraction: FLOPs per token x tokens/s of one GPU / the peak of
    one GPU."""
    return tokens_per_s_per_gpu * flops_per_token / (peak.tflops * 1e12)
