"""`make report` end to end: everything made once, reused the second time, and rendered whatever went wrong."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pypdf
import pytest
from conftest import QUICK_REPORT, Project

from lsai_core.errors import UserError
from lsai_lab.files import load_yaml, repo_root
from lsai_lab.runs.stop import StopRequest

pytestmark = pytest.mark.timeout(1800)  # all chapters and run pages from nothing: 3 minutes alone on two cores


class Page(HTMLParser):
    """The links and ids of an HTML file, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.text = ""
        self.feed(path.read_text())
        self.text = self.text.replace("’", "'")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {values["id"] or ""} if "id" in values else set()
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def out(project: Project) -> Path:
    return project.root / "report" / "out"


@pytest.mark.slow
def test_the_report_is_made(quick: Project) -> None:
    code, text, err = quick.first_report
    assert code == 0, (text, err)
    assert "study memory: 4 runs with profile quick" in text and "outcomes: 4 ok" in text
    assert sorted(path.name for path in out(quick).iterdir()) == ["index.html", "lab-report.pdf", "runs"]
    pdf = pypdf.PdfReader(out(quick) / "lab-report.pdf")
    content = " ".join(page.extract_text() for page in pdf.pages)
    assert "flash attention" in content and "Largest batch" in content
    page = Page(out(quick) / "index.html")
    assert [run.summary.outcome for run in quick.found().values()] == ["ok"] * 5
    baseline = quick.found()["baseline"].summary.results
    assert f"{baseline['validation_perplexity']:.2f}" in page.text
    assert f"{baseline['tokens_per_s']:,.0f}" in page.text


@pytest.mark.slow
def test_every_number_leads_to_its_run_and_every_run_to_its_page(quick: Project) -> None:
    page = Page(out(quick) / "index.html")
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    keys = {run.summary.id.key for run in quick.found().values() if run.summary.id.study == "memory"}
    assert len(keys) == 4
    pages = {link for link in page.links if link.startswith("runs/")}
    assert keys <= {Path(link.split("#")[0]).stem.split("-")[-1] for link in pages}
    for link in pages:
        single = Page(out(quick) / link.split("#")[0])
        assert "Everything that defines this run" in single.text
        assert {target[1:] for target in single.links if target.startswith("#")} <= single.ids


@pytest.mark.slow
def test_a_second_report_does_nothing_and_says_so(quick: Project) -> None:
    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in quick.root.rglob("*") if path.is_file()}

    before, started = stamps(), time.monotonic()
    code, text, err = quick.lsai(*QUICK_REPORT, "--out", out(quick))
    assert code == 0, err
    assert time.monotonic() - started < 30
    assert "reusing 4 of 4 runs" in text and "report: up to date, reused:" in text
    chapters = len(load_yaml(repo_root() / "params" / "report.yaml")["chapters"])
    assert len(re.findall(r"^chapter \S+: reused", text, re.M)) == text.count("chapter ") == chapters
    assert stamps() == before


@pytest.mark.slow
def test_what_is_missing_is_made_again_and_nothing_else(quick: Project) -> None:
    (out(quick) / "lab-report.pdf").unlink()
    code, text, _ = quick.lsai(*QUICK_REPORT, "--out", out(quick))
    assert code == 0 and (out(quick) / "lab-report.pdf").exists()
    assert "reusing 4 of 4 runs" in text and "executing" not in text and "bound and rendered" in text


def test_chapters_are_executed_side_by_side_and_a_mistake_ends_them(
    new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, both = new_project(), threading.Barrier(2, timeout=20)
    in_time: dict[str, bool] = {}

    def fake(source: Path, *_: Any, stop: StopRequest, **__: Any) -> None:
        if source.name in ("00-summary.ipynb", "01-machine.ipynb"):
            both.wait()  # returns when the other one has begun
        if source.name == "00-summary.ipynb":
            raise UserError("a mistake in a chapter")
        deadline = time.monotonic() + 20
        while time.monotonic() < min(deadline, stop.deadline):
            time.sleep(0.01)
        in_time[source.name] = time.monotonic() < deadline

    monkeypatch.setattr("lsai_lab.report.make.execute_notebook", fake)
    monkeypatch.setattr("lsai_lab.report.make.cpu_cores", lambda: 2)
    code, _, err = project.lsai("report", "--no-run", "--out", out(project))
    assert (code, err) == (2, "error: a mistake in a chapter\n")
    assert in_time["01-machine.ipynb"] and all(in_time.values())
    assert len(in_time) < 3  # at most one more began before the mistake was seen
