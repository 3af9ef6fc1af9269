"""Figures of the memory study. Each takes one machine's results and returns a matplotlib figure, readable in print."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from lsai_lab.kit.style import DASHES, PALETTE, hatch_bars, series_style
from lsai_lab.report.memory.table import MachineResults

_PHASES = {
    "mem_forward_peak_gib": "forward",
    "mem_backward_peak_gib": "backward",
    "mem_optimizer_peak_gib": "optimizer",
}

SAME_MEMORY = 0.01  # a difference in peak memory below this is no reason to choose a slower variant


def memory_bars(results: MachineResults) -> Figure | None:
    """Peak memory of each phase, grouped by variant; None if nothing was measured."""
    rows = results.ok.dropna(subset=["mem_peak_allocated_gib"])
    if rows.empty:
        return None
    long = rows.melt("label", list(_PHASES), "phase", "GiB").replace({"phase": _PHASES})
    fig, axes = plt.subplots(figsize=(6.3, 3.6))
    sns.barplot(long, y="label", x="GiB", hue="phase", ax=axes, palette=list(PALETTE[:3]))
    axes.set(xlabel="peak memory of the phase (GiB)", ylabel="")
    axes.legend(title="", loc="lower right")
    hatch_bars(axes)
    return fig


def speed_bars(results: MachineResults) -> Figure | None:
    """Tokens per second at equal batch, with the range over repeats; None if every run was too short to be timed."""
    rows = results.ok.dropna(subset=["tokens_per_s"])
    if rows.empty:
        return None
    fig, axes = plt.subplots(figsize=(6.3, 2.9))
    speed = rows["tokens_per_s"] / 1e3
    axes.barh(rows["label"], speed, color=PALETTE[0], edgecolor="#222222", linewidth=0.6)
    low, high = speed - rows["tokens_per_s_low"] / 1e3, rows["tokens_per_s_high"] / 1e3 - speed
    axes.errorbar(speed, rows["label"], xerr=np.array([low, high]), fmt="none", ecolor="black", capsize=3)
    for value, label, ratio in zip(speed, rows["label"], rows["speedup"], strict=True):
        text = f"{value:,.3g}" + (f"  ({ratio:.2f}x)" if ratio is not None and ratio == ratio else "")
        axes.annotate(text, (value, label), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set(xlabel="thousand tokens per second", ylabel="", xlim=(0, speed.max() * 1.3))
    axes.invert_yaxis()
    return fig


def largest_batch_bars(results: MachineResults) -> Figure | None:
    """Largest batch that trains; None if it was not searched."""
    if "largest_batch" not in results.rows:
        return None
    rows = results.rows.dropna(subset=["largest_batch"])
    if rows.empty:
        return None
    fig, axes = plt.subplots(figsize=(6.3, 2.7))
    axes.barh(rows["label"], rows["largest_batch"], color=PALETTE[2], edgecolor="#222222", linewidth=0.6)
    for value, label in zip(rows["largest_batch"], rows["label"], strict=True):
        axes.annotate(
            f"{value:,.0f}", (value, label), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set(xlabel=f"largest batch (sequences of {results.config['seq_len']} tokens)", ylabel="")
    axes.set_xlim(0, rows["largest_batch"].max() * 1.12)
    axes.invert_yaxis()
    return fig


def loss_curves(results: MachineResults) -> Figure:
    """Training loss of every variant at equal tokens, smoothed, with the last tenth enlarged."""
    fig, (whole, end) = plt.subplots(1, 2, figsize=(6.3, 3.4), width_ratios=[3, 2])
    for index, row in enumerate(results.ok.itertuples()):
        metrics = results.metrics(str(row.variant))
        if metrics.empty:
            continue
        smooth = metrics["loss"].ewm(span=max(1, len(metrics) // 20)).mean()
        tokens = (metrics["step"] + 1) * metrics["tokens_in_step"] / 1e6
        style = {"color": series_style(index)["color"], "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.2}
        tail = slice(int(len(metrics) * 0.8), None)
        whole.plot(tokens, smooth, label=row.label, **style)
        end.plot(tokens[tail], smooth[tail], **style)
    whole.set(xlabel="million tokens", ylabel="training loss (nats per token)")
    end.set(xlabel="million tokens", title="the last fifth", ylabel="")
    fig.legend(loc="outside lower center", ncols=4, fontsize=7.5)
    return fig


def pareto_scatter(results: MachineResults) -> Figure | None:
    """Speed and perplexity against peak memory, with the Pareto front of each; None if memory was not measured."""
    rows = results.ok.dropna(subset=["mem_peak_allocated_gib"])
    if rows.empty:
        return None
    fig, axes = plt.subplots(1, 2, figsize=(6.3, 3.3))
    panels = (("tokens_per_s", "tokens per second", True), ("validation_perplexity", "validation perplexity", False))
    for panel, (metric, title, more_is_better) in zip(axes, panels, strict=True):
        front = pareto_front(rows, metric, more_is_better)
        panel.plot(front["mem_peak_allocated_gib"], front[metric], color="#888888", linestyle="--", zorder=1)
        for index, row in enumerate(rows.itertuples()):
            style = series_style(index)
            point = (row.mem_peak_allocated_gib, getattr(row, metric))
            panel.scatter(*point, color=style["color"], marker=style["marker"], s=34, zorder=2, label=row.label)
        panel.set(xlabel="peak memory (GiB)", ylabel=title)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7.5)
    return fig


def pareto_front(rows: pd.DataFrame, metric: str, more_is_better: bool) -> pd.DataFrame:
    """The variants that no other beats in both memory and `metric`, by rising memory; those without a value are left out.

    Peaks that differ by less than `SAME_MEMORY` count as equal: of two such variants only the better one is kept.
    """
    rows = rows.dropna(subset=[metric])
    memory, best = rows["mem_peak_allocated_gib"], None
    front: list[Any] = []  # index labels
    for row in rows.sort_values(["mem_peak_allocated_gib", metric], ascending=[True, not more_is_better]).itertuples():
        value = getattr(row, metric)
        if best is None or (value > best if more_is_better else value < best):
            best = value
            while front and memory[row.Index] < (1 + SAME_MEMORY) * memory[front[-1]]:
                front.pop()
            front.append(row.Index)
    return rows.loc[front]


def beside(all_results: list[MachineResults]) -> Figure | None:
    """Speed-up and relative memory of every variant, machine beside machine; None unless two or more have a baseline."""
    parts = [
        results.ok[["label", "speedup", "memory_share"]].assign(machine=results.machine)
        for results in all_results
        if results.ok["speedup"].notna().any()
    ]
    if len(parts) < 2:
        return None
    frame = pd.concat(parts)
    fig, axes = plt.subplots(1, 2, figsize=(6.3, 3.8), sharey=True)
    for panel, metric, title in zip(
        axes,
        ("speedup", "memory_share"),
        ("speed against own baseline (x)", "peak memory against own baseline"),
        strict=True,
    ):
        sns.barplot(
            frame, y="label", x=metric, hue="machine", ax=panel, palette=list(PALETTE[: frame["machine"].nunique()])
        )
        panel.axvline(1, color="#444444", linewidth=0.8)
        panel.set(xlabel=title, ylabel="")
        hatch_bars(panel)
        panel.get_legend().remove()
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
    return fig
