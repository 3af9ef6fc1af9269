"""Each run's own page, the list of all, and what fits: by one template (`reports/run.html`),
escaped."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from lsai_core.base.errors import UserError
from lsai_core.base.files import flatten, write_text
from lsai_core.prediction import GPUS
from lsai_core.prediction.memory import OUTSIDE_GIB, PARTS, usable_gib
from lsai_lab.predictions.recorded import table_path
from lsai_lab.report.style import PALETTE
from lsai_lab.report.values import shown
from lsai_lab.runs.records import Run, page_name
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
_TICK = Markup('<input type="checkbox" data-run="{0}" data-name="{1}" aria-label="compare {1}">')
_LINK = Markup('<a href="{}.html">{}</a>')


def write_run_pages(runs: Sequence[Run], reports: Path) -> None:
    """Write `runs/index.html`, `runs/fits.html` and each run's page anew; a run with a damaged
    record is listed as that."""
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
        of, name = run.summary.id, page_name(run.folder)
        about = {"machine": run.machine, **vars(of), **vars(run.summary)}
        del about["id"], about["code"]
        results, end = about.pop("results"), {key: about.pop(key) for key in ("outcome", "reason")}
        pairs, frames = {"Results": end}, {}
        try:
            # some 40 are shown; of a bench all points
            steps = len(run.metrics) if "loss" in run.metrics else 0
            frames = {
                key: pd.DataFrame(value)
                for key, value in results.items()
                if isinstance(value, list)
            }
            last = sorted(results, key=lambda key: bool(_NOISE.search(key)))  # what few look for
            end |= {key: results[key] for key in last if key not in frames}
            pairs |= {
                "Configuration": flatten(run.config),
                "Environment": flatten(run.env),
                "Code": run.summary.code,
            }
            frames |= {
                "Measurements": run.metrics[:: max(1, steps // 40)],
                "Longest kernels": run.kernels[:20],
            }
        except (OSError, ValueError, TypeError, AttributeError, UserError) as error:
            end["outcome"] = f"damaged record: {error}"[:300]
        parts = [of.part] * (of.part != "train") + [f"repeat {of.repeat}"] * (of.repeat > 0)
        title = ", ".join([labels(reports.parent, of.study).get(of.variant, of.variant), *parts])
        every = {**pairs, "Run": about}
        tables = {
            head: pd.DataFrame(of.items(), columns=["key", "value"]) for head, of in every.items()
        }
        write(f"runs/{name}.html", f"{of.study}: {title}", tables | frames)
        known[name] = {
            head: {k: shown(v) for k, v in of.items() if not _NOISE.search(k)}
            for head, of in pairs.items()
        }
        gpu = str(pairs.get("Environment", {}).get("gpu") or "no GPU").removeprefix("NVIDIA ")
        rows.append(
            {
                "compare": _TICK.format(name, f"{of.study}: {title} ({run.machine})"),
                "study": of.study,
                "run": _LINK.format(name, title),
                "result": next(
                    (
                        f"{results[key]:,.0f} {unit}"
                        for key, unit in _RESULT.items()
                        if isinstance(results.get(key), (int, float))
                    ),
                    "",
                ),
                "machine": f"{run.machine} ({gpu})",
                "GPUs": results.get("world_size"),
                "outcome": end["outcome"],
                "minutes": f"{about['wall_s'] / 60:.1f}",
                "day": about["started"][:10],
            }
        )
    rows.sort(key=lambda row: row["outcome"] != "ok")
    write(
        "runs/index.html",
        "All runs",
        {"Runs": pd.DataFrame(rows, dtype=object)},
        facts={"runs": known},
    )
    if (path := table_path(reports.parent)).exists():
        table = pd.read_csv(path).loc[:, lambda rows: rows.ne(0).any()]
        known = json.loads(table.to_json(orient="split", index=False))
        gpus = {gpu.name: asdict(gpu) | {"usable": usable_gib(gpu)} for gpu in GPUS}
        causes = dict(
            zip([*PARTS, "unused reserve"], (*PALETTE, "#777777", "#d3d9e0"), strict=True)
        )
        facts = {**known, "gpus": gpus, "causes": causes, "outside": OUTSIDE_GIB}
        write(
            "runs/fits.html", "Will it fit?", {"All predictions (GiB by cause)": table}, facts=facts
        )
