"""Whose runs come first in a report, and which own runs it leaves out because they are committed."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

from conftest import write_run

from lsai_lab.report.selection import select_runs
from lsai_lab.report.variants import by_machine
from lsai_lab.runs.records import Summary


def test_the_own_machine_comes_first_wherever_its_runs_begin() -> None:
    runs = [SimpleNamespace(machine=name) for name in ("h200", "b", "a (this machine)", "b")]
    found = by_machine(runs)  # type: ignore[arg-type]
    assert list(found) == ["a (this machine)", "h200", "b"] and len(found["b"]) == 2


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
