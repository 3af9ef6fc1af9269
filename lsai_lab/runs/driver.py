"""Runs a plan, one run after the other, and never loses what is finished.

A run whose record is complete is reused, or copied where another study has it. Any other is
executed in its own process, watched, and ended when it outlives its time. If it leaves no summary
(killed, crashed, hung), the driver writes one that says so. Its notebook, executed by papermill, is
its page.
"""

import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lsai_core.base.errors import UserError
from lsai_core.base.files import read_jsonl, write_json
from lsai_core.base.limits import cpu_cores
from lsai_lab.launch.stop import Stopped, StopRequest, stop_requests
from lsai_lab.launch.watch import NewRows
from lsai_lab.machine.environment import environment
from lsai_lab.runs.disturbance import BESIDE
from lsai_lab.runs.execute import Progress, ended, write_plan
from lsai_lab.runs.kinds import get_kind
from lsai_lab.runs.notebook import execute_notebook, execute_run, portable, require_notebook
from lsai_lab.runs.records import (
    EARLIER,
    FINAL,
    Outcome,
    Run,
    Summary,
    is_finished,
    read_run,
    set_aside,
)
from lsai_lab.runs.study import PlannedRun
from lsai_lab.runs.writer import only_writer

# What a run's notebook imports beside what a command has imported when it begins to run one.
_NOTEBOOK_NEEDS = ("papermill", "nbclient", "IPython")
_PAGE_S = 300.0  # of a run's notebook, which only shows what there is
OnRows = Callable[[list[dict[str, Any]]], None]


def run_plan(
    plan: list[PlannedRun],
    *,
    root: Path,
    data_root: Path,
    command: str,
    untimed_jobs: int = 1,
    again: bool = False,
    called: Mapping[Path, str] | None = None,
    stopped_by: Sequence[signal.Signals] = (),
) -> list[Summary]:
    """Execute what is not finished (with `again`, everything); prints one line per run and returns
    all summaries in the plan's order.

    `untimed_jobs` runs at a time share the machine if their results are no speeds (`Kind.timed`);
    these come last. `called`: what the line of a run calls it, by its folder. Raises Stopped if
    SIGTERM, SIGUSR1 or one of `stopped_by` arrived and runs are left, UserError before any run that
    could not even begin.
    """
    todo = [run for run in plan if again or not is_finished(run.folder)]
    if todo:
        _require_packages()
    sharing = [run for run in todo if untimed_jobs > 1 and not get_kind(run.kind).timed]
    todo = [*(run for run in todo if run not in sharing), *sharing]
    if len(todo) < len(plan):
        reused = f"reusing {len(plan) - len(todo)} of {len(plan)} runs"
        print(f"{reused} (same config, code, data and machine)", flush=True)
    done, began = set[Path](), time.monotonic()
    with stop_requests(*stopped_by) as stop:
        common = dict[str, Any](root=root, data_root=data_root, command=command, stop=stop)

        def execute(run: PlannedRun, beside: int) -> None:
            if stop.number is not None:
                return
            name = (called or {}).get(run.folder, run.name)
            title = f"[{todo.index(run) + 1}/{len(todo)}] {name}"
            if not again and (twin := _twin(run)) is not None:
                _take_over(run, twin)
                done.add(run.folder)
                print(f"{title} is the same run as {twin.summary.id}, copied", flush=True)
                return
            print(title, "started", flush=True)
            summary = run_one(run, title=title, beside=beside, again=again, **common)
            done.add(run.folder)
            rest = _time_left(began, len(done), len(todo))
            print(f"{title} {ended(summary)}, {summary.wall_s:.0f} s{rest}", flush=True)

        for run in todo[: len(todo) - len(sharing)]:
            execute(run, 0)
        beside = min(untimed_jobs, len(sharing)) - 1
        with ThreadPoolExecutor(untimed_jobs) as pool:
            for future in [pool.submit(execute, run, beside) for run in sharing]:
                future.result()
    left = sum(not (run.folder in done if again else is_finished(run.folder)) for run in todo)
    if stop.number is not None and left:
        raise Stopped(stop.number, left)
    summaries = [Summary.read(run.folder) for run in plan]
    counts = Counter(summary.outcome for summary in summaries)
    print("outcomes:", ", ".join(f"{count} {name}" for name, count in counts.items()))
    return summaries


def _time_left(began: float, done: int, all_: int) -> str:
    """How long the other runs take at the pace of those that are done; empty after the last."""
    left = all_ - done
    seconds = (time.monotonic() - began) / done * left
    return f"; about {in_time(seconds)} left for {left} more" if left else ""


def in_time(seconds: float) -> str:
    """A time for people: minutes, where they are more than one."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _require_packages() -> None:
    """Raise UserError where a run's notebook could not be executed."""
    if missing := [name for name in _NOTEBOOK_NEEDS if importlib.util.find_spec(name) is None]:
        brings = "pip install 'lsai[report]' brings it"
        raise UserError(
            f"a run's notebook needs what is not installed here: {', '.join(missing)}; {brings}"
        )


def _twin(run: PlannedRun) -> Run | None:
    """A finished run with the same key in another study or under another name: the same config,
    code, data and machine."""
    for path in sorted(run.folder.parent.parent.glob(f"*/*-{run.id.key}/summary.json")):
        twin = read_run(path.parent)
        if (
            path.parent != run.folder
            and twin.summary.outcome in FINAL
            and "ran_beside" not in twin.summary.results
        ):
            return twin
    return None


def _take_over(run: PlannedRun, twin: Run) -> None:
    """Copy the record of `twin` under this run's name; the summary, which makes it a record, comes
    last."""
    with only_writer(run.folder, run.name):
        for old in run.folder.iterdir():  # of an attempt that did not end, its checkpoints among it
            if old.name != ".lock":
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        for path in twin.folder.iterdir():
            if path.name[0] == "." or path.name in ("summary.json", "run.json", EARLIER):
                continue
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, run.folder / path.name)
        write_plan(run, twin.summary.command)
        first = twin.summary.measured_as or str(twin.summary.id)
        dataclasses.replace(twin.summary, id=run.id, measured_as=first).write(run.folder)


def run_one(
    run: PlannedRun,
    *,
    title: str,
    root: Path,
    data_root: Path,
    command: str,
    stop: StopRequest | None = None,
    beside: int = 0,
    again: bool = False,
    on_rows: OnRows | None = None,
) -> Summary:
    """Execute one run and its notebook, and return its summary, whatever happens to it.

    `title` stands before its progress; without one a notebook waits for this run and watches it.
    `beside`: runs at the same time. `on_rows` is told the rows of metrics as they come. Raises
    UserError if another process is executing the same run or the folder cannot be written.
    """
    page = root / "notebooks" / get_kind(run.kind).notebook
    require_notebook(page)
    with only_writer(run.folder, run.name) as lock:
        if is_finished(run.folder) and not again:  # by another process, since this plan was made
            return Summary.read(run.folder)
        set_aside(run.folder)
        write_plan(run, command)
        write_json(run.folder / "env.json", environment())
        started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
        stop, rows = stop or StopRequest(), NewRows(run.folder / "metrics.jsonl")
        others = beside + int(os.environ.get(BESIDE, 0))
        told = {"LSAI_DATA": str(data_root.resolve()), BESIDE: str(others)}
        told |= cores_shared_by(beside + 1) if beside else {}
        target = run.folder / "notebook.ipynb"
        options: dict[str, Any] = {
            "root": root,
            "stop": stop,
            "environment": told,
            "inherited": lock,
        }
        live = not title or sys.stderr.isatty()
        progress = Progress(run.kind, run.config, title, shown=not beside, live=live)
        target.unlink(missing_ok=True)  # the page of an earlier attempt is not this one's
        with contextlib.closing(progress) as bar:
            look = functools.partial(_tell, rows, bar.update, on_rows)
            problem = execute_run(
                run.folder, data_root, timeout_s=run.timeout_s, watch=look, **options
            )
            look()  # at what came since the last time
        if not (run.folder / "summary.json").exists():
            when = started.isoformat(timespec="seconds")
            seconds = round(time.monotonic() - clock, 3)
            outcome, reason = _end_of(run, problem, stop)
            ended = Summary(run.id, run.kind, outcome, reason, when, seconds, command, run.code)
            ended.write(run.folder)
        if stop.number is None:
            _make_page(run, page, target, options)
        return Summary.read(run.folder)


def _tell(rows: NewRows, *listeners: OnRows | None) -> None:
    new = rows.read()
    for listener in filter(None, listeners):
        listener(new)


def _make_page(run: PlannedRun, page: Path, target: Path, options: dict[str, Any]) -> None:
    """Execute the run's notebook, its page; a line where that goes wrong."""
    parameters = {"folder": portable(run.folder, options["root"])}
    if problem := execute_notebook(page, target, parameters, timeout_s=_PAGE_S, **options):
        print(f"{run.name} has no page: {problem}", file=sys.stderr)


def _end_of(run: PlannedRun, problem: str | None, stop: StopRequest) -> tuple[Outcome, str]:
    """The outcome of a run whose process left no summary, and the reason in one line."""
    outcome: Outcome = "timeout" if problem and problem.startswith("no end within") else "failed"
    if stop.number is not None:
        name = signal.Signals(stop.number).name
        outcome, problem = "preempted", f"stopped by {name} before it could end a step"
    path = run.folder / "metrics.jsonl"
    steps = read_jsonl(path) if path.exists() else []
    reason = problem or "the run ended without a result"
    return outcome, reason + (f"; {steps[-1]['step'] + 1} steps were recorded" if steps else "")


def cores_shared_by(processes: int) -> dict[str, str]:
    """Environment for each of `processes` that run at a time: its share of the cores, unless the
    user has said how many."""
    # Threads beyond the cores wait in busy loops: two searches with two threads each took three
    # times as long on two cores.
    share = max(1, cpu_cores() // processes)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}
