"""A table of numbers whose cells are coloured by value."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes


def number_map(
    axes: Axes,
    grid: pd.DataFrame,
    limits: tuple[float, float],
    *,
    text: str = "{:.2f}",
    gray: pd.DataFrame | None = None,
    bold: pd.DataFrame | None = None,
) -> None:
    """Draw `grid` with its row and column names, each value by `text` on a colour between
    `limits`; missing values as a dash. `gray`, `bold`: where True, cells of no colour, bold
    numbers."""
    hidden = np.zeros(grid.shape, bool) if gray is None else gray.to_numpy(bool)
    strong = np.zeros(grid.shape, bool) if bold is None else bold.to_numpy(bool)
    colored = np.where(hidden, np.nan, grid.to_numpy(float))
    axes.imshow(colored, cmap="YlOrBr", vmin=limits[0], vmax=limits[1], aspect="auto")
    for (row, column), value in np.ndenumerate(grid.to_numpy(float)):
        if hidden[row, column]:
            place = (column - 0.5, row - 0.5)
            axes.add_patch(plt.Rectangle(place, 1, 1, color="#cccccc", linewidth=0))
        word = "–" if np.isnan(value) else text.format(value)
        weight = "bold" if strong[row, column] else "normal"
        axes.text(column, row, word, ha="center", va="center", fontsize=8.5, weight=weight)
    axes.set_xticks(range(grid.shape[1]), [str(name) for name in grid.columns])
    axes.set_yticks(range(grid.shape[0]), [str(name) for name in grid.index])
    axes.grid(visible=False)
