"""`lsai train`, `find-batch`, `study`, `compare`: plan runs, execute them, show what came out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from lsai_core.cli.options import (
    BatchOption,
    DatasetOption,
    NoMemoryOption,
    ProfileOption,
    SetOption,
    names,
    overrides_from,
)
from lsai_core.errors import UserError
from lsai_core.runs.records import Run, find_runs, over_repeats, recorded_runs, runs_frame
from lsai_core.runs.session import Session
from lsai_core.runs.study import PlannedRun

TechniqueOption = Annotated[str, typer.Option("--technique", help="Variant of the study.")]
StudyOption = Annotated[str, typer.Option("--study", help="Study in params/studies.")]


def _finish(session: Session, plan: list[PlannedRun], jobs: int = 1) -> None:
    """Execute, show the table, and exit with 1 if a run did not end as it should."""
    summaries = session.run(plan, jobs)
    folders = {run.folder for run in plan}
    show([run for run in find_runs(session.runs_root) if run.folder in folders])
    if any(summary.outcome in ("failed", "timeout", "preempted") for summary in summaries):
        raise typer.Exit(1)


def train(
    technique: TechniqueOption = "baseline",
    study: StudyOption = "memory",
    batch_size: BatchOption = None,
    dataset: DatasetOption = None,
    no_memory_profiling: NoMemoryOption = False,
    profile: ProfileOption = None,
    set_: SetOption = None,
) -> None:
    session = Session(profile)
    overrides = overrides_from(set_, batch_size, dataset, no_memory_profiling)
    part = _part_of_kind(session, study, "train")
    plan = session.plan(study, only=[technique], parts=[part], overrides=overrides)
    _finish(session, plan[:1])


def find_batch(
    technique: TechniqueOption = "baseline",
    study: StudyOption = "memory",
    profile: ProfileOption = None,
    set_: SetOption = None,
) -> None:
    session = Session(profile)
    part = _part_of_kind(session, study, "batch_search")
    plan = session.plan(study, only=[technique], parts=[part], overrides=overrides_from(set_))
    _finish(session, plan[:1])


def _part_of_kind(session: Session, study: str, kind: str) -> str:
    from lsai_core.runs.study import load_study

    parts = load_study(session.root, study, session.profile).parts
    for name, part in parts.items():
        if part.kind == kind:
            return name
    raise UserError(f"study {study} measures no {kind}; its parts: {', '.join(parts)}")


def study(
    name: Annotated[str, typer.Argument(help="Study in params/studies.")],
    only: Annotated[str | None, typer.Option(help="Comma-separated variants to run.")] = None,
    skip: Annotated[str | None, typer.Option(help="Comma-separated variants to leave out.")] = None,
    parts: Annotated[str | None, typer.Option(help="Comma-separated parts to measure.")] = None,
    batch_size: BatchOption = None,
    dataset: DatasetOption = None,
    no_memory_profiling: NoMemoryOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="Runs at a time on this machine; with more than one their records hold no speeds."),
    ] = 1,
    profile: ProfileOption = None,
    set_: SetOption = None,
) -> None:
    session = Session(profile)
    plan = session.plan(
        name,
        only=names(only),
        skip=names(skip),
        parts=names(parts) or None,
        overrides=overrides_from(set_, batch_size, dataset, no_memory_profiling),
    )
    if dry_run:
        from lsai_core.runs.driver import is_finished

        for run in plan:
            print(f"{'recorded' if is_finished(run) else 'to run':9} {run.name:32} {run.folder}")
        return
    _finish(session, plan, jobs)


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
    "reason": "reason",
}


def show(runs: list[Run], as_json: bool = False) -> None:
    """Print runs as a table (one figure over repeats, see `over_repeats`), or as JSON lines."""
    frame = runs_frame(runs)
    if frame.empty:
        print("no finished runs")
        return
    if as_json:
        print(frame.drop(columns=[c for c in ("tries",) if c in frame]).to_json(orient="records", indent=1))
        return
    frame = frame.assign(mfu=frame["mfu"] * 100) if "mfu" in frame else frame
    columns = [name for name in _COLUMNS if name in frame and frame[name].notna().any()]
    numbers = [name for name in columns if pd.api.types.is_numeric_dtype(frame[name])]
    keys = [name for name in ("machine", "study", "variant", "part", "outcome") if name in frame]
    grouped = frame.groupby(keys, sort=False)
    sizes = grouped.size()
    figures = {name: grouped[name].agg(partial(over_repeats, name)) for name in numbers}
    table = pd.DataFrame(
        figures, index=sizes.index
    ).reset_index()  # with its index: runs that all failed have no figures
    table.insert(len(keys), "runs", sizes.to_numpy())
    if "reason" in columns:
        table["reason"] = grouped["reason"].first().fillna("").str.slice(0, 60).to_numpy()
    table = table.rename(columns=_COLUMNS)
    print(table.to_string(index=False, na_rep="", float_format=lambda value: f"{value:,.4g}"))


def compare(
    study_name: Annotated[str | None, typer.Argument(metavar="[STUDY]", help="Only this study.")] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="The committed results instead of your own runs.")
    ] = False,
    machine: Annotated[str | None, typer.Option(help="Only this machine's runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Every result as JSON.")] = False,
    runs_dir: Annotated[Path | None, typer.Option("--runs", help="Folder of records; default runs/.")] = None,
) -> None:
    session = Session()
    runs = recorded_runs(session.root / "reports") if recorded else find_runs(runs_dir or session.runs_root)
    runs = [r for r in runs if study_name in (None, r.summary.id.study) and machine in (None, r.machine)]
    if not runs:
        raise UserError("no finished runs match; run `lsai study` first, or look at the committed ones with --recorded")
    show(runs, as_json)


def record(
    study_name: Annotated[str | None, typer.Argument(metavar="[STUDY]", help="Only this study.")] = None,
    machine: Annotated[str | None, typer.Option(help="Label of the machine; default is what the runs say.")] = None,
    runs_dir: Annotated[Path | None, typer.Option("--runs", help="Folder of records; default runs/.")] = None,
) -> None:
    from lsai_core.runs.keep import record_runs

    session = Session()
    runs = [r for r in find_runs(runs_dir or session.runs_root) if study_name in (None, r.summary.id.study)]
    if not runs:
        raise UserError("no finished runs to record; run `lsai study` first")
    made = record_runs(runs, session.root / "reports", machine)
    for folder in made:
        print(folder.relative_to(session.root))
    print(f"recorded {len(made)} runs, {len(runs) - len(made)} were there already")
