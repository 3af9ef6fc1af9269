"""Kills at random times, of any process of a command: nothing is lost, left running, or taken for
whole when it is not.

The times, victims and signals come from a seed; KILLS sets how many (the recorded trial was of
100).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
import yaml
from conftest import Project, losses

KILLS = int(os.environ.get("LSAI_TEST_KILLS", "20"))
STUDY = ("study", "memory", "--parts", "train")
REPORT = ("report", "--only", "memory")
STEPS = {"baseline": 150, "two": 40}
VARIANTS = {
    "baseline": {"config": {"steps": STEPS["baseline"], "checkpoint": {"every": 10}}},
    "two": {"config": {"steps": STEPS["two"], "checkpoint": {"every": 5}, "parallel": {"fsdp": 2}}},
}


def family(token: str) -> list[psutil.Process]:
    """Every living process whose environment has the token; what a command started has it, wherever
    it went."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("LSAI_TEST_TOKEN") == token
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def trained(project: Project) -> dict[str, list[float]]:
    """The losses of the runs that ended well; a record that cannot be read fails here."""
    found = {}
    for path in project.runs.glob("memory/*/summary.json"):
        summary = json.loads(path.read_text())
        if summary["outcome"] == "ok" and summary["id"]["part"] == "train":
            found[summary["id"]["variant"]] = losses(path.parent)
    return found


def kill_one(command: subprocess.Popen[str], token: str, dice: random.Random, delay: float) -> str:
    """Send a random signal to the command, or to any process below it, after `delay` seconds; what
    was done, in words."""
    time.sleep(delay)
    number = dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    below = [process for process in family(token) if process.pid != command.pid]
    victim = psutil.Process(command.pid) if not below or dice.random() < 0.5 else dice.choice(below)
    try:
        words = f"{number.name} to {' '.join(victim.cmdline())[-60:]!r} after {delay:.1f} s"
        victim.send_signal(number)
    except psutil.Error:
        return f"nothing: the command had ended after {delay:.1f} s"
    return words


def prepared(new_project: Callable[..., Project]) -> Project:
    """A project without searches for the largest batch, which several processes cannot make."""
    project = new_project(VARIANTS)
    study = yaml.safe_load((project.root / "params/studies/memory.yaml").read_text())
    del study["parts"]["batch"]
    project.write_yaml("params/studies/memory.yaml", study)
    return project


@pytest.mark.slow
@pytest.mark.timeout(600 + 15 * KILLS)
def test_kills_at_random_times_cost_time_only(new_project: Callable[..., Project]) -> None:
    whole = prepared(new_project)
    code, out, err = whole.lsai(*STUDY)
    assert code == 0, (out, err)
    expected = trained(whole)
    assert {name: len(rows) for name, rows in expected.items()} == STEPS
    project, dice = prepared(new_project), random.Random(23)
    for number in range(KILLS):
        token = f"{os.getpid()}-{number}"
        project.environment["LSAI_TEST_TOKEN"] = token
        words = REPORT if number % 4 == 3 else STUDY
        command = project.start(*words)
        what = kill_one(command, token, dice, dice.uniform(0.3, 14.0 if words is REPORT else 7.0))
        out, err = command.communicate(timeout=120)
        deadline = time.monotonic() + 30
        while left := family(token):
            assert time.monotonic() < deadline, (
                what,
                [process.cmdline() for process in left],
                out,
                err,
            )
            time.sleep(0.1)
        assert "Traceback" not in err, (what, err)
        for name, rows in trained(project).items():
            assert rows == expected[name], (name, what)
        if len(trained(project)) == len(VARIANTS):  # begin anew, so that there is something to kill
            for path in project.runs.glob("memory/*/summary.json"):
                path.unlink()
                (path.parent / "metrics.jsonl").unlink()
    project.environment.pop("LSAI_TEST_TOKEN")
    code, out, err = project.lsai(*STUDY)
    assert code == 0 and trained(project) == expected, (out, err)
    code, out, err = project.lsai("report", "--no-run", "--formats", "html")
    assert code == 0, (out, err)
    assert not list((project.root / "reports").glob("rendering-*"))
    assert "</html>" in (project.root / "reports" / "_output" / "index.html").read_text()[-200:]
