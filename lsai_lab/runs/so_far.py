"""What a training that was stopped, or that failed, had found by its last step."""

from typing import Any

from lsai_lab.runs.records import Run, read_metrics

_ENDED_EARLY = ("preempted", "failed", "timeout")
_LAST = 10  # steps whose mean loss is `train_loss`, as of a run that ended


def so_far(run: Run) -> dict[str, Any]:
    """`train_loss`, `step_ms` and `tokens_per_s` of the steps that are done, under the names of a
    finished run's results; empty for a run that ended otherwise, and for one without steps."""
    if run.summary.outcome not in _ENDED_EARLY:
        return {}
    rows = read_metrics(run.folder)
    if not len(rows) or not {"loss", "step_ms", "tokens_in_step"} <= {*rows}:
        return {}
    found: dict[str, Any] = {"train_loss": float(rows["loss"].tail(_LAST).mean())}
    steady = rows[rows["steady"].fillna(False).astype(bool)] if "steady" in rows else rows
    if len(steady):
        step_ms = float(steady["step_ms"].median())
        tokens = float(steady["tokens_in_step"].iloc[0])
        found |= {"step_ms": step_ms, "tokens_per_s": 1e3 * tokens / step_ms}
    return {name: value for name, value in found.items() if name not in run.summary.results}
