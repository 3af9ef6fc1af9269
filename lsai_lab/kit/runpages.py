"""Each run's own page, the list of all, the table of predictions: by one template (`reports/run.html`), escaped."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from lsai_core.errors import UserError
from lsai_core.files import flatten, write_text
from lsai_core.profiling.predict.prediction import PARTS
from lsai_lab.kit.show import bars, shown
from lsai_lab.predicted import TASK, table_path
from lsai_lab.runs.records import Run, page_name

FITS = (
    "Choose a model, its length and each GPU's batch in the heads of the columns, or a GPU and “fits”. Compiled; states are in bf16 unless others are named "
    f"(round bf16 weights stochastically). A bar shows the peak by cause: {', '.join(PARTS)}; point at it. A verdict compares the reserved memory with the "
    "GPU: “tight” leaves less than 3 %; below 5 % try some steps, for predictions err (chapter 10). Speeds are estimates for one H200."
)
STEPS = 40  # of a training run that its page shows, evenly spread
# What a reader looks for first, the first of these that a run has.
_MAIN = ("tokens_per_s", "largest_batch", "largest_size", "validation_loss", "bf16_tflops")
_TICK = Markup('<input type="checkbox" data-run="{0}" aria-label="compare {0}">')
_LINK = Markup('<a href="{}.html">{}</a>')


def write_run_pages(runs: Sequence[Run], reports: Path) -> None:
    """Write `runs/index.html`, `runs/fits.html` and each run's page below `reports`, anew.

    A run whose record is damaged is listed as that; the others go on.
    """
    template = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(reports)).get_template("run.html")

    def write(name: str, title: str, tables: dict[str, pd.DataFrame], **facts: Any) -> None:
        up = "../" * name.count("/")
        write_text(reports / name, template.render(title=title, up=up, tables=tables, shown=shown, **facts))

    shutil.rmtree(reports / "runs", ignore_errors=True)
    rows, facts = [], {}
    for run in runs:
        about = {"machine": run.machine, **vars(run.summary.id), **vars(run.summary)}
        del about["id"], about["code"]
        name, results = page_name(run.folder), about.pop("results")
        pairs, frames = {"Run": about}, {}
        try:
            steps = len(run.metrics) if "loss" in run.metrics else 0  # points of a bench are all shown
            frames = {key: pd.DataFrame(value) for key, value in results.items() if isinstance(value, list)}
            pairs["Results"] = {key: value for key, value in results.items() if key not in frames}
            pairs |= {"Configuration": flatten(run.config), "Environment": flatten(run.env), "Code": run.summary.code}
            frames |= {"Measurements": run.metrics[:: max(1, steps // STEPS)], "Longest kernels": run.kernels[:20]}
        except (OSError, ValueError, TypeError, AttributeError, UserError) as error:
            about["outcome"] = f"damaged record: {error}"[:300]
        tables = {heading: pd.DataFrame(values.items(), columns=["key", "value"]) for heading, values in pairs.items()}
        write(f"runs/{name}.html", title := f"{about['study']}: {run.summary.id.name}", tables | frames)
        facts[name] = {f"{heading}: {key}": shown(value) for heading, of in pairs.items() for key, value in of.items()}
        main = next((f"{shown(results[key])} {key}" for key in _MAIN if results.get(key) is not None), "")
        row = {"compare": _TICK.format(name), "run": _LINK.format(name, title), "main result": main}
        rows.append(row | {key: about[key] for key in ("machine", "outcome", "wall_s", "started")})
    words = "Choose runs by machine or outcome. Tick two of them to see what differs."
    write("runs/index.html", "All runs", {"Runs": pd.DataFrame(rows, dtype=object)}, facts=facts, note=words)
    if (path := table_path(reports.parent)).exists():
        table = pd.read_csv(path)
        table.loc[table["gpus"] > 1, "tokens_per_s"] = None  # estimates for several GPUs are too fast
        table.insert(5, "memory by cause", pd.concat([bars(rows) for _, rows in table.groupby(TASK)[[*PARTS]]]))
        table = table.drop(columns=[*PARTS, "gpus", "GH200-144"])
        names = {"_gib": " (GiB)", "seq_len": "tokens", "_size": "", "tokens_per_s": "tokens/s"}
        table.columns = table.columns.to_series().replace(names, regex=True)
        write("runs/fits.html", "Will it fit?", {"Predictions": table}, note=FITS, chosen={"model": table["model"][0]})
