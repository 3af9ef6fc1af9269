"""What a line of a chart joins: whether its points are of one thing, and what they differ in."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lsai_core.config.affects import names_that_affect
from lsai_core.config.train import TrainConfig
from lsai_lab.project.files import MOST_TOLD, some_of
from lsai_lab.runs.find import say

_SETTINGS = {
    *names_that_affect(TrainConfig, "result"),
    *names_that_affect(TrainConfig, "speed"),
}


def say_what_differs(frame: pd.DataFrame, x: str, y: str, series: str) -> None:
    """Print in which settings runs differ that a line joins, beside what the chart shows."""
    if "run" not in frame or "key" not in frame:
        return  # no runs
    drawn, shown = frame.dropna(subset=[x, y]), (x, y, series)
    names = [name for name in frame if name not in shown and _is_setting(str(name), shown)]
    lines_of = drawn[series].to_numpy()
    several = drawn[names].astype(str).groupby(lines_of, sort=False).nunique().max()
    found = (str(name).removeprefix("config.") for name in names if several[name] > 1)
    differ = list(dict.fromkeys(found))
    if differ:
        say(f"a line joins runs that differ in more than {x}: {some_of(differ)}")


def has_one_at_each(frame: pd.DataFrame, x: str, y: str, series: str) -> bool:
    """Whether every series has one row at each `x`; where not, print what the rows there differ
    in."""
    drawn = frame.dropna(subset=[x, y])
    shared = drawn[drawn.duplicated([x, series], keep=False)]
    if shared.empty:
        return True
    groups = [shared[name].to_numpy() for name in (x, series)]
    words = []
    for name in (name for name in shared if name not in (x, y, series)):
        column = shared[name]
        is_a_name = name in ("machine", "repeat") or _says_which(column)
        if not is_a_name or column.astype(str).groupby(groups).nunique().max() < 2:
            continue
        there = sorted({*column.dropna()}, key=str)
        few = len(there) <= MOST_TOLD and "key" not in shared
        words.append(f"{name} {', '.join(map(str, there))}" if few else str(name))
    told = f": {some_of(words, '; ')}" if words else ""
    say(f"points are not joined, for a series has several at one {x}{told}")
    return False


def _says_which(column: pd.Series) -> bool:
    """Whether a column names what was measured: texts or whole numbers that recur, but for
    folders, keys and figures."""
    there = column.dropna()
    if column.name in ("run", "key", "label", "reason", "started", "step") or there.empty:
        return False
    if not {*map(type, there)} <= {str, bool, int, np.int64, np.bool_}:
        return False
    return bool(there.astype(str).nunique() < len(there))


def _is_setting(name: str, shown: Sequence[str]) -> bool:
    """Whether a column of `lab.load` is the machine or a setting that matters, and no part of a
    shape of the model that is shown."""
    setting = name.removeprefix("config.")
    if any(each.removeprefix("config.") == setting for each in shown):
        return False
    if setting.startswith("model.") and any(each.startswith("model.") for each in shown):
        return False
    return name == "machine" or setting in _SETTINGS
