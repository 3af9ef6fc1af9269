"""Comparison plots from a plot configuration: `params/plots/<name>.yaml` lists them, `lsai plot`
draws them.

A line shows a column of `lab.steps`, the first good repeat of each variant; a bar shows a result
over the repeats, and the line at its end spans them.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field, StringConstraints, model_validator

from lsai_core.base.errors import UserError, hint
from lsai_core.base.files import atomic_writer
from lsai_core.config.strict import Strict, validated
from lsai_lab.analysis.summary import over_repeats
from lsai_lab.project.files import load_yaml
from lsai_lab.report.colors import PALETTE
from lsai_lab.report.load import steps
from lsai_lab.report.show import PNG_DPI
from lsai_lab.report.style import series_style
from lsai_lab.report.values import shown

# Column, name of the axis, factor.
_AGAINST = {
    "step": ("step", "step", 1.0),
    "tokens": ("tokens", "million tokens", 1e-6),
    "time": ("elapsed_s", "seconds", 1.0),
}


class Plot(Strict):
    """One plot; `label` and `unit` name the axis of values."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    title: str
    metric: str
    kind: Literal["line", "bar"]
    label: str
    unit: str = ""
    against: Literal["step", "tokens", "time"] = "step"
    factor: float = Field(1.0, description="values are multiplied by it: 100 for per cent")
    smooth: int = Field(1, ge=1, description="line: running mean over so many steps")
    steady: bool = Field(False, description="line: only the steps that the speed figures count")
    log: bool = Field(False, description="logarithmic axis of values")
    variants: list[str] = Field([], description="only these; empty: all")

    @model_validator(mode="after")
    def _bars_have_no_steps(self) -> Self:
        if self.kind == "bar" and (
            given := sorted({"against", "smooth", "steady"} & self.model_fields_set)
        ):
            raise ValueError(f"{', '.join(given)} belongs to a line; a bar shows one figure a run")
        return self


class PlotConfig(Strict):
    """`params/plots/<name>.yaml`."""

    study: str
    part: str = "train"
    plots: list[Plot] = Field(min_length=1)


def load_plots(root: Path, name: str) -> PlotConfig:
    """The plot configuration called `name` in params/plots, or the YAML file at that path."""
    folder = root / "params" / "plots"
    is_file = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_file else folder / f"{name}.yaml"
    if not is_file and not path.exists():
        known = sorted(file.stem for file in folder.glob("*.yaml"))
        raise UserError(f"unknown plot configuration {name!r}{hint(name, known)}; or a YAML file")
    return validated(PlotConfig, load_yaml(path), name)


def draw(plot: Plot, runs: pd.DataFrame) -> Figure | None:
    """The plot of one machine's runs (rows of `lab.load`); None if none of them has the metric.

    UserError for a variant that the runs do not have.
    """
    good = runs[runs["outcome"] == "ok"]
    known = list(runs["variant"].unique())
    for variant in plot.variants:
        if variant not in known:
            raise UserError(f"plot {plot.name}: no run of {variant!r}{hint(variant, known)}")
    wanted = good[good["variant"].isin(plot.variants)] if plot.variants else good
    fig, axes = plt.subplots(figsize=(6.3, 2.9))
    if not (_bars if plot.kind == "bar" else _lines)(axes, plot, wanted):
        plt.close(fig)
        return None
    axes.set_title(plot.title)
    return fig


def _bars(axes: Axes, plot: Plot, runs: pd.DataFrame) -> bool:
    if plot.metric not in runs or runs[plot.metric].isna().all():
        return False
    groups = runs.dropna(subset=[plot.metric]).groupby("label", sort=False)[plot.metric]
    for place, (label, found) in enumerate(groups):
        values = found.astype(float) * plot.factor
        value = over_repeats(plot.metric, values)
        axes.barh(str(label), value, color=PALETTE[place % len(PALETTE)])
        axes.plot([values.min(), values.max()], [place, place], color="black", linewidth=1)
        axes.annotate(f" {shown(value)}", (values.max(), place), va="center", fontsize=8.5)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel=_axis(plot), xscale="log" if plot.log else "linear")
    axes.grid(axis="y", visible=False)
    return True


def _lines(axes: Axes, plot: Plot, runs: pd.DataFrame) -> bool:
    column, name, factor = _AGAINST[plot.against]
    drawn = 0
    for _, row in runs.drop_duplicates("variant").iterrows():
        rows = steps(row)
        if not {plot.metric, column} <= {*rows}:
            continue
        if plot.steady and "steady" in rows:
            rows = rows[rows["steady"].astype(bool)]
        values = rows[plot.metric].rolling(plot.smooth, min_periods=1).mean() * plot.factor
        style = series_style(drawn) | {"marker": ""}
        axes.plot(rows[column] * factor, values, label=row["label"], **style)
        drawn += 1
    axes.set(xlabel=name, ylabel=_axis(plot), yscale="log" if plot.log else "linear")
    axes.figure.legend(loc="outside lower center", ncols=4)
    return drawn > 0


def _axis(plot: Plot) -> str:
    return f"{plot.label} ({plot.unit})" if plot.unit else plot.label


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `<name>.png` and `<name>.svg` and close the figure; UserError if the folder cannot be
    written."""
    paths = [folder / f"{name}.{end}" for end in ("png", "svg")]
    try:
        for path in paths:
            with atomic_writer(path) as file:
                options: dict[str, Any] = {"format": path.suffix[1:], "dpi": PNG_DPI}
                figure.savefig(file, bbox_inches="tight", **options)
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; choose another --out"
        ) from None
    finally:
        plt.close(figure)
    return paths
