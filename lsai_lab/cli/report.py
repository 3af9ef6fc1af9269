"""`lsai report`: the whole way from parameters to the rendered report, doing only what is not done
yet."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from filelock import FileLock, Timeout

from lsai_core.base.errors import UserError
from lsai_lab.cli import options as opt
from lsai_lab.cli.options import names

if TYPE_CHECKING:
    from lsai_lab.runs.session import Session
    from lsai_lab.runs.study import PlannedRun

    Plans = list[tuple[str, list[PlannedRun]]]


NoRunOption = Annotated[
    bool, typer.Option("--no-run", help="Report on the records there are; run nothing.")
]
EverythingOption = Annotated[
    bool, typer.Option("--full", help="Run everything, not only what makes a first answer.")
]
BudgetOption = Annotated[
    str | None, typer.Option(help="Run only what should fit this time: 20m, 90s or 2h.")
]
FormatsOption = Annotated[str, typer.Option(help="html, pdf or html,pdf.")]
EngineOption = Annotated[str, typer.Option(help="auto, quarto or pandoc.")]
ChapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--chapter",
        help="Run nothing and make these chapters only (memory, or 15-memory); the others stay as "
        "they are. Repeatable.",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder of the report; default reports/_output.")
]
WatchOption = Annotated[
    bool, typer.Option("--watch", help="Make the report again as chapters are saved.")
]


def report(
    chapter_name: Annotated[str | None, typer.Argument(hidden=True)] = None,
    profile: opt.ProfileOption = None,
    only: opt.OnlyOption = None,
    skip: opt.SkipOption = None,
    no_run: NoRunOption = False,
    full: EverythingOption = False,
    dry_run: opt.DryRunOption = False,
    budget: BudgetOption = None,
    formats: FormatsOption = "html,pdf",
    engine: EngineOption = "auto",
    out: OutOption = None,
    watch: WatchOption = False,
    chapter: ChapterOption = None,
    set_: opt.SetOption = None,
) -> None:
    from lsai_lab.report.engines import find_quarto
    from lsai_lab.runs.campaign import plan_studies
    from lsai_lab.runs.chapters import report_studies
    from lsai_lab.runs.session import Session
    from lsai_lab.runs.writer import require_runs

    if chapter_name is not None:
        raise UserError(f"a chapter is an option: --chapter {chapter_name}")

    kinds, no_run = _formats(formats, engine), no_run or bool(chapter)
    what = {"--only": only, "--skip": skip, "--full": full, "--budget": budget}
    _require_sense(no_run, what | {"--dry-run": dry_run}, watch, set_)
    session = Session(profile)
    chosen = _chosen(session.root, only, chapter)
    if not dry_run:
        require_runs(session.runs_root)
    full = full or bool(only)  # what is named is run
    seconds = _seconds(budget) if budget else None
    place = out or session.root / "reports" / "_output"
    _require_folder(place)
    find_quarto(engine)  # type: ignore[arg-type]
    plans = []
    if not no_run:
        studies = report_studies(session.root)
        plans = plan_studies(session, studies, names(only), names(skip), full)
    if dry_run:
        return _show_plans(session, plans)
    if full and budget and not only:
        print(f"report: of everything, what should fit {budget}", flush=True)
    good = _make(session, place, engine, kinds, None if no_run else plans, seconds, chosen)
    if not full and not no_run:
        print(
            "report: this was the first pass; --full (make report FULL=1) runs everything",
            flush=True,
        )
    if watch:
        again = functools.partial(_make, session, place, engine, ["html"], None, None, chosen)
        _watch(session.root, again)
    if not good:
        raise typer.Exit(1)


def _chosen(root: Path, only: str | None, chapters: list[str] | None) -> list[str]:
    """The chapters of --chapter, as the book names them. UserError for one that there is not, and
    where --only names a chapter."""
    from lsai_lab.runs.chapters import chapters_named, read_chapters

    there = {path.stem for path in read_chapters(root).values()} if only else set()
    if meant := there.intersection(names(only)):
        raise UserError(
            f"--only names studies and variants; for a chapter say --chapter {meant.pop()}"
        )
    return chapters_named(root, [name for one in chapters or [] for name in names(one)])


def _formats(formats: str, engine: str) -> list[str]:
    """The formats by name. UserError for one, or an engine, that there is not."""
    kinds = names(formats)
    if not kinds or set(kinds) - {"html", "pdf"}:
        raise UserError(f"--formats wants html, pdf or html,pdf, got {formats!r}")
    if engine not in ("auto", "quarto", "pandoc"):
        raise UserError(f"--engine wants auto, quarto or pandoc, got {engine!r}")
    return kinds


def _require_sense(
    no_run: bool, what: dict[str, Any], watch: bool, settings: list[str] | None
) -> None:
    """UserError for options that contradict each other; `what` says what to run."""
    if no_run and (given := [option for option, value in what.items() if value]):
        raise UserError(
            f"{given[0]} says what to run, and --no-run runs nothing; leave one of them out"
        )
    opt.exclude(
        {"--dry-run": what["--dry-run"], "--budget": what["--budget"], "--watch": watch},
        "a dry run shows the whole plan and ends",
    )
    if settings:
        ways = (
            "run `lsai study STUDY --set ...` and see `lsai compare --all`, or write a profile "
            "in params/profiles"
        )
        raise UserError(
            f"the report shows the runs of the plan, --set has no place in it; for your own "
            f"settings {ways}"
        )


def _show_plans(session: Session, plans: Plans) -> None:
    """How many runs each study has, how many are to do, how long they should take, and which
    cannot be done here."""
    from lsai_lab.cli.tables import say
    from lsai_lab.runs.campaign import about, expected_seconds
    from lsai_lab.runs.kinds import get_kind

    expected, total = expected_seconds(session, plans), 0.0
    for name, plan in plans:
        todo, reasons = [], Counter[str]()
        for run in plan:
            if run.name not in expected:
                continue
            if (reason := get_kind(run.kind).unavailable(run.config)) is not None:
                reasons[reason] += 1
            else:
                todo.append(expected[run.name])
        total += sum(todo)
        time_left = f", {about(sum(todo))}" if todo else ""
        print(f"{name}: {len(plan)} runs, {len(todo)} to do{time_left}")
        for reason, number in reasons.items():
            say(f"  {number} unavailable: {reason}", "    ")
    print(f"in all {about(total)}")


def _make(
    session: Session,
    place: Path,
    engine: str,
    kinds: list[str],
    plans: Plans | None,
    seconds: float | None,
    only: list[str],
) -> bool:
    """Make the report in `place`, or `only` these chapters of it: after the runs of `plans`, which
    may take `seconds`, and before, if there is one to do. False if a run or a chapter failed."""
    from lsai_lab.report.update import update_book
    from lsai_lab.runs.campaign import run_studies
    from lsai_lab.runs.records import is_finished

    update = functools.partial(update_book, session, place, engine=engine, only=only)  # type: ignore[arg-type]
    with _alone(session.root, place):
        planned = [run for _, plan in plans or [] for run in plan]
        if "html" in kinds and not all(is_finished(run.folder) for run in planned):
            update(formats=["html"])
        ran_well = run_studies(session, plans, seconds) if plans is not None else True
        return update(formats=kinds) & ran_well


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
