"""A reader's runs change the chapter "Your machine" and nothing else of the book: the same chapters
executed beside no runs, and beside those of a CPU, of a fast GPU and some that failed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from conftest import CHECKOUT

from lsai_core.base.files import write_json
from lsai_lab.report.numbers import COLLECT
from lsai_lab.report.to_markdown import to_markdown
from lsai_lab.runs.chapters import book_runs, execute_chapters, read_chapters
from lsai_lab.runs.records import Summary, find_runs, recorded_runs
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import detect_profile

OWN = "65-yours.ipynb"
STUDIES = ("machine", "memory", "speed")
FACTOR = {None: 1e-3, "NVIDIA B200": 3.0}  # of recorded speeds, by GPU


def write_own_runs(session: Session, gpu: str | None) -> None:
    """Runs of the current plan on a machine with `gpu` (None: a CPU), as fast as FACTOR says; every
    fifth failed."""
    there = Session(detect_profile(session.root, gpu), session.root)
    known = {
        (run.summary.id.study, run.summary.id.variant, run.summary.id.part): run
        for run in recorded_runs(session.root / "reports")
    }
    for study in STUDIES:
        plan = there.plan(study, fingerprint="", dataset_id=session.prepared_id)
        for place, planned in enumerate(plan):
            if planned.folder.exists():  # of a study that both profiles plan alike
                continue
            like = known.get((study, planned.id.variant, planned.id.part))
            results = {
                name: value * FACTOR[gpu] if isinstance(value, float) else value
                for name, value in (like.summary.results if like else {}).items()
            }
            failed = place % 5 == 4
            outcome = ("failed", "it broke in /home/somebody/lsai") if failed else ("ok", None)
            started = "2026-11-27T00:00:00+00:00"
            planned.folder.mkdir(parents=True)
            Summary(
                planned.id,
                planned.kind,
                *outcome,
                started,
                1.0,
                "lsai report",
                {},
                {} if failed else results,
            ).write(planned.folder)
            write_json(planned.folder / "config.json", json.loads(planned.config.model_dump_json()))
            write_json(planned.folder / "env.json", {"gpu": gpu, "machine": gpu or "cpu"})


def book(folder: Path, session: Session) -> dict[str, bytes]:
    """What the chapters come to: every bound file by its name."""
    chapters = read_chapters(session.root)
    build = folder / "build"
    build.mkdir(parents=True)
    ends = execute_chapters(session, chapters, build, book_runs(session), COLLECT)
    with contextlib.closing(ends):
        for name, problem in ends:
            assert problem is None, (name, problem)
            assert to_markdown(build / name, folder / "bound" / name) is None, name
    bound = folder / "bound"
    return {
        str(path.relative_to(bound)): path.read_bytes()
        for path in bound.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_own_runs_change_their_chapter_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    monkeypatch.setenv("LSAI_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path / "none"))
    without = book(tmp_path / "without", Session(None, CHECKOUT))
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path / "some"))
    session = Session(None, CHECKOUT)
    for gpu in FACTOR:
        write_own_runs(session, gpu)
    assert len(find_runs(session.runs_root)) > 20
    beside = book(tmp_path / "beside", session)

    changed = {name for name in {*without, *beside} if without.get(name) != beside.get(name)}
    own = {name for name in changed if "yours" in name}
    assert OWN in changed and changed == own, changed
    chapter = beside[OWN].decode()
    assert "B200" in chapter or "cpu" in chapter
    for name, content in beside.items():
        if name != OWN:  # where a reason of one's own failed run may name one
            assert str(CHECKOUT).encode() not in content, name
        # as far as a frame shows it, which cuts long texts
        assert str(tmp_path)[:30].encode() not in content, name
