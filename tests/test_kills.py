"""Twenty kills at random times: of the command, the process of its notebook, the kernel, the workers, in saves and while it renders.

Each is followed by the same command. In the end the losses are those of runs that nobody interrupted, to the last bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import Project, losses

from lsai_core.training import checkpoint
from lsai_lab.runs.records import Summary

SEED = 23
MARK = "LSAI_TEST_OF_KILLS"  # in the environment of everything that a command starts
TRAIN = ("study", "memory", "--parts", "train", "--only")
COMMANDS: dict[tuple[str, ...], tuple[int, float]] = {  # how many kills, within how many seconds of the start
    (*TRAIN, "baseline"): (10, 9.0),
    (*TRAIN, "sharded"): (6, 14.0),
    ("report", "--no-run", "--out", "out"): (4, 12.0),
}


def marked(project: Project) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(project.root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def killed(
    project: Project, words: tuple[str, ...], seconds: float, number: signal.Signals, choose: random.Random
) -> None:
    """Start a command, send a signal to one of its processes, and wait until none is left."""
    command = project.start(*words)
    try:
        command.wait(seconds)
    except subprocess.TimeoutExpired:
        family = sorted(marked(project), key=lambda process: process.pid)
        victim = choose.choice(family)
        if victim.is_running():
            victim.send_signal(number)
    try:
        command.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{words} goes on after {number.name} at {seconds:.1f} s")
    assert psutil.wait_procs(marked(project), timeout=60)[1] == [], (words, number, seconds)


def nothing_half(project: Project) -> None:
    """What has its final name is whole: checkpoints, summaries, pages."""
    for folder in project.runs.glob("memory/*"):
        for path in checkpoint.checkpoints(folder):
            assert checkpoint.load(path)["step"] > 0
        if (folder / "summary.json").exists():
            Summary.read(folder)
        for path in (*folder.glob("*.json"), *folder.glob("*.ipynb")):
            json.loads(path.read_text())
    for path in (project.root / "out").rglob("*.html"):
        assert path.read_text().rstrip().endswith("</html>"), path
    for path in (project.root / "out").rglob("*.pdf"):
        assert path.read_bytes().rstrip().endswith(b"%%EOF"), path


def finished(project: Project) -> dict[str, list[float]]:
    code, out, err = project.lsai(*TRAIN, "baseline,sharded")
    assert code == 0, (out, err)
    return {name: losses(run.folder) for name, run in project.found().items() if run.summary.kind == "train"}


@pytest.mark.slow
def test_twenty_kills_cost_nothing_but_time(new_project: Callable[..., Project]) -> None:
    variants = {"baseline": {}, "sharded": {"config": {"parallel": {"fsdp": 2}, "steps": 150}}}
    project = new_project(variants, steps=1500, checkpoint={"every": 10})
    project.environment[MARK] = str(project.root)
    choose = random.Random(SEED)
    kills = [(words, limit) for words, (count, limit) in COMMANDS.items() for _ in range(count)]
    choose.shuffle(kills)
    for words, limit in kills:
        number = choose.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        killed(project, words, choose.uniform(0.2, limit), number, choose)
        nothing_half(project)
    interrupted = finished(project)
    assert {name: len(values) for name, values in interrupted.items()} == {"baseline": 1500, "sharded": 150}
    project.environment["LSAI_RUNS"] = str(project.root / "whole")
    whole = Project(project.root, project.environment)
    assert whole.lsai(*TRAIN, "baseline,sharded")[0] == 0
    for folder in (project.root / "whole" / "memory").glob("*"):
        assert losses(folder) == interrupted[Summary.read(folder).id.variant]
    del project.environment["LSAI_RUNS"]
    code, out, err = project.lsai("report", "--no-run", "--out", project.root / "out")
    assert code == 0, (out, err)
    assert list((project.root / "out").glob("*.html")) and not list(project.root.rglob("rendering-*"))
    nothing_half(project)
    assert marked(project) == [] or [p.pid for p in marked(project)] == [os.getpid()]
    assert not list(Path(project.runs).rglob("*.part"))
