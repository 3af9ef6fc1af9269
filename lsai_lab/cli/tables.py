"""How commands show lists: tables and paragraphs of at most 100 columns."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lsai_core.base.tables import WIDTH, wrapped
from lsai_lab.project.files import one_line

NARROWEST = 8  # no column is cut shorter than this
_LONG = 24  # characters of a text that may stand below its row
Row = Mapping[str, Any]


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
    the widest texts are cut. With `full` everything is shown: long texts below their rows, and
    columns for which there is no room in another table that begins with the first one.
    """
    formats = formats or {}
    columns = {
        name: [name, *(_cell(row[name], formats.get(name, "")) for row in rows)]
        for name in rows[0]
        if any(_cell(row[name], "") for row in rows)
    }
    texts = {name for name in columns if any(isinstance(row[name], str) for row in rows)}
    if full:
        return _whole(columns, texts)
    for name in less:
        if _width(columns) > WIDTH:
            columns.pop(name, None)
    while _width(columns) > WIDTH:
        widest = max(columns.keys() & texts, key=lambda name: _widest(columns[name]), default="")
        if not widest or _widest(columns[widest]) <= NARROWEST:
            break
        size = _widest(columns[widest]) - 1
        columns[widest] = [shortened(text, size) for text in columns[widest]]
    return "\n".join(_lines(columns, texts))


def _lines(columns: Mapping[str, Sequence[str]], texts: Collection[str]) -> list[str]:
    """The head and the rows of a table."""
    aligned = []
    for name, cells in columns.items():
        align, size = (str.ljust if name in texts else str.rjust), _widest(cells)
        aligned.append([align(text, size) for text in cells])
    return ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]


def _whole(columns: dict[str, list[str]], texts: Collection[str]) -> str:
    """All that a table holds, as `table` says for `full`."""
    first, below = next(iter(columns)), dict[str, list[str]]()
    long = [name for name in texts if name != first and _widest(columns[name]) > _LONG]
    for name in sorted(long, key=lambda name: _widest(columns[name]), reverse=True):
        if _width(columns) > WIDTH:
            below[name] = columns.pop(name)
    blocks = [{first: columns.pop(first)}]
    for name, cells in columns.items():
        if _width({**blocks[-1], name: cells}) > WIDTH:
            blocks.append({first: blocks[0][first]})
        blocks[-1][name] = cells
    whole, *others = [_lines(block, texts) for block in blocks]
    for row, line in enumerate(whole):
        for name, cells in below.items() if row else ():
            if cells[row]:
                line += "\n" + wrapped(f"    {name}: {cells[row]}", "      ")
        whole[row] = line
    return "\n\n".join("\n".join(lines) for lines in [whole, *others])


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
