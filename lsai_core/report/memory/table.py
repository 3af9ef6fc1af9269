"""One row per variant of the memory study: figures over repeats, ratios against the baseline, how each run ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lsai_core.runs.records import Run, over_repeats, runs_frame
from lsai_core.runs.study import Study


@dataclass(frozen=True)
class MachineResults:
    """The memory study on one machine: `rows` has one row per variant, in the study's order; `runs` are behind it."""

    machine: str
    study: Study
    rows: pd.DataFrame
    runs: list[Run]

    @property
    def slug(self) -> str:
        """Short name for labels."""
        return self.machine.split(" ")[0].replace(".", "-").lower() + ("-own" if "(" in self.machine else "")

    @property
    def ok(self) -> pd.DataFrame:
        """The variants whose training ended well."""
        return self.rows[self.rows["outcome"] == "ok"]

    @property
    def config(self) -> dict[str, Any]:
        """The baseline's training config (any variant's, if the baseline did not run)."""
        train = [run for run in self.runs if run.summary.id.part == "train"]
        first = next((run for run in train if run.summary.id.variant == self.study.baseline), train[0])
        return first.config

    def metrics(self, variant: str) -> pd.DataFrame:
        """The step metrics of the first repeat of a variant."""
        for run in self.runs:
            if run.summary.id.variant == variant and run.summary.id.part == "train" and run.summary.id.repeat == 0:
                return run.metrics
        return pd.DataFrame()


_METRICS = (
    "tokens_per_s", "step_ms", "step_ms_p25", "step_ms_p75", "mfu", "train_s", "train_loss", "validation_loss",
    "validation_perplexity", "mem_forward_peak_gib", "mem_backward_peak_gib", "mem_optimizer_peak_gib",
    "mem_peak_allocated_gib", "mem_peak_reserved_gib", "mem_peak_active_gib", "parameters",
)  # fmt: skip


def machine_results(study: Study, runs: list[Run]) -> list[MachineResults]:
    """Group `runs` by machine, in the order in which machines appear; machines without a training run are left out."""
    machines = list(dict.fromkeys(run.machine for run in runs))
    grouped = [(machine, [run for run in runs if run.machine == machine]) for machine in machines]
    return [
        MachineResults(machine, study, _rows(study, some), some)
        for machine, some in grouped
        if any(run.summary.id.part == "train" for run in some)
    ]


def _rows(study: Study, runs: list[Run]) -> pd.DataFrame:
    frame = runs_frame(runs)
    train, batch = frame[frame["part"] == "train"], frame[frame["part"] == "batch"]
    rows = []
    for name in study.variants:
        mine, search = train[train["variant"] == name], batch[batch["variant"] == name]
        if mine.empty:
            continue
        good = mine[mine["outcome"] == "ok"]
        shown = mine.iloc[0] if good.empty else good.iloc[0]
        row: dict[str, Any] = {
            "variant": name,
            "label": study.variants[name].label,
            "repeats": len(good),
            "outcome": "ok" if len(good) else shown["outcome"],
            "reason": None if len(good) else shown["reason"],
            "key": shown["key"],
        }
        for metric in _METRICS:
            present = metric in good and good[metric].notna().any()
            row[metric] = over_repeats(metric, good[metric]) if present else None
        speeds = good["tokens_per_s"].dropna() if row["tokens_per_s"] is not None else None
        row["tokens_per_s_low"] = None if speeds is None else speeds.min()
        row["tokens_per_s_high"] = None if speeds is None else speeds.max()
        if not search.empty:
            found = search.iloc[0]
            row["batch_key"], row["batch_outcome"] = found["key"], found["outcome"]
            row["largest_batch"] = found.get("largest_batch")
        rows.append(row)
    table = pd.DataFrame(rows)
    numeric = [name for name in table if name in (*_METRICS, "largest_batch", "tokens_per_s_low", "tokens_per_s_high")]
    table[numeric] = table[numeric].apply(pd.to_numeric)
    return _with_ratios(table, study.baseline)


def _with_ratios(table: pd.DataFrame, baseline: str | None) -> pd.DataFrame:
    """Add speed-up and relative memory against the baseline (missing where the baseline has no result)."""
    base = table[(table["variant"] == baseline) & (table["outcome"] == "ok")]
    if base.empty:
        return table.assign(speedup=np.nan, memory_share=np.nan, batch_gain=np.nan, perplexity_change=np.nan)
    first = base.iloc[0]
    table["speedup"] = table["tokens_per_s"] / first["tokens_per_s"]
    table["memory_share"] = table["mem_peak_allocated_gib"] / first["mem_peak_allocated_gib"]
    table["perplexity_change"] = table["validation_perplexity"] / first["validation_perplexity"] - 1
    fits = first["largest_batch"] if "largest_batch" in table else 0
    table["batch_gain"] = table["largest_batch"] / fits if fits > 0 else np.nan  # a baseline may fit nothing at all
    return table
