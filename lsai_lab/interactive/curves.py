"""Curves of runs beside each other, recorded ones and such that go on, and the picture that a
notebook draws while a training goes on."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_core.base.errors import UserError, hint
from lsai_lab.project.files import listed
from lsai_lab.report.charts import MARKED
from lsai_lab.report.load import AnyRun, all_runs, folder_of, steps
from lsai_lab.report.show import shown_once
from lsai_lab.report.style import series_style
from lsai_lab.runs.difference import loss_function, settings_apart
from lsai_lab.runs.find import machine_of, opened, seed_of
from lsai_lab.runs.records import Run, name_in

# How an axis is called; a column without an entry has its own name.
_WORDS = {
    "loss": "loss (nats per token)",
    "validation_loss": "validation loss (nats)",
    "tokens_per_s": "tokens/s",
    "step_ms": "ms per step",
    "elapsed_s": "seconds",
    "tokens": "tokens",
    "memory_allocated_gib": "GiB allocated (peak so far)",
    "memory_reserved_gib": "GiB reserved (peak so far)",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "mfu": "MFU",
}
# Columns that steps can have: a run that lacks one of them has no line there.
COLUMNS = (*_WORDS, "step", "tokens_in_step", "steady")
_EVERY_S, _SHARE = 2.0, 0.05  # of the time, for drawing
_MOST_LINES = 20  # of a picture
_MOST_NAMED = 3  # runs that a line of text names, else their number


def curves(
    *runs: AnyRun | Sequence[AnyRun] | pd.DataFrame,
    y: str | Sequence[str] = "loss",
    x: str = "step",
    smooth: int = 1,
) -> Figure:
    """Draw columns of `lab.steps` of the runs over `x` (`step`, `tokens`, `elapsed_s`), one plot a
    column, one line a run; also of runs that go on. Returns the figure, for `savefig`.

    `runs`: one by one, in lists, or the rows of a frame of `lab.load`. `smooth`: a running mean
    over so many steps. UserError for an unknown column, with the nearest names, if no run has one,
    or for more runs than a picture can tell apart.

    >>> fig = lab.curves("h100/memory.baseline", "h100/memory.bf16", x="elapsed_s")
    """
    if not (isinstance(smooth, int) and smooth > 0):
        raise UserError(f"smooth is a whole number of at least 1, not {smooth!r}")
    asked = all_runs(runs)
    if not asked:
        raise UserError("lab.curves wants runs: rows of lab.load(...), names, folders")
    if len(asked) > _MOST_LINES:
        raise UserError(
            f"those are {len(asked)} runs; a picture takes at most {_MOST_LINES}: choose some, as "
            f"lab.curves(runs.query(\"variant == 'bf16'\")), or runs.head({_MOST_LINES})"
        )
    frames = dict(zip(_labels(asked), map(steps, asked), strict=True))
    columns = listed(y)
    drawn = _drawn(frames, columns, x, smooth)
    if any(name.endswith("loss") for name in columns):
        _say_whose_text(asked, frames)
    if {"loss", "train_loss"} & {*columns}:  # validation is cross entropy in all
        _say_which_function(asked, frames)
    data = [frame.assign(series=label) for label, frame in frames.items() if len(frame)]
    shown = [name for name in ("series", x, *columns) if any(name in frame for frame in data)]
    few = data and len(data) * len(data[0]) < 2000
    drawn_once: Figure = shown_once(drawn, pd.concat(data)[shown] if few else None)
    return drawn_once


def _say_whose_text(runs: Sequence[AnyRun], labels: Iterable[str]) -> None:
    """Print that losses do not compare, where the runs read several texts."""
    records = [opened(folder_of(run)) for run in runs]
    texts = [
        run.summary.results.get("dataset") or (run.config.get("data") or {}).get("source")
        for run in records
    ]
    # a run that has not ended is known to read a source, one that has `source-<hash>`
    sources = {text.rpartition("-")[0] for text in texts if text}
    if len({text for text in texts if text} - sources) > 1:
        whose = _whose(labels, texts)
        print(f"losses of several texts do not compare, for each is per token of its own: {whose}")


def _say_which_function(runs: Sequence[AnyRun], labels: Iterable[str]) -> None:
    """Print that losses do not compare, where they are of several functions."""
    found = [loss_function(opened(folder_of(run)).config.get("loss")) for run in runs]
    if len({*found}) > 1:
        print(f"training losses of several functions do not compare: {_whose(labels, found)}")


def _whose(labels: Iterable[str], found: Sequence[str | None]) -> str:
    """Which runs are of which text or function: `a, b of one; 12 of two`."""
    of: dict[str, list[str]] = {}
    for label, name in zip(labels, found, strict=True):
        of.setdefault(name or "no known one", []).append(label)
    told = {
        name: f"{len(runs)} runs" if len(runs) > _MOST_NAMED else ", ".join(runs)
        for name, runs in of.items()
    }
    return "; ".join(f"{runs} of {name}" for name, runs in told.items())


def _labels(runs: Sequence[AnyRun]) -> list[str]:
    """What each run is called in the legend: its given name, or its label with what tells it from
    the others of that label: machine, settings, part, seed, else its key."""
    records = [opened(folder_of(run)) for run in runs]
    apart = settings_apart(records)
    labels = [_called(record) for record in records]
    among: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        among.setdefault(label, []).append(place)
    for places in (places for places in among.values() if len(places) > 1):
        facts = [_facts(records[place], apart[records[place].folder]) for place in places]
        for place, told in zip(places, _told_apart(facts), strict=True):
            labels[place] += f" ({told})" if told else ""
    return labels


def _called(record: Run) -> str:
    return name_in(record.plan) or record.label


def _facts(record: Run, settings: dict[str, str]) -> tuple[str, ...]:
    which = record.summary.id
    changed = ", ".join(f"{key}={value}" for key, value in settings.items())
    return (machine_of(record.folder) or "own", changed, which.part, seed_of(record), which.key)


def _told_apart(facts: Sequence[tuple[str, ...]]) -> list[str]:
    """Of each run the first facts that, together, no other run has."""
    told = [""] * len(facts)
    for values in zip(*facts, strict=True):
        if len({*told}) < len(told) and len({*values}) > 1:
            told = [", ".join(filter(None, pair)) for pair in zip(told, values, strict=True)]
    return told


def _drawn(frames: dict[str, pd.DataFrame], columns: list[str], x: str, smooth: int) -> Figure:
    there = {name for frame in frames.values() for name in frame if len(frame)}
    for name in (x, *columns):
        if name not in (*COLUMNS, *there):
            known = dict.fromkeys((*COLUMNS, *there))
            raise UserError(f"steps have no column {name!r}{hint(name, known)}")
    columns = [name for name in columns if name in there]
    if not columns or x not in there:
        raise UserError("no run has such steps: it took none yet, or is no training run")
    fig, places = plt.subplots(
        1, len(columns), figsize=(3.3 * max(2, len(columns)), 2.6), squeeze=False
    )
    for axes, column in zip(places[0], columns, strict=True):
        for number, (label, frame) in enumerate(frames.items()):
            if column not in frame or x not in frame:
                continue
            rows = frame[[x, column]].dropna()
            values = rows[column].rolling(smooth, min_periods=1).mean()
            style = series_style(number) | ({} if len(rows) <= MARKED else {"marker": ""})
            axes.plot(rows[x], values, label=label, **style)
        axes.set(xlabel=_WORDS.get(x, x), ylabel=_WORDS.get(column, column))
    fig.set_layout_engine("constrained")
    if len(frames) > 1:  # below the curves, where it covers none
        lines = {line.get_label(): line for axes in places[0] for line in axes.lines}
        fig.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2)
    return fig


class _HasFolder(Protocol):
    @property
    def folder(self) -> Path: ...


class LiveCurves:
    """Loss and speed of a run that goes on, drawn anew as rows come, beside those of other runs.

    Use as a context manager around the run, in a Jupyter kernel. Drawing takes at most 5% of the
    time, and what goes wrong in it ends the drawing, not the run.
    """

    def __init__(self, run: _HasFolder, beside: Sequence[_HasFolder]) -> None:
        self._runs = [*beside, run]
        self._handle: Any = None
        self._next = 0.0
        self._broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._handle is not None:
            self._draw()

    def update(self, rows: list[dict[str, Any]]) -> None:
        """New rows have come."""
        if rows and time.monotonic() >= self._next:
            self._draw()

    def _draw(self) -> None:
        if self._broken:
            return
        began = time.monotonic()
        try:
            self._show()
        except Exception as error:  # the run goes on without a picture
            self._broken = True
            print(f"the live curves end here: {error}")
        took = time.monotonic() - began
        self._next = time.monotonic() + max(_EVERY_S, took / _SHARE)

    def _show(self) -> None:
        from IPython.display import display
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        folders = [run.folder for run in self._runs]
        frames = dict(zip(_labels(folders), map(steps, folders), strict=True))
        if not any(len(frame) for frame in frames.values()):
            return
        with plt.ioff():
            fig = _drawn(frames, ["loss", "tokens_per_s"], "step", 1)
            FigureCanvasAgg(fig).print_png(picture := io.BytesIO())
            plt.close(fig)
        bundle = {"image/png": picture.getvalue(), "text/plain": "loss and speed so far"}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)
