"""Each run's own page, the list of all runs, and the table of predictions, by one template (`reports/run.html`), everything escaped."""

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
_COMPARED = ("Run", "Results", "Configuration", "Environment")  # of two runs side by side
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
        about = {"machine": run.machine, "outcome": summary.outcome, "reason": summary.reason, "started": summary.started[:10],
                 "seconds": round(summary.wall_s), "key": summary.id.key, "measured as": summary.measured_as, "command": summary.command}  # fmt: skip
        try:
            tables = _tables(run)
        except (OSError, ValueError, UserError) as error:
            tables, about["outcome"] = {}, f"damaged record: {error}"[:300]
        tables = {"Run": _pairs({key: value for key, value in about.items() if value}), **tables}
        title = f"{summary.id.study}: {summary.id.name}"
        write_text(folder / f"{name}.html", template.render(title=title, up="../../", tables=tables))
        named = {heading: tables[heading].to_numpy() for heading in _COMPARED if heading in tables}
        facts[name] = {f"{heading}: {key}": shown(value) for heading, pairs in named.items() for key, value in pairs}
        main = next(
            (f"{shown(summary.results[key])} {key}" for key in _MAIN if summary.results.get(key) is not None), ""
        )
        shortly = {key: about[key] for key in ("machine", "outcome", "seconds", "started")}
        rows.append(
            {"compare": _TICK.format(name), "run": _LINK.format(quote(name), title), "main result": main, **shortly}
        )
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
