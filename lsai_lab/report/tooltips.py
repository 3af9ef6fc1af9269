"""Tooltips of a figure: an invisible box over each bar, and at each point, of a matplotlib figure,
whose title the report's page shows where the pointer is. The title has the values of the point, and
the text of its row of the data.

A point belongs to the row that holds both of its values (or its category and its value), in the
unit of the axis or that unit times a power of ten. If no row does, or several rows do, the tooltip
has the values alone.
"""

import math
import re
from collections.abc import Iterator
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import Bbox

from lsai_lab.report.values import shown
from lsai_lab.runs.pages import page_names

_KEYS = ("run", "variant", "kind", "part", "study")  # of records, not for readers
MOST = 300  # boxes of a figure; if there are more points, evenly spread ones


def tooltips(fig: Figure, box: Bbox, data: pd.DataFrame) -> str:
    """SVG boxes over the bars and at the points of `fig`, as text for its `<svg>` element.

    `fig` was drawn already; `box` (inches) is the part of it that the picture shows, and the boxes
    stand at percentages of that part; that of a point has no size. `data` is what is drawn; from
    its column `run` (folders of runs) a box gets `data-run`, the run's page, of a pair both.
    """
    found = [
        (axes, *point)
        for axes in fig.axes
        for point in _points(axes)
        if np.isfinite(point[2]).all()
    ]
    boxes = []
    for axes, label, value, places in found[:: math.ceil(len(found) / MOST) or 1]:
        left, top, width, height = _inside(np.atleast_2d(places) / fig.dpi, box)
        if not (width >= 0 and height >= 0):
            continue
        row = _row(data, [label, *value])
        run = "" if row is None or "run" not in row else page_names(row["run"])
        said = [label, *map(shown, value)]
        rest = {
            k: v
            for k, v in ({} if row is None else row).items()
            if isinstance(v, str) and k not in _KEYS and not any(v in each for each in said)
        }
        below = (each.get_xlabel() for each in [axes, *axes.get_shared_x_axes().get_siblings(axes)])
        names = (
            next(filter(None, below), fig.get_supxlabel()),
            axes.get_ylabel() or axes.get_title(),
        )
        more = [
            *(f"{k.replace('_', ' ')}: {v}" for k, v in rest.items()),
            *(each.rpartition("-")[0] or each for each in run.split(",")),
        ]
        shares = (axes.xaxis, axes.yaxis)
        text = "\n".join(filter(None, [label, *map(_line, names, value, shares), *more]))
        boxes.append(
            f'<rect x="{left:.1%}" y="{top:.1%}" width="{width:.1%}" height="{height:.1%}" '
            f'fill="none" data-run="{escape(run)}"><title>{escape(text[:400])}</title></rect>'
        )
    return "".join(boxes)


def _inside(corners: np.ndarray, box: Bbox) -> tuple[float, float, float, float]:
    """Left, top, width and height of the rectangle around `corners` (inches), as shares of `box`
    and cut by it; a negative size if it lies outside."""
    (left, low), (right, high) = corners.min(axis=0), corners.max(axis=0)
    left, right = (left - box.x0) / box.width, (right - box.x0) / box.width
    top, bottom = (box.y1 - high) / box.height, (box.y1 - low) / box.height
    left, top, right, bottom = max(0.0, left), max(0.0, top), min(1.0, right), min(1.0, bottom)
    return left, top, right - left, bottom - top


def _points(axes: Axes) -> Iterator[tuple[str, tuple[Any, Any], np.ndarray]]:
    """The label, the two values and the place in pixels of each point of lines (at most some 40 of
    each, and none of straight lines without markers), of scatters, and two corners of each bar."""
    # the caps of error bars
    for line in (each for each in axes.lines if each.get_marker() not in ("_", "|")):
        xy = np.asarray(line.get_xydata(), dtype=float)
        if len(xy) > 2 or line.get_marker() not in (None, "", "None"):
            for x, y in xy[:: max(1, len(xy) // 40)]:
                yield (
                    _label(line),
                    (_tick(axes, 0, x), _tick(axes, 1, y)),
                    line.get_transform().transform((x, y)),
                )
    for scatter in (each for each in axes.collections if isinstance(each, PathCollection)):
        for point in np.asarray(scatter.get_offsets(), dtype=float):
            place = scatter.get_offset_transform().transform(point)
            yield _label(scatter), (_tick(axes, 0, point[0]), _tick(axes, 1, point[1])), place
    for bars in (each for each in axes.containers if isinstance(each, BarContainer)):
        for bar in bars:
            (left, low), (right, high) = bar.get_bbox().get_points()
            if bars.orientation == "horizontal":
                value = (right - left, _tick(axes, 1, (low + high) / 2))
            else:
                value = (_tick(axes, 0, (left + right) / 2), high - low)
            corners = ((left, low), (right, high))
            yield _label(bars), value, bar.axes.transData.transform(corners)


def _line(name: str, value: Any, axis: Axis) -> str:
    """`value` as a line of the tooltip: on an axis called `peak (GiB)` it is `peak: 60.2 GiB`. On
    an axis without a name a number gives an empty line, and a category stands alone. A share is in
    percent where the axis is."""
    name = re.sub(r" \((?:long|short|high|low)er is better\)", "", name)
    if not isinstance(value, str) and axis.get_major_formatter()(value).endswith("%"):
        value = f"{shown(100 * value)}%"
    words, unit = re.sub(r" \(([^()]{1,16})\)$", r"\n\1", " ".join(name.split())).partition("\n")[
        ::2
    ]
    text = value if isinstance(value, str) else f"{shown(value)} {unit}".rstrip() if words else ""
    return f"{words}: {text}" if words else text


def _label(artist: Any) -> str:
    label = str(artist.get_label())
    # pandas calls a column without a name 0
    return "" if label.startswith("_") or label.isdecimal() else label


def _tick(axes: Axes, which: int, value: float) -> Any:
    """The category at `value` if the axis `which` (0: x, 1: y) has categories, else the value."""
    ticks = (axes.xaxis, axes.yaxis)[which]
    places, fixed = (
        list(ticks.get_majorticklocs()),
        isinstance(ticks.get_major_locator(), FixedLocator),
    )
    # hidden ones, too
    for place, text in zip(places, ticks.get_major_formatter().format_ticks(places), strict=False):
        words, given = text.replace("\n", " "), fixed and text != f"{place:g}"
        if (
            abs(place - value) < 0.45
            and (given or re.search("[^\\W\\d]", words))
            and ticks.get_scale() == "linear"
        ):
            return words
    return float(value)


def _row(data: pd.DataFrame, values: list[Any]) -> dict[str, Any] | None:
    """The one row of `data` that holds every value, or None: text as it is, numbers or a power of
    ten times a number."""
    fits = pd.Series(True, index=range(len(data)))
    for value in (each for each in values if each != ""):
        if isinstance(value, str):
            hits = (data.astype(str).reset_index(drop=True) == value).any(axis=1)
            fits &= hits if hits.any() else True
        else:
            numbers = data.select_dtypes("number").abs().to_numpy(dtype=float)
            with np.errstate(all="ignore"):
                power = np.log10(numbers / abs(value))
                fits &= pd.Series((np.abs(power - np.round(power)) < 1e-9).any(axis=1))
    return data.iloc[int(fits.idxmax())].to_dict() if fits.sum() == 1 else None
