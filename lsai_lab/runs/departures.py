"""In which settings a run departs from what its study plans, whatever other runs there are."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.config.strict import flatten
from lsai_lab.runs.difference import planned_profile
from lsai_lab.runs.records import Run
from lsai_lab.runs.session import Session, usual_profile
from lsai_lab.runs.study import Study, resolve

GONE = "no such variant now"


def departures(runs: Iterable[Run], session: Session) -> dict[Path, list[str]]:
    """What sets each run's config apart from that of its study's variant under its profile, in
    words (`optim.lr=0.001`), the seed left out, and the profile, where it is not the usual one of
    the run's machine. Empty: as planned. What only the record or only today's study has is no
    difference. What fewest of these runs have stands first."""
    usual_of = functools.cache(functools.partial(usual_profile, session))
    study_of = functools.cache(functools.partial(_study, session))

    @functools.cache
    def planned(profile: str, study: str, variant: str, part: str) -> dict[str, Any] | None:
        return _planned(session.root, study_of(profile, study), variant, part)

    found = {}
    for run in runs:
        which, usual = run.summary.id, usual_of(run.env.get("gpu"))
        profile = planned_profile(run) or usual
        told = [f"profile={profile}"] if profile != usual else []
        settings = planned(profile, which.study, which.variant, which.part)
        found[run.folder] = told + _apart(run.config, settings)
    numbers = Counter(itertools.chain(*found.values()))
    return {folder: sorted(said, key=numbers.__getitem__) for folder, said in found.items()}


def _apart(config: dict[str, Any], planned: dict[str, Any] | None) -> list[str]:
    if planned is None:
        return [GONE]
    return [
        f"{key}={value!r}"
        for key, value in flatten(config).items()
        if key in planned and key != "seed" and planned[key] != value
    ]


def _study(session: Session, profile: str, name: str) -> Study | None:
    """A study under a profile; None if there is none such any more."""
    try:
        return Session(profile, session.root).study(name)
    except UserError:
        return None


def _planned(root: Path, study: Study | None, variant: str, part: str) -> dict[str, Any] | None:
    """The settings by dotted key as a record would have them; None where the study plans no such
    run any more."""
    if study is None or variant not in study.variants or part not in study.parts:
        return None
    try:
        config = resolve(study, variant, part, 0, {}, root)
    except UserError:
        return None
    return flatten(config.model_dump(mode="json"))
