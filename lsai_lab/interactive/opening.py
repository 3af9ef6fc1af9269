"""`lab.open_run`: a run of one's own, planned here and now, or the one that a driver planned."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError, hint
from lsai_core.config.strict import Strict, changed_settings, validated
from lsai_lab.interactive.planning import about, as_mapping, as_nested, first_part
from lsai_lab.interactive.run import Run
from lsai_lab.project.files import repo_root
from lsai_lab.runs.execute import write_plan
from lsai_lab.runs.find import begun, given_names, has_begun, opened
from lsai_lab.runs.records import call, is_finished
from lsai_lab.runs.session import Session
from lsai_lab.runs.writer import require_runs


class _Parameters(Strict):
    """What a run notebook can be given; papermill itself only warns of names that it does not
    know."""

    folder: str
    study: str
    variant: str
    part: str
    profile: str | None
    overrides: dict[str, Any]


def open_run(
    study: str | Strict,
    variant: str = "",
    *,
    folder: str = "",
    part: str = "",
    profile: str | None = None,
    overrides: Mapping[str, Any] | Strict | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    note: str | None = None,
) -> Run:
    """A run of a study's variant, planned here and now: `lab.open_run("memory", "bf16")`, or
    `lab.open_run("memory.bf16")`. With a `folder`, seen from the project's root, the run that the
    driver planned there.

    `part`: one of the study's; empty: the first that measures `variant`. `profile`: a name in
    params/profiles, `""` or None for this machine's. `overrides` are settings with dots
    (`{"optim.lr": 1e-3}`), as `--set` takes them, for a run planned here, or a whole config, such
    as that of `lab.plan(...)`. `name`, `tags` and `note` are what you call it:
    `lab.find_run(name)`, columns of `lab.load`. A run that is there already keeps its names. A line
    says where an executed run has the name already; the run of a name that started last is meant.

    Raises UserError for a wrong name or value, also of a parameter that papermill passed, and if
    another process is executing the run.

    >>> run = lab.open_run("memory", "bf16", profile="quick", overrides={"optim.lr": 2e-3})
    >>> run.state
    'planned, not yet executed: execute() does the work'
    """
    study, variant = _which(study, variant)
    given = {"folder": folder, "study": study, "variant": variant, "part": part, "profile": profile}
    parameters = validated(_Parameters, {**given, "overrides": as_mapping(overrides)}, "parameters")
    _refuse_unknown_parameters()
    session, called = Session(parameters.profile or None), about(name, tags, note)
    require_runs(session.runs_root)
    if folder:
        return Run(repo_root() / folder)
    described = session.study(study)
    part, changes = part or first_part(described, [variant]), as_nested(parameters.overrides)
    plan = session.plan(study, only=[variant], parts=[part], overrides=changes)
    if not plan:
        known = ", ".join(described.measured(part))
        raise UserError(
            f"part {part} of study {study} does not measure {variant}; it measures {known}"
        )
    if not is_finished(plan[0].folder):
        told = parameters.overrides
        if isinstance(overrides, Strict):  # a whole config: what it changes
            usual = session.plan(study, only=[variant], parts=[part])[0]
            told = changed_settings(usual.config, plan[0].config)
        changed = f", overrides {told}" if told else ""
        where = (
            f"study {study}, variant {variant}, part {part}, profile "
            f"{session.profile.profile}{changed}"
        )
        write_plan(plan[0], f"notebook, {where}")
    _say_whose_name(called.get("name"), plan[0].folder)
    call(plan[0].folder, called)
    return Run(plan[0].folder)


def _which(study: Any, variant: str) -> tuple[str, str]:
    """A study and one of its variants, which `study.variant` names, too. UserError for a config and
    for a study alone."""
    if isinstance(getattr(study, "config", study), Strict):
        raise UserError(
            "a run is of a study's variant, which a config changes: "
            'lab.open_run("memory", "bf16", overrides=config)'
        )
    if variant or not isinstance(study, str):
        return study, variant
    study, _, variant = study.partition(".")
    if not variant:
        raise UserError(
            f"which variant of {study}? lab.open_run({study!r}, variant) takes one of "
            f"{', '.join(Session().study(study).variants)}"
        )
    return study, variant


def _say_whose_name(name: str | None, folder: Path) -> None:
    """Print which other runs that were executed have this name already, and how they stand."""
    for other in begun(folder.parent.parent) if name else []:
        if other != folder and has_begun(other) and name in given_names(other):
            how = opened(other).summary.outcome
            print(f"{name!r} is already {other.name}, {how}; the run that starts last is meant")


def _refuse_unknown_parameters() -> None:
    """UserError if papermill injected a name that the notebook's parameters cell, the one before
    it, does not have."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cells = shell.user_ns.get("In", []) if shell is not None else []
    for before, cell in itertools.pairwise(cells):
        if cell.startswith("# Parameters\n"):
            known, given = (
                re.findall(r"(?m)^(\w+)\s*(?::[^=]*)?=(?!=)", text) for text in (before, cell)
            )
            if unknown := [name for name in given if name not in known]:
                raise UserError(
                    f"the notebook has no parameter {unknown[0]!r}{hint(unknown[0], known)}"
                )
