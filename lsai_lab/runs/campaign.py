"""All runs of the report: what each study plans, and running them in order, as far as a budget of time allows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from lsai_core.errors import UserError, hint
from lsai_core.profiling.limits import cpu_cores
from lsai_lab.runs.driver import is_finished
from lsai_lab.runs.records import find_runs
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import PlannedRun, matching


def plan_studies(
    session: Session, names: Iterable[str], only: list[str], skip: list[str]
) -> Iterator[tuple[str, list[PlannedRun]]]:
    """The planned runs of each study in `names`. `only` and `skip` name studies or variants, also by pattern; what means none is an
    error, before anything is planned."""
    studies = {name: session.study(name) for name in names}
    # Ceilings come before what is rated against them.
    rating = [name for name, study in studies.items() if any(part.kind == "ceilings" for part in study.parts.values())]
    studies = {name: studies[name] for name in dict.fromkeys([*rating, *studies])}
    known = dict.fromkeys([*studies, *(variant for study in studies.values() for variant in study.variants)])
    if unknown := [pattern for pattern in (*only, *skip) if not matching(known, [pattern])]:
        raise UserError(f"--only/--skip: no study or variant {unknown[0]!r}{hint(unknown[0], known)}")

    def plans() -> Iterator[tuple[str, list[PlannedRun]]]:
        for name, study in studies.items():
            wanted = list(study.variants) if not only or matching([name], only) else matching(study.variants, only)
            left_out = list(study.variants) if matching([name], skip) else matching(study.variants, skip)
            if left := [variant for variant in wanted if variant not in left_out]:
                yield name, session.plan(name, only=left)

    return plans()


def run_studies(session: Session, plans: Iterable[tuple[str, list[PlannedRun]]], budget_s: float | None) -> bool:
    """Run every study; prints how long each will take, as far as records of such runs tell. False if a run did not end well."""
    good, started, known = True, time.monotonic(), _known_seconds(session)
    # On a CPU each search has a memory limit of its own; a GPU's memory is the limit, so there one search has it all.
    searches = 1 if session.env["gpu"] else min(cpu_cores(), 2)
    for name, plan in plans:
        expected = {run.name: known.get((name, run.id.part), 30.0) for run in plan if not is_finished(run.folder)}
        if budget_s is not None:
            left, kept = budget_s - (time.monotonic() - started), []
            for run in plan:
                left -= expected.get(run.name, 0.0)
                if run.name not in expected or left >= 0:
                    kept.append(run)
            if len(kept) < len(plan):
                print(f"study {name}: {len(plan) - len(kept)} of {len(plan)} runs do not fit the budget")
            plan = kept
        todo = sum(expected.get(run.name, 0.0) for run in plan)
        about = f", about {max(1, round(todo / 60))} min" if todo else ""
        print(f"study {name}: {len(plan)} runs with profile {session.profile.profile}{about}", flush=True)
        summaries = session.run(plan, untimed_jobs=searches) if plan else []
        good &= all(summary.outcome in ("ok", "oom", "unavailable") for summary in summaries)
    return good


def _known_seconds(session: Session) -> dict[tuple[str, str], float]:
    """Mean seconds of this machine's own runs by study and part."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for run in find_runs(session.runs_root):
        seconds.setdefault((run.summary.id.study, run.summary.id.part), []).append(run.summary.wall_s)
    return {key: sum(values) / len(values) for key, values in seconds.items()}
