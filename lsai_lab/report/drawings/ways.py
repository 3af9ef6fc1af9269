"""The drawing of the chapter on the ways to share a model: who holds what, and what travels."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lsai_lab.report.colors import COLORS

GPUS = 4
PITCH = 1.7  # from way to way, in sides of a square
TENSORS = ("weights", "gradients", "optimizer", "activations")
# A tensor is a square: blocks from top to bottom, and within a block from left to right (its rows
# or columns; of activations its tokens). A part is left, top, width, height of that square.
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
        Way("TP", (own,) * 4, tokens_too, "$8P/N$", "activations: $16TD$ a block"),
        Way("CP", (own,) * 4, keys, "$8P/N$", "as FSDP; keys and values"),
        Way("pipeline", stage, none, "$8P/N$", "activations at the cuts"),
    ]


def ways_to_share() -> Figure:
    """Of each way what each of four GPUs keeps, holds for a while and sends."""
    fig, axes = plt.subplots(figsize=(6.3, 2.75))
    for gpu in range(GPUS):
        left = gpu * 5.1
        axes.text(left + 2.2, -0.75, f"GPU {gpu + 1}", ha="center", fontsize=8.5)
        for row, way in enumerate(_ways(gpu)):
            for place, name in enumerate(TENSORS):
                corner = (left + 1.15 * place, PITCH * row)
                _tensor(axes, corner, COLORS[name], way.kept[place], way.held[place])
    for row, way in enumerate(_ways(0)):
        middle = PITCH * row + 0.5
        axes.text(-0.3, middle, way.name, ha="right", va="center", fontsize=8.5)
        axes.text(20.3, middle, way.keeps, va="center", fontsize=8)
        axes.text(24.4, middle, way.sends, va="center", fontsize=8)
    axes.text(20.3, -0.75, "keeps", fontsize=8.5)
    axes.text(24.4, -0.75, "sends, times $(N-1)/N$", fontsize=8.5)
    names = ["weights", "gradients", "AdamW's moments", "activations"]
    patches = [plt.Rectangle((0, 0), 1, 1, fc=COLORS[name], alpha=0.85) for name in TENSORS]
    fig.legend(patches, names, loc="outside lower center", ncols=4)
    axes.set(xlim=(-6, 32.5), ylim=(PITCH * 8 - 0.55, -1.4), aspect="equal")
    axes.axis("off")
    return fig


def _tensor(axes: Axes, corner: tuple[float, float], color: str, kept: Part, held: Part) -> None:
    for (left, top, width, height), alpha in ((held, 0.3), (kept, 0.85)):
        place = (corner[0] + left, corner[1] + top)
        axes.add_patch(plt.Rectangle(place, width, height, fc=color, alpha=alpha, lw=0))
    axes.add_patch(plt.Rectangle(corner, 1, 1, fill=False, ec="#777777", lw=0.6))


DRAWINGS = [ways_to_share]
