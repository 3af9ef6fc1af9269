"""One row per variant of a study on one machine: figures over repeats, how the runs ended. Every chapter's table begins here."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from lsai_lab.analysis import over_repeats
from lsai_lab.runs.records import Run, runs_frame
from lsai_lab.runs.study import Study

# Runs that lie further apart were started by hand anew, on whatever GPU was free.
_SITTING = datetime.timedelta(hours=3)


def by_machine(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each machine: the reader's own first, then in the order in which machines appear."""
    machines = own_first(run.machine for run in runs)
    return {machine: [run for run in runs if run.machine == machine] for machine in machines}


def own_first(machines: Iterable[str]) -> list[str]:
    """Each machine once; the reader's own is the one with a remark in brackets (`report.selection`)."""
    return sorted(dict.fromkeys(machines), key=lambda machine: "(" not in machine)


class OfMachine:
    """What the results of a study on one machine have in common."""

    machine: str

    @property
    def slug(self) -> str:
        """Short name for labels and folders; the reader's own machine is told from a recorded one of the same name."""
        return self.machine.split(" ")[0].replace(".", "-").lower() + ("-own" if "(" in self.machine else "")


def heads_label(heads: int, kv_heads: int, head_dim: int) -> str:
    """For example `32 x 128` or `32 (8 kv) x 128`."""
    grouped = f" ({kv_heads} kv)" if kv_heads != heads else ""
    return f"{heads}{grouped} x {head_dim}"


def setting_row(runs: Sequence[Run], repeats: int) -> dict[str, Any]:
    """What was trained where, as a table's row: config, environment and size of the first run that ended well, or the first."""
    run = next((run for run in runs if run.summary.outcome == "ok"), runs[0])
    config, env = run.config, run.env
    model, parameters = config["model"], run.summary.results.get("parameters")
    size = ""
    if parameters:
        size = (
            f", {parameters / 1e9:.2f} B parameters" if parameters >= 1e9 else f", {parameters / 1e6:.1f} M parameters"
        )
    return {
        "machine": run.machine,
        "device": env.get("gpu") or f"{env.get('cpu')}, {env.get('cpu_cores')} cores",
        "model": f"{model['preset']}: {model['n_layers']} layers, d {model['d_model']}{size}",
        "text": config["data"]["source"],
        "batch x sequence": f"{config['batch_size'] * config['grad_accum']} x {config['seq_len']}",
        "precision": config["precision"],
        "steps": config["steps"],
        "repeats": repeats,
    }


def endings(rows: pd.DataFrame) -> list[str]:
    """A sentence for every variant that did not end well, with the reason."""
    bad = rows[rows["outcome"] != "ok"]
    return [f"*{row['label']}* ended as **{row['outcome']}**: {brief(row['reason'])}." for _, row in bad.iterrows()]


def brief(text: str) -> str:
    """`text` up to the end of its second sentence: what was asked for, without the advice that follows."""
    return ". ".join(" ".join(text.split()).split(". ")[:2]).rstrip(".")


def sittings(runs: Sequence[Run]) -> str:
    """A sentence if not all of these runs of one machine were made at one go, hours apart; else nothing."""
    groups: list[list[Run]] = []
    last = None
    for run in sorted(runs, key=lambda run: run.summary.started):
        started = datetime.datetime.fromisoformat(run.summary.started)
        if last is None or started - last > _SITTING:
            groups.append([])
        groups[-1].append(run)
        last = started
    if len(groups) < 2:
        return ""
    parts = [
        f"{group[0].summary.started[:16].replace('T', ' ')} ({', '.join(dict.fromkeys(run.summary.id.variant for run in group))})"
        for group in groups
    ]
    return (
        f"*Not one sitting:* these runs began at {'; '.join(parts)} (UTC). Between them the GPU may be another one of its kind, "
        "cooler or warmer, and so may its host: a small difference between runs of two sittings says little."
    )


def variant_rows(
    study: Study, runs: Sequence[Run], part: str, metrics: Sequence[str], ranges: Sequence[str] = ()
) -> pd.DataFrame:
    """One row per variant that has a run of `part`, in the study's order; `runs` are of one machine.

    Columns: variant, label, repeats (good ones), outcome, reason, key (of the run that is linked), each of `metrics` over the
    good repeats (`analysis.over_repeats`; missing where no good run has it), and of the metrics in `ranges` also
    `<metric>_low` and `<metric>_high`, the smallest and the largest repeat.
    """
    frame = runs_frame(run for run in runs if run.summary.id.part == part)
    rows = []
    for name in study.variants:
        mine = frame[frame["variant"] == name] if len(frame) else frame
        if mine.empty:
            continue
        good = mine[mine["outcome"] == "ok"]
        shown = mine.iloc[0] if good.empty else good.iloc[0]
        row: dict[str, Any] = {
            "variant": name,
            "label": study.variants[name].label,
            "repeats": len(good),
            "outcome": "ok" if len(good) else shown["outcome"],
            "reason": None if len(good) else shown["reason"],
            "key": shown["key"],
        }
        for metric in metrics:
            values = pd.to_numeric(good[metric]).dropna() if metric in good else pd.Series(dtype=float)
            row[metric] = over_repeats(metric, values) if len(values) else None
            if metric in ranges:
                row[f"{metric}_low"], row[f"{metric}_high"] = values.min(), values.max()
        rows.append(row)
    table = pd.DataFrame(rows)
    if len(table):
        numbers = [*metrics, *(f"{metric}_{end}" for metric in ranges for end in ("low", "high"))]
        table[numbers] = table[numbers].apply(pd.to_numeric)
    return table
