"""Drawings of the chapter on activations."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsai_lab.report.colors import COLORS

EDGE = "#444444"
# What the chip does with the present tile, beside the matrix that it reads or writes.
STEPS = {
    "Q": r"$s_j = Q_i K_j^\top D^{-1/2}$",
    "K": r"update $m,\ \ell$",
    "V": r"update $o$ with $V_j$",
    "O": r"last tile: $O_i = o\,/\,\ell$",
}


def attention_tiles() -> Figure:
    """Left, tiles of Q, K, V and O in memory and what is on the chip; right, the tiles of the
    scores that a causal mask and a window need."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(6.3, 2.2), width_ratios=[1.55, 1])
    _streams(left)
    _mask(right)
    return fig


def _streams(axes: Axes) -> None:
    axes.add_patch(plt.Rectangle((3.45, 0), 2.35, 3.62, fc="#f2f2f2", ec=EDGE))
    for place, (name, text) in enumerate(STEPS.items()):
        y = 3 - place
        axes.text(0.3, y + 0.31, name, ha="right", va="center", fontsize=9)
        axes.text(4.62, y + 0.31, text, ha="center", va="center", fontsize=8.5)
        present = 1 if name in "QO" else 2
        color = COLORS["arithmetic"] if name in "QO" else COLORS["memory"]
        for tile in range(5):
            fill = color if tile == present else "white"
            corner = (0.45 + 0.42 * tile, y)
            axes.add_patch(plt.Rectangle(corner, 0.38, 0.62, fc=fill, ec=EDGE, alpha=0.75))
        ends = [(3.43, y + 0.31), (2.6, y + 0.31)]
        head, tail = reversed(ends) if name == "O" else ends
        axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "color": EDGE})
    for x, text in ((1.5, "GPU memory"), (4.62, "on chip: one tile")):
        axes.text(x, 3.85, text, ha="center", fontsize=8.5)
    axes.set(xlim=(0, 5.9), ylim=(-0.1, 4.2))
    axes.axis("off")


def _mask(axes: Axes) -> None:
    for query, key in np.ndindex(8, 8):
        needed = COLORS["attention"] if key >= query - 2 else "#d9d9d9"
        color = needed if key <= query else "white"
        corner = (key, 7 - query)
        axes.add_patch(plt.Rectangle(corner, 0.92, 0.92, fc=color, ec="#999999", lw=0.5))
    axes.set(xlim=(-0.2, 8.1), ylim=(-0.2, 8.1), aspect="equal", xticks=[], yticks=[])
    axes.set(xlabel="keys", ylabel="queries")
    axes.grid(visible=False)


DRAWINGS = (attention_tiles,)
