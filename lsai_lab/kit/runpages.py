"""Each run's own page, the list of all runs, and the table of predictions, by one template (`reports/run.html`), everything escaped."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import pandas as pd

from lsai_core.errors import UserError
from lsai_core.files import flatten, write_text
from lsai_core.profiling.predict.prediction import PARTS
from lsai_lab.kit.show import shown
from lsai_lab.predicted import table_path
from lsai_lab.runs.records import Run

# What a reader looks for first, the first of these that a run has.
_MAIN = ("tokens_per_s", "largest_batch", "largest_size", "validation_loss", "bf16_tflops")


def write_run_pages(runs: Sequence[Run], reports: Path) -> None:
    """Write `runs/index.html`, `runs/fits.html` and `runs/<study>/<run>.html` below `reports`, anew.

    A run whose record is damaged is listed as that; the others go on.
    """
    template = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(reports)).get_template("run.html")
    folder, rows, facts = reports / "runs", [], {}
    shutil.rmtree(folder, ignore_errors=True)
    for run in runs:
        summary, name = run.summary, f"{run.folder.parent.name}/{run.folder.name}"
        results, outcome = summary.results, str(summary.outcome)
        try:
            sections, charts = _sections(run), _charts(run.metrics)
            plain = {key: value for key, value in results.items() if not isinstance(value, (list, dict))}
            named = {"result": plain, "config": flatten(run.config), "env": flatten(run.env)}
            facts[name] = {"outcome": outcome} | {f"{kind}: {k}": f"{v:.6g}" if isinstance(v, float) else str(v) for kind, d in named.items() for k, v in d.items()}  # fmt: skip
        except (OSError, ValueError, UserError) as error:
            outcome, sections, charts = f"damaged record: {error}"[:300], {}, []
        title = f"{summary.id.study}: {summary.id.name}"
        text = template.render(title=title, up="../../", run=run, outcome=outcome, sections=sections, charts=charts)
        write_text(folder / f"{name}.html", text)
        main = next((f"{shown(results[key])} {key}" for key in _MAIN if results.get(key) is not None), "")
        rows.append([name, quote(f"{name}.html"), summary.id.study, summary.id.name,
                     [run.machine, outcome, main, f"{summary.wall_s:.0f}", summary.started[:10]]])  # fmt: skip
    write_text(folder / "index.html", template.render(title="All runs", up="../", rows=rows, facts=facts))
    if (path := table_path(reports.parent)).exists():
        table = pd.read_csv(path).drop(columns=[*PARTS, "tokens_per_s"], errors="ignore")
        text = template.render(title="Will it fit?", up="../", sections={"Every prediction": _rows(table)})
        write_text(folder / "fits.html", text)


def _sections(run: Run) -> dict[str, list[list[str]]]:
    """Everything that is known of a run, as tables by heading."""
    tables = {key: pd.DataFrame(value) for key, value in run.summary.results.items() if _is_rows(value)}
    plain = {key: value for key, value in run.summary.results.items() if not _is_rows(value)}
    pairs = {"Results": plain, **tables, "Configuration": flatten(run.config), "Environment": flatten(run.env), "Code": run.summary.code}  # fmt: skip
    if "loss" not in run.metrics and len(run.metrics) <= 400:  # points of a bench; training steps are in the charts
        pairs["Measurements"] = run.metrics
    pairs["Kernels with the most time"] = run.kernels.head(20)
    return {name: _rows(value) for name, value in pairs.items() if len(value)}


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _rows(value: Any) -> list[list[str]]:
    if isinstance(value, dict):
        value = pd.DataFrame(value.items(), columns=["key", "value"], dtype=object)
    return [[shown(cell) for cell in row] for row in (value.columns, *value.itertuples(index=False))]


def _charts(metrics: pd.DataFrame) -> list[tuple[str, str, float, float]]:
    """Lines over the steps as points of an SVG of 640 x 180: name, points, smallest and largest value."""
    charts = []
    for name in {"loss", "tokens_per_s"} & set(metrics.columns):
        values = pd.to_numeric(metrics[name]).dropna().reset_index(drop=True)
        values = values[:: max(1, len(values) // 400)]
        if len(values) > 1:
            low, high = values.min(), values.max()
            x, y = values.index / values.index.max() * 628 + 6, 155 - (values - low) / ((high - low) or 1) * 130
            charts.append((name, " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)), low, high))
    return sorted(charts)
