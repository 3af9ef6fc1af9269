"""The records behind the fp8 chapter, machine by machine, as tables that the sections share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from lsai_core.config import TrainConfig
from lsai_core.strict import validated
from lsai_lab.report.losses import final_loss, validation_loss
from lsai_lab.report.selection import select_runs
from lsai_lab.report.variants import OfMachine, by_machine
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import Study


@dataclass(frozen=True)
class Fp8Results(OfMachine):
    """The studies fp8 and gemm on one machine."""

    machine: str
    study: Study
    runs: list[Run]

    @cached_property
    def gemm(self) -> Run | None:
        """The newest run of the matrix products that left points, whether it ended well or not."""
        runs = [run for run in self.runs if run.summary.kind == "gemm" and len(run.metrics)]
        return max(runs, key=lambda run: run.summary.started, default=None)

    @cached_property
    def points(self) -> pd.DataFrame:
        """The measured products, one row each (empty if there are none)."""
        if self.gemm is None:
            return pd.DataFrame()
        points = self.gemm.metrics
        return points[points["outcome"] == "ok"].reset_index(drop=True)

    def of_part(self, part: str) -> list[Run]:
        return [run for run in self.runs if run.summary.id.study == self.study.study and run.summary.id.part == part]

    def config(self, part: str) -> TrainConfig | None:
        """The baseline's config of a part, or any variant's if there is no baseline."""
        runs = sorted(self.of_part(part), key=lambda run: run.summary.id.variant != self.study.baseline)
        return validated(TrainConfig, runs[0].config, "config.json") if runs else None

    @cached_property
    def speed(self) -> pd.DataFrame:
        """One row per variant that was tried at full size, in the study's order, with ratios against bf16."""
        rows: list[dict[str, Any]] = []
        for name, variant in self.study.variants.items():
            for run in self.of_part("speed"):
                if run.summary.id.variant != name:
                    continue
                found, summary = run.summary.results, run.summary
                rows.append(
                    {
                        "variant": name,
                        "label": variant.label,
                        "key": summary.id.key,
                        "outcome": summary.outcome,
                        "reason": summary.reason,
                        "tokens_per_s": found.get("tokens_per_s"),
                        "step_ms": found.get("step_ms"),
                        "step_ms_p25": found.get("step_ms_p25"),
                        "step_ms_p75": found.get("step_ms_p75"),
                        "mfu": found.get("mfu"),
                        "peak_gib": found.get("mem_peak_allocated_gib"),
                        "first_step_s": found.get("first_step_s"),
                        "parameters": found.get("parameters"),
                        "peak_source": found.get("mfu_peak_source"),
                    }
                )
        table = pd.DataFrame(rows)
        if table.empty:
            return table
        numbers = [c for c in table if c not in ("variant", "label", "key", "outcome", "reason", "peak_source")]
        table[numbers] = table[numbers].apply(pd.to_numeric)
        base = table[(table["variant"] == self.study.baseline) & (table["outcome"] == "ok")]
        speed, peak = (base[c].iloc[0] if len(base) else float("nan") for c in ("tokens_per_s", "peak_gib"))
        return table.assign(speedup=table["tokens_per_s"] / speed, more_gib=table["peak_gib"] - peak)

    def loss_runs(self, variant: str) -> dict[int, Run]:
        """The runs over the loss that ended well, by repeat (which is the seed)."""
        runs = self.of_part("loss")
        return {r.summary.id.repeat: r for r in runs if r.summary.id.variant == variant and r.summary.outcome == "ok"}

    @cached_property
    def losses(self) -> pd.DataFrame:
        """One row per fp8 variant and seed: final losses of both precisions and their relative differences."""
        plain, rows = self.loss_runs(str(self.study.baseline)), []
        for name, variant in self.study.variants.items():
            if name == self.study.baseline:
                continue
            for repeat, run in self.loss_runs(name).items():
                if repeat not in plain:
                    continue
                other = plain[repeat]
                row: dict[str, Any] = {"variant": name, "label": variant.label, "seed": run.config["seed"]}
                for what, value in (("train", final_loss), ("validation", validation_loss)):
                    row |= {f"{what}_bf16": value(other), f"{what}_fp8": value(run)}
                    row[f"{what}_difference"] = row[f"{what}_fp8"] / row[f"{what}_bf16"] - 1
                rows.append({**row, "key": run.summary.id.key, "key_bf16": other.summary.id.key})
        return pd.DataFrame(rows)


def results_of(study: Study, runs: list[Run]) -> list[Fp8Results]:
    """Group `runs` by machine, in the order in which machines appear."""
    return [Fp8Results(machine, study, mine) for machine, mine in by_machine(runs).items()]


def load_results(own_runs: list[str], profile: str | None) -> list[Fp8Results]:
    """Both studies on every machine that there are records of: the reader's own first, then the committed ones."""
    session = Session(profile)
    where = (session.runs_root, session.root / "reports", own_runs)
    return results_of(session.study("fp8"), [*select_runs("fp8", *where), *select_runs("gemm", *where)])
