"""Recorded training runs beside what `lsai predict` says of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lsai_core.config import TrainConfig
from lsai_core.errors import Unavailable, UserError
from lsai_core.files import deep_merge
from lsai_core.profiling.predict import Estimate, Gpu, estimate, find_gpu, predict
from lsai_core.strict import validated
from lsai_lab.runs.records import Run, recorded_runs
from lsai_lab.searches.model_size import grown

# Runs recorded before these keys existed were made the way that these values describe.
BEFORE: dict[str, Any] = {"loss": "full", "blocks": "plain", "optim": {"kernel": "torch"}}


def config_of(run: Run) -> TrainConfig:
    """The config of a recorded training run, in today's words; of a search for the largest model, with the model that it found.

    Raises UserError if today's words cannot say it.
    """
    search = run.summary.kind == "model_search"
    recorded = run.config["train"] if search else run.config
    train = validated(TrainConfig, deep_merge(BEFORE, recorded), f"the config of {run.summary.id.name}")
    return grown(train, run.config["grow"], run.summary.results["largest_size"]) if search else train


def measured_gib(run: Run) -> float:
    """The peak that a prediction is held against, of a finished training step of this package's trainer; 0 if none was measured.

    Active bytes, which on a CPU are the live tensors'. Of the largest model that a search found it is allocated bytes; one that was
    measured in its first step, with no optimizer states before it, is left out.
    """
    results = run.summary.results
    if run.summary.outcome != "ok" or run.summary.kind not in ("train", "model_search"):
        return 0.0
    if run.summary.kind == "model_search":
        return float(results["allocated_gib"]) if "states_gib" in results and "allocated_gib" in results else 0.0
    return float(results.get("mem_peak_active_gib") or results.get("mem_peak_allocated_gib") or 0.0)


def compare(runs: Sequence[Run], reports: Path) -> pd.DataFrame:
    """One row per run: machine, study, variant, part, run, measured and predicted GiB, relative error, reserved GiB, step times in s.

    Runs that cannot be predicted are left out; `frame.attrs["unread"]` says which and why.
    """
    rows, unread = [], []
    for run in runs:
        measured, results = measured_gib(run), run.summary.results
        if not measured:
            continue
        on_gpu = "allocated_gib" in results or str(results.get("memory_kind")).startswith("CUDA")
        try:
            config = config_of(run)
            prediction = predict(
                config, results.get("attention_kernel") if on_gpu else None, on="gpu" if on_gpu else "cpu"
            )
        except (
            UserError,
            Unavailable,
            RuntimeError,
        ) as error:  # another version's config, or an operator without a fake
            unread.append(f"{run.summary.id.name} ({' '.join(str(error).split())[:120]})")
            continue
        time = _time(config, run, reports) if on_gpu else None
        rows.append(
            {"machine": run.machine, "study": run.summary.id.study, "variant": run.summary.id.variant,
             "part": run.summary.id.part, "run": str(run.folder), "measured": measured, "predicted": prediction.peak,
             "error": prediction.peak / measured - 1, "reserved": results.get("mem_peak_reserved_gib") if on_gpu else None,
             "predicted_reserved": prediction.reserved if on_gpu else None,
             "step_s": results["step_ms"] / 1e3 if time and "step_ms" in results else None,
             "estimated_s": time.step_s if time else None, "compiled": config.compile}
        )  # fmt: skip
    frame = pd.DataFrame(rows)
    frame.attrs["unread"] = unread
    return frame


def out_of_memory(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per training run that ran out of a GPU's memory: what it is predicted to need, as a share of the GPU."""
    rows = []
    for run in runs:
        limit = run.env.get("gpu_memory_gib")
        if run.summary.kind != "train" or run.summary.outcome != "oom" or not limit:
            continue
        with contextlib.suppress(UserError):
            peak = predict(config_of(run)).peak
            rows.append({"variant": run.summary.id.variant, "run": str(run.folder), "share": peak / limit})
    return pd.DataFrame(rows)


def measured_ceilings(gpu: Gpu, reports: Path) -> Mapping[str, float]:
    """Results of the newest recorded ceilings of that kind of GPU, or nothing."""
    found = [
        run
        for run in recorded_runs(reports)
        if run.summary.kind == "ceilings" and run.summary.outcome == "ok" and run.env.get("gpu") == gpu.driver_name
    ]
    return max(found, key=lambda run: run.summary.started).summary.results if found else {}


def _time(config: TrainConfig, run: Run, reports: Path) -> Estimate | None:
    try:
        gpu = find_gpu(str(run.env.get("gpu")))
    except UserError:  # a GPU that is not in the table has no bandwidths
        return None
    return estimate(config, gpu, measured_ceilings(gpu, reports), run.summary.results.get("attention_kernel"))


def largest_batches(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per search for the largest batch on a GPU: that batch, what it is predicted to need, as a share of the GPU."""
    rows = []
    for run in runs:
        results = run.summary.results
        if (
            run.summary.kind != "batch_search"
            or run.summary.outcome != "ok"
            or "GPU" not in results["search_limit_kind"]
        ):
            continue
        data = deep_merge(BEFORE, run.config["train"]) | {"batch_size": max(1, results["largest_batch"])}
        peak = predict(validated(TrainConfig, data, run.summary.id.name), results["attention_kernel"]).peak
        rows.append(
            {"machine": run.machine, "variant": run.summary.id.variant, "run": str(run.folder),
             "batch": results["largest_batch"], "predicted": peak, "share": peak / results["search_limit_gib"]}
        )  # fmt: skip
    return pd.DataFrame(rows)
