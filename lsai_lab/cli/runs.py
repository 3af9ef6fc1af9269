"""`lsai train`, `find-batch`, `study`, `compare`: plan runs, execute them, show what came out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from lsai_core.errors import UserError
from lsai_lab.analysis import over_repeats
from lsai_lab.cli.options import (
    AgainOption,
    BatchOption,
    DatasetOption,
    NameOption,
    NoMemoryOption,
    NoteOption,
    ProfileOption,
    SetOption,
    TagOption,
    names,
    overrides_from,
)
from lsai_lab.runs.records import Run, annotate, find_runs, recorded_runs, runs_frame
from lsai_lab.runs.session import Session, current_runs, differing_settings
from lsai_lab.runs.study import PlannedRun

TechniqueOption = Annotated[str, typer.Option("--technique", help="Variant of the study.")]
StudyOption = Annotated[str, typer.Option("--study", help="Study in params/studies.")]


def _finish(session: Session, plan: list[PlannedRun], about: dict[str, Any] | None = None, **options: Any) -> None:
    """Execute, show the table, and exit with 1 if a run did not end as it should, 2 if none could begin here."""
    try:
        summaries = session.run(plan, **options)
    finally:
        for run in plan if about else []:
            annotate(run.folder, **(about or {}))
    folders = {run.folder for run in plan}
    show([run for run in find_runs(session.runs_root) if run.folder in folders])
    if any(summary.outcome in ("failed", "timeout", "preempted") for summary in summaries):
        raise typer.Exit(1)
    if all(summary.outcome == "unavailable" for summary in summaries):
        raise typer.Exit(2)


def _planned(session: Session, study: str, **selection: Any) -> list[PlannedRun]:
    """The plan, which is not empty: the names may all be known, and still no part measures such a variant."""
    plan = session.plan(study, **selection)
    if not plan:
        parts = session.study(study).parts
        wanted = selection.get("parts") or list(parts)
        measured = "; ".join(f"{part}: {', '.join(session.study(study).measured(part))}" for part in wanted)
        raise UserError(
            f"study {study} measures nothing of that with profile {session.profile.profile}; it measures {measured}"
        )
    return plan


def train(
    technique: TechniqueOption = "baseline",
    study: StudyOption = "memory",
    batch_size: BatchOption = None,
    dataset: DatasetOption = None,
    no_memory_profiling: NoMemoryOption = False,
    again: AgainOption = False,
    name: NameOption = None,
    note: NoteOption = None,
    tag: TagOption = None,
    profile: ProfileOption = None,
    set_: SetOption = None,
) -> None:
    session = Session(profile)
    overrides = overrides_from(set_, batch_size, dataset, no_memory_profiling)
    part = _part_of_kind(session, study, "train", technique)
    plan = _planned(session, study, only=[technique], parts=[part], overrides=overrides)
    _finish(session, plan[:1], _about(name, note, tag), again=again)


def _about(name: str | None, note: str | None, tags: list[str] | None) -> dict[str, Any]:
    return {key: value for key, value in (("name", name), ("note", note), ("tags", tags)) if value}


def find_batch(
    technique: TechniqueOption = "baseline",
    study: StudyOption = "memory",
    again: AgainOption = False,
    profile: ProfileOption = None,
    set_: SetOption = None,
) -> None:
    session = Session(profile)
    part = _part_of_kind(session, study, "batch_search", technique)
    plan = _planned(session, study, only=[technique], parts=[part], overrides=overrides_from(set_))
    _finish(session, plan[:1], again=again)


def _part_of_kind(session: Session, name: str, kind: str, variant: str) -> str:
    """The first part of this kind that measures `variant`, else the first of this kind."""
    study = session.study(name)
    parts = [part for part, spec in study.parts.items() if spec.kind == kind]
    if not parts:
        raise UserError(f"study {name} measures no {kind}; its parts: {', '.join(study.parts)}")
    return next((part for part in parts if variant in study.measured(part)), parts[0])


def study(
    name: Annotated[str, typer.Argument(help="Study in params/studies.")],
    only: Annotated[
        str | None, typer.Option(help="Comma-separated variants to run, or patterns such as '*_1'.")
    ] = None,
    skip: Annotated[str | None, typer.Option(help="Comma-separated variants to leave out, or patterns.")] = None,
    parts: Annotated[str | None, typer.Option(help="Comma-separated parts to measure.")] = None,
    batch_size: BatchOption = None,
    dataset: DatasetOption = None,
    no_memory_profiling: NoMemoryOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="Runs at a time on this machine; with more than one their records hold no speeds."),
    ] = 1,
    again: AgainOption = False,
    run_name: NameOption = None,
    note: NoteOption = None,
    tag: TagOption = None,
    profile: ProfileOption = None,
    set_: SetOption = None,
) -> None:
    session = Session(profile)
    plan = _planned(
        session,
        name,
        only=names(only),
        skip=names(skip),
        parts=names(parts) or None,
        overrides=overrides_from(set_, batch_size, dataset, no_memory_profiling),
    )
    if dry_run:
        from lsai_lab.runs.records import is_finished

        for run in plan:
            print(f"{'recorded' if is_finished(run.folder) else 'to run':9} {run.name:32} {run.folder}")
        return
    _finish(session, plan, _about(run_name, note, tag), jobs=jobs, again=again)


_COLUMNS = {
    "variant": "variant",
    "part": "part",
    "outcome": "outcome",
    "tokens_per_s": "tokens/s",
    "step_ms": "step ms",
    "mfu": "MFU %",
    "mem_forward_peak_gib": "fwd GiB",
    "mem_backward_peak_gib": "bwd GiB",
    "mem_peak_allocated_gib": "peak GiB",
    "largest_batch": "max batch",
    "validation_loss": "val loss",
    "validation_perplexity": "val ppl",
    "settings": "settings that differ",
    "disturbed": "disturbed",
    "reason": "reason",
}


def show(runs: list[Run], as_json: bool = False) -> None:
    """Print runs as a table (one figure over repeats, see `over_repeats`), or as JSON lines. Other settings are other rows."""
    settings = differing_settings(runs)
    frame = runs_frame(runs)
    if frame.empty:
        print("no finished runs")
        return
    if as_json:
        print(frame.drop(columns=[c for c in ("tries",) if c in frame]).to_json(orient="records", indent=1))
        return
    frame = frame.assign(settings=[settings[run.folder] for run in runs])
    frame = frame.assign(mfu=frame["mfu"] * 100) if "mfu" in frame else frame
    columns = [name for name in _COLUMNS if name in frame and frame[name].notna().any()]
    numbers = [name for name in columns if pd.api.types.is_numeric_dtype(frame[name])]
    keys = ["machine", "study", "variant", "part", *(["settings"] if any(settings.values()) else []), "outcome"]
    grouped = frame.groupby(keys, sort=False)
    sizes = grouped.size()
    figures = {name: grouped[name].agg(partial(over_repeats, name)) for name in numbers}
    table = pd.DataFrame(
        figures, index=sizes.index
    ).reset_index()  # with its index: runs that all failed have no figures
    table.insert(len(keys), "runs", sizes.to_numpy())
    for name in ("disturbed", "reason"):
        if name in columns:
            table[name] = grouped[name].first().fillna("").str.slice(0, 60).to_numpy()
    table = table.rename(columns=_COLUMNS)
    print(
        table.to_string(
            index=False, na_rep="", float_format=lambda value: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        )
    )


def compare(
    study_name: Annotated[str | None, typer.Argument(metavar="[STUDY]", help="Only this study.")] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="The committed results instead of your own runs.")
    ] = False,
    machine: Annotated[str | None, typer.Option(help="Only this machine's runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every result as JSON.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Your runs of other settings and earlier code, too.")] = False,
    runs_dir: Annotated[Path | None, typer.Option("--runs", help="All records in this folder.")] = None,
    profile: ProfileOption = None,
) -> None:
    session = Session(profile)
    if recorded:
        runs = recorded_runs(session.root / "reports")
    elif every or runs_dir is not None:
        runs = _runs_in(runs_dir, session)
    else:
        runs = current_runs(session)
        more = len(find_runs(session.runs_root)) - len(runs)
        if more and not runs:
            raise UserError(f"no finished runs of the current plan; `lsai compare --all` shows {more} others")
    _require_match(runs, study_name, machine, recorded)
    runs = [r for r in runs if study_name in (None, r.summary.id.study) and machine in (None, r.machine)]
    show(runs, as_json)


def _runs_in(folder: Path | None, session: Session) -> list[Run]:
    """The finished runs in `folder`, which must exist if it was named, else in runs/."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"no such folder of runs: {folder}")
    return find_runs(folder or session.runs_root)


def _require_match(runs: list[Run], study: str | None, machine: str | None, recorded: bool) -> None:
    """UserError, with what there is, if nothing is left to show."""
    if not runs:
        raise UserError("no finished runs; run `lsai study` first, or look at the committed ones with --recorded")
    there = {(run.summary.id.study, run.machine) for run in runs}
    if not any(study in (None, s) and machine in (None, m) for s, m in there):
        machines: dict[str, set[str]] = {}
        for name, where in sorted(there):
            machines.setdefault(where, set()).add(name)
        found = "; ".join(f"{where}: {', '.join(sorted(names))}" for where, names in machines.items())
        more = "" if recorded else "; --recorded shows the committed ones"
        raise UserError(f"no finished runs match; there are {found}{more}")


def record(
    study_name: Annotated[str | None, typer.Argument(metavar="[STUDY]", help="Only this study.")] = None,
    machine: Annotated[str | None, typer.Option(help="Label of the machine; default is what the runs say.")] = None,
    runs_dir: Annotated[Path | None, typer.Option("--runs", help="Folder of records; default runs/.")] = None,
) -> None:
    from lsai_lab.runs.keep import record_runs

    session = Session()
    runs = [r for r in _runs_in(runs_dir, session) if study_name in (None, r.summary.id.study)]
    if not runs:
        raise UserError("no finished runs to record; run `lsai study` first")
    made = record_runs(runs, session.root / "reports", machine)
    for folder in made:
        print(folder.relative_to(session.root))
    print(f"recorded {len(made)} runs, {len(runs) - len(made)} were there already")
