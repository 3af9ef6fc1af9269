"""The charts that several chapters need, in the report's style: bars with their value at the end,
lines with their name at the end, intervals of both losses, and numbers on colours. Anything else is
plain matplotlib.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import is_color_like
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from lsai_core.base.errors import UserError
from lsai_core.base.tables import value as shown_value
from lsai_lab.analysis.poorly import say_disturbed, say_several_texts
from lsai_lab.analysis.summary import require_columns
from lsai_lab.report.colors import COLORS
from lsai_lab.report.joined import has_one_at_each, say_what_differs
from lsai_lab.report.show import shown_once
from lsai_lab.report.style import series_style
from lsai_lab.runs.no_rows import why_empty
from lsai_lab.runs.result_names import is_quality

MOST_BARS = 40  # that a reader tells apart
MARKED = 40  # points of a line: with fewer, each has a marker
LONG = 30  # letters of a row's name: of a longer one the rest stands in a second line
# Of each kind of loss: how far its marks stand from the middle of the row, and its colour.
_LOSSES = {"validation": (-0.14, COLORS["ours"]), "training": (0.14, COLORS["peer"])}
# Inches: of the text, and of one panel, which a phone shows whole and a column of the PDF at 5/6.
WIDE, ALONE = 6.3, 4.0


def panels(columns: int = 1, rows: int = 1, height: float = 2.4, **options: Any) -> Any:
    """A figure with `columns` x `rows` axes, as wide as the text for several columns, else as what
    a phone shows whole. `height`: of a row, in inches; `options` of `plt.subplots`."""
    width = WIDE if columns > 1 else ALONE
    fig, axes = plt.subplots(rows, columns, figsize=(width, height * rows), **options)
    return shown_once(fig), axes


def bars(
    frame: pd.DataFrame,
    label: str,
    value: str,
    *,
    axis: str = "",
    scale: float = 1.0,
    text: str | None = None,
    color: str | Sequence[str] = COLORS["ours"],
    low: str | None = None,
    high: str | None = None,
    inside: bool = False,
    ax: Axes | None = None,
) -> Figure:
    """Horizontal bars, the first row on top, with their value at the end, or `inside` at the
    beginning, where lines cross the ends.

    `axis`: what the values are, with their unit (default: the column); `scale`: what they are
    multiplied by. `text` is a format of the scaled value, where `{ratio}` is the value over that of
    the first row (default: three digits). `low`, `high`: columns of the ends of a range. `color`:
    one, or one a row. Each bar names its machine, too, where `frame` has several in its column
    `machine`. UserError for more than 40 rows.

    >>> runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    >>> fig = lab.bars(lab.summarize(runs, "tokens_per_s"), "label", "tokens_per_s")
    """
    require_columns(filter(None, (label, value, low, high)), frame)
    if not len(frame):
        raise UserError(f"nothing to draw: {why_empty(frame) or 'the frame has no rows'}")
    _require_readable(color, len(frame))
    say_disturbed(frame, value)
    say_several_texts(frame, value)
    names = [two_lines(name) for name in _with_machines(frame, label)]
    axes = _axes(ax, height=0.6 + 0.23 * len(names) + 0.13 * sum("\n" in name for name in names))
    values = _numbers(frame, value) * scale
    places = np.arange(len(frame))
    drawn = axes.barh(places, values, color=color)
    ends = values.copy()
    if low and high:
        spans = frame[[low, high]].astype(float) * scale
        axes.hlines(places, spans[low], spans[high], color="black", linewidth=1)
        ends = np.maximum(values, spans[high])
    words = [_words(text, each, each / values.iloc[0]) for each in values]
    _write_values(axes, words, np.zeros(len(ends)) if inside else np.maximum(ends, 0))
    axes.set_yticks(places, names)
    axes.set(xlabel=axis or value)
    axes.xaxis.set_major_formatter(lambda at, _: shown_value(at).replace("-", "−"))
    wide = len(axes.figure.axes)  # panels beside each other have less room for the words
    axes.margins(x=0.05 + 0.016 * (1 + wide) * max(map(len, words)) if len(drawn) else 0)
    axes.set_xlim(left=min(0, values.min() * 1.1))
    axes.grid(axis="y", visible=False)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    return _figure(axes)


def lines(
    frame: pd.DataFrame,
    x: str,
    y: str,
    series: str,
    *,
    axis: tuple[str, str] | None = None,
    log: str = "",
    legend: bool = False,
    styles: Mapping[str, Mapping[str, Any]] | None = None,
    ax: Axes | None = None,
) -> Figure:
    """A line a value of `series`, in the order of their first rows, over `x`. The axis of `y`
    begins at 0, but for losses. Where a line joins runs, rows of `lab.load`, that differ in other
    settings, too, a line of text says in which; where rows of one series share an `x`, as those of
    several machines or repeats, no line joins its points, and the text says what they differ in.

    `axis`: the names of both axes, with units (default: the columns); `log`: the logarithmic ones
    ("x", "y", "xy"). A line's name stands at its right end, `legend=True`: below the figure.
    `styles`: of a series, arguments of `Axes.plot` in place of the default ones.

    >>> steps = lab.steps("h100/memory.bf16").assign(run="bf16")
    >>> fig = lab.lines(steps, "step", "loss", "run")
    """
    require_columns((x, y, series), frame)
    if not {*log} <= {"x", "y"}:
        raise UserError(f'log is "x", "y" or "xy", not {log!r:.80}')
    for name in (x, y):
        _numbers(frame, name, "lines join")
    say_what_differs(frame, x, y, series)
    joined = has_one_at_each(frame, x, y, series)
    axes = _axes(ax, height=2.6)
    ends = []
    for place, (name, rows) in enumerate(frame.groupby(series, sort=False)):
        marker = {} if len(rows) <= MARKED else {"marker": ""}
        apart = {} if joined else {"linestyle": "none", "marker": "o"}
        style = series_style(place) | marker | dict((styles or {}).get(str(name), {})) | apart
        line = axes.plot(rows[x], rows[y].astype(float), label=str(name), **style)[0]
        if len(last := rows.dropna(subset=[x, y]).tail(1)):
            ends.append((str(name), last[x].item(), float(last[y].item()), line.get_color()))
    axes.set(**dict(zip(("xlabel", "ylabel"), axis or (x, y), strict=True)))
    _scale(axes, frame[x], frame[y], log)
    if not legend:
        name_ends(axes, ends)
    elif not axes.figure.legends:  # of several panels there is one
        most = 4 if _figure(axes).get_figwidth() > ALONE else 2
        axes.figure.legend(loc="outside lower center", ncols=min(most, len(ends)))
    return _figure(axes)


def stacked(
    parts: pd.DataFrame,
    axis: str,
    words: Mapping[str, pd.Series],
    limits: Mapping[str, float],
    height: float,
) -> Figure:
    """A stacked bar for each row of `parts`, the first on top, a column a part in its colour.

    `words`: by head, what stands in columns to the right of the bars; `limits`: vertical lines, by
    name. `height`: inches.
    """
    figure, axes = panels(height=height)
    parts.plot.barh(
        stacked=True, ax=axes, width=0.72, color=parts.columns.map(COLORS), legend=False
    )
    look: dict[str, Any] = {"ha": "right", "fontsize": 8.5}
    most = max(parts.sum(axis=1).max(), *limits.values())
    for number, (head, column) in enumerate(words.items()):
        x = most * (1.27 + 0.3 * number)
        axes.text(x, -0.6, head, va="bottom", **look)
        for place, word in enumerate(column):
            axes.text(x, place, word, va="center", **look)
    for name, x in limits.items():
        axes.axvline(x, linestyle=":", color="#444444")
        axes.text(x, -0.6, name, va="bottom", **look)
    axes.set(xlabel=axis, ylabel="", xlim=(0, most * (1.27 + 0.3 * (len(words) - 1)) + 1))
    axes.set_yticks(range(len(parts)), [two_lines(str(name)) for name in parts.index])
    axes.set(ylim=(len(parts) - 0.4, -0.6), xticks=[at for at in axes.get_xticks() if at <= most])
    axes.grid(axis="y", visible=False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return _figure(axes)


def _write_values(axes: Axes, words: Sequence[str], ends: np.ndarray) -> None:
    """Write the words of each bar to the right of its place on the axis of values."""
    for place, (end, each) in enumerate(zip(ends, words, strict=True)):
        axes.annotate(
            each.replace("-", "−"),
            (end, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            bbox={"fc": "white", "ec": "none", "pad": 0.5},  # lines end at it
        )


def two_lines(name: str) -> str:
    """A long name of a row in two lines of about equal lengths, if it can behind a comma.

    >>> lab.two_lines("HF Trainer, FlashAttention-2, compiled")
    'HF Trainer,\nFlashAttention-2, compiled'
    """
    ends = [at for at, sign in enumerate(name) if sign == " "]
    if len(name) <= LONG or not ends:
        return name
    cut = min(ends, key=lambda at: abs(at - len(name) / 2) + 8 * (name[at - 1] != ","))
    return f"{name[:cut]}\n{name[cut + 1 :]}"


def _with_machines(frame: pd.DataFrame, label: str) -> list[str]:
    """The labels of the rows; with the machine of each where there are several."""
    labels = [str(each) for each in frame[label]]
    if label == "machine" or "machine" not in frame or frame["machine"].nunique() < 2:
        return labels
    pairs = zip(labels, frame["machine"], strict=True)
    return [each if str(on) in each else f"{each}, {on}" for each, on in pairs]


def _words(text: str | None, value: float, ratio: float) -> str:
    """What stands at the end of a bar. UserError for a format that is none."""
    if not text:
        return shown_value(float(f"{value:.3g}"))
    try:
        return text.format(value, ratio=ratio)
    except (KeyError, IndexError, ValueError):
        raise UserError(
            f"text is a format with {{}} (the value) and {{ratio}}, such as '{{:.2f}} GiB', not "
            f"{text!r:.80}"
        ) from None


def _numbers(frame: pd.DataFrame, name: str, shown: str = "bars show") -> pd.Series:
    """A column as numbers. UserError where it has none."""
    try:
        return frame[name].astype(float)
    except (TypeError, ValueError):
        raise UserError(f"{name!r} is no column of numbers, and {shown} numbers") from None


def _require_readable(color: str | Sequence[str], rows: int) -> None:
    """UserError for too many bars, for what is no colour, or not one a row."""
    if rows > MOST_BARS:
        cure = "choose rows with query, or one a variant with lab.summarize"
        raise UserError(f"{rows} bars are too many to read, {MOST_BARS} the most; {cure}")
    if is_color_like(color):
        return
    found = [color] if isinstance(color, str) else list(color)
    if wrong := [each for each in found if not is_color_like(each)]:
        words = "color is a colour ('C0', 'red', '#aa3344') or a list with one for each row"
        raise UserError(f"{words}; {wrong[0]!r:.80} is none")
    if len(found) not in (1, rows):
        raise UserError(f"color has {len(found)} colours for {rows} bars; one for each row")


def name_ends(axes: Axes, ends: Sequence[tuple[str, float, float, Any]]) -> None:
    """Write each (name, x, y, colour) to the right of its place, moved apart where two would
    touch."""
    axes.figure.canvas.draw()
    height = 11 * axes.figure.dpi / 72
    last = -np.inf
    for name, x, y, color in sorted(ends, key=lambda end: axes.transData.transform(end[1:3])[1]):
        place = axes.transData.transform((x, y))[1]
        moved = max(place, last + height)
        last = moved
        offset = (8, (moved - place) * 72 / axes.figure.dpi)
        axes.annotate(
            name,
            (x, y),
            offset,
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=8.5,
            annotation_clip=False,
        )


def thousands(value: float) -> str:
    """512, 4K, 128K: tokens, by 1,024."""
    return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"


def _scale(axes: Axes, at: pd.Series, values: pd.Series, log: str) -> None:
    """The scales of lines over `at`."""
    if "x" in log:
        axes.set_xscale("log", base=2)
        places = sorted(at.unique())
        step = -(-len(places) // 5) if len(axes.figure.axes) > 1 else max(1, len(places) // 7)
        axes.set_xticks(places[::step])
        axes.xaxis.set_major_formatter(lambda value, _: thousands(value))
        axes.minorticks_off()
    if "y" in log:
        axes.set_yscale("log")
        if values.max() < 100 * values.min():  # few decades: 1, 2, 5, 10 as plain numbers
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda value, _: thousands(value))
            axes.yaxis.set_minor_formatter(NullFormatter())
    elif not is_quality(str(values.name)):  # losses lie far from 0, and near each other
        low, high = min(0, values.min()), axes.get_ylim()[1]
        room = 0.03 * (values.max() - low)  # for whole markers
        axes.set_ylim(low, max(high, values.max() + room))


def _axes(ax: Axes | None, height: float) -> Axes:
    return ax if ax is not None else panels(height=height)[1]


def _figure(axes: Axes) -> Figure:
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def loss_chart(changes: pd.DataFrame, names: Mapping[str, str], axes: Axes) -> None:
    """Draw a frame of `loss_changes`, a row a setting, the first on top: means of the seeds with
    their intervals, in nats. `names`: of each variant, what its readers call it."""
    places = np.arange(len(changes))
    for kind, (shift, color) in _LOSSES.items():
        axes.errorbar(
            changes[kind],
            places + shift,
            xerr=changes[f"{kind}_half"],
            fmt="o" if kind == "validation" else "s",
            color=color,
            capsize=2.5,
            markersize=4,
            label=f"{kind} loss",
        )
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.set_yticks(places, [names[variant] for variant in changes.index])
    axes.set(ylim=(len(changes) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=6)  # more would touch each other


def number_map(
    axes: Axes,
    grid: pd.DataFrame,
    limits: tuple[float, float],
    *,
    text: str = "{:.2f}",
    gray: pd.DataFrame | None = None,
    bold: pd.DataFrame | None = None,
) -> None:
    """Draw `grid` with its row and column names, each value by `text` on a colour between
    `limits`; missing values as a dash. `gray`, `bold`: where True, cells of no colour, bold
    numbers."""
    hidden = np.zeros(grid.shape, bool) if gray is None else gray.to_numpy(bool)
    strong = np.zeros(grid.shape, bool) if bold is None else bold.to_numpy(bool)
    colored = np.where(hidden, np.nan, grid.to_numpy(float))
    axes.imshow(colored, cmap="YlOrBr", vmin=limits[0], vmax=limits[1], aspect="auto")
    for (row, column), value in np.ndenumerate(grid.to_numpy(float)):
        if hidden[row, column]:
            place = (column - 0.5, row - 0.5)
            axes.add_patch(plt.Rectangle(place, 1, 1, color="#cccccc", linewidth=0))
        word = "–" if np.isnan(value) else text.format(value)
        weight = "bold" if strong[row, column] else "normal"
        axes.text(column, row, word, ha="center", va="center", fontsize=8.5, weight=weight)
    axes.set_xticks(range(grid.shape[1]), [str(name) for name in grid.columns])
    axes.set_yticks(range(grid.shape[0]), [str(name) for name in grid.index])
    axes.grid(visible=False)
