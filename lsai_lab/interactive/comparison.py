"""Two runs beside each other: the settings in which they differ, their results, their curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure

from lsai_core.base.errors import UserError
from lsai_core.base.shown import Shown
from lsai_core.base.tables import Part, value, values
from lsai_lab.analysis.intervals import half_width
from lsai_lab.analysis.summary import over_repeats
from lsai_lab.interactive.curves import curves
from lsai_lab.report.load import TRAININGS, AnyRun, all_runs, folder_of, machine_name
from lsai_lab.runs.difference import (
    RESULTS,
    Difference,
    change_words,
    difference,
    differing,
    several_peaks,
)
from lsai_lab.runs.find import machine_of, opened, repeats_of, seed_of, which_repeat
from lsai_lab.runs.frames import Frame, with_ends
from lsai_lab.runs.records import Run, name_in
from lsai_lab.runs.result_names import is_quality, is_timed

_NUMBERS = ("second / first", "second - first")
_HEADS = ("what", "first", "second", *_NUMBERS)
_ENDS = ("first_low", "first_high", "second_low", "second_high")
_SIDES = (("first", "first_low", "first_high"), ("second", "second_low", "second_high"))
_KINDS = dict.fromkeys(TRAININGS, "training")
_REPEATS = (*_HEADS, *_ENDS, "within_spread")


class Comparison(Shown):
    """What two runs differ in, as frames (`settings`, `results`, `rest`: what, as `lab.load` calls
    it, first, second and the ratio, of losses the difference; `repeats`: of losses the means, of
    all else the medians over the repeats of each, their ends `first_low`, `first_high`,
    `second_low`, `second_high`, and `within_spread`: the change may be
    none, for the ranges overlap, or the 95 % interval of the mean difference of the same seeds has
    0 in it; speeds and times are of the repeats that were not disturbed, where there are some), and
    `plot()`, their curves."""

    def __init__(self, first: Run, second: Run) -> None:
        self._runs = (first, second)
        self._found: Difference = difference(first, second)
        self.settings = self._frame(self._found.settings)
        self.results = self._frame(self._found.results)
        self.rest = self._frame(self._found.rest)
        self._repeats = tuple(map(repeats_of, self._runs))
        several = max(map(len, self._repeats)) > 1 and not self._same
        rows = [self._over_repeats(name) for name in RESULTS] if several else []
        self.repeats = Frame([row for row in rows if row], columns=list(_REPEATS))

    @property
    def _same(self) -> str:
        """That the two are one run, or repeats of one setting; else nothing."""
        if self._runs[0].folder.resolve() == self._runs[1].folder.resolve():
            return "both are the same run"
        of_one = self._runs[1].folder in [run.folder for run in self._repeats[0]]
        return "these are two repeats of one setting" if of_one else ""

    @property
    def _frame_of_it(self) -> pd.DataFrame:
        """The results as they are shown, of all repeats where there are several."""
        shown = _table("", self.repeats if len(self.repeats) else self.results)
        rows = [[value(cell) for cell in row] for row in shown.rows]
        return Frame(rows, columns=list(shown.heads))

    @property
    def _peaks(self) -> str:
        """Why the MFU of all the repeats do not compare; empty if they do."""
        runs = [run for runs in self._repeats for run in runs]
        return several_peaks(run.summary.results.get("mfu_peak_tflops") for run in runs)

    def _frame(self, keys: list[str]) -> pd.DataFrame:
        return Frame([self._found.beside(key) for key in keys], columns=list(_HEADS))

    def _over_repeats(self, name: str) -> tuple[object, ...]:
        """A line of `repeats`; empty where one of the two has no such result."""
        found = [_undisturbed(name, runs) for runs in self._repeats]
        if any(values.empty for values in found):
            return ()
        one, other = (over_repeats(name, values) for values in found)
        change = self._found.change(name, one, other)
        if name == "mfu" and self._peaks:
            change = (None, None)
        ends = [float(end) for each in found for end in (each.min(), each.max())]
        overlap = ends[0] <= ends[3] and ends[2] <= ends[1]
        if is_quality(name) and len(pairs := _by_seed(name, *self._repeats)) > 1:
            overlap = abs(fmean(pairs)) <= half_width(pd.Series(pairs))
        return (name, one, other, *change, *ends, overlap)

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
        apart = "" if self._same else differing(len(self.settings), "setting")
        parts.append(_table(apart, self.settings))
        several = len(self.repeats) > 0
        said = [*self._found.remark.splitlines(), *([self._peaks] if several else [])]
        remark = "\n".join(filter(None, dict.fromkeys(said)))
        if several:
            many = " and ".join(str(len(repeats)) for repeats in self._repeats)
            title = f"Results over {many} repeats (losses: mean, all else: median; range)"
            parts.append(_table(title, self.repeats, note=remark))
            parts.append(_table("Results of these two alone", self.results, folded=True))
        else:
            parts.append(_table("Results", self.results, note=remark))
        parts.append(_table(differing(len(self.rest), "other fact"), self.rest, folded=True))
        return [part for part in parts if part.rows or part.note or (part.title == apart != "")]


def _undisturbed(name: str, runs: list[Run]) -> pd.Series:
    """A result of repeats; of a speed or time without those that were disturbed, where others are
    there, as `lab.summarize` has it."""
    there = [run for run in runs if run.summary.results.get(name) is not None]
    calm = [run for run in there if not run.summary.results.get("disturbed")]
    chosen = calm if calm and is_timed(name) else there
    return pd.Series([run.summary.results[name] for run in chosen], dtype=float)


def _by_seed(name: str, one: list[Run], other: list[Run]) -> list[float]:
    """How far a result changes from each repeat of the first run to that of the second with the
    same seed; none where not each has its partner."""
    first, second = (
        {seed_of(run): run.summary.results.get(name, math.nan) for run in runs}
        for runs in (one, other)
    )
    changes = [second.get(seed, math.nan) - first[seed] for seed in first]
    is_paired = {*first} == {*second} and len(first) == len(one) and len(second) == len(other)
    return changes if is_paired and not any(map(math.isnan, changes)) else []


def _table(title: str, frame: pd.DataFrame, folded: bool = False, note: str = "") -> Part:
    """A part of a comparison, a row a line: what, both values with their ranges, the change."""
    rows = []
    for row in frame.astype(object).where(frame.notna(), None).to_dict("records"):
        change = change_words(*(row[name] for name in _NUMBERS))
        told = [row["first"], row["second"]]
        if "within_spread" in row:
            texts = iter(values([row[name] for pair in _SIDES for name in pair]))
            told = [with_ends(*each) for each in zip(texts, texts, texts, strict=True)]
            change += ", within the spread" * (bool(change) and row["within_spread"])
        rows.append([row["what"], *told, change])
    heads = ("what", "first", "second", "change")
    return Part(title, heads, rows, folded, note, by_row=True)


def _who(run: Run, repeats: list[Run]) -> tuple[str, str, str]:
    called = name_in(run.plan)
    name = f"{run.summary.id.study}.{run.summary.id.name}{which_repeat(run, repeats)}"
    reason = f": {run.summary.reason}" if run.summary.reason else ""
    outcome = f"{run.summary.outcome}{reason}"
    return f"{called} ({name})" if called else name, machine_name(run), outcome


def compare(*runs: AnyRun | Sequence[AnyRun] | pd.DataFrame) -> Comparison:
    """What two runs differ in, `lab.compare(a, b)`, own or recorded, also while they go on:
    settings, results, those of all their repeats, and with `.plot()` their curves. UserError for a
    run that is not there, and for more than two.

    >>> both = lab.compare("h100/memory.bf16", "h100/memory.flash_attn")
    >>> both.settings["what"].tolist()
    ['attention.backend']
    >>> print(round(both.repeats.set_index("what").loc["tokens_per_s", "second / first"], 2))
    1.51
    """
    asked = all_runs(runs)
    if len(asked) != 2:
        raise UserError(
            f"lab.compare(a, b) takes two runs, not {len(asked)}; lab.curves(a, b, c) draws several"
        )
    one, other = (opened(folder, machine_of(folder)) for folder in map(folder_of, asked))
    kinds = [_KINDS.get(run.summary.kind, run.summary.kind) for run in (one, other)]
    if kinds[0] != kinds[1]:
        raise UserError(
            f"lab.compare takes two runs of one kind: {one.summary.id} is of kind {kinds[0]}, "
            f"{other.summary.id} of kind {kinds[1]}"
        )
    return Comparison(one, other)
