"""Each run's own page, the list of all runs, and the table of predictions, by one template (`reports/run.html`), everything escaped."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup

from lsai_core.errors import UserError
from lsai_core.files import flatten, write_text
from lsai_core.profiling.predict.prediction import PARTS
from lsai_lab.kit.show import shown
from lsai_lab.predicted import table_path
from lsai_lab.runs.records import Run

STEPS = 40  # of a training run that its page shows, evenly spread
# What a reader looks for first, the first of these that a run has.
_MAIN = ("tokens_per_s", "largest_batch", "largest_size", "validation_loss", "bf16_tflops")
_TICK = Markup('<input type="checkbox" data-run="{0}" aria-label="compare {0}">')
_LINK = Markup('<a href="{}.html">{}</a>')


def write_run_pages(runs: Sequence[Run], reports: Path) -> None:
    """Write `runs/index.html`, `runs/fits.html` and `runs/<study>/<run>.html` below `reports`, anew.

    A run whose record is damaged is listed as that; the others go on.
    """
    pages = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(reports))
    pages.filters["shown"] = lambda value: value if isinstance(value, Markup) else shown(value)
    template, folder, rows, facts = pages.get_template("run.html"), reports / "runs", [], {}
    shutil.rmtree(folder, ignore_errors=True)
    for run in runs:
        summary, name = run.summary, f"{run.folder.parent.name}/{run.folder.name}"
        try:
            tables, outcome, result = _tables(run), str(summary.outcome), summary.results
            named = {"result": result, "config": flatten(run.config), "env": flatten(run.env)}
            facts[name] = {"outcome": outcome}
            facts[name] |= {f"{kind}: {key}": shown(value) for kind, each in named.items() for key, value in each.items() if not _is_rows(value)}  # fmt: skip
        except (OSError, ValueError, UserError) as error:
            tables, outcome, result = {}, f"damaged record: {error}"[:300], {}
        about = {"machine": run.machine, "outcome": outcome, "reason": summary.reason, "started": summary.started[:16], "seconds": round(summary.wall_s),
                 "key": summary.id.key, "measured as": summary.measured_as, "command": summary.command}  # fmt: skip
        tables = {"Run": _pairs({key: value for key, value in about.items() if value}), **tables}
        page = template.render(title=f"{summary.id.study}: {summary.id.name}", up="../../", tables=tables)
        write_text(folder / f"{name}.html", page)
        main = next((f"{shown(result[key])} {key}" for key in _MAIN if result.get(key) is not None), "")
        link = _LINK.format(quote(name), summary.id.name)
        rows.append({"compare": _TICK.format(name), "study": summary.id.study, "run": link, "machine": run.machine, "outcome": outcome,
                     "main result": main, "seconds": round(summary.wall_s), "started": summary.started[:10]})  # fmt: skip
    tables = {"Runs": pd.DataFrame(rows, dtype=object)}  # whose links stay markup
    write_text(folder / "index.html", template.render(title="All runs", up="../", tables=tables, facts=facts))
    if (path := table_path(reports.parent)).exists():
        tables = {"Every prediction": pd.read_csv(path).drop(columns=[*PARTS, "tokens_per_s"], errors="ignore")}
        write_text(folder / "fits.html", template.render(title="Will it fit?", up="../", tables=tables))


def _tables(run: Run) -> dict[str, pd.DataFrame]:
    """Everything that is known of a run, as tables by heading."""
    steps = len(run.metrics) if "loss" in run.metrics else 0  # points of a bench are all shown
    results = run.summary.results
    tables = {
        "Results": _pairs({key: value for key, value in results.items() if not _is_rows(value)}),
        **{key: pd.DataFrame(value) for key, value in results.items() if _is_rows(value)},
        "Configuration": _pairs(flatten(run.config)), "Environment": _pairs(flatten(run.env)), "Code": _pairs(run.summary.code),
        "Measurements": run.metrics.iloc[:: max(1, steps // STEPS)], "Kernels with the most time": run.kernels.head(20),
    }  # fmt: skip
    return {heading: table for heading, table in tables.items() if len(table)}


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _pairs(values: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(values.items(), columns=["key", "value"], dtype=object)
