"""Each run's own page, and the list of all runs, by one template (`reports/run.html`): milliseconds a page, everything escaped."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from lsai_core.errors import UserError
from lsai_core.files import flatten
from lsai_lab.kit.bind import write_if_changed
from lsai_lab.runs.records import Run

# What a reader looks for first, the first of these that a run has.
_MAIN = ("tokens_per_s", "largest_batch", "largest_size", "validation_loss", "bf16_tflops")
_CHARTS = (("loss", "nats per token"), ("tokens_per_s", "tokens/s"))


def write_run_pages(runs: Sequence[Run], reports: Path) -> None:
    """Write `runs/index.html` and `runs/<study>/<run>.html` below `reports`; pages of runs that are gone are removed.

    A run whose record is damaged is listed as that; the others go on.
    """
    template = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(reports)).get_template("run.html")
    folder, rows, data, kept = reports / "runs", [], {}, set()
    for run in runs:
        summary, name = run.summary, f"{run.summary.id.study}/{run.folder.name}"
        page = folder / run.folder.parent.name / f"{run.folder.name}.html"
        row = {"name": name, "study": summary.id.study, "run": summary.id.name, "machine": run.machine,
               "outcome": summary.outcome, "result": _main_result(summary.results), "seconds": f"{summary.wall_s:.0f}",
               "started": summary.started[:10], "page": quote(f"{page.parent.name}/{page.name}")}  # fmt: skip
        try:
            text = template.render(title=f"{summary.id.study}: {summary.id.name}", up="../../", **_page(run))
            data[name] = _facts(run)
        except (OSError, ValueError, UserError) as error:
            row["outcome"] = f"damaged record: {error}"[:300]
            text = template.render(title=name, up="../../", run=run, charts=[], sections=[("Damaged", [("error",), (str(error),)])])  # fmt: skip
        rows.append(row)
        kept.add(page)
        write_if_changed(page, text)
    write_if_changed(folder / "index.html", template.render(title="All runs", up="../", rows=rows, data=data))
    for page in set(folder.glob("*/*.html")) - kept:
        page.unlink()
    for empty in [path for path in folder.iterdir() if path.is_dir() and not any(path.iterdir())]:
        shutil.rmtree(empty)


def _page(run: Run) -> dict[str, Any]:
    metrics = run.metrics
    charts = [chart for name, unit in _CHARTS if name in metrics and (chart := _chart(name, unit, list(metrics[name])))]
    tables = [(key, rows) for key, rows in run.summary.results.items() if _is_rows(rows)]
    sections = [
        ("Results", _pairs({k: v for k, v in run.summary.results.items() if not _is_rows(v)}, "result")),
        *[(key, [tuple(rows[0]), *[tuple(map(_text, row.values())) for row in rows]]) for key, rows in tables],
        ("Configuration", _pairs(flatten(run.config), "key")),
        ("Environment", _pairs(flatten(run.env), "fact")),
        ("Code", _pairs(run.summary.code, "fact")),
        ("Measurements", _steps(metrics)),
        ("Kernels with the most time", _frame(run.kernels.head(20))),
    ]
    return {"run": run, "charts": charts, "sections": sections}


def _facts(run: Run) -> dict[str, Any]:
    """What two runs are compared by."""
    results = {key: value for key, value in run.summary.results.items() if not isinstance(value, (list, dict))}
    return {
        "outcome": run.summary.outcome,
        **{f"result: {key}": value for key, value in results.items()},
        **{f"config: {key}": _plain(value) for key, value in flatten(run.config).items()},
        **{f"env: {key}": _plain(value) for key, value in flatten(run.env).items()},
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool)) or value is None else str(value)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _main_result(results: dict[str, Any]) -> str:
    return next((f"{_text(results[name])} {name}" for name in _MAIN if results.get(name) is not None), "")


def _pairs(values: dict[str, Any], head: str) -> list[tuple[str, ...]]:
    rows = [(key, _text(value)) for key, value in values.items() if value not in (None, "", {}, [])]
    return [(head, "value"), *rows] if rows else []


def _frame(frame: Any) -> list[tuple[str, ...]]:
    return [tuple(map(str, frame.columns)), *[tuple(map(_text, row)) for row in frame.itertuples(index=False)]] if len(frame) else []  # fmt: skip


def _steps(metrics: Any) -> list[tuple[str, ...]]:
    """The points of a run that measured points; of a training run, every step would be too many and the charts show them."""
    return [] if "loss" in metrics or len(metrics) > 400 else _frame(metrics)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:,.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return str(value)


def _chart(name: str, unit: str, values: list[Any]) -> tuple[str, str, str, str, str] | None:
    """A line over the steps as points of an SVG of 640 x 180; at most 400 points."""
    numbers = [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
    numbers = numbers[:: max(1, len(numbers) // 400)]
    if len(numbers) < 2:
        return None
    low, high = min(numbers), max(numbers)
    step, scale = 628 / (len(numbers) - 1), 130 / ((high - low) or 1)
    points = " ".join(f"{6 + i * step:.1f},{155 - (v - low) * scale:.1f}" for i, v in enumerate(numbers))
    return name, unit, points, _text(low), _text(high)
