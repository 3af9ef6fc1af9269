"""Two runs beside each other: the settings in which they differ, their results, their curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lsai_core.base.errors import UserError
from lsai_core.base.shown import Shown
from lsai_core.base.tables import Part, value
from lsai_lab.analysis.summary import over_repeats
from lsai_lab.interactive.curves import curves
from lsai_lab.report.load import AnyRun, all_runs, folder_of
from lsai_lab.runs.difference import (
    RESULTS,
    Difference,
    change_words,
    difference,
    differing,
    several_peaks,
)
from lsai_lab.runs.find import machine_of, opened, repeats_of, which_repeat
from lsai_lab.runs.frames import Frame
from lsai_lab.runs.records import Run, name_in

_NUMBERS = ("second / first", "second - first")
_HEADS = ("what", "first", "second", *_NUMBERS)
_RANGES = (*_HEADS, "range of first", "range of second")


class Comparison(Shown):
    """What two runs differ in, as frames (`settings`, `results`, `rest`: what, as `lab.load` calls
    it, first, second and the ratio, of losses the difference; `repeats`: of losses the means, of
    all else the medians over the repeats of each, with their ranges), and `plot()`, their
    curves."""

    def __init__(self, first: Run, second: Run) -> None:
        self._runs = (first, second)
        self._found: Difference = difference(first, second)
        self.settings = self._frame(self._found.settings)
        self.results = self._frame(self._found.results)
        self.rest = self._frame(self._found.rest)
        self._repeats = tuple(map(repeats_of, self._runs))
        several = max(map(len, self._repeats)) > 1 and not self._same
        rows = [self._over_repeats(name) for name in RESULTS] if several else []
        self.repeats = Frame([row for row in rows if row], columns=list(_RANGES))

    @property
    def _same(self) -> str:
        """That the two are one run, or repeats of one setting; else nothing."""
        if self._runs[0].folder.resolve() == self._runs[1].folder.resolve():
            return "both are the same run"
        of_one = self._runs[1].folder in [run.folder for run in self._repeats[0]]
        return "these are two repeats of one setting" if of_one else ""

    @property
    def _peaks(self) -> str:
        """Why the MFU of all the repeats do not compare; empty if they do."""
        runs = [run for runs in self._repeats for run in runs]
        return several_peaks(run.summary.results.get("mfu_peak_tflops") for run in runs)

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
        change = self._found.change(name, one, other)
        if name == "mfu" and self._peaks:
            change = (None, None)
        ranges = (f"{value(float(each.min()))} to {value(float(each.max()))}" for each in found)
        return (name, one, other, *change, *ranges)

    def plot(self, y: str | Sequence[str] = ("loss", "tokens_per_s"), x: str = "step") -> Figure:
        """Draw both runs' curves: see `lab.curves`."""
        return curves(*(run.folder for run in self._runs), y=y, x=x)

    def _parts(self) -> list[Part]:
        """The two runs; settings; results; the rest folded."""
        names = [
            (which, *_who(run, repeats))
            for which, run, repeats in zip(
                ("first", "second"), self._runs, self._repeats, strict=True
            )
        ]
        parts = [Part("", ("", "run", "machine", "outcome"), names, note=self._same)]
        many = " and ".join(str(len(repeats)) for repeats in self._repeats)
        over = f"Over {many} repeats (losses: mean, all else: median)"
        apart = "" if self._same else differing(len(self.settings), "setting")
        peaks = self._peaks if len(self.repeats) else ""
        for title, frame, folded, note in (
            (apart, self.settings, False, ""),
            ("Results", self.results, False, self._found.remark),
            (over, self.repeats, False, peaks),
            (differing(len(self.rest), "other fact"), self.rest, True, ""),
        ):
            if len(frame) or note or title == apart != "":
                rows = frame.astype(object).where(frame.notna(), None).values.tolist()
                heads = [name for name in frame if name not in _NUMBERS]
                heads.insert(3, "change")
                parts.append(Part(title, heads, [_with_change(row) for row in rows], folded, note))
        return parts


def _with_change(row: list[Any]) -> list[object]:
    what, first, second, ratio, difference, *ranges = row
    return [what, first, second, change_words(ratio, difference), *ranges]


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
