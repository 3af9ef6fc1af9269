"""Speeds as records have them, for estimated step times: `python tests/measured_speeds.py` writes
the table that ships (some minutes).

Rates are those of the studies `gemm` and `machine` (`lsai_lab.predictions.rates`). Costs that no
library call tells are read from whole training steps, those of `CALIBRATED_ON`, by least squares of
relative errors: of bytes and of a kernel's start from the time in which kernels of a single process
ran, or from whole steps without a trace that products, attention and bytes at the copy rate explain
to more than `BUSY`; of the host from steps that they explain to less than `IDLE`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lsai_core.base.files import read_jsonl, write_text
from lsai_core.prediction import roofline, speeds
from lsai_core.profiling.gpus import find_gpu
from lsai_lab.benches.machine import newest_ceilings
from lsai_lab.predictions.rates import messages_of, rates_of
from lsai_lab.predictions.recorded import config_of
from lsai_lab.project.files import repo_root
from lsai_lab.runs.records import Run, recorded_runs

# The machine, and parts of its studies. All other records on GPUs test the estimated step times,
# out of sample, but for copies and disturbed runs. The bar: within 10 % in the median, in and out
# of sample.
CALIBRATED_ON = {
    "machine": "h200",
    "parts": ["ablation.train", "fsdp.grid", "memory.train", "speed.attention", "speed.levers"],
}
BUSY, IDLE = 0.6, 0.5


def rates(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Of each GPU with recorded products and ceilings: copy rates (GB/s), and by dtype [GFLOP of a
    product, TFLOP/s], small to large."""
    found: dict[str, dict[str, Any]] = {}
    for run in sorted(
        (run for run in runs if run.summary.kind == "gemm"), key=lambda run: run.summary.started
    ):
        device = run.summary.results["gemm_device"]
        rows = read_jsonl(run.folder / "metrics.jsonl")
        found[device] = rates_of(rows, newest_ceilings(runs, device))
    return found


def messages(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Of each GPU with a run of the study `messages`: how fast several exchange them."""
    found = defaultdict[str, list[dict[str, Any]]](list)
    for run in runs:
        if run.summary.kind == "collectives" and run.summary.outcome == "ok":
            rows = messages_of(read_jsonl(run.folder / "metrics.jsonl"), run.config["processes"])
            found[run.env["gpu"]] += rows
    return dict(found)


def timed_steps(runs: Iterable[Run]) -> dict[tuple[str, str, str, str], list[Run]]:
    """Undisturbed training runs of this package on GPUs by machine, study, variant and part; no
    copies."""
    found = defaultdict[tuple[str, str, str, str], list[Run]](list)
    for run in runs:
        results, name = run.summary.results, run.summary.id
        trained = (run.summary.kind, run.summary.outcome) == ("train", "ok") and run.env.get("gpu")
        if (
            trained
            and "step_ms" in results
            and not results.get("disturbed")
            and not run.summary.measured_as
        ):
            found[run.machine, name.study, name.variant, name.part].append(run)
    return found


def costs(runs: Iterable[Run]) -> dict[str, float]:
    """Of bytes, over a copy's; of a kernel's start and of the host, in seconds."""
    busy, idle, gpu = [], [], find_gpu("H200")
    for (machine, study, _, part), same in timed_steps(runs).items():
        if machine != CALIBRATED_ON["machine"] or f"{study}.{part}" not in CALIBRATED_ON["parts"]:
            continue
        config, kernel = config_of(same[0]), same[0].summary.results.get("attention_kernel")
        step_s = statistics.median(run.summary.results["step_ms"] for run in same) / 1e3
        time = roofline.estimate(config, gpu, kernel)
        assert time is not None
        (_, count), copy = roofline.counted(config, kernel), roofline.Speed(gpu).copy
        known_s = time.products_s + time.attention_s
        memory = [count[name] / copy for name in roofline.MEMORY]
        explained, idle_ms = (
            (known_s + sum(memory)) / step_s,
            same[0].summary.results.get("kernel_idle_ms"),
        )
        if config.parallel.world_size == 1 and (idle_ms is not None or explained > BUSY):
            works_s = step_s - (idle_ms or 0.0) / 1e3
            busy.append([*memory, count["start"], works_s - known_s, works_s])
        if explained < IDLE:
            idle.append([*(count[name] for name in roofline.HOST), step_s - time.offload_s, step_s])
    return _solved((*roofline.MEMORY, "start"), busy) | _solved(roofline.HOST, idle)


def _solved(names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Costs by name: of each row the counts, what they cost together, and what that is relative
    to."""
    table = np.array(rows) / np.array(rows)[:, -1:]
    found = np.linalg.lstsq(table[:, : len(names)], table[:, len(names)], rcond=None)[0]
    return {name: float(f"{value:.3g}") for name, value in zip(names, found, strict=True)}


def table_text(runs: Sequence[Run]) -> str:
    """The text of the table."""
    return (
        json.dumps(
            {
                "calibrated_on": CALIBRATED_ON,
                "costs": costs(runs),
                "rates": rates(runs),
                "messages": messages(runs),
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    write_text(speeds.TABLE, table_text(recorded_runs(repo_root() / "reports")))
