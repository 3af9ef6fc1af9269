"""Drawings of the chapter on machines."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsai_lab.report.charts import WIDE, panels
from lsai_lab.report.colors import COLORS

EDGE = "#444444"
# Of an H100 (SXM): where numbers can lie, how many bytes, and TB/s to the arithmetic units. The
# rate on the chip is that of shared memory: 32 banks of 4 bytes a clock for each of 132 processors,
# at the 1.83 GHz with which the data sheet's bf16 rate was computed (132 x 4,096 FLOPs a clock).
LEVELS = {
    "on chip: registers and\nshared memory, 66 MB": (30.9, "31 TB/s"),
    "GPU memory (HBM3), 80 GB": (3.35, "3.35 TB/s"),
    "other GPUs of the host,\nby NVLink": (0.45, "450 GB/s each way"),
    "host memory, by PCIe": (0.064, "64 GB/s each way"),
    "other hosts, by\na network of 400 Gb/s": (0.05, "50 GB/s each way"),
}
HALVES = (
    ("RMSNorm", "q, k, v\nmatmul", "attention", "output\nmatmul", "residual\nsum"),
    ("RMSNorm", "gate and\nup matmul", "SwiGLU", "down\nmatmul", "residual\nsum"),
)
LAST = {(54.5, 2.0): "final\nRMSNorm", (54.5, 6.4): "output\nlayer", (54.5, 10.8): "loss"}
# Tails and heads of the arrows that do not join two boxes of one row.
ARROWS = (
    ((50, 3.5), (54.5, 3.5)),
    ((58.5, 5), (58.5, 6.4)),
    ((58.5, 9.4), (58.5, 10.8)),
    ((46, 8.2), (46, 5)),
    ((46, 12.4), (46, 11.2)),
    ((-1, 9.7), (4, 9.7)),
)
AROUND = (([2.8, 2.8, 46], [9.7, 12.4, 12.4]), ([46, 2.8, 2.8], [6.6, 6.6, 3.5]))


def memory_hierarchy() -> Figure:
    """The levels of memory of an H100 with their sizes and rates."""
    fig, axes = panels(1, height=2)
    for place, (rate, text) in enumerate(LEVELS.values()):
        color = COLORS["memory"] if place < 2 else COLORS["communication"]
        axes.barh(place, rate, color=color, height=0.7)
        axes.annotate(text, (rate, place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(LEVELS)), list(LEVELS))
    axes.set(xscale="log", xlim=(0.01, 300), xlabel="TB/s, logarithmic")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    assert isinstance(fig, Figure)
    return fig


def transformer_block() -> Figure:
    """One block, its operations by what limits them, and what follows the last block."""
    fig, axes = plt.subplots(figsize=(WIDE, 1.8))
    boxes = dict(LAST)
    for row, half in enumerate(HALVES):
        boxes |= {(9.5 * place + 4, 8.2 - 6.2 * row): text for place, text in enumerate(half)}
    axes.add_patch(plt.Rectangle((1.5, -0.3), 50, 13.9, fc="none", ec=EDGE, lw=0.8))
    for (x, y), text in boxes.items():
        _operation(axes, x, y, text)
        if x < 54:
            _arrow(axes, (x - 1.2, y + 1.5), (x, y + 1.5))
    for tail, head in ARROWS:
        _arrow(axes, tail, head)
    for xs, ys in AROUND:
        axes.plot(xs, ys, color=EDGE, lw=1)
    axes.text(59.2, 10.1, "logits", fontsize=8.5, va="center")
    axes.text(51, 0.8, "x $L$ blocks", fontsize=8.5, ha="right", va="center")
    axes.set(xlim=(-1, 63), ylim=(-0.5, 14))
    axes.axis("off")
    return fig


def _operation(axes: Axes, x: float, y: float, text: str) -> None:
    """A box of an operation: solid and blue if arithmetic limits it, else dashed and orange."""
    arithmetic = "matmul" in text or text in ("attention", "output\nlayer")
    color = COLORS["arithmetic" if arithmetic else "memory"]
    style = "-" if arithmetic else "--"
    axes.add_patch(plt.Rectangle((x, y), 8, 3, fc=f"{color}40", ec=EDGE, lw=0.8, ls=style))
    axes.text(x + 4, y + 1.5, text, ha="center", va="center", fontsize=8.5, linespacing=0.95)


def _arrow(axes: Axes, tail: tuple[float, float], head: tuple[float, float]) -> None:
    look = {"arrowstyle": "-|>", "color": EDGE, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
    axes.annotate("", head, tail, arrowprops=look)


DRAWINGS = (memory_hierarchy, transformer_block)
