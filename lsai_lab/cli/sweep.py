"""`lsai sweep`: variants of a study under every combination of some settings."""

from typing import Annotated, Any

import typer

from lsai_core.base.errors import UserError
from lsai_lab.cli import options as opt
from lsai_lab.cli.tables import counts, table
from lsai_lab.interactive.planning import about
from lsai_lab.interactive.sweep import called, frame_of, plan_sweep
from lsai_lab.project.files import parse_value
from lsai_lab.runs.difference import RESULTS, in_unit
from lsai_lab.runs.records import call, is_finished
from lsai_lab.runs.session import Session

OverOption = Annotated[
    list[str],
    typer.Option("--over", help="A setting and its values: seq_len=128,256,512. Repeatable."),
]
VariantsArgument = Annotated[
    str, typer.Argument(metavar="VARIANTS", help="Comma-separated variants, or patterns.")
]


def sweep(
    study: opt.OneStudy,
    variants: VariantsArgument,
    over: OverOption,
    part: Annotated[str, typer.Option(help="Part of the study; default the first.")] = "",
    dry_run: opt.DryRunOption = False,
    name: opt.NameOption = None,
    note: opt.NoteOption = None,
    tag: opt.TagOption = None,
    as_json: opt.JsonOption = False,
    profile: opt.ProfileOption = None,
    set_: opt.SetOption = None,
) -> None:
    session, axes = Session(profile), dict(map(_axis, over))
    if len(axes) < len(over):
        raise UserError("--over gives a setting twice; put all of its values into one")
    wanted = opt.names(variants)
    planned = plan_sweep(session, study, wanted, axes, part, opt.overrides_from(set_))
    runs = [run for run, _ in planned]
    if dry_run:
        states = ["recorded" if is_finished(run.folder) else "to run" for run in runs]
        print(counts(states, "runs"))
        rows = zip(planned, states, strict=True)
        print(table([{"state": state, "run": r.id.name, **varied} for (r, varied), state in rows]))
        return
    told = about(name, tag or [], note)
    try:
        summaries = session.run(runs, called=called(planned))
    finally:
        for run in runs:
            call(run.folder, told)
    frame = frame_of(planned)
    if as_json:
        return print(
            frame.drop(columns="tries", errors="ignore").to_json(orient="records", indent=1)
        )
    shown = [key for key in ("label", *axes, "outcome", *RESULTS) if key in frame]
    figures = frame[shown].apply(lambda column: in_unit(str(column.name), column))
    rows = figures.rename(columns=RESULTS).to_dict("records")
    print(table(rows, ("val ppl", "fwd GiB", "bwd GiB", "step ms")))
    if any(summary.outcome in ("failed", "timeout", "preempted") for summary in summaries):
        raise typer.Exit(1)


def _axis(text: str) -> tuple[str, list[Any]]:
    """`seq_len=128,256` as the setting and its values."""
    key, separator, values = text.partition("=")
    read = parse_value(f"[{values}]") if separator else None
    if not key or not isinstance(read, list) or not read:
        raise UserError(f"--over wants setting=value,value (seq_len=128,256), got {text[:100]!r}")
    return key, read
