"""What a cluster is: the facts that a job script needs, apart from what is measured on it.

`params/clusters/<cluster>.yaml` holds the facts (partition, GPUs a node, container, ...) and names the machine profile in
`params/profiles/` that holds the sizes. Nothing personal stands in those files: the account comes from `--account`,
`$LSAI_ACCOUNT` or `$SBATCH_ACCOUNT`, or from the git-ignored `params/clusters/local.yaml`, which maps a cluster's name to
keys that differ for one person.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from lsai_core.errors import UserError
from lsai_core.files import deep_merge
from lsai_core.strict import Strict, validated
from lsai_lab.files import load_yaml

LOCAL = "local"  # params/clusters/local.yaml is nobody's cluster: it holds one person's own values

# One word for a `#SBATCH` line: no blanks, quotes or line ends that could become another option or another command.
Word = Annotated[str, StringConstraints(pattern=r"^[\w.@:/+=,%-]+$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\n\r]+$")]
# Slurm's forms: minutes, minutes:seconds, hours:minutes:seconds, and with days in front (man sbatch, --time).
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
    report_time: TimeLimit = Field("00:30:00", description="time limit of the job that renders the report")
    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(ge=0, description="GPUs of one node; a job asks for all of them unless told otherwise")
    cpus_per_node: int = Field(ge=1, description="CPU cores of one node that jobs may use")
    memory: Word | None = Field(None, description="--mem, memory a node; null: the cluster's default")
    environment: Expanded | None = Field(None, description="--environment: EDF name, or path of an EDF file (Alps)")
    container_image: Expanded | None = Field(None, description="--container-image (clusters with pyxis)")
    container_mounts: list[Expanded] = Field([], description="--container-mounts (clusters with pyxis)")
    python: Word = Field(".venv/bin/python", description="interpreter in the job; a relative path lies in the checkout")
    prefix: list[Word] = Field([], description="command put before the study, for example numactl")
    requeue: bool = Field(False, description="a job that is warned of its end goes back into the queue and resumes")
    max_requeues: int = Field(20, ge=0, description="after this many restarts a job is not put back any more")
    warning_s: int = Field(
        120, ge=10, description="the job is warned this long before its time limit, and checkpoints; s"
    )
    sbatch: list[Word] = Field([], description="extra sbatch options, one `--option=value` each")
    setup: list[Line] = Field([], description="extra shell lines before the study (module load ..., export ...)")

    def cpus(self, gpus: int) -> int:
        """CPU cores for a job with `gpus` GPUs a node: the node's cores, shared out by GPU."""
        return self.cpus_per_node * gpus // self.gpus_per_node if gpus else self.cpus_per_node


def cluster_names(root: Path) -> list[str]:
    """Every cluster there is a file for."""
    return sorted(path.stem for path in (root / "params" / "clusters").glob("*.yaml") if path.stem != LOCAL)


def load_cluster(root: Path, name: str, changes: Mapping[str, Any]) -> Cluster:
    """Read a cluster by name, lay `local.yaml` and then `changes` (keys that are not None) over it.

    Raises UserError for an unknown name or key.
    """
    folder = root / "params" / "clusters"
    if name not in cluster_names(root):
        raise UserError(f"unknown cluster {name!r}; known: {', '.join(cluster_names(root))} (params/clusters/)")
    data = load_yaml(folder / f"{name}.yaml")
    local = folder / f"{LOCAL}.yaml"
    if local.exists():
        own = load_yaml(local).get(name) or {}
        if not isinstance(own, dict):
            raise UserError(f"params/clusters/local.yaml: {name} wants keys and values, got {own!r}")
        data = deep_merge(data, own)
    account = os.environ.get("LSAI_ACCOUNT") or os.environ.get("SBATCH_ACCOUNT")
    if account:
        data["account"] = account
    data |= {key: value for key, value in changes.items() if value is not None}
    cluster = validated(Cluster, data, f"cluster {name}")
    if cluster.account_required and not cluster.account:
        raise UserError(
            f"cluster {name} wants an account: give --account, set LSAI_ACCOUNT, or write '{name}: {{account: ...}}' "
            "into params/clusters/local.yaml"
        )
    if cluster.environment and cluster.container_image:
        raise UserError(f"cluster {name}: environment and container_image are two ways to the same; keep one")
    return cluster
