"""The front page's rows from synthetic records, and which own runs a report leaves out because they are committed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import CHECKOUT, write_run

from lsai_lab.report.headlines import HEADLINES, all_headlines
from lsai_lab.report.selection import select_runs
from lsai_lab.report.variants import by_machine
from lsai_lab.runs.records import Summary
from lsai_lab.runs.study import study_names


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path))
    return tmp_path


def test_the_committed_records_have_a_row_for_every_study_of_gpus() -> None:
    rows = [row for row in all_headlines([], "h200") if row["machine"] == "h200"]
    questions = [row["question"] for row in rows]
    assert "longest sequence of a training step on one GPU" in questions and len(rows) >= len(HEADLINES)
    assert not any(re.search(r"\b(nan|None)\b", str(row)) for row in rows)


def test_the_own_machine_comes_first_wherever_its_runs_begin() -> None:
    runs = [SimpleNamespace(machine=name) for name in ("h200", "b", "a (this machine)", "b")]
    found = by_machine(runs)  # type: ignore[arg-type]
    assert list(found) == ["a (this machine)", "h200", "b"] and len(found["b"]) == 2


def test_every_study_of_the_registry_exists() -> None:
    assert set(HEADLINES) <= set(study_names(CHECKOUT))


def test_a_shared_run_is_left_out_only_where_it_is_committed_for_the_same_study(tmp_path: Path) -> None:
    runs, reports = tmp_path / "runs", tmp_path / "reports"
    folder = write_run(runs, "course", "flash_attn")
    summary = Summary.read(folder)
    copy = runs / "fp8" / f"bf16.speed-{summary.id.key}"
    shutil.copytree(folder, copy)
    summary.id = type(summary.id)("fp8", "bf16", "speed", 0, summary.id.key)
    summary.write(copy)
    shutil.copytree(folder, reports / "recorded" / "box" / "course" / folder.name)
    assert [(run.machine, run.summary.id.study) for run in select_runs("course", runs, reports)] == [("box", "course")]
    (other,) = select_runs("fp8", runs, reports)
    assert other.folder == copy and "(this machine)" in other.machine
