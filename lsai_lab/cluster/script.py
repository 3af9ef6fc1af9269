"""The batch script of a job: a cluster's facts and one template, `envs/job.sbatch.j2`, in; plain bash out.

The study runs on the job's first node, straight from the batch script, so that the warning signal before the time limit
(`--signal=B:USR1@...`) has one short way: Slurm, the script's trap, the driver, the run's kernel, a checkpoint. Runs on several
nodes are started from there over the whole allocation.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

import lsai_core
from lsai_core.errors import UserError
from lsai_lab.cluster.config import Cluster
from lsai_lab.runs.stop import PREEMPTED_EXIT

TEMPLATE = "job.sbatch.j2"
# Slurm requeues a job that ends with this code where its RequeueExit says so: the way that is left if scontrol fails.
REQUEUE_EXIT = 99
# The driver gives up on a run this long before Slurm's own end, so that it can still write the record. Seconds.
_MARGIN_S = 5


@dataclass(frozen=True)
class Places:
    """Where things lie on the cluster's shared file system; jobs get these as they are at submission."""

    root: Path
    data_root: Path
    runs_root: Path

    @property
    def jobs_root(self) -> Path:
        return self.runs_root / "jobs"


@dataclass(frozen=True)
class Job:
    """What one job does. `arguments`: one entry a line of the `lsai` command, options with their values.

    `variants`: one array task for each; the study then runs only that one.
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


def render(job: Job, cluster: Cluster, places: Places) -> str:
    """The script of `job` on `cluster`. Raises UserError if the job asks for more GPUs than a node has."""
    if job.gpus > cluster.gpus_per_node:
        raise UserError(
            f"a node of {cluster.cluster} has {cluster.gpus_per_node} GPUs, {job.gpus} are asked for; "
            "use --nodes for more of them"
        )
    template = places.root / "envs" / TEMPLATE
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    try:
        compiled = environment.from_string(template.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the job template cannot be read: {error}") from None
    lines = [shlex.join(words) for words in job.arguments]
    if job.variants:
        lines.append('--only "${variants[SLURM_ARRAY_TASK_ID]}"')
    cpus = cluster.cpus(job.gpus)
    return compiled.render(
        cluster=cluster,
        name=job.name,
        title=" ".join(job.title.split()),  # a comment of one line, whatever a study is called
        nodes=job.nodes,
        gpus=job.gpus,
        cpus=cpus,
        threads=max(1, cpus // max(1, job.gpus)),
        time=job.time,
        variants=job.variants,
        dependency=job.dependency,
        requeue=cluster.requeue and job.preemptible,
        warning_s=cluster.warning_s if job.preemptible else None,
        grace_s=max(1, cluster.warning_s - _MARGIN_S),
        preempted_exit=PREEMPTED_EXIT,
        requeue_exit=REQUEUE_EXIT,
        requeue_wait_s=60,
        environment=_environment(cluster, places.root),
        log=shlex.quote(str(places.jobs_root / "logs" / ("%x-%A_%a.out" if job.variants else "%x-%j.out"))),
        root=places.root,
        data_root=places.data_root,
        runs_root=places.runs_root,
        jobs_root=places.jobs_root,
        package=Path(lsai_core.__file__).resolve().parent.parent,
        python=_interpreter(cluster, places.root),
        arguments=lines,
    )


def _environment(cluster: Cluster, root: Path) -> str | None:
    """An EDF file by its full path (a relative one lies in the checkout); a bare name is left for the site's search path."""
    if cluster.environment is None or not cluster.environment.endswith(".toml"):
        return cluster.environment
    return str(root / cluster.environment)


def _interpreter(cluster: Cluster, root: Path) -> str:
    """A relative path with a slash lies in the checkout; a bare name is found on the job's PATH."""
    return str(root / cluster.python) if "/" in cluster.python else cluster.python
