"""Kills at random times, of any process of a command: nothing is lost, left running, or taken for
whole when it is not.

The times, as shares of what a command takes when nobody strikes it, the victims and the signals
come from a seed. A loaded machine is slow, which is no fault: a command hangs if it writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import yaml
from conftest import Project, losses, make_project, write_corpus

from lsai_lab.benches.machine import measure_ceilings

STUDY = ("study", "memory", "--parts", "train")
REPORT = ("report", "--only", "memory")
STEPS = {"baseline": 150, "two": 40}
VARIANTS = {
    "baseline": {"config": {"steps": STEPS["baseline"], "checkpoint": {"every": 10}}},
    "two": {"config": {"steps": STEPS["two"], "checkpoint": {"every": 5}, "parallel": {"fsdp": 2}}},
}
# A command that was struck hangs if it changes no file for so long (11 s were the longest with six
# processes on two cores), and what it leaves running may take as long to end.
SILENT_S = 180


def attempts(chance: random.Random, number: int, folder: Path) -> Iterator[tuple[str, str | None]]:
    """Each kill in turn; after the last one the study is run to its end, and reported."""
    corpus = write_corpus(folder / "corpus.jsonl")
    ceilings = measure_ceilings(torch.device("cpu"), budget_s=0.2)
    whole, project = (_project(folder / name, corpus, ceilings) for name in ("whole", "killed"))
    lasts = {words: _seconds(whole, words) for words in (STUDY, REPORT)}
    expected = _trained(whole)
    assert {name: len(rows) for name, rows in expected.items()} == STEPS
    for at in range(number):
        words = REPORT if at % 4 == 3 else STUDY
        delay = lasts[words] * chance.uniform(0.05, 1.0)
        what, fault = _kill(project, chance, words, delay, f"{os.getpid()}-{at}", expected)
        if at == number - 1:
            fault = fault or _ends_well(project, whole, expected)
        yield what, fault


def _project(root: Path, corpus: Path, ceilings: dict[str, float | str]) -> Project:
    """A project without searches for the largest batch, which several processes cannot make."""
    root.mkdir()
    project = make_project(root, corpus, ceilings, VARIANTS)
    study = yaml.safe_load((root / "params/studies/memory.yaml").read_text())
    del study["parts"]["batch"]
    project.write_yaml("params/studies/memory.yaml", study)
    return project


def _seconds(project: Project, words: tuple[str, ...]) -> float:
    """What a command takes that nobody strikes."""
    begun = time.monotonic()
    _, err = project.start(*words).communicate()
    assert "Traceback" not in err, err
    return time.monotonic() - begun


def _kill(
    project: Project,
    chance: random.Random,
    words: tuple[str, ...],
    delay: float,
    token: str,
    expected: dict[str, list[float]],
) -> tuple[str, str | None]:
    """Strike a command once: what was done, and what went wrong, if anything did."""
    project.environment["LSAI_TEST_TOKEN"] = token
    command = project.start(*words)
    what = _strike(command, token, chance, delay)
    del project.environment["LSAI_TEST_TOKEN"]
    if (err := _end_of(command, project.root)) is None:
        _end(_family(token))
        command.communicate()
        return what, f"the command goes on, and has changed no file for {SILENT_S} s"
    deadline = time.monotonic() + SILENT_S
    while left := _family(token):
        if time.monotonic() > deadline:
            return what, f"left running: {_end(left)}"
        time.sleep(0.1)
    if "Traceback" in err:
        return what, err
    trained = _trained(project)
    if other := [name for name, rows in trained.items() if rows != expected[name]]:
        return what, f"other losses of {', '.join(other)}"
    if len(trained) == len(VARIANTS):  # begin anew, so that there is something to kill
        for path in project.runs.glob("memory/*/summary.json"):
            path.unlink()
            (path.parent / "metrics.jsonl").unlink()
    return what, None


def _end_of(command: subprocess.Popen[str], folder: Path) -> str | None:
    """What a command says on standard error until it has ended; None if it hangs. What changes in
    the `folder` is a sign that it does not."""
    seen, since = 0.0, time.monotonic()
    while time.monotonic() < since + SILENT_S:
        try:
            return command.communicate(timeout=2)[1]
        except subprocess.TimeoutExpired:
            changed = _last_change(folder)
        if changed > seen:
            seen, since = changed, time.monotonic()
    return None


def _last_change(folder: Path) -> float:
    """When anything in the folder was last changed; what vanishes meanwhile is passed over."""
    found = 0.0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            found = max(found, path.lstat().st_mtime)
    return found


def _strike(command: subprocess.Popen[str], token: str, chance: random.Random, delay: float) -> str:
    """Send a random signal to the command, or to any process below it, after `delay` seconds; what
    was done, in words."""
    time.sleep(delay)
    number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    below = [process for process in _family(token) if process.pid != command.pid]
    itself = not below or chance.random() < 0.5
    victim = psutil.Process(command.pid) if itself else chance.choice(below)
    try:
        words = f"{number.name} to {' '.join(victim.cmdline())[-60:]!r} after {delay:.1f} s"
        victim.send_signal(number)
    except psutil.Error:
        return f"nothing: the command had ended after {delay:.1f} s"
    return words


def _family(token: str) -> list[psutil.Process]:
    """Every living process whose environment has the token; what a command started has it, wherever
    it went."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("LSAI_TEST_TOKEN") == token
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _end(processes: list[psutil.Process]) -> str:
    """End them, so that the next attempt is alone; what they were."""
    words = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            words.append(" ".join(process.cmdline()))
            process.kill()
    return ", ".join(words)


def _trained(project: Project) -> dict[str, list[float]]:
    """The losses of the runs that ended well; a record that cannot be read raises."""
    found = {}
    for path in project.runs.glob("memory/*/summary.json"):
        summary = json.loads(path.read_text())
        if summary["outcome"] == "ok" and summary["id"]["part"] == "train":
            found[summary["id"]["variant"]] = losses(path.parent)
    return found


def _ends_well(project: Project, whole: Project, expected: dict[str, list[float]]) -> str | None:
    """What is wrong with the study run to its end, and with its report, which ends as that of the
    project that nobody struck; None if nothing is."""
    code, out, err = project.lsai(*STUDY)
    if code != 0 or _trained(project) != expected:
        return f"does not end as if nothing had happened: {out} {err}"
    make = ("report", "--no-run", "--formats", "html")
    (wanted, _, _), (code, out, err) = whole.lsai(*make), project.lsai(*make)
    page = project.root / "reports" / "_output" / "index.html"
    if code != wanted or "</html>" not in page.read_text()[-200:]:
        return f"no whole report: {out} {err}"
    left = [path.name for path in (project.root / "reports").glob("rendering-*")]
    return f"left behind: {', '.join(left)}" if left else None
