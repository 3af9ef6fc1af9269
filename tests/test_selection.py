"""What stands together in one table: the runs of the current plan, never a mixture of settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CHECKOUT, Project

import lsai_lab as lab
from lsai_core.base.files import write_json
from lsai_lab.runs.campaign import expected_seconds
from lsai_lab.runs.execute import write_plan
from lsai_lab.runs.records import Summary, annotate, find_runs
from lsai_lab.runs.session import Session, current_runs
from lsai_lab.runs.study import PlannedRun


def record(session: Session, run: PlannedRun, **results: Any) -> None:
    """A finished record of a planned run, as if it had been executed."""
    write_plan(run, "test")
    write_json(run.folder / "env.json", session.env)
    Summary(
        run.id, run.kind, "ok", None, "2026-01-01T00:00:00+00:00", 1.0, "test", run.code, results
    ).write(run.folder)


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
    # three settings, three rows
    assert code == 0 and sorted(row[-1] for row in rows) == ["100", "900", "900"], every
    assert "optim.lr=0.5 " in every and "steps=99" in every, every


def test_without_the_prepared_text_there_are_no_own_runs_and_none_is_prepared(
    project: Project,
) -> None:
    session = Session()
    run = session.plan("memory", parts=["train"])[0]
    record(session, run)
    assert len(current_runs(Session(), "memory")) == 1
    (project.root / "data").rename(project.root / "elsewhere")
    assert current_runs(Session(), "memory") == []
    # the fixture's ceilings are of no plan
    assert [run.summary.kind for run in current_runs(Session())] == []
    assert not (project.root / "data").exists()


def test_a_run_counts_on_the_machine_that_it_was_executed_on(project: Project) -> None:
    """As on a cluster's login node: the plan is that of the node which executed the run."""
    node = Session("cpu")
    node.__dict__["env"] = {**node.env, "cpu": "another processor"}
    run = node.plan("memory", only=["baseline"], parts=["train"])[0]
    record(node, run)
    assert [run.folder for run in current_runs(Session(), "memory")] == [run.folder]


def test_own_runs_are_listed_filtered_compared_named_and_deleted(project: Project) -> None:
    session = Session()
    for lr in (0.5, 0.25):
        (run,) = session.plan(
            "memory", only=["baseline"], parts=["train"], overrides={"optim": {"lr": lr}}
        )
        record(session, run, tokens_per_s=1000 * lr)
        if lr == 0.5:
            annotate(run.folder, name="fast", note="too fast", tags=["try"])
    code, out, _ = project.lsai("runs", "list", "--where", "optim.lr=5e-1", "--json")
    (row,) = json.loads(out)
    assert code == 0 and (row["name"], row["note"], row["tags"], row["current plan"]) == (
        "fast",
        "too fast",
        "try",
        "",
    )
    assert len(json.loads(project.lsai("runs", "list", "--tag", "try", "--json")[1])) == 1
    assert (
        "no run has a setting 'optim.rl'"
        in project.lsai("runs", "list", "--where", "optim.rl=1")[2]
    )
    differ = json.loads(project.lsai("runs", "compare", "fast", run.id.key[:6], "--json")[1])
    assert {one["what"] for one in differ} == {"config.optim.lr", "results.tokens_per_s"}
    # two runs have this name
    assert project.lsai("runs", "compare", "memory.baseline", "fast")[0] == 2
    code, out, _ = project.lsai("runs", "delete", "fast", "--yes")
    assert (
        code == 0
        and "deleted" in out
        and [r.folder for r in find_runs(session.runs_root, study="memory")] == [run.folder]
    )


DAMAGE = {
    "summary.json": [
        "",
        "{",
        "[]",
        '{"schema": 1}',
        "\x00\xff",
        '{"outcome": "<script>"}',
        '{"id": {"study": "../x"}}',
    ],
    "env.json": ["", "[]", '{"machine": "../up"}', '{"cpu": ["x"]}', '{"packages": {"torch": 3}}'],
    "run.json": ["null", '{"tags": "x"}', '{"inputs": []}'],
    "config.json": ["3", "\x00", "{" * 5000],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in DAMAGE.items() for text in texts]
)
def test_a_damaged_record_is_shown_as_damaged_and_the_others_go_on(
    project: Project, name: str, text: str
) -> None:
    session = Session()
    good, bad = session.plan("memory", parts=["train"])
    for run in (good, bad):
        record(session, run, tokens_per_s=5.0)
    (bad.folder / name).write_text(text, encoding="latin-1")
    code, out, err = project.lsai("compare", "memory", "--all")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert [row[1] for row in rows if row[:1] == ["bf16"]] == ["damaged"], out
    assert [row[0] for row in rows if "5" in row] == ["baseline"], out
    assert str(bad.folder / name) in find_runs(session.runs_root)[-1].summary.reason
    assert [run.folder for run in current_runs(Session(), "memory")] == [good.folder]
    code, _, err = project.lsai("record", "memory", "--machine", "box")
    kept = [
        run.summary.id.variant for run in find_runs(project.root / "reports" / "recorded" / "box")
    ]
    assert code == 0 and kept == ["baseline"], err


def test_records_are_copied_whole_and_only_to_their_place(project: Project, tmp_path: Path) -> None:
    session = Session()
    run = session.plan("memory", parts=["train"])[0]
    record(session, run)
    (tmp_path / "private").write_text("secret")
    (run.folder / "metrics.jsonl").symlink_to(tmp_path / "private")
    code, _, err = project.lsai("record", "memory", "--machine", "../../x")
    assert code == 2 and "is no name" in err and not (project.root / "reports/recorded").exists()
    assert project.lsai("record", "memory", "--machine", "box")[0] == 0
    assert not list(project.root.glob("reports/recorded/*/*/*/metrics.jsonl"))


@pytest.mark.parametrize("file", ["config.json", "env.json", "run.json", "kernels.json"])
@pytest.mark.parametrize("target", ["nothing", "/dev/zero", None])
def test_a_file_that_cannot_be_read_makes_its_run_damaged(
    project: Project, file: str, target: str | None
) -> None:
    session = Session()
    good, bad = session.plan("memory", parts=["train"])[:2]
    record(session, good)
    record(session, bad)
    (bad.folder / file).unlink(missing_ok=True)
    (bad.folder / file).symlink_to(target or file)  # no target: to itself
    outcomes = {run.folder: run.summary.outcome for run in find_runs(session.runs_root)}
    assert outcomes.pop(bad.folder) == "damaged"
    assert good.folder in outcomes and set(outcomes.values()) == {"ok"}


@pytest.mark.parametrize("name", ["/tmp/x", "a{b}", "..", "x" * 300, "", "a b"])
def test_names_that_cannot_be_files_are_refused_in_one_line(project: Project, name: str) -> None:
    path = "params/studies/memory.yaml"
    study = yaml.safe_load((project.root / path).read_text())
    for command in (
        ["study", name],
        ["train", "--study", name],
        *([["study", "memory", "--profile", name]] if name else []),
    ):
        code, _, err = project.lsai(*command)
        assert code == 2 and len(err.splitlines()) == 1, (command, err)
    for part in ("variants", "parts"):
        changed = {**study, part: {**study[part], name: next(iter(study[part].values()))}}
        project.write_yaml(path, changed)
        code, _, err = project.lsai("study", "memory", "--dry-run")
        assert code == 2 and len(err.splitlines()) == 1 and "is no name" in err, err


def test_a_few_runs_of_a_well_recorded_machine_do_not_stand_for_a_study(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    runs = lab.load()
    runs = runs[~runs["own"]]
    counts = runs.groupby(["study", "part", "machine"]).size()
    main = runs[runs["main"]].groupby(["study", "part"])["machine"].unique()
    assert len(main) == len(runs.drop_duplicates(["study", "part"])) and main.str.len().eq(1).all()
    for (study, part), (machine,) in main.items():
        assert 3 * counts[study, part, machine] >= counts[study, part].max(), (study, part)
    speed = counts["fp8", "speed"]
    assert speed["h100"] < speed[main["fp8", "speed"][0]] / 3  # though h100 has more records in all


def test_the_expected_time_of_a_run_is_that_of_its_variant_else_of_its_part(
    project: Project,
) -> None:
    session = Session()
    slow, quick = session.plan("memory", parts=["train"])
    record(session, slow)
    summary = Summary.read(slow.folder)
    replace(summary, wall_s=40.0).write(slow.folder)
    (again,) = session.plan(
        "memory", only=[slow.id.variant], parts=["train"], overrides={"optim": {"lr": 0.5}}
    )
    expected = expected_seconds(session, [("memory", [slow, again, quick])])
    # the part's only record
    assert slow.folder.exists() and quick.name in expected and expected[quick.name] == 40.0
    record(session, quick)  # one second
    (other,) = session.plan(
        "memory", only=[quick.id.variant], parts=["train"], overrides={"optim": {"lr": 0.5}}
    )
    assert expected_seconds(session, [("memory", [again])])[again.name] == 40.0
    assert expected_seconds(session, [("memory", [other])])[other.name] == 1.0
    many = replace(
        other,
        config=other.config.model_copy(
            update={"parallel": other.config.parallel.model_copy(update={"fsdp": 8})}
        ),
    )
    session.env |= {"gpu": "NVIDIA Test", "gpu_count": 1}
    # eight GPUs, and there is one
    assert expected_seconds(session, [("memory", [many])])[many.name] == 2.0
