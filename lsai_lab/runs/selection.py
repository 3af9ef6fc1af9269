"""Which runs belong together: those whose key is in the current plan, and the committed ones. Everything else only by name.

A key covers config, code, data and machine, so the runs of a plan are of one setting by construction; a run by hand with another
learning rate, or one of yesterday's code, is none of them. The plan is that of the machine that a run was executed on (a compute node's,
where this is the login node): the profile of its GPU, its fingerprint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from lsai_core.files import flatten
from lsai_lab.runs.records import Run, find_runs
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import detect_profile, load_profile, load_study, plan_study, study_names


def current_runs(session: Session, study: str | None = None) -> list[Run]:
    """The own finished runs of `study` (None: of every study) whose key is in the current plan, in the plan's order.

    With a session whose profile was named, that profile's plan. Nothing is prepared: of a data set that is not there no run can be.
    Raises UserError for an unknown study or a wrong parameter file.
    """
    names = study_names(session.root) if study is None else [study]
    planned: dict[tuple[str, str, str], dict[Path, int]] = {}
    found: list[tuple[int, int, int, Run]] = []
    for number, name in enumerate(names):
        if study is not None:
            load_study(session.root, name, session.profile)
        for run in find_runs(session.runs_root, study=name):
            machine = run.plan.get("machine", "")
            profile = session.profile_name or detect_profile(session.root, run.env.get("gpu"))
            where = (name, profile, machine)
            if where not in planned:
                planned[where] = _folders(session, *where)
            if run.folder in planned[where]:
                found.append((number, list(planned).index(where), planned[where][run.folder], run))
    return [run for *_, run in sorted(found, key=lambda item: item[:3])]


def _folders(session: Session, study: str, profile: str, machine: str) -> dict[Path, int]:
    plan = plan_study(
        load_study(session.root, study, load_profile(session.root, profile)),
        root=session.root,
        runs_root=session.runs_root,
        fingerprint=machine,
        dataset_id=session.prepared_id,
    )
    return {run.folder: number for number, run in enumerate(plan)}


def differing_settings(runs: Iterable[Run]) -> dict[Path, str]:
    """What sets each run's config apart from those of the same study, variant and part (`optim.lr=0.001`), the seed left out.

    Empty where all agree: only such runs may share a row.
    """
    groups = defaultdict(list)
    for run in runs:
        config = {key: repr(value) for key, value in flatten(run.config).items() if key != "seed"}
        groups[run.summary.id.study, run.summary.id.variant, run.summary.id.part].append((run.folder, config))
    texts = {}
    for group in groups.values():
        keys = sorted({key for _, config in group for key in config})
        differ = [key for key in keys if len({config.get(key) for _, config in group}) > 1]
        for folder, config in group:
            texts[folder] = ", ".join(f"{key}={config.get(key, 'not set')}" for key in differ)
    return texts
