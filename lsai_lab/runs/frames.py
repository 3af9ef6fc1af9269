"""The frames that `lab` gives: frames of pandas that show what people look for first, and say which
column was meant."""

import functools
import html
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lsai_core.base.errors import UnknownKey, UnknownName, UserError, hint, no_column
from lsai_core.base.tables import Part, as_text, value, values, wrapped
from lsai_lab.runs.no_rows import NOBODY, explain, nobody_has, why_empty
from lsai_lab.runs.shown_columns import (
    TERMINAL,
    WIDE,
    chosen_columns,
    fitted,
    hidden_words,
    is_too_wide_for_a_page,
    terminal_width,
)

_COLUMNS = ("display.max_columns", WIDE, "display.max_colwidth", None)
_HEAD, _TAIL = 34, 22  # characters of a longer text that are shown
_SHORT_CELL = re.compile(r"<td>([^<]{1,40})</td>")  # which takes one line
_WHOLE = ("differs", "run")  # settings that tell runs apart, a folder that is there to be copied
_QUOTED = re.compile(r"'([^']+)'")


NOTE = "note"  # in `attrs`: what is said below a frame


class NoColumn(UnknownKey):
    """A column that is not there, in one line with the nearest names."""


def _hinting(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which says which columns come near one that is not there, and of a filter that
    leaves no row which value."""

    # pandas reads the `@names` of a query in its caller's frame, which stands one level higher
    reads_caller = method.__name__ == "query"

    @functools.wraps(method)
    def call(self: pd.DataFrame, *given: Any, **named: Any) -> Any:
        if reads_caller:
            named["level"] = named.get("level", 0) + 1
        try:
            found = method(self, *given, **named)
            filters = method.__name__ in ("query", "__getitem__") and given
            return explain(found, self, given[0]) if filters else found
        except (SyntaxError, TypeError, ValueError) as error:
            if not reads_caller:
                raise
            raise UserError(_no_query(given, str(error))) from None
        except (KeyError, NameError) as error:
            unknown = [name for name in _QUOTED.findall(str(error)) if name not in self.columns]
            if isinstance(error, NoColumn) or "local variable" in str(error) or not unknown:
                raise
            raise NoColumn(_no_column(unknown[0], self)) from None

    return call


def _no_query(given: tuple[Any, ...], error: str) -> str:
    """The error line for a query that pandas cannot read or answer."""
    asked = given[0] if given and isinstance(given[0], str) else ""
    if re.search(r"(?<![=<>!])=(?!=)", asked):
        return f"a query compares with ==, not with =: {asked}"
    return f"no query: {' '.join(asked.split()) or 'a text is wanted'} ({' '.join(error.split())})"


def _no_column(name: str, frame: pd.DataFrame) -> str:
    dotted = [column for column in map(str, frame.columns) if column.startswith(f"{name}.")]
    if dotted:
        cure = f"a query has names with dots in `backticks`: `{dotted[0]}`"
        return f"there is no column {name!r}; {cure}"
    return no_column(name, frame.columns)


def _no_row(name: Any, rows: pd.Index) -> str:
    there = hint(name, rows) if isinstance(name, str) else ""
    if not there and len(rows):
        there = f"; the rows are {rows[0]} to {rows[-1]}"
    return f"there is no row {name!r}{there}"


class _Located:
    """`loc` or `at` of pandas, which says which row or column comes near one that is not there."""

    def __init__(self, frame: pd.DataFrame, of_pandas: Any) -> None:
        self._frame, self._of_pandas = frame, of_pandas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_pandas, name)

    def __call__(self, axis: Any = None) -> Any:
        return self._of_pandas(axis=axis)

    def __setitem__(self, key: Any, given: Any) -> None:
        self._of_pandas[key] = given

    def __getitem__(self, key: Any) -> Any:
        try:
            rows = key[0] if isinstance(key, tuple) else key
            return explain(self._of_pandas[key], self._frame, rows)
        except KeyError:
            row, column = key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
            columns = [column] if isinstance(column, str) else column
            if isinstance(columns, list):
                for name in (name for name in columns if name not in self._frame.columns):
                    raise NoColumn(_no_column(name, self._frame)) from None
            raise NoColumn(_no_row(row, self._frame.index)) from None


class Frame(pd.DataFrame):
    """A frame of pandas in all that it does: `query`, `groupby`, `sort_values`, `plot`.

    Of many columns it shows those that people look for first; `list(frame)` has all names, and
    notebooks/README.md says what each means. A row of a frame of runs is a run:
    `lab.find_run(runs.iloc[0])` opens it, `lab.steps`, `lab.kernels` and `lab.compare` take it.
    `lab.summarize` gives the figures of repeats, `lab.table` shows any frame in a report.
    """

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        return Frame

    @property
    def _constructor_sliced(self) -> Callable[..., pd.Series]:
        return Values

    @property
    def loc(self) -> Any:
        """Rows and columns by name: `runs.loc[0, "tokens_per_s"]`."""
        return _Located(self, super().loc)

    @property
    def at(self) -> Any:
        """One value by its row and column."""
        return _Located(self, super().at)

    def to_markdown(self, *given: Any, **named: Any) -> Any:
        """As pandas writes it, with the package tabulate."""
        try:
            return super().to_markdown(*given, **named)
        except ImportError:
            said = "to_markdown of pandas needs the package tabulate"
            raise UserError(f"{said}; lab.table(frame).to_markdown() does not") from None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name[0] == "_":
                raise
            raise UnknownName(_no_column(name, self)) from None

    def __repr__(self) -> str:
        note, width = self._left_out(), terminal_width()
        if note and not len(self):
            return note
        with pd.option_context("display.width", width, *_COLUMNS):
            texts, said, gone = fitted(self, self._narrow(), lambda frame: "\\\n" in repr(frame))
            note = self._left_out(gone)
            with pd.option_context(*_dimensions(note)):
                table = repr(texts)
        told = (said, note, self.attrs.get(NOTE, ""))
        lines = "\n".join(wrapped(line, "  ") for line in told if line)
        return f"{table}\n\n{lines}" if lines else table

    def _repr_html_(self) -> str | None:
        if not len(self):
            return f"<p>{html.escape(self._left_out())}</p>"
        with pd.option_context("display.width", TERMINAL, *_COLUMNS):
            texts, said, gone = fitted(self, self._narrow(), is_too_wide_for_a_page)
            note = self._left_out(gone)
            with pd.option_context(*_dimensions(note)):
                table = str(texts._repr_html_())  # type: ignore[operator]
        table = _SHORT_CELL.sub(r'<td style="white-space:nowrap">\1</td>', table)
        told = (said, note, self.attrs.get(NOTE, ""))
        return table + "".join(f"<p>{html.escape(line)}</p>" for line in told if line)

    def _narrow(self) -> pd.DataFrame:
        """The columns that are shown, as texts; those of rows that pandas leaves out are empty."""
        names = first_columns(self)
        rows = _shown_rows(len(self))
        whole = pd.DataFrame(self)
        there = (whole if names == [*self.columns] else whole[names]).iloc[rows].astype(object)
        if "disturbed" in there:  # of a run a long text, of a summary a number
            there["disturbed"] = there["disturbed"].map(
                lambda e: "yes" if isinstance(e, str) else e
            )
        found = pd.DataFrame("", index=self.index, columns=there.columns, dtype=object)
        by_row = "what" in names  # a unit of its own in each row, as in a comparison
        cells = there.T if by_row else there
        for place in range(cells.shape[1]):
            column = cells.iloc[:, place]
            found.iloc[(rows[place], slice(None)) if by_row else (rows, place)] = _texts(column)
        for name in [name for name in names if {f"{name}_low", f"{name}_high"} <= {*self.columns}]:
            ends = whole[[name, f"{name}_low", f"{name}_high"]].iloc[rows].to_numpy(dtype=float)
            # a mean of equal repeats may differ from them in its last digit
            outside = np.maximum(ends[:, 1] - ends[:, 0], ends[:, 0] - ends[:, 2])
            if (outside > 1e-9 * np.abs(ends[:, 0])).any():
                continue  # the column was changed since, and these are not its ends
            each = [[line] for line in ends] if by_row else [ends]
            texts = [with_ends(*line) for part in each for line in _lines(part)]
            found.iloc[rows, found.columns.get_loc(name)] = texts
        return found

    def _left_out(self, gone: Sequence[str] = ()) -> str:
        """What is not shown, in words; nothing if all is. `gone`: for which there was no room."""
        if why := why_empty(self):
            return why
        if not len(self) and "run" in self:
            return "no runs: none is there, or none is as it was asked for"
        if not len(self):
            return f"no rows; columns: {', '.join(map(str, self.columns)) or 'none'}"
        shown = [name for name in first_columns(self) if name not in gone]
        return hidden_words(self, shown, list(gone))


class Values(pd.Series):
    """A column or a row of a `Frame`; a series of pandas in all that it does."""

    @property
    def _constructor(self) -> Callable[..., pd.Series]:
        return Values

    @property
    def _constructor_expanddim(self) -> Callable[..., pd.DataFrame]:
        return Frame

    def __eq__(self, other: object) -> Any:
        found = super().__eq__(other)
        if not found.any() and (said := nobody_has(pd.Series(self), other)):
            found.attrs[NOBODY] = said
        return found

    def __and__(self, other: Any) -> Any:
        found = super().__and__(other)
        found.attrs |= getattr(other, "attrs", {})  # pandas keeps those of the first
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name[0] == "_" or not self._has_names():
                raise
            raise UnknownName(self._no_entry(name)) from None

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            if not isinstance(key, str) or not self._has_names():
                raise
            raise NoColumn(self._no_entry(key)) from None

    def _has_names(self) -> bool:
        return bool(len(self)) and all(isinstance(name, str) for name in self.index)

    def _no_entry(self, name: str) -> str:
        if "run" in self.index:
            return no_column(name, self.index)
        return f"there is no {name!r}{hint(name, self.index)}"

    def __repr__(self) -> str:
        if not len(self):
            return "no values"
        if len(self) <= WIDE or "run" not in self.index:
            places = _shown_rows(len(self))
            shown = pd.Series("", index=self.index, name=self.name, dtype=object)
            shown.iloc[places] = _texts(pd.Series(self).iloc[places])
            return repr(shown).removesuffix("object") + str(self.dtype)
        names = first_columns(Frame([self.to_dict()]))
        rows = [(name, self[name]) for name in names]
        note = f"1 run; {len(rows)} of {len(self)} columns are shown; lab.find_run(row) opens it"
        return as_text([Part("", rows=rows, note=note, by_row=True)])


# Those that name columns, and so may name one that is not there.
_NAMING = (
    "__getitem__",
    "drop",
    "dropna",
    "groupby",
    "pivot_table",
    "query",
    "set_index",
    "sort_values",
)

for _name in _NAMING:
    setattr(Frame, _name, _hinting(getattr(pd.DataFrame, _name)))


def with_ends(figure: str, low: str, high: str) -> str:
    """A figure with the range of its repeats, if they differ: `447,956 (447,806–449,552)`."""
    return figure if low == high else f"{figure} ({low}–{high})"


def _lines(figures: Any) -> Iterable[tuple[str, str, str]]:
    """Figures of one unit with both ends, each a line, as texts."""
    texts = iter(values([float(each) for line in figures for each in line]))
    return zip(texts, texts, texts, strict=True)


def _shown_rows(length: int) -> list[int]:
    """The places of the rows that pandas shows of so many."""
    most, least = pd.get_option("display.max_rows"), pd.get_option("display.min_rows")
    if not most or length <= most:
        return list(range(length))
    half = max(1, min(most, least or most) // 2)
    return [*range(half), *range(length - half, length)]


def _texts(column: pd.Series) -> list[str]:
    """The values of one unit; in a row of several, each for itself."""
    there = [None if pd.api.types.is_scalar(each) and pd.isna(each) else each for each in column]
    one_unit = pd.api.types.is_float_dtype(column) or {*map(type, there)} <= {float, type(None)}
    if one_unit or column.name in _WHOLE:
        return values(there)
    return [_middle_out(value(each)) for each in there]


def _middle_out(text: str) -> str:
    """A long text without its middle: names of kernels, as folders of runs, differ at the end."""
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}…{text[-_TAIL:]}"


def _dimensions(note: str) -> tuple[str, Any]:
    """Whether pandas says how large a frame is: a note does so itself."""
    return "display.show_dimensions", False if note else "truncate"


def first_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that are shown of a frame that `lab` gives, as `chosen_columns` says; all of
    another one."""
    if not isinstance(frame, Frame) or not frame.columns.is_unique:
        return list(frame.columns)
    return chosen_columns(frame)
