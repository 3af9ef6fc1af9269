"""One plot style for the whole report: readable on A4 and on a phone, in colour, in greyscale and
for colour-blind eyes.

Figures are 160 mm wide or narrower. The book shows all at one scale (`reports/book.lua`), so a
size in points is one size everywhere. On paper the scale is five sixths: a label of 8.5 pt is one
of 7 pt, and none is smaller; one panel is as wide as a column, a wide figure stands over both.
A series is never told apart by colour alone: lines carry a marker and a dash pattern as well, bars
are named. The colours are those of `colors.py`.
"""

from typing import Any

import seaborn as sns

from lsai_lab.report.colors import PALETTE

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = (
    "-",
    (0, (5, 2)),
    (0, (1, 1.2)),
    (0, (5, 2, 1, 2)),
    (0, (7, 2, 1, 2, 1, 2)),
    (0, (3, 1)),
    (0, (8, 3)),
    (0, (2, 2, 6, 2)),
)


def apply_style() -> None:
    """Set seaborn's and matplotlib's defaults for every figure that this process draws from now
    on.

    >>> lab.style()
    """
    settings: dict[str, Any] = {
        "figure.figsize": (6.3, 3.4),  # 160 mm
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        **dict.fromkeys(("font.size", "axes.labelsize"), 9),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5),
        "legend.edgecolor": "none",
        "axes.titlesize": 10,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
        "axes.edgecolor": "#444444",
        "axes.formatter.min_exponent": 5,  # 100, not 10 with a small 2
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#d9d9d9",
        "grid.linewidth": 0.6,
        "hatch.linewidth": 0.7,
        "patch.edgecolor": "#222222",
        "svg.fonttype": "none",  # text stays text: searchable, selectable
        "svg.hashsalt": "lsai",  # equal figures are equal files
    }
    # The font ships with matplotlib: the same figure on every machine.
    sns.set_theme("paper", "whitegrid", list(PALETTE), font="DejaVu Sans", rc=settings)


def series_style(index: int) -> dict[str, Any]:
    """Keyword arguments of `Axes.plot` for series number `index`: colour, marker and dash pattern
    change together."""
    kinds = {"color": PALETTE, "marker": MARKERS, "linestyle": DASHES}
    return {key: values[index % len(values)] for key, values in kinds.items()}
