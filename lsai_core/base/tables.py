"""Small tables, as HTML in a notebook and as text in a terminal.

Nothing in them is markup, whatever a value holds, and a value takes one line.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

LONGEST = 200  # characters of a value
Row = Sequence[Any]


@dataclass(frozen=True)
class Part:
    """A table under a title; without `heads` it has no line of them. `folded`: HTML shows its rows
    when the title is clicked. `note`: a line below."""

    title: str = ""
    heads: Sequence[str] = ()
    rows: Sequence[Row] = field(default_factory=list)
    folded: bool = False
    note: str = ""


def as_html(parts: Iterable[Part]) -> str:
    """The parts as HTML that needs no style sheet."""
    return "\n".join(map(_html, parts))


def as_text(parts: Iterable[Part]) -> str:
    """The parts for a terminal, columns below each other; a blank line in between."""
    return "\n\n".join(text for part in parts if (text := _text(part)))


def value(given: Any) -> str:
    """One value for a reader: numbers with five significant digits and commas, one line."""
    if given is None or (isinstance(given, float) and given != given):
        return "–"
    if isinstance(given, bool) or not isinstance(given, int | float):
        return _line(given)
    if isinstance(given, int):
        return f"{given:,}"
    return f"{given:,.0f}" if abs(given) >= 1e4 else f"{given:.5g}"


def _line(given: Any) -> str:
    text = " ".join(str(given).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _html(part: Part) -> str:
    title, body = html.escape(part.title), _table(part)
    note = f"<p>{html.escape(part.note)}</p>" if part.note else ""
    if part.folded and body:
        return f"<details><summary>{title}</summary>{body}{note}</details>"
    return f"<p><b>{title}</b></p>{body}{note}" if title else body + note


def _table(part: Part) -> str:
    if not part.rows:
        return ""
    columns = zip(part.heads, zip(*part.rows, strict=True), strict=False)
    head = "".join(f"<th{_side(cells)}>{html.escape(_line(name))}</th>" for name, cells in columns)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in part.rows)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table>{top}<tbody>{rows}</tbody></table>"


def _cell(given: Any) -> str:
    return f"<td{_side([given])}>{html.escape(value(given))}</td>"


def _side(cells: Iterable[Any]) -> str:
    """Text stands on the left, as the head of a column of texts does; JupyterLab has all on the
    right."""
    return ' style="text-align:left"' if all(map(_is_text, cells)) else ""


def _is_text(given: Any) -> bool:
    return isinstance(given, bool) or not isinstance(given, int | float)


def _text(part: Part) -> str:
    heads = [part.heads] if part.heads and part.rows else []
    cells = [[_line(cell) for cell in row] for row in heads]
    cells += [[value(cell) for cell in row] for row in part.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = [all(map(_is_text, column)) for column in zip(*part.rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, texts, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([*([part.title] if part.title else []), *lines, *part.note.splitlines()])
