"""Text of a record as text: whatever stands in it, Markdown shows it as it is.

`lab.load`, `steps`, `points` and `kernels` pass every string of a record through `plain`, and
nothing else does, so that a chapter may put it into a sentence or a table as it comes. Ordinary
words, numbers and names stay as they are and can be compared; each character that means something
to pandoc, Quarto or JupyterLab becomes a numeric entity (`&#91;`), which none of them takes for a
mark, also where the text is cut, quoted, or stands at the beginning of a line. `unmarked` is the
way back, for CSV and for what a pointer over a figure shows.
"""

import html
import re
from typing import Any

import pandas as pd

from lsai_lab.project.files import one_line

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
        marked = _MARKS.sub(lambda mark: f"&#{ord(mark[0])};", one_line(value))
        return _NUMBERED.sub(lambda item: f"{item[1]}&#{ord(item[2])};", marked)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return value


def unmarked(value: Any) -> Any:
    """A string as it was before `plain`, on one line."""
    return html.unescape(value) if isinstance(value, str) else value


_NUMBER = re.compile(r"[-+]?\d[\d.,]*([eE][-+]?\d+)?\s?[^\W\d_]{0,9}%?")  # with its unit, perhaps


def as_csv(frame: pd.DataFrame, **options: Any) -> str:
    """`frame` as CSV, without its index: words as they were, and none that a spreadsheet takes for
    a formula."""

    def cell(value: Any) -> Any:
        text = unmarked(value)
        if (
            isinstance(text, str)
            and text[:1] in ("=", "+", "-", "@", "\t", "\r")
            and not _NUMBER.fullmatch(text)
        ):
            return f"'{text}"
        return text

    heads = [cell(str(name)) for name in frame.columns]
    return frame.map(cell).set_axis(heads, axis=1).to_csv(index=False, **options)
