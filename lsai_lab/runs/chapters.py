"""The chapters of the report: which notebooks they are, which studies they load, and their
execution.

A chapter is executed again when its cells, the parameters, a record of a study that it loads, or
the code that it imports has changed.
"""

import functools
import hashlib
import json
import re
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lsai_core.base.code import version_of
from lsai_core.base.errors import UserError
from lsai_core.base.files import write_json, write_text
from lsai_core.base.limits import cpu_cores
from lsai_lab.launch.stop import StopRequest
from lsai_lab.project.files import load_yaml
from lsai_lab.project.strip import stripped
from lsai_lab.runs.driver import cores_shared_by
from lsai_lab.runs.notebook import execute_notebook
from lsai_lab.runs.records import Run, find_runs, recorded_runs, run_key
from lsai_lab.runs.schema import content
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import study_names

TIMEOUT_S = 900.0  # of a chapter
AT_A_TIME = min(cpu_cores(), 8)  # each holds some hundred megabytes of its own


def book_settings(reports: Path) -> dict[str, Any]:
    """`reports/_quarto.yml`, with the names of the chapters as `chapters`, and as `parts` the
    title of the part that begins with a chapter, by that chapter's name."""
    settings = load_yaml(reports / "_quarto.yml")
    names, parts = list[str](), dict[str, str]()
    try:
        for entry in settings["book"]["chapters"]:
            if isinstance(entry, dict):
                parts[entry["chapters"][0]] = str(entry["part"])
            names += entry["chapters"] if isinstance(entry, dict) else [entry]
        chapters = [name for name in names if name.endswith(".ipynb")]
        return {**settings, "chapters": chapters, "parts": parts}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{reports / '_quarto.yml'} names no chapters of a book: {error}") from None


def read_chapters(root: Path) -> dict[str, Path]:
    """The notebooks of the chapters that `reports/_quarto.yml` names; for `index.ipynb` the one
    that starts with 00."""
    found, folder = {}, root / "notebooks"
    for name in book_settings(root / "reports")["chapters"]:
        found[name] = next(
            folder.glob("00*.ipynb" if name == "index.ipynb" else name), folder / name
        )
        try:
            stripped(found[name].read_text(encoding="utf-8"))
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            what = f"{found[name]}, a chapter of reports/_quarto.yml, cannot be read as a notebook"
            raise UserError(f"{what}: {' '.join(str(error).split())[:200]}") from None
    return found


def chapters_named(root: Path, asked: Sequence[str]) -> list[str]:
    """The chapters that a person means by the names of their notebooks, with their numbers or
    without (`15-memory`, `memory`), or by their number in the book (`3`), as `read_chapters` names
    them. UserError, which lists the names, for one that the book has not."""
    chapters = read_chapters(root) if asked else {}
    short = {name: re.sub(r"^\d+-", "", path.stem) for name, path in chapters.items()}
    found = list[str]()
    for one in (name.removesuffix(".ipynb") for name in asked):
        meant = [
            name
            for number, (name, path) in enumerate(chapters.items(), 1)
            if one in (path.stem, short[name], str(number))
        ]
        if not meant:
            known = ", ".join(short.values())
            raise UserError(f"the report has no chapter {one!r}; its chapters are {known}")
        found += meant
    return found


def headings_of(chapter: Path, target: Path) -> Path:
    """Write a notebook of a chapter's headings to a file beside `target`, so that what leads to
    them leads somewhere as long as the chapter was not executed; returns that file."""
    notebook = json.loads(chapter.read_text(encoding="utf-8"))
    words = "\n".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    )
    title, *others = re.findall(r"(?m)^#+ .*$", words) or [f"# {chapter.stem}"]
    missing = "This chapter is not made yet: `lsai report` makes it."
    text = "\n\n".join([title, missing, *others])
    cell = {"cell_type": "markdown", "id": "headings", "metadata": {}, "source": text}
    made = target.with_suffix(".headings.ipynb")
    write_json(made, notebook | {"cells": [cell]})
    return made


def book_runs(session: Session) -> list[Run]:
    """The runs that a book is made of: the reader's, without those that were committed since, and
    the committed ones."""
    committed = recorded_runs(session.root / "reports")
    known = {run.folder.parts[-2:] for run in committed}
    own = [run for run in find_runs(session.runs_root) if run.folder.parts[-2:] not in known]
    return own + committed


def report_studies(root: Path) -> list[str]:
    """Every study, in the order in which the chapters behind the front page first load them."""
    chapters = list(read_chapters(root).values())[1:]
    named = [name for path in chapters for name in _loaded(path.read_text(encoding="utf-8"), root)]
    return list(dict.fromkeys([*named, *study_names(root)]))


def _loaded(notebook: str, root: Path) -> list[str]:
    """The studies that a notebook loads by name; all if it says `load()`, or nothing."""
    loads = re.findall(r"\b(?:load|recorded)\(([^)]*)\)", notebook)
    named = re.findall(r"[\w-]+", " ".join(loads))
    return [name for name in study_names(root) if name in named or not all(loads or [""])]


def execute_chapters(
    session: Session, chapters: dict[str, Path], build: Path, runs: list[Run], last_cell: str
) -> Generator[tuple[str, str | None], None, None]:
    """Execute what has changed, several at a time, into `build`, and after each chapter
    `last_cell`; gives each chapter's name, and what went wrong."""
    stop = StopRequest()
    with ThreadPoolExecutor(AT_A_TIME) as pool:  # each thread waits for a process
        try:
            ends = pool.map(
                lambda name: _execute(session, chapters[name], build / name, runs, stop, last_cell),
                chapters,
            )
            yield from zip(chapters, ends, strict=True)
        finally:
            stop.deadline = 0.0  # ends those that are running


def _digest(file: Path) -> str:
    """A hash of what a file holds; of one that nobody reads, because it is no plain file or too
    large, only that."""
    try:
        found = file.stat()
        return _digest_at(file, found.st_size, found.st_mtime_ns)
    except (OSError, UserError) as error:
        return str(error)


@functools.lru_cache(maxsize=100_000)  # a run is shown by several chapters
def _digest_at(file: Path, size: int, changed: int) -> str:
    return hashlib.sha256(content(file)).hexdigest()


def _execute(
    session: Session,
    source: Path,
    target: Path,
    runs: list[Run],
    stop: StopRequest,
    last_cell: str,
) -> str | None:
    """Execute a chapter unless nothing that it reads has changed; returns what went wrong."""
    stamp, cells = target.with_suffix(".key"), stripped(source.read_text(encoding="utf-8"))
    studies = _loaded(cells, session.root)
    shows_own = re.search(r"\b(?:load\(|own_)", cells)  # else the committed runs alone
    files = [
        file
        for run in runs
        if run.summary.id.study in studies
        and (shows_own or not run.folder.is_relative_to(session.runs_root))
        for file in sorted(run.folder.glob("*.json*"))
    ]
    files += sorted((session.root / "params").rglob("*.yaml"))
    reports = session.root / "reports"
    files += sorted(
        path
        for folder in (reports / "predictions", reports / "recorded" / "predictions")
        for path in folder.glob("*.*")
    )
    code = version_of("lsai_lab", *re.findall(r"(?:from|import) (lsai_[\w.]+)", cells))
    key = run_key(
        {str(file): _digest(file) for file in files},
        cells + last_cell,
        code,
        str(session.profile_name),
    )
    if target.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        return None
    stamp.unlink(missing_ok=True)
    environment = cores_shared_by(AT_A_TIME) | (
        {"LSAI_PROFILE": session.profile_name} if session.profile_name else {}
    )
    whole = target.with_suffix(".source.ipynb")
    write_json(whole, _with_cell(cells, last_cell))
    problem = execute_notebook(
        whole,
        target,
        {},
        root=session.root,
        timeout_s=TIMEOUT_S,
        stop=stop,
        environment=environment,
    )
    whole.unlink()
    if problem is None:
        write_text(stamp, key)
    return problem


def _with_cell(notebook: str, source: str) -> dict[str, Any]:
    """A notebook (its JSON) with one more cell, which the book leaves out."""
    content: dict[str, Any] = json.loads(notebook)
    cell = {"cell_type": "code", "execution_count": None, "metadata": {"tags": ["remove-cell"]}}
    content["cells"].append(cell | {"id": "lsai-last", "outputs": [], "source": source})
    return content
