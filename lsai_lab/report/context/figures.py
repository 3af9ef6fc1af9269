"""Figures of the chapter on distributed attention. Each returns a figure, readable in print, or None if there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from lsai_lab.benches.context.config import ONE
from lsai_lab.benches.context.timing import COMMUNICATION
from lsai_lab.kit.style import PALETTE, TEXT_WIDTH_IN, hatch_bars, series_style
from lsai_lab.report.context.data import Group, Shared, present

ORDER = ("zigzag", "lightseq", "ulysses", "usp", "ring", "torch")


def method_style(name: str) -> dict[str, Any]:
    return series_style(ORDER.index(name))


def tokens(count: float) -> str:
    count = int(count)
    if count >= 2**20 and count % 2**20 == 0:
        return f"{count // 2**20}M"
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def rates(shared: Shared, groups: Sequence[Group]) -> Figure:
    """Rate of a process over the length, by method; one panel for each number of processes of the same heads."""
    fig, panels = plt.subplots(1, len(groups), figsize=(TEXT_WIDTH_IN, 3.4), sharey=True, squeeze=False)
    unit, factor = shared.rate
    for axes, group in zip(panels[0], groups, strict=True):
        alone = group.alone[group.alone["method"] == ONE]
        if len(alone):
            axes.plot(
                alone["length"], factor * alone["training_tflops"], color="black", linewidth=1.0, label=_alone(shared)
            )
        _over_length(axes, group.timed, "training_tflops", factor)
        _length_axis(axes, {*group.timed["length"], *alone["length"]}, 9 // len(groups))
        axes.set(ylim=(0, None), title=_on(group, shared))
    panels[0][0].set_ylabel(f"{unit} of a {'GPU' if shared.on_gpu else 'process'}")
    _legend(fig, panels[0])
    return fig


def scaling(shared: Shared, strong: pd.DataFrame, weak: pd.DataFrame) -> Figure | None:
    """Efficiency over the number of processes: the same sequence, and the same slice of one; see `analysis.strong`, `weak`."""
    drawn = [(rows, name) for rows, name in ((strong, "strong"), (weak, "weak")) if rows["processes"].nunique() > 1]
    if not drawn:
        return None
    fig, panels = plt.subplots(1, len(drawn), figsize=(3.2 * len(drawn), 3.0), sharey=True, squeeze=False)
    for axes, (rows, name) in zip(panels[0], drawn, strict=True):
        for method in [m for m in ORDER if m in set(rows["method"])]:
            mine = rows[rows["method"] == method].sort_values("processes")
            axes.plot(mine["processes"], 100 * mine["efficiency"], label=method, **method_style(method))
        what = (
            f"{tokens(rows['length'].max())} tokens"
            if name == "strong"
            else f"{tokens(rows['slice'].max())} tokens each"
        )
        axes.set(title=f"{name}: {what}", xlabel="GPUs" if shared.on_gpu else "processes", xscale="log")
        ticks = sorted(rows["processes"].unique())
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.set_ylim(0, 105 * max(1.0, *(some["efficiency"].max() for some, _ in drawn)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.axhline(100, color="#444444", linewidth=0.8, linestyle=":")
    panels[0][0].set_ylabel("efficiency (%)")
    _legend(fig, panels[0])
    return fig


def communication(group: Group) -> Figure | None:
    """Bandwidth, and the share of the step in which nothing but communication ran, by method and traced length."""
    rows = group.of("trace").dropna(subset=["exposed_share"])
    if rows.empty:
        return None
    fig, panels = plt.subplots(1, 2, figsize=(TEXT_WIDTH_IN, 2.9))
    methods, lengths = [m for m in ORDER if m in set(rows["method"])], sorted(rows["length"].unique())
    width = 0.8 / len(lengths)
    for axes, column, factor, label in (
        (panels[0], "sent_gb_per_s", 1.0, "GB/s sent by a GPU"),
        (panels[1], "exposed_share", 100.0, "exposed (% of a step)"),
    ):
        for index, length in enumerate(lengths):
            values = rows[rows["length"] == length].set_index("method")[column].reindex(methods).astype(float)
            places = [place + (index - (len(lengths) - 1) / 2) * width for place in range(len(methods))]
            axes.bar(places, factor * values, width, color=PALETTE[index], label=f"{tokens(length)} tokens")
        axes.set_xticks(range(len(methods)), methods, rotation=30)
        axes.set_ylabel(label)
        hatch_bars(axes)
    _legend(fig, panels, ncols=4)
    return fig


def timeline(group: Group, length: int) -> Figure:
    """When each process computed and when its communication kernels ran, in one traced forward and backward pass."""
    rows = group.of("trace")
    rows = rows[rows["length"] == length].set_index("method")
    methods = [name for name in ORDER if name in rows.index]
    height = 0.4 + min(0.16 * group.processes, 0.75)
    fig, panels = plt.subplots(
        len(methods), 1, figsize=(TEXT_WIDTH_IN, 0.9 + height * len(methods)), sharex=True, squeeze=False
    )
    known = rows["exposed_share"].notna().any()
    colours = {"compute": PALETTE[0], COMMUNICATION: PALETTE[1]}
    for axes, method in zip(panels[:, 0], methods, strict=True):
        for rank, parts in enumerate(rows.loc[method, "timeline"]):
            for name, place in (("compute", rank - 0.38), (COMMUNICATION, rank + 0.06)):
                bars = [(start, end - start) for start, end in parts[name]]
                size = (place, 0.42 if known else 0.76)
                axes.broken_barh(bars, size, color=colours[name], linewidth=0)
        axes.set_yticks(range(group.processes), [str(rank) for rank in range(group.processes)])
        axes.set_ylim(group.processes - 0.5, -0.5)
        axes.set_ylabel(f"{method}\nrank")
        axes.grid(axis="y", visible=False)
    panels[-1, 0].set_xlabel("ms since the common start")
    names = ("compute", COMMUNICATION) if known else ("compute",)
    handles = [Patch(color=colours[name], label=name) for name in names]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def memory(groups: Sequence[Group]) -> Figure | None:
    """Peak memory of the fullest process over the length, by method, with one process alone; a panel for each number of processes."""
    groups = [group for group in groups if group.timed["memory_gib"].notna().any()]
    if not groups:
        return None
    fig, panels = plt.subplots(1, len(groups), figsize=(TEXT_WIDTH_IN, 3.2), sharey=True, squeeze=False)
    for axes, group in zip(panels[0], groups, strict=True):
        alone = group.alone[group.alone["method"] == ONE].dropna(subset=["memory_gib"])
        if len(alone):
            axes.plot(alone["length"], alone["memory_gib"], color="black", linewidth=1.0, label="one GPU alone")
        _over_length(axes, group.timed.dropna(subset=["memory_gib"]), "memory_gib")
        _length_axis(axes, {*group.timed["length"], *alone["length"]}, 9 // len(groups))
        axes.set(yscale="log", title=f"{group.processes} GPUs")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panels[0][0].set_ylabel("peak memory of a GPU (GiB)")
    _legend(fig, panels[0])
    return fig


def _over_length(axes: Axes, rows: pd.DataFrame, column: str, factor: float = 1.0) -> None:
    for name in [name for name in ORDER if name in present(rows)]:
        mine = rows[rows["method"] == name].sort_values("length")
        axes.plot(mine["length"], factor * mine[column].astype(float), label=name, **method_style(name))


def _length_axis(axes: Axes, lengths: set[int], most: int) -> None:
    shown = sorted(int(n) for n in lengths)
    step = -(-len(shown) // max(3, most))
    axes.set(xscale="log", xlabel="length (tokens)")
    axes.set_xticks(shown[::step], [tokens(length) for length in shown[::step]])
    axes.xaxis.set_minor_locator(NullLocator())


def _alone(shared: Shared) -> str:
    return "one GPU alone" if shared.on_gpu else "one process alone"


def _on(group: Group, shared: Shared) -> str:
    return f"{group.processes} {'GPUs' if shared.on_gpu else 'processes'}"


def _legend(fig: Figure, panels: Any, ncols: int = 4) -> None:
    """One legend for all panels, of everything that is drawn in any of them."""
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols)
