"""An executed chapter made fit for the book: code and outputs as Markdown with Quarto's labels, for
both engines.

Text of foreign records is escaped where it is loaded (`plain.py`). Outputs keep Markdown, pictures
and plain text, of HTML the text of tables, and line ends of one kind, so that no line is read as a
header of settings, an included file or the end of a box. What Markdown itself can carry (raw HTML,
`javascript:` links, pictures from elsewhere) is not read, or removed by `reports/book.lua`, which
both engines run over the parsed text.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

from lsai_core.base.files import write_json, write_text
from lsai_lab.project.strip import KERNEL
from lsai_lab.report.explore.scripts import MIME as EXPLORE_MIME
from lsai_lab.report.explore.scripts import NAMES, write_page_files
from lsai_lab.report.hidden_names import HiddenNames
from lsai_lab.report.html_tables import tables
from lsai_lab.report.numbers import Number, bound, collected, page_of
from lsai_lab.report.pictures import readable_png, safe_svg
from lsai_lab.runs.pages import page_name

_ANSI = re.compile(
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|(?m:^.*\r(?=.))"
)
_OPTIONS = {"label", "fig-cap", "tbl-cap", "fig-alt", "echo", "include", "output"}
_SKIPPED = {"remove-cell", "parameters", "injected-parameters", "papermill-error-cell-tag"}


def to_markdown(executed: Path, target: Path, problem: str | None = None) -> str | None:
    """Write the executed notebook `executed` to `target` as a notebook of Markdown cells only.

    Its pictures go to `files/` beside `target`, the data of its figures and tables to `data/`.
    `problem` says why the chapter did not complete; it is shown below the title. Returns `problem`,
    or why the notebook cannot be read, or None.
    """
    import nbformat  # takes a second, which a report that changed nothing can do without

    texts = list[str]()
    try:
        notebook = nbformat.read(executed, as_version=4)  # type: ignore[no-untyped-call]
        numbers = collected(notebook)
        problem = problem or _warning(notebook) or _unknown_option(notebook)
        names = HiddenNames()
        for at, cell in enumerate(notebook.cells):
            if not _SKIPPED & set(cell.metadata.get("tags", [])):
                code, text = _cell(cell, target.parent, f"{target.stem}-{at}", numbers)
                if cell.cell_type == "code" and not code:
                    names.hide(cell.source)
                texts += [fenced(names.shown(code), "python")] if code else []
                texts += [text] if text else []
    except Exception as error:  # nbformat raises many kinds for a damaged file
        problem, texts = (
            problem or f"It could not be read: {str(error)[:500]}",
            [f"# {executed.stem}"],
        )
    if problem:
        texts.insert(1, f"**This chapter did not complete.**\n\n{fenced(problem)}")
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(True)} for text in texts
    ]
    write_json(
        target,
        {"nbformat": 4, "nbformat_minor": 4, "metadata": {"kernelspec": KERNEL}, "cells": cells},
    )
    return problem


def _warning(notebook: Any) -> str | None:
    """The first warning that a cell printed, without the place in a file of this machine."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = [each.text for each in outputs if each.get("name") == "stderr"]
    found = re.search(r"(?m)\b\w*Warning: .*", "\n".join(said))
    return f"A cell printed a warning. {found[0]}" if found else None


def _options(cell: Any) -> dict[str, Any]:
    """A cell's options: the lines that begin with `#|`, which are YAML."""
    asked = yaml.safe_load("".join(re.findall(r"(?m)^#\|(.*\n?)", cell.source)))
    return asked if isinstance(asked, dict) else {}


def _unknown_option(notebook: Any) -> str | None:
    """Names the first cell option that Quarto may know and a chapter has no use for."""
    for cell in notebook.cells:
        for name in _options(cell) if cell.cell_type == "code" else {}:
            if name not in _OPTIONS:
                return (
                    f"The cell option {name} is not known here; {', '.join(sorted(_OPTIONS))} are."
                )
    return None


def _cell(cell: Any, folder: Path, name: str, numbers: dict[str, Number]) -> tuple[str, str]:
    """A cell's code, unless `echo: false`, and what it showed, unless `output: false`; neither with
    `include: false`. The first picture or table has the label, if any."""
    if cell.cell_type != "code":
        return "", bound(str(cell.source), numbers)
    asked = _options(cell)
    if not asked.get("include", True):
        return "", ""
    code, label = (
        re.sub(r"(?m)^#\|.*\n?", "", cell.source).strip(),
        re.sub(r"[^\w-]", "-", str(asked.get("label", ""))),
    )
    wanted, caption, parts = (
        {"fig": "![](", "tbl": "|"}.get(label[:3]),
        str(asked.get(f"{label[:3]}-cap", "")),
        [],
    )
    for number, output in enumerate(cell.outputs if asked.get("output", True) else []):
        text = _markdown(
            output, folder / "files" / f"{name}-{number}", str(asked.get("fig-alt") or caption)
        )
        if wanted and text.startswith(wanted):
            if (
                csv := output.metadata.get("text/markdown", output.metadata)
                .get("lsai", {})
                .get("csv")
            ):
                write_text(folder / "data" / f"{label}.csv", csv)
            link = f" [Data (CSV)](data/{label}.csv){{.csv}}" * bool(csv)
            text, wanted = f"::: {{#{label}}}\n{text}\n\n{caption}{link}\n:::", None
        parts.append(text)
    return code * bool(asked.get("echo", True)), "\n\n".join(parts)


def fenced(text: str, kind: str = "output") -> str:
    """Terminal output or code as a block: no colour codes, carriage returns applied, of long
    outputs the end."""
    lines = _ANSI.sub("", text.replace("\r\n", "\n")).rstrip().split("\n")
    lines = ["[...]", *lines[-60:]] if kind == "output" and len(lines) > 60 else lines
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return "\n".join([f"{fence}{{.{kind}}}", *lines, fence])


def _markdown(output: Any, picture: Path, alt: str) -> str:
    """One output as Markdown that stays inside: it closes no box, opens no header of settings,
    includes no file."""
    if output.output_type == "stream":  # warnings name folders of a machine: `_warning`
        return fenced(output.text) if output.name == "stdout" else ""
    if output.output_type == "error":
        return fenced(
            "\n".join(
                ["This cell failed.", f"{output.ename}: {output.evalue}", "", *output.traceback]
            )
        )
    data, alt = output.data, re.sub(r"[\\\"*`{}\[\]$@]", "", alt) or "output of the cell above"
    shown = data.get(EXPLORE_MIME)
    explored = isinstance(shown, dict) and shown.get("name") in NAMES
    if explored:
        with contextlib.suppress(TypeError, ValueError):  # of a damaged one the picture stays
            kept = json.loads(shown.get("data"))
            write_page_files(shown["name"], kept, picture.parents[1] / "explore")
        alt = str(shown["name"])
    if "text/markdown" in data:
        text = "\n".join(data["text/markdown"].splitlines())  # also at CR, form feeds and U+2028
        text = re.sub(r"(?m)^[> \t]*(:{3,})", r"\\\1", text.replace("{{<", "{{ <"))
        run = re.compile(r'\]\(([^()\s]+)/notebook\.ipynb(?: "beside ([^()\s"]+)")?\)')
        text = run.sub(lambda found: f"]({page_of(page_name(unquote(found[1])), found[2])})", text)
        return re.sub(r"(?m)^(---|\.\.\.)\s*?$", "* * *", text).strip()
    drawing = safe_svg(data.get("image/svg+xml", ""))
    drawn = {".svg": drawing, ".png": readable_png(data.get("image/png", ""))}
    if not any(drawn.values()):
        rows = tables(str(data.get("text/html", "")))
        return rows or (fenced(data["text/plain"]) if data.get("text/plain") else "")
    picture.parent.mkdir(parents=True, exist_ok=True)
    for suffix, content in drawn.items():  # both: Word shows no SVG (reports/book.lua)
        if content:
            picture.with_suffix(suffix).write_bytes(content)
    picture = picture.with_suffix(".svg" if drawing else ".png")
    shown_as = f'![](files/{picture.name}){{fig-alt="{alt}" alt="{alt}"}}'
    return f"::: {{.explore}}\n{alt}\n\n{shown_as}\n:::" if explored else shown_as
