"""The attention study's records, machine by machine, as the chapter's tables and figures need them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from lsai_core.attention.measured import Ranking, select_rankings, shipped
from lsai_lab.benches.attention.config import AttentionBenchConfig
from lsai_lab.benches.attention_table import attention_runs, auto_choices, error_ratio, read_points
from lsai_lab.report.selection import select_runs
from lsai_lab.report.variants import OfMachine, heads_label, own_first
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session


@dataclass
class Variant:
    """One shape of heads on one machine: its run, config and points."""

    run: Run
    config: AttentionBenchConfig
    rows: list[dict[str, Any]]

    @property
    def label(self) -> str:
        return heads_label(self.config.heads, self.config.kv_heads, self.config.head_dim)

    @functools.cached_property
    def timed(self) -> pd.DataFrame:
        """One row for each point that was timed or should have been; see `clock.measure` for the columns."""
        return pd.DataFrame([row for row in self.rows if row["measure"] == "time"])

    @functools.cached_property
    def good(self) -> pd.DataFrame:
        """The points that were timed, with `training_*` columns even where no backend has gradients."""
        frame = self.timed
        if frame.empty or not (frame["outcome"] == "ok").any():
            return pd.DataFrame()
        columns = ("training_ms", "training_tflops", "forward_tflops", "memory_training_mib")
        return frame[frame["outcome"] == "ok"].reindex(
            columns=[*frame.columns, *(c for c in columns if c not in frame)]
        )

    @functools.cached_property
    def errors(self) -> pd.DataFrame:
        """One row for each comparison with float64 that was made."""
        return pd.DataFrame([row for row in self.rows if row["measure"] == "error" and row["outcome"] == "ok"])

    def at(self, mask: str, length: int, window: int | None = None) -> pd.DataFrame:
        """The timed points of one shape, by backend."""
        frame = self.good
        if frame.empty:
            return frame
        same = frame["window"].isna() if window is None else frame["window"] == window
        return frame[(frame["mask"] == mask) & (frame["length"] == length) & same].set_index("backend")

    def ratio(self, backend: str, mask: str) -> float | None:
        """The backend's largest error under a kind of mask over eager's."""
        return error_ratio(self.rows, backend, mask, "training")


@dataclass
class MachineResults(OfMachine):
    """The attention study on one machine, a variant for each shape of heads; `again`: those that were measured once more."""

    machine: str
    variants: list[Variant]
    again: list[Variant] = field(default_factory=list)

    @property
    def gpu(self) -> str | None:
        return self.variants[0].run.env.get("gpu") if self._capability else None

    @property
    def rate(self) -> tuple[str, float]:
        """The unit of this machine's speeds, and how many of it are one TFLOP/s."""
        return ("TFLOP/s", 1.0) if self.gpu else ("GFLOP/s", 1e3)

    @property
    def device(self) -> str:
        env = self.variants[0].run.env
        return self.gpu or f"{env.get('cpu')}, {env.get('cpu_cores')} cores"

    @property
    def _capability(self) -> str | None:
        return next((c for v in self.variants if (c := v.run.summary.results.get("compute_capability"))), None)

    @property
    def rankings(self) -> tuple[Ranking, ...]:
        """What the table that ships says for this machine's GPU."""
        return select_rankings(shipped(), self.gpu, self._capability) if self.gpu and self._capability else ()

    @property
    def backends(self) -> dict[str, dict[str, Any]]:
        """What each backend is on this machine: its `outcome` and `reason`."""
        return {row["backend"]: row for v in self.variants for row in v.rows if row["measure"] == "backend"}

    def auto(
        self, measured: tuple[Ranking, ...], *, from_neighbours: bool = False, again: bool = False
    ) -> pd.DataFrame:
        """What `auto` takes at every shape of every variant by a table, one row for each shape and purpose.

        `again`: judged by the repeated measurements, which the table does not know.
        """
        device = "cuda" if self.gpu else "cpu"
        found = [
            {"variant": variant.label, "key": variant.run.summary.id.key, **choice}
            for variant in (self.again if again else self.variants)
            for choice in auto_choices(variant.config, variant.rows, device, measured, from_neighbours=from_neighbours)
        ]
        return pd.DataFrame(found)


def load_results(own_runs: list[str], profile: str | None) -> list[MachineResults]:
    """The reader's own machine first, then the committed ones; machines that measured nothing are left out."""
    session = Session(profile)
    selected = select_runs("attention", session.runs_root, session.root / "reports", own_runs)
    runs, again = attention_runs(selected), attention_runs(selected, repeated=True)
    machines = own_first(run.machine for run in runs)
    results = [MachineResults(machine, _variants(runs, machine), _variants(again, machine)) for machine in machines]
    return [found for found in results if found.variants]


def _variants(runs: list[Run], machine: str) -> list[Variant]:
    """Those with points; the widest heads first, all of them own before grouped: the order in which the study names them."""
    variants = [Variant(run, *read_points(run)) for run in runs if run.machine == machine]
    found = [variant for variant in variants if not variant.good.empty]
    return sorted(found, key=lambda v: (-v.config.head_dim, -v.config.kv_heads))
