"""`make report`: the recorded results at once, then this machine's studies, then the book again. What has not changed is not done again.

A chapter is executed again when the source of its cells, a record of a study that it loads, that study's parameters, or the code that
it reaches by imports has changed; the book is rendered again when a chapter, a run's page or the book's own files have.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from filelock import FileLock, Timeout

import lsai_lab
from lsai_core.code import closure, code_hash
from lsai_core.errors import UserError, hint
from lsai_core.files import write_text
from lsai_core.profiling.limits import cpu_cores
from lsai_lab.kit.bind import bind
from lsai_lab.kit.render import HTML, PDF, Engine, chapter_names, find_quarto, render
from lsai_lab.kit.runpages import write_run_pages
from lsai_lab.runs.driver import cores_shared_by, is_finished
from lsai_lab.runs.notebook import execute_notebook
from lsai_lab.runs.records import Run, find_runs, recorded_runs
from lsai_lab.runs.session import Session
from lsai_lab.runs.stop import StopRequest
from lsai_lab.runs.study import PlannedRun, matching, study_names

CHAPTER_TIMEOUT_S = 900.0
AT_A_TIME = min(cpu_cores(), 4)  # each holds half a gigabyte
_SHELL = ("_quarto.yml", "references.bib", "book.*", "run.html", "head.html", "dark.scss", "layout.typ")


@dataclass(frozen=True)
class Chapter:
    """A notebook of the book: its name there, its source, the studies that it loads (all, if it does not say which), its modules."""

    name: str
    source: Path
    studies: tuple[str, ...]
    modules: tuple[str, ...]
    cells: str = field(repr=False)


def read_chapters(root: Path) -> list[Chapter]:
    """The chapters that `reports/_quarto.yml` names. `index.ipynb` is the notebook whose name starts with 00."""
    known = study_names(root)
    return [_read_chapter(root, name, known) for name in chapter_names(root / "reports")]


def report_studies(root: Path) -> list[str]:
    """Every study of the book, in the order in which its chapters first load them."""
    chapters = read_chapters(root)
    # The front page sums up what the chapters ask; the order of the runs is theirs.
    named = [study for chapter in chapters[1:] for study in chapter.studies]
    return list(dict.fromkeys([*named, *study_names(root)]))


def _read_chapter(root: Path, name: str, known: list[str]) -> Chapter:
    notebooks = root / "notebooks"
    source = next(iter(sorted(notebooks.glob("00*.ipynb"))), notebooks / name) if name == "index.ipynb" else notebooks / name  # fmt: skip
    try:
        cells = nbformat.read(source, as_version=4).cells  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise UserError(f"reports/_quarto.yml names the chapter {name}, and there is no notebook {source}") from None
    except Exception as error:  # nbformat raises many kinds for a damaged file
        raise UserError(f"{source}: cannot be read as a notebook: {' '.join(str(error).split())[:200]}") from None
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    studies, modules = _reads(code)
    texts = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in cells)
    return Chapter(name, source, tuple(study for study in known if study in studies), modules, texts)


def _reads(code: list[str]) -> tuple[set[str], tuple[str, ...]]:
    """The strings given to `load(...)` in a chapter's code, and the modules that the code imports or takes from the lab's face."""
    face = {name: module for module, names in lsai_lab._FACE.items() for name in names}
    studies: set[str] = set()
    modules: set[str] = set()
    for source in code:
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a magic, or a mistake that the execution will tell
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names if alias.name != "lsai_lab"}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "lab":
                modules.add(face.get(node.attr, f"lsai_lab.{node.attr}"))
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "load":
                studies |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return studies, tuple(sorted(modules))


def plan_report(session: Session, only: list[str], skip: list[str]) -> Iterator[tuple[str, list[PlannedRun]]]:
    """The planned runs of each study of the book. `only` and `skip` name studies or variants, also by pattern; what means none is an
    error, before anything is planned."""
    studies = {name: session.study(name) for name in report_studies(session.root)}
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


def make_report(
    session: Session, *, only: list[str], skip: list[str], out: Path, formats: list[str], engine: Engine = "auto",
    run_studies: bool = True, budget_s: float | None = None,
) -> bool:  # fmt: skip
    """Bring the report up to date. Returns False if a run or a chapter did not end well (the report shows which).

    `run_studies=False` makes it from the records there are; `budget_s` runs only what is expected to fit, in the order of the book.
    """
    find_quarto(engine)
    plans = plan_report(session, only, skip) if run_studies else iter(())
    build, good = session.root / "reports" / "_build", True
    with _disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        build.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(build / ".lock", timeout=0):
            with _disk_errors(out):
                good &= _update(session, out, ["html"] if run_studies and "html" in formats else formats, engine, build)
            if run_studies:
                good = _run(session, plans, budget_s)
                with _disk_errors(out):
                    good &= _update(session, out, formats, engine, build)
    except Timeout:
        raise UserError(f"another process is making the report in {build.parent} right now; wait for it") from None
    return good


def _run(session: Session, plans: Iterable[tuple[str, list[PlannedRun]]], budget_s: float | None) -> bool:
    """Run every study; prints how long each will take, as far as records of such runs tell."""
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


def _update(session: Session, out: Path, formats: list[str], engine: Engine, build: Path) -> bool:
    """Execute what changed, bind, write the run pages, render what changed. False if a chapter did not complete."""
    reports, chapters = session.root / "reports", read_chapters(session.root)
    committed, own = recorded_runs(reports), find_runs(session.runs_root)
    started, problems = time.monotonic(), []
    with _executing(
        chapters, lambda chapter, stop: _execute(session, chapter, [*own, *committed], build, stop)
    ) as ended:
        for number, (chapter, what) in enumerate(ended, 1):
            left = (time.monotonic() - started) / number * (len(chapters) - number)
            time_left = f", about {left:.0f} s left" if left >= 1 else ""
            print(f"[{number}/{len(chapters)}] chapter {chapter.name}: {what or 'executed'}{time_left}", flush=True)
            if what and what != "reused":
                problems.append(f"{chapter.name}: {what}")
    for old in {*reports.glob("*.ipynb"), *(reports / "data").glob("*.csv")} - {reports / c.name for c in chapters}:
        old.unlink()
    incomplete = [c.name for c in chapters if not bind(build / c.name, reports / c.name)]
    there = {(run.summary.id.study, run.folder.name) for run in committed}
    runs = [*(run for run in own if (run.summary.id.study, run.folder.name) not in there), *committed]
    write_run_pages(runs, reports)
    _render(session, chapters, out, formats, engine, build)
    for problem in problems or incomplete:
        print(f"report: a chapter did not complete: {problem}", flush=True)
    return not problems and not incomplete


@contextlib.contextmanager
def _executing(
    chapters: list[Chapter], execute: Callable[[Chapter, StopRequest], str | None]
) -> Iterator[Iterator[tuple[Chapter, str | None]]]:
    """`execute` of each chapter, as many at a time as there are cores; an error or an interrupt ends those that are running."""
    stop = StopRequest()
    with ThreadPoolExecutor(AT_A_TIME) as pool:  # each thread waits for a process
        futures = {pool.submit(execute, chapter, stop): chapter for chapter in chapters}
        try:
            yield ((futures[future], future.result()) for future in as_completed(futures))
        except BaseException:
            stop.deadline = 0.0
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _execute(session: Session, chapter: Chapter, runs: list[Run], build: Path, stop: StopRequest) -> str | None:
    """Execute a chapter unless nothing that it reads has changed: None, "reused", or what went wrong."""
    target, stamp = build / chapter.name, (build / chapter.name).with_suffix(".key")
    params = session.root / "params"
    files = [params / "studies" / f"{name}.yaml" for name in chapter.studies] or sorted(params.rglob("*.yaml"))
    files += sorted((params / "profiles").glob("*.yaml"))
    for run in runs:
        if not chapter.studies or run.summary.id.study in chapter.studies:
            files += sorted(path for path in run.folder.iterdir() if path.suffix in (".json", ".jsonl"))
    key = _digest(files, chapter.cells, repr(session.profile_name), code_hash(closure(chapter.modules)))
    if target.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        return "reused"
    stamp.unlink(missing_ok=True)
    named = {"LSAI_PROFILE": session.profile_name} if session.profile_name else {}
    problem = execute_notebook(
        chapter.source, target, {}, root=session.root, timeout_s=CHAPTER_TIMEOUT_S, stop=stop,
        environment={**cores_shared_by(AT_A_TIME), **named},
    )  # fmt: skip
    if problem is None:
        write_text(stamp, key)
    return problem


def _render(
    session: Session, chapters: list[Chapter], out: Path, formats: list[str], engine: Engine, build: Path
) -> None:
    """Render unless the last rendering was made from exactly these inputs."""
    reports = session.root / "reports"
    shell = sorted(path for pattern in _SHELL for path in reports.glob(pattern))
    inputs = [*(reports / chapter.name for chapter in chapters), *shell, *sorted((reports / "runs").rglob("*.html"))]
    machine = session.env["gpu"] or f"{session.env['cpu']}, {session.env['cpu_cores']} cores"
    made_on = f"Made on: {machine}, profile {session.profile.profile}"
    facts = (
        str(find_quarto(engine)),
        made_on,
        str(out),
        code_hash(closure(["lsai_lab.kit.render", "lsai_lab.kit.bind"])),
    )
    started, left = time.monotonic(), []
    for name in formats:
        key, stamp = _digest(inputs, name, *facts), build / f"{name}.key"
        wanted = out / {"html": HTML, "pdf": PDF}[name]
        if wanted.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key:
            print(f"report: up to date, reused: {wanted}", flush=True)
        else:
            left.append((name, key, stamp))
    for name, key, stamp in left:
        stamp.unlink(missing_ok=True)
        for path in render(reports, out, [name], engine, made_on):
            write_text(stamp, key)
            print(f"report: {path}, rendered in {time.monotonic() - started:.1f} s", flush=True)


@contextlib.contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """A full or read-only disk is the user's to mend: one line that names the place."""
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise UserError(
            f"cannot write the report at {where}: {error.strerror or error}; mend that or choose another folder with --out"
        ) from error


def _digest(files: Iterable[Path], *facts: str) -> str:
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    for path in files:
        digest.update(os.fspath(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
