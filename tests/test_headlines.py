"""The front page's rows from synthetic records, and which own runs a report leaves out because they are committed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import CHECKOUT, write_run
from test_attention_study import write_gpu_run
from test_speed import write

from lsai_lab.report.headlines import HEADLINES, all_headlines
from lsai_lab.report.selection import select_runs
from lsai_lab.report.variants import by_machine
from lsai_lab.runs.records import Summary, find_runs
from lsai_lab.runs.study import study_names


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    monkeypatch.setenv("LSAI_RUNS", str(tmp_path))
    return tmp_path


def own_rows(profile: str) -> dict[str, dict[str, str]]:
    return {row["question"]: row for row in all_headlines([], profile) if "(this machine)" in row["machine"]}


def test_every_study_has_its_row(root: Path) -> None:
    write_gpu_run(root)
    write(root, "speed", "eager", "levers", step_ms=900)
    write(root, "speed", "attention", "levers", step_ms=600)
    rows = own_rows("h200")
    keys = {run.summary.id.key for run in find_runs(root)}
    for row in rows.values():
        assert set(row) == {"machine", "question", "answer", "result"}
        assert {*re.findall(r"#run-(\w+)", row["result"])} <= keys and "#run-" in row["result"]
        assert not re.search(r"\b(nan|inf|None)\b", str(row)), row
    step = rows["fastest step, lever by lever"]
    assert (
        step["answer"] == "best attention"
        and "1.50x eager" in step["result"]
        and "of the ideal speed" in step["result"]
    )


def test_the_committed_records_have_a_row_for_every_study_of_gpus() -> None:
    rows = [row for row in all_headlines([], "h200") if row["machine"] == "h200"]
    questions = [row["question"] for row in rows]
    assert "longest sequence of a training step on one GPU" in questions and len(rows) >= len(HEADLINES)
    assert not any(re.search(r"\b(nan|None)\b", str(row)) for row in rows)


@pytest.mark.parametrize("outcome", ["failed", "oom", "unavailable"])
def test_runs_that_ended_badly_make_no_row(root: Path, outcome: str) -> None:
    for study, part in (("speed", "levers"), ("fp8", "speed"), ("memory", "train")):
        baseline = {"speed": "eager", "fp8": "bf16", "memory": "baseline"}[study]
        write(root, study, baseline, part, outcome=outcome)
    assert own_rows("h200") == {}


def test_the_own_machine_comes_first_wherever_its_runs_begin(root: Path) -> None:
    """The committed machine is the first to appear, because the first of the chapter's studies has no own run."""
    write(root, "speed", "eager", "levers", step_ms=900)
    write(root, "speed", "attention", "levers", step_ms=600)
    assert "(this machine)" in all_headlines([], "h200")[0]["machine"]
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
