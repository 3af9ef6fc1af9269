"""The figure of the speed chapter: where the time of a step goes, variant beside variant, and the ideal above them."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from lsai_lab.kit.style import HATCHES, PALETTE
from lsai_lab.report.speed.results import SHOWN, Speed, class_ms

_IDLE = len(SHOWN) - 1


def kernel_bars(speed: Speed, rows: pd.DataFrame) -> Figure | None:
    """Stacked bars of milliseconds per step and kernel class, one per row, the ideal steps first; None without a trace."""
    bars: dict[str, dict[str, float]] = {}
    for _, row in rows.iterrows():
        if times := class_ms(row):
            if (ideal := speed.ideal(row["key"])) is not None:
                name = "ideal in " + " and ".join(ideal.dtypes)
                if window := speed.run(row["key"]).config["attention"]["window"]:
                    name += f", window {window}"
                bars.setdefault(name, {"matmul": ideal.matmul_ms, "attention": ideal.attention_ms})
            bars[row["label"]] = times
    if not bars:
        return None
    order = sorted(bars, key=lambda name: not name.startswith("ideal"))
    present = [label for label in SHOWN if any(times.get(label, 0.0) > 0 for times in bars.values())]
    fig, axes = plt.subplots(figsize=(6.3, 1.3 + 0.32 * len(order)))
    start = dict.fromkeys(order, 0.0)
    for label in present:
        number = SHOWN.index(label)
        widths = [bars[name].get(label, 0.0) for name in order]
        # Idle is the absence of work: white.
        color = "white" if number == _IDLE else PALETTE[number]
        axes.barh(
            order, widths, left=[start[name] for name in order], label=label, color=color, hatch=HATCHES[number],
            edgecolor="#222222", linewidth=0.5, height=0.7,
        )  # fmt: skip
        start = {name: start[name] + width for name, width in zip(order, widths, strict=True)}
    for name in order:
        axes.annotate(
            f"{start[name]:,.4g}",
            (start[name], name),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set(xlabel="milliseconds per step", xlim=(0, max(start.values()) * 1.1))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=4)
    return fig
