"""Drawings of the chapter on sharding."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsai_lab.report.charts import ALONE
from lsai_lab.report.colors import COLORS

Box = tuple[float, float, str]  # left end, width, text

NETWORK: list[Box] = [
    (0, 1, "gather 1"),
    (1, 1, "gather 2"),
    (2, 1, "gather 3"),
    (4, 1, "gather 2"),
    (5, 1, "reduce 3"),
    (6, 0.95, "gather 1"),
    (7, 1, "reduce 2"),
    (8.6, 1, "reduce 1"),
]
GPU: list[Box] = [
    (1, 1, "forward 1"),
    (2, 1, "forward 2"),
    (3, 1, "forward 3"),
    (4, 1.5, "backward 3"),
    (5.5, 1.5, "backward 2"),
    (7, 1.5, "backward 1"),
    (9.6, 1, "AdamW"),
]
# Bytes of a parameter on each of four GPUs: weight, gradient, two moments of AdamW.
KEPT = {
    "DDP": (4, 4, 8),
    "ZeRO 1": (4, 4, 2),
    "ZeRO 2": (4, 1, 2),
    "FSDP (ZeRO 3)": (1, 1, 2),
}


def fsdp_step() -> Figure:
    """What each of four GPUs keeps, from DDP to FSDP; and the timeline of a step of FSDP."""
    fig, (kept, timeline) = plt.subplots(2, 1, figsize=(ALONE, 3.1))
    colors = [COLORS[name] for name in ("weights", "gradients", "optimizer")]
    for row, (name, sizes) in enumerate(KEPT.items()):
        y = len(KEPT) - 1 - row
        left = 0
        for size, what, color in zip(sizes, ("weight", "gradient", "moments"), colors, strict=True):
            _box(kept, (left, size, what if size > 2 else ""), y, color)
            left += size
        kept.text(-0.25, y + 0.4, name, ha="right", va="center", fontsize=8.5)
        kept.text(left + 0.2, y + 0.4, f"{left} bytes", va="center", fontsize=8.5)
    kept.set(xlim=(-4.6, 19), ylim=(-0.2, len(KEPT)))
    for height, name, boxes in ((1.3, "network", NETWORK), (0.0, "GPU", GPU)):
        timeline.text(0, height + 1, name, va="center", fontsize=8.5)
        color = COLORS["communication" if height else "arithmetic"]
        for left_end, width, text in boxes:
            of_box = COLORS["optimizer"] if text == "AdamW" else color
            _box(timeline, (left_end, width * 0.97, text.replace(" ", "\n")), height, of_box)
    timeline.set(xlim=(-0.05, 10.65), ylim=(-0.1, 2.5))
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
    axes.text(left + width / 2, y + 0.4, text, ha="center", va="center", fontsize=7.5)


DRAWINGS = [fsdp_step]
