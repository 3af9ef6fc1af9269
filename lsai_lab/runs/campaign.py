"""All runs of the report: what each study plans, and running them in order, as far as a budget of
time allows."""

import time
from collections.abc import Iterable
from typing import Any

from lsai_core.base.errors import UserError, hint
from lsai_core.base.limits import cpu_cores
from lsai_lab.runs.driver import in_time
from lsai_lab.runs.kinds import processes
from lsai_lab.runs.records import find_runs, is_finished, recorded_runs, runs_frame
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import PlannedRun, matching, unmatched


def plan_studies(
    session: Session, names: Iterable[str], only: list[str], skip: list[str], full: bool = True
) -> list[tuple[str, list[PlannedRun]]]:
    """The planned runs of each study in `names`; without `full` those that make a first answer.

    `only` and `skip` name studies or variants, also by pattern; what means none is an error, before
    anything is planned.
    """
    studies = {name: session.study(name) for name in names}
    # Ceilings come before what is rated against them.
    rating = [
        name
        for name, study in studies.items()
        if any(part.kind == "ceilings" for part in study.parts.values())
    ]
    studies = {name: studies[name] for name in dict.fromkeys([*rating, *studies])}
    known = dict.fromkeys(
        [*studies, *(variant for study in studies.values() for variant in study.variants)]
    )
    if unknown := unmatched(known, [*only, *skip]):
        raise UserError(
            f"--only/--skip: no study or variant {unknown[0]!r}{hint(unknown[0], known)}"
        )
    plans = []
    for name, study in studies.items():
        wanted = (
            list(study.variants)
            if not only or matching([name], only)
            else matching(study.variants, only)
        )
        left_out = (
            list(study.variants) if matching([name], skip) else matching(study.variants, skip)
        )
        if left := [variant for variant in wanted if variant not in left_out]:
            plan = session.plan(name, only=left) if full or study.first else []
            plans.append(
                (name, [run for run in plan if full or matching([run.id.name], study.first)])
            )
    return [(name, plan) for name, plan in plans if plan]


def run_studies(
    session: Session, plans: list[tuple[str, list[PlannedRun]]], budget_s: float | None
) -> bool:
    """Run every study; prints how long all and each will take, as far as records of such runs tell.
    False if a run did not end well."""
    good, started, expected = True, time.monotonic(), expected_seconds(session, plans)
    left = total = sum(expected.values())
    if left:
        print(f"runs: {len(expected)} to do, {about(left)} in all", flush=True)
    # On a CPU each search has a memory limit of its own; a GPU's memory is the limit, so there one
    # search has it all.
    searches = 1 if session.env["gpu"] else min(cpu_cores(), 2)
    for name, plan in plans:
        if budget_s is not None:
            room, kept = budget_s - (time.monotonic() - started), []
            for run in plan:
                room -= expected.get(run.name, 0.0)
                if run.name not in expected or room >= 0:
                    kept.append(run)
            if len(kept) < len(plan):
                print(
                    f"study {name}: {len(plan) - len(kept)} of {len(plan)} runs do not fit the "
                    f"budget"
                )
            plan = kept
        todo, spent = sum(expected.get(run.name, 0.0) for run in plan), time.monotonic() - started
        # how this machine keeps to what was expected
        pace = spent / (total - left) if total - left > 60 else 1.0
        time_left = f", {about(todo * pace)}; {about(left * pace)} left in all" if todo else ""
        print(
            f"study {name}: {len(plan)} runs with profile {session.profile.profile}{time_left}",
            flush=True,
        )
        summaries = session.run(plan, untimed_jobs=searches) if plan else []
        good &= all(summary.outcome in ("ok", "oom", "unavailable") for summary in summaries)
        left -= todo
    return good


def about(seconds: float) -> str:
    return f"about {in_time(seconds)}"


def expected_seconds(
    session: Session, plans: list[tuple[str, list[PlannedRun]]]
) -> dict[str, float]:
    """Seconds that each run that is not finished should take, by name: what such a run took here,
    else a recorded one on such a GPU, else on any GPU (for a GPU) or CPU; of the variant, else of
    the study's part; else 8 s. One that wants more GPUs than there are ends at once."""
    todo = [(name, run) for name, plan in plans for run in plan if not is_finished(run.folder)]
    if not todo:
        return {}  # without reading all records
    seconds: dict[Any, float] = {}
    gpu, recorded = session.env["gpu"], recorded_runs(session.root / "reports")
    same = [run for run in recorded if run.env.get("gpu") == gpu]
    alike = [run for run in recorded if bool(run.env.get("gpu")) == bool(gpu)]
    for runs in (find_runs(session.runs_root), same, alike):
        if runs:
            frame = runs_frame(runs).query("outcome != 'unavailable'")
            for names in (["study", "part", "variant"], ["study", "part"]):
                seconds = frame.groupby(names)["wall_s"].mean().to_dict() | seconds

    def expected(study: str, run: PlannedRun) -> float:
        if gpu and processes(run.config) > session.env["gpu_count"]:
            return 2.0
        return seconds.get((study, run.id.part, run.id.variant)) or seconds.get(
            (study, run.id.part), 8.0
        )

    return {run.name: expected(name, run) for name, run in todo}
