"""Runs by hand: what a run notebook calls when a person opened it instead of the driver."""

from __future__ import annotations

from lsai_core.files import repo_root
from lsai_core.runs.execute import ActiveRun, write_plan
from lsai_core.runs.session import Session


def open_run(folder: str, data_root: str, *, study: str, variant: str, part: str, profile: str) -> ActiveRun:
    """The run that the driver planned in `folder`; with an empty `folder`, a small one planned here and now.

    Relative folders are seen from the project's root, wherever the notebook is open.
    """
    session = Session(profile)
    root = repo_root()
    if folder:
        return ActiveRun(root / folder, root / data_root)
    planned = session.plan(study, only=[variant], parts=[part])[0]
    if not (planned.folder / "summary.json").exists():
        write_plan(planned, f"notebook, study {study}, variant {variant}, part {part}, profile {profile}")
    return ActiveRun(planned.folder, session.data_root)
