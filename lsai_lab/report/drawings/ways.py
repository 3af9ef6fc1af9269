"""The drawing of the chapter on the ways to share a model: who holds what, and what travels."""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsai_lab.report.charts import panels
from lsai_lab.report.colors import COLORS

GPUS = 4
SIDE, WIDTH = 2.6, 3.5  # of a box, and from box to box, in heights of a box
PITCH = 1.5  # from way to way
KEEPS, SENDS = 14.3, 9.4  # where these columns begin
TENSORS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "moments",
    "activations": "activations",
}
# A tensor is a box: blocks from top to bottom, and within a block from left to right (its rows
# or columns; of activations its tokens). A part is left, top, width, height of that box.
Part = tuple[float, float, float, float]
WHOLE: Part = (0, 0, 1, 1)


def _of_each_block(gpu: int, gpus: int = GPUS) -> Part:
    return (gpu % gpus / gpus, 0, 1 / gpus, 1)


def _blocks(gpu: int) -> Part:
    return (0, gpu / GPUS, 1, 1 / GPUS)


@dataclass(frozen=True)
class Way:
    """What a GPU keeps of the model and its activations through a step, by tensor (`kept`) and in
    bytes; what it holds for a while; and what it sends."""

    name: str
    kept: tuple[Part, Part, Part, Part]
    keeps: str
    holds: str
    sends: str


def _ways(gpu: int) -> list[Way]:
    """The ways from the view of one GPU."""
    own, half = _of_each_block(gpu), _of_each_block(gpu, 2)
    every, whole, pair = (own,) * 4, (WHOLE, WHOLE, own, own), (half, half, half, own)
    block = "a block's weights\nand gradients"
    return [
        Way("DDP", (WHOLE, WHOLE, WHOLE, own), "$8P$", "–", "gradients: $4P$"),
        Way("ZeRO-1", whole, "$4P+4P/N$", "–", "gradients,\nweights: $6P$"),
        Way("ZeRO-2", every, "$8P/N$", "all weights, a\nblock's gradients", "the same: $6P$"),
        Way("FSDP (ZeRO-3)", every, "$8P/N$", block, "weights twice,\ngradients: $8P$"),
        Way("HSDP, two pairs", pair, "$8P/n$", block, "as FSDP in a pair;\nthen sums"),
        Way("TP", every, "$8P/N$", "a block's\nactivations", "activations:\n$24TD$ a block"),
        Way("CP", every, "$8P/N$", f"{block},\nkeys, values", "as FSDP;\nkeys and values"),
        Way("pipeline", (_blocks(gpu),) * 4, "$8P/N$", "–", "activations\nat the cuts"),
    ]


def ways_to_share() -> Figure:
    """Of each way what the second of four GPUs keeps; what it holds for a while, and sends."""
    fig, (boxes, words) = panels(2, height=3.4, width_ratios=[16.6, 18.4])
    ways = _ways(1)
    look: dict[str, Any] = {"va": "center", "fontsize": 8.5, "linespacing": 0.95}
    for place, name in enumerate(TENSORS.values()):  # beside each other they would touch
        boxes.text(WIDTH * place + SIDE / 2, -0.5 - 0.7 * (place % 2), name, ha="center", **look)
    for row, way in enumerate(ways):
        middle = PITCH * row + 0.5
        for place, (meaning, kept) in enumerate(zip(TENSORS, way.kept, strict=True)):
            _tensor(boxes, (WIDTH * place, PITCH * row), COLORS[meaning], kept)
        boxes.text(KEEPS, middle, way.keeps, **look)
        words.text(0, middle, way.holds, **look)
        words.text(SENDS, middle, way.sends, **look)
    boxes.text(KEEPS, -0.5, "bytes", **look)
    words.text(0, -0.5, "holds for a while", **look)
    words.text(SENDS, -0.5, "sends, times $(N-1)/N$", **look)
    for axes, right in ((boxes, 18.2), (words, 19.5)):
        axes.set(xlim=(-0.3, right), ylim=(PITCH * len(ways) - 0.4, -1.6), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.grid(visible=False)
    boxes.set_yticks([PITCH * row + 0.5 for row in range(len(ways))], [way.name for way in ways])
    assert isinstance(fig, Figure)
    return fig


def _tensor(axes: Axes, corner: tuple[float, float], color: str, kept: Part) -> None:
    left, top, width, height = kept
    place = (corner[0] + SIDE * left, corner[1] + top)
    axes.add_patch(plt.Rectangle(place, SIDE * width, height, lw=0, fc=color))
    axes.add_patch(plt.Rectangle(corner, SIDE, 1, fill=False, ec="#777777", lw=0.6))


DRAWINGS = [ways_to_share]
