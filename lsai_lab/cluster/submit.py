"""Submit a study: everything that can be wrong is found first, then the study's job and the report job after it.

Either both jobs are in the queue, with their records, or none is. The submission as a whole holds a lock, so two at the same
moment see each other.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from dataclasses import dataclass
from typing import Any

from filelock import FileLock, Timeout

from lsai_core.config import TrainConfig
from lsai_core.errors import UserError
from lsai_core.files import write_text
from lsai_core.strict import Strict
from lsai_lab.cluster import slurm
from lsai_lab.cluster.config import Cluster
from lsai_lab.cluster.jobs import JobRecord, active_job
from lsai_lab.cluster.script import Job, Places, render
from lsai_lab.runs.inputs import git_state
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import resolve, select_variants


@dataclass(frozen=True)
class Request:
    """What is to be submitted: a study with its selection, and how it is spread over jobs.

    `options`: the words of the `lsai study` command line that go into the job as they are (`--set key=value`).
    """

    study: str
    only: list[str]
    skip: list[str]
    parts: list[str]
    overrides: dict[str, Any]
    options: list[list[str]]
    per_variant: bool = False
    gpus: int | None = None
    after: str | None = None
    report: bool = True


@dataclass(frozen=True)
class Submission:
    """The scripts of a request: the study's, and the report's that follows it (None: no report)."""

    request: Request
    cluster: Cluster
    session: Session
    places: Places
    study_job: Job
    script: str
    report_job: Job | None

    def report_script(self, job: str) -> str:
        """The report job's script, to start when `job` has ended, however it did."""
        assert self.report_job is not None
        after = Job(**{**self.report_job.__dict__, "dependency": f"afterany:{job}"})
        return render(after, self.cluster, self.places)


def prepare_submission(request: Request, cluster: Cluster, session: Session) -> Submission:
    """Check the whole request and render its scripts; nothing is written or submitted.

    Raises UserError for an unknown study, variant, part or key, and for more GPUs than a node has.
    """
    study = session.study(request.study)
    variants = select_variants(study, request.only, request.skip)
    if unknown := [part for part in request.parts if part not in study.parts]:
        raise UserError(f"study {study.study} has no part {unknown[0]!r}; known: {', '.join(study.parts)}")
    gpus = cluster.gpus_per_node if request.gpus is None else request.gpus
    for part in request.parts or study.parts:
        for variant in variants:
            _fits(resolve(study, variant, part, 0, request.overrides), f"variant {variant}", cluster.nodes, gpus)

    profile = session.profile.profile
    places = Places(session.root.resolve(), session.data_root.resolve(), session.runs_root.resolve())
    arguments = [["study", request.study], ["--profile", profile]]
    if not request.per_variant and len(variants) < len(study.variants):
        arguments.append(["--only", ",".join(variants)])
    if request.parts:
        arguments.append(["--parts", ",".join(request.parts)])
    study_job = Job(
        name=f"lsai-{request.study}",
        title=f"Study {request.study}: {study.title}",
        arguments=arguments + request.options,
        nodes=cluster.nodes,
        gpus=gpus,
        time=cluster.time,
        variants=variants if request.per_variant else [],
        dependency=f"afterok:{request.after}" if request.after else None,
    )
    report_job = Job(
        name=f"lsai-{request.study}-report",
        title=f"The report after study {request.study}, whatever became of it",
        arguments=[["report", "--no-run"], ["--profile", profile]],
        nodes=1,
        gpus=min(1, cluster.gpus_per_node),
        time=cluster.report_time,
        preemptible=False,
    )
    script = render(study_job, cluster, places)
    return Submission(
        request, cluster, session, places, study_job, script, report_job if request.report else None
    )  # fmt: skip


def _fits(config: Strict, what: str, nodes: int, gpus: int) -> None:
    """Raise UserError if a run wants more GPUs than the job will have."""
    wanted = config.parallel.world_size if isinstance(config, TrainConfig) and config.device != "cpu" else 0
    if wanted > max(1, nodes * gpus):
        advice = f"submit with --nodes {math.ceil(wanted / gpus)}" if gpus else "ask for some with --gpus"
        raise UserError(
            f"{what} wants {wanted} GPUs and the job has {nodes} x {gpus}; {advice}, or leave it out with --skip"
        )


def submit(submission: Submission, command: str, again: bool = False) -> tuple[JobRecord, JobRecord | None]:
    """Submit the study's job and its report job, and record both.

    `again=True` allows a second job of a study whose first one waits or runs. Raises UserError if it does not, and for
    everything that Slurm refuses; then nothing stays in the queue.
    """
    slurm.require()
    request, folder = submission.request, submission.places.jobs_root
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=60):
            if not again and (active := active_job(folder, request.study)):
                raise UserError(
                    f"job {active} of study {request.study} is waiting or running: see `lsai jobs`, end it with "
                    f"`lsai cancel {active}`, or submit a second one with --again"
                )
            if request.after and not slurm.show(request.after):
                raise UserError(f"--after: Slurm knows no job {request.after}")
            slurm.check(submission.script)
            if submission.report_job:
                slurm.check(render(submission.report_job, submission.cluster, submission.places))
            return _submit(submission, command)
    except Timeout:
        raise UserError("another submission has held the lock for a minute; try again") from None
    except OSError as error:
        raise UserError(f"cannot write the job's record in {folder}: {error.strerror or error}") from None


def _submit(submission: Submission, command: str) -> tuple[JobRecord, JobRecord | None]:
    jobs: list[str] = []
    try:
        jobs.append(slurm.sbatch(submission.script))
        study = _record(submission, command, jobs[0], submission.study_job, submission.script)
        if submission.report_job is None:
            return study, None
        script = submission.report_script(jobs[0])
        jobs.append(slurm.sbatch(script))
        report = _record(submission, command, jobs[1], submission.report_job, script, report_of=jobs[0])
        study.report = report.job
        study.write(submission.places.jobs_root)
        return study, report
    except BaseException:
        with contextlib.suppress(UserError):
            slurm.cancel(*jobs) if jobs else None
        for job in jobs:
            for suffix in (".json", ".sbatch"):
                (submission.places.jobs_root / f"{job}{suffix}").unlink(missing_ok=True)
        raise


def _record(
    submission: Submission, command: str, number: str, job: Job, script: str, report_of: str | None = None
) -> JobRecord:
    folder = submission.places.jobs_root
    name = f"{job.name}-{number}" + ("_%a" if job.variants else "")
    record = JobRecord(
        job=number,
        study=submission.request.study,
        cluster=submission.cluster.cluster,
        profile=submission.session.profile.profile,
        command=command,
        submitted=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        code=git_state(submission.session.root),
        requeue=submission.cluster.requeue and job.preemptible,
        log=str(folder / "logs" / f"{name}.out"),
        variants=job.variants,
        report_of=report_of,
    )
    write_text(folder / f"{number}.sbatch", script)
    record.write(folder)
    return record
