"""Runs by hand: what a run notebook calls when a person opened it instead of the driver."""

from __future__ import annotations

from typing import Any

from lsai_core.errors import UserError
from lsai_core.files import deep_merge, nested
from lsai_lab.files import repo_root
from lsai_lab.runs.execute import ActiveRun, write_plan
from lsai_lab.runs.session import Session


def open_run(
    folder: str,
    data_root: str,
    *,
    study: str,
    variant: str,
    part: str,
    profile: str | None,
    overrides: dict[str, Any] | None = None,
) -> ActiveRun:
    """The run that the driver planned in `folder`; with an empty `folder`, a small one planned here and now.

    `overrides` are keys of the config with dots (`{"optim.lr": 1e-3}`), as `--set` takes them; they are for runs planned here.
    Relative folders are seen from the project's root, wherever the notebook is open.
    """
    session = Session(profile)
    root = repo_root()
    if folder:
        return ActiveRun(root / folder, root / data_root)
    plan = session.plan(study, only=[variant], parts=[part], overrides=_nested(overrides))
    if not plan:
        known = ", ".join(session.study(study).measured(part))
        raise UserError(f"part {part} of study {study} does not measure {variant}; it measures {known}")
    if not (plan[0].folder / "summary.json").exists():
        changed = f", overrides {overrides}" if overrides else ""
        write_plan(
            plan[0],
            f"notebook, study {study}, variant {variant}, part {part}, profile {session.profile.profile}{changed}",
        )
    return ActiveRun(plan[0].folder, session.data_root)


def _nested(overrides: dict[str, Any] | None) -> dict[str, Any]:
    if not isinstance(overrides or {}, dict):
        raise UserError(f'overrides wants a dict of keys and values, such as {{"optim.lr": 1e-3}}, got {overrides!r}')
    merged: dict[str, Any] = {}
    for key, value in (overrides or {}).items():
        merged = deep_merge(merged, nested(str(key), value))
    return merged
