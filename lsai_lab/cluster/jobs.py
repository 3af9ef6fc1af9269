"""What was submitted and what became of it: `runs/jobs/`.

    runs/jobs/<job>.json         what was submitted: study, cluster, command, git commit, report job; written by `lsai submit`
    runs/jobs/<job>.sbatch       the script as Slurm got it
    runs/jobs/<job>[_<task>].events   started / USR1 / TERM / ended, one JSON line each; written by the job itself
    runs/jobs/logs/              the jobs' output

Slurm is asked first. It forgets a job minutes after its end and its accounting is not always there, so the state that was seen
last is kept in the job's record, and the job's own events say how it ended.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsai_core.files import read_jsonl, write_json
from lsai_lab.cluster import slurm
from lsai_lab.cluster.slurm import JobState
from lsai_lab.runs.stop import PREEMPTED_EXIT

# A job is unknown to Slurm and never said how it ended: killed without a word, or its record was copied from elsewhere.
GONE = "GONE"


@dataclass
class JobRecord:
    """`runs/jobs/<job>.json`. `variants`: the array's tasks, empty for one job per study. `report`: the report job's id.

    `seen`: the states that Slurm gave last, once all of them were final.
    """

    job: str
    study: str
    cluster: str
    profile: str
    command: str
    submitted: str
    code: dict[str, Any]
    requeue: bool
    log: str
    variants: list[str] = field(default_factory=list)
    report: str | None = None
    report_of: str | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        write_json(folder / f"{self.job}.json", dataclasses.asdict(self))

    def name(self, task: int | None) -> str:
        if self.report_of:
            return "report"
        return self.study if task is None else f"{self.study}.{self.variants[task]}"


@dataclass(frozen=True)
class JobRow:
    """One line of `lsai jobs`."""

    job: str
    what: str
    cluster: str
    state: str
    elapsed: str
    restarts: int
    outcome: str
    log: str


def read_jobs(folder: Path) -> list[JobRecord]:
    """Every recorded job, in the order of submission."""
    records = [JobRecord(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    return sorted(records, key=lambda record: (record.submitted, int(record.job)))


def states(record: JobRecord, folder: Path) -> list[JobState]:
    """Slurm's states of the job (each array task one), those seen last if it has forgotten them; empty if neither is there.

    The states are kept in the record as soon as all of them are final.
    """
    if record.seen:
        return [JobState(**state) for state in record.seen]
    now = slurm.show(record.job) if slurm.available() else []
    if now and all(state.ended for state in now):
        record.seen = [dataclasses.asdict(state) for state in now]
        record.write(folder)
    return now


def active_job(folder: Path, study: str) -> str | None:
    """The id of a job of `study` that waits or runs."""
    for record in read_jobs(folder):
        of_study = record.study == study and not record.report_of
        if of_study and any(not state.ended for state in states(record, folder)):
            return record.job
    return None


def rows(record: JobRecord, folder: Path) -> list[JobRow]:
    """The job's lines, one for each array task that has a state of its own."""
    known = sorted(states(record, folder), key=lambda state: (state.task is None, state.task or 0))
    if known:
        return [_row(record, folder, state.task if record.variants else None, state) for state in known]
    return [_row(record, folder, task, None) for task in (range(len(record.variants)) if record.variants else [None])]


def _row(record: JobRecord, folder: Path, task: int | None, state: JobState | None) -> JobRow:
    events = _events(folder, record.job, task)
    if state is None:
        outcome = _ending(events, record.requeue) or ("no word from the job" if events else "never started")
        facts = (GONE, _elapsed(events), events[-1]["restart"] if events else 0, outcome)
    else:
        waiting = state.reason if state.state == "PENDING" and state.reason != "None" else ""
        facts = (state.state, state.elapsed, state.restarts, _outcome(state, events, record.requeue) or waiting)
    job = record.job if task is None else f"{record.job}_{task}"
    what = record.name(task) if task is not None or not record.variants else f"{record.study} (array)"
    return JobRow(job, what, record.cluster, *facts, log_path(record, task))


def log_path(record: JobRecord, task: int | None) -> str:
    return record.log if task is None else record.log.replace("%a", str(task))


def _events(folder: Path, job: str, task: int | None) -> list[dict[str, Any]]:
    path = folder / (f"{job}.events" if task is None else f"{job}_{task}.events")
    return read_jsonl(path) if path.exists() else []


def _outcome(state: JobState, events: list[dict[str, Any]], requeue: bool) -> str:
    if state.state == "CANCELLED" and not events:
        return "never started" + (" (its dependency failed)" if "NeverSatisfied" in state.reason else "")
    if not state.ended:
        interrupted = [event for event in events if event["event"] == "USR1"]
        return f"preempted {len(interrupted)}x, goes on" if interrupted else ""
    return {"CANCELLED": "cancelled", "TIMEOUT": "time limit"}.get(state.state) or _ending(events, requeue)


def _ending(events: list[dict[str, Any]], requeue: bool) -> str:
    """The outcome in words, from what the job itself wrote last."""
    if not events or events[-1]["event"] == "started":
        return ""
    event, code = events[-1]["event"], events[-1]["code"]
    if event == "TERM":
        return "cancelled"
    if code == PREEMPTED_EXIT:
        return "preempted" if requeue else "preempted; submit again to resume"
    known = {0: "ok", 1: "a run did not end well", 2: "refused (see the log)", 130: "interrupted"}
    return known.get(code, f"ended with exit code {code}")


def _elapsed(events: list[dict[str, Any]]) -> str:
    """Seconds between the last start and the last word, in Slurm's form; empty if it never started."""
    starts = [event["time"] for event in events if event["event"] == "started"]
    return time.strftime("%H:%M:%S", time.gmtime(events[-1]["time"] - starts[-1])) if starts else ""
