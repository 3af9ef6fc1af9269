"""Comparison plots from a plot configuration: which metric of a study's runs is drawn, and how.

`params/plots/<name>.yaml` lists plots; `lsai plot` and the chapter of the study draw the same ones. A line shows a column of
`metrics.jsonl`, the first good repeat of each variant; a bar shows a result of `summary.json` over the repeats. What a variant does
not have is left out, and the caption says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field, StringConstraints, model_validator

from lsai_core.errors import UserError, hint
from lsai_core.files import atomic_writer
from lsai_core.strict import Strict, validated
from lsai_lab.files import load_yaml
from lsai_lab.kit.style import HATCHES, PALETTE, series_style
from lsai_lab.report.show import PNG_DPI
from lsai_lab.report.variants import variant_rows
from lsai_lab.runs.records import Run
from lsai_lab.runs.study import Study

# Every training run writes these (on a CPU without the memory columns); others are found in the runs themselves.
COLUMNS = (
    "loss", "validation_loss", "tokens_per_s", "step_ms", "mfu", "memory_allocated_gib", "memory_reserved_gib", "grad_norm",
    "lr", "tokens", "elapsed_s",
)  # fmt: skip
_AGAINST = {"step": ("step", "step", 1.0), "tokens": ("tokens", "million tokens", 1e-6), "time": ("elapsed_s", "seconds", 1.0)}  # fmt: skip


class Published(Strict):
    """Figures that somebody else reported: drawn beside runs whose config holds all of `config`."""

    label: str
    source: str
    config: dict[str, Any]
    results: dict[str, float]

    def comparable(self, run: Run) -> bool:
        """Whether this run has the published setting."""
        return _holds(run.config, self.config)


class Plot(Strict):
    """One plot; `label` and `unit` name the axis of values."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    title: str
    metric: str
    kind: Literal["line", "bar"]
    label: str
    unit: str = ""
    against: Literal["step", "tokens", "time"] = "step"
    factor: float = 1.0
    smooth: int = Field(1, ge=1, description="line: running mean over so many steps")
    steady: bool = Field(False, description="line: only the steps that the speed figures count")
    log: bool = False
    variants: list[str] = Field([], description="only these; empty: all")

    @model_validator(mode="after")
    def _bars_have_no_steps(self) -> Self:
        if self.kind == "bar" and (given := sorted({"against", "smooth", "steady"} & self.model_fields_set)):
            raise ValueError(f"{', '.join(given)} belongs to a line; a bar shows one figure a run")
        return self

    @property
    def axis(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


class PlotConfig(Strict):
    """`params/plots/<name>.yaml`."""

    study: str
    part: str = "train"
    published: list[Published] = []
    plots: list[Plot] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [plot.name for plot in self.plots]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two plots are called {twice[0]!r}")
        return self


def load_plots(root: Path, name: str) -> PlotConfig:
    """The plot configuration called `name` in params/plots, or the YAML file at that path."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else root / "params" / "plots" / f"{name}.yaml"
    if not path.exists() and path.parent == root / "params" / "plots":
        known = sorted(file.stem for file in path.parent.glob("*.yaml"))
        raise UserError(f"unknown plot configuration {name!r}; known: {', '.join(known)}, or give a YAML file")
    return validated(PlotConfig, load_yaml(path), name)


def check_plots(config: PlotConfig, study: Study, runs: list[Run], others: list[Run]) -> None:
    """UserError for a part, a variant or a metric that there is not. `others`: more runs whose results are known names."""
    if config.part not in study.parts:
        raise UserError(f"study {study.study} has no part {config.part!r}{hint(config.part, study.parts)}")
    kind = study.parts[config.part].kind
    results = [run.summary.results for run in (*runs, *others) if run.summary.kind == kind]
    numbers = {name for one in results for name, value in one.items() if isinstance(value, (int, float))}
    columns = {*COLUMNS, *(str(name) for run in runs for name in run.metrics.columns)}
    for plot in config.plots:
        for variant in plot.variants:
            if variant not in study.variants:
                raise UserError(
                    f"plot {plot.name}: study {study.study} has no variant {variant!r}{hint(variant, study.variants)}"
                )
        known, what = (columns, "column of metrics.jsonl") if plot.kind == "line" else (numbers, "result of a run")
        if known and plot.metric not in known:
            close = hint(plot.metric, sorted(known)).removeprefix("; ")
            listed = "" if close.startswith("known") else f" known: {', '.join(sorted(known))}"
            raise UserError(f"plot {plot.name}: no {what} is called {plot.metric!r}; {close}{listed}")


def draw(plot: Plot, config: PlotConfig, study: Study, runs: list[Run]) -> Figure | None:
    """The plot of one machine's runs; None if none of them has the metric."""
    fig, axes = plt.subplots(figsize=(6.3, 2.9))
    drawn = (_bars if plot.kind == "bar" else _lines)(axes, plot, config, study, runs)
    if not drawn:
        plt.close(fig)
        return None
    for number, other in enumerate(published(config, plot.metric, runs)):
        mark = axes.axvline if plot.kind == "bar" else axes.axhline
        dash = (0, (2 + 2 * number, 2))
        mark(other.results[plot.metric] * plot.factor, color="black", linestyle=dash, linewidth=1, label=other.label)
    if plot.kind == "line" or axes.get_legend_handles_labels()[1]:
        fig.legend(loc="outside lower center", ncols=4)
    return fig


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `<name>.png` and `<name>.svg` and close the figure; UserError if the folder cannot be written."""
    paths = [folder / f"{name}.{end}" for end in ("png", "svg")]
    try:
        for path in paths:
            with atomic_writer(path) as file:
                metadata = {"Date": None} if path.suffix == ".svg" else None
                figure.savefig(file, format=path.suffix[1:], bbox_inches="tight", dpi=PNG_DPI, metadata=metadata)
    except OSError as error:
        raise UserError(
            f"cannot write the plots to {folder}: {error.strerror or error}; choose another --out"
        ) from None
    plt.close(figure)
    return paths


def caption(plot: Plot, config: PlotConfig, study: Study, runs: list[Run], machine: str) -> str:
    """What the plot shows, and what it does not."""
    text = f"{plot.title} on {machine}"
    good = _rows(plot, config, study, runs)
    if plot.kind == "bar" and good["repeats"].max() > 1:
        text += "; over the repeats, which the line at the end of a bar spans"
    if plot.kind == "line":
        text += f"; running mean over {plot.smooth} steps" if plot.smooth > 1 else ""
        text += "; steps outside warm-up and measurement only" if plot.steady else ""
        text += "; the first good repeat of each variant" if good["repeats"].max() > 1 else ""
    text += "."
    for other in published(config, plot.metric, runs):
        unit = "%" if plot.unit == "%" else f" {plot.unit or plot.label}"
        text += f" Dashed: {other.label}, {other.results[plot.metric] * plot.factor:,.4g}{unit} ({other.source})."
    return text + missing(plot, config, study, runs)


def missing(plot: Plot, config: PlotConfig, study: Study, runs: list[Run]) -> str:
    """A sentence about the variants that the plot has no figure of, or an empty string."""
    gone = []
    for row in _rows(plot, config, study, runs).itertuples():
        if row.outcome != "ok":
            gone.append(f"{row.label} ({row.outcome})")
        elif not _has(plot, _first_good(runs, config.part, str(row.variant))):
            gone.append(f"{row.label} (not measured there)")
    return f" Without a figure: {', '.join(gone)}." if gone else ""


def published(config: PlotConfig, metric: str, runs: list[Run]) -> list[Published]:
    """Others' figures of this metric in the setting of these runs."""
    return [p for p in config.published if metric in p.results and any(p.comparable(run) for run in runs)]


def _rows(plot: Plot, config: PlotConfig, study: Study, runs: list[Run]) -> pd.DataFrame:
    rows = variant_rows(study, runs, config.part, [plot.metric], ranges=[plot.metric])
    return rows[rows["variant"].isin(plot.variants)] if plot.variants and len(rows) else rows


def _first_good(runs: list[Run], part: str, variant: str) -> Run:
    mine = [r for r in runs if (r.summary.id.part, r.summary.id.variant, r.summary.outcome) == (part, variant, "ok")]
    return min(mine, key=lambda run: run.summary.id.repeat)


def _has(plot: Plot, run: Run) -> bool:
    if plot.kind == "bar":
        return run.summary.results.get(plot.metric) is not None
    return len(_series(plot, run)) > 0


def _series(plot: Plot, run: Run) -> pd.DataFrame:
    """Columns x and y of one run's line, as they are drawn; empty if it has no such column."""
    metrics = run.metrics
    if metrics.empty:
        return pd.DataFrame(columns=["x", "y"])
    metrics = metrics.assign(tokens=metrics["tokens_in_step"].cumsum(), elapsed_s=(metrics["step_ms"] / 1e3).cumsum())
    if plot.steady and "steady" in metrics:
        metrics = metrics[metrics["steady"]]
    if plot.metric not in metrics:
        return pd.DataFrame(columns=["x", "y"])
    column, _, factor = _AGAINST[plot.against]
    y = (metrics[plot.metric] * plot.factor).dropna().rolling(plot.smooth, min_periods=1).mean()
    return pd.DataFrame({"x": metrics.loc[y.index, column] * factor, "y": y})


def _lines(axes: Axes, plot: Plot, config: PlotConfig, study: Study, runs: list[Run]) -> bool:
    drawn = False
    rows = _rows(plot, config, study, runs)
    for index, row in enumerate(rows[rows["outcome"] == "ok"].itertuples() if len(rows) else ()):
        line = _series(plot, _first_good(runs, config.part, str(row.variant)))
        if line.empty:
            continue
        every = max(1, len(line) // 8)
        # Markers take turns, so that lines on top of each other all show.
        style = {**series_style(index), "markevery": (index * every // max(1, len(rows)), every)}
        axes.plot(line["x"], line["y"], label=row.label, **style)
        drawn = True
    axes.set(xlabel=_AGAINST[plot.against][1], ylabel=plot.axis, title=plot.title)
    axes.set_yscale("log" if plot.log else "linear")
    return drawn


def _bars(axes: Axes, plot: Plot, config: PlotConfig, study: Study, runs: list[Run]) -> bool:
    rows = _rows(plot, config, study, runs)
    rows = rows.dropna(subset=[plot.metric]) if len(rows) else rows
    if rows.empty:
        return False
    values = rows[plot.metric] * plot.factor
    hatches = [HATCHES[index % len(HATCHES)] for index in range(len(rows))]
    axes.barh(rows["label"], values, color=PALETTE[0], edgecolor="#222222", linewidth=0.6, hatch=hatches)
    if rows["repeats"].max() > 1:
        low, high = (rows[f"{plot.metric}_{end}"] * plot.factor for end in ("low", "high"))
        axes.errorbar(
            values, rows["label"], xerr=np.array([values - low, high - values]), fmt="none", ecolor="black", capsize=3
        )
    for value, label in zip(values, rows["label"], strict=True):
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
        axes.annotate(
            f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}", (value, label), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=8, bbox=box,
        )  # fmt: skip
    axes.set(xlabel=plot.axis, title=plot.title)
    axes.set_xscale("log" if plot.log else "linear")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    return True


def _holds(config: Any, wanted: Any) -> bool:
    """Whether `config` has every key of `wanted` with its value, mapping by mapping."""
    if isinstance(wanted, dict):
        return isinstance(config, dict) and all(key in config and _holds(config[key], v) for key, v in wanted.items())
    return bool(config == wanted)
