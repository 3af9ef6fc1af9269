"""What the study on distributed attention did not measure, and why."""

from __future__ import annotations

import re

from lsai_lab.report.context.data import Shared
from lsai_lab.report.context.figures import tokens
from lsai_lab.report.show import run_link, show_text


def show_missing(machines: list[Shared]) -> None:
    """What was not measured on each machine and why, and what a machine cannot tell."""
    for shared in machines:
        lines = []
        for run in shared.runs:
            if run.summary.outcome != "ok":
                name = run_link(run.summary.id.name, run.summary.id.key)
                kept = "; its points up to there are shown" if (run.folder / "metrics.jsonl").exists() else ""
                lines.append(f"- {name} ended as **{run.summary.outcome}** ({run.summary.reason}){kept}.")
        lines += _points_missing(shared)
        if not shared.on_gpu:
            lines.append(
                "- A CPU run tells neither exposed communication nor bandwidth nor memory: the profiler sees no communication there, and no allocator counts."
            )
        if lines:
            show_text(f"On {shared.machine}:\n\n" + "\n".join(lines))


def _points_missing(shared: Shared) -> list[str]:
    """A line for each reason, whatever the numbers in it, with the methods and where it met them."""
    frame = shared.points
    found: dict[tuple[str, str], tuple[str, dict[str, list[str]]]] = {}
    for row in (
        frame[frame["outcome"] != "ok"].sort_values(["length", "processes"]) if len(frame) else frame
    ).itertuples():
        key = (str(row.outcome), re.sub(r"[\d.,]+", "#", str(row.reason)))
        _, methods = found.setdefault(key, (str(row.reason), {}))
        methods.setdefault(str(row.method), []).append(f"{tokens(row.length)} on {row.processes}")
    lines = []
    for (outcome, _), (reason, methods) in found.items():
        where = "; ".join(f"`{method}` {_first(places)}" for method, places in methods.items())
        several = "; the number differs" if sum(map(len, methods.values())) > 1 and re.search(r"\d", reason) else ""
        lines.append(f"- **{outcome}** ({reason}{several}): {where}.")
    return lines


def _first(places: list[str], most: int = 4) -> str:
    named = list(dict.fromkeys(places))
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")
