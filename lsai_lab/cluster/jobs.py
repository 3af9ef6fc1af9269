"""What was submitted and what became of it: `runs/jobs/`.

    runs/jobs/<job>.json         what was submitted: study, cluster, command, git commit, report
                                 job; written by `lsai submit`
    runs/jobs/<job>.sbatch       the script as Slurm got it
    runs/jobs/<job>[_<task>].events   started / USR1 / TERM / ended, one JSON line each; written by
                                      the job itself
    runs/jobs/logs/              the jobs' output

Either a study's job and its report job are in the queue, with their records, or none is. Slurm
forgets a job minutes after its end, so the states that were seen last are kept in the record, and
the job's own events say how it ended.
"""

import contextlib
import dataclasses
import datetime
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lsai_core.base.errors import UserError
from lsai_core.base.files import read_jsonl, write_json, write_text
from lsai_lab.cluster import slurm
from lsai_lab.cluster.script import Job, render
from lsai_lab.cluster.site import Cluster
from lsai_lab.cluster.slurm import JobState
from lsai_lab.launch.stop import PREEMPTED_EXIT
from lsai_lab.runs.inputs import git_state
from lsai_lab.runs.session import Session

# A job is unknown to Slurm and never said how it ended: killed without a word, or its record was
# copied from elsewhere.
GONE = "GONE"


@dataclass
class JobRecord:
    """`runs/jobs/<job>.json`. `variants`: the array's tasks. `report`: the report job's id. `seen`:
    Slurm's states, once all were final."""

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


def submit(
    study: str, jobs: list[Job], cluster: Cluster, session: Session, command: str, again: bool
) -> list[JobRecord]:
    """Submit a study's job and those that follow it, and record them. `again` allows a second job
    of a study that waits or runs.

    Raises UserError for everything that Slurm refuses; then nothing stays in the queue.
    """
    slurm.require()
    edf = Path(session.root / (cluster.environment or ""))
    if edf.suffix == ".toml" and not edf.exists():
        raise UserError(f"cluster {cluster.cluster}: there is no environment file {edf}")
    if container := cluster.container(session.root):
        slurm.require_step_options(container)
    folder = session.runs_root.resolve() / "jobs"
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=60):
            if not again and (active := _active_job(folder, study)):
                ways = (
                    f"see `lsai jobs`, end it with `lsai cancel {active}`, or submit a second "
                    f"one with --again"
                )
                raise UserError(f"job {active} of study {study} is waiting or running: {ways}")
            after = (jobs[0].dependency or "").partition(":")[2]
            if after and not slurm.show(after):
                raise UserError(f"--after: Slurm knows no job {after}")
            for job in jobs:
                slurm.sbatch(render(job, cluster, session), test_only=True)
            return _submit(study, jobs, cluster, session, command)
    except Timeout:
        raise UserError("another submission has held the lock for a minute; try again") from None
    except OSError as error:
        raise UserError(
            f"cannot write the job's record in {folder}: {error.strerror or error}"
        ) from None


def _submit(
    study: str, jobs: list[Job], cluster: Cluster, session: Session, command: str
) -> list[JobRecord]:
    records, folder = list[JobRecord](), session.runs_root.resolve() / "jobs"
    try:
        for job in jobs:
            first = records[0].job if records else None
            script = render(following(job, first) if first else job, cluster, session)
            number = slurm.sbatch(script)
            records.append(
                JobRecord(
                    number,
                    study,
                    cluster.cluster,
                    session.profile.profile,
                    command,
                    datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    git_state(session.root),
                    requeue=cluster.requeue and job.preemptible,
                    variants=job.variants,
                    report_of=first,
                    log=str(
                        folder
                        / "logs"
                        / (f"{job.name}-{number}" + ("_%a" if job.variants else "") + ".out")
                    ),
                )
            )
            write_text(folder / f"{number}.sbatch", script)
            records[0].report = number if first else None
            for record in records:
                record.write(folder)
        return records
    except BaseException:
        with contextlib.suppress(UserError):
            slurm.cancel(*(record.job for record in records))
        for record in records:
            for suffix in (".json", ".sbatch"):
                (folder / f"{record.job}{suffix}").unlink(missing_ok=True)
        raise


def following(job: Job, number: str) -> Job:
    """`job`, to start when job `number` has ended, however it did."""
    return dataclasses.replace(job, dependency=f"afterany:{number}")


def read_jobs(folder: Path) -> list[JobRecord]:
    """Every recorded job, in the order of submission."""
    records = [
        JobRecord(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")
    ]
    return sorted(records, key=lambda record: (record.submitted, int(record.job)))


def states(record: JobRecord, folder: Path) -> list[JobState]:
    """Slurm's states of the job (each array task one), those seen last if it has forgotten them;
    empty if neither is there."""
    if record.seen:
        return [JobState(**state) for state in record.seen]
    now = slurm.show(record.job) if slurm.available() else []
    if now and all(state.ended for state in now):
        record.seen = [dataclasses.asdict(state) for state in now]
        record.write(folder)
    return now


def _active_job(folder: Path, study: str) -> str | None:
    """The id of a job of `study` that waits or runs."""
    own = [record for record in read_jobs(folder) if record.study == study and not record.report_of]
    return next((r.job for r in own if any(not state.ended for state in states(r, folder))), None)


def rows(record: JobRecord, folder: Path) -> list[dict[str, Any]]:
    """The job's lines in `lsai jobs`, one for each array task that has a state of its own."""
    known = {state.task if record.variants else None: state for state in states(record, folder)}
    tasks: list[int | None] = sorted(known, key=lambda task: (task is None, task or 0))
    return [
        _row(record, folder, task, known.get(task))
        for task in tasks or [*range(len(record.variants))] or [None]
    ]


def _row(
    record: JobRecord, folder: Path, task: int | None, state: JobState | None
) -> dict[str, Any]:
    job = record.job if task is None else f"{record.job}_{task}"
    events = read_jsonl(folder / f"{job}.events") if (folder / f"{job}.events").exists() else []
    if task is not None:
        what = f"{record.study}.{record.variants[task]}"
    else:
        what = "report" if record.report_of else record.study + " (array)" * bool(record.variants)
    if state is None:
        starts = [event["time"] for event in events if event["event"] == "started"]
        lasted = (
            time.strftime("%H:%M:%S", time.gmtime(events[-1]["time"] - starts[-1]))
            if starts
            else ""
        )
        outcome = _ending(events, record.requeue) or (
            "no word from the job" if events else "never started"
        )
        restarts = events[-1]["restart"] if events else 0
        facts = {"state": GONE, "elapsed": lasted, "restarts": restarts, "outcome": outcome}
    else:
        facts = {"state": state.state, "elapsed": state.elapsed, "restarts": state.restarts}
        facts["outcome"] = _outcome(state, events, record.requeue)
    log = record.log if task is None else record.log.replace("%a", str(task))
    return {"job": job, "what": what, "cluster": record.cluster, **facts, "log": log}


def _outcome(state: JobState, events: list[dict[str, Any]], requeue: bool) -> str:
    if state.state == "CANCELLED" and not events:
        return "never started" + (
            " (its dependency failed)" if "NeverSatisfied" in state.reason else ""
        )
    if not state.ended:
        interrupted = sum(event["event"] == "USR1" for event in events)
        waiting = state.reason if state.state == "PENDING" and state.reason != "None" else ""
        return f"preempted {interrupted}x, goes on" if interrupted else waiting
    return {"CANCELLED": "cancelled", "TIMEOUT": "time limit"}.get(state.state) or _ending(
        events, requeue
    )


def _ending(events: list[dict[str, Any]], requeue: bool) -> str:
    """The outcome in words, from what the job itself wrote last."""
    if not events or events[-1]["event"] == "started":
        return ""
    if events[-1]["event"] == "TERM":
        return "cancelled"
    preempted = "preempted" if requeue else "preempted; submit again to resume"
    known = {0: "ok", 1: "a run did not end well", 2: "refused (see the log)", 130: "interrupted"}
    code = events[-1]["code"]
    return (known | {PREEMPTED_EXIT: preempted}).get(code, f"ended with exit code {code}")
