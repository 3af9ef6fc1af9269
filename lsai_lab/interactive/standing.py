"""Where a run stands, in words."""

from lsai_lab.runs.find import going_on, has_begun
from lsai_lab.runs.records import Run


def standing(run: Run, steps: int, has_steps: bool) -> str:
    """What the record says of a run with so many steps, or points, done."""
    folder, summary = run.folder, run.summary
    of = run.config.get("steps") if has_steps else None
    done = f"{steps} points are measured"
    if has_steps:
        done = f"{steps} of {of} steps are done" if of else f"{steps} steps are done"
    if going_on(folder):
        return f"goes on: {done}"
    if summary.outcome == "ok":
        return "ok"
    if not has_begun(folder):
        return "planned, not yet executed: execute() does the work"
    stopped = summary.outcome == "preempted"
    how = "stopped" if stopped else summary.outcome
    why = f" ({summary.reason})" if summary.reason and not stopped else ""
    kept = sorted(folder.glob("checkpoint-*")) or sorted(folder.glob("sharded-*"))
    rest = ""
    if steps and summary.outcome in ("unfinished", "preempted", "failed", "timeout"):
        begins = "from its checkpoint" if kept else "from the beginning, for it has no checkpoint"
        rest = f"; execute() goes on {begins}"
    return f"{how}{why}: {done}{rest}" if stopped else f"{how}{why}; {done}{rest}"
