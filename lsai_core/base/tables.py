"""Small tables, as HTML in a notebook and as text in a terminal.

Nothing in them is markup, whatever a value holds, and a value takes one line. The numbers of a
column have equal decimals, so that they can be compared by eye.
"""

from __future__ import annotations

import html
import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

LONGEST = 200  # characters of a value
WIDTH = 100  # columns of a terminal; a text takes more lines instead
_NARROWEST = 16  # no column of texts is made narrower than this
MISSING = "–"
FIGURE_SPACE, POINT_SPACE = "\u2007", "\u2008"  # as wide as a digit, as a point
Row = Sequence[Any]


@dataclass(frozen=True)
class Part:
    """A table under a title; without `heads` it has no line of them. `folded`: HTML shows its rows
    when the title is clicked. `note`: lines below. `by_row`: each row has a unit of its own, so
    that numbers have equal decimals along a row, and their points stand below each other."""

    title: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Row] = field(default_factory=list)
    folded: bool = False
    note: str = ""
    by_row: bool = False


def as_html(parts: Iterable[Part]) -> str:
    """The parts as HTML that needs no style sheet."""
    return "\n".join(map(_html, parts))


def as_text(parts: Iterable[Part]) -> str:
    """The parts for a terminal, columns below each other; a blank line in between."""
    return "\n\n".join(text for part in parts if (text := _text(part)))


def value(given: Any, places: int | None = None) -> str:
    """One value for a reader, in one line: numbers with commas and so many decimals, without
    `places` with five significant digits."""
    if given is None or given != given:
        return MISSING
    if _is_text(given):
        return _line(given)
    if isinstance(given, Integral):
        return f"{given:,}"
    text = f"{given:,.0f}" if abs(given) >= 1e4 else f"{given:,.5g}"
    if places is None or not math.isfinite(given):
        return text
    equal = f"{given:,.{places}f}"
    return equal if given == 0 or equal.strip("-0.,") else f"{given:.2g}"  # too small for these


def values(given: Sequence[Any]) -> list[str]:
    """Values of one unit for a reader: their numbers have equal decimals, as many as five digits of
    the largest and, with up to two more, three digits of the smallest need."""
    floats = [each for each in given if _is_float(each) and math.isfinite(each)]
    sizes = [abs(each) for each in floats if each]
    if len(sizes) < 2 or max(sizes) < 1e-6:
        return [value(each) for each in given]
    places = max(0, 4 - math.floor(math.log10(max(sizes))))
    wanted = (2 - math.floor(math.log10(size)) for size in sizes)
    places = max(places, *(each for each in wanted if each <= places + 2))
    needed = (len(f"{each:.{places}f}".rstrip("0").partition(".")[2]) for each in floats)
    places = max(needed)
    return [value(each, places) for each in given]


def _line(given: Any) -> str:
    text = " ".join(str(given).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _html(part: Part) -> str:
    title, body = html.escape(part.title), _table(part)
    lines = "<br>".join(map(html.escape, part.note.splitlines()))
    note = f"<p>{lines}</p>" if lines else ""
    if part.folded and body:
        return f"<details><summary>{title}</summary>{body}{note}</details>"
    return f"<p><b>{title}</b></p>{body}{note}" if title else body + note


def _table(part: Part) -> str:
    if not part.rows:
        return ""
    columns = list(zip(*part.rows, strict=True))
    heads = zip(part.heads, columns, strict=False)
    head = "".join(f"<th{_side(cells)}>{html.escape(_line(name))}</th>" for name, cells in heads)
    cells = [
        (
            # what is missing stands where the others of its column do
            f"<td{_side([given] if given is not None else column)}>{html.escape(text)}</td>"
            for given, text, column in zip(row, texts, columns, strict=True)
        )
        for row, texts in zip(part.rows, _texts(part, FIGURE_SPACE, POINT_SPACE), strict=True)
    ]
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table>{top}<tbody>{rows}</tbody></table>"


def _texts(part: Part, digit: str, point: str) -> list[list[str]]:
    """The cells as they are shown. `digit`, `point`: spaces as wide as these."""
    if not part.by_row:
        columns = [values(column) for column in zip(*part.rows, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)]
    rows = [values(row) for row in part.rows]
    columns = []
    for given, texts in zip(zip(*part.rows, strict=True), zip(*rows, strict=True), strict=True):
        behind = [_behind_the_point(each, text) for each, text in zip(given, texts, strict=True)]
        most = max((size for size in behind if size is not None), default=0)
        columns.append(
            [
                text if size is None else text + point * (most > size == 0) + digit * (most - size)
                for text, size in zip(texts, behind, strict=True)
            ]
        )
    return [list(row) for row in zip(*columns, strict=True)]


def _behind_the_point(given: Any, text: str) -> int | None:
    """How many digits of a number stand behind its point; None of other values."""
    return None if _is_text(given) or "e" in text else len(text.partition(".")[2])


def _side(cells: Iterable[Any]) -> str:
    """Text stands on the left, as the head of a column of texts does; JupyterLab has all on the
    right."""
    return ' style="text-align:left"' if all(map(_is_text, cells)) else ""


def _is_text(given: Any) -> bool:
    return isinstance(given, bool) or not isinstance(given, Real)


def _is_float(given: Any) -> bool:
    return not _is_text(given) and not isinstance(given, Integral)


def wrapped(text: str, indent: str = "") -> str:
    """Text in lines of at most `WIDTH` columns; `indent` is before all but the first of each of its
    own lines. Words stay whole."""
    lines = (_folded(line, WIDTH, indent) for line in text.splitlines())
    return "\n".join(part for each in lines for part in each)


def _folded(text: str, width: int, indent: str = "") -> list[str]:
    """A line in several of at most so many columns."""
    if len(text) <= width:
        return [text]
    words = text.lstrip()
    return textwrap.wrap(
        words,
        width,
        initial_indent=text[: len(text) - len(words)],
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _text(part: Part) -> str:
    heads = [part.heads] if part.heads and part.rows else []
    cells = [[_line(cell) for cell in row] for row in heads]
    cells += _texts(part, " ", " ") if part.rows else []
    texts = [all(map(_is_text, column)) for column in zip(*part.rows, strict=True)]
    widths = _widths(cells, texts)
    lines = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, texts, strict=True)
        ).rstrip()
        for row in cells
        for line in itertools.zip_longest(*map(_folded, row, widths), fillvalue="")
    ]
    title = [wrapped(part.title)] if part.title else []
    return "\n".join([*title, *lines, *([wrapped(part.note, "  ")] if part.note else [])])


def _widths(cells: Sequence[Sequence[str]], texts: Sequence[bool]) -> list[int]:
    """How wide each column is: as its cells are; where that is more than `WIDTH` in all, columns of
    `texts` are narrower, the widest first."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        wide = [at for at, is_text in enumerate(texts) if is_text and widths[at] > _NARROWEST]
        if not wide:
            break
        widest = max(wide, key=widths.__getitem__)
        widths[widest] -= 1
    return widths
