"""`lsai train`, `find-batch`, `study`, `compare`, `record`: plan runs, execute them, show and keep
what came out."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from lsai_core.base.errors import UserError, hint
from lsai_lab.analysis.advice import LOSS, MEMORY, SPEED, advice
from lsai_lab.analysis.summary import over_repeats
from lsai_lab.cli import options as opt
from lsai_lab.cli.options import names, overrides_from
from lsai_lab.cli.tables import counts, say, shortened, table
from lsai_lab.interactive.planning import about
from lsai_lab.runs.departures import departures
from lsai_lab.runs.difference import RESULTS, in_unit, planned_profile
from lsai_lab.runs.kinds import get_kind
from lsai_lab.runs.records import Run, call, find_runs, is_finished, recorded_runs, runs_frame
from lsai_lab.runs.session import Session, current_runs
from lsai_lab.runs.study import PlannedRun, study_names
from lsai_lab.runs.writer import require_runs

TechniqueOption = Annotated[str, typer.Option(help="Variant of the study.")]
StudyOption = Annotated[str, typer.Option(help="Study in params/studies.")]
PlanJsonOption = Annotated[bool, typer.Option("--json", help="The plan of --dry-run as JSON.")]
RunsOption = Annotated[
    Path | None, typer.Option("--runs", help="Folder of records; default runs/.")
]


def train(
    name_of_study: Annotated[str | None, typer.Argument(hidden=True)] = None,
    technique: TechniqueOption = "baseline",
    study: StudyOption = "memory",
    batch_size: opt.BatchOption = None,
    dataset: opt.DatasetOption = None,
    no_memory_profiling: opt.NoMemoryOption = False,
    again: opt.AgainOption = False,
    name: opt.NameOption = None,
    note: opt.NoteOption = None,
    tag: opt.TagOption = None,
    dry_run: opt.DryRunOption = False,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
) -> None:
    if name_of_study is not None:
        raise UserError(f"the study of `lsai train` is an option: --study {name_of_study}")
    overrides = overrides_from(set_, batch_size, dataset, no_memory_profiling)
    told = about(name, tag or [], note)
    _run_one(Session(profile), study, "train", technique, overrides, again, told, dry_run)


def find_batch(
    technique: TechniqueOption = "baseline",
    study: StudyOption = "memory",
    again: opt.AgainOption = False,
    dry_run: opt.DryRunOption = False,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
) -> None:
    _run_one(
        Session(profile), study, "batch_search", technique, overrides_from(set_), again, {}, dry_run
    )


def study(
    name: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="Study; none: list them.")
    ] = None,
    only: opt.OnlyOption = None,
    skip: opt.SkipOption = None,
    parts: opt.PartsOption = None,
    batch_size: opt.BatchOption = None,
    dataset: opt.DatasetOption = None,
    no_memory_profiling: opt.NoMemoryOption = False,
    dry_run: opt.DryRunOption = False,
    as_json: PlanJsonOption = False,
    full: opt.FullOption = False,
    again: opt.AgainOption = False,
    run_name: opt.NameOption = None,
    note: opt.NoteOption = None,
    tag: opt.TagOption = None,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
) -> None:
    session = Session(profile)
    overrides = overrides_from(set_, batch_size, dataset, no_memory_profiling)
    told = about(run_name, tag or [], note)
    if name is None:
        chosen: dict[str, Any] = {
            "--only": only,
            "--skip": skip,
            "--parts": parts,
            "--dry-run": dry_run,
        }
        chosen |= {"--json": as_json, "--full": full, "--again": again}
        chosen |= {"--name": run_name, "--note": note, "--tag": tag, "settings": overrides}
        return _list_studies(session, chosen)
    for option, given in {"--json": as_json, "--full": full}.items():
        if given and not dry_run:
            raise UserError(
                f"{option} shows the plan of --dry-run; add that, or see `lsai compare {option}` "
                f"for results"
            )
    opt.exclude(
        {"--dry-run": dry_run, "--again": again}, "one runs nothing, the other finished runs, too"
    )
    if not dry_run:
        require_runs(session.runs_root)
    wanted = {"only": names(only), "skip": names(skip), "overrides": overrides}
    plan = _planned(session, name, names(parts), **wanted)
    if not dry_run:
        return _finish(session, plan, told, again=again)
    _show_plan(plan, as_json, full)


def _list_studies(session: Session, given: dict[str, Any]) -> None:
    """Names and titles; UserError if an option was `given` that is for the runs of one study."""
    for option, value in given.items():
        if value:
            raise UserError(
                f"{option} is for the runs of a study; say which STUDY (`lsai study` lists them)"
            )
    for known in study_names(session.root):
        print(f"{known:12} {session.study(known).title}")


def _show_plan(plan: list[PlannedRun], as_json: bool = False, full: bool = False) -> None:
    """How many runs are to do, and each with its folder or why it cannot run here."""
    if as_json:
        return _print_plan(plan)
    rows = []
    for run in plan:
        reason = None if is_finished(run.folder) else get_kind(run.kind).unavailable(run.config)
        state = "recorded" if is_finished(run.folder) else "unavailable" if reason else "to run"
        folder = str(run.folder) if full else run.folder.name
        rows.append({"state": state, "run": run.name, "folder, or why not": reason or folder})
    print(f"{counts([row['state'] for row in rows], 'runs')}; they are kept in")
    print(f"{plan[0].folder.parent}\n")
    print(table(rows, full=full))


def _print_plan(plan: list[PlannedRun]) -> None:
    """The plan as JSON."""
    rows = [
        {
            "run": run.name,
            "finished": is_finished(run.folder),
            "folder": str(run.folder),
            "config": run.config.model_dump(mode="json"),
        }
        for run in plan
    ]
    print(json.dumps(rows, indent=1))


def _run_one(
    session: Session,
    name: str,
    kind: str,
    variant: str,
    overrides: dict[str, Any],
    again: bool,
    told: dict[str, Any],
    dry_run: bool,
) -> None:
    """Run (or show) the first part of this kind that measures `variant`."""
    if not dry_run:
        require_runs(session.runs_root)
    study = session.study(name)
    parts = [part for part, spec in study.parts.items() if spec.kind == kind]
    if not parts:
        raise UserError(f"study {name} measures no {kind}; its parts: {', '.join(study.parts)}")
    if variant not in study.variants:  # a pattern may mean several
        raise UserError(f"study {name} has no variant {variant!r}{hint(variant, study.variants)}")
    part = next((part for part in parts if variant in study.measured(part)), parts[0])
    plan = _planned(session, name, [part], only=[variant], overrides=overrides)[:1]
    if dry_run:
        return _show_plan(plan)
    _finish(session, plan, told, again=again)


def _planned(session: Session, name: str, parts: list[str], **selection: Any) -> list[PlannedRun]:
    """The plan, which is not empty: the names may all be known, and still no part measures such a
    variant."""
    if plan := session.plan(name, parts=parts or None, **selection):
        return plan
    study = session.study(name)
    measured = "; ".join(
        f"{part}: {', '.join(study.measured(part))}" for part in parts or study.parts
    )
    profile = session.profile.profile
    raise UserError(
        f"study {name} measures nothing of that with profile {profile}; it measures {measured}"
    )


def _finish(session: Session, plan: list[PlannedRun], told: dict[str, Any], **options: Any) -> None:
    """Execute, show the table, and exit with 1 if a run did not end as it should, 2 if none could
    begin here."""
    try:
        summaries = session.run(plan, **options)
    finally:
        for run in plan:
            call(run.folder, told)
    folders = {run.folder for run in plan}
    show([run for run in find_runs(session.runs_root) if run.folder in folders])
    if any(summary.outcome in ("failed", "timeout", "preempted") for summary in summaries):
        raise typer.Exit(1)
    if all(summary.outcome == "unavailable" for summary in summaries):
        raise typer.Exit(2)


def show(runs: list[Run], as_json: bool = False, full: bool = False) -> None:
    """Print runs as one table for each machine, study and part (one figure over repeats, see
    `over_repeats`), or as JSON. Other settings are other rows; `full` says which, and why runs
    ended as they did, in whole."""
    frame = runs_frame(runs)
    if frame.empty:
        return print("no finished runs")
    if as_json:
        return print(
            frame.drop(columns="tries", errors="ignore").to_json(orient="records", indent=1)
        )
    settings = departures(runs, Session())
    frame["settings"] = [", ".join(settings[run.folder]) for run in runs]
    less = () if full else ("val ppl", "step ms", "fwd GiB", "bwd GiB", "MFU %")
    for place, rows in frame.groupby(["machine", "study", "part"], sort=False):
        machine, study_name, part = place
        print(f"{study_name}, {part}, on {machine}")
        print(table(_rows(rows, full), less, full))
        print()


def _rows(frame: pd.DataFrame, full: bool) -> list[dict[str, Any]]:
    numbers = [
        name for name in RESULTS if name in frame and pd.api.types.is_numeric_dtype(frame[name])
    ]
    keys, rows = ["variant", "settings", "outcome"], []
    for named, group in frame.groupby(keys, sort=False):
        figures = {
            RESULTS[name]: in_unit(name, over_repeats(name, group[name])) for name in numbers
        }
        texts = {
            name: str(group[name].dropna().astype(str).max()) if group[name].notna().any() else ""
            for name in ("disturbed", "reason")
            if name in group
        }
        row = dict(zip(keys, named, strict=True)) | {"runs": len(group)} | figures | texts
        if not full:
            row |= {name: shortened(row[name], 24) for name in ("settings", *texts)}
            row["disturbed"] = "yes" if texts.get("disturbed") else ""
        rows.append(row)
    if not full and len({row["outcome"] for row in rows}) == 1 and rows[0]["outcome"] == "ok":
        rows = [{key: value for key, value in row.items() if key != "outcome"} for row in rows]
    return rows


def compare(
    study_name: opt.AnyStudy = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="The committed results instead of your own.")
    ] = False,
    machine: Annotated[str | None, typer.Option(help="Only this machine's runs.")] = None,
    as_json: opt.JsonOption = False,
    every: Annotated[
        bool, typer.Option("--all", help="Your runs of other settings and earlier code, too.")
    ] = False,
    full: opt.FullOption = False,
    runs_dir: RunsOption = None,
    profile: opt.ProfileOption = None,
) -> None:
    for option, value in {"--all": every, "--runs": runs_dir}.items():
        opt.exclude({"--recorded": recorded, option: value}, "they say which runs are compared")
    session = Session(profile)
    if recorded:
        runs = recorded_runs(session.root / "reports")
    elif every or runs_dir is not None:
        runs = _runs_in(runs_dir, session)
    else:
        runs = current_runs(session)
        if not runs and (others := len(find_runs(session.runs_root))):
            raise UserError(
                f"no finished runs of the current plan, which is that of profile "
                f"{session.profile.profile}{_of_other_profiles(session)}; `lsai compare --all` "
                f"shows {others} runs of any settings"
            )
    chosen = [
        r for r in runs if study_name in (None, r.summary.id.study) and machine in (None, r.machine)
    ]
    if not chosen:
        there = ", ".join(sorted({f"{run.machine}: {run.summary.id.study}" for run in runs}))
        why = f" match; there are {there}" if there else "; run `lsai study` first"
        raise UserError(
            f"no finished runs{why}" + ("" if recorded else "; --recorded shows the committed ones")
        )
    show(chosen, as_json, full)
    if not as_json:
        _advise(session, chosen)


def _of_other_profiles(session: Session) -> str:
    """How many own runs the plans of other profiles have, in words; empty if none has one."""
    known = sorted(path.stem for path in (session.root / "params" / "profiles").glob("*.yaml"))
    planned = {planned_profile(run) for run in find_runs(session.runs_root)}
    found = {
        name: len(current_runs(Session(name, session.root)))
        for name in known
        if name in planned and name != session.profile.profile
    }
    words = [f"`--profile {name}` has {number}" for name, number in found.items() if number]
    return "; " * bool(words) + ", ".join(words)


def _advise(session: Session, runs: list[Run]) -> None:
    """What to take, for each study and machine that has a baseline's run."""
    if not (good := [run for run in runs if run.summary.outcome == "ok"]):
        return
    frame = runs_frame(good)
    for (study_name, machine), rows in frame.groupby(["study", "machine"], sort=False):
        study = session.study(study_name)
        if study.baseline is None or not {SPEED, MEMORY} <= {*rows}:
            continue
        rows = rows.dropna(subset=[SPEED]).assign(
            label=rows["variant"].map(
                {name: variant.label for name, variant in study.variants.items()}
            )
        )
        rows = rows[rows["part"] == rows["part"].iloc[0]] if len(rows) else rows
        metrics = [name for name in (SPEED, MEMORY, LOSS) if name in rows]
        summary = rows.groupby(["variant", "label"], sort=False, as_index=False).agg(
            {name: partial(over_repeats, name) for name in metrics}
        )
        if lines := list(advice(summary, study.baseline)):
            print(f"{study_name} on {machine}")
            for line in lines:
                say(line, " " * (len(line) - len(line.lstrip()) + 2))
            print()


def record(
    study_name: opt.AnyStudy = None,
    machine: Annotated[
        str | None, typer.Option(help="Label of the machine; default is what the runs say.")
    ] = None,
    runs_dir: RunsOption = None,
) -> None:
    from lsai_lab.runs.keep import record_runs

    session = Session()
    runs = [
        run for run in _runs_in(runs_dir, session) if study_name in (None, run.summary.id.study)
    ]
    if not runs:
        raise UserError("no finished runs to record; run `lsai study` first")
    made, damaged = record_runs(runs, session.root / "reports", machine)
    for folder in made:
        print(folder.relative_to(session.root))
    for reason in damaged:
        print(f"not recorded: {reason}")
    print(f"recorded {len(made)} runs, {len(runs) - len(made) - len(damaged)} were there already")


def _runs_in(folder: Path | None, session: Session) -> list[Run]:
    """The finished runs in `folder`, which must exist if it was named, else in runs/."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"no such folder of runs: {folder}")
    return find_runs(folder or session.runs_root)
