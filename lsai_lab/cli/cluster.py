"""`lsai submit`, `jobs`, `cancel`: studies as cluster jobs."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lsai_core.base.errors import UserError
from lsai_lab.cli import options as opt
from lsai_lab.cli.tables import counts, show_rows
from lsai_lab.cluster import slurm
from lsai_lab.cluster.jobs import JobRecord, following, read_jobs, rows, states
from lsai_lab.cluster.jobs import submit as submit_jobs
from lsai_lab.cluster.script import Job, Request, jobs_of, render
from lsai_lab.cluster.site import Cluster, load_cluster
from lsai_lab.project.files import repo_root
from lsai_lab.runs.notebook import portable
from lsai_lab.runs.session import Session

ClusterOption = Annotated[str, typer.Option(help="Cluster in params/clusters.")]
PerVariantOption = Annotated[
    bool, typer.Option("--per-variant", help="One array task for each variant.")
]
AccountOption = Annotated[
    str | None, typer.Option(help="Else $LSAI_ACCOUNT, $SBATCH_ACCOUNT, local.yaml.")
]
PartitionOption = Annotated[
    str | None, typer.Option(help="Partition instead of the cluster file's.")
]
TimeOption = Annotated[str | None, typer.Option(help="Time limit, for example 02:00:00.")]
NodesOption = Annotated[int | None, typer.Option(min=1, help="Nodes of the study's job.")]
GpusOption = Annotated[
    int | None, typer.Option(min=0, help="GPUs a node; all of them if not given.")
]
AtOnceOption = Annotated[
    int | None, typer.Option(min=1, help="With --per-variant: so many tasks at the same time.")
]
RequeueOption = Annotated[
    bool | None, typer.Option(help="Back into the queue, if warned of the time limit.")
]
AfterOption = Annotated[
    str | None, typer.Option(metavar="JOB", help="Start only when this job has succeeded.")
]
NoReportOption = Annotated[
    bool, typer.Option("--no-report", help="Do not render the report afterwards.")
]
SecondOption = Annotated[
    bool, typer.Option("--again", help="Even if a job of this study waits or runs.")
]


def submit(
    study: opt.OneStudy,
    cluster: ClusterOption,
    profile: opt.ProfileOption = None,
    only: opt.OnlyOption = None,
    skip: opt.SkipOption = None,
    parts: opt.PartsOption = None,
    set_: opt.SetOption = None,
    per_variant: PerVariantOption = False,
    account: AccountOption = None,
    partition: PartitionOption = None,
    time: TimeOption = None,
    nodes: NodesOption = None,
    gpus: GpusOption = None,
    at_once: AtOnceOption = None,
    requeue: RequeueOption = None,
    after: AfterOption = None,
    no_report: NoReportOption = False,
    again: SecondOption = False,
    dry_run: opt.DryRunOption = False,
) -> None:
    if after is not None and not after.isdigit():
        raise UserError(f"--after wants the number of a job, got {after!r}")
    changes = {"account": account, "partition": partition, "time": time, "nodes": nodes}
    changes |= {"requeue": requeue, "profile": profile}
    chosen = load_cluster(repo_root(), cluster, changes)
    session = Session(chosen.profile)
    request = Request(
        opt.names(only),
        opt.names(skip),
        opt.names(parts),
        opt.overrides_from(set_),
        [["--set", pair] for pair in set_ or []],
        per_variant,
        gpus,
        after,
        at_once,
    )
    planned = jobs_of(study, chosen, session, request)[: 1 if no_report else 2]
    script = render(planned[0], chosen, session)  # refused before anything is submitted
    if dry_run:
        return _show_scripts(script, planned[1:], chosen, session)
    command = shlex.join(["lsai", *sys.argv[1:]])
    submitted = submit_jobs(study, planned, chosen, session, command, again)
    _tell(submitted, cluster, planned[0].told)


def _show_scripts(script: str, followers: list[Job], cluster: Cluster, session: Session) -> None:
    """The study's script, and those of the jobs that follow it."""
    print(script, end="")
    for follower in followers:
        print("\n# ---- and then, when that job has ended, however it did ----\n")
        print(render(following(follower, "JOB"), cluster, session), end="")


def _tell(submitted: list[JobRecord], cluster: str, remarks: Sequence[str]) -> None:
    """What was submitted, and where its output goes."""
    job, *reports = submitted
    if job.code["dirty"]:
        print(
            "note: the checkout has changes that are not committed; the job's record says so",
            file=sys.stderr,
        )
    tasks = f", {len(job.variants)} array tasks" if job.variants else ""
    print(f"submitted job {job.job}: study {job.study} on {cluster}{tasks}; output: {job.log}")
    for line in remarks:
        print(line)
    for report in reports:
        print(
            f"submitted job {report.job}: the report, when {job.job} has ended; output: "
            f"{report.log}"
        )


def jobs(as_json: opt.JsonOption = False, full: opt.FullOption = False) -> None:
    folder, here = Session().runs_root / "jobs", Path.cwd()
    found = [
        row | {"log": portable(Path(row["log"]), here)}
        for job in read_jobs(folder)
        for row in rows(job, folder)
    ]
    if found and not as_json:
        print(counts([row["state"] for row in found], "jobs"))
    nothing = "no jobs were submitted from here; `lsai submit STUDY --cluster NAME` does"
    show_rows(found, as_json, nothing, ("restarts", "outcome"), full)


def cancel(
    job: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB]...", help="Numbers, as in `lsai jobs`.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every job that waits or runs.")] = False,
) -> None:
    if bool(job) == all_:
        raise UserError("say which jobs to cancel: their numbers, or --all")
    slurm.require()
    folder = Session().runs_root / "jobs"
    records = {record.job: record for record in read_jobs(folder)}
    for number in job or []:
        if number not in records:
            raise UserError(f"no job {number} was submitted from here; `lsai jobs` lists them")
    wanted = list(records) if all_ else list(job or [])
    wanted += [
        report for number in wanted if (report := records[number].report) and report not in wanted
    ]
    active = [n for n in wanted if any(not state.ended for state in states(records[n], folder))]
    if active:
        slurm.cancel(*active)
        print(f"cancelled {', '.join(active)}")
    elif job:
        print(f"{', '.join(job)} had ended already")
    else:
        print("no job waits or runs")
