"""`make report`: the recorded results at once, then this machine's studies, then the book again. What has not changed is not done again.

A chapter is executed again when the source of its cells, a record of a study that it loads, that study's parameters, or the code that
it imports has changed; the book is rendered again when an executed chapter, a run or the book's own files have.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from lsai_core.code import closure, code_hash, version_of
from lsai_core.errors import UserError
from lsai_core.files import write_text
from lsai_core.profiling.limits import cpu_cores
from lsai_lab.kit.render import MADE, Engine, book_settings, find_quarto, render
from lsai_lab.runs.campaign import plan_studies, run_studies
from lsai_lab.runs.driver import cores_shared_by
from lsai_lab.runs.notebook import execute_notebook
from lsai_lab.runs.records import Run, find_runs, recorded_runs
from lsai_lab.runs.session import Session, current_runs
from lsai_lab.runs.stop import StopRequest
from lsai_lab.runs.study import study_names

CHAPTER_TIMEOUT_S = 900.0
AT_A_TIME = min(cpu_cores(), 8)  # each holds some hundred megabytes of its own
_FACE = ("lsai_lab.kit.load", "lsai_lab.kit.show", "lsai_lab.kit.style", "lsai_lab.analysis")


@dataclass(frozen=True)
class Chapter:
    """A notebook of the book: its name there, its source, the studies that it loads (all, if it does not say which), its cells."""

    name: str
    source: Path
    studies: tuple[str, ...]
    cells: str = field(repr=False)


def read_chapters(root: Path) -> list[Chapter]:
    """The chapters that `reports/_quarto.yml` names. `index.ipynb` is the notebook whose name starts with 00."""
    notebooks, chapters = root / "notebooks", []
    for name in book_settings(root / "reports")["chapters"]:
        source = min(notebooks.glob("00*.ipynb" if name == "index.ipynb" else name), default=notebooks / name)
        try:
            cells = json.loads(source.read_text(encoding="utf-8"))["cells"]  # nbformat takes a second to import
            text = "\0".join(f"{cell['cell_type']}\0{''.join(cell['source'])}" for cell in cells)
        except FileNotFoundError:
            raise UserError(f"reports/_quarto.yml names {name}, and there is no notebook {source}") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{source}: cannot be read as a notebook: {' '.join(str(error).split())[:200]}") from None
        loads = re.findall(r"\bload\(([^)]*)\)", text)
        whole = not all(loads) or "*" in "".join(loads)
        named = [] if whole else re.findall(r"""["']([^"']+)["']""", " ".join(loads))
        studies = tuple(study for study in study_names(root) if study in named)
        chapters.append(Chapter(name, source, studies, text))
    return chapters


def report_studies(root: Path) -> list[str]:
    """Every study, in the order in which the chapters behind the front page first load them."""
    named = (study for chapter in read_chapters(root)[1:] for study in chapter.studies)
    return list(dict.fromkeys([*named, *study_names(root)]))


def make_report(
    session: Session, *, only: list[str], skip: list[str], out: Path, formats: list[str], engine: Engine = "auto",
    run: bool = True, full: bool = True, budget_s: float | None = None,
) -> bool:  # fmt: skip
    """Bring the report up to date. Returns False if a run or a chapter did not end well (the report shows which).

    `run=False` makes it from the records there are; without `full` runs what makes a first answer; `budget_s` runs
    only what is expected to fit, in the order of the pass or the book.
    """
    find_quarto(engine)
    plans = plan_studies(session, report_studies(session.root) if run else [], only, skip, full)
    build = session.root / "reports" / "_build"
    try:
        build.mkdir(parents=True, exist_ok=True)
        with FileLock(build / ".lock", timeout=0):
            good = _update(session, out, ["html"] if run and "html" in formats else formats, engine, build)
            if run:
                good = run_studies(session, plans, budget_s) & _update(session, out, formats, engine, build)
    except Timeout:
        raise UserError(f"another process is making the report in {build.parent} right now; wait for it") from None
    except OSError as error:  # a full or read-only disk is the user's to mend
        where = error.filename or out
        raise UserError(f"cannot write the report at {where}: {error.strerror or error}; mend that or choose another folder with --out") from error  # fmt: skip
    return good


def _update(session: Session, out: Path, formats: list[str], engine: Engine, build: Path) -> bool:
    """Execute what changed, and render if anything did. False if a chapter did not complete or a format could not be made."""
    reports, chapters = session.root / "reports", read_chapters(session.root)
    committed = recorded_runs(reports)
    there = {(run.summary.id.study, run.folder.name) for run in committed}
    runs = [run for run in find_runs(session.runs_root) if (run.summary.id.study, run.folder.name) not in there]
    runs += committed
    told = runs
    with contextlib.suppress(UserError):  # of parameters: the chapters that read them say so
        told = [*committed, *current_runs(session)]  # not what was tried by hand
    problems = _execute(session, [(c, runs if "mine=" in c.cells else told) for c in chapters], build)
    shell = sorted({*reports.glob("[!._]*.*"), reports / "_quarto.yml"} - {*reports.glob("*.ipynb")})
    inputs = [*(build / chapter.name for chapter in chapters), *shell, *_files(runs)]
    key = _digest(inputs, str(find_quarto(engine)), str(out), version_of("lsai_lab.kit.render"))
    left = [name for name in formats if not ((out / MADE[name]).exists() and _holds(build / f"{name}.key", key))]
    for name in [name for name in formats if name not in left]:
        print(f"report: up to date, reused: {out / MADE[name]}", flush=True)
    made: list[Path] = []
    if left or not all((reports / chapter.name).exists() for chapter in chapters):
        from lsai_lab.kit.bind import bind  # these take seconds to import
        from lsai_lab.kit.runpages import write_run_pages

        for old in (reports / "files", reports / "data", *reports.glob("*.ipynb")):
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
        for chapter in chapters:
            if not bind(build / chapter.name, reports / chapter.name, problems.get(chapter.name)):
                problems.setdefault(chapter.name, "its executed notebook cannot be read")
        write_run_pages(runs, reports)
        for name in left:
            (build / f"{name}.key").unlink(missing_ok=True)
        made = render(reports, out, left, engine)
        for name in [name for name in left if out / MADE[name] in made and not problems]:
            write_text(build / f"{name}.key", key)
    for name, problem in problems.items():
        print(f"report: a chapter did not complete: {name}: {problem}", flush=True)
    return len(made) == len(left) and not problems


def _execute(session: Session, reads: list[tuple[Chapter, list[Run]]], build: Path) -> dict[str, str]:
    """Execute the chapters that changed, as many at a time as there are cores; an error or an interrupt ends those that are running.

    Returns what went wrong, by chapter.
    """
    stop, problems, started = StopRequest(), {}, time.monotonic()
    with ThreadPoolExecutor(AT_A_TIME) as pool:  # each thread waits for a process
        futures = {pool.submit(_chapter, session, chapter, runs, build, stop): chapter.name for chapter, runs in reads}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                name, what = futures[future], future.result()
                left = (time.monotonic() - started) / number * (len(futures) - number)
                time_left = f", about {left:.0f} s left" if left >= 1 else ""
                print(f"[{number}/{len(futures)}] chapter {name}: {what or 'executed'}{time_left}", flush=True)
                if what not in ("reused", None):
                    problems[name] = what
        except BaseException:
            stop.deadline = 0.0
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return problems


def _chapter(session: Session, chapter: Chapter, runs: list[Run], build: Path, stop: StopRequest) -> str | None:
    """Execute a chapter unless nothing that it reads has changed: None, "reused", or what went wrong."""
    target, stamp = build / chapter.name, (build / chapter.name).with_suffix(".key")
    params = session.root / "params"
    files = [params / "studies" / f"{name}.yaml" for name in chapter.studies] or sorted(params.rglob("*.yaml"))
    files += sorted((params / "profiles").glob("*.yaml"))
    files += _files([run for run in runs if not chapter.studies or run.summary.id.study in chapter.studies])
    modules = re.findall(r"(?m)^(?:from|import) (lsai_[\w.]+)", chapter.cells)
    key = _digest(files, chapter.cells, repr(session.profile_name), code_hash(closure([*_FACE, *modules])))
    if target.exists() and _holds(stamp, key):
        return "reused"
    stamp.unlink(missing_ok=True)
    problem = execute_notebook(
        chapter.source, target, {}, root=session.root, timeout_s=CHAPTER_TIMEOUT_S, stop=stop,
        environment={**cores_shared_by(AT_A_TIME), **({"LSAI_PROFILE": session.profile_name} if session.profile_name else {})},
    )  # fmt: skip
    if problem is None:
        write_text(stamp, key)
    return problem


def _files(runs: Iterable[Run]) -> list[Path]:
    return [path for run in runs for path in sorted(run.folder.iterdir()) if path.suffix in (".json", ".jsonl")]


def _holds(stamp: Path, key: str) -> bool:
    return stamp.exists() and stamp.read_text(encoding="utf-8") == key


def _digest(files: Iterable[Path], *facts: str) -> str:
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    for path in files:
        digest.update(os.fspath(path).encode() + b"\0" + (path.read_bytes() if path.exists() else b""))
    return digest.hexdigest()
