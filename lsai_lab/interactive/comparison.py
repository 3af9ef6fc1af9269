"""Two runs beside each other: the settings in which they differ, their results, their curves."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from lsai_core.base.errors import UserError
from lsai_core.base.shown import Shown
from lsai_core.base.tables import Part, as_text
from lsai_lab.interactive.curves import curves
from lsai_lab.report.load import AnyRun, all_runs, folder_of
from lsai_lab.runs.difference import Difference, difference, differing
from lsai_lab.runs.find import machine_of, opened
from lsai_lab.runs.frames import Frame
from lsai_lab.runs.records import Run, name_in

_HEADS = ("what", "first", "second", "second / first")


class Comparison(Shown):
    """What two runs differ in, as frames (`settings`, `results`, `rest`: what, first, second and
    the ratio), and `plot()`, their curves."""

    def __init__(self, first: Run, second: Run) -> None:
        self._runs = (first, second)
        self._found: Difference = difference(first, second)
        self.settings = self._frame(self._found.settings)
        self.results = self._frame(self._found.results)
        self.rest = self._frame(self._found.rest)

    def _frame(self, keys: list[str]) -> pd.DataFrame:
        return Frame([self._found.beside(key) for key in keys], columns=list(_HEADS))

    def plot(self, y: str | Sequence[str] = ("loss", "tokens_per_s"), x: str = "step") -> Figure:
        """Draw both runs' curves: see `lab.curves`."""
        return curves(*(run.folder for run in self._runs), y=y, x=x)

    def shown(self) -> list[Part]:
        """The two runs; settings; results; the rest folded."""
        names = [("first", *_who(self._runs[0])), ("second", *_who(self._runs[1]))]
        parts = [Part("", ("", "run", "machine", "outcome"), names)]
        for title, frame, folded, note in (
            (differing(len(self.settings), "setting"), self.settings, False, ""),
            ("Results", self.results, False, self._found.remark),
            (differing(len(self.rest), "other fact"), self.rest, True, ""),
        ):
            rows = frame.astype(object).where(frame.notna(), None).values.tolist()
            parts.append(Part(title, _HEADS, [_with_ratio(row) for row in rows], folded, note))
        return parts

    def __repr__(self) -> str:
        return as_text([part for part in self.shown() if not part.folded])


def _with_ratio(row: list[object]) -> list[object]:
    *values, ratio = row
    return [*values, f"{ratio:.3g}x" if isinstance(ratio, float) else ""]


def _who(run: Run) -> tuple[str, str, str]:
    called = name_in(run.plan)
    name = f"{run.summary.id.study}.{run.summary.id.name}"
    return f"{called} ({name})" if called else name, run.machine, run.summary.outcome


def compare(*runs: AnyRun | Sequence[AnyRun] | pd.DataFrame) -> Comparison:
    """What two runs differ in, `lab.compare(a, b)`, own or recorded, also while they go on:
    settings, results, and with `.plot()` their curves. UserError for a run that is not there, and
    for more than two."""
    asked = all_runs(runs)
    if len(asked) != 2:
        raise UserError(
            f"lab.compare(a, b) takes two runs, not {len(asked)}; lab.curves(a, b, c) draws several"
        )
    one, other = (opened(folder, machine_of(folder)) for folder in map(folder_of, asked))
    return Comparison(one, other)
