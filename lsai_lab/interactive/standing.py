"""Where a run stands, in words."""

from pathlib import Path

import pandas as pd

from lsai_lab.interactive.results import in_short
from lsai_lab.runs.find import going_on, has_begun, machine_of, repeats_of, which_repeat
from lsai_lab.runs.records import Run
from lsai_lab.runs.so_far import so_far

_FIRST = ("tokens_per_s", "validation_loss", "mem_peak_allocated_gib", "largest_batch")


def figures(run: Run) -> str:
    """What people look for first of the results, in a line; of a stopped run as far as it came."""
    return in_short(run.summary.results | so_far(run), _FIRST)


def address(run: Run) -> str:
    """Which run it is: `memory.bf16`, of a recorded one `h100/memory.bf16, seed 0, one of 3
    repeats`."""
    name, machine = f"{run.summary.id.study}.{run.summary.id.name}", machine_of(run.folder)
    return name if machine is None else f"{machine}/{name}{which_repeat(run, repeats_of(run))}"


def standing(run: Run, rows: pd.DataFrame, has_steps: bool) -> str:
    """What the record says of a run with these steps, or points, done."""
    folder, summary, steps = run.folder, run.summary, len(rows)
    of = run.config.get("steps") if has_steps else None
    done = f"{steps} points are measured"
    if has_steps:
        done = f"{steps} of {of} steps are done" if of else f"{steps} steps are done"
        if steps and "loss" in rows:
            done += f", the last one's loss is {rows['loss'].iloc[-1]:.4g}"
    if going_on(folder):
        return f"goes on: {done}"
    if summary.outcome == "ok":
        return "ok"
    if not has_begun(folder):
        return "planned, not yet executed: execute() does the work"
    stopped = summary.outcome == "preempted"
    how = "stopped" if stopped else summary.outcome
    why = f" ({summary.reason})" if summary.reason and not stopped else ""
    rest = ""
    if steps and summary.outcome in ("unfinished", "preempted", "failed", "timeout"):
        kept = _kept(folder)
        begins = f"from its checkpoint of step {kept}"
        if kept is None:
            begins = "from the beginning, for it has no checkpoint"
        rest = f"; execute() goes on {begins}"
    return f"{how}{why}: {done}{rest}" if stopped else f"{how}{why}; {done}{rest}"


def _kept(folder: Path) -> int | None:
    """After how many steps the newest whole checkpoint was saved."""
    whole = [path.stem for path in folder.glob("checkpoint-????????.json")]
    whole += [path.parent.name for path in folder.glob("sharded-????????/complete.json")]
    return max((int(name.rpartition("-")[2]) for name in whole), default=None)
