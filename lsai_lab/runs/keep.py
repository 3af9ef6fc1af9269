"""Keep finished runs: copy their records into `reports/recorded/<machine>/`, which is committed and ships with the report."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat

from lsai_lab.runs.records import Run

# What a record consists of; locks, logs, checkpoints and traces stay behind.
KEPT = ("config.json", "env.json", "run.json", "metrics.jsonl", "kernels.json", "summary.json", "notebook.ipynb")


def record_runs(runs: list[Run], reports: Path, machine: str | None = None) -> list[Path]:
    """Copy `runs` below `reports/recorded/`, each under its own machine's label or `machine`; returns the new folders.

    A run that is there already is left as it is. Its summary is copied last, so an interrupted copy is not yet a record.
    """
    made = []
    for run in runs:
        target = reports / "recorded" / (machine or run.machine) / run.summary.id.study / run.folder.name
        if (target / "summary.json").exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
        for name in sorted(KEPT, key=lambda name: name == "summary.json"):
            if not (run.folder / name).exists():
                continue
            if name.endswith(".ipynb"):
                _copy_notebook(run.folder / name, target / name)
            else:
                shutil.copy2(run.folder / name, target / name)
        made.append(target)
    return made


def _copy_notebook(source: Path, target: Path) -> None:
    """Copy an executed notebook with every figure once (where there is an SVG, its bitmap twin is left out: half the size) and
    without the folders of the machine that it ran on."""
    notebook = nbformat.read(source, as_version=4)  # type: ignore[no-untyped-call]
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/svg+xml" in output.get("data", {}):
                output["data"].pop("image/png", None)
                output["metadata"].pop("image/png", None)
    text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    parameters = notebook.metadata.get("papermill", {}).get("parameters", {})
    folder, data = Path(parameters.get("folder", "")), Path(parameters.get("data_root", ""))
    for place, name in ((folder.parent.parent, "runs"), (data, "data")):
        if place.is_absolute():
            text = text.replace(str(place), name)
    target.write_text(text + "\n")
