"""Which records a chapter speaks of: the reader's own runs, and the committed ones of machines the reader does not have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lsai_lab.runs.records import Run, find_runs, recorded_runs

OWN = "this machine"


def select_runs(study: str | None, runs_root: Path, reports: Path, own: Sequence[str] = ()) -> list[Run]:
    """The runs of `study` (None: of all): own ones first, each machine's in the order they were started.

    `own` names the folders of the runs that belong to this report (`<study>/<run>` below `runs_root`); without it the newest
    run of each variant, part and repeat is taken. A run that is also committed appears once, as committed.
    """
    committed = recorded_runs(reports)
    # By name and key: a run that two studies share may be committed for one of them only.
    there = {_name(run) for run in committed}
    mine = [run for run in find_runs(runs_root) if _name(run) not in there and run.summary.outcome != "damaged"]
    if own:
        names = set(own)
        mine = [run for run in mine if _name(run) in names]
    else:
        mine = newest(mine)
    for run in mine:
        run.machine = f"{run.machine} ({OWN})"
    return [run for run in (*mine, *committed) if study in (None, run.summary.id.study)]


def _name(run: Run) -> str:
    return f"{run.summary.id.study}/{run.folder.name}"


def newest(runs: Sequence[Run]) -> list[Run]:
    """The newest run of each study, variant, part and repeat, in the order they were started."""
    found = {}
    for run in sorted(runs, key=lambda run: run.summary.started):
        found[(*run.summary.id.__dict__.values(),)[:4]] = run
    return list(found.values())
