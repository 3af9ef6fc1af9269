"""Drawings of the chapters on fp8 and on the rounding of weights."""

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsai_lab.report.charts import ALONE, WIDE, name_ends
from lsai_lab.report.colors import COLORS, PALETTE

EDGE = "#444444"
# Texts and places of the boxes of one fp8 matmul; extra work that bf16 does not have is filled.
BOXES = (
    ("x\n(bf16)", 0.2, 1, False),
    ("largest\n|x|", 0.85, 0, True),
    ("scale\nand cast", 2.2, 1, True),
    ("x in\nfp8", 3.7, 1, False),
    ("transposed\ncopy", 3.92, 0, True),
    ("fp8\nmatmul", 5.2, 1, False),
    ("divide by\nboth scales", 6.83, 1, True),
    ("y\n(bf16)", 8.35, 1, False),
    ("w in fp8\n(likewise)", 5.6, 0, False),
)
ARROWS = (
    ((0.65, 1), (1.6, 1)),
    ((0.35, 0.65), (0.65, 0.34)),
    ((1.3, 0.34), (1.8, 0.65)),
    ((2.8, 1), (3.4, 1)),
    ((4.0, 1), (4.65, 1)),
    ((3.78, 0.65), (3.78, 0.34)),
    ((5.4, 0.34), (5.4, 0.65)),
    ((5.75, 1), (6.03, 1)),
    ((7.6, 1), (7.9, 1)),
)
FORMATS = {"bf16": torch.bfloat16, "E5M2": torch.float8_e5m2, "E4M3": torch.float8_e4m3fn}


def fp8_matmul() -> Figure:
    """One fp8 matmul, and the largest rounding error of three formats over the magnitude."""
    fig, (top, low) = plt.subplots(2, figsize=(WIDE, 3.4), height_ratios=[1.1, 1.05])
    _flow(top)
    _errors(low)
    return fig


def _flow(axes: Axes) -> None:
    for text, x, y, extra in BOXES:
        fill = "#fbe3d0" if extra else "white"
        box = {"boxstyle": "round,pad=0.25", "ec": EDGE, "fc": fill}
        axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=box)
    arrow = {"arrowstyle": "->", "color": EDGE, "shrinkA": 0, "shrinkB": 0}
    for tail, head in ARROWS:
        axes.annotate("", head, tail, arrowprops=arrow)
    note = "for the\nbackward\nmatmuls"
    axes.text(3.05, -0.1, note, ha="right", va="center", fontsize=9, color=EDGE)
    axes.set(xlim=(-0.2, 8.85), ylim=(-0.45, 1.4))
    axes.axis("off")


def _errors(axes: Axes) -> None:
    values, ends = torch.logspace(-5, 5, 60000), []
    for index, (name, dtype) in enumerate(FORMATS.items()):
        rounded = values.clamp(max=torch.finfo(dtype).max).to(dtype).float()
        error = (rounded / values - 1).abs().reshape(-1, 600).amax(1)
        axes.plot(values.reshape(-1, 600)[:, 300], error, color=PALETTE[index])
        ends.append((name, float(values[-300]), float(error[-1]), PALETTE[index]))
    low, high = 2.4 / 1000, 2.4  # of a tensor, as in the chapter's example
    scale = torch.finfo(torch.float8_e4m3fn).max / high
    for height, by, words in ((3, 1, "a tensor"), (9, scale, "the tensor times its scale")):
        axes.hlines(height, low * by, high * by, color=EDGE, linewidth=5)
        place = (low * by / 1.5, height)
        axes.text(*place, words, ha="right", va="center", fontsize=8.5, color=EDGE)
    axes.vlines(scale * high, 1e-3, 9, color=EDGE, linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", ylim=(1e-3, 25))
    axes.set(xlabel="magnitude of the value", ylabel="largest error")
    ticks = [0.001, 0.01, 0.1, 1]
    axes.set_yticks(ticks, [f"{100 * tick:g}%" for tick in ticks])
    name_ends(axes, ends)


def rounding_step() -> Figure:
    """One update of a quarter of the gap between two bf16 numbers, rounded in both ways."""
    fig, axes = plt.subplots(figsize=(ALONE, 1.5))
    axes.axhline(0, color=EDGE, linewidth=1)
    for x, text in ((0, "w"), (1, "next value\nin bf16")):
        axes.plot([x, x], [-0.12, 0.12], color=EDGE, linewidth=1.6)
        axes.text(x, -0.22, text, ha="center", va="top", fontsize=8.5)
    axes.plot([0.5, 0.5], [-0.3, 0.3], color="#888888", linestyle=":", linewidth=1.2)
    axes.text(0.5, -0.34, "half", ha="center", va="top", fontsize=8.5, color="#666666")
    axes.plot(0.25, 0, "o", color=EDGE, markersize=6)
    axes.text(0.25, -0.22, "w + u", ha="center", va="top", fontsize=8.5)
    for end, meaning, curve in ((0, "bad", 0.6), (1, "good", -0.4)):
        bend = {"arrowstyle": "->", "color": COLORS[meaning], "shrinkA": 2, "shrinkB": 2}
        look = bend | {"connectionstyle": f"arc3,rad={curve}"}
        axes.annotate("", (end, 0.12), (0.25, 0.07), arrowprops=look)
    texts = (
        (-0.2, 0.6, "to nearest:\nalways back"),
        (0.55, 0.85, "stochastic: up in\n1 step of 4"),
    )
    for (left, height, text), meaning in zip(texts, ("bad", "good"), strict=True):
        axes.text(left, height, text, color=COLORS[meaning], fontsize=8.5, va="center")
    axes.set(xlim=(-0.3, 1.3), ylim=(-0.75, 1.05))
    axes.axis("off")
    return fig


DRAWINGS = (fp8_matmul, rounding_step)
