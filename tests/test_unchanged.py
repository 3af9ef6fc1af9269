"""An unchanged report is made again in seconds, and every file that it is made of makes it anew."""

from __future__ import annotations

from pathlib import Path

import pytest

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
