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
from lsai_core.profiling.flops import Peak, peak_for
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


def _quickly(device: torch.device) -> Mapping[str, float | str]:
    """Of a CPU, only the products that its MFU is stated against."""
    return matmul_ceilings("fp32", device, 0.7) if device.type == "cpu" else measure_ceilings(device, budget_s=2.0)
