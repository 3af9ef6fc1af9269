"""Trainings of several trainers that may be compared, as tables.

Trainings with the same model, sequence length, batch and number of processes form a setting; a table compares within one only.
The reference of a setting is our trainer configured like the study's baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lsai_lab.report.selection import OWN, select_runs
from lsai_lab.report.show import run_link
from lsai_lab.runs.records import Run, over_repeats
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import Study

OURS = "this package"
NAMES = {"hf": "Hugging Face Trainer", "torchtitan": "torchtitan"}
FRAMEWORKS = (OURS, *NAMES.values())
_METRICS = (
    "tokens_per_s", "tokens_per_s_p25", "tokens_per_s_p75", "mfu", "mem_peak_allocated_gib", "first_step_s", "parameters",
    "steps_timed",
)  # fmt: skip
# Two training configs that agree in these are the same trainer at another size.
_TRAINER = ("precision", "fp8", "loss", "blocks", "compile", "attention", "grad_checkpoint")


@dataclass(frozen=True)
class Setting:
    """One machine, one shape of work: `rows` has one row per variant, in the study's order."""

    machine: str
    title: str
    label: str
    config: dict[str, Any]
    rows: pd.DataFrame
    reference: str | None
    runs: dict[str, Run]

    @property
    def ok(self) -> pd.DataFrame:
        """The variants that have a speed."""
        return self.rows[(self.rows["outcome"] == "ok") & self.rows["tokens_per_s"].notna()]

    def link(self, row: Any) -> str:
        return run_link(row["label"], row["key"])


def load_results(own_runs: list[str], profile: str | None) -> list[Setting]:
    """Every setting of every machine that has records."""
    session = Session(profile)
    runs = select_runs("peers", session.runs_root, session.root / "reports", own_runs)
    return settings(session.study("peers"), runs)


def settings(study: Study, runs: list[Run]) -> list[Setting]:
    """Group `runs` by machine and shape of work, in the order in which they appear."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        config = run.config
        shape = (config["model"], config["seq_len"], config["batch_size"], _processes(config))
        groups.setdefault((run.machine, str(shape)), []).append(run)
    numbers: dict[str, int] = {}
    found = []
    for (machine, _), some in groups.items():
        number = numbers[machine] = numbers.get(machine, 0) + 1
        slug = machine.split(" ")[0].replace(".", "-").lower() + ("-own" if OWN in machine else "")
        found.append(_setting(study, machine, f"{slug}-{number}", some))
    return found


def _setting(study: Study, machine: str, label: str, runs: list[Run]) -> Setting:
    config = runs[0].config
    rows, shown = [], {}
    for variant in study.variants:
        mine = [run for run in runs if run.summary.id.variant == variant]
        if not mine:
            continue
        good = [run for run in mine if run.summary.outcome == "ok"]
        shown[variant] = run = (good or mine)[0]
        row: dict[str, Any] = {
            "variant": variant,
            "label": study.variants[variant].label,
            "key": run.summary.id.key,
            "outcome": run.summary.outcome,
            "reason": run.summary.reason,
            **_what(run),
        }
        for metric in _METRICS:
            values = pd.Series([one.summary.results.get(metric) for one in good], dtype=float).dropna()
            row[metric] = over_repeats(metric, values) if len(values) else np.nan
        rows.append(row)
    reference = _reference(study, shown)
    frame = pd.DataFrame(rows)
    base = frame[(frame["variant"] == reference) & (frame["outcome"] == "ok")]["tokens_per_s"]
    frame["of_ours"] = frame["tokens_per_s"] / base.iloc[0] if len(base) else np.nan
    model, processes = config["model"], _processes(config)
    title = f"the {model['preset']} model, batch {config['batch_size']} of {config['seq_len']:,} tokens"
    title += f", {processes} processes" if processes > 1 else ""
    return Setting(machine, title, label, config, frame, reference, shown)


def _what(run: Run) -> dict[str, Any]:
    """How the run trained, in the words of the table."""
    config, results = run.config, run.summary.results
    ours = run.summary.kind == "train"
    fp8 = (config["fp8"]["recipe"] if ours else config["fp8"]) != "none"
    return {
        "framework": OURS if ours else NAMES[config["framework"]],
        "precision": "fp8" if fp8 else {"bf16_autocast": "bf16 (fp32 weights)"}.get(config["precision"], config["precision"]),
        "compiled": config["compile"],
        "attention": results.get("attention_kernel"),
        "plain": ours and config["loss"] == "full",
    }  # fmt: skip


def _reference(study: Study, shown: dict[str, Run]) -> str | None:
    """The baseline, or in another setting the training of ours that differs from it in the shape of the work alone."""
    if study.baseline in shown or study.baseline is None:
        return study.baseline
    wanted = {**study.base, **study.variants[study.baseline].config}
    for variant, run in shown.items():
        given = {**study.base, **study.variants[variant].config}
        if run.summary.kind == "train" and all(given.get(key) == wanted.get(key) for key in (*_TRAINER, "optim")):
            return variant
    return None


def _processes(config: dict[str, Any]) -> int:
    return config["parallel"]["fsdp"] * config["parallel"]["replicate"]
