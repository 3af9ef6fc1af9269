"""What a cluster is: `params/clusters/<cluster>.yaml`, and what one person adds to it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from lsai_core.base.errors import UserError, hint
from lsai_core.config.strict import Strict, deep_merge, validated
from lsai_lab.project.files import load_yaml

LOCAL = "local"  # params/clusters/local.yaml is nobody's cluster: it holds one person's own values

# One word for a `#SBATCH` line: no blanks, quotes or line ends that could become another option
# or another command.
Word = Annotated[str, StringConstraints(pattern=r"^[\w.@:/+=,%-]+$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\n\r]+$")]
# Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, and with days in front
# (man sbatch, --time).
TimeLimit = Annotated[str, StringConstraints(pattern=r"^(\d+-)?\d+(:\d{1,2}){0,2}$")]

# Slurm may send a signal up to a minute earlier than asked for (man sbatch, --signal). Seconds.
_EARLY_S = 60
_CONTAINER_OPTIONS = ("--environment", "--container-")


def seconds(limit: str) -> int:
    """A time limit in Slurm's words as seconds."""
    days, dash, rest = limit.rpartition("-")
    fields = [int(number) for number in rest.split(":")]
    if dash:  # days-hours, days-hours:minutes, days-hours:minutes:seconds
        fields += [0] * (3 - len(fields))
    elif len(fields) == 1:
        fields = [0, *fields, 0]
    else:
        fields = [0] * (3 - len(fields)) + fields
    hours, minutes, rest_s = fields
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest_s


def _expand(text: str) -> str:
    """`~` and `$VARIABLES` as they are at submission: Slurm itself expands neither."""
    expanded = os.path.expandvars(os.path.expanduser(text))
    if re.search(r"[^\w.@:/+=,%#-]", expanded):
        wrong = "names a variable that is not set, or holds blanks or quotes"
        raise ValueError(f"{text!r} {wrong}")
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
    report_partition: Word | None = Field(
        None, description="partition of nodes without GPUs, for the report; null: as for a study"
    )
    report_cpus: int = Field(8, ge=1, description="CPU cores of the report's job there")
    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(
        ge=0, description="GPUs of one node; a job asks for all of them unless told otherwise"
    )
    cpus_per_node: int = Field(ge=1, description="CPU cores of one node that jobs may use")
    memory: Word | None = Field(
        None, description="--mem, memory a node; null: the cluster's default"
    )
    whole_nodes: bool = Field(
        False, description="a job gets whole nodes, whatever it asks for: variants share them"
    )
    environment: Expanded | None = Field(
        None, description="--environment of a step: EDF name, or path of an EDF file (Alps)"
    )
    container_image: Expanded | None = Field(
        None, description="--container-image of a step (clusters with pyxis)"
    )
    container_mounts: list[Expanded] = Field(
        [], description="--container-mounts of a step (clusters with pyxis)"
    )
    python: Word = Field(
        ".venv/bin/python",
        description="interpreter in the job; a relative path lies in the checkout",
    )
    prefix: list[Word] = Field(
        [], description="command put before the study and before each process, e.g. numactl"
    )
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
    step: list[Word] = Field([], description="extra srun options of every step in the container")
    setup: list[Line] = Field(
        [], description="extra shell lines before the study (module load ..., export ...)"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.environment and self.container_image:
            raise ValueError("environment and container_image are two ways to the same; keep one")
        if self.container_mounts and not self.container_image:
            raise ValueError("container_mounts belong to container_image, which is not given")
        if self.step and not (self.environment or self.container_image):
            raise ValueError("step: options of steps in a container, and none is given")
        for option in self.sbatch:
            if option.startswith(_CONTAINER_OPTIONS):
                keys = "environment or container_image"
                why = "srun does not work inside of a container"
                raise ValueError(f"sbatch: {option} would put the script into one; {why}: {keys}")
        if self.warning_s + _EARLY_S >= seconds(self.time):
            had = f"the time limit {self.time} is {seconds(self.time)} s"
            room = f"a warning {self.warning_s} s before it, which may come {_EARLY_S} s early"
            raise ValueError(f"{had}, which leaves nothing before {room}; change time or warning_s")
        return self

    def cpus(self, gpus: int) -> int:
        """CPU cores for a job with `gpus` GPUs a node: the node's cores, shared out by GPU."""
        return self.cpus_per_node * gpus // self.gpus_per_node if gpus else self.cpus_per_node

    def container(self, root: Path) -> list[str]:
        """The options that put a step into the container; none without. `root`: the checkout."""
        if self.environment:
            path = self.environment
            # A file's relative path lies in the checkout; bare names are looked up on the cluster.
            edf = root / path if path.endswith(".toml") else path
            return [f"--environment={edf}", *self.step]
        if not self.container_image:
            return []
        mounts = ",".join(self.container_mounts)
        return [
            f"--container-image={self.container_image}",
            *([f"--container-mounts={mounts}"] if mounts else []),
            *self.step,
        ]


def load_cluster(root: Path, name: str, changes: Mapping[str, Any]) -> Cluster:
    """Read a cluster, lay `local.yaml` and then `changes` that are not None over it.

    Raises UserError for an unknown name or key, and for what the cluster cannot do.
    """
    folder = root / "params" / "clusters"
    known = sorted(path.stem for path in folder.glob("*.yaml") if path.stem != LOCAL)
    if name not in known:
        raise UserError(f"unknown cluster {name!r}{hint(name, known)} (params/clusters/)")
    data = load_yaml(folder / f"{name}.yaml")
    local = folder / f"{LOCAL}.yaml"
    if local.exists():
        own = load_yaml(local).get(name) or {}
        if not isinstance(own, dict):
            where = "params/clusters/local.yaml"
            raise UserError(f"{where}: {name} wants keys and values, got {own!r}")
        data = deep_merge(data, own)
    if account := os.environ.get("LSAI_ACCOUNT") or os.environ.get("SBATCH_ACCOUNT"):
        data["account"] = account
    data |= {key: value for key, value in changes.items() if value is not None}
    cluster = validated(Cluster, data, f"cluster {name}")
    if cluster.account_required and not cluster.account:
        own = f"write '{name}: {{account: ...}}' into params/clusters/local.yaml"
        ways = f"give --account, set LSAI_ACCOUNT, or {own}"
        raise UserError(f"cluster {name} wants an account: {ways}")
    return cluster
