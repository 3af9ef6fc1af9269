"""How much work a token is, and how much work a GPU can do: the two halves of model FLOPs
utilization (MFU).

A token takes 6 N + 12 L d T FLOPs (PaLM, arXiv:2204.02311, appendix B): N parameters that it is
multiplied with, L layers of width d over T positions. A window shorter than the sequence leaves
fewer positions, and only these count. An output projection counts, also a shared one; recomputation
is no model work.

`PEAKS` holds dense figures of data sheets. Another device is rated against its own measured
product, labelled so. MFU is stated against bf16 whatever the run's precision (on a CPU against
fp32), so that speed-ups show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from lsai_core.base.errors import UserError
from lsai_core.config.train import ModelConfig, Precision
from lsai_core.model.transformer import matmul_parameters


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


@dataclass(frozen=True)
class _Sheet:
    """One data sheet: the device names it covers (whole name, as the driver reports it) and dense
    TFLOP/s per dtype."""

    names: str
    title: str
    tflops: Mapping[str, float]


# Names are matched whole: relatives ("RTX 4090 D", "RTX 5090 Laptop GPU", MIG slices, H100 NVL)
# have other peaks.
_HOPPER_SXM = {"bf16": 989.5, "fp8": 1979.0, "tf32": 494.7, "fp32": 67.0}
_HOPPER_PCIE = {"bf16": 756.5, "fp8": 1513.0, "tf32": 378.0, "fp32": 51.0}
_AMPERE = {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5}
_RTX_4090 = {"bf16": 165.2, "fp8": 330.3, "tf32": 82.6, "fp32": 82.6}
_RTX_5090 = {"bf16": 209.5, "fp8": 419.0, "tf32": 104.8, "fp32": 104.8}
PEAKS: tuple[_Sheet, ...] = (
    _Sheet(
        r"NVIDIA H100 80GB HBM3|NVIDIA H100 SXM\w*", "NVIDIA H100 data sheet (SXM)", _HOPPER_SXM
    ),
    _Sheet(r"NVIDIA H100 PCIe", "NVIDIA H100 data sheet (PCIe)", _HOPPER_PCIE),
    _Sheet(r"NVIDIA H200", "NVIDIA H200 data sheet (SXM)", _HOPPER_SXM),
    _Sheet(r"NVIDIA GH200\b.*", "NVIDIA GH200 data sheet", _HOPPER_SXM),
    _Sheet(
        r"(NVIDIA )?A100[- ](SXM4|PCIE|PCIe|80GB PCIe)(-\d+GB)?", "NVIDIA A100 data sheet", _AMPERE
    ),
    _Sheet(
        r"NVIDIA GeForce RTX 4090",
        "NVIDIA Ada architecture white paper (fp32 accumulation)",
        _RTX_4090,
    ),
    _Sheet(
        r"NVIDIA GeForce RTX 5090",
        "NVIDIA RTX Blackwell architecture white paper (fp32 accumulation)",
        _RTX_5090,
    ),
)

# The dtype in which a run of each precision does its matrix products.
MATMUL_DTYPE = {precision: precision.split("_")[0] for precision in (*get_args(Precision), "fp8")}


def theoretical_peak(device_name: str, dtype: str) -> Peak | None:
    """Dense peak of exactly this dtype from the data sheet, or None if the table does not know
    it."""
    for sheet in PEAKS:
        if re.fullmatch(sheet.names, device_name) and dtype in sheet.tflops:
            return Peak(sheet.tflops[dtype], f"{sheet.title}, dense {dtype}", measured=False)
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
        raise UserError(f"unknown precision {dtype!r}; known: {', '.join(MATMUL_DTYPE)}")
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
