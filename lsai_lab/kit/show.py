"""What a notebook shows: a table, a figure, a sentence. Each is an ordinary Jupyter display, right in JupyterLab and in Quarto.

Captions and labels are Quarto's cell options (`#| label: fig-speed`, `#| fig-cap: ...`, `#| tbl-cap: ...`); numbers that belong to a
result stand in the sentence beside it. A table is Markdown, so that JupyterLab, the HTML report and the PDF show one and the same.
A figure is SVG with its text as text, and PNG for viewers without; its data travel with it as CSV.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

Format = str | Callable[[Any], str]
MISSING = "–"
PNG_DPI = 200


class Table:
    """A frame as a Markdown table; see `table`."""

    def __init__(self, markdown: str, frame: pd.DataFrame) -> None:
        self.markdown, self.frame = markdown, frame

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        bundle = {"text/markdown": self.markdown, "text/plain": self.frame.to_string(index=False)}
        return bundle, {"lsai": {"kind": "table", "csv": self.frame.to_csv(index=False)}}


def table(frame: pd.DataFrame, formats: Mapping[str, Format] | None = None, *, link: str | None = None) -> Table:
    """`frame`, without its index, as a table: the last line of a cell with `#| label: tbl-...` and `#| tbl-cap: ...`.

    `formats`: column -> format of one value (`".2f"`, `"{:.1f} GiB"`, a function); without one, floats get three significant digits of
    the smallest. A column `run` (folders of runs) is not shown: it makes the column `link` (default: the first) a link to
    each run's page. Strings are Markdown; missing values show as an en dash. Raises KeyError for an unknown column.
    """
    formats = dict(formats or {})
    shown = [name for name in frame.columns if name != "run"]
    if unknown := [name for name in [*formats, *([link] if link else [])] if name not in shown]:
        raise KeyError(f"table: no column {unknown[0]!r}; columns: {', '.join(map(str, shown))}")
    plain = {name: [_cell(value, formats.get(name) or _digits(frame[name])) for value in frame[name]] for name in shown}
    columns, widths = dict(plain), {name: _width([str(name), *plain[name]]) for name in shown}
    if "run" in frame.columns and shown:
        target = link or shown[0]
        cells = zip(columns[target], frame["run"], strict=True)
        columns[target] = [run_link(cell, run) if isinstance(run, (str, Path)) else cell for cell, run in cells]
    lines = ["| " + " | ".join(str(name) for name in shown) + " |"]
    ends = [("", ":") if _is_numeric(frame[name]) else (":", "") for name in shown]
    lines.append("|" + "|".join(f"{a}{'-' * widths[name]}{b}" for name, (a, b) in zip(shown, ends, strict=True)) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in zip(*columns.values(), strict=True)]
    return Table("\n".join(lines), frame[shown])


def figure(fig: Any = None, data: pd.DataFrame | None = None) -> None:
    """Show a matplotlib figure (default: the current one; an Axes or seaborn grid serves) and close it.

    `data`: what is drawn, which readers of the HTML report can save as CSV. The cell has `#| label: fig-...`, `#| fig-cap: ...` and,
    where the caption does not describe the picture, `#| fig-alt: ...`.
    """
    import matplotlib.pyplot as plt
    from IPython.display import display

    fig = plt.gcf() if fig is None else getattr(fig, "figure", fig)
    svg, png = io.StringIO(), io.BytesIO()
    fig.savefig(svg, format="svg", bbox_inches="tight", pad_inches=0.03, metadata={"Date": None})
    fig.savefig(png, format="png", bbox_inches="tight", pad_inches=0.03, dpi=PNG_DPI)
    plt.close(fig)
    width = round(int.from_bytes(png.getvalue()[16:20], "big") * 96 / PNG_DPI)
    bundle = {"image/svg+xml": svg.getvalue(), "image/png": png.getvalue(), "text/plain": "figure"}
    facts = {"kind": "figure", **({} if data is None else {"csv": data.to_csv(index=False)})}
    display(bundle, metadata={"image/png": {"width": width}, "lsai": facts}, raw=True)  # type: ignore[no-untyped-call]


def say(markdown: str) -> None:
    """Show a sentence whose numbers were computed: Markdown, with references (`@fig-speed`) and maths where wanted."""
    from IPython.display import Markdown, display

    display(Markdown(markdown))  # type: ignore[no-untyped-call]


def run_link(text: object, run: str | Path) -> str:
    """Markdown link from `text` to the page of a run (its folder), as the report places it."""
    folder = Path(run)
    return f"[{text}](runs/{folder.parent.name}/{folder.name}.html)"


def _width(cells: Sequence[str]) -> int:
    """Dashes under a column's head: where a table must wrap, pandoc divides the width in their proportion. At least the longest word."""
    texts = [re.sub(r"\]\([^)]*\)|[\[*`]", "", cell) for cell in cells]
    return max(3, min(30, max(map(len, texts))), max(len(word) for text in texts for word in text.split() or [""]))


def _is_numeric(column: pd.Series) -> bool:
    values = [value for value in column if not _is_missing(value)]
    number = re.compile(r"[-+]?[\d.,]+ ?\D{0,3}$")
    return bool(values) and all(
        isinstance(value, (int, float, np.number)) or (isinstance(value, str) and number.match(value))
        for value in values
    )


def _digits(column: pd.Series) -> str | None:
    """One number of decimals for a column of floats, so that they line up: three significant digits for the smallest.
    None (four significant digits each) for other columns and for values over more than three decades."""
    sizes = [abs(float(value)) for value in column if isinstance(value, (float, np.floating)) and math.isfinite(value)]
    sizes = [size for size in sizes if size > 0]
    if not sizes or max(sizes) > 1e3 * min(sizes) or max(sizes) >= 1e4:
        return None
    return f".{min(6, max(0, 2 - math.floor(math.log10(min(sizes)))))}f"


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _cell(value: Any, spec: Format | None) -> str:
    if _is_missing(value):
        return MISSING
    if callable(spec):
        text = str(spec(value))
    elif isinstance(spec, str) and not isinstance(value, (str, bool)):
        text = spec.format(value) if "{" in spec else format(value, spec)
    elif isinstance(value, (float, np.floating)):
        number = float(value)
        text = f"{number:,.0f}" if abs(number) >= 1e4 else f"{number:.4g}"
    elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        text = f"{int(value):,}"
    else:
        text = str(value)
    return " ".join(text.split()).replace("|", r"\|").replace("<", r"\<")
