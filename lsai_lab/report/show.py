"""What a notebook calls to put a figure, a table or computed text into the report.

Each call emits an ordinary Jupyter display that reads well in JupyterLab, with the label and the caption in the output's
metadata (`{"lsai": {"kind", "label", "caption"}}`), where the binder finds them. Captions are arguments, not cell options,
because they hold measured numbers. A label starts with `fig-` or `tbl-` and is referred to as `@fig-loss` in any chapter.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib.figure import Figure

from lsai_core.errors import UserError
from lsai_lab.report.pandoc import READER, cell_text, pandoc

Format = str | Callable[[Any], str]
MISSING = "–"
PNG_DPI = 220


def show_figure(fig: Figure, label: str, caption: str) -> None:
    """Show `fig` as figure `label` (`fig-...`) with a Markdown `caption`, and close it.

    The display holds SVG (the report) and PNG at 220 dpi (viewers that show no SVG). UserError for a malformed label.
    """
    _check(label, "fig")
    svg, png = io.StringIO(), io.BytesIO()
    fig.savefig(svg, format="svg", bbox_inches="tight", pad_inches=0.03, metadata={"Date": None})
    fig.savefig(png, format="png", bbox_inches="tight", pad_inches=0.03, dpi=PNG_DPI)
    plt.close(fig)
    width = round(int.from_bytes(png.getvalue()[16:20], "big") * 96 / PNG_DPI)
    bundle = {"image/svg+xml": svg.getvalue(), "image/png": png.getvalue(), "text/plain": f"Figure {label}: {caption}"}
    metadata = {"image/png": {"width": width}, "lsai": {"kind": "figure", "label": label, "caption": caption}}
    _display(bundle, metadata)
    # JupyterLab shows one representation of a display, so the caption is a display of its own; the binder leaves it out.
    _display(
        {"text/markdown": f"**Figure `{label}`.** {caption}", "text/plain": caption}, {"lsai": {"kind": "caption"}}
    )


def show_table(
    df: pd.DataFrame,
    label: str,
    caption: str,
    *,
    formats: Mapping[str, Format] | None = None,
    links: Mapping[str, str] | None = None,
) -> None:
    """Show `df` (without its index) as table `label` (`tbl-...`) with a Markdown `caption`.

    `formats`: column -> format of one value, `".2f"`, `"{:.1f} GiB"` or a function; without one, a column of floats gets
    as many decimals as its smallest value needs for three digits. `links`: column -> the column that holds each row's run key; the cell then links to that run's entry in the
    appendix, and the key column itself is not shown. Strings are Markdown; missing values show as an en dash.
    """
    _check(label, "tbl")
    table = table_markdown(df, formats=formats, links=links)
    html = pandoc("--from", READER, "--to", "html5", "--mathml", text=f"{table}\n\n: **Table `{label}`.** {caption}\n")
    bundle = {"text/html": html, "text/markdown": table, "text/plain": df.to_string(index=False)}
    _display(bundle, {"lsai": {"kind": "table", "label": label, "caption": caption}})


def show_text(markdown: str) -> None:
    """Show computed Markdown: prose whose numbers come from the records. It may hold references and maths.

    A heading's label, `{#sec-...}`, becomes a comment, which JupyterLab does not show and the binder turns back.
    """
    markdown = re.sub(r"(?m)^(#{1,6} .*) \{(#[\w-]+)\}$", r"\1 <!-- \2 -->", markdown)
    _display({"text/markdown": markdown, "text/plain": markdown}, {"lsai": {"kind": "text"}})


def run_link(text: object, key: str) -> str:
    """Markdown link from `text` to the appendix entry of the run with this key."""
    return f"[{text}](#run-{key})"


def table_markdown(
    df: pd.DataFrame, *, formats: Mapping[str, Format] | None = None, links: Mapping[str, str] | None = None
) -> str:
    """`df` as a pipe table; see `show_table`. UserError for a column that does not exist."""
    formats, links = dict(formats or {}), dict(links or {})
    for name in [*formats, *links, *links.values()]:
        if name not in df.columns:
            raise UserError(f"show_table: no column {name!r}; columns: {', '.join(map(str, df.columns))}")
    shown = [name for name in df.columns if name not in set(links.values())]
    columns = []
    for name in shown:
        spec = formats.get(name) or _float_format(df[name])
        cells = [_cell(value, spec) for value in df[name]]
        if name in links:
            cells = [
                run_link(cell, key) if isinstance(key, str) and key and cell != MISSING else cell
                for cell, key in zip(cells, df[links[name]], strict=True)
            ]
        columns.append(cells)
    lines = ["| " + " | ".join(cell_text(str(name)) for name in shown) + " |"]
    lines.append("|" + "|".join("---:" if _is_numeric(df[name]) else ":---" for name in shown) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in zip(*columns, strict=True)]
    return "\n".join(lines)


def _is_numeric(column: pd.Series) -> bool:
    """Whether the column reads as numbers: all its present values are numbers, or links around one."""
    values = [value for value in column if not _is_missing(value)]
    link = re.compile(r"\[[-+]?[\d., ]+[^\]]{0,4}\]\(#run-")
    return bool(values) and all(
        (isinstance(value, (int, float, np.number)) and not isinstance(value, bool))
        or (isinstance(value, str) and link.match(value))
        for value in values
    )


def _float_format(column: pd.Series) -> str | None:
    """One number of decimals for a column of floats, so that they line up: three significant digits for the smallest.
    None (four significant digits each) for other columns and for values over more than three decades."""
    sizes = [abs(float(value)) for value in column if isinstance(value, (float, np.floating))]
    sizes = [size for size in sizes if math.isfinite(size) and size > 0]
    if not sizes or max(sizes) > 1e3 * min(sizes) or max(sizes) >= 1e4:
        return None
    return f".{min(6, max(0, 2 - math.floor(math.log10(min(sizes)))))}f"


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _cell(value: Any, spec: Format | None) -> str:
    if _is_missing(value):
        return MISSING
    if callable(spec):
        return cell_text(str(spec(value)))
    if isinstance(spec, str) and not isinstance(value, (str, bool)):
        return cell_text(spec.format(value) if "{" in spec else format(value, spec))
    if isinstance(value, (float, np.floating)):
        value = float(value)
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        value = int(value)
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return cell_text(str(value))


def _check(label: str, prefix: str) -> None:
    if not re.fullmatch(rf"{prefix}-[A-Za-z0-9][A-Za-z0-9-]*", label):
        raise UserError(f"label {label!r} must start with '{prefix}-' and hold letters, digits and dashes only")


def _display(bundle: dict[str, Any], metadata: dict[str, Any]) -> None:
    display(bundle, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]
