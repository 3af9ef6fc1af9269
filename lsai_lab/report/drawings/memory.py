"""Drawings of the chapter on memory."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lsai_lab.report.charts import panels
from lsai_lab.report.colors import COLORS

# Of each tensor: when it is born and dies, its place, its size, and what it is.
BOXES = {
    "weights and optimizer states": (0, 11, 0, 3, "weights"),
    "activations 1": (0.6, 8.2, 3, 1.6, "activations"),
    "activations 2": (1.6, 7.4, 4.6, 1.6, "activations"),
    "activations 3": (2.6, 5.8, 6.2, 1.6, "activations"),
    "logits": (3.6, 4.8, 7.8, 1.3, "loss"),
    "gradients 3": (4.8, 11, 7.8, 0.9, "gradients"),
    "gradients 2": (5.8, 11, 6.2, 1.2, "gradients"),
    "gradients 1": (7.4, 11, 4.6, 1.2, "gradients"),
    "embedding's\ngradient": (8.2, 11, 9.1, 2, "gradients"),
}
RESERVED_FROM = (0, 0.6, 1.6, 2.6, 3.6, 8.2, 11)
RESERVED = (3, 4.6, 6.2, 7.8, 9.1, 11.1, 11.1)


def allocator_gaps() -> Figure:
    """Tensors of a step as boxes over time and place in memory, and the gaps between them."""
    fig, axes = panels(1, height=2.2)
    axes.fill_between(RESERVED_FROM, RESERVED, step="post", color="#dddddd", linewidth=0)
    for name, (born, dies, place, size, meaning) in BOXES.items():
        look: dict[str, Any] = {"fc": COLORS[meaning], "alpha": 0.75, "ec": "white"}
        axes.add_patch(Rectangle((born, place), dies - born, size, **look))
        middle = ((born + dies) / 2, place + size / 2)
        axes.text(*middle, name, ha="center", va="center", fontsize=8.5, linespacing=0.95)
    middle = ((BOXES["activations 1"][1] + 11) / 2, 3.8)  # the largest gap, when the last is born
    look = {"ha": "center", "va": "center", "fontsize": 8.5, "linespacing": 0.95}
    axes.text(*middle, "free, but\ntoo small", **look)
    axes.set(xlim=(0, 11), ylim=(0, 11.6), xticks=[], yticks=[])
    axes.set(xlabel="time within a step", ylabel="place in memory")
    axes.grid(visible=False)
    assert isinstance(fig, Figure)
    return fig


DRAWINGS = (allocator_gaps,)
