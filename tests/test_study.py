"""Plans and reuse: which runs a study has, when a finished run is taken again, and what a change
touches."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CHECKOUT, Hazards, Project

from lsai_core.base import code
from lsai_core.base.errors import UserError
from lsai_lab.runs import driver as driver_module
from lsai_lab.runs.campaign import plan_studies
from lsai_lab.runs.chapters import report_studies
from lsai_lab.runs.driver import run_one
from lsai_lab.runs.execute import write_plan
from lsai_lab.runs.records import Summary, find_runs
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import (
    PlannedRun,
    Profile,
    load_study,
    matching,
    select_variants,
    study_names,
)


def plan(project: Project, *arguments: object) -> dict[str, tuple[str, str]]:
    """`lsai study memory --dry-run`: run name -> (recorded or to run, folder name)."""
    code, out, err = project.lsai("study", "memory", "--dry-run", *arguments)
    assert code == 0, err
    rows = re.findall(r"^(recorded|to run) +memory\.(\S+) +(\S+)$", out, re.M)
    return {name: (state, Path(folder).name) for state, name, folder in rows}


def edit(project: Project, path: str, change: Callable[[dict[str, Any]], Any]) -> None:
    value = yaml.safe_load((project.root / path).read_text())
    change(value)
    project.write_yaml(path, value)


def touched(before: dict[str, tuple[str, str]], after: dict[str, tuple[str, str]]) -> set[str]:
    return {name for name in after if before.get(name) != after[name]}


def test_a_change_touches_only_the_runs_whose_result_it_can_change(
    new_project: Callable[..., Project],
) -> None:
    project = new_project({"baseline": {}, "bf16": {"config": {"precision": "bf16_autocast"}}})
    study = "params/studies/memory.yaml"
    before = plan(project)
    assert set(before) == {"baseline", "bf16", "baseline.batch", "bf16.batch"}
    assert len({folder for _, folder in before.values()}) == 4

    edit(
        project,
        study,
        lambda s: s["variants"]["bf16"].update(label="other words", note="and a note"),
    )
    edit(project, study, lambda s: s["parts"]["train"].update(timeout_s=77))
    assert touched(before, plan(project)) == set()

    edit(project, study, lambda s: s["variants"]["bf16"]["config"].update(optim={"lr": 1e-4}))
    changed = plan(project)
    # the search for the largest batch does not depend on the learning rate
    assert touched(before, changed) == {"bf16"}

    edit(project, study, lambda s: s["parts"]["batch"]["settings"].update(resolution=0.25))
    assert touched(changed, plan(project)) == {"baseline.batch", "bf16.batch"}

    edit(project, study, lambda s: s["base"]["model"].update(n_layers=3))
    assert touched(before, plan(project)) == set(before)


def test_the_text_and_the_profile_are_part_of_the_key(
    new_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = new_project()
    before = plan(project, "--parts", "train")
    other = tmp_path / "other.jsonl"
    source = yaml.safe_load((project.root / "params/studies/memory.yaml").read_text())["base"][
        "data"
    ]["source"]
    other.write_text(Path(source.removeprefix("file:")).read_text().replace("milk", "soup"))
    first = plan(project, "--parts", "train", "--dataset", f"file:{other}")
    assert touched(before, first) == {"baseline"}
    # the same file name, another content
    other.write_text(other.read_text().replace("soup", "cake"))
    assert touched(first, plan(project, "--parts", "train", "--dataset", f"file:{other}")) == {
        "baseline"
    }
    big = {"profile": "big", "description": "", "studies": {"memory": {"base": {"steps": 99}}}}
    project.write_yaml("params/profiles/big.yaml", big)
    assert touched(before, plan(project, "--parts", "train", "--profile", "big")) == {"baseline"}


def test_layers_the_command_line_wins(new_project: Callable[..., Project]) -> None:
    project = new_project({"baseline": {"config": {"steps": 20, "seq_len": 16}}})
    edit(
        project,
        "params/studies/memory.yaml",
        lambda s: s["parts"]["train"].update(settings={"steps": 30}),
    )
    big = {
        "profile": "big",
        "description": "",
        "studies": {"memory": {"base": {"steps": 10, "batch_size": 3}}},
    }
    project.write_yaml("params/profiles/big.yaml", big)

    def config(**overrides: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in project.env.items():
                patch.setenv(key, value)
            return Session("big").plan("memory", parts=["train"], overrides=overrides)[0].config

    assert (config().steps, config().seq_len, config().batch_size) == (30, 16, 3)
    assert config(steps=40).steps == 40
    code, _, _ = project.lsai(
        "find-batch", "--set", "max_size=1", "--set", "cpu_limit_gib=0.5", "--profile", "big"
    )
    assert code == 2  # max_size is no setting of this study's search and no key of a training run
    assert plan(project, "--parts", "batch") != plan(
        project, "--parts", "batch", "--set", "cpu_limit_gib=0.5"
    )


def test_repeats_are_runs_with_their_own_seeds(new_project: Callable[..., Project]) -> None:
    project = new_project()
    edit(project, "params/studies/memory.yaml", lambda s: s["parts"]["train"].update(repeats=3))
    assert set(plan(project, "--parts", "train", "--set", "seed=7")) == {
        "baseline",
        "baseline.r1",
        "baseline.r2",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in project.env.items():
            patch.setenv(key, value)
        runs = Session("cpu").plan("memory", parts=["train"], overrides={"seed": 7})
    assert [run.config.seed for run in runs] == [7, 8, 9]
    assert len({run.id.key for run in runs}) == 3


def test_a_finished_study_is_reused_and_says_so(hazards: Hazards) -> None:
    project = hazards.project
    before = {path: path.stat().st_mtime_ns for path in project.runs.rglob("*") if path.is_file()}
    code, out, err = project.lsai("study", "memory", "--parts", "train", "--only", "baseline,oom")
    assert code == 0, err
    assert (
        "reusing 2 of 2 runs (same config, code, data and machine)" in out and "started" not in out
    )
    assert {
        path: path.stat().st_mtime_ns for path in project.runs.rglob("*") if path.is_file()
    } == before


def test_equal_runs_of_one_plan_are_measured_once(
    new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = new_project({"baseline": {}, "same": {}, "other": {"config": {"steps": 7}}})
    for key, value in project.env.items():
        monkeypatch.setenv(key, value)
    session, executed = Session("cpu"), []

    def fake(run: PlannedRun, **_: Any) -> Summary:
        executed.append(run.id.variant)
        summary = Summary(
            run.id, run.kind, "ok", None, "2026-01-01T00:00:00+00:00", 1.0, "test", {}, {"steps": 1}
        )
        run.folder.mkdir(parents=True)
        summary.write(run.folder)
        return summary

    monkeypatch.setattr(driver_module, "run_one", fake)
    summaries = session.run(session.plan("memory", parts=["train"]))
    assert executed == ["baseline", "other"]
    assert [summary.id.variant for summary in summaries] == ["baseline", "same", "other"]


def test_only_runs_without_speeds_share_the_machine(
    new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = new_project({"baseline": {}, "bf16": {"config": {"precision": "bf16_autocast"}}})
    for key, value in project.env.items():
        monkeypatch.setenv(key, value)
    session, both, alone = Session("cpu"), threading.Barrier(2, timeout=20), threading.Lock()
    executed: list[tuple[str, str, int]] = []

    def fake(run: PlannedRun, *, beside: int, **_: Any) -> Summary:
        executed.append((run.kind, run.id.variant, beside))
        if run.kind == "batch_search":
            both.wait()  # returns when a second search has begun
        else:
            assert alone.acquire(blocking=False)
            time.sleep(0.05)
            alone.release()
        summary = Summary(
            run.id, run.kind, "ok", None, "2026-01-01T00:00:00+00:00", 1.0, "test", {}, {"steps": 1}
        )
        run.folder.mkdir(parents=True)
        summary.write(run.folder)
        return summary

    monkeypatch.setattr(driver_module, "run_one", fake)
    summaries = session.run(session.plan("memory", parts=["batch", "train"]), untimed_jobs=2)
    assert executed[:2] == [("train", "baseline", 0), ("train", "bf16", 0)]
    assert sorted(executed[2:]) == [("batch_search", "baseline", 1), ("batch_search", "bf16", 1)]
    assert {(summary.kind, summary.outcome) for summary in summaries} == {
        ("train", "ok"),
        ("batch_search", "ok"),
    }


def test_what_no_run_can_do_without_is_asked_for_once_and_before_any(
    new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    project = new_project({"baseline": {}, "bf16": {"config": {"precision": "bf16_autocast"}}})
    for key, value in project.env.items():
        monkeypatch.setenv(key, value)
    session = Session("cpu")
    plan = session.plan("memory")
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "IPython" else there(name)
    )
    with pytest.raises(UserError, match="needs what is not installed here: IPython; pip install"):
        session.run(plan)
    assert not any(run.folder.exists() for run in plan)


def test_a_run_that_another_process_finished_meanwhile_is_not_repeated(
    hazards: Hazards, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in hazards.project.env.items():
        monkeypatch.setenv(key, value)
    session = Session("cpu")
    run = session.plan("memory", only=["baseline"], parts=["train"])[0]
    before = hazards.after_second["baseline"].summary
    again = run_one(run, title="", root=session.root, data_root=session.data_root, command="again")
    assert again.started == before.started and again.command == before.command


@pytest.fixture
def twins(new_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch) -> Project:
    """Two studies that ask for the same run, one of them twice; executing is replaced by writing a
    record."""
    project = new_project()
    study = yaml.safe_load((project.root / "params/studies/memory.yaml").read_text())
    variant = study["variants"]["baseline"]
    same = {
        "study": "speed",
        "baseline": None,
        "variants": {"first": variant, "second": {**variant, "label": "other words"}},
    }
    project.write_yaml(
        "params/studies/speed.yaml", {**study, **same, "parts": {"train": {"timeout_s": 50}}}
    )

    def record(run: PlannedRun, *, command: str, **_: Any) -> Summary:
        write_plan(run, command)
        (run.folder / "env.json").write_text("{}")
        row = {"step": 0, "loss": 1.0, "step_ms": 2.0, "tokens_in_step": 8}
        (run.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (run.folder / ".hidden").write_text("")
        (run.folder / "model").mkdir(exist_ok=True)
        (run.folder / "model" / "config.json").write_text("{}")
        summary = Summary(
            run.id,
            run.kind,
            "ok",
            None,
            "2026-01-01",
            9.0,
            command,
            run.code,
            {"tokens_per_s": 5.0},
        )
        summary.write(run.folder)
        return summary

    monkeypatch.setattr(driver_module, "run_one", record)
    return project


def test_a_run_that_another_study_has_finished_is_copied(twins: Project) -> None:
    assert twins.lsai("study", "memory", "--parts", "train")[0] == 0
    (twins.runs / "speed").mkdir()
    first = twins.found()["baseline"]
    unfinished = twins.runs / "speed" / f"first-{first.summary.id.key}"
    unfinished.mkdir()
    (unfinished / "checkpoint-00000005.pt").write_text("of an attempt that was stopped")
    code, out, err = twins.lsai("study", "speed")
    assert code == 0, err
    assert "[1/2] speed.first is the same run as memory.baseline, copied" in out
    assert (
        "[2/2] speed.second is the same run as" in out
        and "started" not in out
        and "outcomes: 2 ok" in out
    )
    for name in ("first", "second"):
        copy = twins.found()[name]
        assert (copy.summary.id.study, copy.summary.id.variant) == ("speed", name)
        assert (
            copy.summary.measured_as == "memory.baseline"
            and copy.summary.id.key == first.summary.id.key
        )
        assert (
            copy.summary.results == first.summary.results
            and copy.summary.command == first.summary.command
        )
        assert (
            copy.config == first.config
            and copy.metrics.equals(first.metrics)
            and copy.env == first.env
        )
        files = {path.name for path in copy.folder.iterdir()} - {".lock"}
        assert files == {
            "config.json",
            "env.json",
            "metrics.jsonl",
            "model",
            "run.json",
            "summary.json",
        }
    code, out, _ = twins.lsai("study", "speed")
    assert code == 0 and "reusing 2 of 2 runs" in out and "copied" not in out


def test_the_second_of_two_equal_runs_of_one_study_is_copied(twins: Project) -> None:
    code, out, err = twins.lsai("study", "speed")
    assert code == 0, err
    assert (
        "[1/2] speed.first started" in out
        and "[2/2] speed.second is the same run as speed.first, copied" in out
    )


def test_again_repeats_what_is_finished_and_names_stay_with_the_run(twins: Project) -> None:
    words = ("train", "--study", "speed", "--technique", "first")
    assert twins.lsai(*words, "--name", "mine", "--tag", "a", "--tag", "b")[0] == 0
    code, out, _ = twins.lsai(*words)
    assert code == 0 and "reusing 1 of 1" in out and "started" not in out
    plan = twins.found()["first"].plan
    assert (plan["name"], plan["tags"]) == ("mine", ["a", "b"])
    code, out, err = twins.lsai(*words, "--again")
    assert code == 0 and "[1/1] speed.first started" in out, err


def test_a_copied_run_has_one_anchor_and_says_where_it_was_measured(twins: Project) -> None:
    twins.lsai("study", "memory", "--parts", "train")
    twins.lsai("study", "speed")
    runs = [run for run in find_runs(twins.runs) if run.summary.kind == "train"]
    assert len({run.summary.id.key for run in runs}) == 1 < len(runs)


SWEEP = {
    "name": "grid_{gpus}x_{rate}",
    "label": "{gpus} processes, lr {rate}",
    "config": {"steps": 7},
    "axes": {
        "gpus": {"key": "parallel.fsdp", "values": [1, 2]},
        "rate": {"key": "optim.lr", "values": [0.1, 0.2]},
    },
}


def test_a_sweep_makes_a_variant_of_every_combination(new_project: Callable[..., Project]) -> None:
    project = new_project()

    def with_sweep(study: dict[str, Any]) -> None:
        study["sweeps"] = {"grid": SWEEP}
        study["parts"] = {"train": {"variants": ["baseline"]}, "grid": {"variants": ["grid_*"]}}

    edit(project, "params/studies/memory.yaml", with_sweep)
    study = load_study(project.root, "memory", Profile(profile="none", description="", gpu=None))
    made = ["grid_1x_0.1", "grid_1x_0.2", "grid_2x_0.1", "grid_2x_0.2"]
    assert list(study.variants) == ["baseline", *made]
    assert (study.measured("train"), study.measured("grid")) == (["baseline"], made)
    last = study.variants["grid_2x_0.2"]
    assert last.config == {"steps": 7, "parallel": {"fsdp": 2}, "optim": {"lr": 0.2}}
    assert last.label == "2 processes, lr 0.2"
    assert set(plan(project)) == {"baseline", *(f"{name}.grid" for name in made)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "grid_{gpus}"}, r"sweeps.grid: name 'grid_{gpus}' does not hold {rate}"),
        ({"label": "{cores}"}, r"sweeps.grid: label '{cores}' refers to 'cores', which is no axis"),
        (
            {"axes": {"gpus": {"key": "parallel.fsdp", "value": [1]}}},
            r"unknown key 'sweeps.grid.axes.gpus.value'",
        ),
        (
            {"axes": {"gpus": {"key": "parallel.fsd", "values": [2]}}, "name": "{gpus}"},
            r"unknown key 'parallel.fsd'",
        ),
        (
            {
                "axes": {"gpus": {"key": "seed", "values": [1]}},
                "name": "baseline{gpus}",
                "label": "",
            },
            r"^$",
        ),
    ],
)
def test_a_bad_sweep_is_one_line(
    new_project: Callable[..., Project], change: dict[str, Any], message: str
) -> None:
    project = new_project({"baseline": {}, "other": {}})
    spec = {**SWEEP, "label": "", **change}
    edit(project, "params/studies/memory.yaml", lambda s: s.update(sweeps={"grid": spec}))
    code, _, err = project.lsai("study", "memory", "--dry-run", "--parts", "train")
    assert code == (2 if err else 0) and len(err.splitlines()) == (1 if err else 0), err
    assert re.search(message, err), err


def test_a_sweep_does_not_replace_a_variant(new_project: Callable[..., Project]) -> None:
    project = new_project({"baseline": {}, "grid_1x_0.1": {}})
    edit(project, "params/studies/memory.yaml", lambda s: s.update(sweeps={"grid": SWEEP}))
    code, _, err = project.lsai("study", "memory", "--dry-run")
    assert code == 2 and "sweep grid makes 'grid_1x_0.1', which is a variant already" in err


def test_patterns_choose_variants_of_a_study_and_of_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    session = Session("h200")
    session.dataset_id = lambda config: "none"  # type: ignore[method-assign]  # prepare no text for this
    largest = session.study("largest")
    assert select_variants(largest, ["plain_*", "bf16_1"], ["*_[48]"]) == [
        "plain_1",
        "plain_2",
        "bf16_1",
    ]
    assert select_variants(largest, [], ["*_[248]", "weights*", "adam*", "bf16*", "moments*"]) == [
        "plain_1",
        "checkpointed_1",
        "offload_1",
    ]

    names = report_studies(CHECKOUT)

    def planned(only: list[str], skip: list[str]) -> dict[str, set[str]]:
        return {
            study: {run.id.variant for run in runs}
            for study, runs in plan_studies(session, names, only, skip)
        }

    assert planned(["fp8"], ["*"]) == {}
    assert planned(["mach*", "baseline"], ["machine"]) == {
        "memory": {"baseline"},
        "course": {"baseline"},
    }


@pytest.mark.parametrize("profile", ["cpu", "gpu", "h200", "gh200", "rtx5090"])
def test_a_first_pass_is_a_small_part_of_the_full_one(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    session = Session(profile)
    session.dataset_id = lambda config: "none"  # type: ignore[method-assign]  # prepare no text for this
    first, full = (
        {
            run.folder: run
            for _, plan in plan_studies(session, report_studies(CHECKOUT), [], [], whole)
            for run in plan
        }
        for whole in (False, True)
    )
    assert set(first) < set(full), (
        "its runs are runs of the full pass, so that they are reused there"
    )
    assert next(iter(first.values())).kind == "ceilings"
    assert 10 <= len(first) <= 25 < len(full)
    # Every name and pattern of a first answer means a run of this profile, or of the variants that
    # it has not.
    for name in study_names(CHECKOUT):
        study = session.study(name)
        runs = [run.id.name for run in session.plan(name)]
        assert not study.first or any(matching(runs, [pattern]) for pattern in study.first), (
            name,
            study.first,
        )


def test_every_shipped_study_resolves_under_every_shipped_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LSAI_ROOT", str(CHECKOUT))
    for profile in sorted(path.stem for path in (CHECKOUT / "params" / "profiles").glob("*.yaml")):
        session = Session(profile)
        session.dataset_id = lambda config: "none"  # type: ignore[method-assign]  # prepare no text for this
        for name in study_names(CHECKOUT):
            study = load_study(CHECKOUT, name, session.profile)
            runs = session.plan(name)
            expected = sum(
                part.repeats * len(study.measured(key)) for key, part in study.parts.items()
            )
            assert len({run.folder for run in runs}) == expected, (profile, name)


def test_a_result_belongs_to_what_the_code_does_not_to_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hash_of(text: str) -> str:
        (tmp_path / "module.py").write_text(text)
        code._normalized.cache_clear()
        return code.code_hash([tmp_path / "module.py"])

    monkeypatch.setattr(code, "ROOT", tmp_path)
    first = hash_of('def f(x):\n    """Words."""\n    return x + 1  # why\n')
    assert hash_of('def f(x):\n    """Other words."""\n\n    return (x + 1)\n') == first
    assert hash_of('def f(x):\n    """Words."""\n    return x + 2\n') != first
    # The same in every version of Python, whose syntax trees differ in fields that are empty.
    assert first == "c8d133677336"
    code._normalized.cache_clear()
