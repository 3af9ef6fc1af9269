"""Each run's own page, the list of all, and what fits: by one template (`reports/run.html`),
escaped."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from lsai_core.base.errors import UserError
from lsai_core.base.files import write_text
from lsai_core.config.strict import flatten
from lsai_lab.predictions.recorded import table_path
from lsai_lab.report.brand import write_colors
from lsai_lab.report.explore import fits
from lsai_lab.report.explore.scripts import write_page_files
from lsai_lab.report.step import SNAPSHOT, TRACE, pictures
from lsai_lab.report.unchanged import code_files, files_state, is_as
from lsai_lab.report.values import shown
from lsai_lab.runs.pages import page_name
from lsai_lab.runs.records import Run
from lsai_lab.runs.study import labels

_RESULT = {
    "tokens_per_s": "tokens/s",
    "largest_batch": "sequences",
    "parameters": "parameters",
    "square_bf16_tflops": "TFLOP/s",
}
_NOISE = re.compile(
    r"_(p\d+|min|max|mean)$|(up|train|step|ing|search)_s$|^host$|command|uuid|load_|cores|neigh|timed"
)
_UNITS = {
    "gib": "GiB",
    "mib": "MiB",
    "ms": "ms",
    "s": "s",
    "w": "W",
    "mhz": "MHz",
    "tflops": "TFLOP/s",
}
_TICK = Markup('<input type="checkbox" data-run="{0}" data-name="{1}" aria-label="compare {1}">')
_LINK = Markup('<a href="{}.html">{}</a>')


def write_run_pages(runs: Sequence[Run], reports: Path) -> None:
    """Write `runs/index.html`, `runs/fits.html` and each run's page, all anew if anything of them
    changed; a run with a damaged record is listed as that. Their colours go to `colors.css`."""
    write_colors(reports)
    write_page_files("fits", fits.data(reports.parent), reports / "explore")
    of_runs = [file for run in runs for file in run.folder.iterdir()]
    params = (reports.parent / "params").rglob("*.yaml")
    predicted = (reports / "recorded" / "predictions").glob("*.*")
    others = [reports / "run.html", *params, *predicted, *code_files()]
    state = files_state([*of_runs, *others], [str(run.folder) for run in runs])
    stamp = reports / "_build" / "made.runs"
    if is_as(stamp, state, [reports / "runs" / "index.html"]):
        return
    environment = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(reports))
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # in the order given
    template = environment.get_template("run.html")

    def write(name: str, title: str, tables: dict[str, pd.DataFrame], **facts: Any) -> None:
        up = "../" * name.count("/")
        write_text(
            reports / name, template.render(title=title, up=up, tables=tables, shown=shown, **facts)
        )

    shutil.rmtree(reports / "runs", ignore_errors=True)
    rows, known = [], {}
    for run in runs:
        name, title, (pairs, frames) = page_name(run.folder), _title(run, reports), _content(run)
        tables = {
            head: pd.DataFrame(values.items(), columns=["key", "value"])
            for head, values in {**pairs, "Run": _about(run)}.items()
        }
        write(
            f"runs/{name}.html", f"{run.summary.id.study}: {title}", tables | frames, **_step(run)
        )
        known[name] = {
            head: {
                _spoken(key): _grouped(value)
                for key, value in values.items()
                if not _NOISE.search(key)
            }
            for head, values in pairs.items()
        }
        rows.append(_row(run, name, title, pairs))
    rows.sort(key=lambda row: row["outcome"] != "ok")
    table = pd.DataFrame(rows, dtype=object)
    write("runs/index.html", "All runs", {"Runs": table}, facts={"runs": known})
    if (path := table_path(reports.parent)).exists():
        table = pd.read_csv(path).loc[:, lambda rows: rows.ne(0).any()]
        heading = "All predictions (GiB by cause)"
        write("runs/fits.html", "Will it fit?", {heading: table}, explore="fits")
    write_text(stamp, state)


def _spoken(key: str) -> str:
    """The name of a column in words, its unit in brackets."""
    stem, _, unit = key.replace("_per_s", "/s").rpartition("_")
    words = f"{stem} ({_UNITS[unit]})" if stem and unit in _UNITS else key.replace("_per_s", "/s")
    return re.sub(r"[_.]", " ", words)


def _grouped(value: Any) -> str:
    """A value as a page shows it, thousands set apart."""
    words = str(shown(value))
    return f"{int(words):,}" if re.fullmatch(r"\d{4,15}", words) else words


def _step(run: Run) -> dict[str, Any]:
    """The timeline of a step, for a run that has a trace or a snapshot of it."""
    if run.summary.outcome == "damaged" or not any(
        (run.folder / name).exists() for name in (TRACE, SNAPSHOT)
    ):
        return {}
    try:
        return {"timeline": [Markup(picture) for picture in pictures(run)]}
    except UserError as error:
        return {"timeline": [str(error)]}


def _about(run: Run) -> dict[str, Any]:
    """How the run was planned and done."""
    about = {"machine": run.machine, **vars(run.summary.id), **vars(run.summary)}
    left_out = ("id", "code", "results", "outcome", "reason")
    return {key: value for key, value in about.items() if key not in left_out}


def _title(run: Run, reports: Path) -> str:
    of = run.summary.id
    parts = [of.part] * (of.part != "train") + [f"repeat {of.repeat}"] * (of.repeat > 0)
    return ", ".join([labels(reports.parent, of.study).get(of.variant, run.label), *parts])


def _content(run: Run) -> tuple[dict[str, dict[str, Any]], dict[str, pd.DataFrame]]:
    """Mappings and tables of a run's page, each by its heading; of a damaged record what can be
    read, with the reason."""
    results = run.summary.results
    end: dict[str, Any] = {"outcome": run.summary.outcome, "reason": run.summary.reason}
    pairs, frames = {"Results": end}, {}
    try:
        frames = {
            key: pd.DataFrame(value) for key, value in results.items() if isinstance(value, list)
        }
        last = sorted(results, key=lambda key: bool(_NOISE.search(key)))  # what few look for
        end |= {key: results[key] for key in last if key not in frames}
        pairs |= {
            "Configuration": flatten(run.config),
            "Environment": flatten(run.env),
            "Code": run.summary.code,
        }
        # some 40 steps are shown; of a bench all points
        steps = len(run.metrics) if "loss" in run.metrics else 0
        frames |= {
            "Measurements": run.metrics[:: max(1, steps // 40)],
            "Longest kernels": run.kernels[:20],
        }
    except (OSError, ValueError, TypeError, AttributeError, UserError) as error:
        end["outcome"] = f"damaged record: {error}"[:300]
    return pairs, frames


def _row(run: Run, name: str, title: str, pairs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The run's row in the list of all."""
    summary, results = run.summary, run.summary.results
    gpu = str(pairs.get("Environment", {}).get("gpu") or "no GPU").removeprefix("NVIDIA ")
    figures = (
        f"{results[key]:,.0f} {unit}"
        for key, unit in _RESULT.items()
        if isinstance(results.get(key), (int, float))
    )
    return {
        "compare": _TICK.format(name, f"{summary.id.study}: {title} ({run.machine})"),
        "study": summary.id.study,
        "run": _LINK.format(name, title),
        "result": next(figures, ""),
        "machine": f"{run.machine} ({gpu})",
        "GPUs": results.get("world_size"),
        "outcome": pairs["Results"]["outcome"],
        "minutes": f"{summary.wall_s / 60:.1f}",
        "day": summary.started[:10],
    }
