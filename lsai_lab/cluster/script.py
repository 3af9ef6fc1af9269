"""The batch script of a job on a cluster: the template `envs/job.sbatch.j2`, rendered to bash.

The script runs on the job's first node, outside of any container, so that the warning signal before
the time limit (`--signal=B:USR1@...`) has one short way: Slurm, the script's trap, the driver, the
run's process, a checkpoint. Where a cluster has a container, each step that the script starts is in
it: `srun --environment=...` or `srun --container-image=...`.
"""

import dataclasses
import math
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

import lsai_core
from lsai_core.base.errors import UserError
from lsai_lab.cluster.needs import Need, impossible, names, needs_of, too_large
from lsai_lab.cluster.site import Cluster, seconds
from lsai_lab.launch.srun import spread
from lsai_lab.launch.stop import PREEMPTED_EXIT
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import select_variants

# The driver gives up on a run this long before Slurm's own end, so that it can still write the
# record. Seconds.
_MARGIN_S = 5


@dataclass(frozen=True)
class Job:
    """What one job does.

    `arguments`: one entry a line of the `lsai` command. `variants`: one array task for each.
    `at_once`: so many of the tasks may run at the same time; None: any number. `told`: what stands
    at the script's top.

    Where variants share a node, an entry of `variants` holds several with commas. `shared` steps
    at a time with one GPU each run the `untimed` parts of those in the task's entry of `sharing`;
    then the `timed` parts of those in `alone` have the node to themselves.
    """

    name: str
    title: str
    arguments: list[list[str]]
    nodes: int
    gpus: int
    time: str
    variants: list[str] = field(default_factory=list)
    dependency: str | None = None
    preemptible: bool = True
    shared: int = 0
    untimed: list[str] = field(default_factory=list)
    timed: list[str] = field(default_factory=list)
    sharing: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    at_once: int | None = None
    partition: str | None = None
    cpus: int | None = None
    told: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What `lsai submit` was asked for, beside the study. `options`: words that go into the job.

    `gpus`: of each node; None: all of them. `after`: the job whose success is waited for.
    """

    only: list[str] = field(default_factory=list)
    skip: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    options: list[list[str]] = field(default_factory=list)
    per_variant: bool = False
    gpus: int | None = None
    after: str | None = None
    at_once: int | None = None


def jobs_of(name: str, cluster: Cluster, session: Session, request: Request) -> list[Job]:
    """The job of a study, and the report's that follows it.

    Raises UserError for an unknown study, variant, part or key, and for runs that want more GPUs
    than the job will have.
    """
    study = session.study(name)
    chosen = select_variants(study, request.only, request.skip)
    needs = needs_of(study, request.only, request.skip, request.parts, request.overrides)
    gpus = cluster.gpus_per_node if request.gpus is None else request.gpus
    if request.at_once is not None and not request.per_variant:
        raise UserError("--at-once bounds the tasks of --per-variant; give both")
    _require_gpus(needs, cluster.nodes, gpus, cluster)

    profile = ["--profile", session.profile.profile]
    shares = request.per_variant and _can_share(cluster, gpus, needs)
    arguments = [["study", name], profile]
    if not request.per_variant and len(chosen) < len(study.variants):
        arguments.append(["--only", ",".join(chosen)])
    if request.parts and not shares:
        arguments.append(["--parts", ",".join(request.parts)])
    variants = [variant for variant in study.variants if variant in names(needs)]
    job = Job(
        f"lsai-{name}",
        f"Study {name}: {study.title}",
        arguments + request.options,
        cluster.nodes,
        gpus,
        cluster.time,
        variants if request.per_variant else [],
        f"afterok:{request.after}" if request.after else None,
        at_once=request.at_once,
    )
    if shares:
        job = _sharing(job, cluster, needs)
    return [_with_costs(job, cluster, needs), _report_job(name, cluster, profile)]


def _report_job(name: str, cluster: Cluster, profile: list[str]) -> Job:
    """The job that renders the report: on nodes without GPUs where the cluster names some."""
    elsewhere = cluster.report_partition is not None
    job = Job(
        f"lsai-{name}-report",
        f"The report after study {name}, whatever became of it",
        [["report", "--no-run"], profile],
        1,
        0 if elsewhere else min(1, cluster.gpus_per_node),
        cluster.report_time,
        preemptible=False,
        partition=cluster.report_partition,
        cpus=cluster.report_cpus if elsewhere else None,
    )
    return dataclasses.replace(job, told=[_cost(job)])


def _cost(job: Job) -> str:
    hours, tasks = seconds(job.time) / 3600, max(1, len(job.variants))
    each = f"{job.nodes} node{'s' * (job.nodes > 1)} x {hours:g} h"
    each += f" x {tasks} tasks" if tasks > 1 else ""
    return f"At most {job.nodes * hours * tasks:g} node-hours: {each}."


def _can_share(cluster: Cluster, gpus: int, needs: list[Need]) -> bool:
    """True if several variants with one GPU each are to share a node that a job gets whole.

    Timings have a node to themselves, so that sharing helps only where there is something else.
    """
    whole = cluster.whole_nodes and cluster.nodes == 1 and gpus == 1 < cluster.gpus_per_node
    return whole and any(not need.timed for need in needs)


def _sharing(job: Job, cluster: Cluster, needs: list[Need]) -> Job:
    """`job` with as many variants in a task as a node has GPUs."""
    size, variants = cluster.gpus_per_node, job.variants
    groups = [variants[first : first + size] for first in range(0, len(variants), size)]
    halves: dict[bool, list[Need]] = {False: [], True: []}
    for need in needs:
        halves[need.timed].append(need)

    def those_in(half: list[Need]) -> list[str]:
        return [",".join(name for name in group if name in names(half)) for group in groups]

    return dataclasses.replace(
        job,
        variants=[",".join(group) for group in groups],
        gpus=size,
        shared=size,
        untimed=list(dict.fromkeys(need.part for need in halves[False])),
        timed=list(dict.fromkeys(need.part for need in halves[True])),
        sharing=those_in(halves[False]),
        alone=those_in(halves[True]),
    )


def _with_costs(job: Job, cluster: Cluster, needs: list[Need]) -> Job:
    """`job` with what it may cost at most, the GPUs that it leaves idle, and what cannot run."""
    told = [_cost(job)]
    gpus = job.nodes * (cluster.gpus_per_node if cluster.whole_nodes else job.gpus)
    if gpus and job.shared:
        told[0] += f" {job.shared} of {gpus} GPUs work on what is no timing, 1 on each timing."
    elif gpus:
        largest = max(need.gpus for need in needs if need.over_nodes or need.gpus <= gpus)
        told[0] += f" The largest run works on {largest} of {gpus} GPUs."
    if cluster.gpus_per_node and (never := impossible(needs, 1 if job.shared else job.gpus)):
        told.append(f"Recorded as unavailable: {_wanted(never)} of one node.")
    return dataclasses.replace(job, told=told)


def _require_gpus(needs: list[Need], nodes: int, gpus: int, cluster: Cluster) -> None:
    """Raise UserError if a run needs more GPUs than the job has; the line names all of them."""
    if not cluster.gpus_per_node:
        return  # its runs are CPU processes
    if gpus > cluster.gpus_per_node:
        has = f"a node of {cluster.cluster} has {cluster.gpus_per_node} GPUs, {gpus} are asked for"
        raise UserError(f"{has}; use --nodes for more of them")
    if large := too_large(needs, nodes, gpus):
        most = max(need.gpus for need in large)
        enough = math.ceil(most / max(1, gpus))
        advice = f"submit with --nodes {enough}"
        if gpus < cluster.gpus_per_node and most <= nodes * cluster.gpus_per_node:
            advice = f"submit with --gpus {math.ceil(most / nodes)}"
        had = f"{_wanted(large)} and the job has {nodes} x {gpus}"
        raise UserError(f"{had}; {advice}, or leave out with --skip {','.join(names(large))}")
    for need in needs:
        if need.over_nodes and need.gpus > gpus > 0:
            spread(need.gpus, nodes, gpus)
    never = impossible(needs, gpus)
    if len(never) == len(needs):
        raise UserError(f"{_wanted(never)} of one node, and a node of the job has {gpus}")


def _wanted(needs: list[Need]) -> str:
    """`variant a wants 2 GPUs`, `variants a, b want 2 to 8 GPUs`."""
    variants, counts = names(needs), sorted({need.gpus for need in needs})
    span = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    who = f"variant {variants[0]} wants"
    if len(variants) > 1:
        who = f"variants {', '.join(variants)} want"
    return f"{who} {span} GPU{'s' * (counts[-1] > 1)}"


def render(job: Job, cluster: Cluster, session: Session) -> str:
    """The script of `job` on `cluster`, with the session's folders as they are now."""
    root = session.root.resolve()
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["quoted"] = '"{}"'.format  # of names, which hold nothing to be escaped
    try:
        text = (root / "envs" / "job.sbatch.j2").read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"the job template cannot be read: {error}") from None
    facts = _facts(job, cluster, root) | _folders(job, cluster, session, root)
    return environment.from_string(text).render(vars(job) | facts)


def _facts(job: Job, cluster: Cluster, root: Path) -> dict[str, Any]:
    """What the template says of the job and its steps."""
    lines = [shlex.join(words) for words in job.arguments]
    if job.variants and not job.shared:
        lines.append('--only "${variants[SLURM_ARRAY_TASK_ID]}"')
    cpus, container = job.cpus or cluster.cpus(job.gpus), cluster.container(root)
    elsewhere = job.partition is not None
    return {
        "cluster": cluster,
        "cpus": cpus,
        "threads": max(1, cpus // max(1, job.gpus)),
        "title": " ".join(job.title.split()),  # one line, whatever a study is called
        "partition": job.partition or cluster.partition,
        "memory": None if elsewhere else cluster.memory,  # that of a node with GPUs
        "requeue": cluster.requeue and job.preemptible,
        "preempted_exit": PREEMPTED_EXIT,
        "warning_s": cluster.warning_s if job.preemptible else None,
        "grace_s": cluster.warning_s - _MARGIN_S,
        "arguments": lines,
        "container": container,
        "step": shlex.join(_step(job, cpus)),
        "serves_steps": bool(container) and job.nodes > 1,
        "untimed_parts": ",".join(job.untimed),
        "timed_parts": ",".join(job.timed),
    }


def _step(job: Job, cpus: int) -> list[str]:
    """The options of a step that the script starts: the whole first node's, or a shared node's."""
    words = ["--nodes=1", "--ntasks=1", "--unbuffered"]
    if job.shared:
        return [*words, "--exact", "--gpus-per-node=1", f"--cpus-per-task={cpus // job.shared}"]
    gpus = [f"--gpus-per-node={job.gpus}"] if job.gpus else []
    # The steps of runs over several nodes are on this node at the same time.
    place = ["--relative=0", "--overlap", "--cpu-bind=none"]
    return [*words, *place, *gpus, f"--cpus-per-task={cpus}"]


def _folders(job: Job, cluster: Cluster, session: Session, root: Path) -> dict[str, Any]:
    """Where the job finds code, interpreter, data and records. Raises UserError if it cannot."""
    package, python = Path(lsai_core.__file__).resolve().parent.parent, cluster.python
    installed = package.name in ("site-packages", "dist-packages")
    if installed and cluster.container(root):
        why = "it would meet the packages of the environment that lsai is installed in here"
        raise UserError(f"cluster {cluster.cluster}: a container wants a checkout; {why}")
    if "/" in python:
        python = str(root / python)
        if installed and not Path(python).exists():
            python = sys.executable  # a laboratory's folder has no environment of its own
    jobs_root = session.runs_root.resolve() / "jobs"
    log = "%x-%A_%a.out" if job.variants else "%x-%j.out"
    return {
        "log": shlex.quote(str(jobs_root / "logs" / log)),
        "root": root,
        "data_root": session.data_root.resolve(),
        "runs_root": jobs_root.parent,
        "jobs_root": jobs_root,
        "package": package,
        "python": python,
    }
