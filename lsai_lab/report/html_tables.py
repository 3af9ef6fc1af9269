"""The tables of an HTML output, as Markdown: what pandas and others show as a cell's value.

Only the text of their cells is taken, none of its markup, so that the page and the PDF show one and
the same. A cell over several columns or rows stands in the first of them; of the head, in each of
its columns.
"""

import re
from html.parser import HTMLParser
from itertools import zip_longest

from lsai_lab.report.show import MOST_COLUMNS, MOST_ROWS
from lsai_lab.runs.plain import plain

_NUMBER = re.compile(r"[-+−]?[\d.,]+([eE][-+]?\d+)?\s?%?|NaN|nan|None|<NA>|inf|-inf|\.\.\.|…|")
_NO_TEXT = ("script", "style", "caption")


def tables(html: str) -> str:
    """The tables of `html` in Markdown, a blank line between them; nothing if there is none."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return "\n\n".join(filter(None, map(_markdown, reader.tables)))


class _Table:
    """Rows of cells as text; `heads`: how many of them, at the beginning, are of the head."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.heads = 0
        self.below: dict[int, int] = {}  # columns that a cell from above fills, for how many rows

    def begin_row(self, is_head: bool) -> None:
        self.rows.append([])
        self.heads += is_head
        self._skip_filled()

    def begin_cell(self, columns: int, rows: int, is_head: bool) -> None:
        row = self.rows[-1]
        for _ in range(columns):
            if rows > 1:
                self.below[len(row)] = rows - 1
            row.append("")
        first = len(row) - columns
        self.places = range(first, len(row) if is_head else first + 1)
        self._skip_filled()

    def _skip_filled(self) -> None:
        row = self.rows[-1]
        while self.below.get(len(row), 0) > 0 and len(row) < MOST_COLUMNS:
            self.below[len(row)] -= 1
            row.append("")


class _Reader(HTMLParser):
    """Collects the tables; one within another is text of its cell."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[_Table] = []
        self.depth = 0
        self.silent = 0
        self.in_head = self.in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.silent += tag in _NO_TEXT
        if tag == "table":
            self.depth += 1
            if self.depth == 1:
                self.tables.append(_Table())
        if self.depth != 1:
            return
        table = self.tables[-1]
        if tag in ("thead", "tbody"):
            self.in_head = tag == "thead"
        elif tag == "tr":
            table.begin_row(self.in_head)
        elif tag in ("td", "th") and table.rows:
            given = dict(attrs)
            columns, rows = _span(given.get("colspan")), _span(given.get("rowspan"))
            table.begin_cell(columns, rows, self.in_head)
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in _NO_TEXT and self.silent > 0
        self.depth -= tag == "table" and self.depth > 0
        if self.depth == 1 and tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        if self.depth and self.in_cell and not self.silent:
            table = self.tables[-1]
            for place in table.places:
                table.rows[-1][place] += data


def _span(text: str | None) -> int:
    return min(int(text), MOST_COLUMNS) if text and text.isdecimal() and int(text) else 1


def _markdown(table: _Table) -> str:
    """A table with one row of heads, as Markdown has it: several become one, by column."""
    rows = [row[:MOST_COLUMNS] for row in table.rows if row]
    if not any(cell.strip() for row in rows for cell in row):
        return ""
    columns = [
        [" ".join(cell.split()) for cell in column] for column in zip_longest(*rows, fillvalue="")
    ]
    heads = [" ".join(filter(None, column[: table.heads])) for column in columns]
    bodies = [column[table.heads :][:MOST_ROWS] for column in columns]
    signs = ["---:" if all(map(_NUMBER.fullmatch, body)) else ":---" for body in bodies]
    lines = [heads, *zip(*bodies, strict=True)]
    written = ["| " + " | ".join(map(plain, line)) + " |" for line in lines]
    return "\n".join([written[0], "|" + "|".join(signs) + "|", *written[1:]])
