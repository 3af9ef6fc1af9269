"""A chart of what settings change in the loss: validation and training loss beside each other, with
joint intervals."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from lsai_lab.report.colors import COLORS

# Of each kind of loss: how far its marks stand from the middle of the row, and its colour.
KINDS = {"validation": (-0.14, COLORS["ours"]), "training": (0.14, COLORS["peer"])}


def loss_chart(changes: pd.DataFrame, names: Mapping[str, str], axes: Axes) -> None:
    """Draw a frame of `loss_changes`, a row a setting, the first on top: means of the seeds with
    their intervals, in nats. `names`: of each variant, what its readers call it."""
    places = np.arange(len(changes))
    for kind, (shift, color) in KINDS.items():
        axes.errorbar(
            changes[kind],
            places + shift,
            xerr=changes[f"{kind}_half"],
            fmt="o" if kind == "validation" else "s",
            color=color,
            capsize=2.5,
            markersize=4,
            label=f"{kind} loss",
        )
    axes.axvline(0, color="#444444", linewidth=0.8)
    axes.set_yticks(places, [names[variant] for variant in changes.index])
    axes.set(ylim=(len(changes) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    axes.locator_params(axis="x", nbins=6)  # more would touch each other
