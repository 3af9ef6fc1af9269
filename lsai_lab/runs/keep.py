"""Keep finished runs: copy their records into `reports/recorded/<machine>/`, which is committed and
ships with the report."""

import json
from pathlib import Path

from lsai_core.base.errors import UserError
from lsai_core.base.files import write_text
from lsai_lab.project.files import named, one_line
from lsai_lab.runs.records import Run

# What a record consists of, in the order in which it is copied; locks, logs, checkpoints and traces
# stay behind.
KEPT = (
    "config.json",
    "env.json",
    "run.json",
    "metrics.jsonl",
    "kernels.json",
    "notebook.ipynb",
    "summary.json",
)


def record_runs(
    runs: list[Run], reports: Path, machine: str | None = None
) -> tuple[list[Path], list[str]]:
    """Copy `runs` below `reports/recorded/`, each under its own machine's label or `machine`.

    Returns the new folders, and of each run that is damaged one line that says how. A run that is
    there already is left as it is; damaged records and links, which may lead anywhere, are not
    copied. Each file is whole or absent, and the summary is the last, so an interrupted copy is no
    record yet. Raises UserError if `machine` is no name.
    """
    try:
        named(machine or "none")
    except ValueError as error:
        raise UserError(f"--machine: {error}") from None
    made, damaged = list[Path](), list[str]()
    for run in runs:
        target = (
            reports / "recorded" / (machine or run.machine) / run.summary.id.study / run.folder.name
        )
        if run.summary.outcome == "damaged":
            damaged.append(str(run.summary.reason))
            continue
        if (target / "summary.json").exists():
            continue
        paths = [
            path
            for path in (run.folder / name for name in KEPT)
            if path.is_file() and not path.is_symlink()
        ]
        try:
            texts = [
                _notebook(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
                for path in paths
            ]
        except (OSError, ValueError) as error:
            damaged.append(one_line(f"{run.folder}: {error}", 300))
            continue
        for path, text in zip(paths, texts, strict=True):
            write_text(target / path.name, text)
        made.append(target)
    return made, damaged


def _notebook(path: Path) -> str:
    """An executed notebook without the folders of the machine that it ran on. ValueError if it is
    none."""
    text = path.read_text(encoding="utf-8")
    try:
        folder = (
            json.loads(text)["metadata"]
            .get("papermill", {})
            .get("parameters", {})
            .get("folder", "")
        )
        runs = Path(folder).parent.parent
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path.name} is no notebook that can be read: {error}") from None
    return text.replace(str(runs), "runs") if runs.is_absolute() and runs != runs.parent else text
