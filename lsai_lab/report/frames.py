"""The frame of runs that `lab.load` gives: a frame of pandas that shows what people look for first,
and says which column was meant."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pandas as pd

from lsai_core.base.errors import no_column
from lsai_core.base.shown import UnknownName, value

WIDE = 20  # columns; with more, the first ones are shown
_OPTIONS = (
    *("display.float_format", value, "display.width", 160, "display.max_columns", WIDE),
    *("display.show_dimensions", False),
)
_QUOTED = re.compile(r"'([^']+)'")


class NoColumn(KeyError):
    """A column that is not there, in one line with the nearest names."""

    def __str__(self) -> str:
        return str(self.args[0])

    def _render_traceback_(self) -> list[str]:
        return [f"error: {self}"]


def _hinting(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which says which columns come near one that is not there."""

    # pandas reads the `@names` of a query in its caller's frame, which stands one level higher
    reads_caller = method.__name__ == "query"

    @functools.wraps(method)
    def call(self: pd.DataFrame, *given: Any, **named: Any) -> Any:
        if reads_caller:
            named["level"] = named.get("level", 0) + 1
        try:
            return method(self, *given, **named)
        except (KeyError, NameError) as error:
            unknown = [name for name in _QUOTED.findall(str(error)) if name not in self.columns]
            if isinstance(error, NoColumn) or "local variable" in str(error) or not unknown:
                raise
            raise NoColumn(_no_column(unknown[0], self)) from None

    return call


def _no_column(name: str, frame: pd.DataFrame) -> str:
    dotted = [column for column in map(str, frame.columns) if column.startswith(f"{name}.")]
    if dotted:
        cure = f"a query has names with dots in `backticks`: `{dotted[0]}`"
        return f"there is no column {name!r}; {cure}"
    return no_column(name, frame.columns)


class Runs(pd.DataFrame):
    """One row a run; a frame of pandas in all that it does."""

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        return Runs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name[0] == "_":
                raise
            raise UnknownName(_no_column(name, self)) from None

    def __repr__(self) -> str:
        if not (note := self._left_out()):
            return super().__repr__()
        with pd.option_context(*_OPTIONS):
            return f"{self._narrow()!r}\n\n{note}"

    def _repr_html_(self) -> str | None:
        if not (note := self._left_out()):
            return super()._repr_html_()  # type: ignore[operator, no-any-return]
        with pd.option_context(*_OPTIONS):
            return f"{self._narrow()._repr_html_()}<p>{note}</p>"  # type: ignore[operator]

    def _narrow(self) -> pd.DataFrame:
        frame = pd.DataFrame(self)[first_columns(self)].astype(object)
        return frame.where(frame.notna(), "–")

    def _left_out(self) -> str:
        """What is not shown, in words; nothing if all is."""
        number, there = len(first_columns(self)), len(self.columns)
        if number == there:
            return ""
        more = "results by name, settings with dots (optim.lr), env.*"
        runs = "1 run" if len(self) == 1 else f"{len(self):,} runs"
        return f"{runs}; {number} of {there} columns are shown. The others: {more}"


for _name in ("__getitem__", "drop", "groupby", "pivot_table", "query", "set_index", "sort_values"):
    setattr(Runs, _name, _hinting(getattr(pd.DataFrame, _name)))


def first_columns(frame: pd.DataFrame) -> list[str]:
    """Of a wide frame of runs the columns that people look for first, as far as they say anything:
    those before `run`, its folder. All of another frame."""
    names = list(frame.columns)
    plain = len(names) <= WIDE or not isinstance(frame, Runs) or "run" not in names
    if plain or not frame.columns.is_unique:
        return names
    return [name for name in names[: names.index("run")] if not _is_empty(frame[name])]


def _is_empty(column: pd.Series) -> bool:
    return bool((column.isna() | (column.astype(object) == "")).all())
