"""What a notebook shows: a table, a figure, a sentence. Each is an ordinary Jupyter display, right
in JupyterLab and in Quarto.

Captions and labels are Quarto's cell options (`#| label: fig-speed`, `#| fig-cap: ...`, `#|
tbl-cap: ...`); numbers that belong to a result stand in the sentence beside it. A table is
Markdown, so that JupyterLab, the HTML report and the PDF show one and the same. A figure is SVG
with its text as text, and PNG for viewers without; its data travel with it as CSV.
"""

import functools
import html
import io
import os
import re
from collections.abc import Mapping
from numbers import Number
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from IPython.display import HTML, Markdown

from lsai_core.base.errors import UnknownName, UserError, did_you_mean, no_column
from lsai_core.base.tables import values
from lsai_lab.analysis.summary import CALM, require_columns
from lsai_lab.project.files import PAGE_FOLDER
from lsai_lab.report.load import AnyRun, folder_of
from lsai_lab.report.pictures import below_each_other
from lsai_lab.report.values import Format, aligned, cell, digits, shown
from lsai_lab.runs.frames import first_columns, with_ends
from lsai_lab.runs.no_rows import why_empty
from lsai_lab.runs.pages import page_name
from lsai_lab.runs.plain import as_csv, in_markdown, unmarked
from lsai_lab.runs.result_names import is_timed
from lsai_lab.runs.shown_columns import ENDS, chosen_columns, is_judged, is_summary

PNG_DPI = 200
MOST_ROWS, MOST_COLUMNS = 200, 40  # of a table that a reader can take in
# Of Markdown in a cell; references and words of links stay.
_MARKUP = re.compile(r"\*\*|\[-?(@[\w-]+)\]|\[([^]]*)\]\([^)]*\)")
_BREAKABLE = {0x00A0: " ", 0x2060: None}  # what keeps a range in one line, for plain text


class Table(Markdown):
    """A table in Markdown, which a terminal shows as it is, but for what keeps text of records
    from being markup. For papers and other programs: `to_markdown()`, `to_latex()` (with the
    package booktabs) and `to_csv()`, each a text, or written to the file that is named."""

    cells: pd.DataFrame  # as they are shown, without links

    def __getattr__(self, name: str) -> Any:
        raise _not_there(self, name, "to_markdown", "to_latex", "to_csv")

    def __repr__(self) -> str:
        text = html.unescape(str(self.data)).replace("\\|", "|").replace("\\<", "<")
        return text.translate(_BREAKABLE)

    def to_markdown(self, path: str | Path | None = None) -> str | None:
        """The table as Markdown, without links."""
        heads = [_head(name) for name in self.cells]
        sides = [":---" if self.cells[name].map(_is_word).any() else "---:" for name in self.cells]
        rows = [[in_markdown(each, each) or each for each in row] for row in self.cells.to_numpy()]
        lines = [f"| {' | '.join(row)} |" for row in (heads, sides, *rows)]
        return _given("\n".join(lines) + "\n", path)

    def to_latex(self, path: str | Path | None = None) -> str | None:
        """The table for LaTeX, escaped."""
        sides = "".join("l" if self.cells[name].map(_is_word).any() else "r" for name in self.cells)
        escaped = self.cells.map(lambda cell: cell.replace("–", "--").replace("−", "-"))
        table = escaped.style.hide(axis="index").format(escape="latex")
        table = table.format_index(escape="latex", axis="columns")
        return _given(table.to_latex(hrules=True, column_format=sides), path)

    def to_csv(self, path: str | Path | None = None) -> str | None:
        """All rows and columns of the frame as CSV, with all digits."""
        return _given(str((self.metadata or {})["lsai"]["csv"]), path)


def _given(text: str, path: str | Path | None) -> str | None:
    """The text, or nothing once it is written to the file."""
    if path is None:
        return text
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    return None


class Picture(HTML):
    """Pictures as HTML; a terminal shows what they say in words. `savefig("step.svg")` writes them,
    below each other, as an SVG for papers."""

    def savefig(self, path: str | Path) -> None:
        """Write the pictures as one SVG. UserError for another format, and for a file that cannot
        be written."""
        if Path(path).suffix.lower() != ".svg":
            raise UserError(f"a picture of this kind is an SVG: name the file .svg, not {path}")
        _given(below_each_other(str(self.data)), path)

    save = savefig

    def __getattr__(self, name: str) -> Any:
        raise _not_there(self, name, "savefig")

    def __repr__(self) -> str:
        return "\n".join(map(html.unescape, re.findall(r"<desc>(.*?)</desc>", str(self.data))))


def _not_there(owner: Any, name: str, *there: str) -> AttributeError:
    """The error for a name that an object has not, with what it has."""
    said = f"{type(owner).__name__} has no attribute {name!r}"
    if name[0] == "_":
        return AttributeError(said)
    near = did_you_mean(name, there) or f"known: {', '.join(there)}"
    return UnknownName(f"{said}; {near}")


def table(
    frame: Any, formats: Mapping[str, Format] | None = None, *, link: str | None = None
) -> Table:
    """`frame`, without its index, as a table: the last line of a cell with `#| label: tbl-...` and
    `#| tbl-cap: ...`. Of a prediction that of its GPUs, of a comparison that of its results.

    `formats`: column -> format of one value (`".2f"`, `"{:.1f} GiB"`, a function); without one,
    floats get three significant digits of the smallest. Of a frame of more than 200 rows or 40
    columns (of `lab.load`: those that it shows itself) a line says what is left out; its CSV has
    all. A column `run` (folders of runs) is not shown: it makes the column `link` (default: the
    first) a link to each run's page, of a pair `(before, after)` of folders in the report one to
    both side by side. Strings are Markdown, those of records are not; missing values
    show as an en dash. A column beside its ends (`<name>_low`, `<name>_high`) has them in
    brackets, and of what `lab.summarize` and `lab.judged` give it takes what those show themselves.
    `.to_latex()`, `.to_markdown()` and `.to_csv()` of the table are for papers. Raises UserError
    for an unknown column, and for what is no format.

    >>> runs = lab.recorded("memory").query("machine == 'h100' and part == 'train'")
    >>> lab.table(runs[["label", "tokens_per_s", "run"]], {"tokens_per_s": ",.0f"})
    | label |...
    """
    frame = getattr(frame, "_frame_of_it", frame)
    require_columns((), frame)
    formats = _formats(formats)
    if is_judged(frame) and frame.index.name:  # their names, by which they are asked for
        frame = frame.reset_index()
    whole = frame
    names = [name for name in frame.columns if name != "run"]
    if unknown := [name for name in [*formats, *([link] if link else [])] if name not in names]:
        raise UserError(f"table: {no_column(unknown[0], names)}")
    wide = len(names) > MOST_COLUMNS
    if not len(frame) and (wide or why_empty(frame)):
        return _made(why_empty(frame) or "no rows", whole, pd.DataFrame(columns=names))
    names = first_columns(frame)[:MOST_COLUMNS] if wide else names
    elsewhere = _told_elsewhere(frame) - {*formats}
    names = [name for name in names if name not in elsewhere]
    names, frame = [name for name in names if name != "run"], frame.head(MOST_ROWS)
    columns = {name: _column(frame, name, formats) for name in names}
    if "n" in names and "n" not in formats:
        columns["n"] = _counted(frame, names, columns["n"])
    cells = pd.DataFrame({_plain(name): map(_plain, found) for name, found in columns.items()})
    columns |= {name: found for name in names if (found := aligned(columns[name]))}
    if "run" in frame.columns and names:
        target = link if link in names else names[0]
        pairs = zip(columns[target], frame["run"], strict=True)
        columns[target] = [_led(cell, run) for cell, run in pairs]
    lines = ["| " + " | ".join(_head(name) for name in names) + " |"]
    lines.append(
        "|" + "|".join("---:" if _is_numeric(frame[name]) else ":---" for name in names) + "|"
    )
    lines += ["| " + " | ".join(row) + " |" for row in zip(*columns.values(), strict=True)]
    if note := _left_out(whole.drop(columns=[*elsewhere]), len(names)):
        lines += ["", note]
    return _made("\n".join(lines), whole, cells)


def _made(text: str, whole: pd.DataFrame, cells: pd.DataFrame) -> Table:
    """A table of Markdown `text` with its `cells`; its CSV has the `whole` frame."""
    csv = as_csv(
        whole.drop(columns="run", errors="ignore").map(
            lambda cell: _MARKUP.sub(r"\1\2", cell) if isinstance(cell, str) else cell
        )
    )
    made = Table(text, metadata={"lsai": {"csv": csv}})  # type: ignore[no-untyped-call]
    made.cells = cells
    return made


def _counted(frame: pd.DataFrame, names: list[str], cells: list[str]) -> list[str]:
    """The cells of `n` of a summary: beside a speed or time of fewer repeats, since the others were
    disturbed, with the number of these."""
    calm: dict[str, int] = frame.attrs.get(CALM, {})
    if "disturbed" in names or "run" not in frame or not any(map(is_timed, map(str, names))):
        return cells
    pairs = zip(cells, frame["run"], strict=True)
    return [f"{cell} ({calm[run]} undisturbed)" if run in calm else cell for cell, run in pairs]


def _told_elsewhere(frame: pd.DataFrame) -> set[str]:
    """Columns that a table does not show, where nobody gives them a format: ends of ranges, which
    stand beside their figure, and of a summary what it does not show itself."""
    hidden = {f"{name}{end}" for name in _with_ends(frame) for end in ENDS}
    if not frame.columns.is_unique:
        return hidden
    if is_judged(frame):
        return {*frame} - {"name", *chosen_columns(frame)}
    return hidden | ({*frame} - {*chosen_columns(frame)} if is_summary(frame) else set())


def _formats(given: Any) -> dict[str, Format]:
    """The formats by column. UserError for what is no such mapping, as a choice of columns."""
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    listed = [given] if isinstance(given, str) else given
    raise UserError(
        f"formats is a mapping from a column to its format, {{'tokens_per_s': ',.0f'}}, not "
        f"{given!r:.80}; columns are chosen from the frame: lab.table(frame[{listed!r:.80}])"
    )


def _with_ends(frame: pd.DataFrame) -> list[str]:
    """The columns whose ends are columns, too."""
    there = {*map(str, frame)}
    return [name for name in map(str, frame) if {f"{name}{end}" for end in ENDS} <= there]


def _column(frame: pd.DataFrame, name: str, formats: Mapping[str, Format]) -> list[str]:
    """The cells of a column, each with the ends of its range where the frame has these."""
    ends = [f"{name}{end}" for end in ENDS] if name in _with_ends(frame) else []
    spec = _checked(name, frame[name], formats.get(name))
    if not ends or any(end in formats for end in ends):
        return [_written(value, spec or digits(frame[name])) for value in frame[name]]
    figures = frame[[name, *ends]].to_numpy(dtype=float)
    texts = [shown(value, spec) for value in figures.flat] if spec else values([*figures.flat])
    each = iter(texts)
    found = (with_ends(*three) for three in zip(each, each, each, strict=True))
    return [text.replace(" ", "\u00a0").replace("–", "\u2060–\u2060") for text in found]


def _checked(name: str, column: pd.Series, spec: Format | None) -> Format | None:
    """The format, if a value can be written so. UserError if none can."""
    there = [value for value in column.dropna() if not isinstance(value, str)]
    if spec is not None and not callable(spec) and there:
        try:
            shown(there[0], spec)
        except (ValueError, KeyError, IndexError, TypeError):
            words = "a format is such as '.2f', ',.0f' or '{:.1f} GiB'"
            raise UserError(f"table: {spec!r:.80} is no format of {name}; {words}") from None
    return spec


def _plain(text: object) -> str:
    """A cell without what makes it Markdown: links, escapes, spaces that line it up."""
    plain = html.unescape(_MARKUP.sub(r"\1\2", str(text)))
    return re.sub(r"\\([|<\\`*_{}\[\]#$])", r"\1", plain).strip("\u2007").translate(_BREAKABLE)


def _is_word(cell: str) -> bool:
    return cell != "–" and not re.match(r"[-+−±\d.,]", cell)


def _left_out(frame: pd.DataFrame, columns: int) -> str:
    """What a table of the first rows and columns of `frame` leaves out, in words."""
    there = len(frame.columns) - ("run" in frame.columns)
    parts = [f"the first {MOST_ROWS} of {len(frame):,} rows"] * (len(frame) > MOST_ROWS)
    parts += [f"the first {columns} of {there} columns"] * (there > columns)
    return f"Shown are {' and '.join(parts)}." if parts else ""


def _written(value: Any, spec: Format | None) -> str:
    """One cell, in which text of a record is no markup."""
    return in_markdown(value, shown(value, spec)) or cell(value, spec)


def _head(text: object) -> str:
    """The head of a column, or the text of a link, in which text of a record is no markup."""
    return in_markdown(text, str(text)) or str(text)


def figure(fig: Any = None, data: pd.DataFrame | None = None) -> None:
    """Show a matplotlib figure (default: the current one; an Axes or seaborn grid serves) and close
    it.

    Several panels are named (a), (b) and so on, for the caption.

    `data`: what is drawn, which readers of the HTML report can save as CSV, and see over each mark:
    its value and its row of `data`; a column `run` (folders of runs) makes the mark a link to the
    run's page. The cell has `#| label: fig-...`, `#| fig-cap: ...` and, where the caption does not
    describe the picture, `#| fig-alt: ...`.

    >>> fig, axes = plt.subplots()
    >>> _ = axes.plot([1, 2, 3])
    >>> lab.figure(fig)
    figure
    """
    import matplotlib.pyplot as plt
    from IPython.display import display

    from lsai_lab.report.panels import letter, panels
    from lsai_lab.report.tooltips import tooltips

    fig = plt.gcf() if fig is None else getattr(fig, "figure", fig)
    if not hasattr(fig, "savefig"):
        raise UserError(f"lab.figure shows a figure of matplotlib, not {fig!r:.80}")
    svg, png = io.StringIO(), io.BytesIO()
    letter(fig)
    fig.canvas.draw()
    box = fig.get_tightbbox().padded(0.03)
    fig.savefig(svg, format="svg", bbox_inches=box, metadata={"Date": None})
    fig.savefig(png, format="png", bbox_inches=box, dpi=PNG_DPI)
    width = round(int.from_bytes(png.getvalue()[16:20], "big") * 96 / PNG_DPI)
    over = "" if data is None else tooltips(fig, box, data.map(unmarked))
    if beside := panels(fig, box):
        over = f'<desc data-panels="{beside}"></desc>{over}'
    plt.close(fig)
    # Hundredths of a point are enough for paths, and half the size.
    drawing = re.sub(
        r'\bd="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg.getvalue()
    )
    bundle = {
        "image/svg+xml": drawing.replace("</svg>", f"{over}</svg>"),
        "image/png": png.getvalue(),
        "text/plain": "figure",
    }
    csv = (
        ""
        if data is None
        else as_csv(data.drop(columns="run", errors="ignore"), float_format="%.6g")
    )
    display(bundle, metadata={"image/png": {"width": width}, "lsai": {"csv": csv}}, raw=True)  # type: ignore[no-untyped-call]


def shown_once(fig: Any, data: pd.DataFrame | None = None) -> Any:
    """The matplotlib figure, shown once: as `figure` does where a cell ends with it, else below the
    cell, as any that is open. Saved it is whole: names beside the axes are part of it."""
    fig.savefig = functools.partial(fig.savefig, bbox_inches="tight")
    fig._ipython_display_ = functools.partial(figure, fig, data)
    return fig


def say(markdown: str, box: str = "") -> None:
    """Show a sentence whose numbers were computed: Markdown, with references (`@fig-speed`) and
    maths where wanted. Text of records, as `lab.load` gives it, is no markup in the report; in a
    notebook it is as it was recorded. `box`: a title; the text then stands below it, set off from
    the rest."""
    from IPython.display import display

    text = "\n> ".join(f"> **{box}.** {markdown}".split("\n")) if box else markdown
    # IPython's Markdown would open a text that begins with `http`.
    display({"text/markdown": text, "text/plain": text}, raw=True)  # type: ignore[no-untyped-call]


def run_link(text: object, run: AnyRun) -> str:
    """Markdown link from `text` to the notebook of a run, seen from the notebook's folder, where
    Jupyter starts it; in the report it leads to the run's page. A run that was stopped has no
    notebook: there the link leads to its summary, or to how it was planned. UserError if no run is
    meant."""
    known = isinstance(run, Path) or (isinstance(run, str) and os.path.isabs(run))
    folder = Path(str(run)) if known else folder_of(run)
    return _link(_head(text), folder)


def _led(text: str, run: Any) -> str:
    """`text` as a link to a run, or to the second of a pair beside the first; itself if none is
    meant."""
    *before, after = run if isinstance(run, tuple) else (run,)
    if not isinstance(after, (str, Path)):
        return text
    return _link(text, Path(after), "".join(f' "beside {page_name(each)}"' for each in before))


def _link(text: str, folder: Path, title: str = "") -> str:
    """`run_link` of text that is Markdown."""
    here, names = os.getcwd(), ("notebook.ipynb", "summary.json", "run.json")
    name = next((name for name in names if (folder / name).exists()), names[0])
    if page := os.environ.get(PAGE_FOLDER):  # becomes a page, and each run has one there
        here, name = page, names[0]
    words = text.lstrip("\u2007")  # what lines it up is no part of the link
    before = text[: len(text) - len(words)]
    return f"{before}[{words}]({quote(os.path.relpath(folder, here))}/{name}{title})"


def _is_numeric(column: pd.Series) -> bool:
    number = re.compile(r"[-+]?[\d.,]+ ?\D{0,3}$")
    numbers = [isinstance(value, Number) or number.match(str(value)) for value in column.dropna()]
    return bool(numbers) and all(numbers)
