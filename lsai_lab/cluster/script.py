"""What a cluster is, and the batch script of a job on it: one template, `envs/job.sbatch.j2`,
rendered to plain bash.

The study runs on the job's first node, straight from the batch script, so that the warning signal
before the time limit (`--signal=B:USR1@...`) has one short way: Slurm, the script's trap, the
driver, the run's process, a checkpoint.
"""

import math
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jinja2
from pydantic import AfterValidator, Field, StringConstraints

import lsai_core
from lsai_core.base.errors import UserError
from lsai_core.base.files import deep_merge
from lsai_core.config.strict import Strict, validated
from lsai_core.config.train import TrainConfig
from lsai_lab.launch.stop import PREEMPTED_EXIT
from lsai_lab.project.files import load_yaml
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import resolve, select_variants

LOCAL = "local"  # params/clusters/local.yaml is nobody's cluster: it holds one person's own values

# One word for a `#SBATCH` line: no blanks, quotes or line ends that could become another option or
# another command.
Word = Annotated[str, StringConstraints(pattern=r"^[\w.@:/+=,%-]+$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\n\r]+$")]
# Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, and with days in front (man
# sbatch, --time).
TimeLimit = Annotated[str, StringConstraints(pattern=r"^(\d+-)?\d+(:\d{1,2}){0,2}$")]


def _expand(text: str) -> str:
    """`~` and `$VARIABLES` as they are at submission: Slurm itself expands neither."""
    expanded = os.path.expandvars(os.path.expanduser(text))
    if re.search(r"[^\w.@:/+=,%#-]", expanded):
        raise ValueError(f"{text!r} names a variable that is not set, or holds blanks or quotes")
    return expanded


Expanded = Annotated[str, AfterValidator(_expand)]


class Cluster(Strict):
    """`params/clusters/<cluster>.yaml`."""

    cluster: Word
    description: str
    profile: str = Field(description="machine profile in params/profiles: the sizes of the studies")
    account: Word | None = None
    account_required: bool = Field(False, description="the cluster refuses jobs without an account")
    partition: Word | None = Field(None, description="null: the cluster's default partition")
    time: TimeLimit = Field("01:00:00", description="time limit of a job")
    report_time: TimeLimit = Field(
        "00:30:00", description="time limit of the job that renders the report"
    )
    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(
        ge=0, description="GPUs of one node; a job asks for all of them unless told otherwise"
    )
    cpus_per_node: int = Field(ge=1, description="CPU cores of one node that jobs may use")
    memory: Word | None = Field(
        None, description="--mem, memory a node; null: the cluster's default"
    )
    environment: Expanded | None = Field(
        None, description="--environment: EDF name, or path of an EDF file (Alps)"
    )
    container_image: Expanded | None = Field(
        None, description="--container-image (clusters with pyxis)"
    )
    container_mounts: list[Expanded] = Field(
        [], description="--container-mounts (clusters with pyxis)"
    )
    python: Word = Field(
        ".venv/bin/python",
        description="interpreter in the job; a relative path lies in the checkout",
    )
    prefix: list[Word] = Field([], description="command put before the study, for example numactl")
    requeue: bool = Field(
        False, description="a job that is warned of its end goes back into the queue and resumes"
    )
    max_requeues: int = Field(
        20, ge=0, description="after this many restarts a job is not put back any more"
    )
    warning_s: int = Field(
        120, ge=10, description="s before its time limit the job is warned, and checkpoints"
    )
    sbatch: list[Word] = Field([], description="extra sbatch options, one `--option=value` each")
    setup: list[Line] = Field(
        [], description="extra shell lines before the study (module load ..., export ...)"
    )

    def cpus(self, gpus: int) -> int:
        """CPU cores for a job with `gpus` GPUs a node: the node's cores, shared out by GPU."""
        return self.cpus_per_node * gpus // self.gpus_per_node if gpus else self.cpus_per_node


def load_cluster(root: Path, name: str, changes: Mapping[str, Any]) -> Cluster:
    """Read a cluster, lay `local.yaml` and then `changes` that are not None over it. UserError for
    an unknown name or key."""
    folder = root / "params" / "clusters"
    known = sorted(path.stem for path in folder.glob("*.yaml") if path.stem != LOCAL)
    if name not in known:
        raise UserError(f"unknown cluster {name!r}; known: {', '.join(known)} (params/clusters/)")
    data = load_yaml(folder / f"{name}.yaml")
    local = folder / f"{LOCAL}.yaml"
    if local.exists():
        own = load_yaml(local).get(name) or {}
        if not isinstance(own, dict):
            raise UserError(
                f"params/clusters/local.yaml: {name} wants keys and values, got {own!r}"
            )
        data = deep_merge(data, own)
    if account := os.environ.get("LSAI_ACCOUNT") or os.environ.get("SBATCH_ACCOUNT"):
        data["account"] = account
    data |= {key: value for key, value in changes.items() if value is not None}
    cluster = validated(Cluster, data, f"cluster {name}")
    if cluster.account_required and not cluster.account:
        ways = (
            f"give --account, set LSAI_ACCOUNT, or write '{name}: {{account: ...}}' into "
            f"params/clusters/local.yaml"
        )
        raise UserError(f"cluster {name} wants an account: {ways}")
    if cluster.environment and cluster.container_image:
        raise UserError(
            f"cluster {name}: environment and container_image are two ways to the same; keep one"
        )
    return cluster


# The driver gives up on a run this long before Slurm's own end, so that it can still write the
# record. Seconds.
_MARGIN_S = 5


@dataclass(frozen=True)
class Job:
    """What one job does. `arguments`: one entry a line of the `lsai` command; `variants`: one array
    task for each."""

    name: str
    title: str
    arguments: list[list[str]]
    nodes: int
    gpus: int
    time: str
    variants: list[str] = field(default_factory=list)
    dependency: str | None = None
    preemptible: bool = True


def jobs_of(
    name: str,
    cluster: Cluster,
    session: Session,
    *,
    only: list[str],
    skip: list[str],
    parts: list[str],
    overrides: dict[str, Any],
    options: list[list[str]],
    per_variant: bool,
    gpus: int | None,
    after: str | None,
) -> list[Job]:
    """The job of a study, and the report's that follows it; `options`: words of the command line
    that go into the job as they are.

    Raises UserError for an unknown study, variant, part or key, and for a run that wants more GPUs
    than the job will have.
    """
    study = session.study(name)
    variants = select_variants(study, only, skip)
    if unknown := [part for part in parts if part not in study.parts]:
        raise UserError(
            f"study {study.study} has no part {unknown[0]!r}; known: {', '.join(study.parts)}"
        )
    nodes, gpus = cluster.nodes, cluster.gpus_per_node if gpus is None else gpus
    for part in parts or study.parts:
        for variant in variants:
            config = resolve(study, variant, part, 0, overrides)
            wanted = (
                config.parallel.world_size
                if isinstance(config, TrainConfig) and config.device != "cpu"
                else 0
            )
            if wanted > max(1, nodes * gpus):
                advice = (
                    f"submit with --nodes {math.ceil(wanted / gpus)}"
                    if gpus
                    else "ask for some with --gpus"
                )
                had = f"variant {variant} wants {wanted} GPUs and the job has {nodes} x {gpus}"
                raise UserError(f"{had}; {advice}, or leave it out with --skip")

    profile = ["--profile", session.profile.profile]
    arguments = [["study", name], profile]
    if not per_variant and len(variants) < len(study.variants):
        arguments.append(["--only", ",".join(variants)])
    if parts:
        arguments.append(["--parts", ",".join(parts)])
    job = Job(
        f"lsai-{name}",
        f"Study {name}: {study.title}",
        arguments + options,
        nodes,
        gpus,
        cluster.time,
        variants if per_variant else [],
        f"afterok:{after}" if after else None,
    )
    title = f"The report after study {name}, whatever became of it"
    report = Job(
        f"lsai-{name}-report",
        title,
        [["report", "--no-run"], profile],
        1,
        min(1, cluster.gpus_per_node),
        cluster.report_time,
        preemptible=False,
    )
    return [job, report]


def render(job: Job, cluster: Cluster, session: Session) -> str:
    """The script of `job` on `cluster`, with the session's folders as they are now. UserError: more
    GPUs than a node has."""
    if job.gpus > cluster.gpus_per_node:
        has = (
            f"a node of {cluster.cluster} has {cluster.gpus_per_node} GPUs, {job.gpus} are "
            f"asked "
            f"for"
        )
        raise UserError(f"{has}; use --nodes for more of them")
    root, jobs_root = session.root.resolve(), session.runs_root.resolve() / "jobs"
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    try:
        template = environment.from_string(
            (root / "envs" / "job.sbatch.j2").read_text(encoding="utf-8")
        )
    except OSError as error:
        raise UserError(f"the job template cannot be read: {error}") from None
    lines = [shlex.join(words) for words in job.arguments]
    if job.variants:
        lines.append('--only "${variants[SLURM_ARRAY_TASK_ID]}"')
    # An EDF file's relative path and an interpreter's lie in the checkout; bare names are looked up
    # on the cluster.
    edf, python = cluster.environment, cluster.python
    cpus = cluster.cpus(job.gpus)
    facts = vars(job) | {
        "cluster": cluster,
        "cpus": cpus,
        "threads": max(1, cpus // max(1, job.gpus)),
        "title": " ".join(job.title.split()),  # a comment of one line, whatever a study is called
        "requeue": cluster.requeue and job.preemptible,
        "preempted_exit": PREEMPTED_EXIT,
        "warning_s": cluster.warning_s if job.preemptible else None,
        "grace_s": cluster.warning_s - _MARGIN_S,
        "arguments": lines,
        "environment": str(root / edf) if edf and edf.endswith(".toml") else edf,
        "log": shlex.quote(
            str(jobs_root / "logs" / ("%x-%A_%a.out" if job.variants else "%x-%j.out"))
        ),
        "root": root,
        "data_root": session.data_root.resolve(),
        "runs_root": jobs_root.parent,
        "jobs_root": jobs_root,
        "package": Path(lsai_core.__file__).resolve().parent.parent,
        "python": str(root / python) if "/" in python else python,
    }
    return template.render(facts)
