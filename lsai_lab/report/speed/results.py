"""The speed study on one machine: a row per lever and per attention kernel, with the time of every kernel class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from lsai_core.profiling.trace import KERNEL_CLASSES, result_name
from lsai_lab.report.selection import select_runs
from lsai_lab.report.speed.ideal import Ceilings, Ideal, ideal_step
from lsai_lab.report.variants import OfMachine, by_machine, variant_rows
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import Profile, Study, load_study

METRICS = (
    "tokens_per_s", "step_ms", "mfu", "mem_peak_allocated_gib", "rss_peak_gib", "setup_s", "first_step_s", "train_s",
    "train_loss", "validation_loss", "gpu_busy_share", "kernel_idle_ms", *map(result_name, KERNEL_CLASSES),
)  # fmt: skip
# What a bar shows, from its foot to its end. The rest of the classes are summed up as other.
SHOWN = ("matmul", "attention", "norm/pointwise", "loss", "optimizer", "fp8 cast", "other", "idle")


@dataclass(frozen=True)
class Speed(OfMachine):
    """The study on one machine. `study` is the whole one; `planned`: the variants that the reader's profile measures."""

    machine: str
    study: Study
    planned: frozenset[str]
    levers: pd.DataFrame
    attention: pd.DataFrame
    runs: list[Run]
    ceilings: Ceilings

    @property
    def on_gpu(self) -> bool:
        return self.ceilings.gpu is not None

    def run(self, key: str) -> Run:
        """The run that a row names."""
        return next(run for run in self.runs if run.summary.id.key == key)

    def ideal(self, key: str) -> Ideal | None:
        """The ideal step of the run that a row names."""
        return ideal_step(self.run(key).config, self.ceilings)


def load_speed(own_runs: list[str], profile: str | None) -> list[Speed]:
    """The study on every machine that there are records of: the reader's own first, then the committed ones."""
    session = Session(profile)
    study = load_study(session.root, "speed", Profile(profile="none", description="the whole study", gpu=None))
    mine = session.study("speed")
    planned = frozenset(name for part in mine.parts for name in mine.measured(part))
    reports = session.root / "reports"
    machines = [r for r in select_runs("machine", session.runs_root, reports) if r.summary.outcome == "ok"]
    found = []
    for machine, runs in by_machine(select_runs("speed", session.runs_root, reports, own_runs)).items():
        # A machine's ceilings may be committed while its speed is the reader's own, or the other way round.
        same = [run for run in machines if run.machine.split(" ")[0] == machine.split(" ")[0]]
        newest = max(same, key=lambda run: (run.machine == machine, run.summary.started), default=None)
        levers, attention = (_rows(study, runs, part) for part in ("levers", "attention"))
        ceilings = Ceilings(newest, runs[0].env.get("gpu"))
        found.append(Speed(machine, study, planned, levers, attention, runs, ceilings))
    return found


def good(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that ended well and were timed."""
    return rows[(rows["outcome"] == "ok") & rows["tokens_per_s"].notna()] if len(rows) else rows


def class_ms(row: Any) -> dict[str, float]:
    """Milliseconds per step of each entry of `SHOWN` in a row; empty if the run has no trace."""
    times = {label: float(row[result_name(label)]) for label in KERNEL_CLASSES}
    times = {label: ms for label, ms in times.items() if ms == ms}
    if not times:
        return {}
    shown = {label: times.get(label, 0.0) for label in SHOWN[:-2]}
    idle = float(row["kernel_idle_ms"])
    return {**shown, "other": sum(times.values()) - sum(shown.values()), "idle": idle if idle == idle else 0.0}


def _rows(study: Study, runs: list[Run], part: str) -> pd.DataFrame:
    rows = variant_rows(study, runs, part, METRICS)
    if rows.empty:
        return rows
    timed = rows["tokens_per_s"].where(rows["outcome"] == "ok")
    # A lever that did not run is passed over: the next one is compared with the last that did.
    before = timed.ffill().shift(1)
    return rows.assign(gain=timed / before - 1, cold_start_s=rows["setup_s"] + rows["first_step_s"])
