"""Drawings of the chapter on context parallelism."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from lsai_core.context.methods import ContextSetting
from lsai_lab.report.colors import PALETTE

# Of each method its name for readers, in the order of the chapter's figures.
METHODS = {
    "ulysses": "Ulysses",
    "zigzag": "zigzag ring",
    "lightseq": "LightSeq",
    "usp": "USP",
    "torch": "PyTorch",
    "ring": "ring",
}
SIZE = 64  # positions of the drawn sequence
GPUS = 4
SHOWN = ("ring", "zigzag", "lightseq", "ulysses")


def causal_work() -> Figure:
    """Which of four GPUs computes which query-key pair, by method, and how much each computes."""
    fig, panels = plt.subplots(1, len(SHOWN), figsize=(6.3, 1.8))
    colors = ListedColormap(PALETTE[:GPUS])
    for axes, method in zip(panels, SHOWN, strict=True):
        axes.imshow(_owners(method), cmap=colors, vmin=-0.5, vmax=GPUS - 0.5, alpha=0.75)
        pairs = [1] * GPUS
        if method != "ulysses":
            pairs = ContextSetting(method, 65536).plan(GPUS).pairs()
        work = " : ".join(f"{each / min(pairs):.0f}" for each in pairs)
        axes.set(title=METHODS[method], xticks=[], yticks=[], xlabel=f"work {work}")
        axes.spines[["left", "bottom"]].set_visible(False)
    words = {"ha": "right", "va": "top", "fontsize": 8.5}
    corner = {"transform": panels[0].transAxes}
    panels[0].text(0.99, 0.99, "queries down,\nkeys across", **corner, **words)
    boxes = [plt.Rectangle((0, 0), 1, 1, color=color, alpha=0.75) for color in PALETTE[:GPUS]]
    names = [f"GPU {number + 1}" for number in range(GPUS)]
    fig.legend(boxes, names, loc="outside lower center", ncols=GPUS)
    return fig


def _owners(method: str) -> np.ndarray:
    """The GPU that computes each pair of a query (row) and a key; missing where the mask hides."""
    if method == "ulysses":  # four groups of heads, each of a whole sequence
        side = SIZE // 2
        owners = np.kron([[0.0, 1.0], [2.0, 3.0]], np.ones((side, side)))
    else:
        side = SIZE
        owners = np.full((SIZE, SIZE), np.nan)
        setting = ContextSetting(method, SIZE)
        layout = setting.layout(GPUS)
        for task in (task for step in setting.plan(GPUS).steps for task in step):
            queries = layout.ring_positions(task.q_owner)
            keys = layout.ring_positions(task.k_owner)
            for tile in task.tiles:
                rows = np.asarray(queries[tile.q0 : tile.q1], dtype=np.intp)
                columns = np.asarray(keys[tile.k0 : tile.k1], dtype=np.intp)
                owners[np.ix_(rows, columns)] = task.worker
    hidden = np.tile(np.triu(np.ones((side, side), bool), 1), (SIZE // side, SIZE // side))
    return np.where(hidden, np.nan, owners)


DRAWINGS = [causal_work]
