"""`lsai runs`: your own runs one by one, whatever their settings: list, filter, compare two,
delete."""

import shutil
from typing import Annotated, Any

import typer

from lsai_core.base.errors import UserError, hint
from lsai_core.config.strict import flatten
from lsai_lab.cli.options import AnyStudy, FullOption, JsonOption
from lsai_lab.cli.tables import counts, say, show_rows, table
from lsai_lab.project.files import parse_value
from lsai_lab.runs.departures import departures
from lsai_lab.runs.difference import RESULTS, Difference, difference, differing, in_unit
from lsai_lab.runs.find import find_folder, machine_of, opened, repeats_of, which_repeat
from lsai_lab.runs.records import Run, find_runs, name_in
from lsai_lab.runs.session import Session, current_runs
from lsai_lab.runs.study import study_names
from lsai_lab.runs.writer import only_writer

app = typer.Typer(no_args_is_help=True)
RunArgument = Annotated[
    str,
    typer.Argument(
        help="A run: its key or the beginning of it, its folder, the name you gave it, "
        "study.name, or machine/study.name of a recorded one."
    ),
]


@app.command(
    "list", help="List runs, the newest last. Example: lsai runs list memory --where optim.lr=1e-3"
)
def list_runs(
    study: AnyStudy = None,
    where: Annotated[
        list[str] | None, typer.Option(help="Only with this setting: optim.lr=1e-3. Repeatable.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only with this tag. Repeatable.")] = None,
    as_json: JsonOption = False,
    full: FullOption = False,
) -> None:
    session = Session()
    own = find_runs(session.runs_root)
    known = {*study_names(session.root), *(run.summary.id.study for run in own)}
    if study is not None and study not in known:
        raise UserError(f"there is no study {study!r}{hint(study, sorted(known))}")
    runs = [run for run in own if study in (None, run.summary.id.study)]
    for pair in where or []:
        runs = _with_setting(runs, pair)
    runs = [run for run in runs if set(tag or []) <= set(run.plan.get("tags", []))]
    planned = {run.folder for run in current_runs(session)}
    differ = departures(runs, session)
    common = [] if as_json or len(runs) < 2 else _common(list(differ.values()))
    rows = [
        _row(run, run.folder in planned, [s for s in differ[run.folder] if s not in common])
        for run in sorted(runs, key=lambda run: run.summary.started)
    ]
    if rows and not as_json:
        print(counts([row["outcome"] for row in rows], "runs", ["ok"]))
        if common:
            say(f"all differ from their study's plan by {', '.join(common)}")
    if not (as_json or full):
        for row in rows:
            row["disturbed"] = "yes" if row["disturbed"] else ""
    show_rows(
        rows, as_json, "no such runs", ("reason", "note", "tags", "current plan", "disturbed"), full
    )


@app.command("compare")
def compare_two(
    first: RunArgument, second: RunArgument, as_json: JsonOption = False, full: FullOption = False
) -> None:
    """What two runs, own or recorded, differ in: settings, then speed, memory and loss; --full:
    everything else, too.

    Example: lsai runs compare 3f9a h100/memory.bf16"""
    session = Session()
    reports = session.root / "reports"
    folders = (find_folder(text, session.runs_root, reports) for text in (first, second))
    runs = [opened(folder, machine_of(folder)) for folder in folders]
    found = difference(*runs)
    rows = [
        {"what": key, first: found.one.get(key), second: found.other.get(key)} for key in found.keys
    ]
    if as_json or not rows:
        return show_rows(rows, as_json, "they differ in nothing")
    for which, run in zip(("first: ", "second:"), runs, strict=True):
        summary = run.summary
        reason = f" ({summary.reason})" if summary.reason else ""
        say(
            f"{which} {summary.id}{which_repeat(run, repeats_of(run))}, {run.machine}, "
            f"{summary.outcome}{reason}, {summary.started[:16]}"
        )
    parts = {differing(len(found.settings), "setting"): found.settings, "Results": found.results}
    parts |= {"Everything else": found.rest} if full else {}
    for title, keys in parts.items():
        print(f"\n{title}" + (":" if keys else ""))
        if keys:
            print(table([_beside(found, key) for key in keys], full=full))
    if found.remark:
        print()
        for line in found.remark.splitlines():
            say(line)
    if found.rest and not full:
        rest = differing(len(found.rest), "other fact")
        print(f"\n{rest} (environment, code, results): --full")


def _beside(found: Difference, key: str) -> dict[str, Any]:
    """A line of the comparison."""
    line = found.beside(key)
    values = [in_unit(line.what, value) for value in (line.first, line.second)]
    shown = [v if v is None or isinstance(v, float) else str(v) for v in values]
    return {
        "what": RESULTS.get(line.what, line.what),
        "first": shown[0],
        "second": shown[1],
        "change": line.change,
    }


@app.command("delete")
def delete(
    runs: Annotated[list[str], typer.Argument(help="Runs, as for compare.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete runs for good, after asking. Example: lsai runs delete 3f9a"""
    session = Session()
    for run in [_find(session, text) for text in runs]:
        if yes or typer.confirm(
            f"delete {run.folder} ({run.summary.outcome}, {run.summary.started[:16]})?"
        ):
            with only_writer(run.folder, str(run.summary.id)):
                shutil.rmtree(run.folder)
            print(f"deleted {run.folder}")


def _common(differ: list[list[str]]) -> list[str]:
    """The settings in which all runs differ from their plans."""
    return [setting for setting in differ[0] if all(setting in each for each in differ)]


def _row(run: Run, current: bool, differs: list[str]) -> dict[str, Any]:
    summary, plan, results = run.summary, run.plan, run.summary.results
    row = {
        "key": summary.id.key,
        "started": summary.started[:16],
        "run": str(summary.id),
        "differs": ", ".join(differs),
        "outcome": summary.outcome,
    }
    row |= {"current plan": "yes" if current else "", "tokens/s": results.get("tokens_per_s", "")}
    row |= {
        "name": name_in(plan) or "",
        "tags": " ".join(plan.get("tags", [])),
        "note": plan.get("note") or "",
    }
    return row | {"disturbed": results.get("disturbed", ""), "reason": summary.reason or ""}


def _with_setting(runs: list[Run], pair: str) -> list[Run]:
    key, separator, text = pair.partition("=")
    if not separator or not key:
        raise UserError(f"--where wants key=value (for example optim.lr=1e-3), got {pair!r}")
    configs = [flatten(run.config) for run in runs]
    known = sorted(set().union(*configs))
    if runs and key not in known:
        raise UserError(f"no run has a setting {key!r}{hint(key, known)}")
    return [
        run
        for run, config in zip(runs, configs, strict=True)
        if config.get(key, "") == parse_value(text)
    ]


def _find(session: Session, text: str) -> Run:
    """The one own run that `text` means; UserError says what there is instead."""
    return opened(find_folder(text, session.runs_root, newest=False))
