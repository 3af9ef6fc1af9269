"""Runs a plan, one papermill execution after the other, and never loses what is finished.

A run whose record is complete is reused; one that another study has finished, with the same key, is copied. Any other is
executed in its own process, watched, and ended when it outlives its time. If it leaves no summary (killed, crashed, hung),
the driver writes one that says so, and goes on with the next. SIGTERM and SIGUSR1 end the plan in good order (see `lsai_lab.runs.stop`).
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from filelock import FileLock, Timeout
from tqdm import tqdm

from lsai_core.errors import UserError
from lsai_core.files import read_jsonl, write_json
from lsai_core.profiling.limits import cpu_cores
from lsai_lab.environment import environment
from lsai_lab.runs.execute import BESIDE, write_plan
from lsai_lab.runs.kinds import get_kind
from lsai_lab.runs.records import Outcome, Run, Summary
from lsai_lab.runs.stop import Stopped, StopRequest, stop_requests
from lsai_lab.runs.study import PlannedRun

# A finished run with one of these outcomes is not repeated; the others are tried again, from their checkpoint if any.
FINAL: frozenset[Outcome] = frozenset({"ok", "oom", "unavailable"})
_POLL_S = 0.25
# What a run's notebook imports beside what a command has imported when it begins to run one.
_NOTEBOOK_NEEDS = ("nbclient", "ipykernel", "pandas", "matplotlib", "seaborn", "pypandoc")


def is_finished(run: PlannedRun) -> bool:
    """True if the record is complete and its outcome is one that a repetition would not change."""
    try:
        return Summary.read(run.folder).outcome in FINAL
    except (FileNotFoundError, NotADirectoryError):  # the second is told when the run is about to be written
        return False


def run_plan(
    plan: list[PlannedRun], *, root: Path, data_root: Path, command: str, jobs: int = 1, untimed_jobs: int = 1
) -> list[Summary]:
    """Execute what is not finished; prints one line per run and returns all summaries in the plan's order.

    `jobs` runs at a time share the machine: for results that are no speeds, which such records leave out. `untimed_jobs`: the
    same for the kinds whose results never are (`Kind.timed`), which then come last.

    Raises Stopped if SIGTERM or SIGUSR1 arrived and runs are left, UserError before any run that could not even begin.
    """
    todo = [run for run in plan if not is_finished(run)]
    if todo and (missing := [name for name in _NOTEBOOK_NEEDS if importlib.util.find_spec(name) is None]):
        raise UserError(
            f"a run's notebook needs what is not installed here: {', '.join(missing)}; pip install -e . brings it"
        )
    untimed = [run for run in todo if untimed_jobs > jobs and not get_kind(run.kind).timed]
    todo = [*[run for run in todo if run not in untimed], *untimed]
    if len(todo) < len(plan):
        print(f"reusing {len(plan) - len(todo)} of {len(plan)} runs (same config, code, data and machine)", flush=True)
    with stop_requests() as stop:

        def execute(number: int, run: PlannedRun, beside: int) -> None:
            if stop.number is not None:
                return
            title = f"[{number}/{len(todo)}] {run.name}"
            if (twin := _twin(run)) is not None and _take_over(run, twin):
                same = twin.summary.id
                print(f"{title} is the same run as {same.study}.{same.name}, copied", flush=True)
                return
            print(title, "started", flush=True)
            summary = run_one(
                run, title=title, root=root, data_root=data_root, command=command, stop=stop, beside=beside
            )
            reason = f" ({summary.reason})" if summary.reason else ""
            print(f"{title} {summary.outcome}{reason}, {summary.wall_s:.0f} s", flush=True)

        numbered = list(enumerate(todo, 1))
        first = len(todo) - len(untimed)
        for part, at_a_time in ((numbered[:first], jobs), (numbered[first:], min(untimed_jobs, len(untimed)))):
            if at_a_time == 1:
                for number, run in part:
                    execute(number, run, 0)
            elif part:
                with ThreadPoolExecutor(at_a_time) as pool:
                    for future in [pool.submit(execute, number, run, at_a_time - 1) for number, run in part]:
                        future.result()
    left = sum(not is_finished(run) for run in todo)
    if stop.number is not None and left:
        raise Stopped(stop.number, left)
    summaries = [Summary.read(run.folder) for run in plan]
    print("outcomes:", ", ".join(f"{count} {name}" for name, count in Counter(s.outcome for s in summaries).items()))
    return summaries


def _twin(run: PlannedRun) -> Run | None:
    """A finished run with the same key in another study or under another name: the same config, code, data and machine."""
    for path in sorted(run.folder.parent.parent.glob(f"*/*-{run.id.key}/summary.json")):
        summary = Summary.read(path.parent)
        if path.parent != run.folder and summary.outcome in FINAL and "ran_beside" not in summary.results:
            return Run(path.parent, "", summary)
    return None


def _take_over(run: PlannedRun, twin: Run) -> bool:
    """Copy the record of `twin` under this run's name; the summary, which makes it a record, comes last.

    False if another process is writing to this run's folder: it is left to `run_one` to say so.
    """
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(run.folder / ".lock", timeout=0):
            for old in run.folder.iterdir():  # of an attempt that did not end, its checkpoints among it
                if old.name != ".lock":
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            for path in twin.folder.iterdir():
                if path.name[0] == "." or path.name in ("summary.json", "run.json"):
                    continue
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, run.folder / path.name)
            write_plan(run, twin.summary.command)
            first = twin.summary.measured_as or f"{twin.summary.id.study}.{twin.summary.id.name}"
            dataclasses.replace(twin.summary, id=run.id, measured_as=first).write(run.folder)
    except Timeout:
        return False
    except OSError as error:
        raise UserError(f"cannot write the records of {run.name} in {run.folder}: {error.strerror or error}") from None
    return True


def run_one(
    run: PlannedRun,
    *,
    title: str,
    root: Path,
    data_root: Path,
    command: str,
    stop: StopRequest | None = None,
    beside: int = 0,
) -> Summary:
    """Execute one run through papermill and return its summary, whatever happens to it. `beside`: runs at the same time.

    Raises UserError if another process is executing the same run or the folder cannot be written.
    """
    notebook = root / "notebooks" / get_kind(run.kind).notebook
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(run.folder / ".lock", timeout=0):
            if is_finished(run):  # by another process, since this plan was made
                return Summary.read(run.folder)
            (run.folder / "summary.json").unlink(missing_ok=True)
            write_plan(run, command)
            if not (run.folder / "env.json").exists():
                write_json(run.folder / "env.json", environment())
            return _execute(run, notebook, title, root, data_root, command, stop or StopRequest(), beside)
    except Timeout:
        raise UserError(f"{run.name} is being run by another process right now ({run.folder}); wait for it") from None
    except OSError as error:
        raise UserError(f"cannot write the records of {run.name} in {run.folder}: {error.strerror or error}") from None


def _execute(
    run: PlannedRun,
    notebook: Path,
    title: str,
    root: Path,
    data_root: Path,
    command: str,
    stop: StopRequest,
    beside: int,
) -> Summary:
    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    problem = execute_notebook(
        notebook,
        run.folder / "notebook.ipynb",
        {"folder": portable(run.folder, root), "data_root": portable(data_root, root)},
        root=root,
        timeout_s=run.timeout_s,
        watch=_Watch(run, title, shown=not beside).look,
        stop=stop,
        environment={BESIDE: str(beside), **cores_shared_by(beside + 1)} if beside else {},
    )
    if (run.folder / "summary.json").exists():
        return Summary.read(run.folder)
    outcome: Outcome = "timeout" if problem and problem.startswith("no end within") else "failed"
    if stop.number is not None:
        outcome, problem = "preempted", f"stopped by {signal.Signals(stop.number).name} before it could end a step"
    summary = Summary(
        id=run.id,
        kind=run.kind,
        outcome=outcome,
        reason=(problem or "the notebook ended without a result") + _last_step(run),
        started=started.isoformat(timespec="seconds"),
        wall_s=round(time.monotonic() - clock, 3),
        command=command,
        code=run.code,
    )
    summary.write(run.folder)
    return summary


def cores_shared_by(processes: int) -> dict[str, str]:
    """Environment for each of `processes` that run at a time: its share of the cores, unless the user has said how many.

    Threads beyond the cores wait for one another in busy loops; two searches with two threads each took three times as long on two cores.
    """
    share = max(1, cpu_cores() // processes)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}


def _last_step(run: PlannedRun) -> str:
    path = run.folder / "metrics.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    return f"; {rows[-1]['step'] + 1} steps were recorded" if rows else ""


def portable(path: Path, root: Path) -> str:
    """`path` as seen from `root`, so that executed notebooks carry no folder of one machine; absolute if it lies outside."""
    path, root = path.resolve(), root.resolve()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def execute_notebook(
    source: Path,
    target: Path,
    parameters: dict[str, Any],
    *,
    root: Path,
    timeout_s: float,
    watch: Callable[[], None] = lambda: None,
    stop: StopRequest | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Execute a notebook in its own process tree, with `root` as the working folder. `stop` is passed on to its kernel.

    Returns None, or one line that says what went wrong. Raises UserError if the notebook does not exist.
    """
    if not source.exists():
        raise UserError(f"the notebook {source} is missing")
    arguments = [f"{key}={json.dumps(value)}" for key, value in parameters.items()]
    paths = [portable(source, root), portable(target, root)]
    target.parent.mkdir(parents=True, exist_ok=True)
    log = target.with_suffix(".log")
    with log.open("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "lsai_lab.runs.papermill_child", *paths, *arguments],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env={**os.environ, **_absolute_folders(root), **environment, "PYDEVD_DISABLE_FILE_VALIDATION": "1"},
        )
        deadline, stop = time.monotonic() + timeout_s, stop or StopRequest()
        try:
            while child.poll() is None and time.monotonic() < min(deadline, stop.deadline):
                watch()
                stop.pass_on(child.pid)
                time.sleep(_POLL_S)
            ended = child.poll() is not None
        finally:
            _kill_tree(child)
    if not ended:
        return f"no end within {timeout_s:g} s"
    if child.returncode == 0:
        log.unlink()
        return None
    if child.returncode < 0:
        return f"the process that executes the notebook was killed by {signal.Signals(-child.returncode).name}"
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else f"the notebook process ended with exit code {child.returncode}"


def _absolute_folders(root: Path) -> dict[str, str]:
    """The folders of this session for a process that works in `root`: what is relative here would be elsewhere there."""
    moved = {name: os.path.abspath(os.environ[name]) for name in ("LSAI_RUNS", "LSAI_DATA") if os.environ.get(name)}
    return {**moved, "LSAI_ROOT": str(root.resolve())}


def _kill_tree(child: subprocess.Popen[bytes]) -> None:
    """End the process and everything below it (the kernel lives in a session of its own, so a signal to the group is not
    enough)."""
    try:
        family = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)
    child.wait()


class _Watch:
    """A progress bar that follows a run's metrics file (on a terminal; elsewhere silent)."""

    def __init__(self, run: PlannedRun, title: str, shown: bool = True) -> None:
        self.path, self.offset = run.folder / "metrics.jsonl", 0
        self.bar = tqdm(
            total=run.steps, desc=title, unit="step", leave=False, disable=not (shown and sys.stderr.isatty())
        )

    def look(self) -> None:
        if self.bar.disable or not self.path.exists():
            return
        rows = read_jsonl(self.path)[-1:]
        if rows:
            self.bar.n = rows[0]["step"] + 1
            self.bar.set_postfix(loss=f"{rows[0].get('loss') or float('nan'):.3f}")
