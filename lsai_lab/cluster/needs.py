"""What a study's runs need of a cluster job: their GPUs, and whether one node has to hold them."""

from dataclasses import dataclass
from typing import Any

from lsai_core.base.errors import UserError
from lsai_lab.runs.kinds import device_of, get_kind, processes
from lsai_lab.runs.study import Study, measured_pairs, resolve


@dataclass(frozen=True)
class Need:
    """One variant's part. `gpus`: 0 if it computes on CPUs. `over_nodes`: nodes may share it.

    `timed`: it is to have the machine to itself.
    """

    variant: str
    part: str
    gpus: int
    over_nodes: bool
    timed: bool


def needs_of(
    study: Study, only: list[str], skip: list[str], parts: list[str], overrides: dict[str, Any]
) -> list[Need]:
    """What each run of a study needs that `lsai study` would plan with the same selection.

    Raises UserError for an unknown variant, part or key, and if nothing is left to be run.
    """
    found = []
    for part, variant in measured_pairs(study, only, skip, parts):
        config, kind = resolve(study, variant, part, 0, overrides), get_kind(study.parts[part].kind)
        gpus = 0 if device_of(config) == "cpu" else processes(config)
        found.append(Need(variant, part, gpus, kind.over_nodes, kind.timed))
    if not found:
        raise UserError(
            f"study {study.study}: the chosen parts measure none of the chosen variants"
        )
    return found


def too_large(needs: list[Need], nodes: int, gpus: int) -> list[Need]:
    """Those that more nodes with `gpus` GPUs each would hold, and these do not."""
    return [need for need in needs if need.over_nodes and need.gpus > max(1, nodes * gpus)]


def impossible(needs: list[Need], gpus: int) -> list[Need]:
    """Those that no number of nodes would hold: one node has to, and it has `gpus` GPUs."""
    return [need for need in needs if not need.over_nodes and need.gpus > max(1, gpus)]


def names(needs: list[Need]) -> list[str]:
    """Their variants, each once."""
    return list(dict.fromkeys(need.variant for need in needs))
