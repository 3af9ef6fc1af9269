"""The `ceilings` kind: what this machine can do at best, so that every speed has something to be held against.

Measured in the same sitting as the studies. A GPU without a published peak in the table, and every CPU, gets its MFU against
the matmul rate measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from lsai_core.config import Precision
from lsai_core.profiling.flops import Flops, Peak, mfu, peak_for
from lsai_core.strict import Strict
from lsai_lab.benches.ceilings import matmul_ceilings, measure_ceilings
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.records import find_runs


class CeilingsConfig(Strict):
    """How long to measure, in seconds, and on what."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    budget_s: float = Field(8.0, gt=0)


def run(config: CeilingsConfig, context: Context) -> dict[str, Any]:
    """Measure and return the flat results."""
    from lsai_core.training.step import resolve_device

    return measure_ceilings(resolve_device(config.device), budget_s=config.budget_s)


def peak_of_this_machine(device: torch.device, precision: Precision, runs_root: Path) -> Peak | None:
    """The MFU denominator: the data sheet's where the GPU is known, else the newest ceilings measured on this kind of
    device below `runs_root`, else a quick measurement now."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if known := peak_for(name, precision):
        return known
    summaries = [run.summary for run in find_runs(runs_root)]
    records = [
        s for s in summaries if s.kind == "ceilings" and s.outcome == "ok" and s.results["ceilings_device"] == name
    ]
    newest = max(records, key=lambda summary: summary.started, default=None)
    measured = newest.results if newest else _quickly(device)
    return peak_for(name, precision, measured)


def rated(rate: float | None, per_token: Flops, peak: Peak | None, processes: int, on_gpu: bool) -> dict[str, Any]:
    """What follows from `rate`, tokens per second of all processes: per GPU, and MFU and TFLOP/s, with full attention and with
    half of it for the causal mask (`_causal`), as other reports count."""
    devices = processes if on_gpu else 1  # CPU processes share one processor
    found: dict[str, Any] = {"tokens_per_s_per_gpu": rate / processes if rate else None, "world_size": processes}
    for suffix, count in (("", per_token.convention), ("_causal", per_token.causal_discounted)):
        found[f"mfu{suffix}"] = mfu(rate, count, peak) / devices if rate and peak else None
        found[f"tflops{suffix}"] = rate * count / 1e12 / devices if rate else None
    source = peak.source if peak else "no datasheet peak and no measured ceiling for this device"
    found |= {"mfu_peak_tflops": peak.tflops if peak else None, "mfu_peak_source": source}
    return found | {"flops_per_token": per_token.convention}


def _quickly(device: torch.device) -> Mapping[str, float | str]:
    """Of a CPU, only the products that its MFU is stated against."""
    return matmul_ceilings("fp32", device, 0.7) if device.type == "cpu" else measure_ceilings(device, budget_s=2.0)
