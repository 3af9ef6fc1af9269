"""`lsai report`: the whole way from parameters to the rendered report, doing only what is not done
yet."""

import contextlib
import functools
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock, Timeout

from lsai_core.base.errors import UserError
from lsai_lab.cli import options as opt
from lsai_lab.cli.options import names


def report(
    profile: opt.ProfileOption = None,
    only: opt.OnlyOption = None,
    skip: opt.SkipOption = None,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Report on the records there are; run nothing.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Run everything, not only what makes a first answer.")
    ] = False,
    dry_run: opt.DryRunOption = False,
    budget: Annotated[
        str | None, typer.Option(help="Run only what should fit this time: 20m, 90s or 2h.")
    ] = None,
    formats: Annotated[str, typer.Option(help="html, pdf or html,pdf.")] = "html,pdf",
    engine: Annotated[str, typer.Option(help="auto, quarto or pandoc.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report; default reports/_output.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Make the report again as chapters are saved.")
    ] = False,
    set_: opt.SetOption = None,
) -> None:
    from lsai_lab.report.render import find_quarto, update_book
    from lsai_lab.runs.campaign import about, expected_seconds, plan_studies, run_studies
    from lsai_lab.runs.chapters import report_studies
    from lsai_lab.runs.session import Session
    from lsai_lab.runs.writer import require_runs

    if not dry_run:
        require_runs()
    kinds = names(formats)
    if not kinds or set(kinds) - {"html", "pdf"}:
        raise UserError(f"--formats wants html, pdf or html,pdf, got {formats!r}")
    if engine not in ("auto", "quarto", "pandoc"):
        raise UserError(f"--engine wants auto, quarto or pandoc, got {engine!r}")
    what = {
        "--only": only,
        "--skip": skip,
        "--full": full,
        "--budget": budget,
        "--dry-run": dry_run,
    }
    if no_run and (given := [option for option, value in what.items() if value]):
        raise UserError(
            f"{given[0]} says what to run, and --no-run runs nothing; leave one of them out"
        )
    opt.exclude(
        {"--dry-run": dry_run, "--budget": budget, "--watch": watch},
        "a dry run shows the whole plan and ends",
    )
    if set_:
        ways = (
            "run `lsai study STUDY --set ...` and see `lsai compare --all`, or write a profile "
            "in params/profiles"
        )
        raise UserError(
            f"the report shows the runs of the plan, --set has no place in it; for your own "
            f"settings {ways}"
        )
    session = Session(profile)
    full = full or bool(only)  # what is named is run
    seconds, place = (
        _seconds(budget) if budget else None,
        out or session.root / "reports" / "_output",
    )
    _require_folder(place)
    find_quarto(engine)  # type: ignore[arg-type]
    plans = (
        []
        if no_run
        else plan_studies(session, report_studies(session.root), names(only), names(skip), full)
    )
    if dry_run:
        expected = expected_seconds(session, plans)
        for name, plan in plans:
            todo = [expected[run.name] for run in plan if run.name in expected]
            print(
                f"{name}: {len(plan)} runs, {len(todo)} to do"
                + (f", {about(sum(todo))}" if todo else "")
            )
        print(f"in all {about(sum(expected.values()))}")
        return
    if full and budget and not only:
        print(f"report: of everything, what should fit {budget}", flush=True)
    update = functools.partial(update_book, session, place, engine=engine)  # type: ignore[arg-type]
    with _alone(session.root, place):
        good = update(formats=kinds if no_run or "html" not in kinds else ["html"])
        if not no_run:
            good = run_studies(session, plans, seconds) & update(formats=kinds)
    if not full and not no_run:
        print(
            "report: this was the first pass; --full (make report FULL=1) runs everything",
            flush=True,
        )
    if watch:
        _watch(
            session.root, _alone(session.root, place)(functools.partial(update, formats=["html"]))
        )
    if not good:
        raise typer.Exit(1)


def _require_folder(out: Path) -> None:
    """UserError, before any work, if no report can be written to the folder `out`, which need not
    exist yet."""
    above = next(
        path for path in (out.absolute(), *out.absolute().parents) if os.path.lexists(path)
    )
    try:
        with tempfile.TemporaryDirectory(dir=above, prefix=".report-"):
            pass
    except OSError as error:
        raise UserError(
            f"--out {out}: cannot write to {above}: {error.strerror}; choose another folder"
        ) from None


@contextlib.contextmanager
def _alone(root: Path, out: Path) -> Iterator[None]:
    """One process at a time makes the report of a project."""
    build = root / "reports" / "_build"
    try:
        build.mkdir(parents=True, exist_ok=True)
        with FileLock(build / ".lock", timeout=0):
            out.mkdir(parents=True, exist_ok=True)
            yield
    except Timeout:
        raise UserError(
            f"another process is making the report in {build.parent} right now; wait for it"
        ) from None
    except OSError as error:  # a full or read-only disk is the user's to mend
        where = f"cannot write the report at {error.filename or out}: {error.strerror or error}"
        raise UserError(f"{where}; mend that or choose another folder with --out") from error


def _watch(root: Path, update: Callable[[], object]) -> None:
    """`update` the report whenever a chapter is saved, until Ctrl-C."""

    def saved() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (root / "notebooks").glob("*.ipynb")}

    before = saved()
    print(
        "report: made again whenever a chapter is saved (reload the page); Ctrl-C ends it",
        flush=True,
    )
    while True:
        time.sleep(1)
        if before != (now := saved()):
            before = now
            try:
                update()
            except UserError as error:  # half of an edit; the next one may be whole
                print(f"report: {error}", flush=True)


def _seconds(text: str) -> float:
    """`90s`, `20m`, `2h` in seconds."""
    number, unit = text[:-1], {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    if unit is None or not re.fullmatch("0*[1-9][0-9]{0,6}", number):
        raise UserError(f"--budget wants a time such as 20m, 90s or 2h, got {text!r}")
    return float(int(number) * unit)
