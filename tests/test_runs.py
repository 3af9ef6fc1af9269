"""One run's end is never the end of the study: out of memory, crash, kill, hang, unavailable; each
recorded as what it was."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from conftest import CHECKOUT, Hazards, Project

pytestmark = pytest.mark.slow

EXPECTED = {
    "oom": ("oom", r"can't allocate memory|not enough memory"),
    "endless": (
        "failed",
        r"^the run's process was killed by SIGKILL; [1-9]\d* steps were recorded$",
    ),
    "crash": ("failed", r"^the run's process was killed by SIGSEGV; [1-9]\d* steps were recorded$"),
    "fa2": ("unavailable", r"."),
    "baseline": ("ok", None),
}


def test_every_end_is_recorded_as_what_it_was(hazards: Hazards) -> None:
    runs = hazards.after_first
    assert {
        name: run.summary.outcome for name, run in runs.items() if run.summary.kind == "train"
    } == {name: outcome for name, (outcome, _) in EXPECTED.items()}
    for name, (_, reason) in EXPECTED.items():
        summary = runs[name].summary
        assert summary.reason is None if reason is None else re.search(reason, summary.reason), (
            name,
            summary.reason,
        )
        assert summary.reason is None or "\n" not in summary.reason
        assert summary.wall_s > 0 and summary.command.startswith("lsai study memory")


def test_the_study_goes_on_to_its_end_and_says_how_each_run_ended(hazards: Hazards) -> None:
    code, out, _ = hazards.first
    assert code == 1  # something failed
    order = re.findall(r"\[(\d)/5\] memory\.(\w+) (ok|oom|failed|unavailable|timeout)", out)
    assert [(int(n), name, outcome) for n, name, outcome in order] == [
        (n, name, outcome) for n, (name, (outcome, _)) in enumerate(EXPECTED.items(), 1)
    ]
    assert re.search(r"^outcomes: .*\b2 failed", out, re.M)
    assert hazards.after_first["baseline"].summary.results["validation_loss"] < 6


def test_what_a_dead_run_had_measured_is_kept(hazards: Hazards) -> None:
    for name in ("endless", "crash"):
        run = hazards.after_second[name]
        assert run.config["steps"] == 10_000_000 and run.env["torch"]
    metrics = hazards.after_second["baseline"].metrics
    assert list(metrics["step"]) == list(range(12))


def test_a_run_that_hangs_ends_at_its_limit(hazards: Hazards) -> None:
    summary = hazards.after_second["endless"].summary
    assert summary.outcome == "timeout"
    assert summary.reason.startswith("no end within 10 s")
    assert 10 <= summary.wall_s < 40


def test_a_second_command_tries_again_what_could_end_otherwise(hazards: Hazards) -> None:
    _, out, _ = hazards.second
    assert "reusing 2 of 4 runs" in out
    assert re.findall(r"memory\.(\w+) started", out) == ["endless", "crash"]
    for name, run in hazards.after_second.items():
        again = run.summary.started != hazards.after_first[name].summary.started
        assert again == (name in ("endless", "crash")), name


def test_a_kernel_ends_with_the_driver_that_was_killed(tmp_path: Path) -> None:
    cell = (
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, "
        f"'w').write(str(os.getpid()))\ntime.sleep(300)"
    )
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]), tmp_path / "in.ipynb"
    )
    code = (
        "import sys; from pathlib import Path; from lsai_lab.runs.notebook import "
        "execute_notebook; root = Path(sys.argv[1]);"
        "execute_notebook(root / 'in.ipynb', root / 'out.ipynb', {}, root=root, timeout_s=300)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=CHECKOUT)
    deadline = time.monotonic() + 90
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline and driver.poll() is None
        time.sleep(0.2)
    kernel = psutil.Process(int((tmp_path / "pid").read_text()))
    driver.kill()
    driver.wait()
    assert psutil.wait_procs([kernel], timeout=30)[1] == []


def test_no_process_is_left_behind(hazards: Hazards) -> None:
    assert len(hazards.processes) == 3
    for pid in hazards.processes:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_each_run_has_a_page_that_shows_how_it_ended(hazards: Hazards) -> None:
    for name in EXPECTED:
        run = hazards.after_second[name]
        notebook = nbformat.read(run.folder / "notebook.ipynb", as_version=4)
        text = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
        assert f"outcome: {run.summary.outcome}" in text
        if run.summary.outcome != "ok":
            stopped = run.summary.outcome == "preempted"
            how = "was stopped" if stopped else f"ended as {run.summary.outcome}"
            assert f"This run {how}" in text
        assert str(hazards.project.root) not in str([cell.source for cell in notebook.cells])


def test_a_report_without_running_shows_how_every_run_ended(hazards: Hazards) -> None:
    project = hazards.project
    runs = {path: path.stat().st_mtime_ns for path in project.runs.glob("memory/*/summary.json")}
    folder = project.root / "report"
    code, text, err = project.lsai("report", "--no-run", "--out", folder)
    assert code == 0, (text, err)
    assert "started" not in text
    assert {
        path: path.stat().st_mtime_ns for path in project.runs.glob("memory/*/summary.json")
    } == runs
    # Quarto makes one of each chapter
    pages = "".join(path.read_text() for path in folder.glob("*.html"))
    page = html.unescape(re.sub(r"<[^>]+>", "", pages)).replace("’", "'")
    page = " ".join(page.split())  # lines are broken anywhere
    for name, run in hazards.after_second.items():
        if run.summary.outcome != "ok":
            reason = str(run.summary.reason).split("(")[0].split(";")[0][:20]
            assert re.search(rf"ended\s+as\s+{run.summary.outcome}:\s+{re.escape(reason)}", page), (
                name
            )
    assert (folder / "lab-report.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("limited", "command", "code", "said"),
    [
        (True, "study memory --only baseline --parts train", 2, "a process may open 64 files here"),
        (False, "study memory --only baseline --parts train", 0, "1 ok"),
        (
            False,
            "train --study memory --technique baseline --set parallel.fsdp=2",
            1,
            "`ip link set lo up`",
        ),
    ],
)
def test_few_open_files_and_no_loopback_are_told_in_one_line_and_one_process_needs_none(
    shared: Project, tmp_path: Path, limited: bool, command: str, code: int, said: str
) -> None:
    words = [sys.executable, "-m", "lsai_lab.cli", *command.split()]
    environment = {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        **shared.env,
        "LSAI_RUNS": str(tmp_path),
    }
    if limited:
        words = ["bash", "-c", 'ulimit -n 64; exec "$@"', "-", *words]
    else:  # a network of its own, whose loopback is down
        words = ["unshare", "--net", "--map-root-user", *words]
        if subprocess.run([*words[:3], "true"], capture_output=True, check=False).returncode:
            pytest.skip("no network namespaces here")
    done = subprocess.run(
        words, env=environment, cwd=shared.root, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code and said in done.stdout + done.stderr, done
    assert code != 2 or len(done.stderr.splitlines()) == 1, done
