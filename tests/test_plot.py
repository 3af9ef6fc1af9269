"""`lsai plot` draws the plots of a configuration from committed and own runs; `lsai compare` ends
with what to take."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from conftest import CHECKOUT, Project, write_run
from test_selection import record

from lsai_lab.runs.session import Session

COURSE = ["speed", "memory", "mfu", "time", "loss"]
SPEED, MEMORY, LOSS = "tokens_per_s", "mem_peak_allocated_gib", "validation_loss"


def lsai(project: Project, *words: object) -> tuple[int, str, str]:
    """`lsai <words>` as a process: what reads records keeps the project that it began with."""
    process = project.start(*words)
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The shipped studies and records, in a folder that can be written to."""
    root = tmp_path_factory.mktemp("shipped")
    for name in ("params", "notebooks", "reports"):
        (root / name).symlink_to(CHECKOUT / name)
    return Project(root)


@pytest.fixture(scope="module")
def own(new_project: Callable[..., Project]) -> Project:
    """Runs with known figures: (tokens/s, GiB, loss). `tied` is as fast as `fast` but for noise,
    `poor` is worse than others in both."""
    figures = {
        "baseline": (100.0, 10.0, 4.0),
        "fast": (300.0, 8.0, 4.0),
        "tied": (299.0, 8.5, 4.0),
        "small": (90.0, 2.0, 4.125),
        "poor": (80.0, 9.0, 4.0),
    }
    project = new_project({name: {} for name in figures})
    with pytest.MonkeyPatch.context() as patch:
        for key, value in project.env.items():
            patch.setenv(key, value)
        session = Session()
        for run in session.plan("memory", parts=["train"]):
            speed, memory, loss = figures[run.id.variant]
            record(session, run, **{SPEED: speed, MEMORY: memory, LOSS: loss})
    return project


def svg_text(path: Path) -> str:
    return " ".join("".join(node.itertext()) for node in ElementTree.parse(path).iter())


def test_the_course_plots_are_drawn_from_the_committed_runs(shipped: Project) -> None:
    code, out, err = lsai(shipped, "plot", "course", "--recorded", "--out", "drawn/here")
    assert code == 0, err
    folder = shipped.root / "drawn/here"
    names = {f"{name}.{end}" for name in COURSE for end in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == names
    assert [line.split(", ")[0] for line in out.splitlines()] == [
        f"drawn/here/{name}.png" for name in COURSE
    ]
    for name in COURSE:
        assert (folder / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    described = yaml.safe_load((CHECKOUT / "params/plots/course.yaml").read_text())["plots"]
    labels = yaml.safe_load((CHECKOUT / "params/studies/course.yaml").read_text())["variants"]
    for plot in described:
        shown = svg_text(folder / f"{plot['name']}.svg")
        assert plot["title"] in shown and plot["label"] in shown
        assert all(variant["label"] in shown for variant in labels.values()), plot["name"]


REFUSED = {
    "plot cuorse": r"unknown plot configuration 'cuorse'; did you mean course\?; or a YAML file",
    "plot missing.yaml": r"missing\.yaml",
    "plot course --recorded --out a_file": r"--out a_file is a file; name a folder",
    "plot course": r"no such run of study course \(there are: h100, h200\); run `lsai",
    "plot course --machine b200 --recorded": r"no such run of study course \(there are: h100, h200",
    "plot odd.yaml --recorded": r"plot x: no run of 'fusde'",
    "plot part.yaml --recorded": r"study course has no part 'trian'",
}


def test_what_cannot_be_drawn_is_one_line(shipped: Project) -> None:
    (shipped.root / "a_file").write_text("")
    plot = {"name": "x", "title": "X", "metric": SPEED, "kind": "bar", "label": "speed"}
    shipped.write_yaml("odd.yaml", {"study": "course", "plots": [plot | {"variants": ["fusde"]}]})
    shipped.write_yaml("part.yaml", {"study": "course", "part": "trian", "plots": [plot]})
    for command, why in REFUSED.items():
        code, out, err = lsai(shipped, *command.split())
        assert (code, out) == (2, "") and len(err.splitlines()) == 1, (command, err)
        assert re.search(why, err), (command, err)
    assert not (shipped.root / "plots").exists()


def test_own_runs_are_drawn_from_a_configuration_of_ones_own(own: Project) -> None:
    plots = [
        {"name": "pace", "title": "Pace", "metric": SPEED, "kind": "bar", "label": "speed"},
        {"name": "lost", "title": "Lost", "metric": "elsewhere", "kind": "bar", "label": "none"},
    ]
    plots[0] |= {"variants": ["fast", "small"], "unit": "tokens/s"}
    own.write_yaml("mine.yaml", {"study": "memory", "plots": plots})
    code, out, err = lsai(own, "plot", "mine.yaml", "--out", "mine")
    assert code == 0, err
    assert out == "mine/pace.png, mine/pace.svg\nlost: no run has elsewhere\n"
    shown = svg_text(own.root / "mine/pace.svg")
    assert "fast" in shown and "small" in shown and "tied" not in shown
    assert "speed (tokens/s)" in shown and "300" in shown


def test_compare_ends_with_the_best_for_memory_speed_and_both_and_when_to_use_which(
    own: Project,
) -> None:
    code, out, err = own.lsai("compare", "memory")
    assert code == 0, err
    told = [line.rstrip() for line in out.partition("memory on ")[2].splitlines() if line.strip()]
    assert told[1:] == [
        "Best against baseline (speed and peak memory as multiples of its own):",
        "  memory  small, 0.90x as fast, 20% of the memory",
        "  speed   fast, 3.00x as fast, 80% of the memory; equal: tied",
        "  both    small, 0.90x as fast, 20% of the memory",
        "When to use which:",
        "  from  20% of the memory on: small, 0.90x as fast, 20% of the memory, validation loss "
        "+0.125",
        "  from  80% of the memory on: fast, 3.00x as fast, 80% of the memory, validation loss "
        "+0.000",
        "  another is at least as good in both: tied, poor",
    ]


@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_compare_advises_by_the_recorded_runs(shipped: Project, machine: str) -> None:
    code, out, err = shipped.lsai("compare", "memory", "--recorded", "--machine", machine)
    assert code == 0, err
    labels = yaml.safe_load((CHECKOUT / "params/studies/memory.yaml").read_text())["variants"]
    found: dict[str, list[dict[str, float]]] = {}
    for path in (CHECKOUT / "reports/recorded" / machine / "memory").glob("*/summary.json"):
        summary = json.loads(path.read_text())
        if summary["id"]["part"] == "train" and summary["outcome"] == "ok":
            found.setdefault(summary["id"]["variant"], []).append(summary["results"])
    figures = {
        name: [statistics.median(run[key] for run in runs) for key in (SPEED, MEMORY)]
        for name, runs in found.items()
    }
    base = figures["baseline"]
    gains = {name: (speed / base[0], memory / base[1]) for name, (speed, memory) in figures.items()}
    best = {
        "memory": min(gains, key=lambda name: gains[name][1]),
        "speed": max(gains, key=lambda name: gains[name][0]),
        "both": max(gains, key=lambda name: gains[name][0] / gains[name][1]),
    }
    told = out.partition(f"memory on {machine}")[2]
    assert "When to use which:" in told
    for what, name in best.items():
        speed, memory = gains[name]
        line = f"  {what:7} {labels[name]['label']}, {speed:.2f}x as fast, {memory:.0%} of the"
        assert line in told, (line, told)


def test_without_a_baseline_there_is_no_advice(own: Project, tmp_path: Path) -> None:
    write_run(tmp_path, "memory", "fast", results={SPEED: 3.0, MEMORY: 1.0})
    write_run(tmp_path, "memory", "small", results={SPEED: 1.0, MEMORY: 0.5})
    code, out, _ = own.lsai("compare", "memory", "--runs", tmp_path)
    assert code == 0 and "fast" in out and "Best against" not in out
