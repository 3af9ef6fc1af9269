"""Drawings of the chapter on sharding."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsai_lab.report.charts import ALONE
from lsai_lab.report.colors import COLORS

Box = tuple[float, float, str]  # left end, width, text

# What the network does, and the GPU: of each kind its boxes, one for each block, and their color.
TIMELINE: dict[str, tuple[str, list[Box]]] = {
    "gather": ("communication", [(0, 1, "1"), (1, 1, "2"), (2, 1, "3"), (4, 1, "2"), (6, 1, "1")]),
    "reduce": ("communication", [(5, 1, "3"), (7, 1, "2"), (8.6, 1, "1")]),
    "forward": ("arithmetic", [(1, 1, "1"), (2, 1, "2"), (3, 1, "3")]),
    "backward": ("arithmetic", [(4, 1.5, "3"), (5.5, 1.5, "2"), (7, 1.5, "1")]),
    "AdamW": ("optimizer", [(9.6, 1, "")]),
}
# Bytes of a parameter on each of four GPUs: weight, gradient, two moments of AdamW.
KEPT = {
    "DDP": (4, 4, 8),
    "ZeRO 1": (4, 4, 2),
    "ZeRO 2": (4, 1, 2),
    "FSDP (ZeRO 3)": (1, 1, 2),
}


def fsdp_step() -> Figure:
    """What each of four GPUs keeps, from DDP to FSDP; and the timeline of a step of FSDP."""
    fig, (kept, timeline) = plt.subplots(2, 1, figsize=(ALONE, 3.3))
    colors = [COLORS[name] for name in ("weights", "gradients", "optimizer")]
    for row, (name, sizes) in enumerate(KEPT.items()):
        y = len(KEPT) - 1 - row
        left = 0
        for size, what, color in zip(sizes, ("weight", "gradient", "moments"), colors, strict=True):
            _box(kept, (left, size, what if size > 2 else ""), y, color)
            left += size
        kept.text(-0.25, y + 0.4, name, ha="right", va="center", fontsize=9.5)
        kept.text(left + 0.2, y + 0.4, f"{left} bytes", va="center", fontsize=9.5)
    kept.set(xlim=(-4.6, 19), ylim=(-0.2, len(KEPT)))
    for row, (name, (meaning, boxes)) in enumerate(TIMELINE.items()):
        timeline.text(-0.15, 0.4 - row, name, ha="right", va="center", fontsize=9.5)
        for left_end, width, text in boxes:
            _box(timeline, (left_end, width * 0.97, text), -row, COLORS[meaning])
    timeline.set(xlim=(-2.6, 10.65), ylim=(0.1 - len(TIMELINE), 1.1))
    kept.axis("off")
    timeline.axis("off")
    return fig


def _box(axes: Axes, box: Box, y: float, color: str) -> None:
    left, width, text = box
    style: dict[str, Any] = {
        "facecolor": color,
        "alpha": 0.55,
        "edgecolor": "#444444",
        "linewidth": 0.6,
    }
    axes.add_patch(plt.Rectangle((left, y), width, 0.8, **style))
    middle = (left + width / 2, y + 0.4)
    axes.text(*middle, text, ha="center", va="center", fontsize=9)


DRAWINGS = [fsdp_step]
