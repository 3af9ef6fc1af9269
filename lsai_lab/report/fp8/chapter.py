"""What the fp8 chapter shows: products, training, loss, conclusions, and what is not available and why."""

from __future__ import annotations

import pandas as pd
import torch

from lsai_core.fp8 import available_recipes
from lsai_lab.kit.style import apply_style
from lsai_lab.report.fp8.loss import in_short, show_loss
from lsai_lab.report.fp8.products import block_times, ceilings, most_measured, show_products
from lsai_lab.report.fp8.results import Fp8Results, load_results
from lsai_lab.report.fp8.training import more, show_training
from lsai_lab.report.show import run_link, show_table, show_text
from lsai_lab.runs.session import Session

__all__ = [
    "load",
    "show_available",
    "show_conclusions",
    "show_loss",
    "show_products",
    "show_recipes",
    "show_training",
]


def load(own_runs: list[str], profile: str | None) -> list[Fp8Results]:
    """The studies fp8 and gemm on every machine that there are records of: the reader's own first, then the committed ones."""
    apply_style()
    results = load_results(own_runs, profile)
    if not results:
        show_text("There are no records of these studies yet: `lsai study gemm` and `lsai study fp8` make them.")
    return results


def show_recipes(profile: str | None) -> None:
    """The recipes in words."""
    variants = Session(profile).study("fp8").variants
    rows = [{"recipe": v.label, "name": f"`{name}`", "what it does": v.note} for name, v in variants.items()]
    show_table(pd.DataFrame(rows), "tbl-fp8-recipes", "The recipes that are compared.")


def show_conclusions(all_results: list[Fp8Results]) -> None:
    """What follows on each machine, computed from its records."""
    for results in all_results:
        lines = conclusions(results)
        if lines:
            show_text(f"**{results.machine}**\n\n" + "\n".join(f"- {line}" for line in lines))


def conclusions(results: Fp8Results) -> list[str]:
    lines = []
    best = ceilings(results.points) if len(results.points) else {}
    if {"fp8", "bf16"} <= set(best):
        line = f"*Products:* the fp8 ceiling is {best['fp8'][0] / best['bf16'][0]:.2f} times that of bf16."
        tokens = most_measured(results.points)
        block = block_times(results.points, tokens) if tokens else pd.Series(dtype=float)
        if {"fp8", "fp8_casts", "bf16"} <= set(block.dropna().index):
            line += f" On a block's shapes {block['bf16'] / block['fp8']:.2f} remain, after the casts {block['bf16'] / block['fp8_casts']:.2f}."
        lines.append(line)
    rows = results.speed
    good = rows[(rows["outcome"] == "ok") & rows["speedup"].notna()] if len(rows) else rows
    others = good[good["variant"] != results.study.baseline] if len(good) else good
    if len(others):
        fast = others.loc[others["speedup"].idxmax()]
        name = f"**{run_link(fast['label'], fast['key'])}**"
        if fast["speedup"] > 1:
            line = f"*Training:* {name} is the fastest recipe, {fast['speedup']:.2f} times as fast as bf16"
        else:
            line = f"*Training:* no recipe is faster than bf16 here; {name} comes closest at {fast['speedup']:.2f} times its speed"
        slower = others[(others["speedup"] < 1) & (others["variant"] != fast["variant"])]["label"]
        line += f"; slower than bf16: {', '.join(slower)}." if len(slower) and fast["speedup"] > 1 else "."
        lines.append(line)
        measured = others.dropna(subset=["more_gib"])
        if len(measured):
            text = [f"{run_link(r.label, r.key)} {more(float(r.more_gib))}" for r in measured.itertuples()]
            lines.append(f"*Peak memory against bf16:* {', '.join(text)}.")
    if len(results.losses):
        lines += in_short(results)
    if results.gemm is not None and results.gemm.summary.results.get("fp8_unavailable"):
        lines.append("This machine has no fp8 tensor cores: its speeds say nothing about fp8, its losses do.")
    lines += _not_ok(results)
    return lines


def _not_ok(results: Fp8Results) -> list[str]:
    ended = [run for run in results.runs if run.summary.outcome != "ok"]
    return [
        f"{run_link(run.summary.id.name, run.summary.id.key)} ended as **{run.summary.outcome}**: {run.summary.reason}"
        for run in ended
    ]


def show_available() -> None:
    """Every recipe on the machine that executes this notebook, with the reason why one cannot run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = available_recipes(device)
    here = [f"`{name}`" for name, reason in found.items() if reason is None]
    where = "GPU" if device == "cuda" else "CPU, where fp8 is for checking results, not for speed"
    lines = [
        f"This chapter was executed on a machine with a {where}. Available here: {', '.join(here) or 'no recipe'}."
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in found.items():
        if reason is not None:
            reasons.setdefault(reason, []).append(f"`{name}`")
    lines += [f"- {', '.join(names)}: unavailable here, {reason}." for reason, names in reasons.items()]
    show_text("\n".join([lines[0], "", *lines[1:]]))
