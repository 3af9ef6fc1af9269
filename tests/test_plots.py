"""Plot configurations and `lsai plot`: good ones become files, bad ones one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from conftest import CHECKOUT, Project, write_run

from lsai_core.errors import UserError
from lsai_lab.report.memory.figures import pareto_front
from lsai_lab.report.plots import load_plots

PLOTS: dict[str, Any] = {
    "study": "memory",
    "plots": [
        {"name": "speed", "title": "Speed", "metric": "tokens_per_s", "kind": "bar", "label": "tokens/s"},
        {"name": "loss", "title": "Loss", "metric": "loss", "kind": "line", "label": "loss", "against": "time", "smooth": 3},
    ],
}  # fmt: skip
METRICS = [
    {"step": step, "loss": 5.0 - step / 9, "tokens_in_step": 64, "step_ms": 10.0, "tokens_per_s": 6400.0, "steady": step > 2}
    for step in range(9)
]  # fmt: skip


def changed(**change: Any) -> dict[str, Any]:
    """PLOTS with keys of its first plot changed; a value of None takes the key away."""
    first = {key: value for key, value in {**PLOTS["plots"][0], **change}.items() if value is not None}
    return {**PLOTS, "plots": [first, PLOTS["plots"][1]]}


@pytest.fixture(scope="module")
def project(new_project: Callable[..., Project]) -> Project:
    project = new_project({"baseline": {}, "bf16": {}, "window": {}})
    for repeat, rate in enumerate((100.0, 120.0, 140.0)):
        results = {"tokens_per_s": rate, "train_loss": 3.0, "device": "cpu"}
        write_run(project.runs, "memory", "baseline", repeat=repeat, results=results, metrics=METRICS)
    write_run(project.runs, "memory", "bf16", results={"tokens_per_s": 150.0}, metrics=METRICS)
    write_run(project.runs, "memory", "window", outcome="oom", reason="out of memory")
    return project


def plot(project: Project, tmp_path: Path, config: dict[str, Any], *arguments: object) -> tuple[int, str, str]:
    (tmp_path / "plots.yaml").write_text(yaml.safe_dump(config))
    return project.lsai("plot", tmp_path / "plots.yaml", "--out", tmp_path / "out", *arguments)


def test_plots_become_png_and_svg(project: Project, tmp_path: Path) -> None:
    code, out, err = plot(project, tmp_path, PLOTS)
    assert code == 0, err
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(made) == ["loss.png", "loss.svg", "speed.png", "speed.svg"]
    assert made["loss.png"].startswith(b"\x89PNG") and b"<svg" in made["speed.svg"]
    assert "over the repeats" in out and "running mean over 3 steps" in out and "2 of 2 plots" in out
    assert out.count("Without a figure: window (oom).") == 2


def test_what_was_not_measured_is_told(project: Project, tmp_path: Path) -> None:
    code, out, _ = plot(project, tmp_path, changed(metric="memory_allocated_gib", kind="line"))
    assert code == 0 and "speed: no run on" in out and "has memory_allocated_gib" in out and "1 of 2 plots" in out
    code, out, _ = plot(project, tmp_path, changed(metric="train_loss"))
    assert code == 0 and "Without a figure: bf16 (not measured there), window (oom)." in out
    code, out, _ = plot(project, tmp_path, changed(variants=["bf16"], log=True))
    assert code == 0 and out.count("window") == 1  # in the other plot only


def test_a_published_figure_stands_beside_its_own_setting_only(project: Project, tmp_path: Path) -> None:
    other = {"label": "theirs", "source": "their paper", "config": {"seq_len": 32}, "results": {"tokens_per_s": 7.0}}
    run = project.runs / "memory"
    for path in run.glob("*/config.json"):
        path.write_text('{"seq_len": 32, "batch_size": 1}')
    code, out, err = plot(project, tmp_path, {**PLOTS, "published": [other]})
    assert code == 0 and out.count("Dashed: theirs, 7 tokens/s (their paper).") == 1, err
    other["config"] = {"seq_len": 32, "batch_size": 2}
    code, out, _ = plot(project, tmp_path, {**PLOTS, "published": [other]})
    assert code == 0 and "theirs" not in out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(metric="tokens_per_sec"), "no result of a run is called 'tokens_per_sec'; did you mean tokens_per_s? known: "),
        (changed(metric="device"), "no result of a run is called 'device'"),
        (changed(metric="xyz", kind="line"), "no column of metrics.jsonl is called 'xyz'; known: elapsed_s, grad_norm, "),
        (changed(metrik="loss"), "unknown key 'plots.0.metrik' (did you mean 'metric'?)"),
        (changed(colour="red"), "(known: name, title, metric, kind, label, unit, "),
        (changed(kind="pie"), "plots.0.kind"),
        (changed(smooth=3), "smooth belongs to a line"),
        (changed(smooth=0, kind="line"), "plots.0.smooth"),
        (changed(name="loss"), "two plots are called 'loss'"),
        (changed(label=None), "plots.0.label"),
        (changed(variants=["bf61"]), "has no variant 'bf61'; did you mean bf16?"),
        ({**PLOTS, "plots": []}, "plots"),
        ({**PLOTS, "part": "batsh"}, "has no part 'batsh'; did you mean batch?"),
        ({**PLOTS, "study": "memry"}, "unknown study 'memry'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_line(project: Project, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    code, _, err = plot(project, tmp_path, config)
    assert code == 2 and len(err.splitlines()) == 1 and message in err, err
    assert not (tmp_path / "out").exists()


def test_missing_runs_and_files_are_one_clear_line(project: Project, tmp_path: Path) -> None:
    for arguments, message in (
        (["--machine", "h200"], "no finished run of study memory"),
        (["--recorded"], "in the committed records"),
        (["--recorded", "--runs", tmp_path], "does not go with --runs"),
        (["--runs", tmp_path], "run `lsai study memory` first"),
    ):
        code, _, err = plot(project, tmp_path, PLOTS, *arguments)
        assert code == 2 and len(err.splitlines()) == 1 and message in err, err
    code, _, err = project.lsai("plot", "no-such", "--out", tmp_path)
    assert code == 2 and "unknown plot configuration 'no-such'; known: course" in err
    (tmp_path / "file").write_text("")
    (tmp_path / "plots.yaml").write_text(yaml.safe_dump(PLOTS))
    code, _, err = project.lsai("plot", tmp_path / "plots.yaml", "--out", tmp_path / "file")
    assert code == 2 and "cannot write the plots" in err and len(err.splitlines()) == 1
    code, out, _ = project.lsai("plot", "--help")
    assert code == 0 and "params/plots/course.yaml" in out


def test_shipped_plots_are_valid() -> None:
    names = [path.stem for path in (CHECKOUT / "params" / "plots").glob("*.yaml")]
    assert {load_plots(CHECKOUT, name).study for name in names} == {"course"}
    with pytest.raises(UserError, match="no such file"):
        load_plots(CHECKOUT, "nowhere/plots.yaml")


def test_equal_memory_is_no_reason_for_a_slower_variant():
    rows = pd.DataFrame(
        {
            "variant": ["lean", "as lean", "middling", "slow", "fast"],
            "mem_peak_allocated_gib": [2.542, 2.543, 4.0, 5.04, 5.041],
            "tokens_per_s": [400.0, 700.0, 600.0, 890.0, 910.0],
        }
    )
    assert list(pareto_front(rows, "tokens_per_s", more_is_better=True)["variant"]) == ["as lean", "fast"]
