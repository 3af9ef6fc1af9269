"""Why a filter left no row of a frame: a value that no row has, with the nearest that one has. The
words go with the empty frame, in pandas' `attrs`, to whatever it is given to."""

from __future__ import annotations

import ast
import re
from typing import Any

import pandas as pd

from lsai_core.base.errors import hint

WHY, NOBODY = "no_rows", "no_row_has"
# `column == "text"` or a number in a query.
_EQUAL = re.compile(r"(`[^`]+`|\b[\w.]+)\s*==\s*(\"[^\"]*\"|'[^']*'|-?\d+(?:\.\d*)?(?:e-?\d+)?)")
_NAMING = ("study", "part", "machine", "variant")  # columns whose values say what there is
_FEW = 8  # values of a column that are listed


def explain(found: Any, before: pd.DataFrame, asked: Any) -> Any:
    """`found`, what a filter `asked` of the rows `before`; without rows it knows why."""
    if isinstance(found, pd.DataFrame) and len(before) and not len(found):
        found.attrs[WHY] = f"no rows: {_reason(before, asked)}"
    return found


def why_empty(frame: pd.DataFrame) -> str:
    """Why the frame has no rows; empty if it has some, or that is not known."""
    return "" if len(frame) else str(frame.attrs.get(WHY, ""))


def nobody_has(column: pd.Series, value: Any) -> str:
    """That no value of the column is this one, and which comes near; empty where one is."""
    there = column.dropna()
    if not isinstance(value, str | int | float) or (there == value).any():
        return ""
    if there.empty:
        return f"no row has a {column.name}"
    said = f"no row has {column.name} {value!r}"
    if isinstance(value, str) and pd.api.types.is_numeric_dtype(there):
        return f"{said}: it is a number, without quotes"
    return said + hint(
        value, [f"{each:g}" if isinstance(each, float) else each for each in _once(there)]
    )


def _reason(before: pd.DataFrame, asked: Any) -> str:
    if isinstance(asked, str):
        for name, value in _EQUAL.findall(asked):
            column = name.strip("`")
            given = ast.literal_eval(value)
            if column in before and (said := nobody_has(pd.Series(before[column]), given)):
                return said
    if of_mask := getattr(asked, "attrs", {}).get(NOBODY):
        return str(of_mask)
    known = [
        f"{name} is {', '.join(map(str, values))}"
        for name in _NAMING
        if name in before and 0 < len(values := _once(before[name].dropna())) <= _FEW
    ]
    there = f"; there {'; '.join(known)}" if known else ""
    return f"none of {len(before)} is as asked for{there}"


def _once(column: pd.Series) -> list[Any]:
    return list(dict.fromkeys(column))
