"""One row per variant of the memory study: figures over repeats, ratios against the baseline, how each run ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lsai_lab.report.variants import OfMachine, by_machine, variant_rows
from lsai_lab.runs.records import Run
from lsai_lab.runs.study import Study


@dataclass(frozen=True)
class MachineResults(OfMachine):
    """The memory study on one machine: `rows` has one row per variant, in the study's order; `runs` are behind it."""

    machine: str
    study: Study
    rows: pd.DataFrame
    runs: list[Run]

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
    return [
        MachineResults(machine, study, _rows(study, some), some)
        for machine, some in by_machine(runs).items()
        if any(run.summary.id.part == "train" for run in some)
    ]


def _rows(study: Study, runs: list[Run]) -> pd.DataFrame:
    table = variant_rows(study, runs, "train", _METRICS, ranges=["tokens_per_s"])
    searches = {run.summary.id.variant: run for run in reversed(runs) if run.summary.id.part == "batch"}
    found = [searches.get(name) for name in table["variant"]]
    if any(found):
        table["batch_key"] = [run and run.summary.id.key for run in found]
        table["batch_outcome"] = [run and run.summary.outcome for run in found]
        table["largest_batch"] = pd.to_numeric(
            pd.Series([run and run.summary.results.get("largest_batch") for run in found], dtype=object)
        )
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
