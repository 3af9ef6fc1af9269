"""Which parts of a figure with several panels a narrow window shows one below the other."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.transforms import Bbox

LETTERS = "abcdef"


def letter(fig: Figure) -> None:
    """Name the panels of `fig`, where it has several, (a), (b) and so on, before their titles."""
    found: list[Axes] = []
    for axes in fig.axes:  # not what lies over others: twins and insets
        if axes.get_visible() and not any(_frame(axes).overlaps(_frame(one)) for one in found):
            found.append(axes)
    if not 2 <= len(found) <= len(LETTERS):
        return
    for name, axes in zip(LETTERS, found, strict=False):
        title = axes.get_title() or axes.get_title(loc="left")
        axes.set_title("")
        axes.set_title(f"({name}) {title}".strip(), loc="left", fontsize=9, fontweight="bold")


def panels(fig: Figure, box: Bbox) -> str:
    """The panels of `fig` for the attribute `data-panels`, or nothing if they do not stand beside
    each other.

    Panels are separated by `;`. A panel is one crop of the picture, or two side by side: the names
    of the rows or values, which stand at another panel's left, and the panel itself. A crop is
    left, top, right and bottom in percent of `box` (inches), the part of the drawn figure that the
    picture shows. What stands below all panels follows: each entry of a legend, or the whole.
    """
    fig.draw_without_rendering()  # a picture of another resolution moved the words
    found = _apart([axes for axes in fig.axes if axes.get_visible()])
    if not any(_beside(one[1], two[1]) for one in found for two in found if one is not two):
        return ""
    crops = []
    for axes, around in found:
        parts = [around]
        first = min(
            (other for other in found if _beside(other[1], around)), key=_left, default=None
        )
        if first is not None and _left(first) < around.x0 and not _has_names(axes):
            names, frame = first[1], first[0].get_window_extent()
            low = frame.y0 - 5  # above the values of the horizontal axis
            parts.insert(0, Bbox.from_extents(names.x0, low, frame.x0 - 2, around.y1))
        crops.append("|".join(_percent(part, fig.dpi, box) for part in parts))
    entries = [entry for legend in fig.legends for entry in _entries(legend)]
    crops += [_percent(entry, fig.dpi, box) for entry in entries]
    low = min(around.y0 for _, around in found)
    if not entries and low / fig.dpi - box.y0 > 0.08:  # a legend or a name of all axes below them
        left, right = box.x0 * fig.dpi, box.x1 * fig.dpi
        below = Bbox.from_extents(left, box.y0 * fig.dpi, right, low)
        crops.append(_percent(below, fig.dpi, box))
    return ";".join(crops)


def _entries(legend: Legend) -> list[Bbox]:
    """The boxes (pixels) of a legend's entries: name and sign."""
    found = []
    for text in legend.get_texts():
        around, size = text.get_window_extent(), float(text.get_fontsize()) * legend.figure.dpi / 72
        sign = (legend.handlelength + legend.handletextpad + 0.3) * size
        found.append(Bbox.from_extents(around.x0 - sign, around.y0, around.x1 + 3, around.y1 + 4))
    return found


def _apart(axes: list[Axes]) -> list[tuple[Axes, Bbox]]:
    """The axes that do not lie over others (twins, insets), from the top and the left, with the
    boxes (pixels) that hold their words, too."""
    found: list[tuple[Axes, Bbox]] = []
    for each in axes:
        around, frame = each.get_tightbbox(), each.get_window_extent()
        over = [at for at, (other, _) in enumerate(found) if frame.overlaps(_frame(other))]
        if around is None:
            continue
        for at in over:
            found[at] = (found[at][0], Bbox.union([found[at][1], around]))
        if not over:
            found.append((each, around))
    return sorted(found, key=lambda pair: (-round(_frame(pair[0]).y1 / 20), pair[1].x0))


def _frame(axes: Axes) -> Bbox:
    return axes.get_window_extent()


def _left(pair: tuple[Axes, Bbox]) -> float:
    return float(pair[1].x0)


def _beside(one: Bbox, two: Bbox) -> bool:
    """Whether two boxes share some height and no width."""
    tall = min(one.y1, two.y1) - max(one.y0, two.y0)
    return bool(tall > 0.5 * min(one.height, two.height) and (one.x1 <= two.x0 or two.x1 <= one.x0))


def _has_names(axes: Axes) -> bool:
    labels: list[Any] = axes.get_yticklabels()
    return not axes.axison or any(label.get_visible() and label.get_text() for label in labels)


def _percent(part: Bbox, dpi: float, box: Bbox) -> str:
    left, right = (part.x0 / dpi - box.x0) / box.width, (part.x1 / dpi - box.x0) / box.width
    top, bottom = (box.y1 - part.y1 / dpi) / box.height, (box.y1 - part.y0 / dpi) / box.height
    edges = (max(0, left), max(0, top - 0.005), min(1, right), min(1, bottom + 0.005))
    return ",".join(f"{100 * edge:.1f}" for edge in edges)
