"""The headline of each study on each machine: the rows of the front page's table, one function per study.

A row answers one question in one line and links its number to the run that produced it. `HEADLINES` is the registry, in the
order of the chapters; a study without results contributes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from lsai_lab.report.context.analysis import ratios_to_torch
from lsai_lab.report.context.data import load_shared
from lsai_lab.report.context.training import load_trained
from lsai_lab.report.show import run_link
from lsai_lab.report.variants import best_at_both_ends, own_first
from lsai_lab.runs.session import Session
from lsai_lab.runs.study import study_names

Rows = list[dict[str, str]]


def all_headlines(own_runs: list[str], profile: str | None) -> Rows:
    """The rows of every study that there is in `params/studies`, machine by machine."""
    there = study_names(Session(profile).root)
    rows = [row for study, headline in HEADLINES.items() if study in there for row in headline(own_runs, profile)]
    machines = own_first(row["machine"] for row in rows)
    return sorted(rows, key=lambda row: machines.index(row["machine"]))


def _row(machine: str, question: str, answer: str, result: str) -> dict[str, str]:
    return {"machine": machine, "question": question, "answer": answer, "result": result}


def _context(own_runs: list[str], profile: str | None) -> Rows:
    """Of every machine with GPUs: its first heads over the most of them; processes on a CPU say nothing about speed."""
    rows = []
    for shared in load_shared(own_runs, profile):
        first = [group for group in shared.shared if group.heads == shared.shared[0].heads] if shared.on_gpu else []
        if not first or (length := first[-1].compared_length) is None:
            continue
        group = first[-1]
        best = group.at(length).iloc[0]
        share = f", {best['efficiency']:.0%} of a GPU alone" if pd.notna(best["efficiency"]) else ""
        ratios = ratios_to_torch(group).set_index("length")["ratio"]
        times = f", {ratios[length]:.2f}x torch's own" if length in ratios.index else ""
        question = f"fastest attention over {group.processes} GPUs, {length:,} tokens, {group.heads}"
        rate = run_link(f"{best['training_tflops']:,.3g}", best["key"])
        rows.append(_row(shared.machine, question, f"`{best.name}`", f"{rate} TFLOP/s per GPU{share}{times}"))
    return rows


def _longcontext(own_runs: list[str], profile: str | None) -> Rows:
    rows = []
    for trained in load_trained(own_runs, profile):
        found = trained.longest if any(run.env.get("gpu") for run in trained.runs) else pd.DataFrame()
        whole = found[(found["outcome"] == "ok") & (found["layers"] == found["wanted"])] if len(found) else found
        for best in best_at_both_ends(whole, "tokens"):
            result = f"{run_link(f'{best.tokens:,}', best['key'])} tokens, {best['step_s']:.0f} s"
            question = f"longest sequence of a training step on {_gpus(best['processes'])}"
            rows.append(_row(trained.machine, question, best["model"], result))
    return rows


def _gpus(processes: int) -> str:
    return "one GPU" if processes == 1 else f"{processes} GPUs"


# The scale study has no headline: its figures are computed from assumptions, or measured to check a formula.
HEADLINES: dict[str, Callable[[list[str], str | None], Rows]] = {
    "context": _context,
    "longcontext": _longcontext,
}
