"""The drawing of the chapter on the ways to share a model: who holds what, and what travels."""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsai_lab.report.colors import COLORS

GPUS = 4
SIDE, WIDTH = 2.6, 3.5  # of a box, and from box to box, in heights of a box
PITCH = 1.3  # from way to way
KEEPS, SENDS = 14.1, 18.3  # where these columns begin
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
NOTHING: Part = (0, 0, 0, 0)
AT_WORK: Part = (0, 0.5, 1, 0.25)  # the one block that is computed now


def _of_each_block(gpu: int, gpus: int = GPUS) -> Part:
    return (gpu % gpus / gpus, 0, 1 / gpus, 1)


def _blocks(gpu: int) -> Part:
    return (0, gpu / GPUS, 1, 1 / GPUS)


@dataclass(frozen=True)
class Way:
    """What a GPU keeps of the model and its activations, for a whole step (`kept`) and for a part
    of it (`held`), by tensor; the bytes it keeps; and what it sends."""

    name: str
    kept: tuple[Part, Part, Part, Part]
    held: tuple[Part, Part, Part, Part]
    keeps: str
    sends: str


def _ways(gpu: int) -> list[Way]:
    """The ways from the view of one GPU."""
    own, half = _of_each_block(gpu), _of_each_block(gpu, 2)
    none, block = (NOTHING,) * 4, (AT_WORK, AT_WORK, NOTHING, NOTHING)
    whole_weights = (WHOLE, AT_WORK, NOTHING, NOTHING)
    tokens_too = (NOTHING, NOTHING, NOTHING, AT_WORK)
    stage = (_blocks(gpu),) * 4
    keys = (*block[:3], AT_WORK)
    return [
        Way("DDP", (WHOLE, WHOLE, WHOLE, own), none, "$8P$", "gradients: $4P$"),
        Way("ZeRO-1", (WHOLE, WHOLE, own, own), none, "$4P+4P/N$", "gradients, weights: $6P$"),
        Way("ZeRO-2", (own,) * 4, whole_weights, "$8P/N$", "weights, gradients: $6P$"),
        Way("FSDP (ZeRO-3)", (own,) * 4, block, "$8P/N$", "weights twice, gradients: $8P$"),
        Way(
            "HSDP, two pairs",
            (half, half, half, own),
            block,
            "$8P/n$",
            "as FSDP in a pair; then sums",
        ),
        Way("TP", (own,) * 4, tokens_too, "$8P/N$", "activations: $24TD$ a block"),
        Way("CP", (own,) * 4, keys, "$8P/N$", "as FSDP; keys and values"),
        Way("pipeline", stage, none, "$8P/N$", "activations at the cuts"),
    ]


def ways_to_share() -> Figure:
    """Of each way what the second of four GPUs keeps, holds for a while and sends."""
    fig, axes = plt.subplots(figsize=(6.3, 3.1))
    ways = _ways(1)
    for place, name in enumerate(TENSORS.values()):
        axes.text(WIDTH * place + SIDE / 2, -0.3, name, ha="center", fontsize=8.5)
    for row, way in enumerate(ways):
        for place, name in enumerate(TENSORS):
            corner = (WIDTH * place, PITCH * row)
            _tensor(axes, corner, COLORS[name], way.kept[place], way.held[place])
        middle = PITCH * row + 0.5
        axes.text(-0.3, middle, way.name, ha="right", va="center", fontsize=8.5)
        axes.text(KEEPS, middle, way.keeps, va="center", fontsize=8.5)
        axes.text(SENDS, middle, way.sends, va="center", fontsize=8.5)
    axes.text(KEEPS, -0.3, "keeps", fontsize=8.5)
    axes.text(SENDS, -0.3, "sends, times $(N-1)/N$", fontsize=8.5)
    axes.set(xlim=(-5.8, 28.6), ylim=(PITCH * len(ways) - 0.2, -0.9))
    axes.axis("off")
    return fig


def _tensor(axes: Axes, corner: tuple[float, float], color: str, kept: Part, held: Part) -> None:
    hatched: dict[str, Any] = {"fc": "none", "ec": color, "hatch": "//////"}
    for (left, top, width, height), look in ((held, hatched), (kept, {"fc": color})):
        place = (corner[0] + SIDE * left, corner[1] + top)
        axes.add_patch(plt.Rectangle(place, SIDE * width, height, lw=0, **look))
    axes.add_patch(plt.Rectangle(corner, SIDE, 1, fill=False, ec="#777777", lw=0.6))


DRAWINGS = [ways_to_share]
