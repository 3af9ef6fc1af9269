"""The `ceilings` kind: what this machine can do at best (DESIGN.md, "Ceilings"), so that every
speed has something to be held against.

Inputs are random: a GPU multiplies zeros with less power and therefore at higher clocks. Each
measurement repeats for its share of the time budget, long enough for a GPU to settle to the clocks
that its power allows. A size that a slow machine cannot repeat within its share is left out, except
the smallest.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from lsai_core.config.precision import set_matmul_mode
from lsai_core.config.train import Precision
from lsai_core.kernels import cuda_capability
from lsai_core.profiling.flops import Flops, Peak, mfu, peak_for
from lsai_core.profiling.steptime import StepTimer
from lsai_core.training.step import resolve_device
from lsai_lab.benches.config import CeilingsConfig
from lsai_lab.runs.kinds import Context
from lsai_lab.runs.records import Run, find_runs

MATMUL_SIZES = {"cuda": (4096, 8192, 16_384), "cpu": (512, 1024, 2048)}
_MIN_REPEATS, _MAX_REPEATS = 3, 5000
_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}

Results = dict[str, float | str]


def run(config: CeilingsConfig, context: Context) -> dict[str, Any]:
    """Measure and return the flat results."""
    return measure_ceilings(resolve_device(config.device), budget_s=config.budget_s)


def newest_ceilings(runs: Iterable[Run], device: str) -> dict[str, Any]:
    """Results of the newest ceilings of a kind of device among `runs`, or nothing."""
    ended = (
        run.summary for run in runs if (run.summary.kind, run.summary.outcome) == ("ceilings", "ok")
    )
    found = [summary for summary in ended if summary.results.get("ceilings_device") == device]
    return max(found, key=lambda summary: summary.started).results if found else {}


def peak_of_this_machine(
    device: torch.device, precision: Precision, runs_root: Path
) -> Peak | None:
    """The MFU denominator: the data sheet's where the GPU is known, else the newest ceilings
    measured on this kind of device below `runs_root`, else a quick measurement now."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if known := peak_for(name, precision):
        return known
    measured = newest_ceilings(find_runs(runs_root), name)
    if not measured:  # on a CPU only the products that its MFU is stated against
        measured = (
            matmul_ceilings("fp32", device, 0.7)
            if name == "cpu"
            else measure_ceilings(device, budget_s=2.0)
        )
    return peak_for(name, precision, measured)


def speed_summary(
    durations_ms: Sequence[float], tokens_per_step: int, skip: int = 0
) -> dict[str, float]:
    """Steady-state speed over the steps after the first `skip`, which are stated apart; only those
    if none is left.

    Of `step_ms` (median) the quartiles and extremes, of `tokens_per_s` the quartiles; `steps_timed`
    (below 20 they are thin, and a report says so), `warmup_steps` and `warmup_s`. `tokens_per_step`
    counts the tokens of the same GPUs that the result speaks of.
    """
    timed, found = durations_ms[skip:], dict[str, float]()
    if timed:
        levels = {"": 50, "_p25": 25, "_p75": 75, "_min": 0, "_max": 100}
        found = {
            f"step_ms{name}": float(np.percentile(timed, level)) for name, level in levels.items()
        }
        for name, other in (("", ""), ("_p25", "_p75"), ("_p75", "_p25")):
            found[f"tokens_per_s{name}"] = 1e3 * tokens_per_step / found[f"step_ms{other}"]
    warmup = durations_ms[:skip]
    return found | {
        "steps_timed": len(timed),
        "warmup_steps": len(warmup),
        "warmup_s": sum(warmup) / 1e3,
    }


def rated(
    rate: float | None, per_token: Flops, peak: Peak | None, processes: int, on_gpu: bool
) -> dict[str, Any]:
    """What follows from `rate`, tokens per second of all processes: per GPU, and MFU and TFLOP/s,
    with full attention and with half of it for the causal mask (`_causal`), as other reports count.
    Of attention in a window both count what the window leaves."""
    devices = processes if on_gpu else 1  # CPU processes share one processor
    found: dict[str, Any] = {
        "tokens_per_s_per_gpu": rate / processes if rate else None,
        "world_size": processes,
    }
    for suffix, count in (("", per_token.convention), ("_causal", per_token.causal_discounted)):
        found[f"mfu{suffix}"] = mfu(rate, count, peak) / devices if rate and peak else None
        found[f"tflops{suffix}"] = rate * count / 1e12 / devices if rate else None
    source = peak.source if peak else "no datasheet peak and no measured ceiling for this device"
    found |= {"mfu_peak_tflops": peak.tflops if peak else None, "mfu_peak_source": source}
    return found | {"flops_per_token": per_token.convention}


def measure_ceilings(device: torch.device | str, *, budget_s: float = 8.0) -> Results:
    """Measure the ceilings of `device` ("cpu" or a CUDA device) in about `budget_s` seconds; flat
    results.

    `matmul_<dtype>_<n>_tflops` for n x n x n products (2 n^3 FLOPs) in fp32, bf16 and, on GPUs that
    have them, tf32 and fp8 (e4m3 inputs, bf16 output, fast accumulation); `matmul_<dtype>_tflops`
    is the best size and `matmul_<dtype>_size` says which. `copy_gb_per_s`: copy within the device's
    memory, bytes read plus bytes written. `h2d_gb_per_s`, `d2h_gb_per_s`: pinned host memory to GPU
    and back. GB are 10^9 bytes. Every figure has `_p25` and `_p75` beside it. `ceilings_device`
    names the device, `ceilings_s` is the time that it all took.
    """
    device, began, dtypes = torch.device(device), time.perf_counter(), ["fp32", "bf16"]
    if device.type == "cuda":
        least = {"fp32": (0, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
        dtypes = [dtype for dtype in least if cuda_capability(device) >= least[dtype]]
    share = budget_s / (len(dtypes) + (3 if device.type == "cuda" else 1))
    results: Results = {
        "ceilings_device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    }
    for dtype in dtypes:
        results |= matmul_ceilings(dtype, device, share)
    results |= _copy_ceilings(device, share)
    return results | {"ceilings_s": time.perf_counter() - began}


def matmul_ceilings(dtype: str, device: torch.device, budget_s: float) -> Results:
    """The part of `measure_ceilings` about products of one dtype (fp32, tf32, bf16, fp8) that
    `device` has."""
    results: Results = {}
    sizes = MATMUL_SIZES[device.type]
    share, best, previous_s = budget_s / len(sizes), 0.0, 0.0
    for size in sizes:
        # The next size is eight times the work of the last: do not start what cannot be repeated
        # within its share.
        too_long = (_MIN_REPEATS + 1) * 8 * previous_s > share
        if too_long or 4 * size**2 * _DTYPES[dtype].itemsize > _free_bytes(device) // 2:
            break
        set_matmul_mode("tf32" if dtype == "tf32" else "fp32")
        seconds = repeated(_matmul(dtype, size, device), device, share)
        set_matmul_mode("fp32")
        figures = _rate(f"matmul_{dtype}_{size}_tflops", 2 * size**3 / 1e12, seconds, device)
        results |= figures
        previous_s, tflops = (
            float(np.median(seconds)),
            float(figures[f"matmul_{dtype}_{size}_tflops"]),
        )
        if tflops > best:
            best = tflops
            results |= {name.replace(f"_{size}_", "_"): value for name, value in figures.items()}
            results[f"matmul_{dtype}_size"] = size
    return results


def _matmul(dtype: str, size: int, device: torch.device) -> Callable[[], object]:
    a_NN, b_NN = (torch.randn(size, size, device=device).to(_DTYPES[dtype]) for _ in range(2))
    if dtype == "fp8":
        one = torch.ones((), device=device)
        # The fp8 product wants its second operand in column order.
        return lambda: torch._scaled_mm(
            a_NN, b_NN.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out_NN = torch.empty_like(a_NN)
    return lambda: torch.mm(a_NN, b_NN, out=out_NN)


def _copy_ceilings(device: torch.device, budget_s: float) -> Results:
    # Far larger than any cache, and still a small part of the memory.
    size = min(2**31 if device.type == "cuda" else 2**28, _free_bytes(device) // 8)
    source, target = (
        _random_bytes(size, device),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    results = _rate(
        "copy_gb_per_s",
        2 * size / 1e9,
        repeated(lambda: target.copy_(source), device, budget_s),
        device,
    )
    if device.type == "cuda":
        size = min(size, 2**28, psutil.virtual_memory().available // 8)
        host = _random_bytes(size, torch.device("cpu")).pin_memory()
        on_gpu = source[:size]
        to_gpu = repeated(lambda: on_gpu.copy_(host, non_blocking=True), device, budget_s)
        to_host = repeated(lambda: host.copy_(on_gpu, non_blocking=True), device, budget_s)
        results |= _rate("h2d_gb_per_s", size / 1e9, to_gpu, device)
        results |= _rate("d2h_gb_per_s", size / 1e9, to_host, device)
    return results


def _random_bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def repeated(
    work: Callable[[], object], device: torch.device, budget_s: float, *, warm: float = 0.0
) -> list[float]:
    """Seconds of each repeat of `work`, as many as fit `budget_s`, after an unmeasured call, one
    that says how often the budget allows, and unmeasured repeats for the share `warm` of the
    budget."""
    work()
    estimate = max(1e-6, min(timed([work] * 2, device)))
    unmeasured, repeats = (
        int(min(max(s / estimate, _MIN_REPEATS), _MAX_REPEATS)) for s in (warm * budget_s, budget_s)
    )
    if warm:
        timed([work] * unmeasured, device)
    return timed([work] * repeats, device)


def timed(calls: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of each call, one after the other: between events on a GPU, by the clock on a CPU."""
    timer = StepTimer(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    timer.mark()
    for call in calls:
        call()
        timer.mark()
    return [ms / 1e3 for ms in timer.durations_ms()]


def _rate(name: str, amount: float, seconds: list[float], device: torch.device) -> Results:
    slow, median, fast = (float(value) for value in np.percentile(seconds, [75, 50, 25]))
    # A GPU is ours alone and slows down with heat: its typical repeat is what it sustains.
    typical = min(seconds) if device.type == "cpu" else median
    return {name: amount / typical, f"{name}_p25": amount / slow, f"{name}_p75": amount / fast}


def _free_bytes(device: torch.device) -> int:
    return (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
    )
