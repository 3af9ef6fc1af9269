"""What a run's losses say: the final values that chapters compare, and curves smoothed so that a figure can be read."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from lsai_lab.runs.records import Run

LAST_STEPS = 20  # the final training loss is the mean over so many steps, in short runs over the last fifth


def last_steps(steps: int) -> int:
    """How many steps the final training loss of a run of `steps` steps is the mean of."""
    return min(LAST_STEPS, max(1, steps // 5))


def final_loss(run: Run) -> float:
    """Mean training loss over the last steps of a run, in nats per token."""
    losses = run.metrics["loss"]
    return float(losses.tail(last_steps(len(losses))).mean())


def validation_loss(run: Run) -> float:
    """Loss over held-out text at the run's end, in nats per token."""
    return float(run.summary.results["validation_loss"])


def curve(run: Run) -> pd.Series:
    """Training loss by step."""
    return run.metrics.set_index("step")["loss"]


def mean_curve(runs: Iterable[Run]) -> pd.Series:
    """Training loss by step, the mean of several runs (seeds) of as many steps."""
    return pd.concat(map(curve, runs), axis=1).mean(axis=1)


def window(steps: int) -> int:
    """Over how many steps a curve of `steps` steps is smoothed."""
    return max(1, steps // 20)


def smoothed(values: pd.Series) -> pd.Series:
    """Running mean over `window` steps, at the beginning over as many as there are."""
    return values.rolling(window(len(values)), min_periods=1).mean()


def smoothing(steps: int) -> str:
    """What a caption adds about curves of `steps` steps: nothing where they are not smoothed."""
    over = window(steps)
    return f", smoothed over {over} steps" if over > 1 else ""
