"""Two runs beside each other: the settings in which they differ, their results, their curves."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from lsai_core.base.errors import UserError
from lsai_core.base.shown import Shown
from lsai_core.base.tables import Part, as_text, value
from lsai_lab.analysis.summary import over_repeats
from lsai_lab.interactive.curves import curves
from lsai_lab.report.load import AnyRun, all_runs, folder_of
from lsai_lab.runs.difference import RESULTS, Difference, difference, differing
from lsai_lab.runs.find import machine_of, opened, repeats_of, which_repeat
from lsai_lab.runs.frames import Frame
from lsai_lab.runs.records import Run, name_in

_HEADS = ("what", "first", "second", "second / first")
_RANGES = (*_HEADS, "range of first", "range of second")


class Comparison(Shown):
    """What two runs differ in, as frames (`settings`, `results`, `rest`: what, as `lab.load` calls
    it, first, second and the ratio; `repeats`: of losses the means, of all else the medians over
    the repeats of each, with their ranges), and `plot()`, their curves."""

    def __init__(self, first: Run, second: Run) -> None:
        self._runs = (first, second)
        self._found: Difference = difference(first, second)
        self.settings = self._frame(self._found.settings)
        self.results = self._frame(self._found.results)
        self.rest = self._frame(self._found.rest)
        self._repeats = tuple(map(repeats_of, self._runs))
        several = max(map(len, self._repeats)) > 1
        rows = [self._over_repeats(name) for name in RESULTS] if several else []
        self.repeats = Frame([row for row in rows if row], columns=list(_RANGES))

    def _frame(self, keys: list[str]) -> pd.DataFrame:
        return Frame([self._found.beside(key) for key in keys], columns=list(_HEADS))

    def _over_repeats(self, name: str) -> tuple[object, ...]:
        """A line of `repeats`; empty where one of the two has no such result."""
        found = [
            pd.Series([run.summary.results.get(name) for run in runs]).dropna()
            for runs in self._repeats
        ]
        if any(values.empty for values in found):
            return ()
        one, other = (over_repeats(name, values) for values in found)
        ratio = other / one if self._found.beside(f"results.{name}")[3] is not None else None
        ranges = (f"{value(float(each.min()))} to {value(float(each.max()))}" for each in found)
        return (name, one, other, ratio, *ranges)

    def plot(self, y: str | Sequence[str] = ("loss", "tokens_per_s"), x: str = "step") -> Figure:
        """Draw both runs' curves: see `lab.curves`."""
        return curves(*(run.folder for run in self._runs), y=y, x=x)

    def shown(self) -> list[Part]:
        """The two runs; settings; results; the rest folded."""
        names = [
            (which, *_who(run, repeats))
            for which, run, repeats in zip(
                ("first", "second"), self._runs, self._repeats, strict=True
            )
        ]
        parts = [Part("", ("", "run", "machine", "outcome"), names)]
        many = " and ".join(str(len(repeats)) for repeats in self._repeats)
        over = f"Over {many} repeats (losses: mean, all else: median)"
        for title, heads, frame, folded, note in (
            (differing(len(self.settings), "setting"), _HEADS, self.settings, False, ""),
            ("Results", _HEADS, self.results, False, self._found.remark),
            (over, _RANGES, self.repeats, False, ""),
            (differing(len(self.rest), "other fact"), _HEADS, self.rest, True, ""),
        ):
            if heads == _HEADS or len(frame):
                rows = frame.astype(object).where(frame.notna(), None).values.tolist()
                parts.append(Part(title, heads, [_with_ratio(row) for row in rows], folded, note))
        return parts

    def __repr__(self) -> str:
        return as_text([part for part in self.shown() if not part.folded])


def _with_ratio(row: list[object]) -> list[object]:
    what, first, second, ratio, *ranges = row
    return [what, first, second, f"{ratio:.3g}x" if isinstance(ratio, float) else "", *ranges]


def _who(run: Run, repeats: list[Run]) -> tuple[str, str, str]:
    called = name_in(run.plan)
    name = f"{run.summary.id.study}.{run.summary.id.name}{which_repeat(run, repeats)}"
    reason = f": {run.summary.reason}" if run.summary.reason else ""
    outcome = f"{run.summary.outcome}{reason}"
    return f"{called} ({name})" if called else name, run.machine, outcome


def compare(*runs: AnyRun | Sequence[AnyRun] | pd.DataFrame) -> Comparison:
    """What two runs differ in, `lab.compare(a, b)`, own or recorded, also while they go on:
    settings, results, those of all their repeats, and with `.plot()` their curves. UserError for a
    run that is not there, and for more than two."""
    asked = all_runs(runs)
    if len(asked) != 2:
        raise UserError(
            f"lab.compare(a, b) takes two runs, not {len(asked)}; lab.curves(a, b, c) draws several"
        )
    one, other = (opened(folder, machine_of(folder)) for folder in map(folder_of, asked))
    return Comparison(one, other)
