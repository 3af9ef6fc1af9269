"""What stands together in one table: the runs of the current plan, never a mixture of settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Project

from lsai_core.files import write_json
from lsai_lab.runs.execute import write_plan
from lsai_lab.runs.records import Summary
from lsai_lab.runs.selection import current_runs
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import PlannedRun


def record(session: Session, run: PlannedRun, **results: Any) -> None:
    """A finished record of a planned run, as if it had been executed."""
    write_plan(run, "test")
    write_json(run.folder / "env.json", session.env)
    Summary(run.id, run.kind, "ok", None, "2026-01-01T00:00:00+00:00", 1.0, "test", run.code, results).write(run.folder)


@pytest.fixture
def project(new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> Project:
    made = new_project({"baseline": {}, "bf16": {"config": {"precision": "bf16_autocast"}}})
    for key, value in made.env.items():
        monkeypatch.setenv(key, value)
    return made


def test_runs_by_hand_with_other_settings_change_no_selection_and_no_row(project: Project) -> None:
    session = Session()
    for run in session.plan("memory", parts=["train"]):
        record(session, run, tokens_per_s=100.0)
    before = [run.folder for run in current_runs(session, "memory")]
    table = project.lsai("compare", "memory")[1]
    assert len(before) == 2 and "100" in table
    for other in ({"optim": {"lr": 0.5}}, {"steps": 99, "optim": {"lr": 0.25}}):
        (run,) = session.plan("memory", only=["baseline"], parts=["train"], overrides=other)
        record(session, run, tokens_per_s=900.0)
    assert [run.folder for run in current_runs(session, "memory")] == before
    assert project.lsai("compare", "memory")[1] == table
    code, every, _ = project.lsai("compare", "memory", "--all")
    rows = [line.split() for line in every.splitlines() if "baseline" in line]
    assert code == 0 and sorted(row[-1] for row in rows) == ["100", "900", "900"], every  # three settings, three rows
    assert "optim.lr=0.5, steps=12" in every and "optim.lr=0.25, steps=99" in every


def test_without_the_prepared_text_there_are_no_own_runs_and_none_is_prepared(project: Project) -> None:
    session = Session()
    run = session.plan("memory", parts=["train"])[0]
    record(session, run)
    assert len(current_runs(Session(), "memory")) == 1
    (project.root / "data").rename(project.root / "elsewhere")
    assert current_runs(Session(), "memory") == []
    assert [run.summary.kind for run in current_runs(Session())] == []  # the fixture's ceilings are of no plan
    assert not (project.root / "data").exists()


def test_a_run_counts_on_the_machine_that_it_was_executed_on(project: Project) -> None:
    """As on a cluster's login node: the plan is that of the node which executed the run."""
    node = Session("cpu")
    node.__dict__["env"] = {**node.env, "cpu": "another processor"}
    run = node.plan("memory", only=["baseline"], parts=["train"])[0]
    record(node, run)
    assert [run.folder for run in current_runs(Session(), "memory")] == [run.folder]
