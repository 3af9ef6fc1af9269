"""An unchanged report is made again in seconds, and every file that it is made of makes it anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHECKOUT, Project

from lsai_lab.report.unchanged import book_state
from lsai_lab.runs.session import Session

READ = (
    "notebooks/10-machine.ipynb",
    "params/studies/memory.yaml",
    "techniques/own.py",
    "runs/memory/baseline-1/summary.json",
    "reports/recorded/h100/memory/bf16-1/metrics.jsonl",
    "reports/predictions/anybody.json",
    "reports/_quarto.yml",
    "reports/book.css",
)
WRITTEN = (
    "reports/_output/index.html",
    "reports/_build/made.html",
    "reports/runs/index.html",
    "reports/files/10-machine-3.svg",
    "reports/10-machine.ipynb",
    "reports/_quarto-executed.yml",
    "reports/colors.css",
)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path / "runs"))
    for name in (*READ, *WRITTEN):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("as it was")
    return Session(None, tmp_path)


@pytest.mark.parametrize("name", READ)
def test_a_changed_a_new_and_a_missing_file_make_the_book_anew(name: str, session: Session) -> None:
    path, before = session.root / name, book_state(session)
    path.write_text("it changed")
    changed = book_state(session)
    (path.parent / "another.md").write_text("a new file")
    more = book_state(session)
    path.unlink()
    assert len({before, changed, more, book_state(session)}) == 4


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_report_writes_does_not(name: str, session: Session) -> None:
    before = book_state(session)
    (session.root / name).write_text("another report")
    assert book_state(session) == before


def test_the_engine_and_the_formats_count(session: Session) -> None:
    assert book_state(session, "quarto") != book_state(session, None)


# `lsai report` in a process that tells at its end what it imported of what makes a report
_REPORT = """
import atexit, sys
heavy = {"lsai_lab.report.render", "pandas", "matplotlib", "lsai_core.prediction.memory"}
atexit.register(lambda: print("imported", *sorted(heavy & sys.modules.keys())))
from lsai_lab.cli import main
main()
"""


def report(project: Project, *words: str) -> list[str]:
    """The lines that `lsai report` prints, and last what it imported."""
    done = subprocess.run(
        [sys.executable, "-c", _REPORT, "report", "--engine", "pandoc", *words],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **project.env},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_report_whose_runs_are_done_says_so_and_imports_nothing_that_makes_one(
    new_project: Callable[..., Project],
) -> None:
    project, runs = new_project(), ("--only", "baseline")
    assert any("memory.baseline ok" in line for line in report(project, *runs))
    made = [
        project.root / "reports" / "_output" / name for name in ("index.html", "lab-report.pdf")
    ]
    unchanged = [f"report: {path} (unchanged)" for path in made]
    assert report(project, *runs)[-3:] == [*unchanged, "imported"]
    assert report(project, "--no-run", "--formats", "html") == [unchanged[0], "imported"]
    chapter = project.root / "notebooks" / "00-summary.ipynb"
    chapter.write_text(chapter.read_text().replace("# Front", "# Another front"))
    assert "report: chapter index.ipynb" in report(project, *runs)
