"""Figures of the attention chapter. Each takes one machine's results and returns a figure, readable in print, or None."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lsai_core.attention.choice import BACKENDS, CUDA_HALF
from lsai_lab.kit.style import series_style
from lsai_lab.report.attention.data import MachineResults, Variant

# Drawn in this order, each with its own style in every figure.
ORDER = (*CUDA_HALF, *(name for name in BACKENDS if name not in CUDA_HALF))


def backend_style(name: str) -> dict[str, Any]:
    """Colour and marker as the backend declares them, and dashes."""
    backend = BACKENDS[name]
    return {**series_style(ORDER.index(name)), "color": backend.color, "marker": backend.marker}


def speed(results: MachineResults) -> Figure:
    """Speed over the length under a causal mask, forward and forward plus backward, of the first variant."""
    fig, panels = plt.subplots(1, 2, figsize=(6.3, 3.6), sharey=True)
    variant = results.variants[0]
    for axes, metric, title in zip(
        panels, ("forward_tflops", "training_tflops"), ("forward", "forward + backward"), strict=True
    ):
        _over_length(axes, variant, metric, results.rate[1])
        axes.set(title=title, ylim=(0, None))
    panels[0].set_ylabel(results.rate[0])
    _legend(fig, panels)
    return fig


def heads(results: MachineResults) -> Figure | None:
    """The same, forward plus backward, for every shape of heads; None if there is one only."""
    count = len(results.variants)
    if count < 2:
        return None
    rows = (count + 1) // 2
    fig, grid = plt.subplots(rows, 2, figsize=(6.3, 0.7 + 2.3 * rows), sharey=True, sharex=True, squeeze=False)
    panels = list(grid.flat)
    for axes, variant in zip(panels, results.variants, strict=False):
        _over_length(axes, variant, "training_tflops", results.rate[1])
        axes.set(title=f"{variant.label} heads", ylim=(0, None))
    for axes in panels[count:]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(results.rate[0])
    for axes in grid[:-1].flat:
        axes.set_xlabel("")
    _legend(fig, panels[:count])
    return fig


def memory(results: MachineResults) -> Figure | None:
    """Peak memory beyond the inputs over the length, causal, of the first variant; None if it was not counted."""
    variant = results.variants[0]
    if variant.good["memory_training_mib"].isna().all():
        return None
    fig, axes = plt.subplots(figsize=(6.3, 3.2))
    _over_length(axes, variant, "memory_training_mib")
    axes.set(yscale="log", ylabel="MiB beyond the inputs")
    fig.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    return fig


def windows(variant: Variant, length: int) -> Figure:
    """Milliseconds of forward plus backward over the window at one length; the last point is the causal mask."""
    fig, axes = plt.subplots(figsize=(6.3, 3.2))
    frame = variant.good[variant.good["length"] == length]
    for name in _present(frame):
        mine = frame[(frame["backend"] == name) & (frame["mask"] != "full")].copy()
        if mine["window"].notna().sum() == 0 or mine["training_ms"].isna().all():
            continue
        mine["reach"] = mine["window"].fillna(length)
        mine = mine.sort_values("reach")
        style = backend_style(name)
        if len(mine) < 3:  # a line would claim what lies between
            style["linestyle"] = "none"
        axes.plot(mine["reach"], mine["training_ms"], label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="window (tokens)", ylabel="ms, forward + backward")
    reaches = sorted({*frame["window"].dropna().astype(int), length})
    axes.set_xticks(reaches, [_tokens(reach) if reach < length else "causal" for reach in reaches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    fig.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    return fig


def _over_length(axes: Axes, variant: Variant, metric: str, factor: float = 1.0) -> None:
    frame = variant.good[(variant.good["mask"] == "causal") & variant.good[metric].notna()]
    for name in _present(frame):
        mine = frame[frame["backend"] == name].sort_values("length")
        axes.plot(mine["length"], factor * mine[metric], label=name, **backend_style(name))
    lengths = sorted(frame["length"].unique())
    axes.set(xscale="log", xlabel="length (tokens)")
    step = 2 if len(lengths) > 5 else 1
    axes.set_xticks(lengths[::step], [_tokens(length) for length in lengths[::step]])
    axes.xaxis.set_minor_locator(NullLocator())


def _present(frame: pd.DataFrame) -> list[str]:
    return [name for name in ORDER if name in set(frame["backend"])]


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def _legend(fig: Figure, panels: Any) -> None:
    """One legend for all panels, of everything that is drawn in any of them."""
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = [name for name in ORDER if name in handles]
    fig.legend([handles[name] for name in names], names, loc="outside lower center", ncols=5)
