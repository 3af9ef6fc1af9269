"""What the chapter on sharding shows: conclusions, the loss, FSDP beside fused attention, scaling, the largest model."""

from __future__ import annotations

import pandas as pd
import torch

from lsai_lab.kit.style import apply_style
from lsai_lab.report.fsdp import ablation, largest, scaling, titan
from lsai_lab.report.fsdp.ablation import show_ablation
from lsai_lab.report.fsdp.grid import show_grid
from lsai_lab.report.fsdp.largest import show_largest
from lsai_lab.report.fsdp.results import STUDIES, Sharding, load_sharding
from lsai_lab.report.fsdp.scaling import show_scaling
from lsai_lab.report.fsdp.titan import show_titan
from lsai_lab.report.show import run_link, show_table, show_text

__all__ = [
    "load",
    "show_ablation",
    "show_conclusions",
    "show_grid",
    "show_largest",
    "show_machines",
    "show_missing",
    "show_scaling",
    "show_titan",
]


def load(own_runs: list[str], profile: str | None) -> list[Sharding]:
    """The studies' results on every machine; a sentence if there are none."""
    apply_style()
    found = load_sharding(own_runs, profile)
    if not found:
        show_text(
            "There are no records of these studies yet: "
            + ", ".join(f"`make run STUDY={name}`" for name in STUDIES)
            + " make them."
        )
    return found


def show_machines(machines: list[Sharding]) -> None:
    """What the processes ran on, one row per machine."""
    rows = []
    for sharding in machines:
        env = max((run.env for run in sharding.runs), key=lambda env: env.get("gpu_count") or 0)
        rows.append(
            {
                "machine": sharding.machine,
                "device": f"{env.get('gpu_count')} x {env['gpu']}"
                if env.get("gpu")
                else f"{env.get('cpu')}, {env.get('cpu_cores')} cores",
                "processes exchange by": "NCCL" if env.get("gpu") else "gloo, through this processor's memory",
                "PyTorch": env.get("torch"),
                "runs that ended well": f"{sum(run.summary.outcome == 'ok' for run in sharding.runs)} of {len(sharding.runs)}",
            }
        )
    if rows:
        show_table(pd.DataFrame(rows), "tbl-sharding-machines", "The machines whose records this chapter shows.")


def show_conclusions(machines: list[Sharding]) -> None:
    """What follows on each machine in short, computed from its records; the sections say more."""
    for sharding in machines:
        lines = [*ablation.in_short(sharding), *scaling.in_short(sharding), *titan.sentences(sharding)]
        lines += largest.in_short(sharding)
        if lines:
            show_text(f"**{sharding.machine}**\n\n" + "\n".join(f"- {line}" for line in lines))


def show_missing(machines: list[Sharding]) -> None:
    """What did not run on each machine and why, runs with the same reason together."""
    for sharding in machines:
        reasons: dict[tuple[str, str], list[str]] = {}
        for run in sharding.runs:
            # In the grid an out-of-memory error is a result, which its tables hold.
            if run.summary.outcome not in ("ok", "oom"):
                reasons.setdefault((run.summary.outcome, str(run.summary.reason)), []).append(
                    run_link(run.summary.id.name, run.summary.id.key)
                )
        lines = [f"- **{outcome}**, {reason}: {_first(names)}." for (outcome, reason), names in reasons.items()]
        if sharding.on_gpu and (never := _without_record(sharding)):
            lines.append(f"- **no record** yet of {never}.")
        if lines:
            show_text(f"On {sharding.machine}:\n\n" + "\n".join(lines))
    count = torch.cuda.device_count()
    here = (
        f"{count} GPU{'s' if count > 1 else ''}"
        if count
        else "no GPU, so that processes share the processor and exchange over gloo"
    )
    show_text(
        f"The machine that executed this chapter has {here}. A run of more GPUs than there are ends as *unavailable* in seconds and is not lost: it is run where they are."
    )


def _without_record(sharding: Sharding) -> str:
    """The studies, or parts of them, that nobody has run on this machine, each with the command that does."""
    found = []
    for name, study in sharding.studies.items():
        seen = {run.summary.id.part for run in sharding.runs if run.summary.id.study == name}
        parts = [part for part in study.parts if part not in seen]
        if parts and not seen:
            found.append(f"study {name} (`lsai study {name}`)")
        elif parts:
            found.append(f"{' and '.join(parts)} of study {name} (`lsai study {name} --parts {','.join(parts)}`)")
    return "; ".join(found)


def _first(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
