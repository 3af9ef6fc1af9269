"""Text of a record as text: whatever stands in it, Markdown shows it as it is.

`lab.load`, `steps`, `points` and `kernels` pass every string of a record through `in_frame`, and
nothing else does. What that gives depends on who reads it:

- Where a notebook is executed as a page, it is made `plain`, so that a chapter may put it into a
  sentence, a link or a table as it comes: each character that means something to pandoc, Quarto or
  JupyterLab becomes a numeric entity (`&#91;`), which none of them takes for a mark, also where the
  text is cut, quoted, or stands at the beginning of a line. Ordinary words, numbers and names stay.
- Before a person it is the text itself, on one line, which can be searched and compared:
  `aten::mm`. It is remembered, and `lab.table` and `lab.run_link` make it plain (`in_markdown`).

`unmarked` is the way back, for CSV and for what a pointer over a figure shows.
"""

import functools
import html
import os
import re
from typing import Any

import pandas as pd

from lsai_lab.project.files import PAGE_FOLDER, one_line

# Marks wherever they stand: emphasis, links, code, maths, citations, HTML, quotes that would be
# paired.
_ALWAYS = r"[\\`*\[\]{}<>$#@^~|!&\"']"
# Only here: an underscore beside a space, `://` and `::`, dashes and dots that become one
# character.
_HERE = r"(?<![^\W_])_|_(?![^\W_])|:(?=[:/])|(?<=:):|(?<=-)-|-(?=-)|(?<=\.)\.|\.(?=\.)"
# and at the beginning whatever is neither letter nor digit
_MARKS = re.compile(rf"{_ALWAYS}|{_HERE}|\A[^\w]")
# an item of a list
_NUMBERED = re.compile(r"\A((?:&#40;)?(?:\d+|[^\W\d_]|[ivxlcdm]+|[IVXLCDM]+))([.)])(?=\s|\Z)")


def plain(value: Any) -> Any:
    """`value` with every string in it, also in lists and mappings, made fit for Markdown; numbers
    stay."""
    if isinstance(value, str):
        return _plain(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return value


@functools.lru_cache(maxsize=16384)
def _plain(value: str) -> str:
    marked = _MARKS.sub(lambda mark: f"&#{ord(mark[0])};", one_line(value))
    return _NUMBERED.sub(lambda item: f"{item[1]}&#{ord(item[2])};", marked)


_remembered: set[str] = set()  # texts of records that are no ordinary words, as they stand


def in_frame(value: Any) -> Any:
    """`value` of a record as a frame holds it, with every string in it, also in lists and mappings:
    `plain` where a notebook is executed as a page, else as it is, on one line."""
    return plain(value) if PAGE_FOLDER in os.environ else _as_it_is(value)


def _as_it_is(value: Any) -> Any:
    if isinstance(value, str):
        if plain(text := one_line(value)) != text:
            _remembered.add(text)
        return text
    if isinstance(value, list):
        return [_as_it_is(item) for item in value]
    if isinstance(value, dict):
        return {_as_it_is(key): _as_it_is(item) for key, item in value.items()}
    return value


def in_markdown(value: Any, written: str) -> str | None:
    """How a cell that holds `value`, `written` so, stands in Markdown, if it is text of a record
    before a person; None for all else, which is Markdown already."""
    return plain(written) if isinstance(value, str) and value in _remembered else None


def unmarked(value: Any) -> Any:
    """A string as it was before `plain`, on one line."""
    return html.unescape(value) if isinstance(value, str) else value


# Begins a reference in a CSV until the page has named it; `one_line` lets it stand in no text of a
# record.
REFERENCE = "\x02"
_REFERENCE = re.compile(r"@(?=(?:sec|fig|tbl)-)")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*([eE][-+]?\d+)?\s?[^\W\d_]{0,9}%?")  # with its unit, perhaps


def as_csv(frame: pd.DataFrame, **options: Any) -> str:
    """`frame` as CSV, without its index: words as they were, and none that a spreadsheet takes for
    a formula. A reference that the chapter wrote (`@sec-speed`) begins with `REFERENCE`; one of a
    record is `plain`, so it stays text."""

    def cell(value: Any) -> Any:
        text = unmarked(_REFERENCE.sub(REFERENCE, value) if isinstance(value, str) else value)
        if (
            isinstance(text, str)
            and text[:1] in ("=", "+", "-", "@", "\t", "\r")
            and not _NUMBER.fullmatch(text)
        ):
            return f"'{text}"
        return text

    heads = [cell(str(name)) for name in frame.columns]
    return frame.map(cell).set_axis(heads, axis=1).to_csv(index=False, **options)
