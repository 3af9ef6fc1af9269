"""The report from what there is: chapters executed where needed and bound, a page for each run, all rendered, which takes seconds."""

import contextlib
import shutil
from pathlib import Path

from lsai_lab.kit.bind import bind
from lsai_lab.kit.render import Engine, render
from lsai_lab.kit.runpages import write_run_pages
from lsai_lab.runs.chapters import execute_chapters, read_chapters
from lsai_lab.runs.records import find_runs, recorded_runs
from lsai_lab.runs.session import Session


def update_book(session: Session, out: Path, formats: list[str], engine: Engine) -> bool:
    """Execute what changed, and render. False if a chapter did not complete or a format could not be made."""
    reports, chapters, good = session.root / "reports", read_chapters(session.root), True
    found = [*find_runs(session.runs_root), *recorded_runs(reports)]
    runs = list({(run.folder.parent.name, run.folder.name): run for run in found}.values())
    for old in (reports / "files", reports / "data", *reports.glob("*.ipynb")):
        shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
    with contextlib.closing(execute_chapters(session, chapters, build := reports / "_build", runs)) as ends:
        for name, problem in ends:
            problem = bind(build / name, reports / name, problem)
            print(f"report: chapter {name}" + (f" did not complete: {problem}" if problem else ""), flush=True)
            good &= problem is None
    write_run_pages(runs, reports)
    return len(render(reports, out, formats, engine)) == len(formats) and good
