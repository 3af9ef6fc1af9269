"""Drawings of the chapter on hundreds of GPUs."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsai_lab.report.colors import COLORS, PALETTE

GPUS = 8  # two nodes of four
RING = {"arrowstyle": "<->", "color": COLORS["communication"]}
BETWEEN = {"arrowstyle": "<->", "color": COLORS["bad"]}


def sharding_groups() -> Figure:
    """Two nodes of four GPUs: one ring of FSDP over all, and HSDP with a node a group."""
    fig, (whole, hybrid) = plt.subplots(1, 2, figsize=(6.3, 1.6))
    _nodes(whole, GPUS)
    for x in (-0.03, 4.38):
        whole.annotate("", (x, 0), (x, 2), arrowprops=RING)
    whole.set_title("FSDP over all GPUs")
    _nodes(hybrid, GPUS // 2)
    for place in range(GPUS // 2):
        x = _left(place) + 0.45
        hybrid.annotate("", (x, 0.63), (x, 1.37), arrowprops=BETWEEN)
    hybrid.set_title("HSDP, one node a group")
    return fig


def _nodes(axes: Axes, shards: int) -> None:
    """The GPUs of both nodes with the shard that each holds, and the ring within a node."""
    for gpu in range(GPUS):
        y = 1.4 if gpu < 4 else 0
        x = _left(gpu % 4)
        color = PALETTE[gpu % shards]
        axes.add_patch(plt.Rectangle((x, y), 0.9, 0.6, fc=color, alpha=0.4, ec="#444444", lw=0.7))
        name = f"{gpu % shards + 1}/{shards}"
        axes.text(x + 0.45, y + 0.3, name, ha="center", va="center", fontsize=8.5)
    for node, y, arrow in ((1, 1.4, 2.1), (2, 0, -0.1)):
        axes.text(-0.15, y + 0.3, f"node {node}", ha="right", va="center", fontsize=8.5)
        axes.annotate("", (4.35, arrow), (0, arrow), arrowprops=RING)
    axes.set(xlim=(-1.1, 4.5), ylim=(-0.25, 2.25))
    axes.axis("off")


def _left(place: int) -> float:
    return place * 1.15


DRAWINGS = [sharding_groups]
