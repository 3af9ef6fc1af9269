"""How commands show lists: tables and paragraphs of at most 100 columns."""

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lsai_lab.project.files import one_line

WIDTH = 100  # columns of a terminal that lists are made for
NARROWEST = 8  # no column is cut shorter than this
Row = Mapping[str, Any]


def wrapped(text: str, indent: str = "") -> str:
    """A paragraph in lines of at most 100 columns; `indent` is before all but the first. Words
    (paths, commands without blanks) stay whole."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def say(text: str, indent: str = "") -> None:
    """Print a paragraph, wrapped."""
    print(wrapped(text, indent))


def counts(things: Iterable[str], of: str, order: Sequence[str] = ()) -> str:
    """How many there are, in all and of each kind: `5 runs: 3 ok, 2 failed`; the kinds of `order`
    first, `of` is their name in the plural."""
    found = Counter(things)
    kinds = [kind for kind in order if kind in found] + [k for k in found if k not in order]
    told = ", ".join(f"{found[kind]} {kind}" for kind in kinds)
    total = found.total()
    return f"{total} {of if total != 1 else of.removesuffix('s')}" + (f": {told}" if told else "")


def shortened(text: str, width: int) -> str:
    """`text`, cut to so many characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def show_rows(
    rows: Sequence[Row],
    as_json: bool,
    nothing: str,
    less: Sequence[str] = (),
    full: bool = False,
) -> None:
    """Print rows as JSON or as a table (see `table`); instead of an empty one it says `nothing`."""
    if as_json:
        print(json.dumps(rows, indent=1, default=str))
    else:
        print(table(rows, less, full) if rows else nothing)


def table(
    rows: Sequence[Row],
    less: Sequence[str] = (),
    full: bool = False,
    formats: Mapping[str, str] | None = None,
) -> str:
    """Rows, which have the same keys, as a table without empty columns: texts from the left,
    numbers from the right, by the format of their column if it has one.

    Where it is wider than 100 columns, those of `less` go, the first first; if that is not enough,
    the widest texts are cut. `full` shows everything.
    """
    formats = formats or {}
    columns = {
        name: [name, *(_cell(row[name], formats.get(name, "")) for row in rows)]
        for name in rows[0]
        if any(_cell(row[name], "") for row in rows)
    }
    texts = {name for name in columns if any(isinstance(row[name], str) for row in rows)}
    for name in less:
        if not full and _width(columns) > WIDTH:
            columns.pop(name, None)
    while not full and _width(columns) > WIDTH:
        widest = max(columns.keys() & texts, key=lambda name: _widest(columns[name]), default="")
        if not widest or _widest(columns[widest]) <= NARROWEST:
            break
        size = _widest(columns[widest]) - 1
        columns[widest] = [shortened(text, size) for text in columns[widest]]
    for name, cells in columns.items():
        align, size = (str.ljust if name in texts else str.rjust), _widest(cells)
        columns[name] = [align(text, size) for text in cells]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns.values(), strict=True))


def _cell(value: Any, form: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return one_line(value)
    if not form and isinstance(value, float):
        form = ",.0f" if abs(value) >= 1000 else ".4g"
    return one_line(format(value, form) if form else str(value))


def _widest(cells: Sequence[str]) -> int:
    return max(map(len, cells))


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(map(_widest, columns.values())) + 2 * (len(columns) - 1)
