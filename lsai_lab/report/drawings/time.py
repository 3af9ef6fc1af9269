"""Drawings of the chapter on time."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Kernel = tuple[str, list[str], list[str]]
PLAIN: list[Kernel] = [
    ("add", ["x", "h"], ["x + h"]),
    ("norm", ["x + h", "g"], ["n"]),
    ("cast", ["n"], ["n in bf16"]),
]
FUSED: list[Kernel] = [("add, norm, cast", ["x", "h", "g"], ["x + h", "n in bf16"])]


def fusing() -> Figure:
    """Three kernels, each with its trips to memory, beside one that does the work of all three."""
    fig, axes = plt.subplots(1, 2, figsize=(6.3, 1.15), width_ratios=[1.7, 1])
    _kernels(axes[0], PLAIN, "one kernel each")
    _kernels(axes[1], FUSED, "fused")
    return fig


def _kernels(axes: Axes, kernels: list[Kernel], title: str) -> None:
    """Boxes of `kernels` above a bar of memory, an arrow a tensor; dotted: the small vector g."""
    edge: dict[str, Any] = {"ec": "#444444", "lw": 0.8}
    wide = max(3.0, 0.9 * max(len(reads + writes) for _, reads, writes in kernels))
    width = (wide + 0.1) * len(kernels)
    axes.add_patch(plt.Rectangle((0, 0), width - 0.1, 0.5, fc="#fbeed0", **edge))
    axes.text(width / 2, 0.25, "GPU memory", ha="center", va="center", fontsize=8.5)
    for place, (name, reads, writes) in enumerate(kernels):
        left = (wide + 0.1) * place
        axes.add_patch(plt.Rectangle((left, 1.6), wide, 0.6, fc="#dcebf5", **edge))
        axes.text(left + wide / 2, 1.9, name, ha="center", va="center", fontsize=8.5)
        tensors = [*reads, *writes]
        for at, tensor in enumerate(tensors):
            x = left + wide * (at + 0.5) / len(tensors)
            ends = [(x, 1.58), (x, 0.52)]
            head, tail = ends if at < len(reads) else reversed(ends)
            style = ":" if tensor == "g" else "-"
            arrow = {"arrowstyle": "->", "color": "#444444", "linestyle": style}
            axes.annotate("", head, tail, arrowprops=arrow)
            axes.text(x + 0.08, 1.05, tensor, fontsize=8.5, va="center")
    axes.set(xlim=(-0.1, width + 0.75), ylim=(-0.1, 2.3))  # room for the last name
    axes.set_title(title, fontsize=8.5)
    axes.axis("off")


DRAWINGS = (fusing,)
