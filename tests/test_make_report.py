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
from conftest import QUICK_REPORT, Project, write_run

from lsai_core.errors import UserError
from lsai_lab.files import load_yaml, repo_root
from lsai_lab.report.memory import chapter
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
    linked = {link.removeprefix("#run-") for link in page.links if link.startswith("#run-")}
    assert keys <= linked  # beside them stand the committed runs of other machines
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


RESULTS: dict[str, Any] = {
    "tokens_per_s": 1000.0, "step_ms": 10.0, "step_ms_p25": 9.0, "step_ms_p75": 11.0, "mfu": 0.4, "train_s": 5.0,
    "mfu_peak_source": "a data sheet", "train_loss": 3.0, "validation_loss": 3.1, "validation_perplexity": 22.2,
    "mem_forward_peak_gib": 1.0, "mem_backward_peak_gib": 2.0, "mem_optimizer_peak_gib": 1.5,
    "mem_peak_allocated_gib": 2.0, "parameters": 1000, "memory_kind": "live tensors",
}  # fmt: skip
CONFIG = {
    "model": {"preset": "lab", "n_layers": 2, "d_model": 64}, "data": {"source": "stdlib"},
    "batch_size": 2, "grad_accum": 1, "seq_len": 32, "steps": 3,
}  # fmt: skip
METRICS = [{"step": step, "loss": 5.0 - step, "tokens_in_step": 64} for step in range(3)]
SPEED = ("tokens_per_s", "step_ms", "step_ms_p25", "step_ms_p75", "mfu")
FOUND = {"search_limit_gib": 1.0, "search_limit_kind": "limit", "search_resolution": 0.1}
FAILED = {"outcome": "oom", "reason": "out of memory", "results": {}, "metrics": None}

# What may happen to the runs of a study: arguments of `write_run`, laid over those of runs that ended well.
SITUATIONS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "all well": [],
    "the baseline failed": [("baseline", "train", FAILED)],
    "another failed": [("bf16", "train", FAILED)],
    "everything failed": [(variant, part, FAILED) for variant in ("baseline", "bf16") for part in ("train", "batch")],
    "both trainings failed": [(variant, "train", FAILED) for variant in ("baseline", "bf16")],
    "the baseline's search failed": [("baseline", "batch", FAILED)],
    "nothing fits": [("baseline", "batch", {"results": {"largest_batch": 0, **FOUND}})],
    "too short to be timed": [
        (variant, "train", {"results": {k: None if k in SPEED else v for k, v in RESULTS.items()}})
        for variant in ("baseline", "bf16")
    ],
    "one too short to be timed": [("bf16", "train", {"results": {k: v for k, v in RESULTS.items() if k not in SPEED}})],
    "memory not measured": [
        (variant, "train", {"results": {k: v for k, v in RESULTS.items() if not k.startswith("mem")}})
        for variant in ("baseline", "bf16")
    ],
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_chapter_can_be_written_whatever_happened(
    new_project: Callable[..., Project],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    situation: str,
) -> None:
    project = new_project({"baseline": {}, "bf16": {}})
    changes = {(variant, part): change for variant, part, change in SITUATIONS[situation]}
    for variant in ("baseline", "bf16"):
        well = {"results": RESULTS, "config": CONFIG, "metrics": METRICS}
        write_run(project.runs, "memory", variant, **{**well, **changes.get((variant, "train"), {})})
        search = {"kind": "batch_search", "results": {"largest_batch": 8, **FOUND}}
        write_run(project.runs, "memory", variant, "batch", **{**search, **changes.get((variant, "batch"), {})})
    for key, value in project.env.items():
        monkeypatch.setenv(key, value)
    results = chapter.load([], "cpu")
    chapter.show_setting(results)
    chapter.show_techniques(results)
    for machine in results:
        chapter.show_machine(machine)
    chapter.show_beside(results)
    paths = chapter.export(results)
    text = capsys.readouterr().out
    assert len(paths) == 2 and paths[1].read_text()
    assert not re.search(r"\b(nan|inf)\b[x%]?", paths[1].read_text().split("\n- ", 1)[1]), paths[1].read_text()
    for (variant, part), change in changes.items():
        if change is FAILED and part == "train":
            assert f"*{variant}* ended as **oom**: out of memory." in text
    from lsai_lab.report.memory.analysis import headline

    for machine in results:
        assert "nan" not in str(headline(machine)) and "inf" not in str(headline(machine))
